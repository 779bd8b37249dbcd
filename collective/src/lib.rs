//! Collective communication between the ranks of one generation.
//!
//! ```text
//!            Endpoint (one per worker)                    HostGroup (one per generation)
//!   ┌───────────────────────────────────────┐
//!   │ listener ─▶ acceptor ─▶ hello proven? │   ┌─▶ rank 0 ─▶ rank 1 ─▶ rank 2 ─┐
//!   │                 └─▶ Fence: generation │   └───────────────────────────────┘
//!   │                     old? refused      │   each arrow is one connection, dialled by its tail,
//!   │                     new? pending      │   on which frames run one way
//!   └───────────────────────────────────────┘
//! ```
//!
//! An [`Endpoint`] [connects](Endpoint::connect) the members of a [`GroupSpec`] to a [`HostGroup`],
//! whose operations are those of [`Communicator`]. A [`Fence`] aborts groups from outside. The
//! order in which a rank of the ring sends and receives is a pure [schedule](crate#layout), which
//! tests simulate without sockets.
//!
//! **Invariant:** the sum of an all-reduce has the same bits on all ranks, and a rank that gets it
//! has the contribution of every rank in it.
//!
//! **Invariant:** inputs are never written to. A failed step can be retried with the same
//! contribution, in the next group.
//!
//! **Invariant:** a link belongs to one generation. A dial of an older generation is refused by the
//! acceptor, before any frame is read.
//!
//! **Invariant:** no field is used before the peer has proven that it knows the job's secret, and
//! no data from the network causes a panic or allocates memory beyond the limits documented here.
//!
//! **Invariant:** this crate knows nothing about Kubernetes, gRPC, shards or models, and decides
//! nothing about membership. Its clocks bound the wait for a link, never the duration of an
//! operation; the duration of a wait can be [observed](Progress).
//!
//! A joiner [fetches](Endpoint::fetch) the state from a member, concurrently with the group's
//! operations.
//!
//! # Layout
//!
//! Pure: `chunk` (bounds), `schedule` (which piece is sent when), `chain::topology` (the same for
//! small sums), `payload` (buffers), `wire` (data types on the wire), `frame` and `handshake`
//! (encodings), `hosts` (placement), `pending_dials` (dials that arrived early). Sockets:
//! `endpoint`, `acceptor` (its thread), `link`, `transfer` (the loop that runs an operation around
//! the ring), `chain` (small sums along two chains), `host_group`, `state` (state transfer),
//! `pending_requests`. Shared memory: `shm`, `huge_pages`. Synchronization: `fence`, `notifier`,
//! `progress`, `spin_wait`. GPUs: [`device`] and [`nccl`].

mod acceptor;
mod chain;
mod chunk;
mod communicator;
pub mod conformance;
pub mod device;
mod endpoint;
mod error;
mod fence;
mod frame;
/// Not for users: public so that fuzzers can call it.
#[doc(hidden)]
pub mod fuzzing;
mod group;
mod handshake;
mod host_group;
mod hosts;
mod huge_pages;
mod link;
mod local;
pub mod nccl;
mod notifier;
mod payload;
mod pending_dials;
mod pending_requests;
mod progress;
/// Not for users: public so that the workspace's simulation can run whole systems on it.
#[doc(hidden)]
pub mod schedule;
mod secret;
mod shm;
mod spin_wait;
mod state;
mod transfer;
mod wire;

pub use communicator::{BLOCK_BYTES_MAX, BROADCAST_BYTES_MAX, Communicator};
pub use endpoint::Endpoint;
pub use error::CollectiveError;
pub use fence::Fence;
pub use group::{GroupSpec, MEMBERS_MAX, Member};
pub use host_group::{HostGroup, Transport};
pub use huge_pages::zeros;
pub use local::{LocalFence, LocalRank};
pub use progress::{Progress, Stall};
pub use secret::Secret;
pub use state::{
    NOTE_BYTES_MAX, Position, StateLink, StateMessageHeader, StateReceiver, StateRequest,
    StateSender,
};
pub use wire::WireDtype;
