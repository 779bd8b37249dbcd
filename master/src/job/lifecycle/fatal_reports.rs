//! Fatal failures: errors of which a worker says that every other worker would meet them.
//!
//! A worker sees its own process and host alone, so what it says is evidence. Until the first group
//! has formed, it ends the job: nothing is lost, and an option is most likely wrong. Later it is a
//! counted failure, unless a worker on another host, or on the only host of the job, reports the
//! same error before the job has made progress. So a group whose members all fail alike ends the
//! job. As long as it makes progress, the other workers show that the error is not theirs.

use std::collections::BTreeSet;

use elasticdl_proto::WorkerId;

use crate::job::job::Job;
use crate::job::time::Time;
use crate::job::workers::table::launch_of;

/// The last fatal failures, the newest last.
#[derive(Debug, Default)]
pub(crate) struct FatalReports(Vec<FatalReport>);

/// A fatal failure.
#[derive(Debug)]
struct FatalReport {
    worker: WorkerId,
    error: String,
    /// Empty if it is not known.
    node: String,
    /// The job's progress.
    progress: u64,
}

impl Job {
    /// Whether `error`, which `worker` reports as fatal, ends the job; the error, with the worker
    /// that confirms it.
    pub(crate) fn confirm_fatal(&mut self, worker: WorkerId, error: &str) -> Option<String> {
        if !self.has_worked() {
            return Some(format!("worker {worker}: {error}"));
        }
        let report = FatalReport {
            worker,
            error: error.to_owned(),
            node: self.node_of(worker).to_owned(),
            progress: self.work_done(),
        };
        let reports = &self.lifecycle.fatal_reports.0;
        let here = self.workers.launches().map(|(_, l)| l.location().node.as_str());
        let nodes: BTreeSet<&str> = reports.iter().map(|r| r.node.as_str()).chain(here).collect();
        let is_one_host = nodes.len() <= 1;
        let first = reports.iter().find(|first| report.confirms(first, is_one_host));
        let confirmed = first
            .map(|first| format!("worker {worker}: {error} (as worker {} before)", first.worker));
        let reports = &mut self.lifecycle.fatal_reports.0;
        if reports.len() == REPORTS_KEPT {
            reports.remove(0);
        }
        reports.push(report);
        confirmed
    }

    /// Notes that a worker has failed on its node: replacements start elsewhere, if they can.
    pub(crate) fn avoid_node_of(&mut self, now: Time, worker: WorkerId) {
        let node = self.node_of(worker).to_owned();
        self.lifecycle.avoid_node(now, &node);
    }

    /// The node of a worker; empty if it is not known.
    fn node_of(&self, worker: WorkerId) -> &str {
        self.workers.get_launch(launch_of(worker)).map_or("", |l| &l.location().node)
    }

    /// Whether a group has formed, or a shard of an inference job is done: the program, its options
    /// and its data have worked once.
    fn has_worked(&self) -> bool {
        match self.spec.options.work.trains() {
            true => self.reporting.has_formed(),
            false => self.data.counted() > 0,
        }
    }
}

impl FatalReport {
    fn confirms(&self, first: &Self, is_one_host: bool) -> bool {
        let is_elsewhere = is_one_host || self.node != first.node;
        is_elsewhere && self.error == first.error && self.progress == first.progress
    }
}

/// Reports that are compared: more than a group of usual size has members.
const REPORTS_KEPT: usize = 64;
