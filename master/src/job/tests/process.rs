//! A model of a worker's process.

use std::collections::{BTreeMap, VecDeque};

use elasticdl_proto::{Generation, Ledger, RangeSet, RecordRange, WorkerId};

use super::super::*;
use super::cuts::Stuck;

/// A worker's process, as it really is.
#[derive(Debug, Default)]
pub(super) struct Process {
    pub(super) worker: Option<WorkerId>,
    pub(super) alive: bool,
    pub(super) frozen: bool,
    /// Nothing passes between it and its peers.
    pub(super) cut: bool,
    pub(super) stuck: Option<Stuck>,
    pub(super) said_hello: bool,
    pub(super) launched: Time,
    pub(super) silent_for_long: bool,
    /// Its end, until the master is told.
    pub(super) exit: Option<Exit>,
    /// On their way to the master; the stream ends behind them if `closed`.
    pub(super) up: VecDeque<FromWorker>,
    pub(super) closed: bool,
    pub(super) end_seen: bool,
    pub(super) down: VecDeque<ToWorker>,
    pub(super) newest: Option<Membership>,
    /// The ring that it is in, once it has formed.
    pub(super) ring: Option<Generation>,
    pub(super) state: Option<State>,
    /// A step that others have committed and this one is about to.
    pub(super) half: Option<State>,
    pub(super) held: BTreeMap<u32, RangeSet>,
    pub(super) asked: BTreeMap<u32, u64>,
    pub(super) prepared: bool,
    pub(super) drained: bool,
    pub(super) leaving: bool,
    pub(super) finished: Option<Generation>,
    pub(super) broke: Option<Generation>,
    pub(super) resumed: Option<Generation>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct State {
    pub(super) step: u64,
    pub(super) ledger: Ledger,
    /// What the last step added.
    pub(super) added: Vec<RecordRange>,
}

impl Process {
    pub(super) fn die(&mut self, exit: Exit) {
        if self.alive {
            self.alive = false;
            self.exit = Some(exit);
            self.closed = true;
            self.half = None;
            self.down.clear();
        }
    }

    pub(super) fn adopt(&mut self, state: State) {
        for (&epoch, held) in &mut self.held {
            for range in held.clone().iter() {
                let whole = RecordRange { epoch, start: range.start, end: range.end };
                held.remove(range);
                for missing in state.ledger.missing_of(whole) {
                    held.insert(missing.records());
                }
            }
        }
        let complete = state.ledger.epoch();
        self.asked.retain(|&epoch, _| epoch >= complete);
        self.held.retain(|_, held| !held.is_empty());
        self.state = Some(state);
    }

    /// Out of a broken ring: into the next one if it is known, else the master is told.
    pub(super) fn leave_ring(&mut self, generation: Generation, suspect: Option<WorkerId>) {
        self.ring = None;
        self.half = None;
        if self.newest.as_ref().is_some_and(|m| m.generation > generation) {
            return self.end_if_excluded();
        }
        self.broke = Some(generation);
        self.up.push_back(FromWorker::Broken {
            generation,
            suspect,
            error: "link".into(),
            unreachable: false,
        });
    }

    /// A membership without it: it goes.
    pub(super) fn end_if_excluded(&mut self) {
        let Some(newest) = &self.newest else {
            return;
        };
        if !newest.members.iter().any(|(w, _)| Some(*w) == self.worker) {
            self.die(Exit::Code(0));
        }
    }
}
