//! Failures of the user's code, as they reach the master.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use elasticdl_collective::device::DeviceError;
use elasticdl_proto::RecordRange;

use crate::model::UserError;
use crate::prefetch::{NotRead, ReadError};

/// Why this worker can't go on. Its text reaches the job's summary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) error: String,
    /// What it was working on.
    pub(crate) ranges: Vec<RecordRange>,
    /// No other worker would do better.
    pub(crate) fatal: bool,
}

impl Failure {
    pub(crate) fn fatal(error: String) -> Self {
        Self { error, ranges: Vec::new(), fatal: true }
    }
}

impl From<DeviceError> for Failure {
    fn from(error: DeviceError) -> Self {
        Self { error: causes(&error), ranges: Vec::new(), fatal: false }
    }
}

impl From<NotRead> for Failure {
    fn from((range, ReadError { text, ends_job }): NotRead) -> Self {
        Self { error: text, ranges: vec![range], fatal: ends_job }
    }
}

/// An error and what caused it: alone it says little.
pub(crate) fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(deeper) = cause {
        text = format!("{text}: {deeper}");
        cause = deeper.source();
    }
    text
}

/// Calls the user's code; its error or panic becomes a text that says where it came from.
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

/// What a panic said.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
}
