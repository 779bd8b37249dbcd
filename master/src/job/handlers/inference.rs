//! Inference jobs: workers evaluate a model, or predict with it, without a group.
//!
//! Each shard belongs to one worker, from its lease to the report that it is done. So there are no
//! generations and no steps; a shard counts as a step. Everything else, from the first launch to
//! the end, is as in training. A shard whose worker is lost is processed again from its beginning;
//! a result that had been written is overwritten with the same content.
//!
//! **Invariant:** a shard counts once: when the worker that holds its lease reports it.

use elasticdl_proto::{RecordRange, WorkerId};

use crate::job::action::{MasterMessage, Outcome};
use crate::job::data::results::Sums;
use crate::job::job::Job;
use crate::job::time::Time;

impl Job {
    /// As [`Job::reconcile`], without a group.
    pub(crate) fn reconcile_inference(&mut self, now: Time) {
        if self.lifecycle.is_stopping() {
            return self.end_stopped();
        }
        let Some(leases) = self.data.leases_mut() else { return };
        let counted = leases.ledger().counted();
        if counted == leases.expected() {
            return self.end(now, Outcome::Completed, None);
        }
        // Leases of lost workers are free at once: no parameters have absorbed them.
        self.group.clear_losses();
        leases.requeue();
        // Every ready worker counts as a member that holds the state.
        if self.workers.employ_ready() > 0 {
            self.reporting.form(now, self.data.step(), counted);
        }
        self.reporting.note_inference_workers(self.workers.members().count() as u32);
        self.count_eligible();
        self.fill_all();
    }

    /// Leases whole shards, up to the number that `worker` has requested.
    pub(crate) fn fill_inference(&mut self, worker: WorkerId) {
        let Self { data, workers, .. } = self;
        let Some(leases) = data.leases_mut() else { return };
        let worker_state = workers.get_mut(worker);
        let Some(w) = worker_state.filter(|w| w.is_eligible() && w.stays()) else { return };
        let requested = w.requested_records_mut();
        let Some(credit) = requested.get_mut(&0) else { return };
        *credit = (*credit).min(SHARDS_AHEAD_MAX);
        let mut granted = Vec::new();
        while *credit > 0
            && let Some(shard) = leases.lease_shard(worker)
        {
            *credit -= 1;
            granted.push(shard);
        }
        if *credit == 0 {
            requested.clear();
        }
        if !granted.is_empty() {
            self.send(worker, MasterMessage::Lease(granted));
        }
    }

    /// Handles a worker's report of a finished shard.
    pub(crate) fn on_shard_done(
        &mut self,
        now: Time,
        worker: WorkerId,
        range: RecordRange,
        sums: Sums,
    ) {
        let Some(leases) = self.data.leases().filter(|_| !self.spec.work.trains()) else {
            return;
        };
        if !leases.is_leased(worker, range) {
            let reason = format!("it has done {range}, which it does not hold");
            return self.fail_worker(now, worker, &reason);
        }
        let expected = leases.expected();
        let loss = sums.get("loss").copied();
        if let Err(reason) = self.data.finish_shard(range, sums) {
            return self.end(now, Outcome::Failed, Some(format!("worker {worker}: {reason}")));
        }
        self.reporting.finish_shard(now, range.len(), loss);
        if self.data.results_mut().is_write_due(now) {
            self.out.mark_dirty();
        }
        if self.data.counted() == expected {
            self.out.mark_dirty_urgent();
            return self.reconcile_inference(now);
        }
        self.fill_inference(worker);
    }
}

/// Shards leased ahead: a worker needs one to process and one to read.
const SHARDS_AHEAD_MAX: u64 = 4;
