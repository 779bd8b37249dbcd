//! `elasticdl status`: the status of a running job, once or until it ends, or the summary of an
//! ended one.

use std::time::Duration;

use clap::Args;

use crate::args::{parse_interval, parse_timeout};
use crate::backend::{NamedJob, WatchOptions};
use crate::process::{Failure, print};
use crate::render::{status_to_json, to_table};

/// Arguments of `elasticdl status`.
#[derive(Args, Debug)]
#[command(after_long_help = AFTER_HELP)]
pub(crate) struct StatusArgs {
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,

    /// Update until the job ends, and print how it ended.
    ///
    /// On a terminal the table is redrawn in place. Otherwise each change is printed as a line.
    /// With --json each status is one line.
    #[arg(long, short)]
    pub(crate) watch: bool,

    /// Update interval of --watch, from 50ms to 30days.
    #[arg(long, value_name = "DURATION", default_value = "500ms",
          value_parser = parse_interval,
          requires = "watch")]
    pub(crate) interval: Duration,

    /// How long --watch waits for the next master when the master is gone, from 1s to 30days.
    #[arg(long, value_name = "DURATION", default_value = "30s",
          value_parser = parse_timeout,
          requires = "watch")]
    pub(crate) master_timeout: Duration,

    #[command(flatten)]
    pub(crate) job: NamedJob,
}

const AFTER_HELP: &str = "\
JSON (keys are stable; null for values that do not apply or are not yet known):
  job, state            state: queued (by a scheduler with queues), starting, resuming (after the
                        master died), waiting (too few workers), running, suspending, suspended,
                        stopping, ending; in a cluster also `no master`: the status is not updated,
                        and the last event shows since when and why; of an ended job: completed,
                        failed, refused, stopped
  progress              0 to 1
  generation, step      the newest membership; steps committed
  epoch, epochs         the first incomplete epoch, from 0; number of epochs
  records_counted, records_expected, records_repeated
                        records absorbed by the parameters; records of all epochs; records
                        absorbed more than once
  records_per_s, loss   over the last seconds; mean per record, smoothed
  learning_rate, eta_s  of the last step; seconds to the end of the data, of --max-steps or of
                        --deadline at the present speed
  shards                {todo, leased, done} of an evaluate or predict job; otherwise null
  workers_desired       number of workers to keep running
  workers_min, workers_max
                        the least with which it trains; the most that it keeps
  autoscale             what --autoscale has found last, as text; or null
  workers[]             {worker, pid, rank, state, step, compute_us, share, input_us, limited_by,
                        straggler, cpu, memory_bytes, serves_tables, table_bytes, leased_records};
                        state: serving of a table server in training; compute_us: time in the
                        model's code in the last reported step; share: its part of that step's
                        records; input_us: wait for them to be read; limited_by: what took longest:
                        compute, input, network (the wait for others, and the transfer), others
                        (that wait, in shared memory); straggler: for 10 s, the median of the last 7
                        such times, for an equal part of the records, is over 1.5 times the members'
                        median and over 5 ms more; cpu, memory_bytes: cores and resident memory of
                        its process, absent until it has told; serves_tables: true of a table
                        server, else absent; table_bytes: memory of its rows of tables;
                        leased_records: of an evaluate or predict job; in a cluster also {pod, node}
  workers_disconnected[]
                        {worker, rank, disconnected_s} of workers without contact to the master that
                        are not lost: the group may train on with them; disconnected_s: seconds
                        since the last message or the end of the stream
  workers_pending[]     {launch, slot, state, reason} of workers that are not connected yet; state:
                        requested, queued, unschedulable, starting
  hosts                 {name: {copied_per_s, gpus, disks}} as a worker on each host has measured
                        them when it joined: bytes of memory copied per second, NVIDIA GPUs, and
                        disks[] {folder, free_bytes, written_per_s}; empty for a job on one machine
  hosts_avoided[]       {host, why, for_s} of hosts on which no worker is started where another one
                        has capacity; for_s: seconds until it is used again, or null
  priority_tiers[]      {class, launches, workers}: workers started and connected per priority class
  allreduce_transport   transport of the gradient all-reduce, as text
  limiting_link         {from, from_host, to, to_host, host, limited, bytes_per_s} of the link
                        between two workers that the network has limited for most of the last 20 s,
                        unlike others, while the steps waited for it; or null. limited: part of that
                        time; bytes_per_s: what the network delivered meanwhile; host: if several
                        links are so slow, the host that is an end of each
  audit                 {steps, disagreements, workers_replaced}: steps computed by two workers,
                        how often they differed, and the workers replaced for it; null without
                        --audit
  tables                {rows, touches, shards_at_risk} of the model's embedding tables: rows that
                        exist; pairs of a trained record and a row; parts with fewer copies than
                        there could be; or null
  evaluated             {step, records, metrics: {name: mean}} of the newest evaluation, or of an
                        evaluate job that has all records; or null
  evaluated_best        {step, metric, value, export} of the best evaluation; or null
  stop_reason           why the job stops, unless a user stops it; or null
  checkpoints           {dir, newest: {step, name, bytes}, saved, failed, error}; null if the job
                        writes none; error: why the last one failed
  memberships[]         the last 20 changes, as in the summary: {generation, cause, world_size,
                        at_step, lost, left, joined, gap_ms, detect_ms, abort_ms, agree_ms,
                        connect_ms, state_ms, first_step_ms}
  events[]              the last 20 event lines; events_emitted: number of all event lines
  has_ended, summary    whether it has ended; then its summary (as in DIR/summary.json), else null
  events_at_s[]         in a cluster: age of the job at each event, in seconds

Exit codes:
  0    the status was printed, or the summary of a job that has ended; with --watch: the job has
       ended, in whatever state
  1    no master answers, or none has appeared in time
  2    invalid command line, or no such job";

/// Prints a job's status. Returns the exit code.
pub(super) fn status(args: &StatusArgs) -> Result<u8, Failure> {
    let job = args.job.find()?;
    let &StatusArgs { json, interval, master_timeout, .. } = args;
    if args.watch {
        return job.watch(&WatchOptions { interval, master_timeout, json });
    }
    if let Some(end) = if json { job.ended_json()? } else { job.ended()? } {
        return print(&end);
    }
    let status = job.status()?;
    print(&if json { status_to_json(&status) } else { to_table(&status) })
}
