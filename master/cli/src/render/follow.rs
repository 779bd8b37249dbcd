//! What is shown of a job in a cluster while a command follows it.

use std::time::Duration;

use elasticdl_master::job::Time;
use elasticdl_master::progress::Observer as _;
use elasticdl_proto::{LogFormat, Status};
use tokio::time::Instant;

use crate::progress::ProgressPrinter;

/// Prints the changes between statuses.
pub(crate) struct Printer {
    progress: Option<ProgressPrinter>,
    start: Instant,
    events: Vec<String>,
    /// Number of event lines up to the last status.
    events_emitted: u64,
    last: String,
}

impl Printer {
    /// Prints nothing without a format.
    pub(crate) fn new(format: Option<LogFormat>) -> Self {
        Self {
            progress: format.map(|format| ProgressPrinter::on_stderr(format, None)),
            start: Instant::now(),
            events: Vec::new(),
            events_emitted: 0,
            last: String::new(),
        }
    }

    /// Ends the progress bar.
    pub(crate) fn end(self) {
        if let Some(progress) = self.progress {
            progress.end();
        }
    }

    fn now(&self) -> Time {
        Time(self.start.elapsed())
    }

    pub(crate) fn show(&mut self, status: Status) {
        let new = unseen(&self.events, &status.events).to_vec();
        // A status holds only the newest lines, and is written at intervals.
        let missed = status
            .events_emitted
            .saturating_sub(self.events_emitted)
            .saturating_sub(new.len() as u64);
        if missed > 0 {
            self.print(&format!("({missed} lines before this are in the master's log)"));
        }
        let first = status.events.len() - new.len();
        for (index, event) in new.iter().enumerate() {
            let at = status
                .events_at_s
                .get(first + index)
                .copied()
                .filter(|at| at.is_finite() && *at >= 0.0);
            match at.and_then(|at| Duration::try_from_secs_f64(at).ok()) {
                Some(at) => self.print_at(Time(at), event),
                None => self.print(event),
            }
        }
        self.events_emitted = status.events_emitted;
        if let Some(progress) = &self.progress {
            progress.show(self.now(), &status);
        }
        self.events = status.events;
    }

    /// Prints a line, unless it equals the previous one.
    pub(crate) fn print(&mut self, text: &str) {
        self.print_at(self.now(), text);
    }

    /// Like [`Printer::print`], with the time of the event.
    fn print_at(&mut self, time: Time, text: &str) {
        if self.last != text {
            self.last = text.into();
            if let Some(progress) = &self.progress {
                progress.notice(time, text.into());
            }
        }
    }
}

/// Lines of `now` that `before` does not have; both are the newest lines of one event log.
fn unseen<'a>(before: &[String], now: &'a [String]) -> &'a [String] {
    let overlap =
        (0..=before.len().min(now.len())).rev().find(|&len| before.ends_with(&now[..len]));
    &now[overlap.unwrap_or(0)..]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<String> {
        text.split_whitespace().map(Into::into).collect()
    }

    #[test]
    fn each_event_line_is_printed_once() {
        for (before, now, new) in [
            ("", "a b", "a b"),
            ("a b", "a b", ""),
            ("a b", "a b c", "c"),
            ("a b c", "c d", "d"),
            ("a b", "c d", "c d"),
            ("a a", "a a a", "a"),
            ("a b", "", ""),
        ] {
            assert_eq!(unseen(&lines(before), &lines(now)), lines(new), "{before} / {now}");
        }
    }
}
