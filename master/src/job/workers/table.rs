//! The worker table: launches (started processes) and the workers connected from them.
//!
//! **Invariant:** a worker is in [`WorkerTable::connected`] exactly while its stream is open and it
//! is not forgotten; messages go only to these workers. Its launch stays until the process has
//! ended.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use elasticdl_proto::{Generation, WorkerId};

use crate::job::event::LaunchId;
use crate::job::handlers::stall::Stalled;
use crate::job::time::Time;
use crate::job::workers::straggler::StepPace;

/// Launches and connected workers.
#[derive(Debug)]
pub(crate) struct WorkerTable {
    pub(crate) workers_per_pod: usize,
    pub(crate) launches: BTreeMap<LaunchId, Launch>,
    pub(crate) connected: BTreeMap<WorkerId, Worker>,
    pub(crate) launches_made: u64,
}

/// A started process that is not known to have ended.
#[derive(Debug, Default)]
pub(crate) struct Launch {
    /// The worker that it became with its hello; stays when the stream ends.
    pub(crate) worker: Option<WorkerId>,
    pub(crate) accounting: ExitAccounting,
    /// It leaves in order, so its replacement may start while it still runs.
    pub(crate) leaving: bool,
    /// It leaves because of a scale down; nothing replaces it.
    pub(crate) retired: bool,
    pub(crate) killed: bool,
    /// Set while its worker has no stream to this master and may reconnect.
    pub(crate) disconnected: Option<Disconnected>,
    /// The lowest slot that was free: see [`Action::Launch`](crate::job::Action::Launch).
    pub(crate) slot: u32,
    pub(crate) scheduling: Scheduling,
    /// What it waits for, if known.
    pub(crate) waits_for: Option<String>,
    /// Priority class, where the cluster has them.
    pub(crate) class: Option<String>,
    /// Last lines of its output, once it has ended.
    pub(crate) printed: Option<String>,
}

/// Whether a launch has been scheduled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Scheduling {
    /// Not known yet.
    #[default]
    Pending,
    /// It runs, or is about to.
    Scheduled,
    /// No node has enough capacity for it.
    Unschedulable,
}

/// A disconnected worker that may reconnect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Disconnected {
    /// As [`Worker::rank`].
    pub(crate) rank: Option<u32>,
    /// As [`Worker::joined`].
    pub(crate) joined: Option<Generation>,
    /// As [`Worker::holds_state`].
    pub(crate) holds_state: bool,
    /// When its stream ended; for a stream to an earlier master, when this master started.
    pub(crate) since: Time,
    /// What this master knew of the worker; `None` if only an earlier master knew it.
    pub(crate) last_known: Option<LastKnown>,
}

/// What a master retains of a worker whose stream ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LastKnown {
    pub(crate) stage: Stage,
    /// As [`Worker::leaving`].
    pub(crate) leaving: bool,
    pub(crate) pid: u32,
    /// Median compute time of its recent steps, in microseconds.
    pub(crate) usual_us: Option<u64>,
}

/// How the exit of a process is accounted for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum ExitAccounting {
    /// Its failure has already been counted.
    Counted,
    /// Its exit is expected: it was asked to end, or announced that it would.
    Expected,
    /// Not decided: the exit status will tell.
    #[default]
    Undecided,
}

/// A worker whose stream is open.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) launch: LaunchId,
    pub(crate) address: SocketAddr,
    pub(crate) pid: u32,
    pub(crate) stage: Stage,
    /// Records requested and not leased yet, by epoch; no entry is 0.
    pub(crate) requested_records: BTreeMap<u32, u64>,
    /// Rank in the newest generation.
    pub(crate) rank: Option<u32>,
    /// The first generation of which it was a member.
    pub(crate) joined: Option<Generation>,
    /// Whether it holds the group's state: it was a member when a generation formed.
    pub(crate) holds_state: bool,
    /// Whether it has fetched the group's state, which it may bring into the next generation.
    pub(crate) fetched: bool,
    /// Whether it leaves with the next membership.
    pub(crate) leaving: bool,
    /// Whether it was shut down, or a membership without it was published; its exit is awaited.
    pub(crate) released: bool,
    pub(crate) pace: StepPace,
    /// Time of its last message.
    pub(crate) heard: Time,
    /// Set if its last heartbeat reported that it waits for its neighbours.
    pub(crate) stalled: Option<Stalled>,
}

