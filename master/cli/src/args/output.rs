//! Options for what a job writes.

use std::path::PathBuf;

use clap::Args;
use elasticdl_proto::LogFormat;

use super::values::{self, Choices};
use crate::process::Console;

/// Options for the output.
#[derive(Args, Debug)]
#[command(next_help_heading = "Output")]
pub(crate) struct OutputOptions {
    /// Also write the summary (JSON) to this file, device or pipe. [default: only DIR/summary.json]
    #[arg(long, value_name = "FILE", value_parser = values::path_parser())]
    pub(crate) summary: Option<PathBuf>,

    /// Serve Prometheus metrics on this port, at /metrics; 0 selects a free port. [default: with
    /// --metrics-from 7071, else none]
    ///
    /// With --local the address is that of --listen. In a cluster --metrics-from defines who may
    /// read them; the master's pod and Service name the port `metrics`, and the pod has the usual
    /// prometheus.io annotations.
    #[arg(long, value_name = "PORT", value_parser = values::parse_port)]
    pub(crate) metrics_port: Option<u16>,

    /// Serve the job's dashboard, a web page, on this port of 127.0.0.1, or `none`. [default: a
    /// free port]
    ///
    /// The link, with the key that opens the page, is printed at the start if standard error is a
    /// terminal, and by `elasticdl dashboard`. From another machine, open the page through a tunnel
    /// (`ssh -L`). For a job in a cluster, `elasticdl dashboard` serves it.
    #[arg(long, value_name = "PORT", value_parser = parse_dashboard_port)]
    pub(crate) dashboard_port: Option<DashboardPort>,

    /// Write loss, learning rate, throughput and number of workers for TensorBoard to a subfolder
    /// of this folder with the job's name, at most once per second.
    ///
    /// Jobs can share the folder: each is a separate run. In a cluster the folder must be in a
    /// --volume.
    #[arg(long, value_name = "DIR", value_parser = values::path_parser())]
    pub(crate) tensorboard_dir: Option<PathBuf>,

    /// Output format of this command, and of the logs of the job's masters and workers: text, or
    /// one JSON object per line.
    ///
    /// json: standard error has a line for each event, for the progress every 5 seconds, and for
    /// each error, with the keys `time`, `elapsed_s`, `kind` (event, progress, warning, error) and
    /// `text` or the progress values; standard output has the summary. Each line of a log has the
    /// keys `timestamp`, `level`, `target`, `message`, `job` and `run_id`, in a worker `worker`,
    /// once known `generation`, and in `fields` what else belongs to the message. What PROGRAM
    /// prints stays as it is. A job that is resumed keeps the format of its logs.
    #[arg(long, value_name = "FORMAT", default_value = "text",
          value_parser = values::choice(LOG_FORMATS))]
    pub(crate) log_format: LogFormat,

    /// Also print PROGRAM's output on standard error, with the worker on each line
    /// (`[worker 2] …`).
    ///
    /// Without this option the output is only in the workers' logs (`elasticdl logs NAME --worker
    /// 2`), except that of Python's `job.print()`. If a program prints a lot, only a part is shown.
    /// With `--log-format json` the lines have the kind `output`, the key `worker`, and the key
    /// `object` if PROGRAM has printed a JSON object, as the log of a worker is, or else `text`.
    #[arg(long, conflicts_with_all = ["quiet", "detach", "image"])]
    pub(crate) tee: bool,

    /// Print only errors.
    #[arg(long, short)]
    pub(crate) quiet: bool,
}

/// A value of `--dashboard-port`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DashboardPort {
    /// No dashboard.
    Closed,
    /// This port; 0: a free one.
    Port(u16),
}

impl DashboardPort {
    /// The port to listen on, if any.
    pub(crate) fn port(self) -> Option<u16> {
        match self {
            Self::Closed => None,
            Self::Port(port) => Some(port),
        }
    }
}

fn parse_dashboard_port(text: &str) -> Result<DashboardPort, String> {
    match (text, text.parse()) {
        ("none", _) => Ok(DashboardPort::Closed),
        (_, Ok(port)) => Ok(DashboardPort::Port(port)),
        (_, Err(_)) => Err("it must be a port from 0 (a free one) to 65535, or none".into()),
    }
}

impl OutputOptions {
    pub(crate) fn console(&self) -> Console {
        Console { quiet: self.quiet, format: self.log_format, tee: self.tee }
    }
}

/// Values of `--log-format`.
const LOG_FORMATS: Choices<LogFormat> = &[
    ("json", LogFormat::Json, "One JSON object per line"),
    ("text", LogFormat::Text, "Text, with a progress bar on a terminal"),
];
