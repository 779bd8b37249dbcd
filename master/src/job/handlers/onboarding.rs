//! A worker from its hello until it can be a member: it describes the data set, if no other worker
//! has, builds its model, and fetches the group's state.

use std::net::SocketAddr;
use std::time::Duration;

use elasticdl_proto::{FileList, Generation, HostReport, OrderName, SkippedRecords, WorkerId};

use crate::job::action::{Action, MasterMessage, Outcome};
use crate::job::data::dataset::Dataset;
use crate::job::data::shard_leases::ShardLeases;
use crate::job::event::{ConnectionId, LaunchId, Resume};
use crate::job::job::Job;
use crate::job::outbox::Timer;
use crate::job::text::{clip, counted};
use crate::job::time::Time;
use crate::job::workers::state::{Launch, Stage, Worker};
use crate::job::workers::table::launch_of;

impl Job {
    pub(crate) fn on_connected(
        &mut self,
        now: Time,
        connection: ConnectionId,
        launch: LaunchId,
        address: SocketAddr,
        pid: u32,
        resume: Option<Resume>,
    ) {
        let is_over = self.lifecycle.is_ending();
        let refusal = match self.workers.get_launch(launch) {
            _ if is_over && resume.is_some() => Some("the job is over"),
            None => Some("this master knows no such launch, or it has ended"),
            // It ends in order, as those do that joined in time.
            Some(l) if is_over && !l.has_registered() => None,
            Some(l) if l.is_killed() => Some("this launch is not wanted any more"),
            Some(_) if resume.is_some() => None,
            Some(l) if l.has_registered() => Some("this launch has already registered"),
            Some(l) if !l.stays() => Some("this launch is not wanted any more"),
            Some(_) => None,
        };
        if let Some(reason) = refusal {
            return self.out.push(Action::Refuse { connection, reason: reason.into() });
        }
        if let Some(resume) = resume {
            return self.on_reconnected(now, connection, launch, address, pid, resume);
        }
        self.out.mark_dirty();
        self.out.cancel_timer(Timer::Hello(launch));
        let was_awaited = self.workers.get_disconnected(launch).is_some();
        let worker = self.workers.admit(now, launch, address, pid);
        self.reporting.lifetimes.connect(now, worker);
        self.watch_heartbeats(now);
        self.out.push(Action::Admit { connection, worker });
        if is_over {
            let reason = "the job is over".into();
            return self.send(worker, MasterMessage::Shutdown { reason, job_is_over: true });
        }
        // In a container every process has id 1, which identifies nothing.
        let process = if pid == 1 { String::new() } else { format!(" (process {pid})") };
        let role = if self.serves_tables(worker) { ", a table server," } else { "" };
        let name = self.workers.name_of(worker);
        self.log_event(format!("{name}{role} is up{process}"));
        if self.lifecycle.is_stopping() {
            return self.release(now, worker, "the job is stopping");
        }
        if self.lifecycle.is_suspended() {
            return self.release(now, worker, "the job is suspended");
        }
        self.check_host_of(worker);
        self.welcome(worker);
        if self.has_describer() && self.lifecycle.describing_since.is_none() {
            self.lifecycle.describing_since = Some(now);
            self.out.set_timer(now + DESCRIBE_TOLD, Timer::Describe);
        }
        if was_awaited {
            self.on_awaited_returned(now);
        }
    }

    /// Asks a worker that has joined to check its host, unless another one does or has.
    fn check_host_of(&mut self, worker: WorkerId) {
        let host = self.node_of(worker).to_owned();
        let is_connected = |other| self.workers.is_connected(other);
        if self.lifecycle.host_checks.ask(&host, worker, is_connected) {
            self.send(worker, MasterMessage::CheckHost);
        }
    }