/// The stages of a worker before it can be a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Its hello has come; the data set is not known.
    Joining,
    /// As [`Stage::Joining`], and it was asked to describe the data set.
    Describing,
    /// It builds its model.
    Preparing,
    /// It fetches the group's state from a member.
    Fetching,
    /// It can be a member.
    Ready,
}

impl WorkerTable {
    pub(crate) fn new(workers_per_pod: u32) -> Self {
        Self {
            workers_per_pod: workers_per_pod as usize,
            launches: BTreeMap::new(),
            connected: BTreeMap::new(),
            launches_made: 0,
        }
    }

    /// Adds the launches of a new pod, in consecutive free slots from this one on. Returns the
    /// first.
    pub(crate) fn launch(&mut self, slot: u32) -> LaunchId {
        let first = LaunchId(self.launches_made + 1);
        for slot in (slot..).take(self.workers_per_pod) {
            self.launches_made += 1;
            self.launches
                .insert(LaunchId(self.launches_made), Launch { slot, ..Launch::default() });
        }
        first
    }

    /// The lowest slot that no staying launch has.
    pub(crate) fn free_slot(&self) -> u32 {
        self.free_slots().next().unwrap_or_default()
    }

    /// The first slots of all free pods, lowest first, without end.
    pub(crate) fn free_slots(&self) -> impl Iterator<Item = u32> + use<> {
        let per_pod = self.workers_per_pod as u32;
        let staying = self.launches.values().filter(|l| l.stays());
        let taken: BTreeSet<u32> = staying.map(|l| l.slot / per_pod * per_pod).collect();
        (0..).step_by(per_pod as usize).filter(move |place| !taken.contains(place))
    }

    /// Pods from slot `from` on that are not scheduled yet, lowest slot first.
    pub(crate) fn unscheduled(&self, from: u32) -> Vec<LaunchId> {
        let lacks = |id: &LaunchId| {
            let l = &self.launches[id];
            let is_heard = self.any_of_pod(*id, |l| l.worker.is_some());
            l.stays() && l.slot >= from && !is_heard && l.scheduling != Scheduling::Scheduled
        };
        let mut unscheduled: Vec<_> =
            self.pods().filter(lacks).map(|id| (self.launches[&id].slot, id)).collect();
        unscheduled.sort_unstable();
        unscheduled.into_iter().map(|(_, id)| id).collect()
    }

    /// Adds the worker of `launch`. A launch becomes at most one worker and gives it its number, so
    /// no worker id is used twice, by any master.
    pub(crate) fn admit(
        &mut self,
        now: Time,
        launch: LaunchId,
        address: SocketAddr,
        pid: u32,
    ) -> WorkerId {
        let id = WorkerId(launch.0);
        let worker = Worker {
            launch,
            address,
            pid,
            stage: Stage::Joining,
            requested_records: BTreeMap::new(),
            rank: None,
            joined: None,
            holds_state: false,
            fetched: false,
            leaving: false,
            released: false,
            pace: StepPace::default(),
            heard: now,
            stalled: None,
        };
        self.connected.insert(id, worker);
        if let Some(launch) = self.launches.get_mut(&launch) {
            launch.worker = Some(id);
            launch.disconnected = None;
        }
        id
    }

    /// Marks a worker as disconnected at `now`; it may reconnect. Returns its launch.
    pub(crate) fn disconnect(&mut self, now: Time, worker: WorkerId) -> Option<LaunchId> {
        let w = self.connected.remove(&worker)?;
        let usual_us = w.pace.usual_us();
        let last_known = LastKnown { stage: w.stage, leaving: w.leaving, pid: w.pid, usual_us };
        let Worker { rank, joined, holds_state, .. } = w;
        let launch = self.launches.get_mut(&w.launch)?;
        launch.disconnected = Some(Disconnected {
            rank,
            joined,
            holds_state,
            since: now,
            last_known: Some(last_known),
        });
        Some(w.launch)
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
        let Disconnected { rank, joined, holds_state, since: _, last_known } =
            l.disconnected.take()?;
        let id = WorkerId(launch.0);
        l.worker = Some(id);
        let worker = Worker {
            launch,
            address,
            pid,
            stage: last_known.map_or(Stage::Ready, |k| k.stage),
            requested_records: BTreeMap::new(),
            rank,
            joined,
            holds_state,
            fetched: false,
            // A worker that received SIGTERM reports it again.
            leaving: l.retired || last_known.is_some_and(|k| k.leaving),
            released: rank.is_none() && last_known.is_none(),
            pace: StepPace::default(),
            stalled: None,
            heard: now,
        };
        self.connected.insert(id, worker);
        Some(id)
    }

