//! The group of a job's simulated workers: what the ring, the session and the trainer do in real
//! ones, as far as the master sees it. Pure: events in, orders out.
//!
//! All members switch to a membership when every one of them knows it: at the end of a step, or at
//! once if it aborts the step. A member that ends without having been excluded breaks the links of
//! all others. The state, with its ledger, is in the workers that hold it: when the last of them
//! ends, its records are lost.

use std::collections::{BTreeMap, BTreeSet};

use elasticdl_proto::{
    Committed, Finished, Generation, LedgerReport, MasterMessage, Membership, Phases, RankStep,
    RecordRange, StepTimes, WorkerId, WorkerMessage,
};

/// A job's group.
#[derive(Debug)]
pub(crate) struct Group {
    /// Records of the data set.
    records: u64,
    generation: Generation,
    members: Vec<WorkerId>,
    alive: BTreeSet<WorkerId>,
    /// Workers that hold the state.
    holders: BTreeSet<WorkerId>,
    /// Workers that were asked to fetch the state.
    fetching: BTreeSet<WorkerId>,
    /// Members that were asked to finish the step.
    draining: BTreeSet<WorkerId>,
    /// The newest generation that each worker knows.
    known: BTreeMap<WorkerId, Generation>,
    /// The newest membership after that of `generation`.
    next: Option<Membership>,
    /// The generation whose broken links have been reported.
    reported: Generation,
    /// Whether the generation has committed a step.
    has_resumed: bool,
    has_finished: bool,
    step: u64,
    totals: Totals,
}

/// Records of a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    /// Records in the ledger.
    pub(crate) committed: u64,
    /// Records of states that no worker holds any more.
    pub(crate) lost: u64,
}

/// What a worker has to do.
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "orders are carried out at once")]
pub(crate) enum Order {
    /// End: the group has switched to a membership without the worker.
    Exit(WorkerId),
    /// Send the master a message.
    Send(WorkerId, WorkerMessage),
}

impl Group {
    /// A group without members, whose job trains on so many records.
    pub(crate) fn new(records: u64) -> Self {
        Self {
            records,
            generation: Generation::default(),
            members: Vec::new(),
            alive: BTreeSet::new(),
            holders: BTreeSet::new(),
            fetching: BTreeSet::new(),
            draining: BTreeSet::new(),
            known: BTreeMap::new(),
            next: None,
            reported: Generation::default(),
            has_resumed: false,
            has_finished: false,
            step: 0,
            totals: Totals::default(),
        }
    }

    pub(crate) fn totals(&self) -> Totals {
        self.totals
    }

    /// A worker is connected to the master.
    pub(crate) fn join(&mut self, worker: WorkerId) {
        self.alive.insert(worker);
    }

    /// The master has sent a worker a message.
    pub(crate) fn receive(&mut self, worker: WorkerId, message: MasterMessage) {
        match message {
            MasterMessage::Drain => drop(self.draining.insert(worker)),
            MasterMessage::Fetch(_) => drop(self.fetching.insert(worker)),
            MasterMessage::Membership(membership) => {
                self.known.insert(worker, membership.generation);
                let newest = self.next.as_ref().map_or(self.generation, |next| next.generation);
                if membership.generation > newest {
                    self.next = Some(membership);
                }
            }
            _ => {}
        }
    }

    /// A worker has another stream to the master: the master learns again what still matters.
    pub(crate) fn reconnect(&mut self, worker: WorkerId) -> Vec<Order> {
        let is_member = self.members.contains(&worker);
        let step = if is_member { self.step } else { 0 };
        let mut orders = vec![Order::Send(worker, WorkerMessage::Reconnected { step })];
        if self.members.first() == Some(&worker) {
            let (generation, ledger) = (self.generation, self.ledger());
            let formed = WorkerMessage::Formed { generation, step, ledger };
            orders.push(Order::Send(worker, formed));
        }
        if !is_member {
            let caught_up = WorkerMessage::CaughtUp { step: Some(self.step) };
            let fetched = self.holders.contains(&worker).then_some(caught_up);
            let ready = WorkerMessage::Ready { parameters: PARAMETERS };
            orders.extend(fetched.into_iter().chain([ready]).map(|m| Order::Send(worker, m)));
        }
        // The master may have missed the report.
        self.reported = Generation::default();
        orders.extend(self.break_links());
        orders
    }

    /// A worker has ended.
    pub(crate) fn end(&mut self, worker: WorkerId) -> Vec<Order> {
        for set in [&mut self.alive, &mut self.fetching, &mut self.draining] {
            set.remove(&worker);
        }
        self.known.remove(&worker);
        if self.holders.remove(&worker) && self.holders.is_empty() && !self.has_finished {
            self.totals.lost += std::mem::take(&mut self.totals.committed);
            self.step = 0;
        }
        if self.members.contains(&worker) { self.break_links() } else { Vec::new() }
    }

    /// A step's time has passed.
    pub(crate) fn tick(&mut self) -> Vec<Order> {
        let mut orders = self.finish_fetches();
        if let Some(next) = self.next.clone() {
            if next.members.iter().any(|(id, _)| !self.alive.contains(id)) {
                orders.extend(self.break_links());
                return orders;
            }
            let mut waited_for: Vec<WorkerId> = next.members.iter().map(|(id, _)| *id).collect();
            if !next.abort {
                waited_for.extend(self.members.iter().filter(|id| self.alive.contains(id)));
            }
            let knows = |id: &WorkerId| self.known.get(id).is_some_and(|g| *g >= next.generation);
            if waited_for.iter().all(knows) {
                orders.extend(self.switch(&next));
                return orders;
            }
            if next.abort {
                return orders;
            }
        }
        let is_whole = self.members.iter().all(|id| self.alive.contains(id));
        if self.members.is_empty() || self.has_finished || !is_whole {
            return orders;
        }
        let is_stopping = self.members.iter().all(|id| self.draining.contains(id));
        if is_stopping || self.totals.committed == self.records {
            orders.extend(self.finish());
        } else {
            orders.extend(self.commit());
        }
        orders
    }

