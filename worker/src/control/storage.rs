//! Reports of waits for storage to the master: at their start and end, and periodically in between.

use std::time::{Duration, Instant};

use elasticdl_data::worker::{WaitStatus, wait_status};
use elasticdl_proto::WorkerMessage;

/// State of the reports.
#[derive(Debug, Default)]
pub(super) struct StorageReporter {
    reported: Option<Reported>,
    /// Part of the waited time that was reported to any master.
    waited: Duration,
}

#[derive(Debug)]
struct Reported {
    at: Instant,
}

impl StorageReporter {
    /// The report that is due now.
    pub(super) fn poll(&mut self) -> Option<WorkerMessage> {
        self.next(wait_status(), Instant::now())
    }

    /// A new master knows of no report.
    pub(super) fn forget(&mut self) {
        self.reported = None;
    }

    fn next(&mut self, waiting: WaitStatus, now: Instant) -> Option<WorkerMessage> {
        let is_due = match (&self.reported, &waiting.storage) {
            (None, Some(_)) | (Some(_), None) => true,
            // A wait that started and ended between two polls.
            (None, None) => waiting.waited > self.waited,
            (Some(last), Some(_)) => now.saturating_duration_since(last.at) >= REPORT_INTERVAL,
        };
        if !is_due {
            return None;
        }
        let was_reported = self.reported.is_some();
        let waited = waiting.waited.saturating_sub(self.waited);
        let waited = Duration::from_millis(waited.as_millis() as u64);
        self.waited += waited;
        self.reported = waiting.storage.is_some().then_some(Reported { at: now });
        let is_news = was_reported || waiting.storage.is_some() || !waited.is_zero();
        is_news.then_some(WorkerMessage::StorageWait { storage: waiting.storage, waited })
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
    fn a_wait_is_reported_at_its_start_periodically_and_at_its_end() {
        let (mut reporter, began) = (StorageReporter::default(), Instant::now());
        let mut at = |seconds, waiting| match reporter
            .next(waiting, began + Duration::from_secs(seconds))?
        {
            WorkerMessage::StorageWait { storage, waited } => {
                Some((storage.is_some(), waited.as_millis()))
            }
            other => panic!("{other:?}"),
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
    fn a_new_master_receives_a_report_of_an_ongoing_wait() {
        let (mut reporter, now) = (StorageReporter::default(), Instant::now());
        assert!(reporter.next(waiting(Some("s3://b"), 100), now).is_some());
        reporter.forget();
        let waited = Duration::from_millis(100);
        assert_eq!(
            reporter.next(waiting(Some("s3://b"), 200), now),
            Some(WorkerMessage::StorageWait { storage: Some("s3://b".into()), waited })
        );
    }
}