    /// A worker has measured its host.
    pub(crate) fn on_host_checked(&mut self, now: Time, worker: WorkerId, report: HostReport) {
        let host = self.node_of(worker).to_owned();
        let line = format!("host {host}: {report}");
        if !self.lifecycle.host_checks.note(&host, report) {
            return;
        }
        self.log_event(clip(&line).to_owned());
        for (host, fault) in self.lifecycle.host_checks.take_faults() {
            self.log_event(format!("host {host} counts as faulty: {fault}"));
            self.note_fault_of(now, &host, &fault);
        }
    }

    /// Sends a new worker its first request.
    pub(crate) fn welcome(&mut self, worker: WorkerId) {
        let (stage, message) = match self.data.files() {
            Some(files) => (Stage::Preparing, MasterMessage::Prepare(files.clone())),
            None if !self.has_describer() => (Stage::Describing, MasterMessage::Describe),
            None => return,
        };
        if let Some(w) = self.workers.get_mut(worker) {
            w.set_stage(stage);
        }
        self.send(worker, message);
    }

    /// Whether a worker was asked to describe the data set.
    fn has_describer(&self) -> bool {
        self.workers.connected().any(|(_, w)| w.stage() == Stage::Describing)
    }

    /// Says that the data set is still being described, after ever longer times: a folder of many
    /// files on a slow disk would look like a hang.
    pub(crate) fn on_describe_due(&mut self, now: Time) {
        let describer = self.workers.connected().find(|(_, w)| w.stage() == Stage::Describing);
        let Some(since) = self.lifecycle.describing_since else { return };
        if self.data.files().is_some() || !self.lifecycle.is_running() {
            return;
        }
        let waited = now.since(since);
        self.out.set_timer(now + waited, Timer::Describe);
        if let Some((worker, _)) = describer {
            self.log_event(format!(
                "worker {worker} still lists the data's files and counts their records, after {} s",
                waited.as_secs()
            ));
        }
    }

    /// If the worker that was asked to describe the data set is gone, asks another one.
    pub(crate) fn reassign_describer(&mut self) {
        if self.data.files().is_some() || self.has_describer() {
            return;
        }
        let next = self
            .workers
            .connected()
            .find(|(_, w)| w.stage() == Stage::Joining && !w.is_released())
            .map(|(id, _)| id);
        if let Some(next) = next {
            self.welcome(next);
        }
    }

    /// Notes which records the data set does not contain. The worker describes the data set next.
    pub(crate) fn on_records_skipped(&mut self, worker: WorkerId, skipped: SkippedRecords) {
        let is_asked = self.workers.get(worker).is_some_and(|w| w.stage() == Stage::Describing);
        if !is_asked || self.data.files().is_some() {
            return;
        }
        let mut parts = Vec::new();
        if skipped.bad > 0 {
            parts.push(format!("{} that cannot be read", counted(skipped.bad, "record")));
        }
        if skipped.nulls > 0 {
            parts.push(format!("{} with nulls", counted(skipped.nulls, "record")));
        }
        if !parts.is_empty() {
            let first = skipped.first.first().map(|first| format!(", the first: {first}"));
            let line = format!("skipped {}{}", parts.join(" and "), first.unwrap_or_default());
            self.log_event(line);
        }
        if skipped.files > 0 {
            let (files, first) = (counted(skipped.files, "file"), &skipped.first_file);
            self.log_event(format!(
                "skipped {files} in the folder of the data, the first: {first}"
            ));
        }
        self.reporting.note_skipped(skipped);
    }

