//! Handlers of news that influence only the reports: checkpoints, evaluations, storage.

use std::time::Duration;

use elasticdl_proto::{
    BestEvaluation, CheckpointEvery, CheckpointTimes, Kept, RestoredCheckpoint, SavedCheckpoint,
    WorkerId,
};

use crate::job::action::MasterMessage;
use crate::job::event::{CheckpointNews, Evaluated};
use crate::job::job::Job;
use crate::job::lifecycle::state_loss::FIRST_CHECKPOINT;
use crate::job::reporting::traced::Traced;
use crate::job::spec::OnRowsLost;
use crate::job::text::{clip, counted, format_metrics, format_value};
use crate::job::time::Time;

impl Job {
    // ---- checkpoints ----

    /// Handles the user's request for a checkpoint.
    pub(crate) fn on_checkpoint_requested(&mut self) {
        if !self.lifecycle.is_running() || self.spec.options.checkpoints.is_none() {
            return;
        }
        self.log_event("checkpoint requested".into());
        self.reporting.want_checkpoint();
        self.request_checkpoint();
    }

    /// Reports, once, that the next checkpoint is late.
    pub(crate) fn watch_checkpoints(&mut self, now: Time) {
        let step = self.data.step();
        let Some(spec) = &self.spec.options.checkpoints else { return };
        let Some(waited) = self.reporting.late_checkpoints.late(now, step, spec.every) else {
            return;
        };
        let unsaved = self.checkpoints().and_then(|known| known.unsaved(step));
        let Some((first, last)) = unsaved else { return };
        self.log_event(format!(
            "no checkpoint has been written for {} s, although one was due: its write has not \
             ended; steps {first} to {last} are in none",
            waited.as_secs()
        ));
    }

    /// A group goes on without any member of the one before, whose clocks said when a checkpoint is
    /// due: its members' begin anew, and may never come so far if they are lost as well.
    pub(crate) fn request_due_checkpoint(&mut self, now: Time) {
        let Some(spec) = &self.spec.options.checkpoints else { return };
        let CheckpointEvery::Time(every) = spec.every else { return };
        let every = match self.reporting.has_checkpoint() {
            true => every,
            false => every.min(FIRST_CHECKPOINT),
        };
        if self.reporting.late_checkpoints.waited(now).is_some_and(|waited| waited >= every) {
            self.reporting.want_checkpoint();
        }
    }

    /// Forwards the user's request to the lowest rank, which informs the others. Called again for
    /// each new group.
    pub(crate) fn request_checkpoint(&mut self) {
        if let Some(first) = self.group.reporter().filter(|_| self.reporting.wants_checkpoint) {
            self.send(first, MasterMessage::KeepCheckpoint);
        }
    }

