//! Progress of a running job on standard error.
//!
//! A terminal shows a progress bar with notices above it. Any other output receives the notices and
//! a line of progress every few seconds.
//!
//! **Invariant:** the job never waits for the terminal. A separate thread prints; messages that it
//! can't print in time are dropped. Notices are also in the master's log.

use std::io::{IsTerminal as _, Write as _, stderr};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tokio::sync::watch;

use crate::job::{Snapshot, Status, Time};

/// Shows a job's progress until [`Progress::end`] or until the value is dropped.
#[derive(Debug)]
pub struct Progress {
    printer: Option<(SyncSender<PrinterMessage>, JoinHandle<()>)>,
    publisher: Option<watch::Sender<Option<Snapshot>>>,
}

impl Progress {
    /// A `Progress` without output.
    #[must_use]
    pub fn quiet() -> Self {
        Self { printer: None, publisher: None }
    }

    /// Prints to standard error: a bar, drawn at once, if it is a terminal, plain lines otherwise.
    #[must_use]
    pub fn on_stderr() -> Self {
        let (lines, received) = sync_channel(LINES_MAX);
        let printer = if stderr().is_terminal() {
            Printer::Bar(new_bar())
        } else {
            Printer::Plain { last: None }
        };
        let thread = std::thread::spawn(move || print(&received, printer));
        Self { printer: Some((lines, thread)), publisher: None }
    }

    /// Also publishes each snapshot to `publisher`.
    #[must_use]
    pub fn publishing(self, publisher: watch::Sender<Option<Snapshot>>) -> Self {
        Self { publisher: Some(publisher), ..self }
    }

    /// Shows the state of the job at `now`.
    pub fn show(&self, now: Time, snapshot: Snapshot) {
        if self.printer.is_some() {
            self.show_line(now, ProgressLine::of(&snapshot.status));
        }
        if let Some(publisher) = &self.publisher {
            publisher.send_replace(Some(snapshot));
        }
    }

    pub(crate) fn show_line(&self, now: Time, line: ProgressLine) {
        self.send(PrinterMessage::Progress(now, line));
    }

    /// Shows a notice.
    pub fn notice(&self, now: Time, text: String) {
        self.send(PrinterMessage::Notice(now, text));
    }

    /// Prints the remaining notices and clears the bar.
    pub fn end(self) {
        if let Some((lines, thread)) = self.printer {
            drop(lines);
            thread.join().expect("the printing thread doesn't panic");
        }
    }

    fn send(&self, message: PrinterMessage) {
        if let Some((lines, _)) = &self.printer {
            let _ = lines.try_send(message);
        }
    }
}

/// One line that describes the state of a job.
#[derive(Debug)]
pub(crate) struct ProgressLine {
    /// Completed part of the job, 0 to 1.
    pub(crate) progress: f64,
    pub(crate) step: u64,
    pub(crate) text: String,
}

impl ProgressLine {
    fn of(status: &Status) -> Self {
        Self { progress: status.progress, step: status.step, text: describe(status) }
    }
}

enum PrinterMessage {
    Notice(Time, String),
    Progress(Time, ProgressLine),
}

enum Printer {
    Bar(ProgressBar),
    Plain { last: Option<Time> },
}

fn print(lines: &Receiver<PrinterMessage>, mut printer: Printer) {
    while let Ok(line) = lines.recv() {
        match (line, &mut printer) {
            (PrinterMessage::Notice(now, text), Printer::Bar(bar)) => {
                bar.println(format_notice(now, &text))
            }
            (PrinterMessage::Notice(now, text), Printer::Plain { .. }) => {
                write_line(&format_notice(now, &text))
            }
            (PrinterMessage::Progress(_, line), Printer::Bar(bar)) => {
                bar.set_position((line.progress.clamp(0.0, 1.0) * BAR_PARTS as f64) as u64);
                bar.set_message(line.text);
            }
            (PrinterMessage::Progress(now, line), Printer::Plain { last }) => {
                // Before the first step a line of progress would contain no information.
                let due = match last {
                    Some(last) => now.since(*last) >= PLAIN_INTERVAL,
                    None => line.step > 0 || now.0 >= PLAIN_INTERVAL,
                };
                if due {
                    let percent = line.progress * 100.0;
                    write_line(&format_notice(now, &format!("{percent:.1} %  {}", line.text)));
                    *last = Some(now);
                }
            }
        }
    }
    if let Printer::Bar(bar) = printer {
        bar.finish_and_clear();
    }
}

