//! Options for the workers of any job.

use std::time::Duration;

use clap::Args;
use clap::builder::ArgPredicate;

use super::values;

/// Options for the workers.
#[derive(Args, Debug)]
#[command(next_help_heading = "Workers")]
pub(crate) struct WorkerOptions {
    /// Number of workers to keep running. [default: 2]
    ///
    /// With several workers per pod, the default is rounded up to a multiple of --workers-per-pod.
    #[arg(long, value_name = "N", value_parser = values::parse_workers)]
    pub(crate) num_workers: Option<u32>,

    /// Maximum number of workers, which `elasticdl scale` can change. [default: twice
    /// --num-workers, at least 8]
    #[arg(long, value_name = "N", value_parser = values::parse_workers)]
    pub(crate) max_workers: Option<u32>,

    /// Number of worker failures without progress between them after which the job fails.
    ///
    /// A worker that crashes, hangs or exits with an error is replaced and counts as a failure.
    /// Failures in only one slot, or on one node, do not end a job whose other workers can train. A
    /// worker that is killed externally is replaced and does not count. But the pauses before
    /// replacements grow to 30 s while the job makes no progress, or while workers of one slot are
    /// killed within 5 s of their start; and without progress the job fails after 20 kills, those
    /// within a pause counted as one, or this number if it is larger: after at least six minutes.
    #[arg(long, value_name = "N", default_value = "3")]
    pub(crate) max_worker_restarts: u32,

    /// Evict a worker that is stopped or unreachable for longer than this while other workers wait
    /// for it; at least 100ms.
    ///
    /// With the default, the worker is evicted and replaced within a second. A worker whose model
    /// computes for a long time still sends heartbeats. A worker that has lost only the master
    /// continues to train.
    #[arg(long, value_name = "DURATION", default_value = "800ms",
          value_parser = values::parse_worker_timeout)]
    pub(crate) worker_timeout: Duration,

    /// Evict a worker that computes longer than this in a step while the others wait for it.
    /// [default: 20 times the longest usual step, at least 10min]
    ///
    /// Such a worker hangs: a deadlock in its program or its data loader, a GPU that does not
    /// respond. It writes the stacks of its threads to its log, counts as a failure and is
    /// replaced. A worker that trains alone is also evicted. Raise this limit for programs that do
    /// something else for a long time between two steps. It does not apply to evaluations by the
    /// job, waits for storage and the export at the end, which may take an hour.
    #[arg(long, value_name = "DURATION", value_parser = values::parse_timeout)]
    pub(crate) step_timeout: Option<Duration>,

    /// Time limit for an idle worker from its start until it joins the job.
    ///
    /// A local worker that uses the processor or does I/O, such as imports from a slow disk, may
    /// take longer. In a cluster the time counts from the start of the container.
    #[arg(long, value_name = "DURATION", default_value = "10min",
          value_parser = values::parse_timeout)]
    pub(crate) start_timeout: Duration,

    /// Time for which workers continue without a master before they exit, e.g. `30s`; at least 1s.
    /// [default: 30s; with --image 15min]
    ///
    /// Until then they continue to train and look for the next master (see --resume). In a cluster
    /// the next master starts when its pod is scheduled and its predecessor is known to have ended.
    /// The default with --image is longer than a cluster takes to replace the master of a lost
    /// node.
    #[arg(long, value_name = "DURATION", default_value = "30s", hide_default_value = true,
          default_value_if("image", ArgPredicate::IsPresent, "15min"),
          value_parser = values::parse_timeout)]
    pub(crate) master_timeout: Duration,

    /// Time between SIGTERM and SIGKILL for a worker; at least 1s. In a cluster,
    /// terminationGracePeriodSeconds of the worker pods.
    ///
    /// On SIGTERM a worker leaves the group at the next step boundary, or as soon as another worker
    /// has the state. If all workers that hold the state receive SIGTERM, as on a spot notice, they
    /// write a checkpoint first, if checkpoints are enabled. The grace period must therefore be
    /// longer than a step plus writing a checkpoint.
    #[arg(long, value_name = "DURATION", default_value = "30s",
          value_parser = values::parse_timeout)]
    pub(crate) grace_period: Duration,
}
