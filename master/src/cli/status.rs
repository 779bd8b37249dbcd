//! `elasticdl status`: the status of a running job, once or until it ends.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use elasticdl_proto::wire::StatusRequest;

use super::client::{Connection, print, to_failure};
use super::cluster::ClusterTarget;
use super::lookup::{self, JobLookup};
use super::render::to_table;
use super::{Failure, job_options, new_runtime, watch};

/// Arguments of `elasticdl status`.
#[derive(Args, Debug)]
#[command(after_long_help = AFTER_HELP)]
pub struct StatusArgs {
    /// Name of the job, or the path of its directory (with a `/`).
    #[arg(value_name = "JOB")]
    pub job: PathBuf,

    /// Print JSON.
    #[arg(long)]
    pub json: bool,

    /// Update until the job ends, and print how it ended.
    ///
    /// On a terminal the table is redrawn in place. Otherwise each change is printed as a line.
    /// With --json each status is one line.
    #[arg(long, short)]
    pub watch: bool,

    /// Update interval of --watch, from 50ms to 30days.
    #[arg(long, value_name = "DURATION", default_value = "500ms",
          value_parser = job_options::parse_interval,
          requires = "watch")]
    pub interval: Duration,

    /// How long --watch waits for the next master when the master is gone, from 1s to 30days.
    #[arg(long, value_name = "DURATION", default_value = "30s",
          value_parser = job_options::parse_timeout,
          requires = "watch")]
    pub master_timeout: Duration,

    #[command(flatten)]
    #[allow(missing_docs, reason = "it would be taken for the command's own help")]
    pub target: ClusterTarget,
}

const AFTER_HELP: &str = "\
JSON (keys are stable; null for values that do not apply or are not known yet):
  job, state            state: starting, resuming (after the master died), waiting (too few
                        workers), running, stopping, ending; with --watch at last: completed,
                        failed, refused, stopped
  progress              0 to 1
  generation, step      the newest membership; steps committed
  epoch, epochs         the first epoch that is not complete, from 0; number of epochs
  records_counted, records_expected
                        records absorbed by the parameters; records of all epochs
  records_per_s, loss   over the last seconds; mean per record, smoothed
  shards                {todo, leased, done} of this epoch: done is absorbed as a whole; leased has
                        records leased to a connected worker; todo is the rest
  workers_desired       number of workers to keep running
  workers[]             {worker, pid, rank, state, step, compute_us, straggler, leased_records};
                        compute_us: time in the model's code in the last reported step; straggler:
                        the median of the last 7 such times is over 1.5 times the members' median
                        and over 5 ms more; in a cluster also {pod, node}
  workers_pending[]     {launch, slot, state, reason} of workers that are not connected yet; state:
                        requested, unschedulable, starting
  priority_tiers[]      {class, launches, workers}: workers started and connected per priority class
  allreduce_transport   transport of the gradient all-reduce, as text
  evaluated             {step, records, metrics: {name: mean}} of the newest evaluation; or null
  checkpoints           {dir, newest: {step, name, bytes}, saved, failed, error}; null if the job
                        writes none; error: why the last one failed
  memberships[]         the last 20 changes, as in the summary: {generation, cause, world_size,
                        at_step, lost, left, joined, gap_ms, detect_ms, abort_ms, agree_ms,
                        connect_ms, state_ms, first_step_ms}
  events[]              the last 20 event lines; events_emitted: number of all event lines
  events_at_s[]         in a cluster: age of the job at each event, in seconds

Exit codes:
  0    the status was printed; with --watch: the job has ended, in whatever state
  1    the job is not running, or no master has appeared in time
  2    invalid command line, or no such job";

/// Prints a job's status. Returns the exit code.
pub(super) fn status(args: &StatusArgs) -> Result<u8, Failure> {
    let root = match lookup::find(&args.job, &args.target)? {
        JobLookup::Cluster(job) if args.watch && !args.json => return job.follow(),
        JobLookup::Cluster(_) if args.watch => {
            return Err(Failure::usage("in a cluster, --watch can't be combined with --json"));
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
            .request(StatusRequest, async |client, request| client.status(request).await)
            .await;
        answer.map_err(|status| to_failure(&root, &status))
    };
    let status = runtime.block_on(answer)?;
    print(&if args.json { status.to_pretty_json() } else { to_table(&status) })
}
