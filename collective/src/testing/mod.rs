//! What only tests, benchmarks and simulations need. Not for users, except for
//! [`conformance`], which any backend can run, and [`LocalRank`], for tests without sockets.

pub mod conformance;
#[doc(hidden)]
pub mod fuzzing;
mod local;

#[doc(hidden)]
pub use crate::algorithm::schedule;
#[cfg(feature = "gpu")]
#[doc(hidden)]
pub use crate::device::copy_bandwidth::CopyBandwidth;
#[cfg(feature = "gpu")]
#[doc(hidden)]
pub use crate::device::nccl::raw::RawCommunicator;
#[doc(hidden)]
pub use crate::net::admission;
#[doc(hidden)]
pub use crate::net::handshake::Purpose;
pub use local::{LocalFence, LocalRank};
