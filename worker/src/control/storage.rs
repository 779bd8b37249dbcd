//! What the master is told of waits for storage: when they begin and end, and now and then
//! meanwhile.

use std::time::{Duration, Instant};

use elasticdl_proto::v1;

use crate::storage::{self, WaitStatus};

/// What the master knows.
#[derive(Debug, Default)]
pub(super) struct StorageReporter {
    told: Option<Told>,
    /// How much of what was waited the master, or one before it, has heard of.
    waited: Duration,
}

#[derive(Debug)]
struct Told {
    at: Instant,
}

impl StorageReporter {
    /// What there is to be told now.
    pub(super) fn poll(&mut self) -> Option<v1::StorageWait> {
        self.next(storage::wait_status(), Instant::now())
    }

    /// The master is another one, which knows nothing.
    pub(super) fn forget(&mut self) {
        self.told = None;
    }

    fn next(&mut self, waiting: WaitStatus, now: Instant) -> Option<v1::StorageWait> {
        let is_due = match (&self.told, &waiting.storage) {
            (None, Some(_)) | (Some(_), None) => true,
            // A wait that began and ended between two looks.
            (None, None) => waiting.waited > self.waited,
            (Some(told), Some(_)) => now.saturating_duration_since(told.at) >= REPORT_INTERVAL,
        };
        if !is_due {
            return None;
        }
        let was_told = self.told.is_some();
        let waited = waiting.waited.saturating_sub(self.waited);
        let waited_ms = waited.as_millis() as u64;
        self.waited += Duration::from_millis(waited_ms);
        self.told = waiting.storage.is_some().then_some(Told { at: now });
        let is_news = was_told || waiting.storage.is_some() || waited_ms > 0;
        is_news.then_some(v1::StorageWait { storage: waiting.storage, waited_ms })
    }
}

const REPORT_INTERVAL: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;

    fn waiting(storage: Option<&str>, ms: u64) -> WaitStatus {
        WaitStatus { storage: storage.map(str::to_owned), waited: Duration::from_millis(ms) }
    }

    #[test]
    fn a_wait_is_told_when_it_begins_now_and_then_and_when_it_ends() {
        let (mut word, began) = (StorageReporter::default(), Instant::now());
        let mut at = |seconds, waiting| {
            let told = word.next(waiting, began + Duration::from_secs(seconds))?;
            Some((told.storage.is_some(), told.waited_ms))
        };
        assert_eq!(at(0, waiting(None, 0)), None);
        assert_eq!(at(1, waiting(Some("s3://b"), 100)), Some((true, 100)));
        assert_eq!(at(3, waiting(Some("s3://b"), 2100)), None);
        assert_eq!(at(6, waiting(Some("s3://b"), 5100)), Some((true, 5000)));
        assert_eq!(at(8, waiting(None, 6500)), Some((false, 1400)));
        assert_eq!(at(9, waiting(None, 6500)), None);
        assert_eq!(at(10, waiting(None, 6600)), Some((false, 100)));
    }

    #[test]
    fn another_master_is_told_of_a_wait_that_goes_on() {
        let (mut word, now) = (StorageReporter::default(), Instant::now());
        assert!(word.next(waiting(Some("s3://b"), 100), now).is_some());
        word.forget();
        let told = word.next(waiting(Some("s3://b"), 200), now).unwrap();
        assert_eq!((told.storage.as_deref(), told.waited_ms), (Some("s3://b"), 100));
    }
}
