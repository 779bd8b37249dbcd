//! What a job shows of itself: its status and its summary.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use elasticdl_proto::{
    AuditSummary, CheckpointsSummary, DisconnectedStatus, Evaluated, EvaluationsSummary,
    Generation, LaunchStatus, Ledger, PriorityTierStatus, RecordsSummary, Spares, Status, Summary,
    WorkerId, WorkerStatus, WorkersSummary, failed_export,
};

use super::counters::Counters;
use super::lifetimes::WorkerLifetime;
use super::traced::Interval;
use crate::job::action::Outcome;
use crate::job::data::ledger_cache::LedgerCache;
use crate::job::data::shard_leases::ShardLeases;
use crate::job::event::LaunchId;
use crate::job::job::Job;
use crate::job::lifecycle::shutdown;
use crate::job::lifecycle::state::Phase;
use crate::job::spec::{Batch, Work};
use crate::job::text::clip;
use crate::job::time::Time;
use crate::job::workers::scheduling::Scheduling;
use crate::job::workers::state::{Launch, Stage, Worker};
use crate::job::workers::straggler::LastStep;
use crate::job::workers::table::worker_of;

/// Status and counters of a job.
#[derive(Clone, Debug, PartialEq)]
pub struct Snapshot {
    /// Age of the job.
    pub at: Time,
    /// The status.
    pub status: Status,
    /// Counters since this master started.
    pub counters: Counters,
    /// Evaluations since this master started, numbered from 1; the newest 1000.
    pub evaluations: Arc<Vec<(u64, Evaluated)>>,
    /// What has taken time since this master started, the newest, by number.
    pub traced: Arc<VecDeque<Interval>>,
    /// Lifetimes of workers since this master started.
    pub lifetimes: Arc<BTreeMap<WorkerId, WorkerLifetime>>,
}

impl Job {
    // ---- status ----

    /// Status and counters.
    #[must_use]
    pub fn snapshot(&self, now: Time) -> Snapshot {
        Snapshot {
            at: now,
            status: self.status(now),
            counters: self.reporting.counters.clone(),
            evaluations: Arc::clone(&self.reporting.evaluated),
            traced: self.reporting.intervals.newest(),
            lifetimes: self.reporting.lifetimes.share(),
        }
    }

    /// The status of the job.
    #[must_use]
    pub fn status(&self, now: Time) -> Status {
        let ledger = self.data.cache().map(LedgerCache::ledger);
        let status = |(id, w): (WorkerId, &Worker)| self.worker_status(now, id, w);
        let workers = self.workers.connected().map(status).collect();
        let hosts = self.lifecycle.host_checks.measured();
        let limiting_link = self.lifecycle.slow_links.limiting(now, self.group.generation());
        Status {
            job: self.spec.name.clone(),
            run_id: self.run_id.to_string(),
            state: self.state().into(),
            generation: self.group.generation(),
            step: self.data.step(),
            epoch: ledger.map_or(0, Ledger::epoch),
            epochs: self.spec.options.epochs,
            records_counted: ledger.map_or(0, Ledger::counted),
            records_expected: self.data.expected(),
            records_repeated: ledger.map_or(0, Ledger::repeated),
            loss: self.reporting.smoothed.loss,
            metrics: self.reporting.smoothed.metrics.clone(),
            learning_rate: self.reporting.learning_rate,
            tables: self.reporting.tables,
            eta_s: self.eta_s(now),
            records_per_s: self.records_per_s(now),
            stop_reason: self.lifecycle.stop_reason().map(str::to_owned),
            workers_desired: self.lifecycle.wanted(),
            workers_min: self.spec.min_workers,
            workers_max: self.spec.max_workers,
            spares: self.spares(now),
            autoscale: self.lifecycle.autoscale_finding().map(str::to_owned),
            shards: self.data.shards().map(ShardLeases::counts),
            memberships: self.reporting.changes.shown(),
            workers,
            workers_disconnected: self.workers_disconnected(now),
            workers_pending: self.workers_pending(),
            hosts: hosts.map(|(host, report)| (host.clone(), report.clone())).collect(),
            hosts_avoided: self.hosts_avoided(now),
            priority_tiers: self.priority_tiers(),
            allreduce_transport: self.reporting.allreduce_transport.clone(),
            limiting_link: limiting_link.cloned(),
            audit: self.audit_summary(),
            steps_skipped: self.reporting.totals.steps_skipped,
            evaluated: self.evaluated(),
            evaluated_best: self.reporting.evaluations.best.clone(),
            checkpoints: self.checkpoints().filter(|known| known.dir.is_some()),
            events_at_s: Vec::new(),
            events: self.reporting.events(),
            events_emitted: self.reporting.events_emitted(),
            progress: self.progress(),
        }
    }

