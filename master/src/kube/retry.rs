//! The rule by which calls of the API server are repeated.
//!
//! A server that does not answer, that is overloaded, or whose storage changes its leader, answers
//! again soon: [`ClusterError::Unreachable`]. Commands and starting masters repeat such calls, and
//! say so when it takes long. Calls that are not safe to repeat don't use this.

use std::io::Write as _;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};
use tracing::warn;

use super::client::ClusterError;
use super::watch::backoff;

/// Repeats `call` while the server can't answer, for at most [`RETRY_TIME_MAX`]. `doing`: the
/// operation, for messages.
///
/// # Errors
/// The first error that a retry does not help against, or the last one.
pub(super) async fn retry<T, F>(doing: &str, mut call: impl FnMut() -> F) -> Result<T, ClusterError>
where
    F: Future<Output = Result<T, ClusterError>>,
{
    let until = Instant::now() + RETRY_TIME_MAX;
    let last = Mutex::new(None);
    let last = || last.lock().unwrap_or_else(PoisonError::into_inner);
    let repeated = async {
        for failures in 0.. {
            match timeout_at(until, call()).await {
                Ok(Err(error @ ClusterError::Unreachable { .. })) => {
                    let pause = backoff(failures).min(PAUSE_MAX);
                    if Instant::now() + pause >= until {
                        return Err(error);
                    }
                    *last() = Some(error);
                    sleep(pause).await;
                }
                Ok(done) => return done,
                Err(_) => break,
            }
        }
        let message = format!("none within {} s", RETRY_TIME_MAX.as_secs());
        Err(last()
            .take()
            .unwrap_or_else(|| ClusterError::Unreachable { doing: doing.into(), message }))
    };
    tokio::pin!(repeated);
    tokio::select! {
        done = &mut repeated => return done,
        () = sleep(SILENT_MAX) => {}
    }
    let text = waits(doing, last().as_ref());
    say(&text);
    repeated.await
}

/// Says that a call is repeated, and why the `last` one has failed, if it has.
fn waits(doing: &str, last: Option<&ClusterError>) -> String {
    let seconds = RETRY_TIME_MAX.as_secs();
    match last {
        Some(error) => format!("{error}; trying again for up to {seconds} s"),
        None => {
            format!("the API server does not answer yet: waiting up to {seconds} s to {doing}")
        }
    }
}

/// To the log of a master, or to the standard error of a command.
pub(super) fn say(text: &str) {
    if tracing::dispatcher::has_been_set() {
        warn!("{text}");
    } else {
        // Without a standard error the text has no reader.
        drop(writeln!(std::io::stderr(), "{text}"));
    }
}

/// Time for which calls are repeated: as long as a control plane takes to elect its leaders anew.
const RETRY_TIME_MAX: Duration = Duration::from_secs(60);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// Time without an answer after which the user is told.
const SILENT_MAX: Duration = Duration::from_secs(3);

#[cfg(test)]
mod tests {
    use super::super::anchor::Anchor;
    use super::super::testing::FakeServer;
    use super::*;
    use serde_json::json;

    #[tokio::test(start_paused = true)]
    async fn a_server_that_cannot_answer_is_asked_again_for_a_minute_whatever_its_code() {
        for code in [429, 500, 502, 503, 504] {
            let (fake, cluster) = FakeServer::start();
            let object = json!({"metadata": {"name": "j", "uid": "u"}, "data": {"task": "{}"}});
            fake.put("configmaps", "j", object);
            fake.state().throttles.extend([("GET configmaps", code, 0); 8]);
            assert!(Anchor::new(&cluster, "j").read().await.is_ok(), "{code}");
            fake.state().throttles.extend([("GET configmaps", code, 0); 1000]);
            let since = Instant::now();
            let error = Anchor::new(&cluster, "j").read().await.unwrap_err();
            assert!(matches!(error, ClusterError::Unreachable { .. }), "{code}: {error}");
            assert!((50..=60).contains(&since.elapsed().as_secs()), "{:?}", since.elapsed());
        }
    }

    #[test]
    fn a_server_that_answers_is_quoted_and_one_that_does_not_is_said_not_to() {
        let message = "failed calling webhook \"w.example.com\" (HTTP status 500)".into();
        let failed = ClusterError::Unreachable { doing: "scale".into(), message };
        let said = "can't scale: the API server can't answer: failed calling webhook \
                    \"w.example.com\" (HTTP status 500); trying again for up to 60 s";
        assert_eq!(waits("scale", Some(&failed)), said);
        let said = "the API server does not answer yet: waiting up to 60 s to scale";
        assert_eq!(waits("scale", None), said);
    }

    #[tokio::test(start_paused = true)]
    async fn silence_ends_after_a_minute_and_a_refusal_at_once() {
        let (fake, cluster) = FakeServer::start();
        let anchor = Anchor::new(&cluster, "j");
        let since = Instant::now();
        assert!(matches!(anchor.read().await, Err(ClusterError::NoSuchJob { .. })));
        assert!(since.elapsed() < Duration::from_secs(1));
        fake.state().unreachable = true;
        assert!(matches!(anchor.read().await, Err(ClusterError::Unreachable { .. })));
        assert_eq!(since.elapsed().as_secs(), 60);
    }
}
