//! Requests for records, and the leases that fill them.

use elasticdl_proto::WorkerId;

use crate::job::action::MasterMessage;
use crate::job::data::lease_table::Share;
use crate::job::job::Job;
use crate::job::time::Time;
use crate::job::workers::state::{Stage, Worker};

impl Job {
    pub(crate) fn on_lease_request(
        &mut self,
        now: Time,
        worker: WorkerId,
        epoch: u32,
        records: u64,
    ) {
        let (Some(leases), Some(w)) = (self.data.leases(), self.workers.get_mut(worker)) else {
            return;
        };
        let is_prepared = !matches!(w.stage(), Stage::Joining | Stage::Describing);
        // A worker that has not synchronized with a group yet may request records of an epoch that
        // is complete, or the group may start again: its requests are retained until it has.
        let is_complete =
            w.is_eligible() && self.group.is_formed() && epoch < leases.epoch_stable();
        let is_valid = records > 0 && epoch < self.spec.epochs;
        if !is_prepared || w.is_released() || !is_valid || is_complete {
            return;
        }
        let requested = w.requested_records_mut();
        if requested.len() >= EPOCHS_ASKED_MAX && !requested.contains_key(&epoch) {
            let reason =
                format!("it asks for records of more than {EPOCHS_ASKED_MAX} epochs at once");
            return self.fail_worker(now, worker, &reason);
        }
        let credit = requested.entry(epoch).or_default();
        *credit = credit.saturating_add(records).min(leases.shards().records());
        self.fill(worker, self.data.share(self.spec.batch));
    }

    /// Leases available records to all workers with open requests.
    pub(crate) fn fill_all(&mut self) {
        let share = self.data.share(self.spec.batch);
        let asks = |w: &Worker| w.is_eligible() && !w.requested_records().is_empty();
        for worker in self.workers.select(asks) {
            self.fill(worker, share);
        }
    }

    fn fill(&mut self, worker: WorkerId, share: Share) {
        if self.lifecycle.is_taking_over() {
            return;
        }
        if !self.spec.work.trains() {
            return self.fill_inference(worker);
        }
        let Self { data, workers, .. } = self;
        let Some(leases) = data.leases_mut() else { return };
        let Some(w) = workers.get_mut(worker).filter(|w| w.is_eligible()) else { return };
        let mut granted = Vec::new();
        for (&epoch, credit) in w.requested_records_mut() {
            if leases.is_open(epoch) {
                for range in leases.lease(worker, epoch, *credit, share) {
                    *credit -= range.len();
                    granted.push(range);
                }
            }
        }
        w.requested_records_mut().retain(|_, credit| *credit > 0);
        if !granted.is_empty() {
            self.send(worker, MasterMessage::Lease(granted));
        }
    }

    /// Drops members' requests for records of epochs that stay complete.
    pub(crate) fn drop_stable_requests(&mut self) {
        let Some(stable) = self.data.leases().map(|leases| leases.epoch_stable()) else { return };
        for (_, w) in self.workers.connected_mut().filter(|(_, w)| w.is_member()) {
            w.requested_records_mut().retain(|&epoch, _| epoch >= stable);
        }
    }

    /// Counts the workers to which records may be leased, after one has come or gone.
    pub(crate) fn count_eligible(&mut self) {
        self.data.set_eligible(self.workers.eligible());
    }
}

/// A worker requests records of the group's epoch and the next one, and of the first epoch before
/// it knows the group's.
const EPOCHS_ASKED_MAX: usize = 8;
