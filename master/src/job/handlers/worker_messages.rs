//! Handlers of workers' messages, which validate them.
//!
//! A message may be wrong, outdated, or from a worker of another job: a message that does not apply
//! now is ignored, and an invalid one fails its sender.

use elasticdl_proto::{FileList, Generation, RecordRange, WorkerId};

use crate::job::action::{Action, Outcome, ToWorker};
use crate::job::data::lease_table::{LeaseTable, Share};
use crate::job::data::shards::{Shards, counted};
use crate::job::event::{Committed, Finished, FromWorker, LedgerReport, Phases};
use crate::job::group::choose::{Broken, Suspicion};
use crate::job::job::{Job, Phase, ZOMBIE_GRACE};
use crate::job::outbox::Timer;
use crate::job::reporting::history::clip;
use crate::job::reporting::summary::FailedShard;
use crate::job::spec::Batch;
use crate::job::time::Time;
use crate::job::workers::table::{ExitAccounting, Stage};

impl Job {
    pub(crate) fn on_message(&mut self, now: Time, worker: WorkerId, message: FromWorker) {
        let heard = matches!(self.phase, Phase::Running | Phase::Stopping);
        if !heard || !self.workers.connected.contains_key(&worker) {
            return;
        }
        self.workers.heard(worker, now);
        match message {
            FromWorker::Heartbeat(stall) => self.on_alive(now, worker, stall),
            FromWorker::Broken { generation, suspect, error, unreachable } => {
                let suspect = suspect.map(|suspect| Suspicion { suspect, unreachable });
                self.on_broken(now, worker, generation, suspect, &error);
            }
            FromWorker::Checkpoint(news) => self.on_checkpoint_news(worker, news),
            FromWorker::Committed(report) => self.on_committed(now, worker, &report),
            FromWorker::Described(outcome) => self.on_described(now, worker, outcome),
            FromWorker::Evaluated(report) => self.on_evaluated(report),
            FromWorker::ShardDone { range, metrics } => self.on_done(now, worker, range, metrics),
            FromWorker::Failed { error, ranges, fatal } => {
                self.on_failed(now, worker, &error, &ranges, fatal)
            }
            FromWorker::Finished(report) => self.on_finished(now, worker, report),
            FromWorker::Formed { generation, step, ledger } => {
                self.on_formed(now, worker, generation, step, &ledger);
            }
            FromWorker::HeldLeases { step, ranges } => self.on_holding(now, worker, step, &ranges),
            FromWorker::LeaseRequest { epoch, records } => {
                self.on_lease_request(now, worker, epoch, records)
            }
            FromWorker::Leaving => self.on_leaving(now, worker),
            FromWorker::CaughtUp { step } => self.on_caught_up(now, worker, step),
            FromWorker::Ready { parameters } => self.on_ready(now, worker, parameters),
            FromWorker::StorageWait { storage, waited } => {
                self.on_storage_wait(worker, storage, waited)
            }
            FromWorker::AllreduceTransport { generation, what } => {
                self.on_allreduce_transport(worker, generation, &what)
            }
            FromWorker::Resumed { generation, step, phases } => {
                self.on_resumed(now, worker, generation, step, phases)
            }
        }
    }

    // ---- on the way to be a member ----

    fn on_described(&mut self, now: Time, worker: WorkerId, outcome: Result<FileList, String>) {
        if self.dataset_describer != Some(worker) || self.dataset.is_some() {
            return;
        }
        let cut = outcome.and_then(|dataset| Ok((Shards::cut(&dataset, &self.spec)?, dataset)));
        let (shards, dataset) = match cut {
            Ok(cut) => cut,
            Err(error) => {
                let error = clip(&error).to_owned();
                return self.end(now, Outcome::InvalidInput, Some(error));
            }
        };
        self.log_event(format!(
            "data set: {} in {}, {} of {}",
            counted(shards.records(), "record"),
            counted(dataset.len() as u64, "file"),
            counted(shards.len().into(), "shard"),
            shards.sizes()
        ));
        self.leases = Some(LeaseTable::new(shards, self.spec.epochs));
        self.dataset = Some(dataset);
        self.dataset_describer = None;
        self.out.mark_dirty_urgent();
        let waiting: Vec<WorkerId> =
            self.workers.connected.iter().filter(|(_, w)| !w.released).map(|(&id, _)| id).collect();
        for worker in waiting {
            self.welcome(worker);
        }
        self.launch_missing(now);
    }

