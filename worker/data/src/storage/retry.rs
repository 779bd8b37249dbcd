//! Retries of storage requests.
//!
//! A request that fails with a transient error is retried with exponential back-off for up to
//! [`RETRY_LIMIT`]. Only the thread that makes the request waits. A process logs the start and the
//! end of an outage once, however many threads wait.
//!
//! Once the first group of this process has formed ([`wait_for_access`]), a read that is refused is
//! retried in the same way: credentials have expired, or a policy or a permission is being changed.
//! So is the access to a file whose folder is gone: its file system is not mounted for a moment.
//! Before that, a refusal is a mistake of the user, and an error at once, as it always is for a
//! write.
//!
//! A job that stops does not wait for a write that its trainer repeats ([`set_stop_flag`]): the
//! write fails, and who asked for it decides what is left to do. Reads of what the job itself
//! writes ([`Storage::of_outputs`](super::Storage::of_outputs)) are repeated like writes.
//!
//! **Invariant:** permanent errors (no such file, a changed object) are never retried.

use std::cell::RefCell;
use std::fmt::Display;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Storage waits of this process, as reported to the master.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WaitStatus {
    /// The address of the failing request and its last error; `None` while all storage answers.
    pub storage: Option<String>,
    /// Total time that the process has waited so far.
    pub waited: Duration,
}

/// Classifies the error of a failed request.
pub(crate) trait Transient: Display {
    /// Whether the same request may succeed later.
    fn is_transient(&self) -> bool;

    /// Whether the storage was reached, and refuses access.
    fn is_refusal(&self) -> bool {
        false
    }
}

/// Makes a request that reads, and retries it until it succeeds, fails permanently, or
/// [`RETRY_LIMIT`] has passed. `address`: the storage that is requested from.
pub(crate) fn with_retries<T, E: Transient>(
    address: &str,
    request: impl FnMut() -> Result<T, E>,
) -> Result<T, E> {
    let waits = || WAITS_FOR_ACCESS.load(Ordering::Relaxed);
    let is_transient = |error: &E| error.is_transient() || (error.is_refusal() && waits());
    retry_if(address, is_transient, request, std::thread::sleep)
}

/// Like [`with_retries`], for a request that writes, or is part of a write: one that is refused is
/// an error, and so is one that fails while the flag of [`set_stop_flag`] is set.
pub(crate) fn with_write_retries<T, E: Transient>(
    address: &str,
    request: impl FnMut() -> Result<T, E>,
) -> Result<T, E> {
    let flag = stop_flag();
    let is_stopping = || flag.as_ref().is_some_and(|flag| flag.load(Ordering::Acquire));
    let is_repeated = |error: &E| error.is_transient() && !is_stopping();
    retry_if(address, is_repeated, request, |pause| pause_unless(is_stopping, pause))
}

/// Sleeps for `pause`, or until `is_stopping`.
fn pause_unless(is_stopping: impl Fn() -> bool, pause: Duration) {
    let until = Instant::now() + pause;
    while !is_stopping() && Instant::now() < until {
        std::thread::sleep(STOP_CHECK.min(until.saturating_duration_since(Instant::now())));
    }
}

/// Sleeps for `pause`, or until `stops` is set. Returns whether it is.
pub fn pause_unless_stopped(stops: &AtomicBool, pause: Duration) -> bool {
    let is_stopping = || stops.load(Ordering::Acquire);
    pause_unless(is_stopping, pause);
    is_stopping()
}

/// The program, its options and its data have worked once. From now on, reads that storage refuses
/// are retried.
pub fn wait_for_access() {
    WAITS_FOR_ACCESS.store(true, Ordering::Relaxed);
}

fn retry_if<T, E: Display>(
    address: &str,
    is_transient: impl Fn(&E) -> bool,
    mut request: impl FnMut() -> Result<T, E>,
    sleep: impl Fn(Duration),
) -> Result<T, E> {
    // Fast path: almost all requests succeed, and these do not read the clock.
    match request() {
        Err(error) if is_transient(&error) => {
            let waiter = Waiter::begin(&WAITS, address, &error, RETRY_LIMIT);
            let began = Instant::now();
            let pause = |pause: Duration| {
                sleep(pause);
                began.elapsed()
            };
            let note = |error: &E| waiter.note(error);
            let done = retry_loop(RETRY_LIMIT, error, is_transient, request, pause, note);
            waiter.end(done.is_ok());
            done
        }
        done => done,
    }
}

/// Repeats a request whose `error` need not be transient, such as that of a full disk, because its
/// result is worth a wait of `limit`. `sleep` sleeps for the given time, and returns whether only
/// one attempt is left.
pub fn with_patience<T, E: Display>(
    address: &str,
    limit: Duration,
    mut error: E,
    mut request: impl FnMut() -> Result<T, E>,
    sleep: impl Fn(Duration) -> bool,
) -> Result<T, E> {
    if limit.is_zero() {
        return Err(error);
    }
    let waiter = Waiter::begin(&WAITS, address, &error, limit);
    let (began, mut length, mut waited) = (Instant::now(), PAUSE_MIN, Duration::ZERO);
    while waited < limit {
        waited = if sleep(length) { limit } else { waited + length };
        length = (length * 2).min(PAUSE_MAX);
        match request() {
            Ok(done) => {
                waiter.end(true);
                return Ok(done);
            }
            Err(other) => error = other,
        }
        // The requests take time as well.
        waited = waited.max(began.elapsed());
        waiter.note(&error);
    }
    waiter.end(false);
    Err(error)
}

