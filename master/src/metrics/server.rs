//! HTTP server of the master: `GET /metrics`, and the probes of a pod: `/healthz` (the process is
//! alive) and `/readyz` (the master accepts workers).
//!
//! **Invariant:** a client can use few resources: few connections, one short request without a body
//! on each, and a deadline.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use http::header::{ALLOW, CONTENT_TYPE};
use http::{HeaderValue, Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tracing::{debug, warn};

use crate::job::Snapshot;

/// Newest snapshot of the job; `None` before the first one.
pub(crate) type Known = watch::Receiver<Option<Snapshot>>;

/// Whether the master accepts workers now.
pub(crate) type Ready = Arc<dyn Fn() -> bool + Send + Sync>;

/// Serves the metrics of the snapshots in `known`, until the future is dropped.
pub(crate) async fn serve(listener: TcpListener, known: Known, ready: Ready) -> Infallible {
    let permits = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let permit =
            Arc::clone(&permits).acquire_owned().await.expect("the semaphore is never closed");
        match listener.accept().await {
            Ok((stream, _)) => {
                let (known, ready) = (known.clone(), Arc::clone(&ready));
                tokio::spawn(async move {
                    let served =
                        tokio::time::timeout(REQUEST_TIMEOUT, answer(stream, known, ready));
                    match served.await {
                        Ok(Ok(())) => {}
                        Ok(Err(error)) => debug!(%error, "a request for metrics was not answered"),
                        Err(_) => debug!("a request for metrics took too long"),
                    }
                    drop(permit);
                });
            }
            Err(error) => {
                // Usually the limit of open files. The pause keeps the loop from spinning.
                warn!(%error, "can't accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn answer(stream: TcpStream, known: Known, ready: Ready) -> Result<(), hyper::Error> {
    let page = service_fn(move |request| {
        let response = respond(&request, &known, ready());
        async { Ok::<_, Infallible>(response) }
    });
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_TIMEOUT)
        .keep_alive(false)
        .max_headers(HEADERS_MAX)
        .max_buf_size(HEAD_BYTES_MAX)
        .serve_connection(TokioIo::new(stream), page)
        .await
}

/// Ignores the body of the request.
fn respond(request: &Request<Incoming>, known: &Known, is_ready: bool) -> Response<String> {
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
    let page = known.borrow().as_ref().map(super::to_text);
    let Some(page) = page else {
        return text(StatusCode::SERVICE_UNAVAILABLE, "the job has not started yet\n".into());
    };
    let mut response = text(StatusCode::OK, page);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(OPEN_METRICS));
    response
}

fn text(status: StatusCode, body: String) -> Response<String> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    let plain = HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(CONTENT_TYPE, plain);
    response
}

const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Scrapers and the two probes of a pod need one connection each at a time.
const CONNECTIONS_MAX: usize = 8;
/// The minimum that hyper accepts.
const HEAD_BYTES_MAX: usize = 8192;
const HEADERS_MAX: usize = 64;
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const PATH: &str = "/metrics";
/// Path of the liveness probe.
pub(crate) const HEALTH: &str = "/healthz";
/// Path of the readiness probe.
pub(crate) const READY: &str = "/readyz";
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
