//! The master's shell: streams, processes and the clock around the real [`Job`].

use std::time::Duration;

use elasticdl_master::job::{
    Action, ConnectionId, Event as JobEvent, Exit, Job, LaunchId, PersistedJob, Time,
};
use elasticdl_proto::{Location, WorkerId};

use super::clock::Micros;
use super::state::event::Event;
use super::state::master::Master;
use super::state::network::{LinkId, MASTER};
use super::state::packet::Packet;
use super::state::process::{Process, address_of};
use super::state::setting::{HOSTS, Setting};
use super::trace::trace;
use super::world::World;

impl World {
    pub(super) fn time(&self) -> Time {
        Time(Duration::from_micros(self.clock.now()))
    }

    pub(super) fn on_master_input(&mut self, link: LinkId) {
        if self.former_master.as_ref().is_some_and(|former| former.streams.contains(&link)) {
            return self.as_former_master(|world| world.on_master_input(link));
        }
        if !self.master.is_alive {
            return self.shut(link, MASTER);
        }
        self.master.inputs.push_back(link);
        self.wake_master();
    }

    pub(super) fn command(&mut self, event: JobEvent) {
        if !self.master.is_alive {
            return;
        }
        self.master.commands.push_back(event);
        self.wake_master();
    }

    pub(super) fn wake_master(&mut self) {
        if !std::mem::replace(&mut self.master.woken, true) {
            let delay = self.thread_delay();
            self.clock.after(delay, self.master.event());
        }
    }

    pub(super) fn on_reaped(&mut self, p: usize) {
        let Some(exit) = self.end_of_pod(p) else { return };
        let process = &self.processes[self.pod(p).start];
        if !self.master.is_alive || process.is_unknown {
            return;
        }
        // A process that another master started is not a child of this one: its exit is unknown.
        let is_unwaitable = process.is_adopted && !self.setting.may_restore_stale;
        let exit = if is_unwaitable { Exit::Unknown } else { exit };
        self.master.ended.push_back((process.launch, exit));
        self.wake_master();
    }

    pub(super) fn on_master_continued(&mut self) {
        self.master.paused = false;
        if std::mem::take(&mut self.master.deferred) {
            self.clock.after(1, Event::Master);
        }
        self.wake_former_master();
    }

    /// Runs the master's task until it is idle. Inputs that are ready are taken in random order, as
    /// `select!` does.
    pub(super) fn on_master(&mut self) {
        self.master.woken = false;
        while self.master.is_alive && self.master.outcome.is_none() {
            let is_due = self.master.job.poll_timeout().is_some_and(|at| at <= self.time());
            let ready = [
                !self.master.inputs.is_empty(),
                !self.master.ended.is_empty(),
                !self.master.commands.is_empty(),
                is_due,
            ];
            let ready: Vec<usize> = (0..ready.len()).filter(|&i| ready[i]).collect();
            let Some(one) = self.rng.pick(&ready) else { break };
            let now = self.time();
            match one {
                0 => self.take_input(),
                1 => {
                    if let Some((launch, exit)) = self.master.ended.pop_front() {
                        self.on_process_gone(launch);
                        self.master.job.handle(now, JobEvent::ProcessEnded { launch, exit });
                    }
                }
                2 => {
                    if let Some(command) = self.master.commands.pop_front() {
                        self.master.job.handle(now, command);
                    }
                }
                _ => self.master.job.handle_timeout(now),
            }
            self.master_acts();
            if !self.master.is_replaced {
                self.check_fencing();
            }
        }
        if !self.master.is_alive {
            return;
        }
        let due = self.master.job.poll_timeout().map(|at| at.0.as_nanos().div_ceil(1000) as Micros);
        if self.master.due != due {
            self.master.due = due;
            if let Some(at) = due {
                self.clock.at(at, self.master.event());
            }
        }
    }

    /// Kills the master; messages that it has sent are in flight.
    pub(super) fn crash_master(&mut self) {
        let master = &mut self.master;
        if !std::mem::replace(&mut master.is_alive, false) {
            return;
        }
        trace!(self, "master: is killed");
        if let Err(wrong) = self.check_failures() {
            self.violate(wrong);
        }
        let master = &mut self.master;
        (master.paused, master.deferred, master.dies_after) = (false, false, None);
        master.persists = true;
        master.peers.clear();
        master.workers.clear();
        master.inputs.clear();
        master.ended.clear();
        master.commands.clear();
        for link in self.streams_of_leader() {
            if self.rng.chance(1, 4) {
                self.lose_in_flight(link, MASTER);
            }
            self.shut(link, MASTER);
        }
        self.oracle.on_master_crash();
        self.fault_plan.links_may_break = true;
        self.processes.iter_mut().for_each(|process| process.lost_contact = true);
        self.restart_later();
    }

