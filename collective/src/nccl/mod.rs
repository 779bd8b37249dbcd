//! NCCL, where it is: found at run time, called through a binding of a few functions, from a thread
//! of its own.
//!
//! ```text
//!   DeviceGroup ──operation──▶ thread "nccl" ──▶ ncclAllReduce … asks the stream and the communicator until the end
//!       ▲   └────────result─────────┘  │
//!       └── end of a link, fence ──▶ thread "nccl-watchdog" ──▶ ncclCommAbort, with a deadline
//! ```
//!
//! **Invariant:** no call here blocks the ring's thread: what NCCL does is followed by asking, and
//! given up after a deadline or when the host's ring says that a peer is gone. NCCL itself notices
//! hardly any loss of a peer.
//!
//! **Invariant:** results are numbers, of whatever version; the functions that a library has are
//! what it can do.
//!
//! **Invariant:** a communicator is given back in one way only, `ncclCommAbort`, after it has been
//! brought to rest if it still works: `ncclCommDestroy` may wait for peers that are gone.

mod communicator;
mod library;
mod raw;

pub(crate) use communicator::{Call, CallKind, CommInit, NcclCommunicator, Timeouts};
pub use communicator::{NcclState, abandoned};
pub(crate) use library::Buffers;
pub use library::{Library, UniqueId};
#[doc(hidden)]
pub use raw::RawCommunicator;