    fn on_ready(&mut self, now: Time, worker: WorkerId, parameters: u64) {
        if self.workers.connected.get(&worker).is_none_or(|w| w.stage != Stage::Preparing) {
            return;
        }
        if self.parameters.is_none() {
            self.out.mark_dirty();
        }
        let expected = *self.parameters.get_or_insert(parameters);
        if parameters != expected {
            let reason =
                format!("its model has {parameters} parameters, the first worker's has {expected}");
            return self.fail_worker(now, worker, &reason);
        }
        let donors = if self.group.is_broken() { Vec::new() } else { self.donors(worker) };
        let w = self.workers.connected.get_mut(&worker).expect("it was just found");
        if donors.is_empty() {
            w.stage = Stage::Ready;
        } else {
            w.stage = Stage::Fetching;
            self.send(worker, ToWorker::Fetch(donors));
        }
        self.reconcile(now);
    }

    fn on_caught_up(&mut self, now: Time, worker: WorkerId, step: u64) {
        if let Some(w) =
            self.workers.connected.get_mut(&worker).filter(|w| w.stage == Stage::Fetching)
        {
            w.stage = Stage::Ready;
            // A worker that gave up the fetch reports step 0.
            w.fetched = step > 0;
            self.reconcile(now);
        }
    }

    fn on_lease_request(&mut self, now: Time, worker: WorkerId, epoch: u32, records: u64) {
        let (Some(known), Some(w)) = (&self.leases, self.workers.connected.get_mut(&worker)) else {
            return;
        };
        let prepared = matches!(w.stage, Stage::Preparing | Stage::Fetching | Stage::Ready);
        // A worker that has not synchronized with a group yet may request records of an epoch that
        // is complete, or the group may start again: its requests are retained until it has.
        let complete = w.is_eligible() && self.group.formed && epoch < known.epoch_stable();
        if !prepared || w.released || records == 0 || epoch >= self.spec.epochs || complete {
            return;
        }
        if w.requested_records.len() >= EPOCHS_ASKED_MAX
            && !w.requested_records.contains_key(&epoch)
        {
            let reason =
                format!("it asks for records of more than {EPOCHS_ASKED_MAX} epochs at once");
            return self.fail_worker(now, worker, &reason);
        }
        let credit = w.requested_records.entry(epoch).or_default();
        *credit = credit.saturating_add(records).min(known.shards().records());
        let share = self.share();
        self.fill(worker, share);
    }

    // ---- from the group ----

    fn on_formed(
        &mut self,
        now: Time,
        worker: WorkerId,
        generation: Generation,
        step: u64,
        report: &LedgerReport,
    ) {
        let is_news = !self.group.formed || self.group.report_is_due;
        if !self.is_reporter(worker, generation) || !is_news {
            return;
        }
        let Some(ledger) = self.check_ledger(now, worker, report) else {
            return;
        };
        // A member that was lost since may have trained on its leases: only a generation that is
        // published after its loss shows whether its records were absorbed.
        let awaited: Vec<WorkerId> = self.workers.disconnected_members().collect();
        let may_live = |m| self.workers.connected.contains_key(m) || awaited.contains(m);
        let outdated = !self.group.members.iter().all(may_live);
        self.out.mark_dirty();
        let Self { leases: Some(leases), workers, .. } = self else {
            return;
        };
        workers
            .connected
            .values_mut()
            .filter(|w| w.rank.is_some())
            .for_each(|w| w.holds_state = true);
        let disconnected = workers.launches.values_mut().filter_map(|l| l.disconnected.as_mut());
        disconnected
            .filter(|disconnected| disconnected.rank.is_some())
            .for_each(|disconnected| disconnected.holds_state = true);
        if outdated {
            return self.count_eligible();
        }
        let is_member = |id| workers.connected.get(&id).is_some_and(|w| w.rank.is_some());
        let keeps = |id| is_member(id) || awaited.contains(&id);
        leases.rebuild(step, ledger, keeps);
        let stable = leases.epoch_stable();
        for w in workers.connected.values_mut().filter(|w| w.rank.is_some()) {
            w.requested_records.retain(|&epoch, _| epoch >= stable);
        }
        self.count_eligible();
        if step == 0 && self.begins_anew(now) {
            return;
        }
        self.step = step;
        self.group.report_is_due = false;
        let was_formed = std::mem::replace(&mut self.group.formed, true);
        self.group.previous_ring = None;
        if !was_formed && !self.takeover.as_ref().is_some_and(|a| a.was_formed) {
            let counted = self.leases.as_ref().map_or(0, |leases| leases.ledger().counted());
            self.history.form(now, step, counted);
        }
        self.request_checkpoint();
        self.watch_leavers(now);
        self.try_finish_takeover(now);
        self.release_unaccounted();
        self.fill_all();
        self.reconcile(now);
    }

