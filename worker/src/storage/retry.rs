//! Waiting for storage that does not answer.
//!
//! A request that fails for a reason that may pass is made again, at growing pauses, for up to
//! [`LIMIT`]. The thread that made it waits; the others go on. A process says once that it waits
//! and once that it no longer does, however often and from however many threads it asks.
//!
//! **Invariant:** what can't pass (no such file, no permission, a changed object) is never waited
//! for.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What this process waits for, as it is told to the master.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct WaitStatus {
    /// The address that is asked, and its last error; `None` while all storage answers.
    pub(crate) storage: Option<String>,
    /// How long the process has waited since it began, in all.
    pub(crate) waited: Duration,
}

/// What happens to a request that failed.
pub(crate) trait Transient: std::fmt::Display {
    /// Whether the same request may succeed later.
    fn is_transient(&self) -> bool;
}

/// Makes `request` until it succeeds, fails for good, or [`LIMIT`] has passed. `address`: what it
/// asks.
pub(crate) fn with_retries<T, E: Transient>(
    address: &str,
    mut request: impl FnMut() -> Result<T, E>,
) -> Result<T, E> {
    // Almost all requests succeed: they cost no look at a clock.
    match request() {
        Err(error) if error.is_transient() => {
            let waiter = Waiter::begin(&WAITS, address, &error);
            let began = Instant::now();
            let pause = |pause: Duration| {
                std::thread::sleep(pause);
                began.elapsed()
            };
            let done = again(LIMIT, error, request, pause, |error| waiter.note(error));
            waiter.end(done.is_ok());
            done
        }
        done => done,
    }
}

/// Repeats `request` after pauses. `pause` waits for as long as it is told, and gives the time
/// since the first failure.
fn again<T, E: Transient>(
    limit: Duration,
    mut error: E,
    mut request: impl FnMut() -> Result<T, E>,
    mut pause: impl FnMut(Duration) -> Duration,
    mut note: impl FnMut(&E),
) -> Result<T, E> {
    let mut length = PAUSE_FIRST;
    while pause(length) < limit {
        length = (length * 2).min(PAUSE_MAX);
        error = match request() {
            Err(error) if error.is_transient() => error,
            done => return done,
        };
        note(&error);
    }
    Err(error)
}

/// What the process waits for now.
pub(crate) fn wait_status() -> WaitStatus {
    WAITS.waiting(Instant::now())
}

/// Has `flag` set for as long as the current thread waits for storage.
pub(crate) fn set_wait_flag(flag: Arc<AtomicBool>) {
    FLAG.set(Some(flag));
}

/// Threads that wait.
#[derive(Debug)]
struct Waits(Mutex<State>);

#[derive(Debug)]
struct State {
    threads: usize,
    /// Since when one of them waits without a break.
    since: Option<Instant>,
    /// Before that.
    waited: Duration,
    /// What was asked last, and its error.
    storage: String,
}

impl Waits {
    const fn new() -> Self {
        let state =
            State { threads: 0, since: None, waited: Duration::ZERO, storage: String::new() };
        Self(Mutex::new(state))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn waiting(&self, now: Instant) -> WaitStatus {
        let state = self.lock();
        let current =
            state.since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
        let storage = state.since.map(|_| state.storage.clone());
        WaitStatus { storage, waited: state.waited + current }
    }
}

/// A thread that waits.
struct Waiter<'a> {
    waits: &'a Waits,
    address: &'a str,
}

impl<'a> Waiter<'a> {
    fn begin(waits: &'a Waits, address: &'a str, error: &impl Transient) -> Self {
        let waiter = Self { waits, address };
        let mut state = waits.lock();
        state.threads += 1;
        if state.since.is_none() {
            state.since = Some(Instant::now());
            let limit_s = LIMIT.as_secs();
            tracing::warn!(address, %error, limit_s, "storage does not answer; it is asked again");
        }
        drop(state);
        waiter.note(error);
        FLAG.with_borrow(|flag| flag.iter().for_each(|flag| flag.store(true, Ordering::Release)));
        waiter
    }

    fn note(&self, error: &impl Transient) {
        self.waits.lock().storage = match error.to_string() {
            text if text.contains(self.address) => text,
            text => format!("{}: {text}", self.address),
        };
    }

