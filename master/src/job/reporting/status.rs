//! The status of a job, for progress bars and `elasticdl status`.

use elasticdl_proto::{Generation, Ledger, WorkerId};

use crate::job::data::lease_table::LeaseTable;
use crate::job::event::{Evaluated, LaunchId};
use crate::job::job::{Job, Phase};
use crate::job::lifecycle::shutdown;
use crate::job::reporting::checkpoints::CheckpointsSummary;
use crate::job::reporting::counters::Counters;
use crate::job::reporting::summary::MembershipChange;
use crate::job::spec::Work;
use crate::job::time::Time;
use crate::job::workers::straggler;
use crate::job::workers::table::{Launch, Scheduling, Stage, Worker};

/// The status of a job.
#[derive(Clone, Debug, PartialEq)]
pub struct Status {
    /// The job's name.
    pub job: String,
    /// `starting`, `resuming` (after a master's death), `waiting` (too few workers for a group),
    /// `running`, `stopping`, `ending`, or, once it has ended, `completed`, `failed`, `refused`,
    /// `stopped`.
    pub state: &'static str,
    /// The newest generation; 0 before the first.
    pub generation: Generation,
    /// Steps committed, as last reported.
    pub step: u64,
    /// The first epoch that is not complete; `epochs` when all are.
    pub epoch: u32,
    /// Passes over the data.
    pub epochs: u32,
    /// Committed steps whose gradients were skipped because they were not finite; their records
    /// count as absorbed.
    pub steps_skipped: u64,
    /// Records absorbed over all epochs, as last reported.
    pub records_counted: u64,
    /// Records of all epochs; 0 until the data set is known.
    pub records_expected: u64,
    /// Mean loss per record, smoothed over the last reports.
    pub loss: Option<f64>,
    /// Records committed per second, over the last few seconds.
    pub records_per_s: f64,
    /// Workers to keep.
    pub workers_desired: u32,
    /// Shards of `epoch`; of the last epoch when all are complete. `None` until the data set is
    /// known.
    pub shards: Option<ShardCounts>,
    /// The last 20 changes of membership, oldest first, with what they cost.
    pub memberships: Vec<MembershipChange>,
    /// The workers whose streams are open, by id.
    pub workers: Vec<WorkerStatus>,
    /// Launches that have become no worker yet, by id.
    pub workers_pending: Vec<LaunchStatus>,
    /// How the launches that stay are spread over priority classes, from the lowest place up; empty
    /// where there are none.
    pub priority_tiers: Vec<PriorityTierStatus>,
    /// What gradients are summed over, in words; `None` before the first step.
    pub allreduce_transport: Option<String>,
    /// The newest evaluation.
    pub evaluated: Option<Evaluated>,
    /// Where the job has to do with checkpoints.
    pub checkpoints: Option<CheckpointsSummary>,
    /// What was said last, oldest first; at most 20 lines.
    pub events: Vec<String>,
    /// How many lines have been said; `events` has the last of them.
    pub events_emitted: u64,
    /// How near the job's end is: 0 to 1.
    pub progress: f64,
}

/// An epoch's shards by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ShardCounts {
    /// Shards that are not done and of which no record is leased. After a loss this includes partly
    /// absorbed shards and shards whose lost owner's last step is not accounted for yet.
    pub todo: u32,
    /// Shards of which some record is leased to a connected worker. (A lease may be a part of a
    /// shard.)
    pub leased: u32,
    /// Shards of which all records are absorbed, as last reported.
    pub done: u32,
}

/// The status of a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerStatus {
    /// The worker.
    pub worker: WorkerId,
    /// Process id.
    pub pid: u32,
    /// Its rank in the newest generation; `None` while it is no member.
    pub rank: Option<u32>,
    /// `joining`, `describing`, `preparing`, `fetching`, `ready`, `training`, `leaving`, `finished`
    /// or `ending`.
    pub state: &'static str,
    /// Steps that its state contains, which are the group's; `None` while it does not have the
    /// group's state.
    pub step: Option<u64>,
    /// Microseconds in the model's code in the last reported step.
    pub compute_us: u64,
    /// Whether it is a straggler: the median of its last 7 reported steps is over 1.5 times the
    /// members' median, and over 5 ms more.
    pub straggler: bool,
    /// Leased records that are not committed.
    pub leased_records: u64,
}

/// The status of a launch without a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchStatus {
    /// The launch, whose worker will have its number.
    pub launch: LaunchId,
    /// Its place among the job's workers.
    pub slot: u32,
    /// `requested`, `unschedulable` or `starting`.
    pub state: &'static str,
    /// What it waits for, if something is known.
    pub reason: Option<String>,
}

/// The launches of one priority class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PriorityTierStatus {
    /// The class.
    pub class: String,
    /// Launches of it.
    pub launches: u32,
    /// Of these, those that have become workers.
    pub workers: u32,
}

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
            state: self.state(),
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
            checkpoints: self.checkpoints(),
            events: self.history.events(),
            events_emitted: self.history.events_emitted(),
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
            state,
            step: (worker.rank.is_some() && worker.holds_state).then_some(self.step),
            compute_us: worker.pace.last_us,
            straggler: worker.rank.is_some()
                && worker.pace.usual_us().is_some_and(|us| us > limit_us),
            leased_records: self.leases.as_ref().map_or(0, |r| r.leased_to(id)),
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
            },
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
