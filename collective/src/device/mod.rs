//! Groups whose buffers are in a GPU's memory.
//!
//! ```text
//!             Path::Host                                      Path::Nccl
//!   src ─copy─▶ pinned ─TcpRing─▶ pinned ─copy─▶ dst    src ─NCCL on the caller's stream─▶ dst
//!        block k+1        block k        block k−1      headers: TcpRing; its links' ends abort NCCL
//! ```
//!
//! A [`Device`] is one GPU with the stream on which its owner computes. A [`DeviceRing`] is a
//! group's ring with a device at each rank: sums, broadcasts and gathers on device memory go over
//! the host ring from the first step on, and over NCCL once a communicator has been
//! [built](DeviceRing::begin_nccl) in the background and all ranks have agreed to use it.
//!
//! **Invariant:** nothing of CUDA is needed to build this, nor to run it: libraries are looked for
//! at run time, and what is missing is a [`DeviceError`].
//!
//! **Invariant:** as on the host, inputs are never written to, all ranks get the same bits, and a
//! failed operation ends the group.
//!
//! **Invariant:** an operation that has returned leaves nothing behind on the caller's stream that
//! could hang; where it can't say so ([`DeviceError::Abandoned`]), the process has to end.

mod copies;
mod element;
mod error;
mod gpu;
mod ring;
mod staging;

pub use copies::Copies;
pub use element::{Dtype, Element};
pub use error::DeviceError;
pub use gpu::Device;
pub use ring::{DeviceRing, HEADER_BYTES_MAX, NcclOptions, NcclPolicy, Path};
