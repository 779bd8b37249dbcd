//! One NCCL communicator: the thread that calls NCCL, and the watchdog that aborts it.
#![allow(
    unsafe_code,
    reason = "calls into a C library; this module decides which thread uses the handle"
)]

use std::cell::Cell;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaEvent};

use super::back_off::{BackOff, POLL_INTERVAL, SPIN_TIME_MAX, SPIN_TIME_MIN};
use super::call::{Beside, Call, CommInit, Timeouts};
use super::library::{CallStatus, Handle, Library};
use super::release::{self, Unreleased};
use crate::device::{DeviceError, relax_capture_mode};
use crate::net::notifier::Notifier;

/// State of a group's NCCL communicator, on one rank.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum NcclState {
    /// The group continues without NCCL, for this reason; identical on all ranks.
    Absent(String),
    /// A communicator is being created in the background.
    Building,
    /// The communicator could not be created, or has ended, for this reason. The group continues
    /// without NCCL.
    Failed(String),
    /// The communicator is ready on this rank; it may be used once it is ready on all ranks.
    Ready,
}

/// Communicator of one rank. Dropping it never blocks: a working communicator is finalized in the
/// background, any other one is aborted.
#[derive(Debug)]
pub(crate) struct NcclCommunicator {
    shared: Arc<Shared>,
    calls: Sender<Call>,
    results: Receiver<Result<(), DeviceError>>,
}

impl NcclCommunicator {
    /// Begins to create a communicator in the background.
    ///
    /// # Errors
    /// The error of the operating system if it refuses a thread or a descriptor.
    pub(crate) fn begin(
        library: &Arc<Library>,
        init: CommInit,
        timeouts: Timeouts,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            library: library.clone(),
            context: init.stream.context().clone(),
            timeouts,
            begun: Instant::now(),
            finished: Notifier::new()?,
            abort: AtomicBool::new(false),
            abort_nanos: AtomicU64::new(0),
            marked: OnceLock::new(),
            status: Mutex::new(Status {
                phase: Phase::Building,
                handle: None,
                in_call: Some(InCall::Request),
                on_stream: OnStream::Nothing,
            }),
            changed: Condvar::new(),
        });
        let (calls, to_do) = mpsc::channel();
        let (done, results) = mpsc::channel();
        let (watched, unreleased) = (shared.clone(), Unreleased::new());
        let watch = move || {
            relax_capture_mode();
            watched.watch();
            drop(unreleased);
        };
        thread::Builder::new().name("nccl-watchdog".to_owned()).spawn(watch)?;
        let last_took = Cell::new(Duration::ZERO);
        let next = Cell::new(0);
        let caller = Caller { shared: shared.clone(), init, to_do, done, last_took, next };
        let spawned = thread::Builder::new().name("nccl".to_owned()).spawn(move || caller.run());
        if let Err(error) = spawned {
            shared.lock().in_call = None;
            shared.end("no thread could be started");
            return Err(error);
        }
        Ok(Self { shared, calls, results })
    }

    /// State of the communicator. Never blocks.
    pub(crate) fn state(&self) -> NcclState {
        match &self.shared.lock().phase {
            Phase::Building => NcclState::Building,
            Phase::Ending(reason) | Phase::Ended(reason) => NcclState::Failed(reason.clone()),
            Phase::Ready => NcclState::Ready,
        }
    }

    /// Starts an operation. Operations run in their order.
    pub(crate) fn call(&self, call: Call) {
        // A thread that has ended has recorded the reason in the state.
        let _ = self.calls.send(call);
    }

    /// Returns the result of the first operation whose result was not returned, once it is there.
    /// Returns an error repeatedly if the communicator has ended otherwise.
    pub(crate) fn result(&self) -> Option<Result<(), DeviceError>> {
        self.shared.finished.clear();
        match self.results.try_recv() {
            Ok(result) => Some(result),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => {
                let reason = match self.state() {
                    NcclState::Failed(reason) => reason,
                    _ => "the NCCL thread has ended".to_owned(),
                };
                Some(Err(DeviceError::Nccl { action: "make progress", code: 0, reason }))
            }
        }
    }

    /// Notifier that is set when there is a result.
    pub(crate) fn finished(&self) -> &Notifier {
        &self.shared.finished
    }

    /// Requests an abort, for this reason. Never blocks.
    pub(crate) fn abort(&self, reason: &str) {
        self.shared.end(reason);
    }

    /// Waits until no operation occupies the stream, after an abort was requested. NCCL may still
    /// be releasing the communicator, which takes far longer than the end of its kernels.
    ///
    /// # Errors
    /// [`DeviceError::Abandoned`].
    pub(crate) fn wait_until_clear(&self) -> Result<(), DeviceError> {
        let waited = self.shared.timeouts.abort;
        let until = Instant::now() + waited;
        let mut status = self.shared.lock();
        loop {
            let is_clear = match status.on_stream {
                OnStream::Marked(index) => self.shared.is_marked_complete(index),
                OnStream::Nothing => true,
                OnStream::Unmarked => false,
            };
            if is_clear || matches!(status.phase, Phase::Ended(_)) {
                return Ok(());
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(DeviceError::Abandoned { waited });
            }
            status = self.shared.wait(status, Some(left.min(POLL_INTERVAL)));
        }
    }

    /// Duration of the abort, once it has returned.
    #[cfg(feature = "testing")]
    pub(crate) fn abort_time(&self) -> Option<Duration> {
        match self.shared.abort_nanos.load(Ordering::Acquire) {
            0 => None,
            nanos => Some(Duration::from_nanos(nanos)),
        }
    }
}

