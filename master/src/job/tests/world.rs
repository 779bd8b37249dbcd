//! A simulated world around a job: streams that are FIFO and delayed, processes that exit, hang and
//! leave, and a group that trains, breaks and recovers by the protocol. The oracles check the
//! events and actions of the job and know nothing of its implementation.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use elasticdl_proto::{Generation, RecordRange, WorkerId};
use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};

use super::super::*;
use super::ops::{Fault, Op};
use super::process::{Process, State};
use crate::job::testing::dataset;

/// The job, its processes, and the state of the oracles.
pub(super) struct World {
    pub(super) job: Job,
    pub(super) spec: JobSpec,
    /// The highest maximum so far: workers that leave may still be members.
    pub(super) max_workers_before: u32,
    pub(super) records: u64,
    pub(super) now: Time,
    pub(super) rng: ChaCha8Rng,
    /// Processes by launch; launch n is the nth.
    pub(super) processes: Vec<Process>,
    pub(super) log: Vec<String>,
    pub(super) ended: Option<Outcome>,
    pub(super) published: Vec<Membership>,
    /// Launches of each published membership, in ring order.
    pub(super) rings: Vec<Vec<LaunchId>>,
    pub(super) formed: BTreeSet<Generation>,
    pub(super) broken: BTreeSet<Generation>,
    /// Workers whose exit, failure or release the master knows.
    pub(super) gone: BTreeSet<WorkerId>,
    pub(super) excused: BTreeSet<WorkerId>,
    pub(super) finished: BTreeSet<(WorkerId, Generation)>,
    pub(super) counted: u32,
    /// Stalls that the current master has counted.
    pub(super) stalls: u64,
    pub(super) stopped: bool,
    pub(super) running: usize,
    /// The newest persisted job and its version.
    pub(super) written: (u64, PersistedJob),
    pub(super) dies_after: Option<usize>,
    pub(super) masters: u32,
}

impl World {
    pub(super) fn new(spec: JobSpec, records: u64, seed: u64) -> Self {
        let job = Job::new(spec.clone());
        let mut world = Self {
            written: (0, job.to_persisted()),
            dies_after: None,
            masters: 1,
            job,
            max_workers_before: spec.max_workers,
            spec,
            records,
            now: Time::default(),
            rng: ChaCha8Rng::seed_from_u64(seed),
            processes: Vec::new(),
            log: Vec::new(),
            ended: None,
            published: Vec::new(),
            rings: Vec::new(),
            formed: BTreeSet::new(),
            broken: BTreeSet::new(),
            gone: BTreeSet::new(),
            excused: BTreeSet::new(),
            finished: BTreeSet::new(),
            counted: 0,
            stalls: 0,
            stopped: false,
            running: 0,
        };
        world.drain_actions();
        world
    }

    /// Runs the world without further faults until the job ends or `until` holds.
    pub(super) fn run(&mut self, until: impl Fn(&Self) -> bool) {
        for _ in 0..20_000 {
            if self.ended.is_some() || until(self) {
                return;
            }
            self.turn();
        }
        panic!("the job does not end: {:#?}\n{:#?}", self.log.last_chunk::<30>(), self.processes);
    }

    /// Applies one possible event; advances the time if there is none.
    pub(super) fn turn(&mut self) {
        let ops = self.ops();
        let silent = |p: &&mut Process| {
            p.frozen && p.alive && p.worker.is_some() && !p.closed && !p.searching_for_master
        };
        if ops.is_empty()
            && (self.spec.options.worker_timeout.is_none() || self.rng.random())
            && let Some(p) = self.processes.iter_mut().find(silent)
        {
            // The keepalive finally detects a silent worker, even one without neighbours.
            p.close();
        } else if ops.is_empty()
            && self.spec.options.worker_timeout.is_none()
            && let Some(worker) = self.unnoticed_end()
        {
            self.gone.insert(worker);
            self.event(Event::Disconnected { worker });
        } else if ops.is_empty() {
            let due = self.job.poll_timeout();
            assert!(
                due.is_some(),
                "nothing can happen any more: {:#?}\n{:#?}",
                self.log,
                self.processes
            );
            self.wait();
        } else if self.rng.random_ratio(1, 200) {
            self.now = self.now + Duration::from_millis(300);
        } else {
            let op = ops[self.rng.random_range(0..ops.len())];
            self.now = self.now + Duration::from_micros(self.rng.random_range(0..1000));
            self.apply(op);
        }
        if self.ended.is_none() && self.job.poll_timeout().is_some_and(|t| t <= self.now) {
            self.heartbeat();
            self.job.handle_timeout(self.now);
            self.drain_actions();
        }
    }

