//! Options that say where a job runs and how it is named.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::Args;

use super::{HelpOptions, LifecycleOptions, values};
use crate::kube::options;

/// Options for the job as a whole.
#[derive(Args, Debug)]
#[command(next_help_heading = "Job")]
pub(crate) struct JobOptions {
    /// Run the master and the workers as processes of this machine, without a cluster.
    #[arg(long)]
    pub(crate) local: bool,

    /// Run the master and the workers as pods of this image.
    ///
    /// The image contains PROGRAM and, unless --master-image is given, the `elasticdl` command,
    /// both in its $PATH.
    #[arg(long, value_name = "IMG", value_parser = options::parse_image,
          conflicts_with_all = ["local", "job_dir", "listen", "dashboard_port", "replace"])]
    pub(crate) image: Option<String>,

    /// Start the job and return; with --local the master continues in the background.
    ///
    /// `elasticdl status NAME` shows the job, and `elasticdl stop NAME` stops it.
    #[arg(long)]
    pub(crate) detach: bool,

    /// Print what would be started, without starting it.
    ///
    /// In a cluster these are the objects that would be created.
    #[arg(long, conflicts_with = "detach")]
    pub(crate) dry_run: bool,

    /// Read options from this TOML file.
    ///
    /// Its keys are the long names of options, and `program` is the list of PROGRAM and ARGS. An
    /// option that is also on the command line is taken from there. Relative paths are relative
    /// to the current directory. --print-config writes such a file.
    #[arg(long = "config", value_name = "FILE")]
    pub(crate) _config: Option<PathBuf>,

    /// Print the given options as a --config file, and exit.
    #[arg(long = "print-config", id = PRINT_CONFIG)]
    pub(crate) _print_config: bool,

    /// Name of the job: lower-case letters, digits and `-`, at most 40 characters. [default:
    /// PROGRAM's name and 6 random digits]
    ///
    /// `elasticdl status`, `scale` and the other commands take this name.
    #[arg(long, value_name = "NAME", value_parser = values::parse_job_name)]
    pub(crate) job_name: Option<String>,

    /// Directory for the job's logs, summary and token. [default: ~/.local/state/elasticdl/NAME]
    ///
    /// It is created if it does not exist. The default follows $XDG_STATE_HOME; without it and
    /// without $HOME it is ./.elasticdl/NAME. An existing directory must be empty or belong to an
    /// earlier job. A worker's log that has 32 MiB becomes worker-N.log.1, and a new one begins.
    /// One job at a time can run in a directory. `elasticdl delete` removes the files that jobs
    /// have written, and nothing else.
    #[arg(long, value_name = "DIR")]
    pub(crate) job_dir: Option<PathBuf>,

    /// Replace the earlier job of this name, or in this directory.
    ///
    /// Without it, a name or directory is refused whose job has trained something, unless
    /// --resume-from names its checkpoints. The earlier job's summary, logs and history are removed
    /// when a worker of this job has checked its data, and its checkpoints when this job has
    /// written one. A job that ends before leaves the earlier one as it was, and its own files in
    /// the folder `refused`.
    #[arg(long)]
    pub(crate) replace: bool,

    /// Address of this machine on which the master listens, for workers and for the other commands.
    ///
    /// Workers that PROGRAM starts elsewhere (in a container, in a network namespace) must be able
    /// to reach it. Each of them takes part with its own address on the route to the master. The
    /// port is chosen by the system. On an address that is not loopback, the master serves TLS,
    /// with a certificate from the job's directory.
    #[arg(long, value_name = "IP", default_value = "127.0.0.1",
          value_parser = values::parse_listen)]
    pub(crate) listen: IpAddr,

    #[command(flatten)]
    pub(crate) help: HelpOptions,

    #[command(flatten)]
    pub(crate) lifecycle: LifecycleOptions,
}

/// Id of `--print-config`, which is carried out before the arguments are taken apart.
pub(crate) const PRINT_CONFIG: &str = "print_config";
