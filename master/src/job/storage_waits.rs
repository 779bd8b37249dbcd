//! Workers that wait for storage which does not answer. They stay what they are, and nothing is
//! counted against them; it is said once that they wait, and once that they no longer do.

use std::collections::BTreeMap;
use std::time::Duration;

use elasticdl_proto::WorkerId;

use super::history::clip;
use super::job::Job;

/// An outage, while there is one.
#[derive(Debug, Default)]
pub(super) struct StorageWaits {
    /// How long each worker that waits has done so in this outage.
    waiting: BTreeMap<WorkerId, Duration>,
    /// The longest of the workers that have waited in it.
    longest: Duration,
}

impl Job {
    pub(super) fn on_storage_wait(
        &mut self,
        worker: WorkerId,
        storage: Option<String>,
        waited: Duration,
    ) {
        self.history.counters.storage_wait += waited;
        let Self { history, workers, .. } = self;
        let waits = &mut history.storage_waits;
        let was_away = !waits.waiting.is_empty();
        // Who is gone waits no longer, and says no more.
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
