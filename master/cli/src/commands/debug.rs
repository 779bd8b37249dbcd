//! `elasticdl debug`.

use clap::Args;

use crate::backend::NamedJob;
use crate::process::{Failure, print};

/// Arguments of `elasticdl debug`.
#[derive(Args, Debug)]
#[command(after_long_help = AFTER_HELP)]
pub(crate) struct DebugArgs {
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) job: NamedJob,
}

const AFTER_HELP: &str = "\
For each worker: its state, what its trainer does and since when, what it waits for, its links with
bytes per second, the stacks of its threads (of Python, too), and its last messages. Of a worker that
does not answer within 4 s, such as one that is stopped: what the kernel says of its process, in a
job of this machine. Calls of runtimes are left out, and threads with the same stack are folded;
--json has all of them. No arguments or values are read. Each thread is interrupted by a signal
(SIGURG) for some microseconds, so that a sleep() of C code may end early. The same is written to the
logs of the worker and of the master before a worker is evicted because it hangs.

JSON (keys are stable; null for values that do not apply or are not known):
  job, state, generation, step, allreduce_transport
                        as in `elasticdl status --json`
  committed_s           seconds since the master has last heard of committed steps
  workers[]             {worker, rank, pid, address, state, reason, pod, node, heard_s, messages:
                        [{ago_s, count, from_master, kind}], report, process}; address: where the
                        others reach it; heard_s: seconds since its last message
  workers[].report      {activity: {what, step, for_s}, stall: {generation, operation, received,
                        sent, waits_for_next, far, for_s}, storage, threads, omitted, links}, or
                        null; far: members besides its neighbours for which it waits
  report.threads[]      {name, tid, state, waits_in, frames, python}: the innermost frame first
  report.links[]        {local, peer, to_master, sent_bytes, received_bytes, sent_bytes_per_s,
                        received_bytes_per_s, sent_ago_s, received_ago_s}
  workers[].process     {state, threads: [{name, tid, state, waits_in}]} of a worker without a
                        report, by the kernel; or null

Exit codes:
  0    printed, whichever workers have answered
  1    no master answers, or the job has ended
  2    invalid command line, or no such job";

/// Prints what the workers of a job do. Returns the exit code.
pub(super) fn debug(args: &DebugArgs) -> Result<u8, Failure> {
    let inspection = args.job.find()?.inspect()?;
    print(&if args.json { inspection.to_pretty_json() } else { inspection.to_string() })
}
