//! Jobs whose workers are killed, leave, join and stop, one at a time, and what that costs the
//! others, from event logs that the workers write.

mod bench;
mod event_log;
mod events;
mod step_log;

pub use bench::{Bench, DisturbedEnded, DisturbedJob, RECORDS_PER_WORKER, hang_file};
pub use event_log::{Commit, EventLog, EventLogs, EventWriter, LogEntry, now};
pub use events::{Kind, Measured, disturb, disturb_running};
pub use step_log::{LoggedRule, StepLog};
