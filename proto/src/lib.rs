//! What master and workers must agree on: the gRPC schema, the names they use for one another, and
//! the arithmetic of the ledger.
//!
//! **Invariant:** this crate does no IO and decides nothing. The generated types in [`v1`] stop at
//! the files that speak gRPC; [`WorkerId`], [`Generation`], [`RecordRange`], [`RangeSet`],
//! [`Ledger`] and [`FileList`] are what the cores on both sides reckon with.

mod files;
mod ids;
mod ledger;
mod ranges;
/// The generated schema: `proto/elasticdl/v1/master.proto`.
#[allow(
    missing_docs,
    unnameable_types,
    unreachable_pub,
    unused_qualifications,
    reason = "generated"
)]
#[allow(clippy::all, clippy::or_fun_call, clippy::use_self, reason = "generated")]
pub mod v1 {
    tonic::include_proto!("elasticdl.v1");
}

pub use files::{FileLimits, FileList, FileListError, Files, ListedFile};
pub use ids::{Generation, WorkerId};
pub use ledger::Ledger;
pub use ranges::{RangeSet, RecordRange};
