//! Serves joining workers concurrently with the training: a snapshot of the state, and every step's
//! result after it.
//!
//! ```text
//!   trainer ── shared buffers ──► snapshot ── one thread per joiner ── messages ──► joiner
//! ```
//!
//! **Invariant:** the trainer never waits for a joiner. It shares its buffers, which are read-only
//! until the next update. That waits for the thread that copies them, which takes less time than
//! another copy. **Invariant:** a joiner receives the state of a step that all ranks of the group
//! hold, and the result of every step that this rank commits after it. So a joiner that is ahead of
//! a survivor has the reduced gradient of its last step. **Invariant:** a joiner that is too slow
//! is dropped: at most [`QUEUED_BYTES_MAX`] of results are queued for it, or a few of them if each
//! is larger. Joiners of one step share a snapshot. While it exists, others wait, unless all
//! snapshots fit into [`SNAPSHOTS_BYTES`].
//!
//! A snapshot's memory is allocated before its step, because new pages can take ten times as long
//! as the copy.

mod delivery;

use std::mem;
use std::sync::mpsc::{Receiver, Sender, SyncSender, TrySendError, channel, sync_channel};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use elasticdl_proto::Generation;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use self::delivery::Delivery;
use crate::machine::{Machine, Request, RequestLink};
use crate::session::header;
use crate::session::header::{StateRecord, StepHeader};
use crate::session::origin::Program;
use crate::state_buffer::{Copying, zeros};
use crate::tensor::ModelSize;

/// Joining workers that this worker serves.
#[derive(Debug)]
pub(crate) struct Donor {
    /// Requests that wait for a snapshot.
    waiting: Vec<Box<dyn Request>>,
    memory: Memory,
    prepared: Option<Prepared>,
    fetchers: Vec<Fetcher>,
    /// Snapshots that may still occupy memory.
    held: Vec<Weak<Snapshot>>,
    idle_timeout: Duration,
    /// Maximum number of floats in a part.
    part_floats: usize,
    machine: Arc<dyn Machine>,
}

/// A snapshot that is sent when all ranks have reported that they hold its step.
#[derive(Debug)]
struct Prepared {
    generation: Generation,
    step: u64,
    snapshot: Arc<Snapshot>,
}

/// Memory of the next snapshot: of the parameters and of the slots.
#[derive(Debug)]
enum Memory {
    Absent,
    /// A thread allocates it, and sends it.
    Allocating(Receiver<[Vec<f32>; 2]>),
    Allocated([Vec<f32>; 2]),
}

/// The tensors of one step.
#[derive(Debug)]
struct Snapshot {
    parameters_len: usize,
    slots_len: usize,
    /// Parameters and slots, once they are copied.
    tensors: OnceLock<[Vec<f32>; 2]>,
}

impl Snapshot {
    /// Waits until the tensors are copied.
    fn wait(&self, machine: &dyn Machine) -> &[Vec<f32>; 2] {
        machine.block(Duration::MAX, &mut |wait| {
            if !wait.is_zero() {
                self.tensors.wait();
            }
            self.tensors.get().is_some()
        });
        self.tensors.get().expect("nothing else ends the wait")
    }
}

#[derive(Debug)]
struct Fetcher {
    member: u64,
    messages: SyncSender<StateMessage>,
    /// The link in use, and the channel for its successor after it has broken.
    link: Box<dyn RequestLink>,
    links: Sender<Box<dyn Request>>,
}

/// Messages after a snapshot. Steps are those of the donor's group of `generation`.
#[derive(Clone, Debug)]
enum StateMessage {
    /// Donor and joiner both enter this generation.
    End { generation: Generation },
    /// Headers and reduced gradient that lead from `step` to the next one.
    Result { generation: Generation, step: u64, headers: Arc<Vec<u8>>, sum: Arc<Vec<f32>> },
}

impl Donor {
    /// `idle_timeout`: time without progress or a report after which a joiner is dropped.
    /// `part_floats`: maximum number of floats in a part, at most [`PART_FLOATS_MAX`].
    pub(crate) fn new(
        idle_timeout: Duration,
        part_floats: usize,
        machine: Arc<dyn Machine>,
    ) -> Self {
        Self {
            waiting: Vec::new(),
            memory: Memory::Absent,
            prepared: None,
            fetchers: Vec::new(),
            held: Vec::new(),
            idle_timeout,
            part_floats,
            machine,
        }
    }

    /// Takes in a state request. A joiner whose link broke resumes at its position.
    pub(crate) fn admit(&mut self, request: Box<dyn Request>) {
        let member = request.member();
        self.waiting.retain(|other| other.member() != member);
        let request = match self.fetchers.iter_mut().find(|fetcher| fetcher.member == member) {
            None => Some(request),
            Some(fetcher) => {
                fetcher.link.shut_down();
                fetcher.link = request.link();
                fetcher.links.send(request).err().map(|unsent| unsent.0)
            }
        };
        if let Some(request) = request {
            self.fetchers.retain(|fetcher| fetcher.member != member);
            if self.waiting.len() == WAITING_MAX {
                self.waiting.remove(0);
            }
            self.waiting.push(request);
        }
    }