/// Retries `request` after pauses. `pause` sleeps for the given time and returns the time since the
/// first failure.
fn retry_loop<T, E>(
    limit: Duration,
    mut error: E,
    is_transient: impl Fn(&E) -> bool,
    mut request: impl FnMut() -> Result<T, E>,
    mut pause: impl FnMut(Duration) -> Duration,
    mut note: impl FnMut(&E),
) -> Result<T, E> {
    let mut length = PAUSE_MIN;
    while pause(length) < limit {
        length = (length * 2).min(PAUSE_MAX);
        error = match request() {
            Err(error) if is_transient(&error) => error,
            done => return done,
        };
        note(&error);
    }
    Err(error)
}

/// Current storage waits of the process.
pub fn wait_status() -> WaitStatus {
    WAITS.waiting(Instant::now())
}

/// Registers `flag`, which is set whenever the current thread waits for storage.
pub fn set_wait_flag(flag: Arc<AtomicBool>) {
    FLAG.set(Some(flag));
}

/// Registers `flag`, which is set once the job stops. From then on, writes of the current thread
/// are not repeated, and one that waits for its next attempt makes that attempt at once. Requests
/// to a store that does not answer are given up.
pub fn set_stop_flag(flag: Arc<AtomicBool>) {
    STOP.set(Some(flag));
}

/// The flag that the current thread has registered with [`set_stop_flag`], if any.
pub fn stop_flag() -> Option<Arc<AtomicBool>> {
    STOP.with_borrow(Clone::clone)
}

/// State of all waiting threads.
#[derive(Debug)]
pub(super) struct Waits(Mutex<State>);

#[derive(Debug)]
struct State {
    threads: usize,
    /// Start of the current outage: since then at least one thread has been waiting.
    since: Option<Instant>,
    /// Total duration of earlier outages.
    waited: Duration,
    /// Address of the last failed request, with its error.
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

/// A wait of the process for storage that no request reports, until [`end`](Self::end).
pub struct StorageWait(Waiter<'static>);

impl StorageWait {
    /// A wait for the storage `address` begins, for up to `limit`; `text` is for users.
    #[must_use]
    pub fn begin(address: &str, text: &str, limit: Duration) -> Self {
        Self(Waiter::begin(&WAITS, address, &text, limit))
    }

    /// The wait is over.
    pub fn end(self, is_answered: bool) {
        self.0.end(is_answered);
    }
}

impl std::fmt::Debug for StorageWait {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("StorageWait").field(&self.0.address).finish()
    }
}

/// A waiting thread.
pub(super) struct Waiter<'a> {
    waits: &'a Waits,
    address: String,
}

impl<'a> Waiter<'a> {
    /// The current thread waits for the storage `address` from now on, for up to `limit`, because
    /// of `error`.
    pub(super) fn begin(
        waits: &'a Waits,
        address: &str,
        error: &impl Display,
        limit: Duration,
    ) -> Self {
        let waiter = Self { waits, address: address.to_owned() };
        // Those that read the state see the wait with its error.
        let mut state = waits.lock();
        state.storage = waiter.told(error);
        state.threads += 1;
        if state.since.is_none() {
            state.since = Some(Instant::now());
            let limit_s = limit.as_secs();
            tracing::warn!(address, %error, limit_s, "storage does not answer; waiting for it");
        }
        drop(state);
        FLAG.with_borrow(|flag| flag.iter().for_each(|flag| flag.store(true, Ordering::Release)));
        waiter
    }

    fn note(&self, error: &impl Display) {
        let told = self.told(error);
        self.waits.lock().storage = told;
    }

    /// The address of the storage, with its error.
    fn told(&self, error: &impl Display) -> String {
        match error.to_string() {
            text if text.contains(&self.address) => text,
            text => format!("{}: {text}", self.address),
        }
    }

    /// It waits no longer.
    pub(super) fn end(self, is_answered: bool) {
        FLAG.with_borrow(|flag| flag.iter().for_each(|flag| flag.store(false, Ordering::Release)));
        let mut state = self.waits.lock();
        state.threads -= 1;
        if state.threads > 0 {
            return;
        }
        let waited = state.since.take().map_or(Duration::ZERO, |since| since.elapsed());
        state.waited += waited;
        let waited_ms = waited.as_millis() as u64;
        if is_answered {
            tracing::info!(waited_ms, "storage answers again");
        } else {
            let storage = &state.storage;
            tracing::error!(waited_ms, storage, "storage does not answer; giving up");
        }
    }
}

/// Waits of this process.
pub(super) static WAITS: Waits = Waits::new();
static WAITS_FOR_ACCESS: AtomicBool = AtomicBool::new(false);

