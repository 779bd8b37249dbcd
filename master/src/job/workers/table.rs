//! The worker table: launches (started processes) and the workers connected from them.
//!
//! A launch becomes at most one worker, which has its number. So no worker id is used twice, by any
//! master.
//!
//! **Invariant:** messages go only to connected workers. A launch stays until its process has
//! ended.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::ops::Range;
use std::time::Duration;

use elasticdl_proto::WorkerId;

use super::scheduling::Scheduling;
use super::state::{Disconnected, LastKnown, Launch, LaunchState, Stage, Worker};
use crate::job::event::LaunchId;
use crate::job::time::Time;

/// Launches and connected workers.
#[derive(Debug)]
pub(crate) struct WorkerTable {
    pub(super) workers_per_pod: u32,
    /// Slots of table servers, all after those of the others.
    server_slots: Range<u32>,
    pub(super) launches: BTreeMap<LaunchId, Launch>,
    launches_made: u64,
    /// Whether all workers were silent for longer than the worker timeout at the last check.
    is_cut_off: bool,
}

/// The launch of a worker.
pub(crate) fn launch_of(worker: WorkerId) -> LaunchId {
    LaunchId(worker.0)
}

/// The worker of a launch, once it has one.
pub(crate) fn worker_of(launch: LaunchId) -> WorkerId {
    WorkerId(launch.0)
}

impl WorkerTable {
    pub(crate) fn new(workers_per_pod: u32, server_slots: Range<u32>) -> Self {
        let launches = BTreeMap::new();
        Self { workers_per_pod, server_slots, launches, launches_made: 0, is_cut_off: false }
    }

    // ---- launches ----

    /// Adds the launches of a new pod, in consecutive free slots from this one on. Returns the
    /// first.
    pub(crate) fn launch(&mut self, slot: u32) -> LaunchId {
        let first = LaunchId(self.launches_made + 1);
        for slot in (slot..).take(self.workers_per_pod as usize) {
            self.launches_made += 1;
            self.launches.insert(LaunchId(self.launches_made), Launch::new(slot));
        }
        first
    }

    /// Adds a launch that an earlier master made.
    pub(crate) fn restore(&mut self, id: LaunchId, launch: Launch) {
        self.launches.insert(id, launch);
    }

    /// Number of the last launch that any master has made.
    pub(crate) fn launches_made(&self) -> u64 {
        self.launches_made
    }

    /// Notes that a launch of this number may exist: no pod gets it again.
    pub(crate) fn raise_launches_made(&mut self, newest: u64) {
        let newest = newest.next_multiple_of(u64::from(self.workers_per_pod));
        self.launches_made = self.launches_made.max(newest);
    }

    /// Drops launches whose processes have ended.
    pub(crate) fn drop_ended(&mut self, launches: &[LaunchId]) -> Vec<Launch> {
        launches.iter().filter_map(|launch| self.launches.remove(launch)).collect()
    }

    /// All launches, by id.
    pub(crate) fn launches(&self) -> impl Iterator<Item = (LaunchId, &Launch)> {
        self.launches.iter().map(|(&id, launch)| (id, launch))
    }

    pub(crate) fn has_launches(&self) -> bool {
        !self.launches.is_empty()
    }

    pub(crate) fn get_launch(&self, launch: LaunchId) -> Option<&Launch> {
        self.launches.get(&launch)
    }

    pub(crate) fn get_launch_mut(&mut self, launch: LaunchId) -> Option<&mut Launch> {
        self.launches.get_mut(&launch)
    }

    /// The first slots of all free pods, lowest first, without end.
    pub(crate) fn free_slots(&self) -> impl Iterator<Item = u32> + use<> {
        let per_pod = self.workers_per_pod;
        let staying = self.launches.values().filter(|l| l.stays());
        let taken: BTreeSet<u32> = staying.map(|l| l.slot / per_pod * per_pod).collect();
        (0..).step_by(per_pod as usize).filter(move |slot| !taken.contains(slot))
    }

    /// The first slots of the pods of table servers that may be started, lowest first.
    pub(crate) fn free_server_slots(&self) -> Vec<u32> {
        let Range { start, end } = self.server_slots;
        let running = self.pods().filter(|id| self.serves_tables(*id)).count();
        let missing = ((end - start) / self.workers_per_pod) as usize;
        let free = self.free_slots().skip_while(|slot| *slot < start);
        free.take(missing.saturating_sub(running)).collect()
    }