    /// How long a worker with an open stream has been silent.
    pub(crate) fn silence(&self, now: Time, worker: WorkerId) -> Option<Duration> {
        self.workers.get(worker).map(|known| now.since(known.heard()))
    }

    pub(crate) fn state(&self) -> &'static str {
        match self.lifecycle.phase() {
            Phase::Ended(outcome) => shutdown::name(outcome),
            Phase::Ending(_) => "ending",
            Phase::Running if self.is_suspending() => "suspending",
            Phase::Running if self.lifecycle.is_suspended() => "suspended",
            Phase::Running if self.lifecycle.is_taking_over() => "resuming",
            Phase::Running if !self.spec.options.work.trains() && self.workers.has_members() => {
                "running"
            }
            Phase::Running if !self.workers.has_members() && self.is_queued() => "queued",
            Phase::Running if self.group.generation() == Generation::default() => "starting",
            Phase::Running if self.group.is_broken() => "waiting",
            Phase::Running => "running",
            Phase::Stopping => "stopping",
        }
    }

    /// Whether a worker of the core waits in a queue.
    fn is_queued(&self) -> bool {
        let is_queued = |l: &Launch| {
            l.scheduling() == Scheduling::Queued
                && l.slot() < self.spec.min_workers
                && !l.has_registered()
        };
        self.workers.launches().any(|(_, l)| l.stays() && is_queued(l))
    }

    fn worker_status(&self, now: Time, id: WorkerId, worker: &Worker) -> WorkerStatus {
        let state = match worker.stage() {
            _ if worker.is_released() => "ending",
            _ if self.is_silent(now, worker) => "disconnected",
            _ if worker.is_leaving() => "leaving",
            _ if self.group.has_finished(id) => "finished",
            Stage::Joining => "joining",
            Stage::Describing => "describing",
            Stage::Preparing => "preparing",
            Stage::Fetching => "fetching",
            Stage::Ready if worker.lags(now) => "lagging",
            Stage::Ready if self.spec.spares > 0 => "spare",
            Stage::Ready => "ready",
            Stage::Member { .. } => match self.spec.options.work {
                Work::Evaluate { .. } => "evaluating",
                Work::Predict { .. } => "predicting",
                Work::Train { .. } if self.serves_tables(id) => "serving",
                Work::Train { .. } => "training",
            },
        };
        let is_member = worker.is_member();
        let last = worker.pace().last().filter(|_| is_member);
        WorkerStatus {
            worker: id,
            pid: worker.pid,
            rank: worker.rank(),
            state: state.into(),
            pod: None,
            node: None,
            step: match is_member {
                true => worker.holds_state().then_some(self.data.step()),
                false => worker.followed_step().filter(|_| worker.has_state()),
            },
            compute_us: last.map_or(0, |last| last.rank.compute_us),
            share: last.map(LastStep::share),
            input_us: last.map_or(0, |last| last.rank.input_us),
            limited_by: last.map(|last| self.limit_of(last).into()),
            straggler: is_member && worker.pace().is_straggler(now),
            cpu: worker.usage.map(|usage| f64::from(usage.cpu_millicores) / 1e3),
            memory_bytes: worker.usage.map(|usage| usage.memory_bytes),
            serves_tables: self.serves_tables(id),
            table_bytes: last.map(|last| last.rank.table_bytes).filter(|&bytes| bytes > 0),
            leased_records: self.data.shards().map(|shards| shards.records_leased_to(id)),
        }
    }

    /// The spares, if the job keeps any.
    fn spares(&self, now: Time) -> Option<Spares> {
        let caught_up = self.ready_spares(now).len();
        (self.spec.spares > 0).then_some(Spares {
            desired: self.spec.spares,
            caught_up: u32::try_from(caught_up).expect("workers are limited"),
            promoted: self.reporting.totals.spares_promoted,
        })
    }

    /// What most of the step's time went to. In shared memory nothing is transferred, so the rest
    /// of the time is the wait for others.
    fn limit_of(&self, last: &LastStep) -> &'static str {
        match last.limited_by() {
            "network" if self.reporting.allreduce_transport.as_deref() == Some("shared memory") => {
                "others"
            }
            limit => limit,
        }
    }

    /// Whether a connected worker has sent no message for longer than the worker timeout.
    fn is_silent(&self, now: Time, worker: &Worker) -> bool {
        let heartbeat = self.spec.options.heartbeat().unwrap_or_default();
        let timeout = self.spec.options.worker_timeout.map(|timeout| timeout + heartbeat);
        timeout.is_some_and(|timeout| now.since(worker.heard()) > timeout)
    }

    fn workers_disconnected(&self, now: Time) -> Vec<DisconnectedStatus> {
        let status = |launch, rank, since: Time| DisconnectedStatus {
            worker: worker_of(launch),
            rank,
            disconnected_s: now.since(since).as_secs_f64(),
        };
        let of_launch = |(launch, l): (LaunchId, &Launch)| match (l.worker(), l.disconnected()) {
            (Some(w), _) if self.is_silent(now, w) && !w.is_released() => {
                Some(status(launch, w.rank(), w.heard()))
            }
            // A launch that this master has found may never have connected.
            (None, Some(d)) if l.has_registered() || d.rank.is_some() => {
                Some(status(launch, d.rank, d.since))
            }
            _ => None,
        };
        self.workers.launches().filter_map(of_launch).collect()
    }

    fn workers_pending(&self) -> Vec<LaunchStatus> {
        let is_pending = |l: &Launch| !l.has_registered() && l.disconnected().is_none();
        let status = |(launch, l): (LaunchId, &Launch)| LaunchStatus {
            launch,
            slot: l.slot(),
            state: match l.scheduling() {
                Scheduling::Pending => "requested",
                Scheduling::Queued => "queued",
                Scheduling::Scheduled => "starting",
                Scheduling::Unschedulable => "unschedulable",
            }
            .into(),
            reason: l.waits_for().map(str::to_owned),
        };
        self.workers.launches().filter(|(_, l)| is_pending(l)).map(status).collect()
    }

    fn priority_tiers(&self) -> Vec<PriorityTierStatus> {
        let launches = self.workers.launches().map(|(_, l)| l);
        let mut staying: Vec<&Launch> = launches.filter(|l| l.stays()).collect();
        staying.sort_by_key(|l| l.slot());
        let mut tiers: Vec<PriorityTierStatus> = Vec::new();
        for l in staying {
            let Some(class) = l.class() else { continue };
            let at = tiers.iter().position(|tier| tier.class == class).unwrap_or_else(|| {
                tiers.push(PriorityTierStatus { class: class.into(), launches: 0, workers: 0 });
                tiers.len() - 1
            });
            tiers[at].launches += 1;
            tiers[at].workers += u32::from(l.worker().is_some());
        }
        tiers
    }

    fn progress(&self) -> f64 {
        if self.lifecycle.phase() == Phase::Ended(Outcome::Completed) {
            return 1.0;
        }
        let part = |done: u64, all: u64| if all == 0 { 0.0 } else { done as f64 / all as f64 };
        let records = part(self.data.counted(), self.data.expected());
        let steps = self.spec.options.max_steps.map_or(0.0, |max| part(self.data.step(), max));
        records.max(steps).min(1.0)
    }

    /// Records committed per second; 0 in a suspended job, whose last ones say nothing.
    fn records_per_s(&self, now: Time) -> f64 {
        match self.is_suspended() && !self.is_suspending() {
            true => 0.0,
            false => self.reporting.speed.records_per_s(now),
        }
    }

    /// Seconds until the end of the data, of `--max-steps`, or of `--deadline`, at the present
    /// speed. `None` while workers wait for storage, and until the next report.
    fn eta_s(&self, now: Time) -> Option<f64> {
        let rate = self.reporting.speed.records_per_s(now);
        let waits = self.reporting.waits_for_storage() || self.reporting.speed.has_waited();
        if self.state() != "running" || waits || rate <= 0.0 {
            return None;
        }
        let (counted, step) = (self.data.counted(), self.data.step());
        let records = self.data.expected().saturating_sub(counted) as f64;
        let of_steps = self.spec.options.max_steps.filter(|_| step > 0).map(|max| {
            let records_per_step = counted as f64 / step as f64;
            max.saturating_sub(step) as f64 * records_per_step
        });
        let left = of_steps.map_or(records, |most| most.min(records)) / rate;
        let deadline = self.spec.policies.deadline;
        let deadline = deadline.map(|deadline| deadline.saturating_sub(now.0).as_secs_f64());
        Some(deadline.map_or(left, |deadline| left.min(deadline)))
    }

    // ---- summary ----

    /// The summary of the job so far.
    #[must_use]
    pub fn summary(&self, now: Time) -> Summary {
        let records = self.records_summary();
        let last = if self.spec.options.work.trains() {
            u32::try_from(self.group.members().len()).expect("members are limited by max_workers")
        } else {
            self.reporting.inference_workers()
        };
        Summary {
            job: self.spec.name.clone(),
            run_id: self.run_id.to_string(),
            state: self.state().into(),
            steps: self.data.step(),
            epochs: self.data.cache().map_or(0, |cache| cache.ledger().epoch()),
            wall_s: (now.0 + self.reporting.away).as_secs_f64(),
            records,
            workers: WorkersSummary {
                peak: self.reporting.totals.peak,
                last,
                table_servers: self.spec.options.table_servers,
                restarts: self.reporting.totals.restarts,
                spares: self.spares(now),
            },
            memberships: self.reporting.changes.all().cloned().collect(),
            loss: self.reporting.loss(),
            training_metrics: self.reporting.smoothed.metrics.clone(),
            throughput: self.reporting.throughput(records.counted, self.data.step()),
            allreduce_transport: self.reporting.allreduce_transport.clone(),
            evaluations: self.evaluations(),
            checkpoints: self.checkpoints(),
            failed_shards: self.reporting.failed_shards(),
            records_skipped: self.reporting.totals.records_skipped.clone(),
            steps_skipped: self.reporting.totals.steps_skipped,
            audit: self.audit_summary(),
            row_touches: self.reporting.final_report().and_then(|f| f.row_touches).map(Into::into),
            rows_lost: self.reporting.rows_lost(),
            state_lost: self.reporting.totals.state_lost,
            error: self.reporting.error().map(str::to_owned),
            stop_reason: self.lifecycle.stop_reason().map(str::to_owned),
            model_summary: self.model_summary(),
            metrics: self.data.results().means(records.expected),
            output: match &self.spec.options.work {
                Work::Predict { output, .. } => Some(output.clone()),
                Work::Evaluate { .. } | Work::Train { .. } => None,
            },
            export: self.exported(),
            tracking_error: self.reporting.tracking_error.clone(),
            digest: self.reporting.final_report().map(|word| format!("{:016x}", word.digest)),
        }
    }

    fn audit_summary(&self) -> Option<AuditSummary> {
        (self.spec.options.audit > 0).then_some(self.reporting.totals.audit)
    }

    /// Based on the group's reports alone.
    fn records_summary(&self) -> RecordsSummary {
        let Some(cache) = self.data.cache() else {
            return RecordsSummary::default();
        };
        let (whole, counted) = (cache.expected(), cache.ledger().counted());
        let word = self.reporting.final_report();
        let reaches = |max: u64| word.is_some_and(|word| word.step >= max);
        // What the options asked for, and what of it the group came to.
        let (expected, trained) = match word {
            _ if counted == whole => (whole, whole),
            Some(word)
                if word.stopped_early || self.spec.options.max_steps.is_some_and(reaches) =>
            {
                (word.records_trained, word.records_trained)
            }
            // Also if its model could not be exported.
            _ if self.lifecycle.outcome() == Some(Outcome::Stopped)
                || self.lifecycle.was_stopping =>
            {
                let trained = word.map_or(counted, |word| word.records_trained);
                (self.records_asked_for(cache).max(trained), trained)
            }
            _ => (whole, whole),
        };
        RecordsSummary {
            expected,
            counted,
            missing: trained.saturating_sub(counted),
            not_trained: expected - trained,
            repeated: cache.ledger().repeated(),
        }
    }

    /// Records of all epochs, or of `--max-steps`.
    fn records_asked_for(&self, cache: &LedgerCache) -> u64 {
        let whole = cache.expected();
        let Some(max) = self.spec.options.max_steps else { return whole };
        let of_steps = match self.spec.options.batch {
            // The last step of an epoch may have fewer records.
            Batch::Global(batch) => {
                let per_epoch = cache.ledger().records_per_epoch();
                let steps = per_epoch.div_ceil(batch.get()).max(1);
                let rest = (max % steps).saturating_mul(batch.get());
                (max / steps).saturating_mul(per_epoch).saturating_add(rest)
            }
            // As many per step as so far.
            Batch::PerWorker(_) => {
                let steps = u128::from(self.data.step().max(1));
                let records = u128::from(max) * u128::from(cache.ledger().counted()) / steps;
                u64::try_from(records).unwrap_or(u64::MAX)
            }
        };
        whole.min(of_steps)
    }

    /// Where the last model is. The lowest rank exports before it sends its final report.
    pub(crate) fn exported(&self) -> Option<String> {
        let Work::Train { export: Some(export) } = &self.spec.options.work else { return None };
        match self.reporting.final_report() {
            Some(report) if report.exported && report.failure.is_none() => Some(export.clone()),
            Some(report) if report.exported => Some(failed_export(export)),
            Some(_) => None,
            None => self.reporting.is_exported_by_failed().then(|| failed_export(export)),
        }
    }

    /// The summary text of the lowest rank's model.
    fn model_summary(&self) -> Option<String> {
        let summary = self.reporting.final_report()?.summary.as_deref();
        summary.map(|text| clip(text).to_owned())
    }

    /// The checkpoints, if the job writes or restores any.
    pub(crate) fn checkpoints(&self) -> Option<CheckpointsSummary> {
        let dir = self.spec.options.checkpoints.as_ref().map(|spec| spec.dir.clone());
        let known = dir.is_some() || self.spec.options.resume_from.is_some();
        known.then(|| CheckpointsSummary { dir, ..self.reporting.totals.checkpoints.clone() })
    }

    /// The newest evaluation, or the result of an evaluate job.
    pub(crate) fn evaluated(&self) -> Option<Evaluated> {
        match self.spec.options.work {
            Work::Evaluate { .. } => {
                let (step, records) = (self.data.step(), self.data.expected());
                let metrics = self.data.results().means(records)?;
                Some(Evaluated { step, records, metrics })
            }
            Work::Predict { .. } | Work::Train { .. } => {
                self.reporting.evaluations.all.last().cloned()
            }
        }
    }

    /// The evaluations, if there is validation data.
    pub(crate) fn evaluations(&self) -> Option<EvaluationsSummary> {
        self.spec.options.validation.as_ref()?;
        let mut known = self.reporting.evaluations.clone();
        known.stopped_early = self.reporting.final_report().is_some_and(|word| word.stopped_early);
        Some(known)
    }
}
