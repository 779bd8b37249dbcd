//! Fatal failures: errors of which a worker says that every other worker would meet them.
//!
//! A worker sees its own process and host alone, so what it says is evidence. Until the first group
//! has formed, it ends the job: nothing is lost, and an option is most likely wrong. Later it is a
//! counted failure, unless a worker on another host, or on the only host of the job, reports the
//! same error before the job has made progress. So a group whose members all fail alike ends the
//! job. As long as it makes progress, the other workers show that the error is not theirs.

use std::collections::BTreeSet;

use elasticdl_proto::{AvoidedHost, WorkerId};

use super::bad_hosts::FORGOTTEN_AFTER;
use crate::job::event::LaunchId;
use crate::job::job::Job;
use crate::job::time::Time;
use crate::job::workers::table::{launch_of, worker_of};

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
            return Some(format!("{}: {error}", self.workers.name_of(worker)));
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
        let name = self.workers.name_of(worker);
        let confirmed =
            first.map(|first| format!("{name}: {error} (as worker {} before)", first.worker));
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

    /// Notes a fault of a worker on its node that is not the program's: what the worker did.
    pub(crate) fn note_fault_of_node(&mut self, now: Time, launch: LaunchId, did: &str) {
        let node = self.node_of(worker_of(launch)).to_owned();
        self.note_fault_of(now, &node, &format!("worker {} {did}", launch.0));
    }

    /// Notes a fault on a node, whose name may not be known, that is not the program's.
    pub(crate) fn note_fault_of(&mut self, now: Time, node: &str, what: &str) {
        self.out.mark_dirty();
        if self.lifecycle.bad_hosts.note(now, node, what)
            && let Some(AvoidedHost { host, why, .. }) =
                self.lifecycle.bad_hosts.avoided(now).last()
        {
            self.log_event(format!(
                "new workers avoid the host {host}, for up to {} h: {why}",
                FORGOTTEN_AFTER.as_secs() / 3600
            ));
        }
    }

    /// The nodes to which others are preferred.
    pub(crate) fn nodes_to_avoid(&self, now: Time) -> Vec<String> {
        let mut nodes: Vec<String> = self.hosts_avoided(now).into_iter().map(|a| a.host).collect();
        let recent =
            self.lifecycle.avoided_node(now).filter(|node| !nodes.iter().any(|n| n == node));
        nodes.extend(recent.map(str::to_owned));
        nodes
    }

    /// The hosts that are avoided for longer: those that the user names, and those that have had
    /// several faults.
    pub(crate) fn hosts_avoided(&self, now: Time) -> Vec<AvoidedHost> {
        let named = self.spec.avoid_hosts.iter();
        let named = named.map(|host| AvoidedHost {
            host: host.clone(),
            why: "--avoid-hosts".into(),
            for_s: None,
        });
        let bad = self.lifecycle.bad_hosts.avoided(now);
        named.chain(bad.filter(|bad| !self.spec.avoid_hosts.contains(&bad.host))).collect()
    }

    /// The node of a worker; empty if it is not known.
    pub(crate) fn node_of(&self, worker: WorkerId) -> &str {
        self.workers.get_launch(launch_of(worker)).map_or("", |l| &l.location().node)
    }

    /// Whether a group has formed, or a shard of an inference job is done: the program, its options
    /// and its data have worked once.
    pub(super) fn has_worked(&self) -> bool {
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