fn new_bar() -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:24.cyan/dim} {percent:>3} %  {wide_msg}")
        .expect("the template is valid");
    let bar = ProgressBar::with_draw_target(Some(BAR_PARTS), ProgressDrawTarget::stderr())
        .with_style(style.progress_chars("━╸─"))
        .with_message("starting");
    bar.tick();
    bar
}

fn format_notice(now: Time, text: &str) -> String {
    format!("{:>9.3} s  {}", now.0.as_secs_f64(), one_line(text))
}

/// `text` as one line without control characters. Texts also come from workers, and no escape
/// sequence of theirs may reach the terminal.
pub(crate) fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

fn describe(status: &Status) -> String {
    if status.records_expected == 0 || status.generation.0 == 0 {
        return status.state.clone().into_owned();
    }
    let members = status.workers.iter().filter(|worker| worker.rank.is_some()).count();
    let loss = status.loss.map(|loss| format!(" · loss {loss:.4}")).unwrap_or_default();
    let epoch = (status.epoch + 1).min(status.epochs);
    format!(
        "{} · epoch {epoch}/{} · step {}{loss} · {} records/s · {members} {} · generation {}",
        status.state,
        status.epochs,
        status.step,
        format_rate(status.records_per_s),
        if members == 1 { "worker" } else { "workers" },
        status.generation,
    )
}

/// Formats a rate with three or four digits.
pub(crate) fn format_rate(rate: f64) -> String {
    match rate {
        r if r >= 1e9 => format!("{:.2} G", r / 1e9),
        r if r >= 1e6 => format!("{:.2} M", r / 1e6),
        r if r >= 1e4 => format!("{:.1} k", r / 1e3),
        r if r >= 100.0 => format!("{r:.0}"),
        r => format!("{r:.1}"),
    }
}

fn write_line(line: &str) {
    // Standard error may be closed; the job continues.
    let _ = writeln!(stderr(), "{line}");
}

const BAR_PARTS: u64 = 1000;
const LINES_MAX: usize = 256;
const PLAIN_INTERVAL: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use elasticdl_proto::{Generation, WorkerId};

    use super::*;
    use crate::job::WorkerStatus;

    fn running() -> Status {
        let worker = |id, rank| WorkerStatus {
            worker: WorkerId(id),
            pid: 1,
            rank,
            state: "training".into(),
            pod: None,
            node: None,
            step: None,
            compute_us: 0,
            straggler: false,
            leased_records: 0,
        };
        Status {
            job: "j".into(),
            run_id: String::new(),
            state: "running".into(),
            events_at_s: Vec::new(),
            generation: Generation(3),
            step: 120,
            steps_skipped: 0,
            epoch: 1,
            epochs: 2,
            records_counted: 10,
            records_expected: 20,
            loss: Some(0.53),
            records_per_s: 12_345.0,
            workers_desired: 2,
            workers_pending: Vec::new(),
            priority_tiers: Vec::new(),
            checkpoints: None,
            allreduce_transport: None,
            evaluated: None,
            workers: vec![worker(1, Some(0)), worker(2, Some(1)), worker(3, None)],
            shards: None,
            memberships: Vec::new(),
            events: Vec::new(),
            events_emitted: 0,
            progress: 0.5,
        }
    }

    #[test]
    fn a_running_job_is_described_in_one_line() {
        let line = "running · epoch 2/2 · step 120 · loss 0.5300 · 12.3 k records/s · 2 workers · \
            generation 3";
        assert_eq!(describe(&running()), line);
        let over =
            Status { epoch: 2, loss: None, workers: Vec::new(), records_per_s: 3.0, ..running() };
        let line = "running · epoch 2/2 · step 120 · 3.0 records/s · 0 workers · generation 3";
        assert_eq!(describe(&over), line);
        assert_eq!(
            describe(&Status { generation: Generation(0), state: "starting".into(), ..running() }),
            "starting"
        );
    }

    #[test]
    fn a_workers_text_cannot_control_the_terminal() {
        let shown = format_notice(Time(Duration::from_millis(1500)), "a\u{1b}[2Jb\nc");
        assert_eq!(shown, "    1.500 s  a [2Jb c");
    }
}
