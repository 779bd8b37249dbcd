//! `elasticdl status`: what a running job is doing, once or until it ends.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use elasticdl_proto::v1;

use super::client::{Connection, print, to_failure};
use super::cluster::ClusterTarget;
use super::remote::{self, JobLookup};
use super::render::{StatusJson, to_table};
use super::{Failure, job_options, new_runtime, watch};

/// What `elasticdl status` is told.
#[derive(Args, Debug)]
#[command(after_long_help = AFTER_HELP)]
pub struct StatusArgs {
    /// The job's name, or the path of its directory (with a `/`).
    #[arg(value_name = "JOB")]
    pub job: PathBuf,

    /// Print JSON.
    #[arg(long)]
    pub json: bool,

    /// Go on until the job ends, and say how.
    ///
    /// On a terminal the table is drawn anew in its place. Elsewhere each change is a line. With
    /// --json each look at the job is one line.
    #[arg(long, short)]
    pub watch: bool,

    /// How often --watch looks at the job.
    #[arg(long, value_name = "DURATION", default_value = "500ms", value_parser = job_options::parse_interval,
          requires = "watch")]
    pub interval: Duration,

    /// How long --watch waits for a master that is gone: another may take its place.
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = job_options::parse_timeout,
          requires = "watch")]
    pub master_timeout: Duration,

    #[command(flatten)]
    #[allow(missing_docs, reason = "it would be taken for the command's own help")]
    pub target: ClusterTarget,
}

const AFTER_HELP: &str = "\
JSON (names are stable; null for what is not there or not known yet):
  job, state            state: starting, waiting (too few workers), running, stopping, ending;
                        with --watch at last: completed, failed, refused, stopped
  progress              how near the end is, 0 to 1
  generation, step      the newest membership; steps committed
  epoch, epochs         the first epoch that is not complete, from 0; how many there are
  records_counted, records_expected
                        absorbed by the parameters; of all epochs
  records_per_s, loss   over the last seconds; mean per record, smoothed
  shards                {todo, leased, done} of this epoch: done is absorbed as a whole; leased has
                        records leased to a worker that is here; todo is the rest
  workers_desired
  workers[]             {worker, pid, rank, state, step, compute_us, straggler, leased_records};
                        compute_us: in the model's code, last reported step; straggler: the median
                        of the last 7 such steps is over 1.5 times the members' median and over
                        5 ms more; in a cluster also {pod, node}
  allreduce_transport             what gradients are summed over, in words
  evaluated             {step, records, metrics: {name: mean}} of the newest evaluation; or null
  checkpoints           {dir, newest: {step, name, bytes}, saved, failed, error}; null where none
                        are kept; error: why the last one could not be written
  memberships[]         the last 20 changes, as in the summary: {generation, cause, world_size,
                        at_step, lost, left, joined, gap_ms, detect_ms, abort_ms, agree_ms,
                        connect_ms, state_ms, first_step_ms}
  events[]              the last 20 lines that were said
  events_at_s[]         in a cluster: how old the job was then, in seconds

Exit codes:
  0    the status was shown; with --watch: the job has ended, however it did
  1    the job is not running, or no master has come back in time
  2    the command line can't be used, or there is no such job";

/// Shows a job's status; the exit code.
pub(super) fn status(args: &StatusArgs) -> Result<u8, Failure> {
    let root = match remote::find(&args.job, &args.target)? {
        JobLookup::Cluster(job) if args.watch && !args.json => return job.follow(),
        JobLookup::Cluster(_) if args.watch => {
            return Err(Failure::usage("in a cluster, --watch goes without --json"));
        }
        JobLookup::Cluster(job) => {
            let status = job.status()?;
            return print(&if args.json { status.to_pretty_json() } else { to_table(&status) });
        }
        JobLookup::Local(root) => root,
    };
    let runtime = new_runtime()?;
    if args.watch {
        let timing = watch::Timing { interval: args.interval, master_timeout: args.master_timeout };
        return runtime.block_on(watch::watch(&root, timing, args.json));
    }
    let answer = async {
        let mut connection =
            Connection::open(&root).await.map_err(|error| error.to_failure(&root))?;
        let answer = connection
            .ask(v1::StatusRequest {}, async |client, request| client.status(request).await)
            .await;
        answer.map_err(|status| to_failure(&root, &status))
    };
    let status = StatusJson::from(runtime.block_on(answer)?);
    print(&if args.json { status.to_pretty_json() } else { to_table(&status) })
}