    fn on_committed(&mut self, now: Time, worker: WorkerId, report: &Committed) {
        if !self.is_reporter(worker, report.generation) || !self.group.formed {
            return;
        }
        let Some(leases) = &mut self.leases else {
            return;
        };
        if report.step < self.step {
            let reason = format!("it reports step {} after step {}", report.step, self.step);
            return self.fail_worker(now, worker, &reason);
        }
        let before = leases.ledger().epoch();
        if let Err(wrong) = leases.commit(report.step, &report.ranges) {
            return self.fail_worker(
                now,
                worker,
                &format!("it reports {wrong}, outside the data set"),
            );
        }
        let complete = leases.ledger().epoch();
        let steps = report.step - std::mem::replace(&mut self.step, report.step);
        self.group.suspicion = None;
        self.group.blame.clear();
        self.history.commit(now, report.records, report.loss_sum);
        self.history.counters.commit(steps, report);
        for (member, &compute_us) in self.group.members.iter().zip(&report.compute_us) {
            if let Some(w) = self.workers.connected.get_mut(member) {
                w.pace.note(compute_us);
            }
        }
        let stable = leases.epoch_stable();
        for w in self.workers.connected.values_mut().filter(|w| w.is_eligible()) {
            w.requested_records.retain(|&epoch, _| epoch >= stable);
        }
        if let Some(line) = self.history.skip(report.steps_skipped) {
            self.log_event(line);
        }
        if complete > before {
            self.log_event(format!(
                "epoch {complete} of {} is complete at step {}",
                self.spec.epochs, self.step
            ));
        }
        self.try_finish_takeover(now);
        self.release_unaccounted();
        self.fill_all();
        if self.history.is_late(now) {
            self.log_recovery();
        }
    }

    fn on_allreduce_transport(&mut self, worker: WorkerId, generation: Generation, what: &str) {
        let what = clip(what);
        if self.is_reporter(worker, generation)
            && self.history.allreduce_transport.as_deref() != Some(what)
        {
            self.history.allreduce_transport = Some(what.to_owned());
            self.log_event(format!("generation {generation}: gradients are summed over {what}"));
        }
    }

    fn on_resumed(
        &mut self,
        now: Time,
        worker: WorkerId,
        generation: Generation,
        step: u64,
        phases: Phases,
    ) {
        let joined = self.workers.connected.get(&worker).and_then(|w| w.rank.and(w.joined));
        if joined.is_none_or(|joined| generation < joined) {
            return;
        }
        self.out.mark_dirty();
        if self.history.resume(now, worker, generation, step, phases) {
            self.log_recovery();
        }
    }

    /// Logs the pause of the last membership change, once, if any member has reported it.
    pub(crate) fn log_recovery(&mut self) {
        if let Some(line) = self.history.recovery_line() {
            self.log_event(line);
        }
    }

    fn on_finished(&mut self, now: Time, worker: WorkerId, report: Finished) {
        let is_member = self.workers.connected.get(&worker).is_some_and(|w| w.rank.is_some());
        if !is_member || report.generation != self.group.generation {
            return;
        }
        if let Some(ledger) = self.check_ledger(now, worker, &report.ledger) {
            self.group.finished.entry(worker).or_insert((report, ledger));
            // The others have what they waited for, or it is in flight, although their last
            // heartbeats report a wait.
            self.workers
                .connected
                .values_mut()
                .filter_map(|w| w.stalled.as_mut())
                .for_each(|s| s.restart_wait(now));
            self.reconcile(now);
        }
    }

    /// Whether `worker` is the lowest rank of the newest generation and reports about it.
    fn is_reporter(&self, worker: WorkerId, generation: Generation) -> bool {
        generation == self.group.generation && self.group.members.first() == Some(&worker)
    }

    fn check_ledger(
        &mut self,
        now: Time,
        worker: WorkerId,
        report: &LedgerReport,
    ) -> Option<elasticdl_proto::Ledger> {
        match self.leases.as_ref()?.check(report) {
            Ok(ledger) => Some(ledger),
            Err(wrong) => {
                self.fail_worker(now, worker, &format!("it reports {wrong}"));
                None
            }
        }
    }

    // ---- trouble ----

