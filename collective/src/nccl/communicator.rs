//! One communicator: the thread that calls NCCL, and the one that ends it.
#![allow(unsafe_code, reason = "calls into a C library; who holds the handle when is decided here")]

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaEvent, CudaStream};

use super::library::{Buffers, CallStatus, Handle, Library, UniqueId};
use crate::device::DeviceError;
use crate::notifier::Notifier;

/// How far a group is with NCCL, as one of its ranks sees it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum NcclState {
    /// The group does without, because of this. The same on all ranks.
    Absent(String),
    /// A communicator is being made in the background.
    Building,
    /// It could not be made, or has ended, because of this. The group does without from here on.
    Failed(String),
    /// This rank can use it; it may be used once all can.
    Ready,
}

/// One rank's communicator. Dropping it never blocks: what works is brought to rest in the
/// background, what does not is aborted.
#[derive(Debug)]
pub(crate) struct NcclCommunicator {
    shared: Arc<Shared>,
    calls: Sender<Call>,
    results: Receiver<Result<(), DeviceError>>,
}

/// Who a communicator is made for.
#[derive(Clone, Debug)]
pub(crate) struct CommInit {
    pub(crate) id: UniqueId,
    pub(crate) rank: usize,
    pub(crate) world: usize,
    /// On which all calls are enqueued.
    pub(crate) stream: Arc<CudaStream>,
}

/// How long NCCL may take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timeouts {
    pub(crate) init: Duration,
    pub(crate) abort: Duration,
}

/// An operation. The buffers stay until its result has come, or the communicator has ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub(crate) kind: CallKind,
    pub(crate) buffers: Buffers,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum CallKind {
    AllGather,
    AllReduce,
    Broadcast { root: usize },
}

/// The communicators of this process that NCCL did not give back in time. Where there are any, the
/// process should end when it can: they hold threads and memory of the device, and may hold more.
#[must_use]
pub fn abandoned() -> usize {
    let now = Instant::now();
    aborts().iter().filter(|(_, deadline)| *deadline <= now).count()
}

impl NcclCommunicator {
    /// Begins to make one, in the background.
    ///
    /// # Errors
    /// What the system says if it gives no threads or descriptors.
    pub(crate) fn begin(
        library: &Arc<Library>,
        init: CommInit,
        timeouts: Timeouts,
    ) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            library: library.clone(),
            timeouts,
            begun: Instant::now(),
            finished: Notifier::new()?,
            abort: AtomicBool::new(false),
            abort_nanos: AtomicU64::new(0),
            status: Mutex::new(Status { phase: Phase::Building, handle: None, in_call: true }),
            changed: Condvar::new(),
        });
        let (calls, to_do) = mpsc::channel();
        let (done, results) = mpsc::channel();
        let watched = shared.clone();
        thread::Builder::new().name("nccl-watchdog".to_owned()).spawn(move || watched.watch())?;
        let caller = Caller { shared: shared.clone(), init, to_do, done };
        let spawned = thread::Builder::new().name("nccl".to_owned()).spawn(move || caller.run());
        if let Err(error) = spawned {
            shared.lock().in_call = false;
            shared.end("no thread for it");
            return Err(error);
        }
        Ok(Self { shared, calls, results })
    }

    /// Never blocks.
    pub(crate) fn state(&self) -> NcclState {
        match &self.shared.lock().phase {
            Phase::Building => NcclState::Building,
            Phase::Ending(reason) | Phase::Ended(reason) => NcclState::Failed(reason.clone()),
            Phase::Ready => NcclState::Ready,
        }
    }

    /// Has an operation done. One at a time.
    pub(crate) fn call(&self, call: Call) {
        // A thread that has ended has said why in the state.
        let _ = self.calls.send(call);
    }

    /// The result of the operation, once there is one. `None` again and again if the communicator
    /// has ended otherwise.
    pub(crate) fn result(&self) -> Option<Result<(), DeviceError>> {
        self.shared.finished.clear();
        match self.results.try_recv() {
            Ok(result) => Some(result),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => {
                let reason = match self.state() {
                    NcclState::Failed(reason) => reason,
                    _ => "its thread has ended".to_owned(),
                };
                Some(Err(DeviceError::Nccl { action: "go on", code: 0, reason }))
            }
        }
    }

    /// Rings when there is a result.
    pub(crate) fn finished(&self) -> &Notifier {
        &self.shared.finished
    }

    /// Has it aborted, because of this. Never blocks.
    pub(crate) fn abort(&self, reason: &str) {
        self.shared.end(reason);
    }

    /// Waits until NCCL has given it back, once it is being aborted.
    ///
    /// # Errors
    /// [`DeviceError::Abandoned`].
    pub(crate) fn wait_until_ended(&self) -> Result<(), DeviceError> {
        let waited = self.shared.timeouts.abort;
        let until = Instant::now() + waited;
        let mut status = self.shared.lock();
        while !matches!(status.phase, Phase::Ended(_)) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(DeviceError::Abandoned { waited });
            }
            status = self.shared.wait(status, Some(left));
        }
        Ok(())
    }

    /// How long NCCL took to give it back, if it has.
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
            // A call that hangs in the making would hold the thread for ever.
            self.shared.end("the group is over");
        }
        // Otherwise the thread sees that nothing is to come, and brings it to rest.
    }
}

