//! What a communicator is asked for.

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{CudaEvent, CudaStream};

use super::library::{Buffers, UniqueId};

/// Parameters of a new communicator.
#[derive(Clone, Debug)]
pub(crate) struct CommInit {
    pub(crate) id: UniqueId,
    pub(crate) rank: usize,
    pub(crate) world: usize,
    /// Stream on which all operations are enqueued.
    pub(crate) stream: Arc<CudaStream>,
}

/// Timeouts of NCCL.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timeouts {
    pub(crate) init: Duration,
    pub(crate) abort: Duration,
}

/// One operation. The buffers stay valid until it is complete, or until the communicator has left
/// the stream.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) kind: CallKind,
    pub(crate) buffers: Buffers,
    /// `None`: it runs on the communicator's stream, and its result arrives when it is complete.
    pub(crate) beside: Option<Beside>,
}

/// An operation that runs beside the work on the communicator's stream.
#[derive(Debug)]
pub(crate) struct Beside {
    /// Stream of the operation.
    pub(crate) stream: Arc<CudaStream>,
    /// Event that it follows.
    pub(crate) after: CudaEvent,
    /// Whether the result arrives when it is complete; otherwise when it is on the stream.
    pub(crate) waits: bool,
}

/// What an operation over NCCL does with the buffers of the ranks. `len` is the length that its
/// caller states.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum CallKind {
    /// Writes the `src` of all ranks to each `dst`, in rank order: `[len]` to `[ranks · len]`.
    AllGather,
    /// Writes the sum of all `src` to each `dst`, both of `[len]`.
    AllReduce,
    /// Writes the `src` of a rank to each `dst`, both of `[len]`.
    Broadcast {
        /// The rank.
        root: usize,
    },
    /// Divides the sum of all `src` among the `dst`, in rank order: `[ranks · len]` to `[len]`.
    ReduceScatter,
}

impl CallKind {
    /// What is done, for errors.
    pub(crate) fn action(self) -> &'static str {
        match self {
            Self::AllGather => "all-gather",
            Self::AllReduce => "all-reduce",
            Self::Broadcast { .. } => "broadcast",
            Self::ReduceScatter => "reduce-scatter",
        }
    }
}
