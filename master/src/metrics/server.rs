//! HTTP server of the master: `GET /metrics`, and the probes of a pod: `/healthz` (the process is
//! alive) and `/readyz` (the master accepts workers).

use std::convert::Infallible;
use std::sync::Arc;

use http::header::{ACCEPT, ALLOW};
use http::{HeaderValue, Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::http_server::{self, TEXT, response};
use crate::job::Snapshot;

/// Newest snapshot of the job; `None` before the first one.
pub(crate) type Known = watch::Receiver<Option<Snapshot>>;

/// Whether the master accepts workers now.
pub(crate) type Ready = Arc<dyn Fn() -> bool + Send + Sync>;

/// Serves the metrics of the snapshots in `known`, if there are any to serve, and the probes, until
/// the future is dropped.
pub(crate) async fn serve(listener: TcpListener, known: Option<Known>, ready: Ready) -> Infallible {
    http_server::serve(listener, move |request| {
        std::future::ready(respond(&request, known.as_ref(), ready()))
    })
    .await
}

/// Ignores the body of the request.
fn respond(request: &Request<Incoming>, known: Option<&Known>, is_ready: bool) -> Response<String> {
    let text = |status, body| response(status, TEXT, body);
    let path = request.uri().path();
    if ![HEALTH, PATH, READY].contains(&path) {
        return text(
            StatusCode::NOT_FOUND,
            format!("not found; the paths are {PATH}, {HEALTH} and {READY}\n"),
        );
    }
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let mut refusal =
            text(StatusCode::METHOD_NOT_ALLOWED, format!("{path} supports only GET and HEAD\n"));
        refusal.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return refusal;
    }
    match path {
        HEALTH => return text(StatusCode::OK, "ok\n".into()),
        READY if is_ready => return text(StatusCode::OK, "ok\n".into()),
        READY => {
            return text(
                StatusCode::SERVICE_UNAVAILABLE,
                "this master does not lead the job\n".into(),
            );
        }
        _ => {}
    }
    let Some(known) = known else {
        return text(
            StatusCode::FORBIDDEN,
            "metrics are not served: the job was submitted without --metrics-from\n".into(),
        );
    };
    let (format, to_text): (_, fn(&Snapshot) -> String) = if accepts_open_metrics(request) {
        (OPEN_METRICS, super::to_text)
    } else {
        (PLAIN, super::to_plain_text)
    };
    let page = known.borrow().as_ref().map(to_text);
    let Some(page) = page else {
        return text(StatusCode::SERVICE_UNAVAILABLE, "the job has not started yet\n".into());
    };
    response(StatusCode::OK, format, page)
}

/// Whether the client accepts OpenMetrics, as Prometheus does, and prefers nothing else.
fn accepts_open_metrics(request: &Request<Incoming>) -> bool {
    let accepted = request.headers().get_all(ACCEPT).iter();
    let texts = accepted.filter_map(|value| value.to_str().ok());
    let mut quality = [0.0_f32, 0.0];
    for range in texts.flat_map(|text| text.split(',')) {
        let mut parts = range.split(';').map(str::trim);
        let which = match parts.next() {
            Some("application/openmetrics-text") => 0,
            Some("text/plain" | "text/*" | "*/*") => 1,
            _ => continue,
        };
        let given = parts.find_map(|part| part.strip_prefix("q=")?.trim().parse().ok());
        quality[which] = quality[which].max(given.unwrap_or(1.0));
    }
    quality[0] > 0.0 && quality[0] >= quality[1]
}

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const PATH: &str = "/metrics";
const PLAIN: &str = "text/plain; version=0.0.4; charset=utf-8";
/// Path of the liveness probe.
pub(crate) const HEALTH: &str = "/healthz";
/// Path of the readiness probe.
pub(crate) const READY: &str = "/readyz";
