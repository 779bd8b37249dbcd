//! Serves newcomers: a snapshot of the state, and every step's result after it, beside the
//! training.
//!
//! ```text
//!   trainer ── buffers, shared ──► snapshot ── one thread per newcomer ── messages ──► newcomer
//! ```
//!
//! **Invariant:** the trainer never waits for a newcomer. It shares its buffers, which are only
//! read until the next update; while a thread still copies them, the trainer goes on with copies of
//! its own. **Invariant:** a newcomer gets the state of a step that all ranks of the group hold,
//! and the result of every step that this rank commits after it. So a newcomer that is ahead of a
//! survivor can hand on the reduced gradient of its last step. **Invariant:** a newcomer that is
//! too slow is dropped: no more than [`QUEUED_BYTES_MAX`] of results wait for it, or few of them.
//! Newcomers of one step share a snapshot; while there is one, others wait, unless all fit into
//! [`SNAPSHOTS_BYTES`].

mod delivery;

use std::sync::mpsc::{Sender, SyncSender, TrySendError, channel, sync_channel};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use elasticdl_collective::{StateLink, StateRequest};
use elasticdl_proto::Generation;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use self::delivery::Delivery;
use crate::core::header;
use crate::core::header::{StateRecord, StepHeader};

/// The newcomers that this worker serves.
#[derive(Debug)]
pub(crate) struct Donor {
    /// Newcomers that wait for a snapshot.
    waiting: Vec<StateRequest>,
    prepared: Option<Prepared>,
    fetchers: Vec<Fetcher>,
    /// Snapshots that may still take memory.
    held: Vec<Weak<Snapshot>>,
    idle_timeout: Duration,
}

/// A snapshot that is given out when all ranks have said that they hold its step.
#[derive(Debug)]
struct Prepared {
    generation: Generation,
    step: u64,
    snapshot: Arc<Snapshot>,
}

/// The tensors of one step.
#[derive(Debug)]
struct Snapshot {
    parameters_len: usize,
    slots_len: usize,
    /// Parameters and slots, once they are copied.
    tensors: OnceLock<(Vec<f32>, Vec<f32>)>,
}

#[derive(Debug)]
struct Fetcher {
    member: u64,
    messages: SyncSender<StateMessage>,
    /// The link in use, and where the next one goes when it has broken.
    link: StateLink,
    links: Sender<StateRequest>,
}

/// What newcomers are sent after a snapshot. Steps are those of the donor's group of `generation`.
#[derive(Clone, Debug)]
enum StateMessage {
    /// The donor goes into this generation, and the newcomer with it.
    End { generation: Generation },
    /// What leads from `step` to the next one.
    Result { generation: Generation, step: u64, headers: Arc<Vec<u8>>, sum: Arc<Vec<f32>> },
}

impl Donor {
    /// `idle_timeout`: how long a newcomer may take nothing and say nothing.
    pub(crate) fn new(idle_timeout: Duration) -> Self {
        Self {
            waiting: Vec::new(),
            prepared: None,
            fetchers: Vec::new(),
            held: Vec::new(),
            idle_timeout,
        }
    }

