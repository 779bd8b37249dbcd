//! Workers that wait for storage which does not answer. They stay members, and no failure is
//! counted; the start and the end of an outage are logged once each.

use std::collections::BTreeMap;
use std::time::Duration;

use elasticdl_proto::WorkerId;

/// An outage, while there is one.
#[derive(Debug, Default)]
pub(crate) struct StorageWaits {
    /// Time that each waiting worker has waited in this outage.
    pub(super) waiting: BTreeMap<WorkerId, Duration>,
    /// The longest wait of a worker in this outage.
    pub(super) longest: Duration,
    /// What the first of them waits for, and why.
    pub(super) storage: String,
}