thread_local! {
    static FLAG: RefCell<Option<Arc<AtomicBool>>> = const { RefCell::new(None) };
    static STOP: RefCell<Option<Arc<AtomicBool>>> = const { RefCell::new(None) };
}

/// Duration of retries: long enough for a server's restart and most network repairs.
pub(crate) const RETRY_LIMIT: Duration = Duration::from_secs(600);
const PAUSE_MIN: Duration = Duration::from_millis(250);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// Interval between looks at a stop flag.
pub(super) const STOP_CHECK: Duration = Duration::from_millis(50);

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Debug, PartialEq)]
    struct Failed(&'static str, bool);

    impl Display for Failed {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str(self.0)
        }
    }

    impl Transient for Failed {
        fn is_transient(&self) -> bool {
            self.1
        }
    }

    const UNREACHABLE: Failed = Failed("connection refused", true);

    /// Result of a request to a store that fails until `back` and returns `outcome` from then on,
    /// with the pauses that were made.
    fn ask(back: Duration, outcome: Result<u8, Failed>) -> (Result<u8, Failed>, Vec<Duration>) {
        let (now, mut pauses) = (std::cell::Cell::new(Duration::ZERO), Vec::new());
        let request = || if now.get() < back { Err(UNREACHABLE) } else { outcome.clone() };
        let pause = |pause| {
            pauses.push(pause);
            now.set(now.get() + pause);
            now.get()
        };
        let done = retry_loop(RETRY_LIMIT, UNREACHABLE, |error| error.1, request, pause, |_| ());
        (done, pauses)
    }

    #[test]
    fn requests_are_retried_with_back_off_until_storage_answers() {
        let (done, pauses) = ask(Duration::from_secs(20), Ok(7));
        assert_eq!(done, Ok(7));
        let ms = [250, 500, 1000, 2000, 4000, 5000, 5000, 5000];
        assert_eq!(pauses, ms.map(Duration::from_millis));
    }

    #[test]
    fn the_last_error_is_returned_at_the_time_limit() {
        let (done, pauses) = ask(Duration::MAX, Ok(7));
        assert_eq!(done, Err(UNREACHABLE));
        let waited: Duration = pauses.iter().sum();
        assert!(waited >= RETRY_LIMIT && waited < RETRY_LIMIT + PAUSE_MAX, "{waited:?}");
        assert!(RETRY_LIMIT >= Duration::from_secs(300));
    }

    #[test]
    fn permanent_errors_are_returned_at_once() {
        let refused = Failed("no permission", false);
        let (done, pauses) = ask(Duration::from_secs(1), Err(refused.clone()));
        assert_eq!((done, pauses.len()), (Err(refused.clone()), 3));
        let mut requests = 0;
        let done: Result<(), _> = with_retries("s3://bucket", || {
            requests += 1;
            Err(refused.clone())
        });
        assert_eq!((done, requests), (Err(refused), 1));
    }

    #[test]
    fn a_stop_ends_the_attempts_to_write_and_later_writes_have_one() {
        let (flag, mut requests) = (Arc::new(AtomicBool::new(false)), 0);
        set_stop_flag(Arc::clone(&flag));
        let mut write = || {
            with_write_retries("s3://bucket", || {
                requests += 1;
                // The job stops during the second attempt.
                flag.store(requests >= 2, Ordering::Release);
                Err::<(), _>(if requests < 9 { UNREACHABLE } else { Failed("endless", false) })
            })
        };
        assert_eq!([write(), write()], [Err(UNREACHABLE), Err(UNREACHABLE)]);
        assert_eq!(requests, 3);
        // Reads are still repeated.
        let read = with_retries("s3://bucket", || {
            requests += 1;
            if requests < 5 { Err(UNREACHABLE) } else { Ok(7) }
        });
        assert_eq!((read, requests), (Ok(7), 5));
    }

    #[test]
    fn several_waiting_threads_count_as_one_outage() {
        let waits = Waits::new();
        let first = Waiter::begin(&waits, "s3://b/x", &UNREACHABLE, RETRY_LIMIT);
        let second = Waiter::begin(&waits, "s3://b/y", &UNREACHABLE, RETRY_LIMIT);
        let now = Instant::now() + Duration::from_secs(10);
        let status = waits.waiting(now);
        assert_eq!(status.storage.as_deref(), Some("s3://b/y: connection refused"));
        assert!(
            status.waited >= Duration::from_secs(10) && status.waited < Duration::from_secs(20)
        );
        first.end(true);
        assert!(waits.waiting(now).storage.is_some());
        second.end(true);
        assert_eq!(waits.waiting(now).storage, None);
    }

    #[test]
    fn a_waiting_thread_sets_its_flag() {
        let (waits, flag) = (Waits::new(), Arc::new(AtomicBool::new(false)));
        set_wait_flag(Arc::clone(&flag));
        let waiter = Waiter::begin(&waits, "s3://b/x", &UNREACHABLE, RETRY_LIMIT);
        assert!(flag.load(Ordering::Acquire));
        waiter.end(false);
        assert!(!flag.load(Ordering::Acquire));
    }
}