    fn on_broken(
        &mut self,
        now: Time,
        worker: WorkerId,
        generation: Generation,
        suspicion: Option<Suspicion>,
        error: &str,
    ) {
        let is_member = self.workers.connected.get(&worker).is_some_and(|w| w.rank.is_some());
        if !is_member || generation != self.group.generation || self.group.is_broken() {
            return;
        }
        if self.group.broken.is_none() {
            let mut until = now + BROKEN_WAIT;
            if suspicion.is_some_and(|s| s.unreachable) {
                // All dials began, and so end, at about the same time: further reports show which
                // member is at fault.
                until = until.max(now + self.spec.heartbeat().unwrap_or_default());
            }
            self.out.set_timer(until, Timer::Broken(generation));
            self.group.broken = Some(Broken { until, ..Broken::default() });
            self.log_event(format!(
                "generation {generation}: a link of worker {worker} broke: {}",
                clip(error)
            ));
        }
        let has_no_suspect = suspicion.is_none();
        let suspicion =
            suspicion.filter(|s| s.suspect != worker && self.group.members.contains(&s.suspect));
        if let Some(broken) = self.group.broken.as_mut().filter(|b| !b.reporters.contains(&worker))
        {
            broken.reporters.push(worker);
            match suspicion {
                Some(Suspicion { suspect, unreachable: true }) => {
                    broken.unanswered.push((worker, suspect))
                }
                Some(Suspicion { suspect, .. }) => broken.suspects.push(suspect),
                None => broken.is_explained |= has_no_suspect,
            }
        }
        if let Some(Suspicion { suspect, .. }) = suspicion {
            self.evict_suspect(now, suspect);
            self.reconcile(now);
        }
    }

    /// The wait for a loss that explains a broken link is over.
    pub(crate) fn on_broken_due(&mut self, now: Time, generation: Generation) {
        let due =
            self.group.broken.take_if(|b| generation == self.group.generation && b.until <= now);
        let Some(broken) = due.filter(|_| matches!(self.phase, Phase::Running | Phase::Stopping))
        else {
            return;
        };
        if !broken.unanswered.is_empty() {
            return self.on_unanswered(now, broken);
        }
        self.group.relink = true;
        if broken.is_explained {
            // The reporters' links ended because a neighbour closed them, and all members are
            // alive.
            self.group.suspicion = None;
            return self.reconcile(now);
        }
        // A reporter is alive. Among equals the highest rank is chosen, so that two workers that
        // suspect each other are not chosen alternately.
        let by_rank = |s: &&WorkerId| self.group.members.iter().position(|m| m == *s);
        let silent =
            broken.suspects.iter().filter(|s| !broken.reporters.contains(s)).max_by_key(by_rank);
        if let Some(&suspect) = silent.or_else(|| broken.suspects.iter().max_by_key(by_rank)) {
            let times = match self.group.suspicion {
                Some((before, times)) if before == suspect => times + 1,
                _ => 1,
            };
            self.group.suspicion = Some((suspect, times));
            if times >= SUSPICIONS_MAX && self.workers.connected.contains_key(&suspect) {
                self.evict(now, suspect, "does not answer its neighbours");
            }
        }
        self.reconcile(now);
    }

    /// Evicts a worker that can't be reached, although its process may run.
    pub(crate) fn evict(&mut self, now: Time, worker: WorkerId, why: &str) {
        let Some(w) = self.workers.connected.get(&worker) else { return };
        let (launch, is_member) = (w.launch, w.rank.is_some());
        self.log_event(format!("worker {worker} {why} and is evicted"));
        self.out.push(Action::Disconnect { worker });
        self.forget_with_pod(now, worker, ZOMBIE_GRACE);
        self.group.hung |= is_member;
        self.group.suspicion = None;
        self.kill(launch);
    }

    fn on_failed(
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
        if fatal {
            let error = format!("worker {worker}: {error}");
            return self.end(now, Outcome::Failed, Some(error));
        }
        let launch = self.workers.connected[&worker].launch;
        if let Some(l) = self.workers.launches.get_mut(&launch) {
            l.accounting = ExitAccounting::Counted;
        }
        // A failed worker ends by itself.
        self.forget_with_pod(now, worker, FAILED_GRACE);
        self.count_failure(now, &format!("worker {worker} failed: {error}"), ranges);
        self.reconcile(now);
    }

