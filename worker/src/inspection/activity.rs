//! What the trainer does now.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use elasticdl_proto::Activity;

/// The task that the trainer has begun last, readable from any thread.
#[derive(Debug, Default)]
pub(crate) struct CurrentActivity(Mutex<Option<Begun>>);

#[derive(Clone, Copy, Debug)]
struct Begun {
    what: &'static str,
    step: u64,
    at: Instant,
}

impl CurrentActivity {
    /// The trainer, whose state contains `step` steps, begins at `at` with `what`: the predicate of
    /// a sentence about it.
    pub(crate) fn begin(&self, what: &'static str, step: u64, at: Instant) {
        let mut current = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *current = Some(Begun { what, step, at });
    }

    /// Steps that its state contained then; `None` before the first task.
    pub(crate) fn step(&self) -> Option<u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).map(|begun| begun.step)
    }

    /// What it does, and for how long.
    pub(super) fn report(&self) -> Option<Activity> {
        let current = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Begun { what, step, at } = current?;
        Some(Activity { what: what.into(), step, for_s: super::seconds(at.elapsed()) })
    }
}
