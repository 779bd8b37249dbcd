//! Classification of storage errors, transient or permanent, and their texts.

use std::error::Error;
use std::io;

use object_store::client::{HttpError, HttpErrorKind};
use rustix::io::Errno;

use super::retry::Transient;

/// Whether the same request may succeed later: the store was not reached, did not answer in time,
/// or returned a status that asks for a retry.
pub(super) fn is_transient(error: &object_store::Error) -> bool {
    let object_store::Error::Generic { source, .. } = error else { return false };
    let mut cause: Option<&(dyn Error + 'static)> = Some(source.as_ref());
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<HttpError>() {
            return !is_never_sent(error);
        }
        if let Some(error) = error.downcast_ref::<io::Error>() {
            return error.is_transient();
        }
        cause = error.source();
    }
    let text = source.to_string();
    match status(&text) {
        Some(status) => {
            matches!(status, 408 | 429 | 500..)
                || (status == 400 && text.contains("RequestTimeout"))
        }
        None => text.contains(ANSWERED_WITH_ERROR),
    }
}

/// A short text for an error, with its root cause, as the outer texts of some errors say little.
pub(super) fn reason(error: &object_store::Error) -> String {
    let mut cause: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if let Some(http) = error.downcast_ref::<HttpError>() {
            let mut last: &(dyn Error + 'static) = http;
            while let Some(deeper) = last.source() {
                last = deeper;
            }
            let is_plain = is_never_sent(http) && last.to_string().contains("scheme");
            let advice = if is_plain { PLAIN_HTTP } else { "" };
            return format!("no answer: {last}{advice}");
        }
        cause = error.source();
    }
    let text = error.to_string();
    match error {
        object_store::Error::PermissionDenied { .. } => {
            format!("permission denied: {}", body(&text))
        }
        object_store::Error::Unauthenticated { .. } => {
            format!("not authenticated; are the credentials right and not expired? {}", body(&text))
        }
        _ => match status(&text) {
            Some(status) => format!("the store answered with status {status}: {}", body(&text)),
            None => text,
        },
    }
}

impl Transient for io::Error {
    /// Errors of a network file system whose server is unreachable, and temporary read errors of a
    /// disk.
    fn is_transient(&self) -> bool {
        let transient = [
            Errno::CONNABORTED,
            Errno::CONNREFUSED,
            Errno::CONNRESET,
            Errno::HOSTDOWN,
            Errno::HOSTUNREACH,
            Errno::IO,
            Errno::NETDOWN,
            Errno::NETRESET,
            Errno::NETUNREACH,
            Errno::NOLINK,
            Errno::NOTCONN,
            Errno::REMOTEIO,
            Errno::SHUTDOWN,
            Errno::STALE,
            Errno::TIMEDOUT,
        ];
        Errno::from_io_error(self).is_some_and(|errno| transient.contains(&errno))
    }
}

/// Whether the request could not be built. No retry can succeed.
fn is_never_sent(error: &HttpError) -> bool {
    let is_builder = |error: &(dyn Error + 'static)| {
        error.downcast_ref::<reqwest::Error>().is_some_and(reqwest::Error::is_builder)
    };
    error.kind() == HttpErrorKind::Unknown && error.source().is_some_and(is_builder)
}

/// HTTP status code in an error's text.
fn status(text: &str) -> Option<u16> {
    let (_, rest) = text.split_once("status code: ")?;
    rest.get(..3)?.parse().ok()
}

/// The response body in an error's text, as one line of limited length.
fn body(text: &str) -> String {
    let body =
        text.split_once("status code: ").map_or(text, |(_, rest)| rest.get(3..).unwrap_or(rest));
    let line: String =
        body.trim().chars().map(|c| if c.is_control() { ' ' } else { c }).take(300).collect();
    line
}

const ANSWERED_WITH_ERROR: &str = "Server returned error response";
const PLAIN_HTTP: &str = "; for an endpoint without TLS set AWS_ALLOW_HTTP=true";

#[cfg(test)]
mod tests {
    use super::*;

    fn generic(source: impl Into<Box<dyn Error + Send + Sync>>) -> object_store::Error {
        object_store::Error::Generic { store: "S3", source: source.into() }
    }

    #[test]
    fn only_transient_errors_are_retried() {
        let refused = HttpError::new(
            HttpErrorKind::Connect,
            io::Error::from(io::ErrorKind::ConnectionRefused),
        );
        assert!(is_transient(&generic(refused)));
        for (status, passes) in
            [(503, true), (500, true), (429, true), (408, true), (400, false), (416, false)]
        {
            let text = format!("Server returned non-2xx status code: {status} X: <Error/>");
            assert_eq!(is_transient(&generic(text)), passes, "{status}");
        }
        assert!(is_transient(&generic("Server returned error response: <Error>SlowDown</Error>")));
        assert!(!is_transient(&generic("Header: no etag")));
        assert!(is_transient(&generic(io::Error::from_raw_os_error(Errno::STALE.raw_os_error()))));
        assert!(!is_transient(&generic(io::Error::from_raw_os_error(Errno::NOSPC.raw_os_error()))));
        let refused =
            object_store::Error::PermissionDenied { path: "a".into(), source: "403".into() };
        assert!(!is_transient(&refused));
    }

    #[test]
    fn an_error_is_one_line_of_text() {
        let io = io::Error::other("connection refused");
        let refused = generic(HttpError::new(HttpErrorKind::Connect, io));
        assert_eq!(reason(&refused), "no answer: connection refused");
        let busy = generic(
            "Server returned non-2xx status code: 503 Service Unavailable: <Code>\nSlow</Code>",
        );
        let text = reason(&busy);
        assert!(
            text.starts_with("the store answered with status 503: Service Unavailable"),
            "{text}"
        );
        assert!(!text.contains('\n'));
    }
}