    fn end(self, is_answered: bool) {
        FLAG.with_borrow(|flag| flag.iter().for_each(|flag| flag.store(false, Ordering::Release)));
        let mut state = self.waits.lock();
        state.threads -= 1;
        if state.threads > 0 {
            return;
        }
        let waited = state.since.take().map_or(Duration::ZERO, |since| since.elapsed());
        state.waited += waited;
        let waited_ms = waited.as_millis() as u64;
        match is_answered {
            true => tracing::info!(waited_ms, "storage answers again"),
            false => tracing::error!(
                waited_ms,
                storage = state.storage,
                "storage is waited for no longer"
            ),
        }
    }
}

static WAITS: Waits = Waits::new();

thread_local! {
    static FLAG: RefCell<Option<Arc<AtomicBool>>> = const { RefCell::new(None) };
}

/// For how long storage is waited for: servers are restarted and networks mended in less.
pub(crate) const LIMIT: Duration = Duration::from_secs(600);
const PAUSE_FIRST: Duration = Duration::from_millis(250);
const PAUSE_MAX: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Debug, PartialEq)]
    struct Failed(&'static str, bool);

    impl std::fmt::Display for Failed {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str(self.0)
        }
    }

    impl Transient for Failed {
        fn is_transient(&self) -> bool {
            self.1
        }
    }

    const AWAY: Failed = Failed("connection refused", true);

    /// What comes of a store that answers with `outcome` from `back` on, and the pauses that were
    /// made.
    fn ask(back: Duration, outcome: Result<u8, Failed>) -> (Result<u8, Failed>, Vec<Duration>) {
        let (now, mut pauses) = (std::cell::Cell::new(Duration::ZERO), Vec::new());
        let request = || if now.get() < back { Err(AWAY) } else { outcome.clone() };
        let pause = |pause| {
            pauses.push(pause);
            now.set(now.get() + pause);
            now.get()
        };
        let done = again(LIMIT, AWAY, request, pause, |_| ());
        (done, pauses)
    }

    #[test]
    fn storage_that_comes_back_is_asked_at_growing_pauses_until_then() {
        let (done, pauses) = ask(Duration::from_secs(20), Ok(7));
        assert_eq!(done, Ok(7));
        let ms = [250, 500, 1000, 2000, 4000, 5000, 5000, 5000];
        assert_eq!(pauses, ms.map(Duration::from_millis));
    }

    #[test]
    fn the_last_error_is_told_when_the_time_is_over() {
        let (done, pauses) = ask(Duration::MAX, Ok(7));
        assert_eq!(done, Err(AWAY));
        let waited: Duration = pauses.iter().sum();
        assert!(waited >= LIMIT && waited < LIMIT + PAUSE_MAX, "{waited:?}");
        assert!(LIMIT >= Duration::from_secs(300));
    }

    #[test]
    fn what_cannot_pass_is_told_at_once() {
        let refused = Failed("no permission", false);
        let (done, pauses) = ask(Duration::from_secs(1), Err(refused.clone()));
        assert_eq!((done, pauses.len()), (Err(refused.clone()), 3));
        let mut asked = 0;
        let done: Result<(), _> = with_retries("s3://bucket", || {
            asked += 1;
            Err(refused.clone())
        });
        assert_eq!((done, asked), (Err(refused), 1));
    }

    #[test]
    fn an_outage_is_one_however_many_threads_wait() {
        let waits = Waits::new();
        let first = Waiter::begin(&waits, "s3://b/x", &AWAY);
        let second = Waiter::begin(&waits, "s3://b/y", &AWAY);
        let now = Instant::now() + Duration::from_secs(10);
        let told = waits.waiting(now);
        assert_eq!(told.storage.as_deref(), Some("s3://b/y: connection refused"));
        assert!(told.waited >= Duration::from_secs(10) && told.waited < Duration::from_secs(20));
        first.end(true);
        assert!(waits.waiting(now).storage.is_some());
        second.end(true);
        assert_eq!(waits.waiting(now).storage, None);
    }

    #[test]
    fn a_thread_that_waits_sets_its_flag() {
        let (waits, flag) = (Waits::new(), Arc::new(AtomicBool::new(false)));
        set_wait_flag(Arc::clone(&flag));
        let waiter = Waiter::begin(&waits, "s3://b/x", &AWAY);
        assert!(flag.load(Ordering::Acquire));
        waiter.end(false);
        assert!(!flag.load(Ordering::Acquire));
    }
}
