//! Options for what a job writes.

use std::path::PathBuf;

use clap::Args;

/// Options for the output.
#[derive(Args, Debug)]
#[command(next_help_heading = "Output")]
pub(crate) struct OutputOptions {
    /// Also write the summary (JSON) to this file. [default: only DIR/summary.json]
    #[arg(long, value_name = "FILE")]
    pub(crate) summary: Option<PathBuf>,

    /// Serve Prometheus metrics on this port, at /metrics; 0 chooses a free port. [default: with
    /// --image 7071, else none]
    ///
    /// With --local the address is that of --listen. In a cluster the master's pod and Service name
    /// the port `metrics`, and the pod has the usual prometheus.io annotations.
    #[arg(long, value_name = "PORT")]
    pub(crate) metrics_port: Option<u16>,

    /// Write loss, throughput and number of workers for TensorBoard to this folder, at most once
    /// per second.
    ///
    /// In a cluster the folder must lie in a --volume.
    #[arg(long, value_name = "DIR")]
    pub(crate) tensorboard_dir: Option<PathBuf>,

    /// Print errors only.
    #[arg(long, short)]
    pub(crate) quiet: bool,
}
