//! Log lines about complete epochs.
//!
//! A small data set may complete hundreds of epochs per second. After the first few lines, a line
//! therefore covers all epochs since the line before it, and lines have a minimum interval.

use std::time::Duration;

use crate::job::event::Committed;
use crate::job::text::format_value;
use crate::job::time::Time;

/// The complete epochs of a job, from one report to the next.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EpochsDone {
    /// Complete epochs before the report.
    pub(crate) before: u32,
    /// Complete epochs with the report.
    pub(crate) complete: u32,
    /// Epochs of the job.
    pub(crate) all: u32,
}

/// Decides which complete epochs are logged when.
#[derive(Debug, Default)]
pub(crate) struct EpochLines {
    /// Number of lines so far.
    lines: u32,
    /// Time of the newest line.
    last: Option<Time>,
    /// The first complete epoch that no line covers, from 0.
    first: Option<u32>,
    /// Step at which the newest of these epochs was complete.
    step: u64,
    /// Loss of the complete epochs that no line covers.
    done: LossSum,
    /// Loss of the epoch that is not complete.
    open: LossSum,
}

/// A sum of losses over records.
#[derive(Clone, Copy, Debug, Default)]
struct LossSum {
    loss: f64,
    records: f64,
}

impl EpochLines {
    /// Takes in a report of the group. Returns the log line that is due.
    pub(crate) fn commit(
        &mut self,
        now: Time,
        report: &Committed,
        done: EpochsDone,
    ) -> Option<String> {
        let EpochsDone { before, complete, all } = done;
        // The report does not say which part of its loss belongs to which epoch, so the loss is
        // distributed over its records evenly.
        let records = |in_epoch: &dyn Fn(u32) -> bool| {
            report.ranges.iter().filter(|r| in_epoch(r.epoch)).map(|r| r.len()).sum::<u64>() as f64
        };
        let mean = report.loss_sum / report.records as f64;
        self.open.add(mean, records(&|epoch| epoch < complete));
        if complete > before {
            self.done.add(self.open.mean(), self.open.records);
            self.open = LossSum::default();
            // The state may have been lost since the last line.
            self.first = Some(self.first.unwrap_or(before).min(before));
            // A report covers the steps of a tenth of a second, and may reach into the next epoch.
            self.step = report.epoch_step.unwrap_or(report.step);
        }
        self.open.add(mean, records(&|epoch| epoch >= complete));
        let first = self.first?;
        let is_due = self.lines < LINES_AT_ONCE
            || complete >= all
            || self.last.is_none_or(|last| now.since(last) >= LINE_INTERVAL);
        if !is_due {
            return None;
        }
        self.lines += 1;
        (self.last, self.first) = (Some(now), None);
        let loss = std::mem::take(&mut self.done).mean();
        let loss = loss.is_finite().then(|| format!(", mean loss {}", format_value(loss)));
        let loss = loss.unwrap_or_default();
        let epochs = if complete - first > 1 {
            format!("epochs {} to {complete} of {all} completed", first + 1)
        } else {
            format!("epoch {complete} of {all} completed")
        };
        Some(format!("{epochs} at step {}{loss}", self.step))
    }
}

impl LossSum {
    /// Adds `records` records with this mean loss, which is ignored if it is not finite, as that of
    /// a skipped step.
    fn add(&mut self, mean: f64, records: f64) {
        if mean.is_finite() && records > 0.0 {
            self.loss += mean * records;
            self.records += records;
        }
    }

    /// The mean; not finite without records.
    fn mean(self) -> f64 {
        self.loss / self.records
    }
}

/// Number of lines without an interval between them.
const LINES_AT_ONCE: u32 = 10;
/// Minimum interval between further lines, except the last one.
const LINE_INTERVAL: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use elasticdl_proto::RecordRange;

    use super::*;

    /// Trains epochs of 8 records, two epochs per report, one report every `millis`; the loss of a
    /// record is the number of its epoch, from 1.
    fn lines(epochs: u32, millis: u64) -> Vec<String> {
        let mut lines = EpochLines::default();
        let commit = |before: u32| {
            let ranges = [before, before + 1].map(|epoch| RecordRange { epoch, start: 0, end: 8 });
            let report = Committed {
                step: u64::from(before) + 2,
                ranges: ranges.into(),
                loss_sum: f64::from(8 * (before + 1) + 8 * (before + 2)),
                records: 16,
                ..Committed::default()
            };
            let now = Time(Duration::from_millis(millis * u64::from(before / 2)));
            lines.commit(now, &report, EpochsDone { before, complete: before + 2, all: epochs })
        };
        (0..epochs).step_by(2).filter_map(commit).collect()
    }

    #[test]
    fn many_epochs_take_few_lines_that_cover_all_of_them() {
        let all = lines(2000, 100);
        assert_eq!(all[0], "epochs 1 to 2 of 2000 completed at step 2, mean loss 1.5000");
        assert_eq!(all[9], "epochs 19 to 20 of 2000 completed at step 20, mean loss 19.5000");
        // 5 s later: 50 reports of two epochs each.
        assert_eq!(all[10], "epochs 21 to 120 of 2000 completed at step 120, mean loss 70.5000");
        assert_eq!(
            all.last().unwrap(),
            "epochs 1921 to 2000 of 2000 completed at step 2000, mean loss 1960.5000"
        );
        assert_eq!(all.len(), 30);
        assert_eq!(lines(100, 5000).len(), 50, "slow epochs have a line each");
    }

    #[test]
    fn an_epoch_is_complete_at_its_own_step_whatever_the_report_covers() {
        let ranges =
            [(0, 0, 8), (1, 0, 2)].map(|(epoch, start, end)| RecordRange { epoch, start, end });
        let report = Committed {
            step: 9,
            epoch_step: Some(7),
            ranges: ranges.into(),
            loss_sum: 10.0,
            records: 10,
            ..Committed::default()
        };
        let done = EpochsDone { before: 0, complete: 1, all: 3 };
        let line = EpochLines::default().commit(Time::default(), &report, done).unwrap();
        assert_eq!(line, "epoch 1 of 3 completed at step 7, mean loss 1.0000");
    }

    #[test]
    fn the_loss_of_an_epoch_is_the_mean_over_its_records() {
        let mut lines = EpochLines::default();
        let mut commit = |ranges: &[(u32, u64, u64)], loss_sum, before, complete| {
            let ranges: Vec<RecordRange> = ranges
                .iter()
                .map(|&(epoch, start, end)| RecordRange { epoch, start, end })
                .collect();
            let records = ranges.iter().map(RecordRange::len).sum();
            let report = Committed { step: 9, ranges, loss_sum, records, ..Committed::default() };
            lines.commit(Time::default(), &report, EpochsDone { before, complete, all: 3 })
        };
        assert_eq!(commit(&[(0, 0, 6)], 12.0, 0, 0), None);
        // A skipped step, whose loss is not finite.
        assert_eq!(commit(&[(0, 6, 7)], f64::NAN, 0, 0), None);
        // The rest of the first epoch and a part of the second.
        let line = commit(&[(0, 7, 10), (1, 0, 3)], 30.0, 0, 1).unwrap();
        assert_eq!(line, "epoch 1 of 3 completed at step 9, mean loss 3.0000");
        let line = commit(&[(1, 3, 10)], 5.0, 1, 2).unwrap();
        assert_eq!(line, "epoch 2 of 3 completed at step 9, mean loss 2.0000");
        let line = commit(&[(2, 0, 10)], f64::INFINITY, 2, 3).unwrap();
        assert_eq!(line, "epoch 3 of 3 completed at step 9");
    }
}
