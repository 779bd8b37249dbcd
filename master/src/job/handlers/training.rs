//! Reports of a group that trains: of its state, its steps, its evaluations and its end.

use elasticdl_proto::{FailedShard, Generation, Ledger, RecordRange, WorkerId};

use crate::job::action::Outcome;
use crate::job::event::{Committed, Finished, LedgerReport, Phases};
use crate::job::job::Job;
use crate::job::lifecycle::removal::FAILED_GRACE;
use crate::job::reporting::epochs::EpochsDone;
use crate::job::text::{clip, counted};
use crate::job::time::Time;
use crate::job::workers::straggler::straggler_limit_us;
use crate::job::workers::table::launch_of;

impl Job {
    pub(crate) fn on_formed(
        &mut self,
        now: Time,
        worker: WorkerId,
        generation: Generation,
        step: u64,
        report: &LedgerReport,
    ) {
        if !self.group.is_reporter(worker, generation) || !self.group.awaits_report() {
            return;
        }
        let Some(ledger) = self.check_ledger(now, worker, report) else { return };
        self.out.mark_dirty();
        let is_of_others = step > 0 && !self.workers.members().any(|(_, w)| w.holds_state());
        self.workers.form(worker);
        self.lifecycle.close_divergence();
        let records = self.data.counted();
        self.data.replace_ledger(ledger);
        if step == 0 && self.begins_anew(now, records) {
            return;
        }
        if step == 0 {
            self.lifecycle.begin(now);
        }
        // A loss at the first steps is none that the reports tell.
        self.reporting.regain_rows(0);
        let repeated = self.data.step().saturating_sub(step);
        if step > 0 && repeated > 0 && !self.group.is_restored() {
            self.log_event(format!(
                "the group goes on from step {step}; {} after it, which only workers that are lost \
                 have made, {} repeated",
                counted(repeated, "step"),
                if repeated == 1 { "is" } else { "are" }
            ));
        }
        self.data.set_step(step);
        self.group.note_progress(now);
        if self.group.form() && !self.lifecycle.had_formed() {
            // A group that is taken over may be far from where it began.
            let is_anew =
                self.lifecycle.is_taking_over() && self.spec.options.resume_from.is_none();
            let begun = if is_anew { (0, 0) } else { (self.data.counted(), step) };
            self.reporting.form(now, step, begun);
        }
        // All members have met, although their last heartbeats may report a wait before that.
        self.workers.connected_mut().for_each(|(_, w)| w.restart_wait(now));
        self.release_reserve(now);
        if is_of_others {
            self.request_due_checkpoint(now);
        }
        self.request_checkpoint();
        self.watch_leavers(now);
        self.try_finish_takeover(now);
        self.reconcile(now);
        if self.group.is_formed() {
            self.send_donors_to_spares();
        }
    }

    pub(crate) fn on_committed(&mut self, now: Time, worker: WorkerId, report: &Committed) {
        if !self.group.is_reporter(worker, report.generation) || !self.group.is_formed() {
            return;
        }
        let known = self.data.step();
        let Some(cache) = self.data.cache_mut() else { return };
        if report.step < known {
            let reason = format!("it reports step {} after step {known}", report.step);
            return self.fail_worker(now, worker, &reason);
        }
        let before = cache.ledger().epoch();
        if let Err(wrong) = cache.absorb(&report.ranges) {
            let reason = format!("it reports {wrong}, outside the data set");
            return self.fail_worker(now, worker, &reason);
        }
        let complete = cache.ledger().epoch();
        self.data.set_step(report.step);
        // A step is committed with the headers of all ranks, which have the state before.
        let is_news = self.workers.hold_state();
        self.group.note_commit();
        self.group.note_progress(now);
        self.reporting.commit(now, report.step - known, report);
        self.reporting.intervals.note_step(now, report, self.group.members());
        let done = EpochsDone { before, complete, all: self.spec.options.epochs };
        let epochs_line = self.reporting.epochs.commit(now, report, done);
        for (rank, &member) in self.group.members().iter().enumerate() {
            if let Some(w) = self.workers.get_mut(member) {
                w.note_steps(report, rank);
            }
        }
        let usual = self.workers.members().filter_map(|(_, w)| w.pace().usual_even_us()).collect();
        let limit_us = straggler_limit_us(usual).unwrap_or(u64::MAX);
        self.workers.connected_mut().for_each(|(_, w)| w.compare_pace(now, limit_us));
        self.reporting.lifetimes.commit(self.group.members(), report);
        if let Some(line) = self.reporting.skip(report.steps_skipped) {
            self.log_event(line);
        }
        if let Some(line) = epochs_line {
            self.log_event(line);
        }
        self.watch_checkpoints(now);
        self.try_finish_takeover(now);
        if self.reporting.changes.is_late(now) {
            self.log_recovery();
        }
        self.autoscale(now, report.step - known, report);
        if is_news {
            self.out.mark_dirty();
            self.reconcile(now);
        }
    }

