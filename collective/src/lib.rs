//! Group communication between the ranks of one generation: a ring over TCP.
//!
//! ```text
//!            Endpoint (one per worker)                    HostGroup (one per generation)
//!   ┌───────────────────────────────────────┐
//!   │ listener ─▶ porter ─▶ hello proven?   │   ┌─▶ rank 0 ─▶ rank 1 ─▶ rank 2 ─┐
//!   │                 └─▶ Fence: generation │   └───────────────────────────────┘
//!   │                     old? refused      │   each arrow is one connection, dialled by its tail,
//!   │                     new? parked       │   on which frames run one way
//!   └───────────────────────────────────────┘
//! ```
//!
//! An [`Endpoint`] [connects](Endpoint::connect) the members of a [`GroupSpec`] to a [`HostGroup`],
//! whose operations are those of [`Communicator`]. A [`Fence`] ends them from outside. What a ring
//! sends and receives in which order is a pure [schedule](crate#layout), simulated in tests apart
//! from sockets.
//!
//! **Invariant:** the sum of an all-reduce has the same bits on all ranks, and who gets it has
//! every rank's part in it.
//!
//! **Invariant:** inputs are never written to. A failed step can be contributed again, in the next
//! group.
//!
//! **Invariant:** a link belongs to one generation. What is older is refused at the door, before a
//! frame is read.
//!
//! **Invariant:** no byte is looked at before the dialler has proven that it knows the job's
//! secret, and nothing that comes over the network panics or grows memory beyond the limits given
//! here.
//!
//! **Invariant:** this crate knows nothing about Kubernetes, gRPC, shards or models, and decides
//! nothing about membership. Its clocks bound how long it waits for a link, never how long an
//! operation takes; how long one has waited can be [seen](Progress).
//!
//! A newcomer [fetches](Endpoint::fetch) the state from a member beside the ring, while the ring
//! works.
//!
//! # Layout
//!
//! Pure: `chunk` (bounds), `schedule` (who sends what, when), `arms` (the same for small sums),
//! `payload` (what that is made of), `wire` (as what it travels), `frame`, `hello` (bytes), `hosts`
//! (who is where), `parking` (dials that came early). Sockets: `endpoint`, `porter` (the accept
//! thread), `link`, `transfer` (the loop that moves an operation around the ring), `relay` (and a
//! small sum along its two arms), `shared` (a sum in memory that ranks share), `tcp`, `state`
//! (parcels for newcomers), `lobby`. Between threads: `fence`, `bell`, `progress`; [`device`] and
//! [`nccl`] for buffers of a GPU; `patience` is how long one looks before it sleeps. Memory:
//! `pages`.

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
