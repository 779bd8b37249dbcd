//! Classification of the errors of stores, transient or permanent, and their texts.

use std::error::Error;
use std::io;
use std::time::Duration;

use object_store::client::{HttpError, HttpErrorKind};

use crate::storage::Transient as _;

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

/// Whether the store, or the service that issues its credentials, refuses them.
pub(super) fn is_refusal(error: &object_store::Error) -> bool {
    use object_store::Error::{Generic, PermissionDenied, Unauthenticated};
    match error {
        PermissionDenied { .. } | Unauthenticated { .. } => true,
        Generic { .. } => {
            let mut cause: Option<&(dyn Error + 'static)> = Some(error);
            while let Some(error) = cause {
                let text = error.to_string();
                let is_known = |code| REFUSED.contains(&known(code).unwrap_or(""));
                let status = status(&text);
                if matches!(status, Some(401 | 403))
                    || (status == Some(400) && answer(&text).is_empty())
                    || code(&text).is_some_and(is_known)
                {
                    return true;
                }
                cause = error.source();
            }
            false
        }
        _ => false,
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
        if let Some(error) = error.downcast_ref::<io::Error>() {
            return error.to_string();
        }
        cause = error.source();
    }
    let text = error.to_string();
    if let Some(known) = code(&text).and_then(known) {
        return known.to_owned();
    }
    match (error, status(&text)) {
        (object_store::Error::PermissionDenied { .. }, _) => {
            format!("{DENIED}{}", after_colon(&answer(&text)))
        }
        (object_store::Error::Unauthenticated { .. }, _) => {
            let advice = "not authenticated: check the credentials, and whether they have expired";
            format!("{advice}{}", after_colon(&answer(&text)))
        }
        // The answer to a HEAD request has no body with a code.
        (_, Some(400)) if answer(&text).is_empty() => MAYBE_EXPIRED.to_owned(),
        (_, Some(status)) => {
            format!("the store answered with status {status}{}", after_colon(&answer(&text)))
        }
        (_, None) => text,
    }
}

/// Why a client of a store can't be set up. The clients verify certificates, also those that will
/// need none for an `http://` endpoint.
#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
pub(super) fn of_setup(error: object_store::Error) -> String {
    let (mut cause, mut is_builder) = (&error as &(dyn Error + 'static), false);
    while let Some(deeper) = cause.source() {
        cause = deeper;
        is_builder |=
            cause.downcast_ref::<reqwest::Error>().is_some_and(reqwest::Error::is_builder);
    }
    if is_builder {
        format!(
            "can't set up TLS: {cause}; the CA certificates of this machine or image are missing \
             or can't be read: install the package ca-certificates, or name a file of \
             certificates in SSL_CERT_FILE"
        )
    } else {
        error.to_string()
    }
}

/// The error of a request that a job which stops has not waited for any longer than `limit`.
pub(super) fn given_up(limit: Duration) -> object_store::Error {
    let text = format!("none within {} s, and the job stops", limit.as_secs());
    let source = HttpError::new(HttpErrorKind::Timeout, io::Error::other(text));
    object_store::Error::Generic { store: "store", source: source.into() }
}

/// Whether the answer of a store says that the bucket does not exist.
pub(super) fn is_missing_bucket(text: &str) -> bool {
    code(text).is_some_and(|code| known(code) == Some(NO_BUCKET))
        || text.contains("The specified bucket does not exist")
}

/// The sentence for a store's error code, of those that users meet.
fn known(code: &str) -> Option<&'static str> {
    Some(match code {
        "AccessDenied" | "AuthorizationFailure" | "AuthorizationPermissionMismatch" => DENIED,
        "ContainerNotFound" | "NoSuchBucket" => NO_BUCKET,
        "ExpiredToken" | "ExpiredTokenException" | "RequestExpired" | "TokenRefreshRequired" => {
            EXPIRED
        }
        "AuthenticationFailed"
        | "InvalidAccessKeyId"
        | "InvalidToken"
        | "SignatureDoesNotMatch" => UNKNOWN,
        "PermanentRedirect" => "the bucket is in another region: set AWS_REGION",
        "RequestTimeTooSkewed" => SKEWED,
        _ => return None,
    })
}

/// The error code in a store's answer, which is XML or, from Google, JSON.
fn code(text: &str) -> Option<&str> {
    Some(text.split_once("<Code>")?.1.split_once("</Code>")?.0)
}

/// What a store's answer says, without its markup, as one line of limited length.
fn answer(text: &str) -> String {
    let message = text.split_once("<Message>").and_then(|(_, rest)| rest.split_once("</Message>"));
    let text = match (code(text), message) {
        (Some(code), Some((message, _))) => format!("{code}, {message}"),
        (Some(code), None) => code.to_owned(),
        (None, _) => body(text).to_owned(),
    };
    let line = text.trim().chars().map(|c| if c.is_control() { ' ' } else { c });
    line.take(ANSWER_MAX).collect()
}

fn after_colon(answer: &str) -> String {
    if answer.is_empty() { String::new() } else { format!(": {answer}") }
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

/// The response body in an error's text, after the status and its name.
fn body(text: &str) -> &str {
    let Some((_, rest)) = text.split_once("status code: ") else { return text };
    let body = rest.split_once(':').map_or("", |(_, body)| body).trim();
    // An answer in HTML is that of a proxy.
    if body.starts_with('<') { "" } else { body }
}

const ANSWER_MAX: usize = 200;
const ANSWERED_WITH_ERROR: &str = "Server returned error response";
const DENIED: &str = "access denied: these credentials do not permit it";
const EXPIRED: &str = "the credentials have expired: renew them";
const MAYBE_EXPIRED: &str =
    "the store answered with status 400, as if the credentials have expired";
const NO_BUCKET: &str = "the bucket does not exist";
const SKEWED: &str = "the clock of this machine is wrong: the store refuses its time";
const UNKNOWN: &str = "the store does not accept these credentials: check the keys and the token";
/// What a store says that refuses credentials.
const REFUSED: [&str; 4] = [DENIED, EXPIRED, SKEWED, UNKNOWN];
const PLAIN_HTTP: &str = "; for an endpoint without TLS set AWS_ALLOW_HTTP=true";

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

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
    fn refused_credentials_are_told_from_other_errors() {
        let denied =
            object_store::Error::PermissionDenied { path: "a".into(), source: "403".into() };
        assert!(is_refusal(&denied));
        for (status, code, refused) in [
            (400, "ExpiredToken", true),
            (400, "InvalidRequest", false),
            (403, "Rare", true),
            (404, "NoSuchBucket", false),
            (416, "InvalidRange", false),
            (503, "SlowDown", false),
        ] {
            let text = format!(
                "Server returned non-2xx status code: {status} X: <Error><Code>{code}</Code>"
            );
            assert_eq!(is_refusal(&generic(text)), refused, "{status} {code}");
        }
        let of_head = generic("Server returned non-2xx status code: 400 Bad Request: ");
        assert!(is_refusal(&of_head) && reason(&of_head).contains("have expired"));
        assert!(!is_refusal(&generic("Header: no etag")));
    }

    #[test]
    fn an_error_is_one_line_of_text() {
        let io = io::Error::other("connection refused");
        let refused = generic(HttpError::new(HttpErrorKind::Connect, io));
        assert_eq!(reason(&refused), "no answer: connection refused");
        let busy = generic(
            "Server returned non-2xx status code: 503 Service Unavailable: <Code>\nSlow</Code>",
        );
        assert_eq!(reason(&busy), "the store answered with status 503: Slow");
        let full = generic(io::Error::from_raw_os_error(Errno::NOSPC.raw_os_error()));
        assert_eq!(reason(&full), "No space left on device (os error 28)");
    }

    #[test]
    fn a_client_without_ca_certificates_says_what_to_install() {
        let none = "No CA certificates were loaded from the system";
        assert_eq!(of_setup(generic(none)), format!("Generic S3 error: {none}"));
        // Any error of a builder: certificates of this machine are not a test's to remove.
        let builder = reqwest::Proxy::all("").unwrap_err();
        let error = of_setup(generic(HttpError::new(HttpErrorKind::Unknown, builder)));
        assert!(error.contains("install the package ca-certificates"), "{error}");
    }

    #[test]
    fn what_users_meet_is_a_sentence_without_markup() {
        let answer = |code: &str| {
            format!(
                "Server returned non-2xx status code: 403 Forbidden: <?xml version=\"1.0\"?>\n\
                 <Error><Code>{code}</Code><Message>Some &quot;text&quot;.</Message>\
                 <HostId>1</HostId></Error>"
            )
        };
        let of = |code: &str| generic(answer(code));
        assert_eq!(reason(&of("NoSuchBucket")), "the bucket does not exist");
        assert_eq!(reason(&of("ExpiredToken")), "the credentials have expired: renew them");
        let denied = |text: String| object_store::Error::PermissionDenied {
            path: "a.probe-1".into(),
            source: text.into(),
        };
        let sentence = "access denied: these credentials do not permit it";
        assert_eq!(reason(&denied(answer("AccessDenied"))), sentence);
        let bare = "Server returned non-2xx status code: 403 Forbidden: ".to_owned();
        assert_eq!(reason(&denied(bare)), sentence);
        assert_eq!(
            reason(&of("Rare")),
            "the store answered with status 403: Rare, Some &quot;text&quot;."
        );
        assert!(
            is_missing_bucket(&answer("NoSuchBucket")) && !is_missing_bucket(&answer("NoSuchKey"))
        );
    }
}