    pub(crate) fn on_checkpoint_news(&mut self, now: Time, worker: WorkerId, news: CheckpointNews) {
        let last = self.newest_step();
        let touches = match &news {
            CheckpointNews::Restored { row_touches, .. } => {
                self.reporting.regain_rows(*row_touches)
            }
            _ => None,
        };
        let is_in_vain = matches!(news, CheckpointNews::Failed { step, .. } if step >= last);
        let is_written =
            matches!(news, CheckpointNews::Saved { .. } | CheckpointNews::Failed { .. });
        let was_late = (is_written || matches!(news, CheckpointNews::Restored { .. }))
            && self.reporting.late_checkpoints.heard(now, last);
        let known = &mut self.reporting.totals.checkpoints;
        let line = match news {
            CheckpointNews::Damaged { name, reason } => {
                known.damaged += 1;
                Some(format!("checkpoint {name} is damaged and passed over: {}", clip(&reason)))
            }
            CheckpointNews::Failed { step, error } => {
                known.failed += 1;
                self.reporting.unwritten_checkpoint = Some(step);
                let error = clip(&error).to_owned();
                // Each worker and each attempt has the same to say.
                let is_known = known.error.replace(error.clone()).is_some();
                (!is_known).then(|| {
                    format!("worker {worker} can't write the checkpoint of step {step}: {error}")
                })
            }
            CheckpointNews::OlderRows { name, missing } => {
                self.reporting.replace_rows(missing);
                let how = match name {
                    Some(name) => format!("with those of checkpoint {name} in their place"),
                    None => "and they begin anew, as there is no checkpoint".into(),
                };
                Some(format!("the group goes on, {how}; {missing} row touches are missing"))
            }
            CheckpointNews::Restored { step: from, name, differences, .. } => {
                let lost_steps = last.saturating_sub(from);
                let again = match lost_steps {
                    0 => String::new(),
                    1 => "; 1 step is repeated".into(),
                    steps => format!("; {steps} steps are repeated"),
                };
                self.group.note_restored();
                let mut line =
                    format!("the group begins at step {from}, from checkpoint {name}{again}");
                if let Some(touches) = touches.filter(|_| !self.spec.options.shard_optimizer) {
                    line += &format!("; {touches} row touches are lost, and made again");
                }
                if !differences.is_empty() {
                    line += &format!(
                        "; the program that wrote it differs in its {} from the one that goes on \
                         (--allow-mixed-builds: that is meant)",
                        clip(&differences)
                    );
                }
                known.restored.push(RestoredCheckpoint { step: from, name, lost_steps });
                let surplus = known.restored.len().saturating_sub(RESTORED_MAX);
                known.restored.drain(..surplus);
                Some(line)
            }
            CheckpointNews::RowsLost { step, shards, row_touches } => {
                let is_new = self.reporting.lose_rows(step, row_touches);
                let then = match self.spec.options.on_rows_lost {
                    OnRowsLost::Stale if !self.spec.options.shard_optimizer => "",
                    _ => ": the group goes back",
                };
                let what = match self.spec.options.shard_optimizer {
                    true => "the optimizer's state",
                    false => "the model's tables",
                };
                let parts = counted(shards.into(), "part");
                is_new.then(|| {
                    format!(
                        "all copies of {parts} of {what} are lost with their workers at step \
                         {step}{then}"
                    )
                })
            }
            // Shown in the status only, unless others have failed: there may be very many.
            CheckpointNews::Saved { step, name, bytes, times } => {
                known.saved += 1;
                self.reporting.unwritten_checkpoint = None;
                known.newest = Some(SavedCheckpoint { step, name: name.clone(), bytes });
                // One that hung makes up for none that a group that ends has left out.
                let makes_up = self.lifecycle.is_running() || step >= last;
                let failed_before = makes_up && known.error.take().is_some();
                let CheckpointTimes { copy_us, write_us, publish_us } = times;
                let took = Duration::from_micros(copy_us + write_us + publish_us);
                let what = Traced::Checkpoint { step, name, bytes, worker, times };
                if !took.is_zero() {
                    self.reporting.intervals.note(now, took, self.group.generation(), what);
                }
                (failed_before || was_late)
                    .then(|| format!("checkpoints are written again: that of step {step} is"))
            }
        };
        // Success or failure: the next one is written on schedule.
        self.reporting.wants_checkpoint &= !is_written;
        self.out.mark_dirty();
        line.into_iter().for_each(|line| self.log_event(line));
        if is_in_vain {
            self.give_suspension_up(now);
        }
    }

    // ---- evaluations ----

    pub(crate) fn on_evaluated(&mut self, now: Time, report: Evaluated, took: Duration) {
        let Some(spec) = &self.spec.options.validation else { return };
        if !took.is_zero() {
            let what = Traced::Evaluation(report.clone());
            self.reporting.intervals.note(now, took, self.group.generation(), what);
        }
        let known = &mut self.reporting.evaluations;
        // A group that started from a checkpoint repeats steps.
        known.all.retain(|before| before.step < report.step);
        let Evaluated { step, records, metrics } = &report;
        let line =
            format!("step {step} evaluated on {records} records: {}", format_metrics(metrics));
        known.all.push(report.clone());
        let is_better =
            |value: f64, best: f64| if spec.highest { value > best } else { value < best };
        let before = known.best.take();
        let mut best = before.clone().filter(|b| known.all.iter().all(|e| e.step > b.step));
        for evaluated in &known.all {
            if let Some(&Some(value)) = evaluated.metrics.get(&spec.metric)
                && best.as_ref().is_none_or(|best| is_better(value, best.value))
            {
                best = Some(BestEvaluation {
                    step: evaluated.step,
                    metric: spec.metric.clone(),
                    value,
                    export: None,
                });
            }
        }
        let same = |best: &BestEvaluation, before: &BestEvaluation| {
            best.step == before.step && best.value == before.value
        };
        match (best, before) {
            // It is exported already.
            (Some(best), Some(before)) if same(&best, &before) => known.best = Some(before),
            (best, _) => known.best = best,
        }
        let surplus = known.all.len().saturating_sub(EVALUATIONS_MAX);
        known.all.drain(..surplus);
        self.reporting.note_evaluated(report);
        self.out.mark_dirty();
        self.log_event(line);
    }

