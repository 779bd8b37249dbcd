//! HTTP server of the page.
//!
//! | path | |
//! |---|---|
//! | `GET /`, and the page's scripts and styles | the page, without anything of the job |
//! | `GET /api/job` | the job as JSON; with `?wait` after a second, or at the end of the job |
//! | `POST /api/inspect` | `{}`; what the workers do, as text, after some seconds at most |
//! | `POST /api/scale` | `{"num_workers": N}` |
//! | `POST /api/stop` | `{}` |
//!
//! **Invariants:** what is below `/api` needs the key, as a bearer token: no cookie, so that no
//! other page can use it. A request whose `Host` is not an address of this machine is refused,
//! because another page may have resolved its own name to it (DNS rebinding), and so is one whose
//! `Origin` is another page. Nothing of a request is logged.

use std::convert::Infallible;
use std::future::poll_fn;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use http::header::{
    ALLOW, AUTHORIZATION, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HOST, HeaderName,
    ORIGIN, REFERRER_POLICY, WWW_AUTHENTICATE, X_CONTENT_TYPE_OPTIONS,
};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use hyper::body::{Body as _, Incoming};
use serde::Deserialize;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};

use super::board::Board;
use super::key::DashboardKey;
use super::page::{Asset, assets};
use super::request::{PageCommand, PageRequest};
use crate::http_server::{self, TEXT, response};

/// What the server serves.
#[derive(Debug)]
pub(super) struct Site {
    pub(super) board: Arc<Board>,
    pub(super) key: DashboardKey,
    pub(super) requests: mpsc::Sender<PageRequest>,
}

/// Serves the page until the future is dropped.
pub(super) async fn serve(listener: TcpListener, site: Arc<Site>) -> Infallible {
    http_server::serve(listener, move |request| {
        let site = Arc::clone(&site);
        async move { site.answer(request).await.map_or_else(Refusal::into_response, secured) }
    })
    .await
}

/// Why a request is refused.
#[derive(Debug)]
struct Refusal {
    status: StatusCode,
    text: String,
    header: Option<(HeaderName, &'static str)>,
}

impl Site {
    async fn answer(&self, request: Request<Incoming>) -> Result<Response<String>, Refusal> {
        check_origin(request.headers())?;
        let path = request.uri().path();
        if !path.starts_with("/api/") {
            let asset = assets().find(|asset| asset.path == path).ok_or_else(not_found)?;
            check_method(&request, &[Method::GET, Method::HEAD], "GET, HEAD")?;
            return Ok(asset_response(asset));
        }
        self.check_key(request.headers())?;
        match path {
            "/api/job" => {
                check_method(&request, &[Method::GET], "GET")?;
                let waits = request.uri().query() == Some("wait");
                self.job(waits).await
            }
            "/api/inspect" => {
                let Nothing {} = json_of(request).await?;
                self.command(PageCommand::Inspect).await
            }
            "/api/scale" => {
                let Scale { num_workers } = json_of(request).await?;
                self.command(PageCommand::Scale(num_workers)).await
            }
            "/api/stop" => {
                let Nothing {} = json_of(request).await?;
                self.command(PageCommand::Stop).await
            }
            _ => Err(not_found()),
        }
    }

    fn check_key(&self, headers: &HeaderMap) -> Result<(), Refusal> {
        let Some(shown) = headers.get(AUTHORIZATION) else {
            let text = "the request has no key: open the link that `elasticdl dashboard` prints";
            return Err(Refusal {
                header: Some((WWW_AUTHENTICATE, "Bearer")),
                ..refused(StatusCode::UNAUTHORIZED, text)
            });
        };
        if self.key.authorizes(shown.as_bytes()) {
            return Ok(());
        }
        let text =
            "this key does not open this job: open the link that `elasticdl dashboard` prints";
        Err(refused(StatusCode::FORBIDDEN, text))
    }

    async fn job(&self, waits: bool) -> Result<Response<String>, Refusal> {
        if waits {
            self.board.await_end(WAIT).await;
        }
        let json = self.board.to_json();
        let json = json.ok_or_else(|| {
            refused(StatusCode::SERVICE_UNAVAILABLE, "The job has not started yet.")
        })?;
        Ok(response(StatusCode::OK, "application/json", json))
    }