    /// Disconnected members of the newest generation.
    pub(crate) fn disconnected_members(&self) -> impl Iterator<Item = WorkerId> + '_ {
        let member = |l: &Launch| l.disconnected.is_some_and(|a| a.rank.is_some());
        self.launches.iter().filter(move |(_, l)| member(l)).map(|(&id, _)| WorkerId(id.0))
    }

    /// Launches whose workers are disconnected and may reconnect.
    pub(crate) fn disconnected(&self) -> impl Iterator<Item = LaunchId> + '_ {
        self.launches.iter().filter(|(_, l)| l.disconnected.is_some()).map(|(&id, _)| id)
    }

    /// Notes the time of a message from `worker`.
    pub(crate) fn heard(&mut self, worker: WorkerId, now: Time) {
        if let Some(worker) = self.connected.get_mut(&worker) {
            worker.heard = now;
        }
    }

    /// Workers that can be members and are not, oldest first: the joiners.
    pub(crate) fn joiners(&self) -> impl Iterator<Item = WorkerId> + '_ {
        self.connected.iter().filter(|(_, w)| w.is_joiner()).map(|(&id, _)| id)
    }

    /// The joiners that have the group's state, so that the group need not wait for them.
    pub(crate) fn caught_up(&self) -> impl Iterator<Item = WorkerId> + '_ {
        self.joiners().filter(|id| self.connected[id].stage == Stage::Ready)
    }

    /// Members of the newest generation, by id.
    pub(crate) fn members(&self) -> impl Iterator<Item = (WorkerId, &Worker)> {
        self.connected.iter().filter(|(_, w)| w.rank.is_some()).map(|(&id, w)| (id, w))
    }

    /// Number of pods that may be added so that `wanted` workers stay and at most `max` processes
    /// run.
    pub(crate) fn vacancies(&self, wanted: usize, max: usize) -> usize {
        let (wanted, max) = (wanted.div_ceil(self.workers_per_pod), max / self.workers_per_pod);
        wanted.saturating_sub(self.staying().count()).min(max.saturating_sub(self.pods().count()))
    }

    /// The surplus pods when only `wanted` workers stay: first pods without a worker, then the
    /// others, each from the highest slot down.
    pub(crate) fn surplus(&self, wanted: usize) -> Vec<LaunchId> {
        let cost = |id: LaunchId| {
            let is_heard = self.any_of_pod(id, |l| l.worker.is_some());
            (is_heard, std::cmp::Reverse((self.launches[&id].slot, id)), id)
        };
        let mut staying: Vec<_> = self.staying().map(cost).collect();
        staying.sort_unstable();
        let surplus = staying.len().saturating_sub(wanted.div_ceil(self.workers_per_pod));
        staying.into_iter().take(surplus).map(|(_, _, id)| id).collect()
    }

    /// The pods that keep their slots.
    fn staying(&self) -> impl Iterator<Item = LaunchId> + '_ {
        self.pods().filter(|&id| self.any_of_pod(id, Launch::stays))
    }
}

impl Launch {
    /// Whether it keeps its slot: no replacement starts there.
    pub(crate) fn stays(&self) -> bool {
        !self.leaving && !self.retired
    }
}

impl Worker {
    pub(crate) fn is_joiner(&self) -> bool {
        matches!(self.stage, Stage::Fetching | Stage::Ready)
            && self.rank.is_none()
            && !self.leaving
            && !self.released
    }

    /// Whether records may be leased to it. Not before its group has formed: until then the
    /// previous group, of which it is no member, may need these records to finish a step.
    pub(crate) fn is_eligible(&self) -> bool {
        self.rank.is_some() && self.holds_state && !self.released
    }
}
