//! The state machine of one training job: which workers are alive, which are in the group, which
//! lease which records, and when the job ends.
//!
//! It is deterministic: events and the time go in, actions come out, and the same inputs give the
//! same outputs.
//!
//! ```text
//!               handle(now, Event)             poll_action() -> Action
//!  streams ───►┌──────────────────────────────────────────────┐──► Launch, Kill        (processes)
//!  processes ─►│ Job                                          │──► Admit, Send, Refuse (streams)
//!  the user ──►│   workers: launches   group: generation      │──► Log, End            (the user)
//!  the clock ─►│   leases: ledger, queues    restarts         │
//!              └──────────────────────────────────────────────┘
//!         handle_timeout(now) ◄── poll_timeout()       status(now), summary(now)
//! ```
//!
//! The group decides what its parameters have absorbed; the ledger here is a cache of its reports.
//!
//! **Invariants**
//! * No async, sockets, clock, environment or entropy under `job/`; random choices derive from the
//!   job's seed.
//! * A record is leased to at most one live worker, and only to a member of the newest generation.
//! * A lost worker's leases return to the queue only when the next group reports its ledger
//!   ([`FromWorker::Formed`]), less the records that this ledger holds.
//! * Generations grow by one. Between the publication of a generation and its formation, only a
//!   loss publishes another one.
//! * After a take-over the master leases nothing until it knows what the group has absorbed and
//!   what each member holds.
//! * No message of a worker can make this code panic: every message is validated, and an invalid
//!   one is ignored or fails its sender.
//! * Everything that grows with workers' messages has a limit.

mod action;
mod checkpoints;
mod counters;
mod disconnected;
mod evaluations;
mod event;
mod group;
mod history;
mod inference;
#[expect(clippy::module_inception, reason = "files are named after their type")]
mod job;
mod lease_table;
mod liveness;
mod loss;
mod membership;
mod persisted;
mod placement;
mod pod;
mod restart;
mod shards;
mod shutdown;
mod spec;
mod stall;
mod status;
mod storage_waits;
mod straggler;
mod summary;
mod takeover;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
mod time;
mod worker_messages;
mod workers;

pub use action::{Action, Membership, Outcome, ToWorker};
pub use checkpoints::{CheckpointsSummary, RestoredCheckpoint, SavedCheckpoint};
pub use counters::{Counters, End, Histogram, Recoveries};
pub(crate) use evaluations::format_metrics;
pub use evaluations::{BestEvaluation, EvaluationsSummary};
pub use event::{
    CheckpointNews, Committed, ConnectionId, Evaluated, Event, Exit, Failure, Finished, FromWorker,
    LaunchId, LedgerReport, Phases, Resume, Stall, StepTimes, Wait,
};
pub use job::Job;
pub use loss::StateLoss;
pub use persisted::{DatasetFingerprint, PersistedJob};
pub use spec::{
    Batch, CheckpointEvery, CheckpointSpec, Format, JobSpec, OnNonfinite, SpecError,
    ValidationSpec, WireDtype, Work,
};
pub(crate) use spec::{MAX_WORKERS_PER_POD, multiples_near};
pub use status::{LaunchStatus, PriorityTierStatus, ShardCounts, Snapshot, Status, WorkerStatus};
pub use summary::{
    Cause, FailedShard, LossSummary, MembershipChange, RecordsSummary, Summary, ThroughputSummary,
    WorkersSummary,
};
pub use time::Time;
