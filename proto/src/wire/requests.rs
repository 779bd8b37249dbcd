//! The messages of the gRPC service.

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use prost::Message as _;

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
/// membership of a thousand members is long.
#[derive(Clone, Debug)]
pub struct SharedMessage(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    message: MasterMessage,
    encoded: OnceLock<Bytes>,
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
}

impl From<MasterMessage> for SharedMessage {
    fn from(message: MasterMessage) -> Self {
        Self(Arc::new(Shared { message, encoded: OnceLock::new() }))
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

/// Changes the desired number of workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScaleRequest {
    /// The new number.
    pub num_workers: u32,
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