    /// Whether a joiner waits for the state of `step`, and there is memory for a snapshot of this
    /// size, which a thread allocates if the bounds permit.
    pub(crate) fn wants_snapshot(
        &mut self,
        generation: Generation,
        step: u64,
        size: ModelSize,
    ) -> bool {
        if self.waiting.is_empty() {
            self.memory = Memory::Absent;
            return false;
        }
        if self.is_prepared(generation, step) {
            return false;
        }
        self.prepared = None;
        match &self.memory {
            Memory::Absent => {
                if self.may_hold(size.total().saturating_mul(size_of::<f32>())) {
                    self.allocate(size);
                }
            }
            Memory::Allocating(memory) => {
                if let Ok(memory) = memory.try_recv() {
                    self.memory = Memory::Allocated(memory);
                }
            }
            Memory::Allocated(_) => {}
        }
        matches!(self.memory, Memory::Allocated(_))
    }

    /// Whether another snapshot of this many bytes is within the bounds.
    fn may_hold(&mut self, bytes: usize) -> bool {
        self.held.retain(|snapshot| snapshot.strong_count() > 0);
        self.held.is_empty() || (self.held.len() + 1).saturating_mul(bytes) <= SNAPSHOTS_BYTES
    }

    /// Starts to allocate memory for a snapshot.
    fn allocate(&mut self, size: ModelSize) {
        let (send, receive) = channel();
        let allocate = move || {
            // The joiners may have gone meanwhile.
            let _ = send.send([size.parameters, size.slots].map(zeros));
        };
        match self.machine.spawn("snapshot-memory", Box::new(allocate)) {
            Ok(()) => self.memory = Memory::Allocating(receive),
            Err(error) => {
                tracing::warn!(%error, "no thread to allocate memory for a joining worker")
            }
        }
    }

    /// Starts to copy the state of `step` for the waiting joiners, which
    /// [want](Self::wants_snapshot) a snapshot. `copying`: starts to copy the parameters and the
    /// slots to memory of their sizes.
    ///
    /// # Errors
    /// Those of `copying`.
    pub(crate) fn prepare<E>(
        &mut self,
        generation: Generation,
        step: u64,
        copying: impl FnOnce([Vec<f32>; 2]) -> Result<[Copying; 2], E>,
    ) -> Result<(), E> {
        let Memory::Allocated(memory) = mem::replace(&mut self.memory, Memory::Absent) else {
            return Ok(());
        };
        let [parameters_len, slots_len] = [0, 1].map(|tensor| memory[tensor].len());
        let copying = copying(memory)?;
        let snapshot = Arc::new(Snapshot { parameters_len, slots_len, tensors: OnceLock::new() });
        let filling = Arc::clone(&snapshot);
        let copy = move || {
            let tensors = copying.map(Copying::finish);
            filling.tensors.set(tensors).expect("a snapshot is filled once");
        };
        match self.machine.spawn("snapshot", Box::new(copy)) {
            Ok(()) => {
                self.held.push(Arc::downgrade(&snapshot));
                self.prepared = Some(Prepared { generation, step, snapshot });
            }
            Err(error) => {
                tracing::warn!(%error, "no thread to copy the state for a joining worker")
            }
        }
        Ok(())
    }

    /// Waits until the state is copied, as an update is about to change it.
    pub(crate) fn end_copy(&self) {
        for snapshot in self.held.iter().filter_map(Weak::upgrade) {
            snapshot.wait(&*self.machine);
        }
    }

    fn is_prepared(&self, generation: Generation, step: u64) -> bool {
        self.prepared.as_ref().is_some_and(|p| (p.generation, p.step) == (generation, step))
    }

    /// All ranks of the group of `generation` have reported that they hold `step`, the step of this
    /// rank: waiting joiners are sent its snapshot.
    pub(crate) fn release(
        &mut self,
        generation: Generation,
        step: u64,
        note: impl Fn() -> StateNote,
    ) {
        if !self.is_prepared(generation, step) {
            return;
        }
        let Some(Prepared { snapshot, .. }) = self.prepared.take() else { return };
        for request in mem::take(&mut self.waiting) {
            self.serve(request, generation, note(), &snapshot);
        }
    }

