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
use crate::job::workers::state::{Stage, Worker};

impl Job {
    /// As [`Job::reconcile`], without a group.
    pub(crate) fn reconcile_inference(&mut self, now: Time) {
        if self.lifecycle.is_stopping() {
            return self.end_stopped();
        }
        if self.data.files().is_none() {
            return;
        }
        let counted = self.data.counted();
        if counted == self.data.expected() {
            return self.end(now, Outcome::Completed, None);
        }
        self.group.clear_losses();
        // Every ready worker counts as a member that holds the state.
        if self.workers.employ_ready() > 0 {
            self.reporting.form(now, self.data.step(), (counted, self.data.step()));
        }
        self.reporting.note_inference_workers(self.workers.members().count() as u32);
        let asks = |w: &Worker| w.is_member() && w.requested_shards() > 0;
        for worker in self.workers.select(asks) {
            self.lease_shards(worker);
        }
    }

    /// Handles a worker's request for more shards. A group that trains needs no leases.
    pub(crate) fn on_lease_request(&mut self, worker: WorkerId, shards: u64) {
        let is_inference = !self.spec.options.work.trains();
        let Some(w) = self.workers.get_mut(worker).filter(|_| is_inference) else { return };
        if matches!(w.stage(), Stage::Joining | Stage::Describing) || w.is_released() {
            return;
        }
        w.set_requested_shards(w.requested_shards().saturating_add(shards).min(SHARDS_AHEAD_MAX));
        self.lease_shards(worker);
    }

    /// Leases shards to `worker`, up to the number that it has requested.
    fn lease_shards(&mut self, worker: WorkerId) {
        let Self { data, workers, .. } = self;
        let Some(shards) = data.shards_mut() else { return };
        let worker_state = workers.get_mut(worker);
        let Some(w) = worker_state.filter(|w| w.is_member() && w.stays()) else { return };
        let mut granted = Vec::new();
        while w.requested_shards() > 0
            && let Some(shard) = shards.lease(worker)
        {
            w.set_requested_shards(w.requested_shards() - 1);
            granted.push(shard);
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
        if self.data.shards().is_none() {
            return;
        }
        let loss = sums.get("loss").copied();
        match self.data.finish_shard(worker, range, sums) {
            Ok(true) => {}
            Ok(false) => {
                let reason = format!("it has done {range}, which it does not hold");
                return self.fail_worker(now, worker, &reason);
            }
            Err(reason) => {
                let error = format!("worker {worker}: {reason}");
                return self.end(now, Outcome::Failed, Some(error));
            }
        }
        self.reporting.finish_shard(now, range.len(), loss);
        if self.data.results_mut().is_write_due(now) {
            self.out.mark_dirty();
        }
        if self.data.counted() == self.data.expected() {
            self.out.mark_dirty_urgent();
            if let Some(result) = self.evaluated() {
                self.reporting.note_evaluated(result);
            }
            return self.reconcile_inference(now);
        }
        self.lease_shards(worker);
    }
}

/// Shards leased ahead: a worker needs one to process and one to read.
const SHARDS_AHEAD_MAX: u64 = 4;
