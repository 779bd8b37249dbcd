//! The protocol between a master and its workers: ids, record ranges, the ledger, the order of
//! records, messages, the gRPC service, and the form of their logs.
//!
//! **Invariant:** this crate does no I/O and makes no decisions. The generated types of the schema
//! are private to `wire`, which the feature `grpc` adds; both sides, and the user's programs, work
//! with the types of this crate.

pub mod limits;
#[cfg(feature = "grpc")]
pub mod wire;

mod files;
mod gpu_instance;
mod host;
mod ids;
mod inspection;
mod job;
mod ledger;
mod limiting_link;
mod log;
mod members;
mod membership;
mod message;
mod order;
mod ranges;
mod row_touches;
mod run_id;
mod sources;
mod spares;
mod split;
mod status;
mod summary;

pub use files::{FileList, FileListError, Files, ListedFile};
pub use gpu_instance::gpu_instance;
pub use host::{DiskReport, HostReport};
pub use ids::{Generation, LaunchId, WorkerId};
pub use inspection::{
    Activity, InspectedWorker, Inspection, KernelThread, LinkReport, ProcessState, SeenMessage,
    StallReport, ThreadReport, WorkerReport,
};
pub use job::{
    Batch, CheckpointEvery, CheckpointSpec, DATA_OF_PROGRAM, Format, LinkEncryption, OnNonfinite,
    OnRowsLost, ParamDtype, Shuffle, ShuffleMode, SpecError, ValidationSpec, Welcome, WireDtype,
    Work, WorkerOptions, failed_export,
};
pub use ledger::Ledger;
pub use limiting_link::LimitingLink;
pub use log::{LogFormat, log_line_as_text};
#[cfg(feature = "log")]
pub use log::{LogLines, LogSource, set_log_generation};
pub use members::Members;
pub use membership::{Hello, Location, Membership, Phases, Resume, Stall};
pub use message::{
    CheckpointNews, CheckpointTimes, Committed, Evaluated, Failure, Finished, Heartbeat, Kept,
    LedgerReport, LinkPace, MasterMessage, RankStep, StepTimes, Usage, WorkerMessage,
};
pub use order::{Access, Order, OrderName};
pub use ranges::{RangeSet, RecordRange};
pub use row_touches::{RowTouches, RowTouchesSummary, RowsLoss, TablesStatus};
pub use run_id::{TOKEN_BYTES, bytes_of_hex, run_id};
pub use sources::{join_sources, shown_sources, split_sources};
pub use spares::Spares;
pub use split::{DataPart, Split};
pub use status::{
    AvoidedHost, DisconnectedStatus, LaunchStatus, PriorityTierStatus, ShardCounts, Status,
    WorkerStatus,
};
pub use summary::{
    AuditSummary, BestEvaluation, Cause, CheckpointsSummary, EvaluationsSummary, FailedShard,
    LossSummary, MembershipChange, RecordsSummary, RestoredCheckpoint, SavedCheckpoint,
    SkippedRecords, StateLoss, Summary, ThroughputSummary, WorkersSummary,
};