    pub(crate) fn on_allreduce_transport(
        &mut self,
        worker: WorkerId,
        generation: Generation,
        what: &str,
    ) {
        let what = clip(what);
        if self.group.is_reporter(worker, generation) && self.reporting.note_transport(what) {
            let how = if self.group.members().len() == 1 {
                "one worker, no all-reduce".into()
            } else {
                format!("all-reduce through {what}")
            };
            self.log_event(format!("generation {generation}: {how}"));
        }
    }

    pub(crate) fn on_resumed(
        &mut self,
        now: Time,
        worker: WorkerId,
        generation: Generation,
        phases: Phases,
    ) {
        let w = self.workers.get(worker).filter(|w| w.is_member());
        if w.and_then(|w| w.joined()).is_none_or(|joined| generation < joined) {
            return;
        }
        self.out.mark_dirty();
        self.reporting.lifetimes.recover(worker, phases.gap_us());
        if self.reporting.resume(now, worker, generation, phases) {
            self.log_recovery();
        }
    }

    pub(crate) fn on_finished(&mut self, now: Time, worker: WorkerId, report: Finished) {
        if !self.workers.is_member(worker) || report.generation != self.group.generation() {
            return;
        }
        if let Some(ledger) = self.check_ledger(now, worker, &report.ledger) {
            let is_first = self.group.finishing_since().is_none();
            self.group.finish(now, worker, report, ledger);
            if is_first {
                self.restart_stop_wait(now);
            }
            // The others have what they waited for, or it is in flight, although their last
            // heartbeats report a wait.
            self.workers.connected_mut().for_each(|(_, w)| w.restart_wait(now));
            self.reconcile(now);
        }
    }

    pub(crate) fn on_failed(
        &mut self,
        now: Time,
        worker: WorkerId,
        error: &str,
        ranges: &[RecordRange],
        fatal: bool,
    ) {
        let error = clip(error);
        self.out.mark_dirty();
        self.note_failed_shards(worker, error, ranges);
        if fatal && let Some(error) = self.confirm_fatal(worker, error) {
            return self.end(now, Outcome::Failed, Some(error));
        }
        let place = self.place_of(launch_of(worker));
        let name = self.workers.name_of(worker);
        self.avoid_node_of(now, worker);
        self.count_exit(worker);
        // A failed worker ends by itself.
        self.forget_with_pod(now, worker, FAILED_GRACE);
        self.count_failure(now, place, &format!("{name} failed: {error}"), ranges);
        self.reconcile(now);
    }

    pub(crate) fn note_failed_shards(
        &mut self,
        worker: WorkerId,
        error: &str,
        ranges: &[RecordRange],
    ) {
        let (Some(dataset), Some(cache)) = (self.data.dataset(), self.data.cache()) else { return };
        let valid = ranges.iter().copied().filter(|r| cache.is_valid(r));
        let max = self.reporting.failures_left();
        for (file, RecordRange { epoch, start, end }) in dataset.by_file(valid, max) {
            let error = error.to_owned();
            self.reporting.fail_on(FailedShard { worker, epoch, file, start, end, error });
        }
    }

    fn check_ledger(
        &mut self,
        now: Time,
        worker: WorkerId,
        report: &LedgerReport,
    ) -> Option<Ledger> {
        match self.data.cache()?.check(report) {
            Ok(ledger) => Some(ledger),
            Err(wrong) => {
                self.fail_worker(now, worker, &format!("it reports {wrong}"));
                None
            }
        }
    }
}
