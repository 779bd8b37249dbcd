//! Workers that wait for storage which does not answer. They stay members, and no failure is
//! counted; the start and the end of an outage are logged once each.

use std::collections::BTreeMap;
use std::time::Duration;

use elasticdl_proto::WorkerId;

use crate::job::job::Job;
use crate::job::reporting::history::clip;

/// An outage, while there is one.
#[derive(Debug, Default)]
pub(crate) struct StorageWaits {
    /// Time that each waiting worker has waited in this outage.
    waiting: BTreeMap<WorkerId, Duration>,
    /// The longest wait of a worker in this outage.
    longest: Duration,
}

impl Job {
    pub(crate) fn on_storage_wait(
        &mut self,
        worker: WorkerId,
        storage: Option<String>,
        waited: Duration,
    ) {
        self.history.counters.storage_wait += waited;
        let Self { history, workers, .. } = self;
        let waits = &mut history.storage_waits;
        let was_away = !waits.waiting.is_empty();
        // Forgotten workers send no further reports.
        waits.waiting.retain(|id, _| workers.connected.contains_key(id));
        match storage {
            Some(storage) => {
                let so_far = waits.waiting.entry(worker).or_default();
                *so_far += waited;
                waits.longest = waits.longest.max(*so_far);
                if !was_away {
                    waits.longest = waited;
                    self.log_event(format!(
                        "worker {worker} waits for storage: {}",
                        clip(&storage)
                    ));
                }
            }
            None => {
                let so_far = waits.waiting.remove(&worker).unwrap_or_default();
                waits.longest = waits.longest.max(so_far + waited);
                if was_away && waits.waiting.is_empty() {
                    let longest = std::mem::take(&mut waits.longest);
                    let seconds = longest.as_secs_f64();
                    self.log_event(format!(
                        "storage answers again; workers waited for up to {seconds:.1} s"
                    ));
                }
            }
        }
    }
}
