//! The state machine of one job: which workers are alive, which are in the group, and when the job
//! ends. The workers of a group divide the records among themselves; those of an inference job
//! process shards that are leased to them.
//!
//! It is deterministic: events and the time go in, actions come out, and the same inputs give the
//! same outputs.
//!
//! ```text
//!               handle(now, Event)             poll_action() -> Action
//!  streams ───►┌──────────────────────────────────────────────┐──► Launch, Kill        (processes)
//!  processes ─►│ Job   workers   group   data                 │──► Admit, Send, Refuse (streams)
//!  the user ──►│       lifecycle   reporting                  │──► Log, End            (the user)
//!  the clock ─►│       outbox: actions, timers, version       │
//!              └──────────────────────────────────────────────┘
//!         handle_timeout(now) ◄── poll_timeout()       status(now), summary(now)
//! ```
//!
//! The group decides what its parameters have absorbed; the ledger here is a cache of its reports.
//!
//! **Parts.** Each part owns its fields; the others see its methods. What spans parts is a method
//! of [`Job`] that borrows them.
//!
//! | part | owns | knows |
//! |---|---|---|
//! | `workers/` | launches, connected workers, pods | no other part |
//! | `group/` | the newest generation, its links, its final reports | no other part |
//! | `data/` | files, the cached ledger, shards and their leases, results | no other part |
//! | `lifecycle/` | the phase, wanted workers, restarts, take-over; what removes workers | all |
//! | `reporting/` | history, counters; status and summary | all; decides nothing |
//!
//! | event, message | handled in |
//! |---|---|
//! | `Connected`, `Described`, `Ready`, `CaughtUp` | `handlers/onboarding` |
//! | `Connected` again, `Disconnected`, `Reconnected` | `lifecycle/disconnected` |
//! | `Formed`, `Committed`, `Resumed`, `Finished`, `Failed` | `handlers/training` |
//! | `LeaseRequest`, `ShardDone` | `handlers/inference` |
//! | `Heartbeat` | `handlers/liveness` |
//! | `Broken` | `handlers/broken` |
//! | `Checkpoint`, `Evaluated`, `StorageWait` | `reporting/news` |
//! | `LaunchWaits`, `LaunchRuns`, `LaunchLeaves`, `Scale` | `lifecycle/launching` |
//! | `Suspend`, `Resume` | `lifecycle/suspension` |
//! | `LaunchLocated` | `handlers/publish`, by the next membership |
//! | `ProcessEnded` | `lifecycle/exits` |
//! | `Leaving` | `lifecycle/removal` |
//! | `Stop`, the deadline | `lifecycle/shutdown` |
//!
//! Whatever may change the group ends in `handlers/publish`, which publishes the next generation if
//! one is due.
//!
//! **Removal** has four verbs. *Release* asks a worker to leave in order. *Evict* removes a worker
//! against its will. *Forget* drops a worker whose stream or process has ended. *Kill* ends the
//! processes of a pod at once.
//!
//! **Invariants**
//! * No async, sockets, clock, environment or entropy under `job/`; random choices derive from the
//!   job's seed.
//! * Records are leased in inference jobs alone, and each to at most one live worker.
//! * The ledger of the next group ([`WorkerMessage::Formed`]) replaces the cached one.
//! * Generations grow by one. Between the publication of a generation and its formation, only a
//!   loss publishes another one.
//! * No message of a worker can make this code panic: every message is validated, and an invalid
//!   one is ignored or fails its sender.
//! * Everything that grows with workers' messages has a limit.

mod action;
mod data;
mod event;
mod group;
mod handlers;
#[expect(clippy::module_inception, reason = "files are named after their type")]
mod job;
mod lifecycle;
mod outbox;
mod policies;
mod reporting;
mod scaling;
mod spec;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
pub(crate) mod text;
mod time;
mod workers;

pub use action::{Action, MasterMessage, Membership, Outcome};
pub use elasticdl_proto::{
    AuditSummary, BestEvaluation, Cause, CheckpointsSummary, EvaluationsSummary, FailedShard,
    LaunchStatus, LossSummary, MembershipChange, PriorityTierStatus, RecordsSummary,
    RestoredCheckpoint, RowsLoss, SavedCheckpoint, ShardCounts, StateLoss, Status, Summary,
    ThroughputSummary, WorkerStatus, WorkersSummary,
};
pub use event::{
    CheckpointNews, Committed, ConnectionId, Evaluated, Event, Exit, Failure, Finished, Heartbeat,
    LaunchId, LedgerReport, Phases, ReclaimCause, Resume, Stall, StepTimes, Wait, WorkerMessage,
};
pub use job::Job;
pub use lifecycle::persisted::{DatasetFingerprint, PersistedJob};
pub(crate) use lifecycle::restart::EXIT_MASTER_LOST;
#[cfg(test)]
pub(crate) use lifecycle::restart::is_own_fault;
pub use policies::{ExitAction, ExitCondition, ExitEvent, ExitRule, Policies};
pub use reporting::counters::{Counters, End, Histogram, Recoveries};
pub use reporting::lifetimes::{WorkerLifetime, WorkerTimes};
pub use reporting::traced::{Interval, Traced};
pub use reporting::views::Snapshot;
pub use scaling::Scaling;
pub use spec::{
    Batch, CheckpointEvery, CheckpointSpec, Format, JobSpec, LinkEncryption, OnNonfinite,
    OnRowsLost, ParamDtype, Shuffle, ShuffleMode, SpecError, ValidationSpec, WireDtype, Work,
    WorkerOptions,
};
pub use spec::{MAX_WORKERS_PER_POD, multiples_near};
pub use text::{counted, format_metrics, format_value};
pub use time::Time;
pub(crate) use workers::pod::PodId;
