//! Optional NCCL: found at run time, called through a binding of a few functions, from a thread of
//! its own.
//!
//! ```text
//!   DeviceGroup ──operation──▶ thread "nccl" ──▶ ncclAllReduce …, polls stream, communicator
//!       ▲   └─────result─────────┘  │
//!       └── closed link, fence ──▶ thread "nccl-watchdog" ──▶ ncclCommAbort, with a deadline
//! ```
//!
//! **Invariant:** no call of NCCL blocks the thread of the group. An NCCL operation is polled, and
//! it is aborted after a deadline or when the host group reports that a peer is gone. NCCL itself
//! detects hardly any loss of a peer.
//!
//! **Invariant:** result codes are plain numbers, valid for any version; the capabilities of a
//! library are the functions that it exports.
//!
//! **Invariant:** a communicator is released in one way only, `ncclCommAbort`, after it has been
//! finalized if it still works: `ncclCommDestroy` may wait for peers that are gone.

mod back_off;
mod call;
mod communicator;
mod library;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod raw;
mod release;

pub use call::CallKind;
pub(crate) use call::{Beside, Call, CommInit, Timeouts};
pub(crate) use communicator::NcclCommunicator;
pub use communicator::NcclState;
pub use library::{Buffers, Library, UniqueId};
pub use release::{abandoned, wait_for_release};
