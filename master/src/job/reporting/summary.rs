//! The summary of a job, for the user and for programs.

pub use elasticdl_proto::{
    Cause, FailedShard, LossSummary, MembershipChange, RecordsSummary, Summary, ThroughputSummary,
    WorkersSummary,
};

use crate::job::action::Outcome;
use crate::job::job::{Job, Phase};
use crate::job::spec::Work;
use crate::job::time::Time;
impl Job {
    /// The summary of the job so far.
    #[must_use]
    pub fn summary(&self, now: Time) -> Summary {
        let records = self.records_summary();
        let last = if self.spec.work.trains() {
            u32::try_from(self.group.members.len()).expect("members are limited by max_workers")
        } else {
            self.history.inference_workers
        };
        Summary {
            job: self.spec.name.clone(),
            state: self.state().into(),
            steps: self.step,
            epochs: self.leases.as_ref().map_or(0, |r| r.ledger().epoch()),
            wall_s: now.0.as_secs_f64(),
            records,
            workers: WorkersSummary {
                peak: self.history.totals.peak,
                last,
                restarts: self.history.totals.restarts,
            },
            memberships: self.history.memberships(),
            loss: self.history.loss(),
            throughput: self.history.throughput(records.counted, self.step),
            allreduce_transport: self.history.allreduce_transport.clone(),
            evaluations: self.evaluations(),
            checkpoints: self.checkpoints(),
            failed_shards: self.history.failed_shards(),
            steps_skipped: self.history.totals.steps_skipped,
            state_lost: self.history.totals.state_lost,
            error: self.history.error.clone(),
            model_summary: self.model_summary(),
            metrics: self.results.means(records.expected),
            output: match &self.spec.work {
                Work::Predict { output, .. } => Some(output.clone()),
                Work::Evaluate { .. } | Work::Train { .. } => None,
            },
            export: self.exported(),
            digest: self.final_report.as_ref().map(|word| format!("{:016x}", word.digest)),
        }
    }

    /// Based on the group's reports alone: leases prove nothing.
    fn records_summary(&self) -> RecordsSummary {
        let Some(leases) = &self.leases else {
            return RecordsSummary::default();
        };
        let (whole, counted) = (leases.expected(), leases.ledger().counted());
        let stopped =
            matches!(self.phase, Phase::Ending(Outcome::Stopped) | Phase::Ended(Outcome::Stopped));
        let expected = match &self.final_report {
            _ if counted == whole => whole,
            Some(word)
                if stopped
                    || word.stopped_early
                    || self.spec.max_steps.is_some_and(|max| word.step >= max) =>
            {
                word.records_trained
            }
            None if stopped => counted,
            _ => whole,
        };
        let missing = expected.saturating_sub(counted);
        RecordsSummary { expected, counted, missing, repeated: leases.ledger().repeated() }
    }

    /// The lowest rank exports before it sends its final report.
    fn exported(&self) -> Option<String> {
        let Work::Train { export } = &self.spec.work else { return None };
        export.clone().filter(|_| self.final_report.as_ref().is_some_and(|word| word.exported))
    }

    /// The summary text of the lowest rank's model.
    fn model_summary(&self) -> Option<String> {
        self.final_report
            .as_ref()?
            .summary
            .as_deref()
            .map(|text| crate::job::reporting::history::clip(text).to_owned())
    }
}