    /// Another master resumes from a persisted snapshot.
    pub(super) fn restart_master(&mut self) {
        let (version, mut record) = self.found_record();
        let mut orphans = Vec::new();
        let is_outdated = version != self.master.job.version();
        if self.setting.may_restore_stale {
            let per_pod = self.setting.spec.workers_per_pod as usize;
            let pods = (0..self.processes.len()).step_by(per_pod).filter(|&p| self.pod_lives(p));
            let first = |p: usize| (self.processes[p].launch, self.processes[p].index);
            orphans = record.observe_pods(&pods.map(first).collect());
        } else if is_outdated {
            // Started processes are noted in a file of their own.
            let noted = self.processes.iter().map(|process| process.launch).max();
            record.note_outdated(noted.unwrap_or(LaunchId(0)));
        }
        let launches: Vec<LaunchId> = record.launches().collect();
        self.note_resumed(is_outdated, &launches, record.data().is_some());
        trace!(self, "master: another one resumes the job");
        self.master.incarnation += 1;
        match Job::restore(record, self.time()) {
            Ok(job) => self.master.job = job,
            Err(wrong) => {
                return self.violate(format!("the master's snapshot is inconsistent: {wrong}"));
            }
        }
        let resumed = self.master.job.status(self.time()).generation;
        self.oracle.note_resumed(resumed);
        let master = &mut self.master;
        master.records = [(master.job.version(), master.job.to_persisted())].into();
        (master.is_alive, master.woken, master.due) = (true, false, None);
        for launch in launches {
            let p = self.process_of(launch);
            if let Some(p) = p {
                self.processes[p].is_adopted = true;
            }
            if p.is_none_or(|p| !self.pod_lives(p)) {
                self.master.ended.push_back((launch, Exit::Unknown));
            }
        }
        for launch in orphans {
            self.kill(launch);
        }
        self.master_acts();
        self.wake_master();
    }

    /// The snapshot that the next master resumes from.
    fn found_record(&mut self) -> (u64, PersistedJob) {
        let records = &self.master.records;
        let newest = records.len() - 1;
        let found = if self.setting.may_restore_stale && self.rng.chance(2, 3) {
            self.rng.below(records.len() as u64) as usize
        } else {
            newest
        };
        trace!(self, "master: its snapshot is {} versions old", newest - found);
        self.master.records[found].clone()
    }

    /// Persists the job if the next action requires it. Returns whether that action may be taken.
    fn persist(&mut self) -> bool {
        let Master { job, records, persists, .. } = &mut self.master;
        let newest = records.back().map_or(0, |(revision, _)| *revision);
        if !*persists {
            // A local master goes on without its file.
            return !self.setting.may_restore_stale || job.durable_before() <= newest;
        }
        if newest != job.version() {
            records.push_back((job.version(), job.to_persisted()));
        }
        while records.front().is_some_and(|(revision, _)| *revision < job.durable_before())
            || records.len() > RECORDS_MAX
        {
            records.pop_front();
        }
        true
    }

    fn take_input(&mut self) {
        let Some(link) = self.master.inputs.pop_front() else { return };
        let Some(packet) = self.net.take(link, MASTER) else { return };
        let now = self.time();
        match packet {
            Packet::Hello(launch, resume, incarnation) => {
                if incarnation > self.master.incarnation {
                    return self.on_newer_incarnation(link);
                }
                self.master.peers.insert(link, None);
                let Some(p) = self.process_of(launch) else { return };
                let (connection, pid) = (ConnectionId(link as u64), 1000 + p as u32);
                let location = self.location(p);
                if location != Location::default() {
                    self.master.job.handle(now, JobEvent::LaunchLocated { launch, location });
                }
                let event =
                    JobEvent::Connected { connection, launch, address: address_of(p), pid, resume };
                self.master.job.handle(now, event);
            }
            Packet::Up(message) => {
                if let Some(&Some(worker)) = self.master.peers.get(&link) {
                    if !self.master.is_replaced {
                        self.oracle.on_worker_message(worker, &message);
                    }
                    self.master.job.handle(now, JobEvent::Message { worker, message });
                }
            }
            Packet::End => {
                if let Some(worker) = self.master.peers.remove(&link) {
                    self.shut(link, MASTER);
                    if let Some(worker) = worker {
                        self.master.workers.remove(&worker);
                        if !self.master.is_replaced {
                            self.oracle.on_stream_end(worker);
                        }
                        self.master.job.handle(now, JobEvent::Disconnected { worker });
                    }
                }
            }
            other => self.violate(format!("the master got {other:?}")),
        }
    }

