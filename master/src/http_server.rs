//! The HTTP/1 server that metrics, probes and the dashboard share.
//!
//! **Invariant:** a client can use few resources: few connections, one short request on each, and a
//! deadline. Clients of one address don't keep those of others waiting.

use std::convert::Infallible;
use std::time::Duration;

use http::header::CONTENT_TYPE;
use http::{HeaderValue, Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tracing::{debug, warn};

use crate::connection_limit::{ConnectionLimit, Limits};

/// Answers each request with `answer`, until the future is dropped. Each connection has one request
/// and is closed after `REQUEST_TIMEOUT`.
pub(crate) async fn serve<A, F>(listener: TcpListener, answer: A) -> Infallible
where
    A: Fn(Request<Incoming>) -> F + Clone + Send + 'static,
    F: Future<Output = Response<String>> + Send + 'static,
{
    let limits = Limits { total: CONNECTIONS_MAX, per_address: CONNECTIONS_PER_ADDRESS_MAX };
    let limit = ConnectionLimit::new(limits);
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                let (permit, evicted) = limit.admit(peer.ip());
                let answer = answer.clone();
                tokio::spawn(async move {
                    let request =
                        tokio::time::timeout(REQUEST_TIMEOUT, serve_connection(stream, answer));
                    tokio::select! {
                        served = request => match served {
                            Ok(Ok(())) => {}
                            Ok(Err(error)) => debug!(%error, "a request was not answered"),
                            Err(_) => debug!("a request took too long"),
                        },
                        _ = evicted => debug!(%peer, "too many connections; this one is closed"),
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

async fn serve_connection<A, F>(stream: TcpStream, answer: A) -> Result<(), hyper::Error>
where
    A: Fn(Request<Incoming>) -> F,
    F: Future<Output = Response<String>>,
{
    let service = service_fn(move |request| {
        let response = answer(request);
        async move { Ok::<_, Infallible>(response.await) }
    });
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .keep_alive(false)
        .max_headers(HEADERS_MAX)
        .max_buf_size(HEAD_BYTES_MAX)
        .serve_connection(TokioIo::new(stream), service)
        .await
}

/// A response with a body of this type.
pub(crate) fn response(
    status: StatusCode,
    content_type: &'static str,
    body: String,
) -> Response<String> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

/// Content type of a text.
pub(crate) const TEXT: &str = "text/plain; charset=utf-8";
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
const CONNECTIONS_MAX: usize = 64;
/// Scrapers and the two probes of a pod need one connection each at a time, a browser six.
const CONNECTIONS_PER_ADDRESS_MAX: usize = 8;
/// The minimum that hyper accepts.
const HEAD_BYTES_MAX: usize = 8192;
const HEADERS_MAX: usize = 64;
const HEAD_TIMEOUT: Duration = Duration::from_secs(5);
/// More than workers need to say what they do.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(12);