    /// A newcomer has come to the door. One whose link broke goes on where it was.
    pub(crate) fn admit(&mut self, request: StateRequest) {
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

    /// Whether a newcomer waits for the state of `step`, and there is room for a snapshot of
    /// `floats`.
    pub(crate) fn wants_snapshot(
        &mut self,
        generation: Generation,
        step: u64,
        floats: usize,
    ) -> bool {
        if self.waiting.is_empty() {
            return false;
        }
        if self.is_prepared(generation, step) {
            return false;
        }
        self.prepared = None;
        self.held.retain(|snapshot| snapshot.strong_count() > 0);
        let bytes = floats.saturating_mul(size_of::<f32>());
        self.held.is_empty() || (self.held.len() + 1).saturating_mul(bytes) <= SNAPSHOTS_BYTES
    }

    /// Begins to copy the state of `step`, for the newcomers that wait.
    pub(crate) fn prepare(
        &mut self,
        generation: Generation,
        step: u64,
        parameters: Arc<Vec<f32>>,
        slots: Arc<Vec<f32>>,
    ) {
        let (parameters_len, slots_len) = (parameters.len(), slots.len());
        let snapshot = Arc::new(Snapshot { parameters_len, slots_len, tensors: OnceLock::new() });
        let filling = Arc::clone(&snapshot);
        let copy = move || {
            let tensors = (into_own(parameters), into_own(slots));
            filling.tensors.set(tensors).expect("a snapshot is filled once");
        };
        match std::thread::Builder::new().name("snapshot".into()).spawn(copy) {
            Ok(_) => {
                self.held.push(Arc::downgrade(&snapshot));
                self.prepared = Some(Prepared { generation, step, snapshot });
            }
            Err(error) => tracing::warn!(%error, "no thread to copy the state for a newcomer"),
        }
    }

    fn is_prepared(&self, generation: Generation, step: u64) -> bool {
        self.prepared.as_ref().is_some_and(|p| (p.generation, p.step) == (generation, step))
    }

    /// All ranks of the group of `generation` have said that they hold `step`, which this one is
    /// at: newcomers may have it.
    pub(crate) fn release(
        &mut self,
        generation: Generation,
        step: u64,
        record: impl Fn() -> StateRecord,
    ) {
        if !self.is_prepared(generation, step) {
            return;
        }
        let Some(Prepared { snapshot, .. }) = self.prepared.take() else { return };
        for request in std::mem::take(&mut self.waiting) {
            self.serve(request, generation, record(), &snapshot);
        }
    }

    fn serve(
        &mut self,
        request: StateRequest,
        generation: Generation,
        record: StateRecord,
        snapshot: &Arc<Snapshot>,
    ) {
        let (member, step) = (request.member(), record.step);
        let results = QUEUED_BYTES_MAX / (snapshot.parameters_len * size_of::<f32>()).max(1);
        let (messages, queue) = sync_channel(results.clamp(QUEUED_RESULTS_MIN, QUEUED_RESULTS_MAX));
        let (links, next_links) = channel();
        let fetcher = Fetcher { member, messages, link: request.link(), links };
        let delivery = Delivery::new(
            (member, self.idle_timeout),
            (generation, record),
            Arc::clone(snapshot),
            (queue, next_links),
        );
        match std::thread::Builder::new().name("donor".into()).spawn(move || delivery.run(request))
        {
            Ok(_) => {
                tracing::info!(newcomer = member, step, "a newcomer fetches the state");
                self.fetchers.push(fetcher);
            }
            Err(error) => tracing::warn!(%error, "no thread to serve a newcomer"),
        }
    }

    /// Whether there are newcomers that want to know of the next step.
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

    /// This worker goes into `generation`. Newcomers that are in it too have got everything; the
    /// others follow it.
    pub(crate) fn switch(&mut self, generation: Generation, is_member: impl Fn(u64) -> bool) {
        self.prepared = None;
        self.waiting.retain(|request| !is_member(request.member()));
        self.fetchers.retain(|fetcher| match is_member(fetcher.member) {
            true => {
                fetcher.send(StateMessage::End { generation });
                false
            }
            false => true,
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
    /// Whether it is to be served on.
    fn send(&self, message: StateMessage) -> bool {
        match self.messages.try_send(message) {
            Ok(()) => true,
            Err(TrySendError::Full(_)) => {
                tracing::info!(
                    newcomer = self.member,
                    "a newcomer is slower than the group; it has to begin again"
                );
                false
            }
            Err(TrySendError::Disconnected(_)) => false,
        }
    }
}

/// The shared buffer itself, if nobody else has it any more; else a copy, and the trainer gets its
/// buffer back.
fn into_own(shared: Arc<Vec<f32>>) -> Vec<f32> {
    Arc::try_unwrap(shared).unwrap_or_else(|shared| {
        let mut own = elasticdl_collective::zeros(shared.len());
        own.copy_from_slice(&shared);
        own
    })
}

/// What comes before a snapshot's parts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct StateNote {
    pub(crate) record: StateRecord,
    /// The first float that is sent. Not 0 where an earlier link has brought those before it.
    pub(crate) from: u64,
}

/// What comes with a part of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PartNote {
    /// The part's first float, counted over parameters and slots.
    pub(crate) from: u64,
    /// [`digest`] of its floats.
    pub(crate) digest: u64,
}

/// Digest of a part: what a newcomer has got is what the donor has.
pub(crate) fn digest(part: &[f32]) -> u64 {
    xxh3_64(bytemuck::cast_slice(part))
}

/// A [`StateNote`]: the parts of a snapshot follow.
pub(crate) const KIND_STATE: u32 = 1;
/// The step's headers, and its reduced gradient.
pub(crate) const KIND_RESULT: u32 = 2;
/// There is no more for now.
pub(crate) const KIND_CAUGHT_UP: u32 = 3;
/// There is no more; the generation is the one to meet in.
pub(crate) const KIND_END: u32 = 4;
/// A [`PartNote`], and floats of the parameters or of the slots.
pub(crate) const KIND_PART: u32 = 5;

/// Floats of a part, at most: 16 MiB, so that a newcomer looks into its inbox now and then.
pub(crate) const PART_FLOATS_MAX: usize = 4 << 20;

/// How long a link between a donor and a newcomer may show no sign of life. A stopped or lost
/// process is noticed by the master, and much earlier; this is for networks that pause.
pub(crate) const TRANSFER_IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// Snapshots in memory, in bytes, unless there is only one.
const SNAPSHOTS_BYTES: usize = 512 << 20;

/// Results that may wait for a newcomer, in bytes.
const QUEUED_BYTES_MAX: usize = 512 << 20;
/// Even where each of them is larger than that.
const QUEUED_RESULTS_MIN: usize = 3;
const QUEUED_RESULTS_MAX: usize = 64;

/// Newcomers that wait for a snapshot.
const WAITING_MAX: usize = 64;

#[cfg(test)]
mod tests;
