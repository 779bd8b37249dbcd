//! The REST API of an MLflow tracking server.

use std::time::Duration;

use reqwest::header::CONTENT_TYPE;
use reqwest::{RequestBuilder, StatusCode};
use serde_json::Value;

/// Why a tracking server was not used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrackingError {
    /// The server has refused a request.
    #[error("{path}: the server answers {status}: {message}")]
    Refused {
        /// Path of the API.
        path: String,
        /// Status code.
        status: u16,
        /// The server's message.
        message: String,
    },
    /// The server has not answered in time.
    #[error("no answer in time")]
    Slow,
    /// An answer is not one of MLflow.
    #[error("the answer has no {0}; is this an MLflow server?")]
    Unexpected(String),
    /// There is no answer.
    #[error("{path}: {error}")]
    Unreachable {
        /// Path of the API.
        path: String,
        /// Error of the connection.
        error: String,
    },
    /// The server's address is not that of a server.
    #[error(
        "MLFLOW_TRACKING_URI is `{0}`; it must be the address of a tracking server, for example \
         http://127.0.0.1:5000"
    )]
    Uri(String),
}

impl TrackingError {
    /// Whether what was asked for does not exist.
    pub(super) fn is_absent(&self) -> bool {
        matches!(self, Self::Refused { status: 404, .. })
    }
}

/// A client of one server.
#[derive(Debug)]
pub(super) struct Client {
    http: reqwest::Client,
    /// Address of the API, with a final `/`.
    api: String,
    credentials: Credentials,
}

enum Credentials {
    None,
    Password { user: String, password: Option<String> },
    Token(String),
}

impl std::fmt::Debug for Credentials {
    /// Omits the secrets.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::None => "None",
            Self::Password { .. } => "Password",
            Self::Token(_) => "Token",
        })
    }
}

impl Client {
    /// Reads the address of the server, and the credentials for it; `None` without an address.
    pub(super) fn read(
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<Self>, TrackingError> {
        let Some(uri) = variable("MLFLOW_TRACKING_URI") else { return Ok(None) };
        let is_server = reqwest::Url::parse(&uri)
            .is_ok_and(|url| ["http", "https"].contains(&url.scheme()) && url.has_host());
        if !is_server {
            return Err(TrackingError::Uri(uri));
        }
        let user = variable("MLFLOW_TRACKING_USERNAME");
        let credentials = match (variable("MLFLOW_TRACKING_TOKEN"), user) {
            (Some(token), _) => Credentials::Token(token),
            (None, Some(user)) => {
                Credentials::Password { user, password: variable("MLFLOW_TRACKING_PASSWORD") }
            }
            (None, None) => Credentials::None,
        };
        // Fails if the process has a provider already, which is used then.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let http = reqwest::Client::builder().timeout(REQUEST_TIMEOUT).build();
        let http = http.map_err(|error| unreachable_at(&uri, &error))?;
        let api = format!("{}/api/2.0/mlflow/", uri.trim_end_matches('/'));
        Ok(Some(Self { http, api, credentials }))
    }

    /// The server's address.
    pub(super) fn address(&self) -> &str {
        self.api.trim_end_matches("/api/2.0/mlflow/")
    }

    pub(super) async fn get(
        &self,
        path: &str,
        query: &[(&str, &str)],
    ) -> Result<Value, TrackingError> {
        let url = reqwest::Url::parse_with_params(&format!("{}{path}", self.api), query);
        let url = url.map_err(|_| TrackingError::Uri(self.api.clone()))?;
        self.call(path, self.http.get(url)).await
    }

    pub(super) async fn post(&self, path: &str, body: &Value) -> Result<Value, TrackingError> {
        let request = self.http.post(format!("{}{path}", self.api));
        let request = request.header(CONTENT_TYPE, "application/json").body(body.to_string());
        self.call(path, request).await
    }

    async fn call(&self, path: &str, request: RequestBuilder) -> Result<Value, TrackingError> {
        let request = match &self.credentials {
            Credentials::None => request,
            Credentials::Password { user, password } => request.basic_auth(user, password.as_ref()),
            Credentials::Token(token) => request.bearer_auth(token),
        };
        let answer = request.send().await.map_err(|error| unreachable_at(path, &error))?;
        let status = answer.status();
        let body = answer.bytes().await.map_err(|error| unreachable_at(path, &error))?;
        let body: Value = serde_json::from_slice(&body).unwrap_or_default();
        if status == StatusCode::OK {
            return Ok(body);
        }
        let message = body["message"].as_str().unwrap_or("no message");
        let message = message.chars().take(MESSAGE_LEN_MAX).collect();
        Err(TrackingError::Refused { path: path.into(), status: status.as_u16(), message })
    }
}

/// The text at a JSON pointer of an answer.
pub(super) fn text(answer: &Value, pointer: &str) -> Result<String, TrackingError> {
    let found = answer.pointer(pointer).and_then(Value::as_str);
    found.map(str::to_owned).ok_or_else(|| TrackingError::Unexpected(pointer.into()))
}

/// The innermost error, which says what has failed.
fn unreachable_at(path: &str, error: &dyn std::error::Error) -> TrackingError {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    TrackingError::Unreachable { path: path.into(), error: innermost.to_string() }
}

const MESSAGE_LEN_MAX: usize = 500;
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
