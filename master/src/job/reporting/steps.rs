//! What is counted of steps: those that were skipped, and those that were audited.

use super::history::JobHistory;

impl JobHistory {
    /// Notes that the state contains `total` skipped steps. Returns a log line for the 1st, 2nd,
    /// 4th, 8th and so on.
    pub(crate) fn skip(&mut self, total: u64) -> Option<String> {
        let before = std::mem::replace(&mut self.totals.steps_skipped, total);
        let is_told = total > before && total.checked_ilog2() > before.checked_ilog2();
        let times = if total == 1 { "1 step was" } else { &format!("{total} steps were") };
        is_told.then(|| format!("{times} skipped so far because a gradient or loss was not finite"))
    }

    /// Notes that this number of committed steps were audited.
    pub(super) fn count_audited(&mut self, steps: u64) {
        self.totals.audit.steps = self.totals.audit.steps.saturating_add(steps);
    }

    /// Notes that this number of workers are replaced for what an audit has found. `is_first`:
    /// whether that is known for the first time.
    pub(crate) fn note_audit(&mut self, is_first: bool, workers: u64) {
        self.totals.audit.disagreements += u64::from(is_first);
        self.totals.audit.workers_replaced += workers;
    }
}