    /// Whether a launch is that of a table server.
    pub(crate) fn serves_tables(&self, launch: LaunchId) -> bool {
        self.launches.get(&launch).is_some_and(|l| self.server_slots.contains(&l.slot))
    }

    /// Pods of workers from slot `from` on that are not scheduled yet, lowest slot first.
    pub(crate) fn unscheduled(&self, from: u32) -> Vec<LaunchId> {
        let lacks = |id: &LaunchId| {
            let l = &self.launches[id];
            l.stays()
                && l.slot >= from
                && !self.serves_tables(*id)
                && !self.any_of_pod(*id, Launch::has_registered)
                && l.scheduling() != Scheduling::Scheduled
        };
        let mut unscheduled: Vec<_> =
            self.pods().filter(lacks).map(|id| (self.launches[&id].slot, id)).collect();
        unscheduled.sort_unstable();
        unscheduled.into_iter().map(|(_, id)| id).collect()
    }

    /// Number of pods that keep their slots and are scheduled.
    pub(crate) fn scheduled(&self) -> usize {
        self.staying().filter(|&id| self.any_of_pod(id, is_placed)).count()
    }

    /// Number of workers that keep their slots and are scheduled, without table servers.
    pub(crate) fn placed_workers(&self) -> u32 {
        let placed = self.staying_workers().filter(|&id| self.any_of_pod(id, is_placed));
        placed.map(|_| self.workers_per_pod).sum()
    }

    /// Number of pods that may be added so that `wanted` workers stay and at most `max` processes
    /// run, without table servers.
    pub(crate) fn vacancies(&self, wanted: u32, max: u32) -> usize {
        let wanted = wanted.div_ceil(self.workers_per_pod) as usize;
        let max = (max / self.workers_per_pod) as usize;
        let pods = self.pods().filter(|id| !self.serves_tables(*id)).count();
        wanted.saturating_sub(self.staying_workers().count()).min(max.saturating_sub(pods))
    }

    /// The surplus pods when only `wanted` workers stay, without table servers: first pods without
    /// a worker, then with `keeps_spares` those of members, then the others, each from the highest
    /// slot down.
    pub(crate) fn surplus(&self, wanted: u32, keeps_spares: bool) -> Vec<LaunchId> {
        let is_member = |l: &Launch| l.worker().is_some_and(Worker::is_member);
        let cost = |id: LaunchId| {
            let has_worker = self.any_of_pod(id, Launch::has_registered);
            let is_spare = keeps_spares && !self.any_of_pod(id, is_member);
            (has_worker, is_spare, std::cmp::Reverse((self.launches[&id].slot, id)), id)
        };
        let mut staying: Vec<_> = self.staying_workers().map(cost).collect();
        staying.sort_unstable();
        let kept = wanted.div_ceil(self.workers_per_pod) as usize;
        let surplus = staying.len().saturating_sub(kept);
        staying.into_iter().take(surplus).map(|(.., id)| id).collect()
    }