    /// A silent worker whose stream broke, which the keepalive finally detects as well.
    fn unnoticed_end(&self) -> Option<WorkerId> {
        let mut silent =
            self.processes.iter().filter(|p| p.frozen && p.alive && p.searching_for_master);
        silent.find_map(|p| p.worker.filter(|&worker| self.job.workers.is_connected(worker)))
    }

    /// Advances the time to the job's next timeout.
    pub(super) fn wait(&mut self) {
        let Some(due) = self.job.poll_timeout() else {
            return;
        };
        self.now = self.now.max(due);
        self.heartbeat();
        self.job.handle_timeout(self.now);
        self.drain_actions();
    }

    pub(super) fn event(&mut self, event: Event) {
        self.job.handle(self.now, event);
        self.drain_actions();
    }

    pub(super) fn fault(&mut self, fault: Fault) {
        match fault {
            Fault::Exit(launch, exit) => self.die(launch, exit),
            Fault::Fail(launch) => {
                let state = self.at(launch).state.clone();
                let ranges = state.map(|state| self.window(&state)).into_iter().collect();
                let p = self.at(launch);
                p.up.push_back(WorkerMessage::Failed {
                    error: "user's error".into(),
                    ranges,
                    fatal: false,
                    exported: false,
                });
                p.die(Exit::Code(1));
            }
            Fault::Partition(launch) => self.at(launch).partitioned = true,
            Fault::Freeze(launch) => self.at(launch).frozen = true,
            Fault::Glitch(launch) => {
                let p = self.at(launch);
                if let Some(generation) = p.ring {
                    p.leave_ring(generation, None);
                }
            }
            Fault::Leave(launch) => {
                let p = self.at(launch);
                if p.worker.is_some() && !p.leaving {
                    p.leaving = true;
                    p.up.push_back(WorkerMessage::Leaving);
                }
            }
            Fault::MasterDies(None) => self.replace_master(),
            Fault::MasterDies(after) => self.dies_after = after,
            Fault::Reset(launch) => self.reset(launch),
            Fault::Scale(change) => {
                let scaled = self.job.spec().scaled(self.job.lifecycle.wanted(), change);
                if let Some(scaled) = scaled.ok().filter(|_| self.job.lifecycle.is_running()) {
                    self.spec.min_workers = scaled.min_workers;
                    self.max_workers_before = self.max_workers_before.max(self.spec.max_workers);
                    self.spec.max_workers = scaled.max_workers;
                }
                self.event(Event::Scale(change));
            }
            Fault::Stop => {
                self.stopped = true;
                self.event(Event::Stop);
            }
        }
    }

    /// Running processes that faults may affect, oldest first.
    pub(super) fn victims(&self) -> Vec<LaunchId> {
        self.numbered().filter(|(_, p)| p.alive && !p.frozen).map(|(id, _)| id).collect()
    }

    // ---- possible events ----

    pub(super) fn ops(&self) -> Vec<Op> {
        let mut ops = Vec::new();
        let mut rings = BTreeSet::new();
        for (id, p) in self.numbered() {
            let acts = p.alive && !p.frozen;
            if acts && !p.sent_hello {
                ops.push(Op::Hello(id));
            }
            if acts && p.searching_for_master {
                ops.push(Op::Return(id));
            }
            let open = p.worker.is_some() && !p.searching_for_master && !p.reconnected;
            if open && !p.end_seen && (!p.up.is_empty() || p.closed) {
                ops.push(Op::Up(id));
            }
            if !p.alive && p.exit.is_some() {
                ops.push(Op::Reap(id));
            }
            if acts && (!p.down.is_empty() || p.reconnected) {
                ops.push(Op::Down(id));
            }
            if acts
                && p.half_committed.is_some()
                && !p.ring.is_some_and(|ring| self.is_unreachable_from_previous(p, ring))
            {
                ops.push(Op::Complete(id));
            }
            if acts && self.dials_in_vain(p) {
                ops.push(Op::Unanswered(id));
            }
            if acts && self.sees_break(p) {
                ops.push(Op::Break(id));
            }
            rings.extend(p.ring.filter(|_| acts));
        }
        for ring in rings {
            ops.extend(self.ring_ops(ring));
        }
        if let Some(newest) = self.published.last()
            && self.can_form(newest)
        {
            ops.push(Op::Form(newest.generation));
        }
        ops
    }