    /// Workers that fetch the state have it after a step's time.
    fn finish_fetches(&mut self) -> Vec<Order> {
        if self.holders.is_empty() {
            return Vec::new();
        }
        let step = Some(self.step);
        let fetched = std::mem::take(&mut self.fetching);
        self.holders.extend(&fetched);
        fetched.into_iter().map(|id| Order::Send(id, WorkerMessage::CaughtUp { step })).collect()
    }

    /// The members that remain report that their links broke, once for each generation.
    fn break_links(&mut self) -> Vec<Order> {
        let newest = self.next.as_ref();
        let (generation, members): (Generation, Vec<WorkerId>) = match newest {
            Some(next) => (next.generation, next.members.iter().map(|(id, _)| *id).collect()),
            None => (self.generation, self.members.clone()),
        };
        let (here, gone): (Vec<WorkerId>, Vec<WorkerId>) =
            members.into_iter().partition(|id| self.alive.contains(id));
        let reporters: Vec<WorkerId> = here
            .into_iter()
            .filter(|id| self.known.get(id).is_some_and(|known| *known >= generation))
            .collect();
        if gone.is_empty() || reporters.is_empty() || self.reported >= generation {
            return Vec::new();
        }
        self.reported = generation;
        let report = |id| {
            let error = "the link ended".to_owned();
            let suspect = gone.first().copied();
            let broken = WorkerMessage::Broken { generation, suspect, error, unreachable: false };
            Order::Send(id, broken)
        };
        reporters.into_iter().map(report).collect()
    }

    /// All members of the next generation switch to it; the members that it excludes end.
    fn switch(&mut self, next: &Membership) -> Vec<Order> {
        let members: Vec<WorkerId> = next.members.iter().map(|(id, _)| *id).collect();
        let excluded = self.members.iter().filter(|id| !members.contains(id));
        let excluded: Vec<WorkerId> =
            excluded.filter(|id| self.alive.contains(id)).copied().collect();
        if !members.iter().any(|id| self.holders.contains(id)) {
            self.totals.lost += std::mem::take(&mut self.totals.committed);
            self.step = 0;
        }
        self.holders.extend(&members);
        for id in &excluded {
            self.holders.remove(id);
        }
        self.next = None;
        (self.generation, self.members) = (next.generation, members);
        (self.has_resumed, self.has_finished) = (false, false);
        let formed = WorkerMessage::Formed {
            generation: self.generation,
            step: self.step,
            ledger: self.ledger(),
        };
        let reporter = self.members.first().map(|&id| Order::Send(id, formed));
        reporter.into_iter().chain(excluded.into_iter().map(Order::Exit)).collect()
    }

    fn commit(&mut self) -> Vec<Order> {
        let start = self.totals.committed;
        let records = (RECORDS_PER_RANK * self.members.len() as u64).min(self.records - start);
        self.step += 1;
        self.totals.committed += records;
        let generation = self.generation;
        let rank =
            RankStep { records: RECORDS_PER_RANK, compute_us: STEP_US, ..RankStep::default() };
        let committed = WorkerMessage::Committed(Committed {
            generation,
            step: self.step,
            ranges: vec![RecordRange { epoch: 0, start, end: start + records }],
            loss_sum: records as f64,
            records,
            ranks: vec![rank; self.members.len()],
            times: StepTimes { steps: 1, step_us: STEP_US, reduce_us: 0 },
            ..Committed::default()
        });
        let mut orders = vec![Order::Send(self.members[0], committed)];
        if !std::mem::replace(&mut self.has_resumed, true) {
            let phases = Phases { first_step_us: STEP_US, ..Phases::default() };
            let resumed = WorkerMessage::Resumed { generation, step: self.step, phases };
            orders.extend(self.members.iter().map(|&id| Order::Send(id, resumed.clone())));
        }
        orders
    }

    /// The group was asked to stop: its step is the last one.
    fn finish(&mut self) -> Vec<Order> {
        self.has_finished = true;
        let finished = WorkerMessage::Finished(Finished {
            generation: self.generation,
            step: self.step,
            digest: self.step,
            ledger: self.ledger(),
            records_trained: self.totals.committed,
            ..Finished::default()
        });
        self.members.iter().map(|&id| Order::Send(id, finished.clone())).collect()
    }

    fn ledger(&self) -> LedgerReport {
        let end = self.totals.committed;
        if end == self.records {
            return LedgerReport { epochs_complete: 1, ..LedgerReport::default() };
        }
        let absorbed = (end > 0).then_some(RecordRange { epoch: 0, start: 0, end });
        LedgerReport { ranges: absorbed.into_iter().collect(), ..LedgerReport::default() }
    }
}

/// Parameters of the model.
pub(crate) const PARAMETERS: u64 = 1;
/// Records that each rank computes in a step.
pub(crate) const RECORDS_PER_RANK: u64 = 64;
/// Duration of a step in microseconds.
pub(crate) const STEP_US: u64 = 500_000;
