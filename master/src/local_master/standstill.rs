//! A local master that stands still, as where the file system of its directory does not answer:
//! users are told, and signals end the process.
//!
//! The event loop writes the job's record before it acts, so it waits for a disk that hangs. The
//! workers go on meanwhile.

use std::io;
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
    /// Turns of the event loop; 0 while it does not run.
    turns: AtomicU64,
    has_ended: AtomicBool,
}

/// What the thread knows.
#[derive(Debug, Default)]
struct Watch {
    turns: u64,
    /// Looks in a row at which the event loop had not turned. A time would count that in which this
    /// process was stopped, too.
    idle: u32,
    /// Whether users know that it stands still.
    told: bool,
    /// The first signal since then.
    asked: Option<Instant>,
}

impl Standstill {
    /// Time between two turns.
    pub(super) const TURN: Duration = Duration::from_millis(500);

    /// Starts the thread, of a master whose directory is `dir`. It tells users by `warn`.
    ///
    /// # Errors
    /// It can't be started.
    pub(super) fn watch(dir: String, warn: fn(&str)) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let context = runtime.enter();
        let mut signals = Signals::new()?;
        drop(context);
        let shared = Arc::<Shared>::default();
        let known = Arc::clone(&shared);
        let watching = async move {
            let mut watch = Watch::default();
            loop {
                let stop = tokio::select! {
                    stop = signals.next() => Some(stop),
                    () = sleep(LOOK) => None,
                };
                if let Some(stop) = stop.filter(|_| known.has_ended.load(Ordering::Acquire)) {
                    exit(stop.exit_code().into());
                }
                let text = match stop {
                    None => watch.look(known.turns.load(Ordering::Relaxed)),
                    Some(stop) => match watch.signal(Instant::now()) {
                        None => exit(stop.exit_code().into()),
                        Some(text) => text,
                    },
                };
                if !text.is_empty() && !known.has_ended.load(Ordering::Acquire) {
                    warn(&format!("{dir} {text}"));
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

    /// The event loop is over.
    pub(super) fn rest(&self) {
        self.0.turns.store(0, Ordering::Relaxed);
    }

    /// The job has ended. The next signal ends the process, which may wait for a reader of its
    /// output.
    pub fn end_process_on_signal(self) {
        self.0.has_ended.store(true, Ordering::Release);
    }
}

impl Watch {
    /// What to tell users, when the event loop has made so many turns.
    fn look(&mut self, turns: u64) -> &'static str {
        if turns != self.turns || turns == 0 {
            let told = std::mem::replace(self, Self { turns, ..Self::default() }).told;
            return if told { "answers again" } else { "" };
        }
        self.idle += 1;
        if self.told || self.idle < IDLE_MAX {
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
                 command alone, and `elasticdl train --resume` continues the job",
            );
        }
        (now.saturating_duration_since(first) < ONE_REQUEST).then_some("")
    }
}

/// Time between two looks at the turns.
const LOOK: Duration = Duration::from_secs(1);
/// An event loop that has not turned at so many looks stands still.
const IDLE_MAX: u32 = 5;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_that_does_not_answer_is_named_once_and_a_second_request_ends_the_process() {
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        let mut watch = Watch::default();
        let look = |watch: &mut Watch, turns, times| {
            (0..times)
                .map(|_| watch.look(turns))
                .filter(|text| !text.is_empty())
                .collect::<Vec<_>>()
        };
        assert_eq!(look(&mut watch, 1, 5), [""; 0]);
        assert_eq!(watch.signal(at(8)), Some(""), "the event loop takes it");
        let told = look(&mut watch, 1, 20);
        assert!(told.len() == 1 && told[0].starts_with("does not answer"), "{told:?}");
        assert!(watch.signal(at(21)).is_some_and(|text| text.contains("--resume")));
        assert_eq!(watch.signal(at(22)), Some(""), "two signals within 2 s are one");
        assert_eq!(watch.signal(at(24)), None);
        assert_eq!(look(&mut watch, 2, 3), ["answers again"]);
        assert_eq!(look(&mut watch, 3, 5), [""; 0]);
        assert_eq!(watch.signal(at(35)), Some(""));
        assert_eq!(look(&mut watch, 0, 20), [""; 0], "it is over");
    }
}
