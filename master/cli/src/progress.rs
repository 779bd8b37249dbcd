//! Progress of a running job on standard error.
//!
//! A terminal shows a progress bar with notices above it. Any other output receives the notices and
//! a line of progress every few seconds, as text or as JSON.
//!
//! **Invariant:** the job never waits for the terminal. A separate thread prints; messages that it
//! can't print in time are dropped. Notices are also in the master's log.

mod line;
mod log;
mod terminal;
mod text;

use std::io::{Write as _, stderr};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use elasticdl_master::job::Time;
use elasticdl_master::progress::Observer;
use elasticdl_master::worker_output::WorkerOutput;
use elasticdl_proto::{LogFormat, Status};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::{Value, json};

use line::ProgressLine;
pub(crate) use log::ProgressLog;
pub(crate) use terminal::can_redraw;
pub(crate) use text::{format_duration, format_learning_rate, format_rate, one_line};

/// Shows a job's progress until [`ProgressPrinter::end`] or until the value is dropped.
#[derive(Debug)]
pub(crate) struct ProgressPrinter {
    lines: SyncSender<PrinterMessage>,
    thread: JoinHandle<()>,
}

impl ProgressPrinter {
    /// Prints to standard error: as text, a bar, drawn at once, if it is a terminal that can move
    /// its cursor, and plain lines otherwise. Also prints what workers print to `output`.
    pub(crate) fn on_stderr(format: LogFormat, output: Option<WorkerOutput>) -> Self {
        let (lines, received) = sync_channel(LINES_MAX);
        let printer = match format {
            LogFormat::Json => Printer::Lines { format, last: None },
            LogFormat::Text if can_redraw(&stderr()) => Printer::Bar(new_bar()),
            LogFormat::Text => Printer::Lines { format, last: None },
        };
        let thread = std::thread::spawn(move || print(&received, printer, output));
        Self { lines, thread }
    }

    /// Prints the remaining notices and clears the bar, unless they have no reader.
    pub(crate) fn end(self) {
        drop(self.lines);
        let deadline = Instant::now() + END_PATIENCE;
        while !self.thread.is_finished() {
            // The job's summary is still to be written.
            if Instant::now() >= deadline {
                return;
            }
            std::thread::sleep(END_POLL);
        }
        self.thread.join().expect("the printing thread doesn't panic");
    }
}

impl Observer for ProgressPrinter {
    fn notice(&self, now: Time, text: String) {
        let _ = self.lines.try_send(PrinterMessage::Notice(now, text));
    }

    fn show(&self, now: Time, status: &Status) {
        let line = ProgressLine::of(status);
        let _ = self.lines.try_send(PrinterMessage::Progress(now, line));
    }

    fn end(self: Box<Self>) {
        Self::end(*self);
    }
}

#[derive(PartialEq)]
enum PrinterMessage {
    Notice(Time, String),
    Progress(Time, ProgressLine),
}

enum Printer {
    Bar(ProgressBar),
    /// One line after the other; the time of the newest line of progress.
    Lines {
        format: LogFormat,
        last: Option<Time>,
    },
}

impl Printer {
    /// `is_marked`: the program has meant the line for the console.
    fn show_output(&self, worker: u64, is_marked: bool, text: &str) {
        let line = if is_marked { text.to_owned() } else { format!("[worker {worker}] {text}") };
        match self {
            Self::Bar(bar) => bar.println(line),
            Self::Lines { format: LogFormat::Text, .. } => write_line(&line),
            Self::Lines { format: LogFormat::Json, .. } => {
                write_line(&json_output(SystemTime::now(), worker, text));
            }
        }
    }
}