    fn ring_ops(&self, ring: Generation) -> Vec<Op> {
        let members = self.members(ring);
        let first = members.clone().next().expect("no group is empty");
        let intact = members
            .clone()
            .all(|p| p.alive && !p.frozen && p.ring == Some(ring) && p.half_committed.is_none());
        let Some(state) = first.state.as_ref().filter(|_| intact && !self.is_severed(ring)) else {
            return Vec::new();
        };
        if members.clone().any(|p| p.state.as_ref().map(|s| s.step) != Some(state.step)) {
            return Vec::new();
        }
        let mut ops = Vec::new();
        if members.clone().all(|p| p.newest.as_ref().is_some_and(|m| m.generation > ring)) {
            ops.push(Op::Switch(ring));
        }
        let over = state.ledger.epoch() == self.spec.options.epochs
            || self.spec.options.max_steps.is_some_and(|max| state.step >= max)
            || members.clone().any(|p| p.drained);
        if over {
            if first.finished != Some(ring) {
                ops.push(Op::Finish(ring));
            }
        } else {
            ops.push(Op::Step(ring));
        }
        ops
    }

    fn can_form(&self, membership: &Membership) -> bool {
        let members = self.members(membership.generation);
        !self.is_severed(membership.generation)
            && members.clone().all(|p| {
                let knows =
                    p.newest.as_ref().is_some_and(|m| m.generation == membership.generation);
                p.alive
                    && !p.frozen
                    && p.ring.is_none()
                    && knows
                    && p.broke != Some(membership.generation)
            })
    }

    /// Whether a member detects that another member is dead, silent, or has left this ring.
    fn sees_break(&self, p: &Process) -> bool {
        if p.half_committed.is_some() {
            return false;
        }
        match (p.ring, &p.newest) {
            (Some(ring), _) => {
                let there = |q: &Process| q.alive && !q.frozen && q.ring == Some(ring);
                self.members(ring).any(|q| !there(q))
            }
            (None, Some(newest)) if p.broke != Some(newest.generation) && p.is_of_newest() => {
                let members = self.members(newest.generation);
                members.clone().any(|q| !q.alive || q.frozen || q.broke == Some(newest.generation))
            }
            _ => false,
        }
    }

    pub(super) fn members(&self, generation: Generation) -> impl Iterator<Item = &Process> + Clone {
        self.launches_of(generation).iter().map(|&launch| &self.processes[index(launch)])
    }

    /// The launches of a membership in ring order. Generations grow by one.
    pub(super) fn launches_of(&self, generation: Generation) -> &[LaunchId] {
        &self.rings[generation.0 as usize - 1]
    }

    pub(super) fn numbered(&self) -> impl Iterator<Item = (LaunchId, &Process)> {
        (1..).map(LaunchId).zip(&self.processes)
    }

    pub(super) fn at(&mut self, launch: LaunchId) -> &mut Process {
        &mut self.processes[index(launch)]
    }

    pub(super) fn batch(&self) -> u64 {
        match self.spec.options.batch {
            Batch::Global(records) => records.get(),
            Batch::PerWorker(_) => unreachable!("the model group has a global batch"),
        }
    }

    /// The records of the step that follows `state`.
    pub(super) fn window(&self, state: &State) -> RecordRange {
        let epoch = state.ledger.epoch();
        let start = self.records - state.ledger.remaining(epoch);
        RecordRange { epoch, start, end: self.records.min(start + self.batch()) }
    }

    // ---- effects of events ----

