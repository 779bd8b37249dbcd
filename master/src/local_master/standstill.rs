//! A local master that stands still, as where the file system of its directory does not answer:
//! users are told, and signals end the process.
//!
//! The event loop writes the job's record before it acts, so it waits for a disk that hangs. The
//! workers go on meanwhile.

use std::io::{self, Write as _, stderr};
use std::process::exit;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::time::sleep;

use super::signals::{ONE_REQUEST, Signals};

/// The thread that notices it.
#[derive(Debug)]
pub struct Standstill(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    /// Turns of the event loop.
    turns: AtomicU64,
    has_ended: AtomicBool,
}

/// What the thread knows.
#[derive(Debug)]
struct Watch {
    turns: u64,
    /// When the event loop was last seen to turn.
    since: Instant,
    /// Since when users know that it stands still.
    told: bool,
    /// The first signal since then.
    asked: Option<Instant>,
}

impl Standstill {
    /// Time between two turns.
    pub(super) const TURN: Duration = Duration::from_millis(500);

    /// Starts the thread, of a master whose directory is `dir`.
    ///
    /// # Errors
    /// It can't be started.
    pub(super) fn watch(dir: String) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let context = runtime.enter();
        let mut signals = Signals::new()?;
        drop(context);
        let shared = Arc::<Shared>::default();
        let known = Arc::clone(&shared);
        let watching = async move {
            let mut watch = Watch::new(Instant::now());
            loop {
                let stop = tokio::select! {
                    stop = signals.next() => Some(stop),
                    () = sleep(Self::TURN * 2) => None,
                };
                if let Some(stop) = stop.filter(|_| known.has_ended.load(Ordering::Acquire)) {
                    exit(stop.exit_code().into());
                }
                let text = match stop {
                    None => watch.look(Instant::now(), known.turns.load(Ordering::Relaxed)),
                    Some(stop) => match watch.signal(Instant::now()) {
                        None => exit(stop.exit_code().into()),
                        Some(text) => text,
                    },
                };
                if !text.is_empty() && !known.has_ended.load(Ordering::Acquire) {
                    // Standard error may be closed.
                    let _ = writeln!(stderr(), "warning: {dir} {text}");
                }
            }
        };
        std::thread::Builder::new()
            .name("standstill".into())
            .spawn(move || runtime.block_on(watching))?;
        Ok(Self(shared))
    }

    /// The event loop turns.
    pub(super) fn turn(&self) {
        self.0.turns.fetch_add(1, Ordering::Relaxed);
    }

    /// The job has ended. The next signal ends the process, which may wait for a reader of its
    /// output.
    pub fn end_process_on_signal(self) {
        self.0.has_ended.store(true, Ordering::Release);
    }
}

impl Watch {
    fn new(now: Instant) -> Self {
        Self { turns: 0, since: now, told: false, asked: None }
    }

    /// What to tell users at `now`, when the event loop has made so many turns.
    fn look(&mut self, now: Instant, turns: u64) -> &'static str {
        if turns != self.turns {
            let told = self.told;
            *self = Self { turns, ..Self::new(now) };
            return if told { "answers again" } else { "" };
        }
        if self.told || now.saturating_duration_since(self.since) < LIMIT {
            return "";
        }
        self.told = true;
        "does not answer: its job goes on, and is neither shown nor stored until it does"
    }

    /// What to tell users when a signal arrives; `None`: it ends the process.
    fn signal(&mut self, now: Instant) -> Option<&'static str> {
        if !self.told {
            return Some("");
        }
        let first = *self.asked.get_or_insert(now);
        if now == first {
            return Some(
                "does not answer, so its job can't be stopped yet; a second signal ends this \
                 command alone: `elasticdl train --resume` goes on with the job",
            );
        }
        (now.saturating_duration_since(first) < ONE_REQUEST).then_some("")
    }
}

/// Time after which an event loop without turns stands still.
const LIMIT: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_that_does_not_answer_is_named_once_and_a_second_request_ends_the_process() {
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        let mut watch = Watch::new(began);
        assert_eq!([watch.look(at(4), 1), watch.look(at(8), 1)], ["", ""]);
        assert_eq!(watch.signal(at(8)), Some(""), "the event loop takes it");
        assert!(watch.look(at(9), 1).starts_with("does not answer"));
        assert_eq!(watch.look(at(20), 1), "");
        assert!(watch.signal(at(21)).is_some_and(|text| text.contains("--resume")));
        assert_eq!(watch.signal(at(22)), Some(""), "two signals within 2 s are one");
        assert_eq!(watch.signal(at(24)), None);
        assert_eq!(watch.look(at(30), 2), "answers again");
        assert_eq!([watch.look(at(31), 3), watch.look(at(35), 3)], ["", ""]);
        assert_eq!(watch.signal(at(35)), Some(""));
    }
}
