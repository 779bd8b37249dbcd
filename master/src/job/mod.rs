//! One training job's brain: which workers live, who is in the group, who holds a lease on which
//! records, when it ends.
//!
//! A deterministic state machine. Events and the time go in, actions come out; the same inputs give
//! the same outputs.
//!
//! ```text
//!                handle(now, Event)            poll_action() -> Action
//!   streams ───►┌──────────────────────────────────────────────────┐───► Launch, Kill        (processes)
//!   processes ─►│ Job                                              │───► Admit, Send, Refuse (streams)
//!   the user ──►│   crew: launches, workers   group: generation    │───► Say, End            (the user)
//!   the clock ─►│   records: ledger, queues, leases   restarts     │
//!               └──────────────────────────────────────────────────┘
//!          handle_timeout(now) ◄── poll_timeout()         status(now), summary(now)
//! ```
//!
//! What the group's parameters have absorbed is the group's own word; the ledger here is a cache of
//! it.
//!
//! **Invariants**
//! * No async, sockets, clock, environment or entropy under `job/`; what is drawn is drawn from the
//!   job's seed.
//! * A record is leased to at most one live worker, and only to a member of the newest generation.
//! * A lost worker's leases come back into the queue only with the next group's own report of its
//!   ledger ([`FromWorker::Formed`]), less what that report holds.
//! * Generations grow by one. While one is published and not formed, only a loss publishes another.
//! * A master that comes after another one leases nothing before it knows what the group has
//!   absorbed and what each of its members holds.
//! * Nothing that a worker says can make this code panic: it is checked, and changes nothing or
//!   fails that worker.
//! * Whatever grows with a worker's words has a limit.

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