    /// Executes the actions of the job.
    pub(super) fn master_acts(&mut self) {
        self.forget_shutdown_sent();
        while self.master.is_alive {
            // The next action may need a snapshot to be durable first.
            if !self.persist() {
                self.master.has_waited = true;
                return;
            }
            match &mut self.master.dies_after {
                Some(0) => return self.crash_master(),
                Some(actions) => *actions -= 1,
                None => {}
            }
            let Some(action) = self.master.job.poll_action() else { return };
            self.actions += 1;
            match action {
                Action::Admit { connection, worker } => self.admit(connection.0 as LinkId, worker),
                Action::Disconnect { worker } => self.disconnect(worker),
                Action::End(outcome) => {
                    trace!(self, "master: the job has ended: {outcome:?}");
                    self.check_leads("ends the job");
                    self.master.outcome = Some(outcome);
                }
                Action::Kill { launch } => self.kill(launch),
                Action::Launch { launch, slot, avoid } => self.launch(launch, slot, avoid),
                Action::Refuse { connection, reason } => {
                    trace!(
                        self,
                        "{}: refuses connection {}: {reason}",
                        self.master.name(),
                        connection.0
                    );
                    self.check_refusal(connection.0 as LinkId, &reason);
                    self.master.peers.remove(&(connection.0 as LinkId));
                    self.send(connection.0 as LinkId, MASTER, Packet::Refused);
                    self.shut(connection.0 as LinkId, MASTER);
                }
                Action::Log(line) => trace!(self, "{}: {line}", self.master.name()),
                Action::Send { worker, message } => {
                    self.check_message(worker, &message);
                    if let Some(&link) = self.master.workers.get(&worker) {
                        self.send(link, MASTER, Packet::Down(message));
                    }
                }
            }
        }
    }

    fn admit(&mut self, link: LinkId, worker: WorkerId) {
        if let Some(p) = self.net.link(link).peer(MASTER).checked_sub(1) {
            let newest = self.oracle.newest.as_ref();
            let is_without = newest.is_some_and(|group| group.rank_of(worker).is_none());
            self.processes[p].returned_late = is_without;
            // A master with a stale snapshot takes the worker back; the worker has done no harm.
            if self.master.is_replaced {
                self.follow_former_master(p, worker);
            } else if self.oracle.on_admitted(worker, p) && !self.oracle.may_be_outdated {
                self.violate(format!("worker {worker} was lost, and is admitted"));
            }
        }
        // The stream may have ended while the job decided; its end is then in flight.
        if let Some(peer) = self.master.peers.get_mut(&link) {
            *peer = Some(worker);
            if let Some(dead) = self.master.workers.insert(worker, link) {
                self.master.peers.remove(&dead);
                self.shut(dead, MASTER);
            }
            self.send(link, MASTER, Packet::Welcome(worker, self.master.incarnation));
        }
    }

    fn disconnect(&mut self, worker: WorkerId) {
        if !self.master.is_replaced {
            self.check_eviction(worker);
            self.oracle.on_gone(worker);
        }
        if let Some(link) = self.master.workers.remove(&worker) {
            self.master.peers.remove(&link);
            self.shut(link, MASTER);
        }
    }

    fn launch(&mut self, launch: LaunchId, index: u32, avoid: Vec<String>) {
        if self.master.is_replaced {
            return;
        }
        trace!(self, "master: starts launch {}", launch.0);
        for i in 0..self.setting.spec.workers_per_pod {
            let p = self.processes.len();
            let launch = LaunchId(launch.0 + u64::from(i));
            let pod = p / self.setting.spec.workers_per_pod as usize;
            let host = [pod % HOSTS, (pod + 1) % HOSTS]
                .into_iter()
                .find(|host| !avoid.contains(&host.to_string()));
            self.processes.push(Process::new(launch, index + i));
            self.processes[p].host = host.unwrap_or(pod % HOSTS);
            if self.setting.bad_host.is_some() {
                self.command(JobEvent::LaunchLocated { launch, location: self.location(p) });
            }
            let delay = self.rng.between(500, 20_000);
            self.clock.after(delay, Event::Start { p });
        }
    }

    fn location(&self, p: usize) -> Location {
        let Setting { zones, bad_host, .. } = *self.setting;
        let zone = if zones > 1 { (p % zones).to_string() } else { String::new() };
        let node = bad_host.map(|_| self.processes[p].host.to_string()).unwrap_or_default();
        Location { zone, node, ..Location::default() }
    }

    fn kill(&mut self, launch: LaunchId) {
        let Some(p) = self.process_of(launch) else { return };
        let pod = self.pod(p);
        self.processes[pod.clone()].iter_mut().for_each(|process| process.is_kill_requested = true);
        for p in pod.clone() {
            if !self.master.is_replaced
                && let Some(worker) = self.processes[p].worker
                && self.oracle.on_killed(worker)
            {
                // A disconnected worker is evicted.
                let Process { is_degraded, lost_contact, .. } = self.processes[p];
                self.fault_plan.links_may_break |= is_degraded || lost_contact;
            }
        }
        let delay = if self.rng.chance(1, 4) {
            self.rng.below(self.setting.kill_us) + 50
        } else {
            self.rng.between(50, 2000)
        };
        trace!(self, "{}: kills {} in {delay} us", self.master.name(), self.name(p));
        pod.for_each(|p| self.clock.after(delay, Event::Die { p, signal: 9 }));
    }
}

/// Number of versions that a snapshot may be behind.
const RECORDS_MAX: usize = 24;