    fn serve(
        &mut self,
        request: Box<dyn Request>,
        generation: Generation,
        note: StateNote,
        snapshot: &Arc<Snapshot>,
    ) {
        let (member, step) = (request.member(), note.record.step);
        let results = QUEUED_BYTES_MAX / (snapshot.parameters_len * size_of::<f32>()).max(1);
        let (messages, queue) = sync_channel(results.clamp(QUEUED_RESULTS_MIN, QUEUED_RESULTS_MAX));
        let (links, next_links) = channel();
        let fetcher = Fetcher { member, messages, link: request.link(), links };
        let delivery = Delivery::new(
            (member, self.idle_timeout, self.part_floats),
            (generation, note),
            Arc::clone(snapshot),
            (queue, next_links),
            Arc::clone(&self.machine),
        );
        match self.machine.spawn("donor", Box::new(move || delivery.run(request))) {
            Ok(()) => {
                tracing::info!(joiner = member, step, "a joining worker fetches the state");
                self.fetchers.push(fetcher);
            }
            Err(error) => tracing::warn!(%error, "no thread to serve a joining worker"),
        }
    }

    /// Whether any joiner needs the result of the next step.
    pub(crate) fn is_serving(&self) -> bool {
        !self.fetchers.is_empty()
    }

    /// The group of `generation` has committed the step after `step`; its reduced gradient is
    /// `sum`.
    pub(crate) fn committed(
        &mut self,
        generation: Generation,
        step: u64,
        headers: &[StepHeader],
        sum: &Arc<Vec<f32>>,
    ) {
        if self.is_serving() {
            let headers = Arc::new(header::encode(&headers.to_vec()));
            let result = StateMessage::Result { generation, step, headers, sum: Arc::clone(sum) };
            self.fetchers.retain(|fetcher| fetcher.send(result.clone()));
        }
    }

    /// This worker enters `generation`. Joiners that enter it too have received everything; the
    /// others keep following this worker.
    pub(crate) fn switch(&mut self, generation: Generation, is_member: impl Fn(u64) -> bool) {
        self.prepared = None;
        self.waiting.retain(|request| !is_member(request.member()));
        self.fetchers.retain(|fetcher| {
            let enters = is_member(fetcher.member);
            if enters {
                fetcher.send(StateMessage::End { generation });
            }
            !enters
        });
    }

    /// This worker makes no more steps.
    pub(crate) fn dismiss(&mut self) {
        self.waiting.clear();
        self.prepared = None;
        self.fetchers.clear();
    }
}

impl Fetcher {
    /// Queues a message. Returns whether to keep serving the joiner.
    fn send(&self, message: StateMessage) -> bool {
        match self.messages.try_send(message) {
            Ok(()) => true,
            Err(TrySendError::Full(_)) => {
                tracing::info!(
                    joiner = self.member,
                    "a joining worker is slower than the group; its transfer starts over"
                );
                false
            }
            Err(TrySendError::Disconnected(_)) => false,
        }
    }
}

/// Announcement of the parts of a snapshot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct StateNote {
    /// What the group runs.
    pub(crate) program: Program,
    pub(crate) record: StateRecord,
    /// First float to be sent. Not 0 if an earlier link has delivered those before it.
    pub(crate) from: u64,
}

/// Header of a part of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PartNote {
    /// Index of the part's first float, counted over parameters and slots.
    pub(crate) from: u64,
    /// [`digest`] of its floats.
    pub(crate) digest: u64,
}

/// Digest of a part, with which the joiner verifies it.
pub(crate) fn digest(part: &[f32]) -> u64 {
    xxh3_64(bytemuck::cast_slice(part))
}

/// A [`StateNote`]: the parts of a snapshot follow.
pub(crate) const KIND_STATE: u32 = 1;
/// The headers of a step, and its reduced gradient.
pub(crate) const KIND_RESULT: u32 = 2;
/// The joiner has received everything committed so far.
pub(crate) const KIND_CAUGHT_UP: u32 = 3;
/// End of the stream; the generation is the one that both enter.
pub(crate) const KIND_END: u32 = 4;
/// A [`PartNote`], and floats of the parameters or of the slots.
pub(crate) const KIND_PART: u32 = 5;

/// Maximum number of floats in a part: 16 MiB, so that a joiner checks its inbox now and then.
pub(crate) const PART_FLOATS_MAX: usize = 4 << 20;

/// Time without any traffic after which a link between donor and joiner is closed. The master
/// notices stopped and lost processes much earlier; this bound is for networks that pause.
pub(crate) const TRANSFER_IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// Bound of the memory of all snapshots, in bytes, if there are several.
const SNAPSHOTS_BYTES: usize = 512 << 20;

/// Bound of the results queued for one joiner, in bytes.
const QUEUED_BYTES_MAX: usize = 512 << 20;
/// Lower bound of the queue's length, even if the results exceed that.
const QUEUED_RESULTS_MIN: usize = 3;
const QUEUED_RESULTS_MAX: usize = 64;

/// Maximum number of requests that wait for a snapshot.
const WAITING_MAX: usize = 64;

#[cfg(test)]
mod tests;