    pub(crate) fn note_failed_shards(
        &mut self,
        worker: WorkerId,
        error: &str,
        ranges: &[RecordRange],
    ) {
        let Some(leases) = &self.leases else {
            return;
        };
        let valid = ranges.iter().copied().filter(|r| leases.is_valid(r));
        let max = self.history.failures_left();
        for (file, part) in leases.shards().by_file(valid, max) {
            let RecordRange { epoch, start, end } = part;
            self.history.fail_on(FailedShard {
                worker,
                epoch,
                file,
                start,
                end,
                error: error.to_owned(),
            });
        }
    }

    pub(crate) fn on_leaving(&mut self, now: Time, worker: WorkerId) {
        let Some(w) = self.workers.connected.get_mut(&worker).filter(|w| !w.leaving && !w.released)
        else {
            return;
        };
        w.leaving = true;
        let (launch, is_member) = (w.launch, w.rank.is_some());
        for launch in self.workers.pod(launch) {
            self.workers.launches.get_mut(&launch).expect("it is of the pod").leaving = true;
        }
        self.out.mark_dirty();
        self.log_event(format!("worker {worker} has received SIGTERM and leaves"));
        if is_member && self.spec.work.trains() {
            self.out.set_timer(now + self.spec.leave_wait(), Timer::Leave(worker));
        } else {
            self.release(now, worker, "it leaves");
        }
        self.release_rest_of_pod(now, launch);
        self.launch_missing(now);
        self.watch_leavers(now);
        self.reconcile(now);
    }

    /// Releases a leaving member that no generation has excluded in time: its grace period is
    /// limited.
    pub(crate) fn on_leave_due(&mut self, now: Time, worker: WorkerId) {
        let waits =
            self.workers.connected.get(&worker).is_some_and(|w| w.rank.is_some() && !w.released);
        if waits && self.phase == Phase::Running {
            self.release(now, worker, "no worker took over its state in time");
        }
    }

    /// Fails a worker that sent an invalid message.
    pub(crate) fn fail_worker(&mut self, now: Time, worker: WorkerId, reason: &str) {
        let Some(w) = self.workers.connected.get(&worker) else {
            return;
        };
        let launch = w.launch;
        if let Some(l) = self.workers.launches.get_mut(&launch) {
            l.accounting = ExitAccounting::Counted;
        }
        self.send(worker, ToWorker::Shutdown(reason.to_owned()));
        self.out.push(Action::Disconnect { worker });
        self.forget_with_pod(now, worker, ZOMBIE_GRACE);
        self.count_failure(now, &format!("worker {worker} is evicted: {reason}"), &[]);
        self.reconcile(now);
    }

    // ---- leases ----

    fn share(&self) -> Share {
        let workers = self.eligible.max(1);
        let records = match self.spec.batch {
            Batch::Global(records) => records.get().div_ceil(workers),
            Batch::PerWorker(records) => records.get(),
        };
        Share { records, workers }
    }

    /// Leases available records to all workers with open requests.
    pub(crate) fn fill_all(&mut self) {
        let share = self.share();
        let asking = |(_, w): &(&WorkerId, &crate::job::workers::table::Worker)| {
            w.is_eligible() && !w.requested_records.is_empty()
        };
        let workers: Vec<WorkerId> =
            self.workers.connected.iter().filter(asking).map(|(&id, _)| id).collect();
        for worker in workers {
            self.fill(worker, share);
        }
    }

    fn fill(&mut self, worker: WorkerId, share: Share) {
        if self.takeover.is_some() {
            return;
        }
        if !self.spec.work.trains() {
            return self.fill_inference(worker);
        }
        let Self { leases: Some(leases), workers, .. } = self else {
            return;
        };
        let Some(w) = workers.connected.get_mut(&worker).filter(|w| w.is_eligible()) else {
            return;
        };
        let mut granted = Vec::new();
        for (&epoch, credit) in &mut w.requested_records {
            if leases.is_open(epoch) {
                for range in leases.lease(worker, epoch, *credit, share) {
                    *credit -= range.len();
                    granted.push(range);
                }
            }
        }
        w.requested_records.retain(|_, credit| *credit > 0);
        if !granted.is_empty() {
            self.send(worker, ToWorker::Lease(granted));
        }
    }
}

/// How long a broken link waits for a loss that explains it.
const BROKEN_WAIT: std::time::Duration = std::time::Duration::from_millis(20);
/// Consecutive generations that break on the same worker before it is evicted.
const SUSPICIONS_MAX: u32 = 3;
/// How long a worker that failed may take to end.
const FAILED_GRACE: std::time::Duration = std::time::Duration::from_secs(2);
/// A worker requests records of the group's epoch and the next one, and of the first epoch before
/// it knows the group's.
const EPOCHS_ASKED_MAX: usize = 8;
