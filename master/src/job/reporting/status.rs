//! The status of a job, for progress bars and `elasticdl status`.

use elasticdl_proto::{Generation, Ledger, WorkerId};
pub use elasticdl_proto::{LaunchStatus, PriorityTierStatus, ShardCounts, Status, WorkerStatus};

use crate::job::data::lease_table::LeaseTable;
use crate::job::event::LaunchId;
use crate::job::job::{Job, Phase};
use crate::job::lifecycle::shutdown;
use crate::job::reporting::counters::Counters;
use crate::job::spec::Work;
use crate::job::time::Time;
use crate::job::workers::straggler;
use crate::job::workers::table::{Launch, Scheduling, Stage, Worker};

/// Status and counters of a job.
#[derive(Clone, Debug, PartialEq)]
pub struct Snapshot {
    /// The status.
    pub status: Status,
    /// Counters since this master started.
    pub counters: Counters,
}

impl Job {
    /// Status and counters.
    #[must_use]
    pub fn snapshot(&self, now: Time) -> Snapshot {
        Snapshot { status: self.status(now), counters: self.history.counters.clone() }
    }

    /// The status of the job.
    #[must_use]
    pub fn status(&self, now: Time) -> Status {
        let ledger = self.leases.as_ref().map(LeaseTable::ledger);
        let usual = self.workers.members().filter_map(|(_, w)| w.pace.usual_us()).collect();
        let limit_us = straggler::straggler_limit_us(usual).unwrap_or(u64::MAX);
        let workers = self
            .workers
            .connected
            .iter()
            .map(|(&id, w)| self.worker_status(id, w, limit_us))
            .collect();
        Status {
            job: self.spec.name.clone(),
            state: self.state().into(),
            generation: self.group.generation,
            step: self.step,
            epoch: ledger.map_or(0, Ledger::epoch),
            epochs: self.spec.epochs,
            records_counted: ledger.map_or(0, Ledger::counted),
            records_expected: self.leases.as_ref().map_or(0, LeaseTable::expected),
            loss: self.history.loss_smoothed(),
            records_per_s: self.history.records_per_s(now),
            workers_desired: self.wanted,
            shards: self.leases.as_ref().map(LeaseTable::shard_counts),
            memberships: self.history.memberships_last(),
            workers,
            workers_pending: self.workers_pending(),
            priority_tiers: self.priority_tiers(),
            allreduce_transport: self.history.allreduce_transport.clone(),
            steps_skipped: self.history.totals.steps_skipped,
            evaluated: self.history.evaluations.all.last().cloned(),
            checkpoints: self.checkpoints().filter(|known| known.dir.is_some()),
            events: self.history.events(),
            events_emitted: self.history.events_emitted(),
            events_at_s: Vec::new(),
            progress: self.progress(),
        }
    }

    pub(crate) fn state(&self) -> &'static str {
        match self.phase {
            Phase::Ended(outcome) => shutdown::name(outcome),
            Phase::Ending(_) => "ending",
            Phase::Running if self.takeover.is_some() => "resuming",
            Phase::Running
                if !self.spec.work.trains() && self.workers.members().next().is_some() =>
            {
                "running"
            }
            Phase::Running if self.group.generation == Generation::default() => "starting",
            Phase::Running if self.group.is_broken() => "waiting",
            Phase::Running => "running",
            Phase::Stopping => "stopping",
        }
    }

    fn worker_status(&self, id: WorkerId, worker: &Worker, limit_us: u64) -> WorkerStatus {
        let state = match worker.stage {
            _ if worker.released => "ending",
            _ if worker.leaving => "leaving",
            _ if self.group.finished.contains_key(&id) => "finished",
            _ if worker.rank.is_some() => match self.spec.work {
                Work::Evaluate { .. } => "evaluating",
                Work::Predict { .. } => "predicting",
                Work::Train { .. } => "training",
            },
            Stage::Joining => "joining",
            Stage::Describing => "describing",
            Stage::Preparing => "preparing",
            Stage::Fetching => "fetching",
            Stage::Ready => "ready",
        };
        WorkerStatus {
            worker: id,
            pid: worker.pid,
            rank: worker.rank,
            state: state.into(),
            step: (worker.rank.is_some() && worker.holds_state).then_some(self.step),
            compute_us: worker.pace.last_us,
            straggler: worker.rank.is_some()
                && worker.pace.usual_us().is_some_and(|us| us > limit_us),
            leased_records: self.leases.as_ref().map_or(0, |r| r.leased_to(id)),
            pod: None,
            node: None,
        }
    }

    fn workers_pending(&self) -> Vec<LaunchStatus> {
        let wordless = self
            .workers
            .launches
            .iter()
            .filter(|(_, l)| l.worker.is_none() && l.disconnected.is_none());
        let status = |(&launch, l): (&LaunchId, &Launch)| LaunchStatus {
            launch,
            slot: l.slot,
            state: match l.scheduling {
                Scheduling::Pending => "requested",
                Scheduling::Scheduled => "starting",
                Scheduling::Unschedulable => "unschedulable",
            }
            .into(),
            reason: l.waits_for.clone(),
        };
        wordless.map(status).collect()
    }

    fn priority_tiers(&self) -> Vec<PriorityTierStatus> {
        let mut staying: Vec<&Launch> =
            self.workers.launches.values().filter(|l| l.stays()).collect();
        staying.sort_by_key(|l| l.slot);
        let mut tiers: Vec<PriorityTierStatus> = Vec::new();
        for l in staying {
            let Some(class) = &l.class else { continue };
            let has_worker = l.worker.is_some_and(|id| self.workers.connected.contains_key(&id));
            let at = tiers.iter().position(|tier| tier.class == *class).unwrap_or_else(|| {
                tiers.push(PriorityTierStatus { class: class.clone(), launches: 0, workers: 0 });
                tiers.len() - 1
            });
            tiers[at].launches += 1;
            tiers[at].workers += u32::from(has_worker);
        }
        tiers
    }

    fn progress(&self) -> f64 {
        if self.phase == Phase::Ended(crate::job::Outcome::Completed) {
            return 1.0;
        }
        let part = |done: u64, all: u64| if all == 0 { 0.0 } else { done as f64 / all as f64 };
        let records =
            self.leases.as_ref().map_or(0.0, |r| part(r.ledger().counted(), r.expected()));
        let steps = self.spec.max_steps.map_or(0.0, |max| part(self.step, max));
        records.max(steps).min(1.0)
    }
}