    /// The pods that keep their slots.
    fn staying(&self) -> impl Iterator<Item = LaunchId> + '_ {
        self.pods().filter(|&id| self.any_of_pod(id, Launch::stays))
    }

    /// Those of them that are no table servers.
    fn staying_workers(&self) -> impl Iterator<Item = LaunchId> + '_ {
        self.staying().filter(|id| !self.serves_tables(*id))
    }

    // ---- workers ----

    /// A connected worker.
    pub(crate) fn get(&self, worker: WorkerId) -> Option<&Worker> {
        self.launches.get(&launch_of(worker))?.worker()
    }

    pub(crate) fn get_mut(&mut self, worker: WorkerId) -> Option<&mut Worker> {
        self.launches.get_mut(&launch_of(worker))?.worker_mut()
    }

    pub(crate) fn is_connected(&self, worker: WorkerId) -> bool {
        self.get(worker).is_some()
    }

    pub(crate) fn is_member(&self, worker: WorkerId) -> bool {
        self.get(worker).is_some_and(Worker::is_member)
    }

    /// Connected workers, by id.
    pub(crate) fn connected(&self) -> impl Iterator<Item = (WorkerId, &Worker)> {
        self.launches.iter().filter_map(|(&id, l)| Some((worker_of(id), l.worker()?)))
    }

    pub(crate) fn connected_mut(&mut self) -> impl Iterator<Item = (WorkerId, &mut Worker)> {
        self.launches.iter_mut().filter_map(|(&id, l)| Some((worker_of(id), l.worker_mut()?)))
    }

    /// The connected workers for which `is` holds, by id.
    pub(crate) fn select(&self, is: impl Fn(&Worker) -> bool) -> Vec<WorkerId> {
        self.connected().filter(|(_, w)| is(w)).map(|(id, _)| id).collect()
    }

    /// Members of the newest generation, by id.
    pub(crate) fn members(&self) -> impl Iterator<Item = (WorkerId, &Worker)> {
        self.connected().filter(|(_, w)| w.is_member())
    }

    pub(crate) fn has_members(&self) -> bool {
        self.members().next().is_some()
    }

    /// Workers that can be members and are not, oldest first: the joiners.
    pub(crate) fn joiners(&self) -> impl Iterator<Item = (WorkerId, &Worker)> {
        self.connected().filter(|(_, w)| w.is_joiner())
    }

    /// Workers without which a membership was published, and whose state may still be needed.
    pub(crate) fn reserve(&self) -> impl Iterator<Item = (WorkerId, &Worker)> {
        self.connected().filter(|(_, w)| w.is_reserve())
    }

    /// Whether all workers had been silent for longer than `timeout` at the last call, and one is
    /// heard again.
    pub(crate) fn was_cut_off(&mut self, now: Time, timeout: Duration) -> bool {
        let last = self.connected().map(|(_, w)| w.heard()).max().unwrap_or_default();
        let is_cut_off = now.since(last) > timeout;
        std::mem::replace(&mut self.is_cut_off, is_cut_off) && !is_cut_off
    }

    /// Adds the worker of `launch`.
    pub(crate) fn admit(
        &mut self,
        now: Time,
        launch: LaunchId,
        address: SocketAddr,
        pid: u32,
    ) -> WorkerId {
        if let Some(launch) = self.launches.get_mut(&launch) {
            launch.state = LaunchState::Connected(Box::new(Worker::new(now, address, pid)));
        }
        worker_of(launch)
    }

    /// Marks a worker as disconnected at `now`; it may reconnect. Returns whether it was connected.
    pub(crate) fn disconnect(&mut self, now: Time, worker: WorkerId) -> bool {
        let Some(launch) = self.launches.get_mut(&launch_of(worker)) else { return false };
        let Some(w) = launch.worker() else { return false };
        launch.state = LaunchState::Disconnected(w.disconnected(now));
        true
    }

    /// Adds a disconnected worker again: its new stream is open.
    pub(crate) fn readmit(
        &mut self,
        now: Time,
        launch: LaunchId,
        address: SocketAddr,
        pid: u32,
    ) -> Option<WorkerId> {
        let l = self.launches.get_mut(&launch)?;
        let disconnected = l.disconnected()?;
        let worker = Worker::reconnected(now, address, pid, disconnected, l.is_retired());
        l.state = LaunchState::Connected(Box::new(worker));
        Some(worker_of(launch))
    }

    /// Forgets a connected worker. Its launch stays.
    pub(crate) fn forget(&mut self, worker: WorkerId) -> Option<Worker> {
        let launch = self.launches.get_mut(&launch_of(worker))?;
        launch.worker()?;
        match std::mem::replace(&mut launch.state, LaunchState::Forgotten) {
            LaunchState::Connected(worker) => Some(*worker),
            _ => None,
        }
    }

    // ---- disconnected workers ----

    /// Launches whose workers are disconnected and may reconnect.
    pub(crate) fn disconnected(&self) -> impl Iterator<Item = (LaunchId, &Disconnected)> {
        self.launches.iter().filter_map(|(&id, l)| Some((id, l.disconnected()?)))
    }

    pub(crate) fn has_disconnected(&self) -> bool {
        self.disconnected().next().is_some()
    }

    /// Disconnected members of the newest generation.
    pub(crate) fn disconnected_members(&self) -> impl Iterator<Item = WorkerId> + '_ {
        self.disconnected().filter(|(_, d)| d.rank.is_some()).map(|(id, _)| worker_of(id))
    }

    pub(crate) fn has_disconnected_members(&self) -> bool {
        self.disconnected_members().next().is_some()
    }

    pub(crate) fn get_disconnected(&self, launch: LaunchId) -> Option<Disconnected> {
        self.launches.get(&launch)?.disconnected().copied()
    }

    /// Notes of a disconnected worker that only an earlier master knew that it was no member yet.
    pub(crate) fn note_joiner(&mut self, launch: LaunchId) {
        let disconnected = self.launches.get_mut(&launch).and_then(Launch::disconnected_mut);
        if let Some(d) = disconnected.filter(|d| d.rank.is_none()) {
            d.last_known.get_or_insert(LastKnown {
                stage: Stage::Preparing,
                leaving: false,
                usual_us: None,
            });
        }
    }

    /// Forgets a disconnected worker, which does not reconnect. Its launch stays.
    pub(crate) fn forget_disconnected(&mut self, launch: LaunchId) -> Option<Disconnected> {
        self.launches.get_mut(&launch)?.forget_disconnected()
    }

    // ---- the group ----

    /// Makes the workers members with the ranks that `rank_of` gives. Returns the connected ones
    /// that are no members any more.
    pub(crate) fn assign_ranks(
        &mut self,
        rank_of: impl Fn(WorkerId) -> Option<u32>,
    ) -> Vec<WorkerId> {
        let mut excluded = Vec::new();
        for (id, w) in self.connected_mut() {
            let rank = rank_of(id);
            if w.is_member() && rank.is_none() {
                excluded.push(id);
            }
            w.set_rank(rank);
        }
        excluded
    }

    /// As [`WorkerTable::assign_ranks`], for disconnected workers.
    pub(crate) fn assign_ranks_of_disconnected(
        &mut self,
        rank_of: impl Fn(WorkerId) -> Option<u32>,
    ) {
        for (&id, launch) in &mut self.launches {
            if let Some(disconnected) = launch.disconnected_mut() {
                disconnected.rank = rank_of(worker_of(id));
            }
        }
    }

    /// Notes that the group has formed, by the report of `reporter`. Members that have a state send
    /// it to those that have none, which may not have received it yet.
    pub(crate) fn form(&mut self, reporter: WorkerId) {
        let is_sent = self.members().any(|(_, w)| w.has_state())
            || self.disconnected().any(|(_, d)| d.holds_state && d.rank.is_some());
        if !is_sent {
            self.hold_state();
            return;
        }
        for (id, w) in self.connected_mut().filter(|(_, w)| w.is_member()) {
            if id == reporter || w.has_state() {
                w.hold_state();
            }
        }
    }

    /// Notes that all members, with or without a stream, hold the group's state. Returns whether
    /// that is news.
    pub(crate) fn hold_state(&mut self) -> bool {
        let mut is_news = false;
        for launch in self.launches.values_mut() {
            match &mut launch.state {
                LaunchState::Connected(w) if w.is_member() && !w.holds_state() => {
                    w.hold_state();
                    is_news = true;
                }
                LaunchState::Disconnected(d) | LaunchState::Unconfirmed(d)
                    if d.rank.is_some() && !d.holds_state =>
                {
                    d.holds_state = true;
                    is_news = true;
                }
                _ => {}
            }
        }
        is_news
    }

    /// Ready workers that are no members, of an inference job: makes each a member that holds the
    /// state. Returns their number.
    pub(crate) fn employ_ready(&mut self) -> usize {
        let ready = self.launches.values_mut().filter_map(|l| {
            let slot = l.slot;
            let is_ready = |w: &&mut Worker| w.stage() == Stage::Ready && !w.is_released();
            Some((l.worker_mut().filter(is_ready)?, slot))
        });
        let employ = |(w, slot): (&mut Worker, u32)| {
            w.set_rank(Some(slot));
            w.hold_state();
        };
        ready.map(employ).count()
    }
}

/// Whether a launch is scheduled.
fn is_placed(launch: &Launch) -> bool {
    launch.has_registered() || launch.scheduling() == Scheduling::Scheduled
}
