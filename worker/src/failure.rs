//! Failures of the user's code and of this worker, as reported to the master.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use elasticdl_collective::device::DeviceError;
use elasticdl_proto::{RecordRange, WorkerMessage};

use crate::metrics::UserError;
use crate::session::replicas::{Found, StateMismatch};

/// Why this worker cannot continue. The text appears in the job's summary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) error: String,
    /// Records that it was processing, numbered through the data set.
    pub(crate) ranges: Vec<RecordRange>,
    /// Whether any other worker would fail in the same way, as far as this one can tell: it ends
    /// the job only at its start, or when a worker on another host confirms it.
    pub(crate) fatal: bool,
    /// Whether it has exported the model beside the job's export.
    pub(crate) exported: bool,
    /// Set if this worker gives up its state because replicas or results differ, or has none.
    pub(crate) divergence: Option<Divergence>,
}

/// How replicas or results differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Divergence {
    /// Whether those of most ranks are equal.
    has_majority: bool,
    /// Whether an audit has found it.
    by_audit: bool,
}

impl Failure {
    pub(crate) fn fatal(error: String) -> Self {
        Self { fatal: true, ..Self::local(error) }
    }

    /// A failure of this process or its host: another worker would most likely not meet it.
    pub(crate) fn local(error: String) -> Self {
        Self::on_records(error, Vec::new())
    }

    /// A failure of this worker while it processed these records.
    pub(crate) fn on_records(error: String, ranges: Vec<RecordRange>) -> Self {
        Self { error, ranges, fatal: false, exported: false, divergence: None }
    }

    /// Replicas or results differ, and this worker gives up its state.
    pub(crate) fn diverged(mismatch: &StateMismatch) -> Self {
        let by_audit = matches!(mismatch.found, Found::Audit(_));
        let has_majority = mismatch.verdict.has_majority;
        let divergence = Some(Divergence { has_majority, by_audit });
        Self { divergence, ..Self::local(mismatch.to_string()) }
    }

    /// No worker of the group has a state to go on from: new ones begin.
    pub(crate) fn without_state(error: String) -> Self {
        let divergence = Some(Divergence { has_majority: false, by_audit: false });
        Self { divergence, ..Self::local(error) }
    }

    /// The report to the master.
    pub(crate) fn to_message(&self) -> WorkerMessage {
        let Self { error, ranges, fatal, exported, divergence } = self.clone();
        match divergence {
            Some(Divergence { has_majority, by_audit }) => {
                WorkerMessage::Diverged { error, has_majority, by_audit }
            }
            None => WorkerMessage::Failed { error, ranges, fatal, exported },
        }
    }
}

impl From<(String, Vec<RecordRange>)> for Failure {
    fn from((error, ranges): (String, Vec<RecordRange>)) -> Self {
        Self::on_records(error, ranges)
    }
}

impl From<DeviceError> for Failure {
    fn from(error: DeviceError) -> Self {
        Self::local(causes(&error))
    }
}

/// Formats an error with the chain of its causes.
pub(crate) fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(deeper) = cause {
        text = format!("{text}: {deeper}");
        cause = deeper.source();
    }
    text
}

/// Calls the user's code. An error or a panic becomes a text that names the method.
pub(crate) fn call_user<T>(
    what: &str,
    code: impl FnOnce() -> Result<T, UserError>,
) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(code)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(format!("{what} failed: {error}")),
        Err(panic) => Err(format!("{what} panicked: {}", panic_text(&*panic))),
    }
}

/// Returns the message of a panic.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
}