    pub(super) fn apply(&mut self, op: Op) {
        match op {
            Op::Break(id) => self.see_break(id),
            Op::Complete(id) => {
                let p = self.at(id);
                let state = p.half_committed.take().unwrap();
                self.commit(id, state);
            }
            Op::Down(id) => self.deliver_down(id),
            Op::Finish(ring) => self.finish(ring),
            Op::Form(generation) => self.form(generation),
            Op::Hello(id) => {
                let p = self.at(id);
                p.sent_hello = true;
                let address = SocketAddr::from(([127, 0, 0, 1], 1000 + id.0 as u16));
                let pid = id.0 as u32;
                let connection = ConnectionId(id.0);
                self.event(Event::Connected { connection, launch: id, address, pid, resume: None });
            }
            Op::Reap(id) => self.reap(id),
            Op::Return(id) => {
                let p = self.at(id);
                let (worker, membership) = (p.worker.unwrap(), p.known_membership());
                let parameters = p.prepared.then_some(10);
                let resume = Some(Resume { worker, membership, parameters, holds_state: false });
                let address = SocketAddr::from(([127, 0, 0, 1], 1000 + id.0 as u16));
                let (connection, pid) = (ConnectionId(id.0), id.0 as u32);
                self.event(Event::Connected { connection, launch: id, address, pid, resume });
            }
            Op::Step(ring) => self.step(ring),
            Op::Switch(ring) => {
                for id in self.launches_of(ring).to_vec() {
                    let p = self.at(id);
                    p.ring = None;
                    p.stand_by_if_excluded();
                }
            }
            Op::Unanswered(id) => self.report_unanswered_dial(id),
            Op::Up(id) => self.deliver_up(id),
        }
    }

    // ---- streams and processes ----

    fn deliver_down(&mut self, id: LaunchId) {
        let records = self.records;
        let p = self.at(id);
        if p.reconnected && p.old == 0 {
            let ring = p.ring;
            let speaks = ring.is_some_and(|ring| self.launches_of(ring)[0] == id);
            return self.at(id).reconnect(speaks);
        }
        p.old = p.old.saturating_sub(1);
        match p.down.pop_front().unwrap() {
            MasterMessage::Describe => {
                p.up.push_back(WorkerMessage::Described(Ok(dataset(&[records])), None))
            }
            MasterMessage::Drain => p.drained = true,
            MasterMessage::Inspect { .. }
            | MasterMessage::Joiners(_)
            | MasterMessage::KeepCheckpoint
            | MasterMessage::CheckHost
            | MasterMessage::ReportStacks => {}
            MasterMessage::Lease(_) => panic!("a group needs no leases"),
            MasterMessage::GiveUp | MasterMessage::Suspend => {
                panic!("there is no place for checkpoints")
            }
            MasterMessage::Fetch(donors) => {
                let reached = |p: &Process| {
                    donors.iter().any(|(w, _)| p.worker == Some(*w)) && !p.partitioned
                };
                if !self.processes[index(id)].partitioned && self.processes.iter().any(reached) {
                    self.at(id).up.push_back(WorkerMessage::CaughtUp { step: None });
                }
            }
            MasterMessage::Membership(membership) => {
                // A worker that has finished waits for no other one.
                if membership.abort || (p.ring.is_some() && p.finished == p.ring) {
                    p.ring = None;
                    p.half_committed = None;
                }
                p.newest = Some(membership);
                if p.ring.is_none() {
                    p.stand_by_if_excluded();
                }
            }
            MasterMessage::Prepare(_) => {
                p.prepared = true;
                p.up.push_back(WorkerMessage::Ready { parameters: 10 });
            }
            MasterMessage::Shutdown { .. } => p.die(Exit::Code(0)),
        }
    }