    /// The best model was exported, and what was there before the first one is `kept` elsewhere; or
    /// it could not be. A worker tells it again at the end of the job.
    pub(crate) fn on_best_export(&mut self, step: u64, kept: Option<Kept>, error: Option<String>) {
        let Some(export) =
            self.spec.options.validation.as_ref().and_then(|v| v.export_best.as_ref())
        else {
            return;
        };
        let known = &mut self.reporting.evaluations;
        let kept = kept
            .filter(|kept| known.kept.as_ref().is_none_or(|known| known.address != kept.address));
        let kept = kept.map(|kept| {
            let address = clip(&kept.address);
            let line = match (kept.value, &known.best) {
                (Some(value), Some(BestEvaluation { metric, .. })) => format!(
                    "{export} held a better model, of {metric} {}, which is kept as {address}",
                    format_value(value)
                ),
                _ => format!(
                    "{export} held another model, which is kept as {address}; it can't be compared \
                     with those of this job"
                ),
            };
            known.kept = Some(kept);
            line
        });
        if let (Some(best), None) = (&mut known.best, &error)
            && best.step == step
        {
            best.export = Some(export.clone());
        }
        let known = &mut known.export_error;
        let line = match (&*known, &error) {
            // Each evaluation tries again.
            (Some(_), Some(_)) | (None, None) => None,
            (None, Some(error)) => Some(format!(
                "the best model, of step {step}, is not exported: {}; training goes on, and the \
                 next evaluation tries again",
                clip(error)
            )),
            (Some(_), None) => Some(format!("the best model, of step {step}, is exported")),
        };
        *known = error.map(|error| clip(&error).to_owned());
        self.out.mark_dirty();
        line.into_iter().chain(kept).for_each(|line| self.log_event(line));
    }

    /// Whether the collector takes the job's traces.
    pub(crate) fn on_traced(&mut self, error: Option<String>) {
        self.log_event(match error {
            Some(error) => format!("the job's traces are not exported: {}", clip(&error)),
            None => "the job's traces are exported again".into(),
        });
    }

    /// Whether the tracking server takes the job's metrics.
    pub(crate) fn on_tracked(&mut self, error: Option<String>) {
        let line = self.reporting.note_tracking(error.map(|error| clip(&error).to_owned()));
        line.into_iter().for_each(|line| self.log_event(line));
    }

    /// The job's clock has stood still for so long, while workers may have trained.
    pub(crate) fn note_away(&mut self, away: Duration) {
        self.reporting.away += away;
        let seconds = away.as_secs_f64();
        self.log_event(format!(
            "the master could not renew its Lease for {seconds:.1} s (the API server did not \
             answer); the workers went on alone"
        ));
    }

    // ---- storage ----

    pub(crate) fn on_storage_wait(
        &mut self,
        worker: WorkerId,
        storage: Option<String>,
        waited: Duration,
    ) {
        self.reporting.counters.storage_wait += waited;
        self.reporting.speed.note_wait();
        let Self { reporting, workers, .. } = self;
        let waits = &mut reporting.storage_waits;
        let was_away = !waits.waiting.is_empty();
        // Forgotten workers send no further reports.
        waits.waiting.retain(|id, _| workers.is_connected(*id));
        match storage {
            Some(storage) => {
                let so_far = waits.waiting.entry(worker).or_default();
                *so_far += waited;
                waits.longest = waits.longest.max(*so_far);
                if !was_away {
                    waits.longest = waited;
                    waits.storage = clip(&storage).to_owned();
                    let line = format!("worker {worker} waits for storage: {}", waits.storage);
                    self.log_event(line);
                    self.log_stop_awaits_storage();
                }
            }
            None => {
                let so_far = waits.waiting.remove(&worker).unwrap_or_default();
                waits.longest = waits.longest.max(so_far + waited);
                if was_away && waits.waiting.is_empty() {
                    let longest = std::mem::take(&mut waits.longest);
                    let seconds = longest.as_secs_f64();
                    self.log_event(format!(
                        "workers no longer wait for storage; they waited for up to {seconds:.1} s"
                    ));
                }
            }
        }
    }
}

const RESTORED_MAX: usize = 100;
const EVALUATIONS_MAX: usize = 1000;
