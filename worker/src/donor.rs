//! Serves newcomers: copies of the state, and every step's result after it, beside the training.
//!
//! ```text
//!   trainer ── buffers, shared ──► one thread per newcomer ── parcels ──► newcomer
//! ```
//!
//! **Invariant:** the trainer never waits for a newcomer. It shares its buffers, which are only read until the next update;
//! a thread that has not copied them by then keeps the old ones, and the trainer goes on with copies of its own.
//! **Invariant:** a newcomer that is too slow is dropped: no more than [`AHEAD_BYTES`] of results wait for it, or few of
//! them.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::Duration;

use elasticdl_collective::{StateSender, Visitor};
use elasticdl_proto::Generation;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::core::header;
use crate::core::header::{StateRecord, StepHeader};

/// The newcomers that this worker serves.
#[derive(Debug)]
pub(crate) struct Donor {
    fetchers: Vec<Fetcher>,
    patience: Duration,
}

#[derive(Debug)]
struct Fetcher {
    member: u64,
    parcels: SyncSender<Parcel>,
}

/// What newcomers are sent. Steps are those of the donor's group of `generation`.
#[derive(Clone, Debug)]
enum Parcel {
    /// The donor goes into this generation, and the newcomer with it.
    End {
        generation: Generation,
    },
    Result {
        generation: Generation,
        headers: Arc<Vec<u8>>,
        sum: Arc<Vec<f32>>,
    },
    State {
        generation: Generation,
        record: StateRecord,
        parameters: Arc<Vec<f32>>,
        slots: Arc<Vec<f32>>,
    },
}

impl Donor {
    /// `patience`: how long a newcomer may take nothing.
    pub(crate) fn new(patience: Duration) -> Self {
        Self { fetchers: Vec::new(), patience }
    }

    /// Begins to serve a newcomer with the state as it is now.
    pub(crate) fn serve(
        &mut self,
        visitor: Visitor,
        generation: Generation,
        record: &StateRecord,
        parameters: &Arc<Vec<f32>>,
        slots: &Arc<Vec<f32>>,
    ) {
        let member = visitor.member();
        let results = AHEAD_BYTES / (parameters.len() * size_of::<f32>()).max(1);
        let (parcels, queue) = sync_channel(results.clamp(AHEAD_MIN, AHEAD_MAX));
        let state = Parcel::State {
            generation,
            record: record.clone(),
            parameters: Arc::clone(parameters),
            slots: Arc::clone(slots),
        };
        let patience = self.patience;
        let sender = visitor.serve(patience);
        let thread = std::thread::Builder::new()
            .name("donor".into())
            .spawn(move || deliver(sender, &queue, patience, member));
        match thread {
            Ok(_) => {
                tracing::info!(newcomer = member, step = record.step, "a newcomer fetches the state");
                parcels.try_send(state).expect("the queue is empty, and its thread waits for it");
                self.fetchers.retain(|other| other.member != member);
                self.fetchers.push(Fetcher { member, parcels });
            }
            Err(error) => tracing::warn!(%error, "no thread to serve a newcomer"),
        }
    }

    /// A step was committed by the group of `generation`; its reduced gradient is `sum`.
    pub(crate) fn committed(&mut self, generation: Generation, headers: &[StepHeader], sum: &Arc<Vec<f32>>) {
        if !self.fetchers.is_empty() {
            let headers = Arc::new(header::encode(&headers.to_vec()));
            let result = Parcel::Result { generation, headers, sum: Arc::clone(sum) };
            self.fetchers.retain(|fetcher| fetcher.send(result.clone()));
        }
    }

    /// This worker goes into `generation`. Newcomers that are in it too have got everything; the others follow it.
    pub(crate) fn switch(&mut self, generation: Generation, is_member: impl Fn(u64) -> bool) {
        self.fetchers.retain(|fetcher| match is_member(fetcher.member) {
            true => {
                fetcher.send(Parcel::End { generation });
                false
            }
            false => true,
        });
    }

    /// This worker makes no more steps.
    pub(crate) fn dismiss(&mut self) {
        self.fetchers.clear();
    }
}

impl Fetcher {
    /// Whether it is to be served on.
    fn send(&self, parcel: Parcel) -> bool {
        match self.parcels.try_send(parcel) {
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

/// Sends what is in the queue until it is closed, or the link is.
fn deliver(mut sender: StateSender, queue: &Receiver<Parcel>, patience: Duration, newcomer: u64) {
    loop {
        let sent = match queue.recv_timeout(patience / 4) {
            Ok(parcel) => send_all(&mut sender, parcel, queue),
            Err(RecvTimeoutError::Timeout) => sender.beat(),
            Err(RecvTimeoutError::Disconnected) => return,
        };
        if let Err(error) = sent {
            tracing::info!(newcomer, %error, "a newcomer is gone");
            return;
        }
    }
}

/// Sends `parcel` and all that wait behind it, and that these were all.
fn send_all(sender: &mut StateSender, parcel: Parcel, queue: &Receiver<Parcel>) -> std::io::Result<()> {
    let mut next = Some(parcel);
    while let Some(parcel) = next {
        send(sender, parcel)?;
        next = queue.try_recv().ok();
    }
    sender.send(KIND_TIP, 0, &[], &[])
}

fn send(sender: &mut StateSender, parcel: Parcel) -> std::io::Result<()> {
    match parcel {
        Parcel::End { generation } => sender.send(KIND_END, generation.0, &[], &[]),
        Parcel::Result { generation, headers, sum } => {
            sender.send(KIND_RESULT, generation.0, &headers, &[&sum])
        }
        Parcel::State { generation, record, parameters, slots } => {
            // The trainer wants its buffers back.
            let (parameters, slots) = {
                let copy = (parameters.to_vec(), slots.to_vec());
                drop((parameters, slots));
                copy
            };
            let note = header::encode(&StateNote { record, digest: digest(&parameters, &slots) });
            sender.send(KIND_STATE, generation.0, &note, &[&parameters, &slots])
        }
    }
}

/// What comes with a state's tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct StateNote {
    pub(crate) record: StateRecord,
    /// [`digest`] of the tensors.
    pub(crate) digest: u64,
}

/// Digest of a state's tensors: what a newcomer has got is what the donor has.
pub(crate) fn digest(parameters: &[f32], slots: &[f32]) -> u64 {
    xxh3_64(bytemuck::cast_slice(parameters)) ^ xxh3_64(bytemuck::cast_slice(slots)).rotate_left(1)
}

/// The step's headers, and its reduced gradient.
pub(crate) const KIND_RESULT: u32 = 2;
/// A [`StateNote`], and the tensors: parameters, then slots.
pub(crate) const KIND_STATE: u32 = 1;
/// There is no more; the generation is the one to meet in.
pub(crate) const KIND_END: u32 = 4;
/// There is no more for now.
pub(crate) const KIND_TIP: u32 = 3;

/// Results that may wait for a newcomer, in bytes.
const AHEAD_BYTES: usize = 512 << 20;
/// Even where each of them is larger than that.
const AHEAD_MIN: usize = 3;
const AHEAD_MAX: usize = 64;