    fn deliver_up(&mut self, id: LaunchId) {
        let p = &mut self.processes[index(id)];
        let worker = p.worker.unwrap();
        let Some(message) = p.up.pop_front() else {
            p.end_seen = true;
            self.gone.insert(worker);
            let newest = self.published.last().map(|m| m.generation);
            if newest.is_some_and(|generation| self.finished.contains(&(worker, generation))) {
                self.excused.insert(worker);
            }
            return self.event(Event::Disconnected { worker });
        };
        let accepted = !self.gone.contains(&worker);
        let newest = self.published.last().map(|m| (m.generation, m.members[0].0));
        match &message {
            WorkerMessage::Formed { generation, .. }
                if accepted && newest == Some((*generation, worker)) =>
            {
                self.formed.insert(*generation);
            }
            WorkerMessage::Broken { generation, .. } if accepted => {
                self.broken.insert(*generation);
            }
            WorkerMessage::Finished(word) if accepted => {
                self.finished.insert((worker, word.generation));
            }
            WorkerMessage::Failed { .. } if accepted => {
                self.gone.insert(worker);
                self.excused.insert(worker);
                self.counted += u32::from(self.job.lifecycle.is_running());
            }
            WorkerMessage::Leaving if accepted => {
                self.excused.insert(worker);
            }
            _ => {}
        }
        self.event(Event::Message { worker, message });
    }

    /// A suffix of the messages in flight in either direction is lost.
    fn reset(&mut self, id: LaunchId) {
        let p = &self.processes[index(id)];
        let is_open =
            p.alive && p.worker.is_some() && !p.closed && !p.searching_for_master && !p.reconnected;
        if !is_open {
            return;
        }
        for _ in 0..self.rng.random_range(0..=self.processes[index(id)].up.len()) {
            if self.ended.is_none() && !self.processes[index(id)].up.is_empty() {
                self.deliver_up(id);
            }
        }
        let p = &mut self.processes[index(id)];
        if !p.alive || self.ended.is_some() {
            return;
        }
        let arrived = self.rng.random_range(0..=p.down.len());
        let (was_orphan, worker) = (p.orphan, p.worker);
        p.lose_master(arrived);
        p.orphan = was_orphan;
        if let Some(worker) = worker.filter(|_| self.rng.random()) {
            self.gone.insert(worker);
            self.event(Event::Disconnected { worker });
        }
    }

    fn reap(&mut self, id: LaunchId) {
        let p = &mut self.processes[index(id)];
        let exit = p.exit.take().map(|exit| if p.orphan { Exit::Unknown } else { exit }).unwrap();
        let newest = self.published.last().map(|m| m.generation);
        let done = p.worker.zip(newest).is_some_and(|key| self.finished.contains(&key));
        let excused =
            done || p.silent_for_long || p.worker.is_some_and(|w| self.excused.contains(&w));
        // A member that is retired by a scale-down is excused before it is notified, which is not
        // visible from outside.
        let retired = self.job.workers.get_launch(id).unwrap().is_retired();
        let own = match exit {
            // The worker may have been refused, but was never admitted.
            Exit::Code(70) => p.worker.is_none(),
            Exit::Code(143) => false,
            Exit::Code(_) | Exit::NotStarted(_) | Exit::OverLimit(_) => true,
            Exit::Signal(signal) => ![1, 2, 9, 15].contains(&signal),
            Exit::Reclaimed { .. } | Exit::Unknown => false,
        };
        let alive = self.job.lifecycle.is_running();
        self.counted += u32::from(own && !excused && !retired && alive);
        self.running -= 1;
        self.gone.extend(p.worker);
        self.event(Event::ProcessEnded { launch: id, exit });
    }

    /// The master dies, and a successor resumes from the persisted job.
    pub(super) fn replace_master(&mut self) {
        self.dies_after = None;
        self.masters += 1;
        self.log.push(format!("---- master {} ----", self.masters));
        for p in &mut self.processes {
            let arrived = self.rng.random_range(0..=p.down.len());
            p.lose_master(arrived);
        }
        // Final reports to the former master must be repeated to its successor.
        self.finished.clear();
        let record = super::persisted::read_back(&self.written.1);
        self.job = Job::restore(record, self.now).unwrap();
        self.written = (0, self.job.to_persisted());
        self.stalls = 0;
        self.drain_actions();
    }

    pub(super) fn die(&mut self, id: LaunchId, exit: Exit) {
        let p = &mut self.processes[index(id)];
        // Messages in flight may or may not arrive.
        let arrives = self.rng.random_range(0..=p.up.len());
        p.up.truncate(arrives);
        p.die(exit);
    }
}

pub(super) fn index(launch: LaunchId) -> usize {
    launch.0 as usize - 1
}