    async fn command(&self, command: PageCommand) -> Result<Response<String>, Refusal> {
        let (reply, answer) = oneshot::channel();
        let ending = || refused(StatusCode::SERVICE_UNAVAILABLE, "the job is ending");
        self.requests.try_send(PageRequest { command, reply }).map_err(|_| ending())?;
        let text = answer
            .await
            .map_err(|_| ending())?
            .map_err(|why| refused(StatusCode::BAD_REQUEST, &why))?;
        Ok(response(StatusCode::OK, TEXT, text))
    }
}

/// The body of a request to scale the job.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Scale {
    num_workers: u32,
}

/// The body of a request to stop or to inspect the job.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Nothing {}

/// Checks that the request is for this machine, and comes from this server's page or from no page.
fn check_origin(headers: &HeaderMap) -> Result<(), Refusal> {
    let mut hosts = headers.get_all(HOST).iter();
    let host = match (hosts.next().map(HeaderValue::to_str), hosts.next()) {
        (Some(Ok(host)), None) if is_of_this_machine(host) => host,
        _ => {
            let text = "the request's host is not this machine: open the page as localhost or by \
                        a loopback address";
            return Err(refused(StatusCode::FORBIDDEN, text));
        }
    };
    let is_own = |origin: &HeaderValue| {
        origin.to_str().is_ok_and(|origin| origin.strip_prefix("http://") == Some(host))
    };
    if headers.get_all(ORIGIN).iter().all(is_own) {
        return Ok(());
    }
    Err(refused(StatusCode::FORBIDDEN, "the request comes from another page"))
}

/// Whether `host`, with or without a port, is `localhost` or a loopback address. The port may be
/// that of a tunnel.
fn is_of_this_machine(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let bare = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    name.eq_ignore_ascii_case("localhost")
        || bare.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

fn check_method<T>(
    request: &Request<T>,
    allowed: &[Method],
    names: &'static str,
) -> Result<(), Refusal> {
    if allowed.contains(request.method()) {
        return Ok(());
    }
    let text = format!("{} supports only {names}", request.uri().path());
    Err(Refusal { header: Some((ALLOW, names)), ..refused(StatusCode::METHOD_NOT_ALLOWED, &text) })
}

/// The JSON that a POST contains.
async fn json_of<T: for<'a> Deserialize<'a>>(request: Request<Incoming>) -> Result<T, Refusal> {
    check_method(&request, &[Method::POST], "POST")?;
    let kind = request.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
    // A form of another page can't have this type.
    if kind.and_then(|kind| kind.split(';').next()).map(str::trim) != Some("application/json") {
        let text = "the content-type must be application/json";
        return Err(refused(StatusCode::UNSUPPORTED_MEDIA_TYPE, text));
    }
    let mut body = request.into_body();
    let mut bytes = Vec::new();
    while let Some(frame) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
        let frame = frame.map_err(|_| refused(StatusCode::BAD_REQUEST, "the body has no end"))?;
        if let Ok(data) = frame.into_data() {
            bytes.extend_from_slice(&data);
        }
        if bytes.len() > BODY_BYTES_MAX {
            let text = format!("the body is longer than {BODY_BYTES_MAX} bytes");
            return Err(refused(StatusCode::PAYLOAD_TOO_LARGE, &text));
        }
    }
    serde_json::from_slice(&bytes)
        .map_err(|error| refused(StatusCode::BAD_REQUEST, &format!("the body is wrong: {error}")))
}

impl Refusal {
    fn into_response(self) -> Response<String> {
        let Self { status, text, header } = self;
        let mut response = response(status, TEXT, text + "\n");
        if let Some((name, value)) = header {
            response.headers_mut().insert(name, HeaderValue::from_static(value));
        }
        secured(response)
    }
}

fn refused(status: StatusCode, text: &str) -> Refusal {
    Refusal { status, text: text.to_owned(), header: None }
}

fn not_found() -> Refusal {
    refused(StatusCode::NOT_FOUND, "not found; the page is at /")
}

fn asset_response(Asset { content_type, text, .. }: Asset) -> Response<String> {
    response(StatusCode::OK, content_type, text.to_owned())
}

/// Adds what tells the browser to load and send nothing else.
fn secured(mut response: Response<String>) -> Response<String> {
    let headers = [
        (CACHE_CONTROL, "no-store"),
        (CONTENT_SECURITY_POLICY, POLICY),
        (REFERRER_POLICY, "no-referrer"),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ];
    for (name, value) in headers {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

const BODY_BYTES_MAX: usize = 1024;
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
                      img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
/// Shorter than the deadline of a request.
const WAIT: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests;
