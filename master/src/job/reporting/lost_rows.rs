//! Losses of all copies of rows of a model's tables.

use elasticdl_proto::RowsLoss;

use super::history::JobHistory;

impl JobHistory {
    /// Counts the loss of rows with a state of `step`, and of this many touches; returns whether it
    /// is news, or a loss after which no group has formed yet.
    pub(crate) fn lose_rows(&mut self, step: u64, row_touches: u64) -> bool {
        let known = self.totals.rows_lost.unwrap_or_default();
        // A group that has gone on with older rows finds the same ones lost if it has lost another
        // worker before its next step.
        let is_again = known.missing.is_some() && known.at_step == step;
        let is_new = self.lost_touches.is_none() && !is_again;
        if is_new {
            self.totals.rows_lost =
                Some(RowsLoss { count: known.count + 1, at_step: step, ..known });
        }
        self.lost_touches = Some(row_touches);
        is_new
    }

    /// Whether the model has tables, or no report has told this master yet.
    pub(crate) fn may_have_tables(&self) -> bool {
        self.tables.is_some() || self.speed.committed == 0
    }

    /// Whether the group goes back because rows are lost.
    pub(crate) fn has_lost_rows(&self) -> bool {
        self.lost_touches.is_some()
    }

    /// The step of a state that the group gives up, because rows are lost.
    pub(crate) fn given_up(&self) -> Option<u64> {
        self.lost_touches.and(self.totals.rows_lost).map(|lost| lost.at_step)
    }

    /// The group that has lost rows goes on with older ones, which miss so many touches.
    pub(crate) fn replace_rows(&mut self, missing: u64) {
        self.lost_touches = None;
        self.totals.rows_lost.get_or_insert_default().missing = Some(missing);
    }

    /// The rows' losses, with the touches that are missing at the end, if it is known.
    pub(crate) fn rows_lost(&self) -> Option<RowsLoss> {
        let known = self.totals.rows_lost?;
        let last = self.final_report().and_then(|report| report.row_touches);
        let missing = last.map(|last| last.expected.saturating_sub(last.counted));
        Some(RowsLoss { missing: known.missing.map(|known| missing.unwrap_or(known)), ..known })
    }

    /// The group that has lost rows goes on from a state with this many touches. Returns how many
    /// are lost.
    pub(crate) fn regain_rows(&mut self, row_touches: u64) -> Option<u64> {
        let lost = self.lost_touches.take()?.saturating_sub(row_touches);
        if let Some(known) = &mut self.totals.rows_lost {
            known.row_touches = known.row_touches.saturating_add(lost);
        }
        Some(lost)
    }
}