    pub(crate) fn on_described(
        &mut self,
        now: Time,
        worker: WorkerId,
        outcome: Result<FileList, String>,
        order: Option<OrderName>,
    ) {
        let is_asked = self.workers.get(worker).is_some_and(|w| w.stage() == Stage::Describing);
        if !is_asked || self.data.files().is_some() {
            return;
        }
        let described = outcome.and_then(|files| {
            let count = files.len() as u64;
            self.data.describe(files, order, &self.spec).map(|()| count)
        });
        let files = match described {
            Ok(files) => files,
            Err(error) => {
                let error = clip(&error).to_owned();
                return self.end(now, Outcome::InvalidInput, Some(error));
            }
        };
        let records = self.data.dataset().map_or(0, Dataset::records);
        let mut line =
            format!("data set: {} in {}", counted(records, "record"), counted(files, "file"));
        if let Some(shards) = self.data.shards().map(ShardLeases::shards) {
            line += &format!(", {} of {}", counted(shards.len().into(), "shard"), shards.sizes());
        }
        self.log_event(line);
        self.out.cancel_timer(Timer::Describe);
        self.out.mark_dirty_urgent();
        for worker in self.workers.select(|w| !w.is_released()) {
            self.welcome(worker);
        }
        self.launch_missing(now);
    }

    pub(crate) fn on_ready(&mut self, now: Time, worker: WorkerId, parameters: u64) {
        if self.workers.get(worker).is_none_or(|w| w.stage() != Stage::Preparing) {
            return;
        }
        if self.data.parameters().is_none() {
            self.out.mark_dirty();
        }
        let expected = self.data.expect_parameters(parameters);
        if parameters != expected {
            let reason =
                format!("its model has {parameters} parameters, the first worker's has {expected}");
            return self.fail_worker(now, worker, &reason);
        }
        let donors = if self.group.is_broken() { Vec::new() } else { self.donors(worker) };
        let w = self.workers.get_mut(worker).expect("it was just found");
        if donors.is_empty() {
            w.set_stage(Stage::Ready);
        } else {
            w.set_stage(Stage::Fetching);
            self.send_fetch(worker, donors);
        }
        self.reconcile(now);
    }

    pub(crate) fn on_caught_up(&mut self, now: Time, worker: WorkerId, step: Option<u64>) {
        let Some(w) = self.workers.get_mut(worker) else { return };
        if w.is_reserve() {
            self.group.note_left_ring(worker);
        } else if matches!(w.stage(), Stage::Fetching | Stage::Preparing | Stage::Ready) {
            // A worker that has reconnected reports again what it has.
            w.catch_up(step.is_some());
            w.follow_anew(step);
            self.reconcile(now);
            self.announce_spare(now, worker, step);
        }
    }

    /// The spares that can take a place at once: those that follow the state of the group, and with
    /// a sharded optimizer all that can be members.
    pub(crate) fn ready_spares(&self, now: Time) -> Vec<WorkerId> {
        if self.spec.spares == 0 || self.group.generation() == Generation::default() {
            return Vec::new();
        }
        let needs_none = self.spec.options.shard_optimizer;
        let is_ready = |w: &Worker| {
            w.stage() == Stage::Ready && (needs_none || (w.has_state() && !w.lags(now)))
        };
        self.workers.joiners().filter(|(_, w)| is_ready(w)).map(|(id, _)| id).collect()
    }

    /// Reports, once for each worker, that it is a spare that can take a place from now on.
    fn announce_spare(&mut self, now: Time, worker: WorkerId, step: Option<u64>) {
        if self.has_room() || !self.ready_spares(now).contains(&worker) {
            return;
        }
        let launch = self.workers.get_launch_mut(launch_of(worker));
        if launch.is_some_and(Launch::note_spare) {
            let name = self.workers.name_of(worker);
            self.log_event(match step {
                Some(step) => format!("{name} is a spare, and has caught up with step {step}"),
                None => format!("{name} is a spare, and gets the state when it joins"),
            });
        }
    }

    /// Whether the group has fewer members that stay than are wanted.
    pub(crate) fn has_room(&self) -> bool {
        let members = self.workers.members();
        let staying = members.filter(|(id, w)| w.stays() && !self.serves_tables(*id)).count();
        staying < self.lifecycle.wanted() as usize
    }
}

/// Time without a list of the data's files after which users are told.
const DESCRIBE_TOLD: Duration = Duration::from_secs(10);
