//! Options for where a job runs and how it is named.

use std::net::IpAddr;
use std::path::PathBuf;

use clap::Args;
use elasticdl_master::kube::options;
use elasticdl_master::local::hosts::{Host, Hosts};

use super::{HelpOptions, LifecycleOptions, values};

/// Options for the job as a whole.
#[derive(Args, Debug)]
#[command(next_help_heading = "Job")]
pub(crate) struct JobOptions {
    /// Run the master and the workers as processes on this machine, without a cluster.
    #[arg(long)]
    pub(crate) local: bool,

    /// Run the master on this machine and the workers on these hosts, which FILE names. It has a
    /// line `HOST` or `HOST slots=N` for each.
    ///
    /// A host gets as many workers as it has slots (one by default) before any gets more, and
    /// --num-workers is the number of all slots by default. After a worker has failed to start,
    /// other hosts are preferred for a minute. On each host, `elasticdl`, PROGRAM and the data have
    /// the same paths as here, as on a shared file system; the working directory is this one.
    /// --checkpoint-dir, which is needed, and models belong in a folder that all hosts share, or in
    /// an object store. A worker whose connection is lost does not count as a failure. PROGRAM must
    /// stay as it is while the job runs: the hosts have no copy.
    #[arg(long, value_name = "FILE", conflicts_with = "image", value_parser = parse_hosts)]
    pub(crate) hosts: Option<HostList>,

    /// Command that runs its arguments on a host, whose name replaces `{host}`.
    ///
    /// It is split at spaces; the path of this `elasticdl` is appended. Under Slurm:
    /// `srun --overlap --nodes=1 --ntasks=1 --nodelist={host}`, and `scontrol show hostnames`
    /// prints the file for --hosts. To set variables of the workers, append `env NAME=VALUE`. The
    /// job's token is not among the arguments.
    #[arg(long, value_name = "COMMAND", requires = "hosts", default_value = HOST_COMMAND)]
    pub(crate) host_command: String,

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
    /// In a cluster this prints the objects that would be created, to be read: the server gives
    /// some of their values, so `kubectl apply` makes no job of them. It does of a declared job
    /// (manifests/README.md).
    #[arg(long, conflicts_with = "detach")]
    pub(crate) dry_run: bool,

    /// Read options from this TOML file.
    ///
    /// Its keys are the long option names, and `program` is the list of PROGRAM and ARGS. Options
    /// on the command line take precedence. Relative paths are relative to the current directory.
    /// --print-config prints such a file.
    #[arg(long = "config", value_name = "FILE")]
    pub(crate) _config: Option<PathBuf>,

    /// Print the given options as a --config file, and exit.
    #[arg(long = "print-config", id = PRINT_CONFIG)]
    pub(crate) _print_config: bool,

    /// Name of the job: lower-case letters, digits and `-`, at most 40 characters. [default:
    /// PROGRAM's name and 6 random digits]
    ///
    /// `elasticdl status`, `scale` and other commands accept this name.
    #[arg(long, value_name = "NAME", value_parser = values::parse_job_name)]
    pub(crate) job_name: Option<String>,

    /// Directory for the job's logs, summary and token. [default: ~/.local/state/elasticdl/NAME]
    ///
    /// It is created if it does not exist. The default follows $XDG_STATE_HOME; without it and
    /// without $HOME it is ./.elasticdl/NAME. An existing directory must be empty or belong to an
    /// earlier job. A worker's log that reaches 32 MiB is renamed to worker-N.log.1. Only one job
    /// at a time can run in a directory. `elasticdl delete` removes only files that jobs have
    /// written.
    #[arg(long, value_name = "DIR", value_parser = values::path_parser())]
    pub(crate) job_dir: Option<PathBuf>,

    /// Replace the earlier job of this machine with this name, or in this directory.
    ///
    /// Without this option, the name or directory of a job that has trained anything is rejected,
    /// unless --resume-from names its checkpoints. The earlier job's summary, logs and history are
    /// removed once a worker of this job has checked its data, and its checkpoints once this job
    /// has written one. A job that ends before that leaves the earlier one unchanged, and puts its
    /// own files into the folder `refused`.
    #[arg(long)]
    pub(crate) replace: bool,

    /// Address of this machine on which the master listens, for workers and for other commands.
    /// [default: 127.0.0.1]
    ///
    /// With --hosts the default is the address from which this machine reaches the first of them.
    /// Workers that PROGRAM starts elsewhere (in a container, in a network namespace) must be able
    /// to reach it. Each of them uses its own address on the route to the master. The system
    /// chooses the port. On an address that is not loopback, the master uses TLS, with a
    /// certificate from the job's directory.
    #[arg(long, value_name = "IP", value_parser = values::parse_listen)]
    pub(crate) listen: Option<IpAddr>,

    #[command(flatten)]
    pub(crate) help: HelpOptions,

    #[command(flatten)]
    pub(crate) lifecycle: LifecycleOptions,
}

/// Hosts of one option value. A newtype, so that clap does not take it for a repeated option.
#[derive(Clone, Debug)]
pub(crate) struct HostList(pub(crate) Vec<Host>);

fn parse_hosts(path: &str) -> Result<HostList, String> {
    let text = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
    Hosts::parse(&text).map(HostList)
}

/// A host that is down or gone is noticed in some seconds.
const HOST_COMMAND: &str = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 \
                            {host}";

/// Id of `--print-config`, which is carried out before the arguments are taken apart.
pub(crate) const PRINT_CONFIG: &str = "print_config";