/// What both threads and the owner know.
#[derive(Debug)]
struct Shared {
    library: Arc<Library>,
    timeouts: Timeouts,
    begun: Instant,
    finished: Notifier,
    /// Set once; from then on no call begins.
    abort: AtomicBool,
    /// How long the abort took; 0 until it has returned.
    abort_nanos: AtomicU64,
    status: Mutex<Status>,
    changed: Condvar,
}

/// **Invariant:** the handle is used by the calling thread while `in_call`, and by the watchdog
/// after `abort` is set and that call is over or is thought to hang.
#[derive(Debug)]
struct Status {
    phase: Phase,
    handle: Option<Handle>,
    in_call: bool,
}

#[derive(Clone, Debug, Eq, PartialEq)]
enum Phase {
    Building,
    /// To be aborted, because of this.
    Ending(String),
    /// NCCL has given it back, or never made it.
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
        aborts().push((self.key(), Instant::now() + self.timeouts.abort));
        self.changed.notify_all();
    }

    /// What tells this communicator's abort from others'.
    fn key(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// The watchdog: waits until the communicator is to end, and ends it.
    fn watch(&self) {
        let mut status = self.lock();
        while !self.abort.load(Ordering::Acquire) {
            let left = match status.phase {
                Phase::Building => Some(self.timeouts.init.saturating_sub(self.begun.elapsed())),
                _ => None,
            };
            if left == Some(Duration::ZERO) {
                let reason = format!("it was not made within {:?}", self.timeouts.init);
                self.end_locked(&mut status, &reason);
                break;
            }
            status = self.wait(status, left);
        }
        let asked = Instant::now();
        let handle = loop {
            let left = CALL_TIME_MAX.saturating_sub(asked.elapsed());
            match (status.handle, status.in_call) {
                (handle, false) => break handle,
                // NCCL's abort is made to end calls that hang.
                (handle @ Some(_), true) if left.is_zero() => break handle,
                (Some(_), true) => status = self.wait(status, Some(left)),
                // There is nothing to abort yet.
                (None, true) => status = self.wait(status, None),
            }
        };
        status.handle = None;
        drop(status);
        if let Some(handle) = handle {
            // SAFETY: this is the only abort, as the handle was taken; no call begins any more.
            if let Err(error) = unsafe { self.library.abort(handle) } {
                tracing::warn!(%error, "what NCCL said to an abort");
            }
        }
        let nanos = u64::try_from(asked.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.abort_nanos.store(nanos.max(1), Ordering::Release);
        aborts().retain(|(key, _)| *key != self.key());
        let mut status = self.lock();
        if let Phase::Ending(reason) = &status.phase {
            status.phase = Phase::Ended(reason.clone());
        }
        self.changed.notify_all();
    }
}

/// Why the calling thread stops.
enum Stop {
    /// It is being aborted; the watchdog does the rest.
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
}

impl Caller {
    fn run(self) {
        let event = match self.build() {
            Ok(event) => event,
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
            "NCCL communicator made"
        );
        for call in &self.to_do {
            let result = match self.perform(call, &event) {
                Ok(()) => Ok(()),
                Err(Stop::Aborted) => return,
                Err(Stop::Failed(error)) => Err(error),
            };
            if let Err(error) = &result {
                self.shared.end(&error.to_string());
            }
            let has_failed = result.is_err();
            // Nobody listens any more where the group was dropped in the middle of an operation.
            let _ = self.done.send(result);
            self.shared.finished.notify();
            if has_failed {
                return;
            }
        }
        // Whatever comes of this, the abort frees it.
        if let Err(Stop::Failed(error)) = self.finalize() {
            tracing::debug!(%error, "a communicator that could not be brought to rest");
        }
        self.shared.end("the group is over");
    }

    fn stop(&self, stop: Stop) {
        if let Stop::Failed(error) = stop {
            self.shared.end(&error.to_string());
        }
    }

    /// Makes the communicator, and the event that marks its operations' ends.
    fn build(&self) -> Result<CudaEvent, Stop> {
        let CommInit { id, rank, world, stream } = &self.init;
        let context = stream.context();
        let prepared = context.bind_to_thread().and_then(|()| context.new_event(None));
        let begun = match prepared {
            Ok(_) => self.shared.library.begin(id, *rank, *world),
            Err(source) => Err(DeviceError::Cuda { action: "make an event", source }),
        };
        let mut status = self.shared.lock();
        status.in_call = false;
        self.shared.changed.notify_all();
        let (handle, call_status) = begun?;
        status.handle = Some(handle);
        drop(status);
        self.wait_until_done("make a communicator", call_status, &Pause::new())?;
        prepared.map_err(|source| DeviceError::Cuda { action: "make an event", source }.into())
    }

    fn perform(&self, call: Call, event: &CudaEvent) -> Result<(), Stop> {
        let Call { kind, buffers } = call;
        let stream = &self.init.stream;
        let raw = stream.cu_stream().cast();
        let (action, call_status) = match kind {
            CallKind::AllGather => (
                "gather",
                self.call(|nccl, handle| {
                    // SAFETY: this thread's turn, see `call`; the buffers are by the caller's
                    // promise.
                    unsafe { nccl.all_gather(handle, buffers, raw) }
                })?,
            ),
            CallKind::AllReduce => (
                "sum",
                self.call(|nccl, handle| {
                    // SAFETY: as above.
                    unsafe { nccl.all_reduce(handle, buffers, raw) }
                })?,
            ),
            CallKind::Broadcast { root } => (
                "broadcast",
                self.call(|nccl, handle| {
                    // SAFETY: as above.
                    unsafe { nccl.broadcast(handle, buffers, root, raw) }
                })?,
            ),
        };
        let pause = Pause::new();
        self.wait_until_done(action, call_status, &pause)?;
        event.record(stream).map_err(DeviceError::cuda("record an event"))?;
        while !event.try_is_complete().map_err(DeviceError::cuda("end an operation of NCCL"))? {
            self.poll(action)?;
            pause.wait();
        }
        // An error that came with the end counts, too.
        self.poll(action).map(drop)
    }

    /// Brings it to rest: peers get what they are still to get from here.
    fn finalize(&self) -> Result<(), Stop> {
        // SAFETY: this thread's turn, see `call`.
        let mut call_status = self.call(|nccl, handle| unsafe { nccl.finalize(handle) })?;
        let (begun, pause) = (Instant::now(), Pause::new());
        while call_status == CallStatus::InProgress && begun.elapsed() < self.shared.timeouts.abort
        {
            pause.wait();
            call_status = self.poll("bring the communicator to rest")?;
        }
        Ok(())
    }

    /// Asks until what was begun is done.
    fn wait_until_done(
        &self,
        action: &'static str,
        mut call_status: CallStatus,
        pause: &Pause,
    ) -> Result<(), Stop> {
        while call_status == CallStatus::InProgress {
            pause.wait();
            call_status = self.poll(action)?;
        }
        Ok(())
    }

    fn poll(&self, action: &'static str) -> Result<CallStatus, Stop> {
        // SAFETY: this thread's turn, see `call`.
        self.call(|nccl, handle| unsafe { nccl.poll(action, handle) })
    }

    /// Makes one call with the communicator, unless it is being aborted: nobody else uses it
    /// meanwhile.
    fn call<T>(
        &self,
        call: impl FnOnce(&Library, Handle) -> Result<T, DeviceError>,
    ) -> Result<T, Stop> {
        let mut status = self.shared.lock();
        let Some(handle) = status.handle else { return Err(Stop::Aborted) };
        if self.shared.abort.load(Ordering::Acquire) {
            return Err(Stop::Aborted);
        }
        status.in_call = true;
        drop(status);
        let result = call(&self.shared.library, handle);
        let mut status = self.shared.lock();
        status.in_call = false;
        if self.shared.abort.load(Ordering::Acquire) {
            self.shared.changed.notify_all();
            return Err(Stop::Aborted);
        }
        Ok(result?)
    }
}

/// Between two looks: short at first, as operations are, then long enough to leave the core to
/// others.
struct Pause {
    begun: Instant,
}

impl Pause {
    fn new() -> Self {
        Self { begun: Instant::now() }
    }

    fn wait(&self) {
        if self.begun.elapsed() < SPIN_TIME_MAX {
            thread::yield_now();
        } else {
            thread::sleep(PAUSE);
        }
    }
}

/// Aborts that have not returned, and until when they should have.
fn aborts() -> MutexGuard<'static, Vec<(usize, Instant)>> {
    static ABORTS: Mutex<Vec<(usize, Instant)>> = Mutex::new(Vec::new());
    ABORTS.lock().expect("nothing under this lock panics")
}

/// Calls of a non-blocking communicator return at once. One that does not hangs.
const CALL_TIME_MAX: Duration = Duration::from_millis(100);

/// As long as a large operation takes.
const SPIN_TIME_MAX: Duration = Duration::from_millis(1);
const PAUSE: Duration = Duration::from_micros(50);
