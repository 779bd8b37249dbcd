//! Collectives on buffers in GPU memory.
//!
//! ```text
//!             Path::Host                                        Path::Nccl
//!   src ─copy─▶ pinned ─HostGroup─▶ pinned ─copy─▶ dst    src ─NCCL on the caller's stream─▶ dst
//!       block k+1        block k         block k−1      headers: HostGroup; link loss aborts NCCL
//! ```
//!
//! Over NCCL, complete [parts](DeviceGroup::overlap) of a buffer are summed on a stream of their
//! own while the rest is computed.
//!
//! A [`Device`] is one GPU with the CUDA stream on which its owner computes. A [`DeviceGroup`] is a
//! [`HostGroup`](crate::HostGroup) with a device at each rank. All-reduce and broadcast on device
//! memory use the host path from the first step on. They use NCCL once a communicator has been
//! [built](DeviceGroup::begin_nccl) in the background and all ranks have agreed to use it.
//!
//! **Invariant:** neither building nor running this crate requires CUDA: libraries are looked up at
//! run time, and a missing one is a [`DeviceError`].
//!
//! **Invariant:** as on the host, inputs are never written to, all ranks get the same bits, and a
//! failed operation ends the group.
//!
//! **Invariant:** an operation that has returned leaves nothing on the device's stream that could
//! hang. If that cannot be guaranteed ([`DeviceError::Abandoned`]), the process has to end.

mod copies;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod copy_bandwidth;
mod element;
mod gpu;
mod group;
pub mod nccl;
mod staging;

pub use element::{Dtype, Element};
pub use gpu::{Device, relax_capture_mode};
pub use group::{DeviceGroup, HEADER_BYTES_MAX, NcclOptions, NcclPolicy, Overlap, Path};
pub use nccl::{Buffers, CallKind};

pub use crate::error::DeviceError;
