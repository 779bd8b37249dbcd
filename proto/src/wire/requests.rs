//! The messages of the gRPC service.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use prost::Message as _;

use super::difference::Difference;
use super::encode;
use crate::job::Welcome;
use crate::membership::Hello;
use crate::message::{MasterMessage, WorkerMessage};

/// What a worker sends on its stream: its hello first, then messages.
#[derive(Clone, Debug, PartialEq)]
pub enum JoinRequest {
    /// The first message.
    Hello(Box<Hello>),
    /// A received message with a field that is out of its limits, or of a kind that this version
    /// does not know; the reason. Never sent.
    Invalid(String),
    /// Any later message.
    Message(WorkerMessage),
}

/// What the master sends on a stream: the welcome first, then messages.
#[derive(Clone, Debug, PartialEq)]
pub enum JoinResponse {
    /// A received message with a field that is out of its limits, or of a kind that this version
    /// does not know; the reason. Never sent.
    Invalid(String),
    /// Any later message.
    Message(SharedMessage),
    /// The first message.
    Welcome(Box<Welcome>),
}

/// A message to workers. Clones share it, and it is encoded once, for however many workers: a
/// membership of a thousand members is long. To workers that have the one before, its difference is
/// sent.
#[derive(Clone, Debug)]
pub struct SharedMessage(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    message: MasterMessage,
    /// Different from those of all other messages of the process.
    id: u64,
    encoded: OnceLock<Bytes>,
    /// The difference to the membership of this id, if it has one.
    encoded_after: OnceLock<(u64, Option<Bytes>)>,
}

impl SharedMessage {
    /// The message.
    #[must_use]
    pub fn get(&self) -> &MasterMessage {
        &self.0.message
    }

    /// The message; a copy if it is shared.
    #[must_use]
    pub fn into_inner(self) -> MasterMessage {
        Arc::try_unwrap(self.0).map_or_else(|shared| shared.message.clone(), |one| one.message)
    }

    pub(super) fn encoded(&self) -> &Bytes {
        let message = || encode::master_message(&self.0.message).encode_to_vec().into();
        self.0.encoded.get_or_init(message)
    }

    /// The encoded difference to another membership. It is made for one other, which most workers
    /// have; `None` for any other, for a message that is no membership, and where the members have
    /// too little in common.
    pub(super) fn encoded_after(&self, before: &Self) -> Option<&Bytes> {
        let difference = || {
            let MasterMessage::Membership(before) = before.get() else { return None };
            let MasterMessage::Membership(after) = self.get() else { return None };
            let difference = Difference::between(&before.members, &after.members)?;
            Some(encode::membership_change(after, difference).encode_to_vec().into())
        };
        let (id, encoded) = self.0.encoded_after.get_or_init(|| (before.0.id, difference()));
        encoded.as_ref().filter(|_| *id == before.0.id)
    }
}

impl From<MasterMessage> for SharedMessage {
    fn from(message: MasterMessage) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let (encoded, encoded_after) = (OnceLock::new(), OnceLock::new());
        Self(Arc::new(Shared { message, id, encoded, encoded_after }))
    }
}

impl PartialEq for SharedMessage {
    fn eq(&self, other: &Self) -> bool {
        self.get() == other.get()
    }
}

/// Requests the status of the job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StatusRequest;

/// Asks all workers what they do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InspectRequest;

/// Changes the desired number of workers, or its limits; `None` stays as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScaleRequest {
    /// The new number.
    pub num_workers: Option<u32>,
    /// The new minimum.
    pub min_workers: Option<u32>,
    /// The new maximum.
    pub max_workers: Option<u32>,
}

/// The reply to a [`ScaleRequest`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScaleReply {
    /// The previous number.
    pub was: u32,
}

/// Requests a checkpoint from the group; the status reports its completion.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckpointRequest;

/// The reply to a [`CheckpointRequest`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckpointReply {
    /// Number of committed steps, as last reported; the checkpoint is of a later step.
    pub step: u64,
}

/// Suspends or resumes the job; the status reports when it is suspended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SuspendRequest {
    /// Whether the job is to be suspended; otherwise it is resumed.
    pub suspend: bool,
}

/// The reply to a [`SuspendRequest`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SuspendReply {
    /// Whether that was so already.
    pub unchanged: bool,
}