fn print(lines: &Receiver<PrinterMessage>, mut printer: Printer, mut output: Option<WorkerOutput>) {
    loop {
        let received = match &output {
            Some(_) => lines.recv_timeout(OUTPUT_INTERVAL),
            None => lines.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        let has_ended = received == Err(RecvTimeoutError::Disconnected);
        if let Some(output) = &mut output {
            let is_marked = output.is_marked();
            output.poll(has_ended, &mut |worker, text| {
                printer.show_output(worker, is_marked, text);
            });
        }
        let line = match received {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => continue,
            Err(RecvTimeoutError::Disconnected) => break,
        };
        match (line, &mut printer) {
            (PrinterMessage::Notice(now, text), Printer::Bar(bar)) => {
                bar.println(format_notice(now, &text))
            }
            (PrinterMessage::Notice(now, text), Printer::Lines { format, .. }) => {
                write_line(&match format {
                    LogFormat::Json => json_notice(SystemTime::now(), now, &text),
                    LogFormat::Text => format_notice(now, &text),
                });
            }
            (PrinterMessage::Progress(_, line), Printer::Bar(bar)) => {
                bar.set_position((line.progress.clamp(0.0, 1.0) * BAR_PARTS as f64) as u64);
                bar.set_message(line.to_text(terminal_width().saturating_sub(BAR_WIDTH)));
            }
            (PrinterMessage::Progress(now, line), Printer::Lines { format, last }) => {
                if line.is_due(now, *last) {
                    write_line(&match format {
                        LogFormat::Json => json_progress(SystemTime::now(), now, &line),
                        LogFormat::Text => format_progress(now, &line),
                    });
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
    let style = ProgressStyle::with_template("{bar:10.cyan/dim} {percent:>3} %  {wide_msg}")
        .expect("the template is valid");
    let bar = ProgressBar::with_draw_target(Some(BAR_PARTS), ProgressDrawTarget::stderr())
        .with_style(style.progress_chars("━╸─"))
        .with_message("starting");
    bar.tick();
    bar
}

/// Columns of the terminal on standard error.
fn terminal_width() -> usize {
    let size = rustix::termios::tcgetwinsize(stderr()).ok();
    size.map(|size| usize::from(size.ws_col)).filter(|width| *width > 0).unwrap_or(WIDTH_DEFAULT)
}

fn format_notice(now: Time, text: &str) -> String {
    format!("{:>9.3} s  {}", now.0.as_secs_f64(), one_line(text))
}

fn format_progress(now: Time, line: &ProgressLine) -> String {
    let percent = format!("{:.1} %  ", line.progress * 100.0);
    // The time of a notice takes 13 columns.
    let width = PLAIN_WIDTH - 13 - percent.chars().count();
    format_notice(now, &(percent + &line.to_text(width)))
}

/// A notice as a JSON object in one line.
pub(crate) fn json_notice(time: SystemTime, now: Time, text: &str) -> String {
    json_line(time, now, "event", json!({ "text": text }))
}

/// A line that a worker has printed as a JSON object in one line. An object, such as a line of the
/// worker's log, stays one.
fn json_output(time: SystemTime, worker: u64, text: &str) -> String {
    let mut line = json!({
        "time": humantime::format_rfc3339_millis(time).to_string(),
        "kind": "output", "worker": worker,
    });
    match serde_json::from_str(text) {
        Ok(object @ Value::Object(_)) => line["object"] = object,
        _ => line["text"] = text.into(),
    }
    line.to_string()
}

/// A job's error as a JSON object in one line.
pub(crate) fn json_error(time: SystemTime, now: Time, text: &str) -> String {
    json_line(time, now, "error", json!({ "text": text }))
}

fn json_progress(time: SystemTime, now: Time, line: &ProgressLine) -> String {
    let values = serde_json::to_value(line).expect("its keys are strings");
    json_line(time, now, "progress", values)
}

/// `values` as a JSON object in one line, with the time and the job's age.
fn json_line(time: SystemTime, now: Time, kind: &str, values: Value) -> String {
    let mut line = json!({
        "time": humantime::format_rfc3339_millis(time).to_string(),
        "elapsed_s": now.0.as_millis() as f64 / 1000.0,
        "kind": kind,
    });
    if let (Some(line), Value::Object(values)) = (line.as_object_mut(), values) {
        line.extend(values);
    }
    line.to_string()
}

pub(crate) fn write_line(line: &str) {
    // Standard error may be closed; the job continues.
    let _ = writeln!(stderr(), "{line}");
}

const BAR_PARTS: u64 = 1000;
/// Columns that the bar and the percentage take.
const BAR_WIDTH: usize = 18;
/// How long a reader of standard error is awaited at the end.
const END_PATIENCE: Duration = Duration::from_secs(5);
const END_POLL: Duration = Duration::from_millis(5);
const LINES_MAX: usize = 256;
/// Interval between looks at what workers print.
const OUTPUT_INTERVAL: Duration = Duration::from_millis(200);
/// Columns of a line of progress that goes to a file or a pipe.
const PLAIN_WIDTH: usize = 100;
/// Columns of a terminal that does not say how many it has.
const WIDTH_DEFAULT: usize = 80;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_workers_text_cannot_control_the_terminal() {
        let shown = format_notice(Time(Duration::from_millis(1500)), "a\u{1b}[2Jb\nc");
        assert_eq!(shown, "    1.500 s  a [2Jb c");
    }

    #[test]
    fn lines_of_progress_fit_into_the_width_of_a_log() {
        let shown = format_progress(Time(Duration::from_secs(15)), &line::tests::line());
        let text = "   15.000 s  50.0 %  epoch 2/3 · step 120 · loss 0.5300 · lr 0.001 · \
            12.3 k records/s · 62 min left";
        assert_eq!(shown, text);
        assert!(shown.chars().count() <= 100);
    }

    #[test]
    fn lines_of_json_have_stable_keys() {
        let (time, now) = (SystemTime::UNIX_EPOCH, Time(Duration::from_millis(1500)));
        let read = |line: &str| serde_json::from_str::<Value>(line).unwrap();
        for (printed, key, value) in [
            ("{\"level\":\"INFO\"}", "object", json!({"level": "INFO"})),
            ("{\"level\":", "text", json!("{\"level\":")),
            ("7", "text", json!("7")),
        ] {
            let mut expected = json!({
                "time": "1970-01-01T00:00:00.000Z", "kind": "output", "worker": 3,
            });
            expected[key] = value;
            assert_eq!(read(&json_output(time, 3, printed)), expected);
        }
        let notice = json_notice(time, now, "a\n\u{1b}b");
        assert!(!notice.contains('\n'), "{notice}");
        let expected = json!({
            "time": "1970-01-01T00:00:00.000Z", "elapsed_s": 1.5, "kind": "event",
            "text": "a\n\u{1b}b",
        });
        assert_eq!(read(&notice), expected);
        let expected = json!({
            "time": "1970-01-01T00:00:00.000Z", "elapsed_s": 1.5, "kind": "progress",
            "state": "running", "progress": 0.5, "epoch": 2, "epochs": 3, "step": 120,
            "loss": 0.53, "metrics": {}, "learning_rate": 0.001, "records_per_s": 12_345.0,
            "eta_s": 3725.0, "workers": 2, "workers_desired": 2, "generation": 3,
        });
        assert_eq!(read(&json_progress(time, now, &line::tests::line())), expected);
    }
}
