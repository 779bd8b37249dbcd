//! Progress as lines of a master's log.

use std::cell::Cell;

use elasticdl_master::job::Time;
use elasticdl_master::progress::Observer;
use elasticdl_proto::{LogFormat, Status};
use tracing::info;

use super::line::ProgressLine;

/// Writes a job's progress to this process's log, at most every 5 seconds.
#[derive(Debug)]
pub(crate) struct ProgressLog {
    format: LogFormat,
    /// Time of the newest line.
    last: Cell<Option<Time>>,
}

impl ProgressLog {
    /// Progress of a log in this form.
    pub(crate) fn new(format: LogFormat) -> Self {
        Self { format, last: Cell::default() }
    }
}

impl Observer for ProgressLog {
    /// The log has it.
    fn notice(&self, _: Time, _: String) {}

    fn show(&self, now: Time, status: &Status) {
        let line = ProgressLine::of(status);
        if line.is_due(now, self.last.get()) {
            self.last.set(Some(now));
            match self.format {
                LogFormat::Json => line.log(),
                LogFormat::Text => info!("{}", line.to_text(usize::MAX)),
            }
        }
    }

    fn end(self: Box<Self>) {}
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use elasticdl_proto::{LogLines, LogSource};
    use serde_json::Value;
    use tracing_subscriber::fmt::time::SystemTime;

    use super::*;

    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Log {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn the_log_has_the_progress_every_five_seconds_with_its_numbers() {
        let log = Log::default();
        let to = log.clone();
        let lines = LogLines::new(LogFormat::Json, LogSource::default(), SystemTime);
        let subscriber =
            tracing_subscriber::fmt().with_writer(move || to.clone()).event_format(lines).finish();
        tracing::subscriber::with_default(subscriber, || {
            let progress = ProgressLog::new(LogFormat::Json);
            for second in 1..=11 {
                let loss = Some(0.5).filter(|_| second > 5);
                let status = Status { step: second, records_counted: 8, loss, ..Status::default() };
                progress.notice(Time::default(), "it is in the log already".into());
                progress.show(Time(Duration::from_secs(second)), &status);
            }
        });
        let text = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
        let lines: Vec<Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let numbers =
            |line: &Value| (line["fields"]["step"].as_u64(), line["fields"]["loss"].as_f64());
        let found: Vec<_> = lines.iter().map(numbers).collect();
        assert_eq!(found, [(Some(1), None), (Some(6), Some(0.5)), (Some(11), Some(0.5))]);
        assert!(lines.iter().all(|line| line["message"] == "progress"), "{text}");
    }
}
