//! Options for how a job reacts when its workers end, and when the job itself ends.

use std::time::Duration;

use clap::Args;
use elasticdl_master::job::{ExitRule, Policies};

use super::values;
use crate::process::Failure;

/// Lifecycle options of any job.
#[derive(Args, Debug)]
#[command(next_help_heading = "Lifecycle")]
pub(crate) struct LifecycleOptions {
    /// Action when a worker exits with CODE, or with a code in FIRST-LAST, or when EVENT ends it;
    /// can be repeated.
    ///
    /// restart: the worker is replaced, without counting as a failure. ignore: it is not replaced,
    /// and the job continues with one worker less, unless fewer than --min-workers would remain.
    /// stop: the job stops at the end of its step with its newest state, as with `elasticdl stop`.
    /// fail: the job fails. CODE is from 0 to 255; a worker killed by signal N has the code 128 +
    /// N. The codes of the worker library (0, 1, 2, 70, 143) have a fixed meaning.
    ///
    /// EVENT is preempted (a pod or workload of higher priority needed the capacity), evicted (the
    /// node was drained, tainted or short of a resource, or a queue evicted the pod), node-lost
    /// (the cluster reports that the node is gone or not responding), deleted (a user or controller
    /// deleted the pod), over-limit (the worker exceeded its memory or disk limit), not-started
    /// (its image or program could not be started, or its node rejected it), or unresponsive (the
    /// master evicted it because it did not respond; most lost nodes are detected this way first).
    ///
    /// Rules do not apply to released workers, for example after `elasticdl scale`.
    #[arg(long, value_name = "CODE|EVENT=ACTION")]
    pub(crate) on_exit: Vec<ExitRule>,

    /// Stop the job after this time, at least 1s; its newest state is kept. [default: no limit]
    ///
    /// The job stops at the end of its step, writes its last checkpoint and exports its model; the
    /// summary has the state `stopped` and names the deadline, and the exit code is 0. Time during
    /// which the job is suspended counts.
    #[arg(long, value_name = "DURATION", value_parser = values::parse_timeout)]
    pub(crate) deadline: Option<Duration>,

    /// Time that programs have after the job is complete, for example to test the model or to save
    /// files; at least 1s.
    ///
    /// Programs that still run then are killed, and an event reports this.
    #[arg(long, value_name = "DURATION", default_value = "10min")]
    #[arg(value_parser = values::parse_timeout)]
    pub(crate) end_timeout: Duration,

    /// Start the job suspended: no worker starts before `elasticdl resume`.
    #[arg(long)]
    pub(crate) suspend: bool,
}

impl LifecycleOptions {
    /// The policies of a job.
    pub(crate) fn policies(&self) -> Result<Policies, Failure> {
        let Self { on_exit, deadline, end_timeout, suspend } = self;
        let policies = Policies {
            on_exit: on_exit.clone(),
            deadline: *deadline,
            end_timeout: Some(*end_timeout),
            starts_suspended: *suspend,
            starts_core_together: false,
            starts_together: false,
        };
        policies.check().map_err(|error| Failure::usage(format!("--on-exit: {error}")))?;
        Ok(policies)
    }
}