impl Drop for NcclCommunicator {
    fn drop(&mut self) {
        let is_ready = matches!(self.shared.lock().phase, Phase::Ready);
        if !is_ready {
            // An initialization that hangs would block the thread for ever.
            self.shared.end("the group was dropped");
        }
        // Otherwise the calling thread sees the closed channel and finalizes the communicator.
    }
}

/// State shared by both threads and the owner.
#[derive(Debug)]
struct Shared {
    library: Arc<Library>,
    context: Arc<CudaContext>,
    timeouts: Timeouts,
    begun: Instant,
    finished: Notifier,
    /// Set once; no call of NCCL begins after that.
    abort: AtomicBool,
    /// Duration of the abort in nanoseconds; 0 until it has returned.
    abort_nanos: AtomicU64,
    /// Events that mark the ends of the last operations, once there is a communicator.
    marked: OnceLock<[CudaEvent; ENQUEUED_MAX]>,
    status: Mutex<Status>,
    changed: Condvar,
}

/// **Invariant:** the calling thread uses the handle while `in_call` is set. The watchdog uses it
/// after `abort` is set and the call has returned or is considered hung. A poll is never considered
/// hung, as it never blocks: an abort would free what it reads.
#[derive(Debug)]
struct Status {
    phase: Phase,
    handle: Option<Handle>,
    in_call: Option<InCall>,
    on_stream: OnStream,
}

/// The call that the calling thread is in.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum InCall {
    /// Reads the communicator's state.
    Poll,
    /// Anything else.
    Request,
}

/// What of this communicator may be on a stream.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum OnStream {
    /// Operations, whose end the event with this index marks.
    Marked(usize),
    Nothing,
    /// Operations. The last one is not known to be followed by an event.
    Unmarked,
}

#[derive(Clone, Debug, Eq, PartialEq)]
enum Phase {
    Building,
    /// An abort is requested, for this reason.
    Ending(String),
    /// NCCL has released the communicator, or never created it.
    Ended(String),
    Ready,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Status> {
        self.status.lock().expect("nothing under this lock panics")
    }

