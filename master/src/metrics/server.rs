//! The HTTP side: one page, `GET /metrics`.
//!
//! **Invariant:** whoever reaches the port can use up little: few connections, one short request on each, no body, a
//! deadline.

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

/// What is known of the job; `None` before its first moment.
pub(crate) type Known = watch::Receiver<Option<Snapshot>>;

/// Serves the metrics of the job whose snapshots come through `known`, until it is dropped.
pub(crate) async fn serve(listener: TcpListener, known: Known) -> Infallible {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let place = Arc::clone(&places).acquire_owned().await.expect("nobody closes this semaphore");
        match listener.accept().await {
            Ok((stream, _)) => {
                let known = known.clone();
                tokio::spawn(async move {
                    let served = tokio::time::timeout(REQUEST_TIMEOUT, answer(stream, known));
                    match served.await {
                        Ok(Ok(())) => {}
                        Ok(Err(error)) => debug!(%error, "a request for metrics was not answered"),
                        Err(_) => debug!("a request for metrics took too long"),
                    }
                    drop(place);
                });
            }
            Err(error) => {
                // Most often the limit of open files: it passes, but not sooner for being asked at once.
                warn!(%error, "can't accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn answer(stream: TcpStream, known: Known) -> Result<(), hyper::Error> {
    let page = service_fn(move |request| {
        let response = respond(&request, &known);
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

/// The body of a request is not looked at.
fn respond(request: &Request<Incoming>, known: &Known) -> Response<String> {
    if request.uri().path() != PATH {
        return text(StatusCode::NOT_FOUND, format!("there is only {PATH} here\n"));
    }
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        let mut refusal = text(StatusCode::METHOD_NOT_ALLOWED, format!("{PATH} can only be read\n"));
        refusal.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return refusal;
    }
    let page = known.borrow().as_ref().map(super::to_text);
    let Some(page) = page else {
        return text(StatusCode::SERVICE_UNAVAILABLE, "the job is about to begin\n".into());
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
/// A scraper needs one, now and then.
const CONNECTIONS_MAX: usize = 8;
/// The least that hyper takes.
const HEAD_BYTES_MAX: usize = 8192;
const HEADERS_MAX: usize = 64;
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const PATH: &str = "/metrics";
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
