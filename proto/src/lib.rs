//! Types that master and workers share: the gRPC schema, ids, and the arithmetic of the ledger.
//!
//! **Invariant:** this crate does no I/O and makes no decisions. The generated types in [`v1`] are
//! used only in the modules that implement gRPC; [`WorkerId`], [`Generation`], [`RecordRange`],
//! [`RangeSet`], [`Ledger`] and [`FileList`] are the types of the cores on both sides.

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