    fn wait<'a>(
        &self,
        status: MutexGuard<'a, Status>,
        limit: Option<Duration>,
    ) -> MutexGuard<'a, Status> {
        let no_panic = "nothing under this lock panics";
        match limit {
            None => self.changed.wait(status).expect(no_panic),
            Some(limit) => self.changed.wait_timeout(status, limit).expect(no_panic).0,
        }
    }

    fn end(&self, reason: &str) {
        self.end_locked(&mut self.lock(), reason);
    }

    fn end_locked(&self, status: &mut Status, reason: &str) {
        if self.abort.swap(true, Ordering::AcqRel) {
            return;
        }
        status.phase = Phase::Ending(reason.to_owned());
        release::abort_begun(self.key(), self.timeouts.abort);
        self.changed.notify_all();
    }

    /// Key of this communicator in the list of aborts.
    fn key(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// Body of the watchdog thread: waits until an abort is requested or the initialization times
    /// out, and aborts the communicator.
    fn watch(&self) {
        let mut status = self.lock();
        while !self.abort.load(Ordering::Acquire) {
            let left = match status.phase {
                Phase::Building => Some(self.timeouts.init.saturating_sub(self.begun.elapsed())),
                _ => None,
            };
            if left == Some(Duration::ZERO) {
                let reason =
                    format!("initialization did not complete within {:?}", self.timeouts.init);
                self.end_locked(&mut status, &reason);
                break;
            }
            status = self.wait(status, left);
        }
        let asked = Instant::now();
        let handle = loop {
            let left = CALL_TIME_MAX.saturating_sub(asked.elapsed());
            match (status.handle, status.in_call) {
                (handle, None) => break handle,
                // NCCL's abort is designed to end calls that hang.
                (handle @ Some(_), Some(InCall::Request)) if left.is_zero() => break handle,
                (Some(_), Some(InCall::Request)) => status = self.wait(status, Some(left)),
                // The poll returns by itself, or there is no handle to abort yet.
                (Some(_), Some(InCall::Poll)) | (None, Some(_)) => status = self.wait(status, None),
            }
        };
        status.handle = None;
        drop(status);
        if let Some(handle) = handle {
            // Without a context, the abort would create one on the process's first GPU.
            if let Err(error) = self.context.bind_to_thread() {
                tracing::warn!(%error, "cannot use the GPU for an abort of NCCL");
            }
            // SAFETY: this is the only abort, since the handle was taken; no further call begins.
            if let Err(error) = unsafe { self.library.abort(handle) } {
                tracing::warn!(%error, "an abort of NCCL failed");
            }
        }
        let nanos = u64::try_from(asked.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.abort_nanos.store(nanos.max(1), Ordering::Release);
        release::abort_ended(self.key());
        let mut status = self.lock();
        if let Phase::Ending(reason) = &status.phase {
            status.phase = Phase::Ended(reason.clone());
        }
        self.changed.notify_all();
    }

    /// Waits until NCCL has released the communicator.
    fn wait_for_release(&self) {
        let mut status = self.lock();
        while !matches!(status.phase, Phase::Ended(_)) {
            status = self.wait(status, None);
        }
    }

    fn set_on_stream(&self, on_stream: OnStream) {
        self.lock().on_stream = on_stream;
        self.changed.notify_all();
    }

    /// Whether the work before the event is complete. If that can't be known, the release of the
    /// communicator is waited for.
    fn is_marked_complete(&self, index: usize) -> bool {
        let Some(events) = self.marked.get() else { return false };
        let is_complete = || events[index].try_is_complete().is_ok_and(|done| done);
        self.context.bind_to_thread().is_ok() && is_complete()
    }
}

/// Why the calling thread stops.
enum Stop {
    /// The communicator is being aborted by the watchdog.
    Aborted,
    Failed(DeviceError),
}

impl From<DeviceError> for Stop {
    fn from(error: DeviceError) -> Self {
        Self::Failed(error)
    }
}

/// The thread that calls NCCL.
struct Caller {
    shared: Arc<Shared>,
    init: CommInit,
    to_do: Receiver<Call>,
    done: Sender<Result<(), DeviceError>>,
    /// Duration of the last operation.
    last_took: Cell<Duration>,
    /// Index of the event that marks the end of the next operation.
    next: Cell<usize>,
}

impl Caller {
    /// Body of the thread. It outlives the communicator, whose abort uses memory of the thread that
    /// called NCCL last.
    fn run(self) {
        relax_capture_mode();
        let shared = self.shared.clone();
        self.serve();
        shared.wait_for_release();
    }

    fn serve(self) {
        let events = match self.build() {
            Ok(events) => self.shared.marked.get_or_init(|| events),
            Err(stop) => return self.stop(stop),
        };
        let mut status = self.shared.lock();
        if status.phase == Phase::Building {
            status.phase = Phase::Ready;
            self.shared.changed.notify_all();
        }
        drop(status);
        let took = self.shared.begun.elapsed();
        tracing::debug!(
            rank = self.init.rank,
            world = self.init.world,
            ?took,
            "NCCL communicator created"
        );
        for call in &self.to_do {
            let result = match self.perform(&call, events) {
                Ok(()) => Ok(()),
                Err(Stop::Aborted) => return,
                Err(Stop::Failed(error)) => Err(error),
            };
            if let Err(error) = &result {
                self.shared.end(&error.to_string());
            }
            let has_failed = result.is_err();
            // The receiver is gone if the group was dropped during an operation.
            let _ = self.done.send(result);
            self.shared.finished.notify();
            if has_failed {
                return;
            }
        }
        // If this fails, the abort below still releases the communicator.
        if let Err(Stop::Failed(error)) = self.finalize() {
            tracing::debug!(%error, "cannot finalize an NCCL communicator");
        }
        self.shared.end("the group was dropped");
    }

    fn stop(&self, stop: Stop) {
        if let Stop::Failed(error) = stop {
            self.shared.end(&error.to_string());
        }
    }

    /// Creates the communicator, and the events that mark the ends of operations.
    fn build(&self) -> Result<[CudaEvent; ENQUEUED_MAX], Stop> {
        let CommInit { id, rank, world, stream } = &self.init;
        let context = stream.context();
        let prepared = context
            .bind_to_thread()
            .and_then(|()| Ok([context.new_event(None)?, context.new_event(None)?]));
        let begun = match prepared {
            Ok(_) => self.shared.library.begin(id, *rank, *world),
            Err(source) => Err(DeviceError::Cuda { action: "create an event", source }),
        };
        let mut status = self.shared.lock();
        status.in_call = None;
        self.shared.changed.notify_all();
        let (handle, call_status) = begun?;
        status.handle = Some(handle);
        drop(status);
        let back_off = BackOff::new(SPIN_TIME_MIN);
        self.wait_until_done("create a communicator", call_status, &back_off)?;
        prepared.map_err(|source| DeviceError::Cuda { action: "create an event", source }.into())
    }

    /// Executes an operation, and records an event after it.
    fn perform(&self, call: &Call, events: &[CudaEvent; ENQUEUED_MAX]) -> Result<(), Stop> {
        let Call { kind, buffers, beside } = call;
        let (kind, buffers) = (*kind, *buffers);
        let index = self.next.replace((self.next.get() + 1) % ENQUEUED_MAX);
        let event = &events[index];
        // Of an earlier operation, or complete if there was none.
        self.wait_until_complete(event, "all-reduce", &BackOff::new(self.spin_time()))?;
        self.shared.set_on_stream(OnStream::Unmarked);
        let (stream, waits) = match beside {
            None => (&self.init.stream, true),
            Some(Beside { stream, after, waits }) => {
                stream.wait(after).map_err(DeviceError::cuda("order two streams"))?;
                (stream, *waits)
            }
        };
        let raw = stream.cu_stream().cast();
        let action = kind.action();
        let call_status = self.call(InCall::Request, |nccl, handle| {
            // SAFETY: this thread may use the handle, see `call`; the caller guarantees the
            // buffers.
            unsafe { nccl.enqueue(kind, handle, buffers, raw) }
        })?;
        let back_off = BackOff::new(self.spin_time());
        self.wait_until_done(action, call_status, &back_off)?;
        event.record(stream).map_err(DeviceError::cuda("record an event"))?;
        self.shared.set_on_stream(OnStream::Marked(index));
        if !waits {
            return Ok(());
        }
        self.wait_until_complete(event, action, &back_off)?;
        self.shared.set_on_stream(OnStream::Nothing);
        self.last_took.set(back_off.begun.elapsed());
        // An error reported together with completion counts as well.
        self.poll(action).map(drop)
    }

    fn wait_until_complete(
        &self,
        event: &CudaEvent,
        action: &'static str,
        back_off: &BackOff,
    ) -> Result<(), Stop> {
        while !event.try_is_complete().map_err(DeviceError::cuda("complete an NCCL operation"))? {
            self.poll(action)?;
            back_off.wait();
        }
        Ok(())
    }

    /// How long the next operation is polled without a pause: as long as the last one took, and a
    /// half. A pause delays the end of an operation by up to a tenth of a millisecond.
    fn spin_time(&self) -> Duration {
        (self.last_took.get() * 3 / 2).clamp(SPIN_TIME_MIN, SPIN_TIME_MAX)
    }

    /// Finalizes the communicator: outstanding data reaches the peers.
    fn finalize(&self) -> Result<(), Stop> {
        let request = InCall::Request;
        // SAFETY: this thread may use the handle, see `call`.
        let mut call_status =
            self.call(request, |nccl, handle| unsafe { nccl.finalize(handle) })?;
        let (begun, back_off) = (Instant::now(), BackOff::new(SPIN_TIME_MIN));
        while call_status == CallStatus::InProgress && begun.elapsed() < self.shared.timeouts.abort
        {
            back_off.wait();
            call_status = self.poll("finalize the communicator")?;
        }
        Ok(())
    }

    /// Polls until the last request is complete.
    fn wait_until_done(
        &self,
        action: &'static str,
        mut call_status: CallStatus,
        back_off: &BackOff,
    ) -> Result<(), Stop> {
        while call_status == CallStatus::InProgress {
            back_off.wait();
            call_status = self.poll(action)?;
        }
        Ok(())
    }

    fn poll(&self, action: &'static str) -> Result<CallStatus, Stop> {
        // SAFETY: this thread may use the handle, see `call`.
        self.call(InCall::Poll, |nccl, handle| unsafe { nccl.poll(action, handle) })
    }

    /// Makes one call with the communicator, unless it is being aborted. No other thread uses the
    /// handle meanwhile.
    fn call<T>(
        &self,
        kind: InCall,
        call: impl FnOnce(&Library, Handle) -> Result<T, DeviceError>,
    ) -> Result<T, Stop> {
        let mut status = self.shared.lock();
        let Some(handle) = status.handle else { return Err(Stop::Aborted) };
        if self.shared.abort.load(Ordering::Acquire) {
            return Err(Stop::Aborted);
        }
        status.in_call = Some(kind);
        drop(status);
        let result = call(&self.shared.library, handle);
        let mut status = self.shared.lock();
        status.in_call = None;
        if self.shared.abort.load(Ordering::Acquire) {
            self.shared.changed.notify_all();
            return Err(Stop::Aborted);
        }
        Ok(result?)
    }
}

/// Limit of one request. Requests to a non-blocking communicator return at once; one that exceeds
/// the limit hangs. A thread may get no processor for a tenth of a second.
const CALL_TIME_MAX: Duration = Duration::from_secs(2);

/// Most operations on the stream at once: one that runs, and one that follows it without a gap. The
/// kernel of each that is there at an abort spins thousands of times before it looks at the flag.
const ENQUEUED_MAX: usize = 2;
