//! Collective communication between the ranks of one generation.
//!
//! ```text
//!            Endpoint (one per worker)                    HostGroup (one per generation)
//!   ┌───────────────────────────────────────┐
//!   │ listener ─▶ acceptor ─▶ peer proven?  │   ┌─▶ rank 0 ─▶ rank 1 ─▶ rank 2 ─┐
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
//! **Invariant:** the sum of an all-reduce has the same bits on all ranks and contains the
//! contribution of every rank.
//!
//! **Invariant:** inputs are never written to, so a failed step can be retried with the same
//! contribution in the next group.
//!
//! **Invariant:** a link belongs to one generation. The acceptor rejects a dial of an older
//! generation before it reads any frame.
//!
//! **Invariant:** before anything is sent on a link, both sides prove to each other that they know
//! the job's secret, in a handshake that can't be replayed. Links between hosts are
//! [encrypted](LinkEncryption). No field is used before its sender is authenticated, and no data
//! from the network causes a panic or allocates memory beyond the limits documented here.
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
//! ```text
//!   device     GPU buffers; nccl
//!   group      endpoint, groups of one generation, choice of the transport
//!   state      state transfer to joiners
//!   shm        all-reduce and exchange in shared memory, and of hosts that each share memory
//!   transfer   the loops that run an operation over the links of a rank
//!   net        links: dialling, handshake, fence, frames, waits
//!   algorithm  pure: schedules, chunks, topology, payload, data types on the wire
//! ```
//!
//! A folder imports only from the folders below it.

#![cfg_attr(
    not(any(test, feature = "testing")),
    allow(unreachable_pub, reason = "the feature `testing` exports more")
)]

#[cfg(not(target_os = "linux"))]
compile_error!("elasticdl runs on Linux only: it needs memfd, pidfd and /proc");

mod algorithm;
mod communicator;
#[cfg(feature = "gpu")]
pub mod device;
#[cfg(not(feature = "gpu"))]
#[path = "no_device.rs"]
pub mod device;
mod error;
mod exit;
mod group;
mod huge_pages;
mod net;
mod shm;
mod state;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod transfer;

pub use algorithm::wire_dtype::WireDtype;
pub use communicator::{BLOCK_BYTES_MAX, BROADCAST_BYTES_MAX, Communicator, PAYLOAD_BYTES_MAX};
pub use device::nccl;
pub use error::{CollectiveError, FetchError};
pub use exit::{exit_at_once, exit_at_once_at_end};
pub use group::endpoint::{Endpoint, EndpointOptions};
pub use group::host_group::{EncryptedLinks, HostGroup, Transport};
pub use group::spec::{GroupSpec, MEMBERS_MAX, Member};
pub use huge_pages::zeros;
pub use net::encryption::LinkEncryption;
pub use net::fence::Fence;
pub use net::pending_requests::Joiners;
pub use net::progress::{Progress, Stall};
pub use net::secret::Secret;
pub use net::socket::address_towards;
pub use state::{
    NOTE_BYTES_MAX, Position, StateLink, StateMessageHeader, StateReceiver, StateRequest,
    StateSender,
};
