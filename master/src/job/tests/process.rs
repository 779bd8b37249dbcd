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
    /// The master that started it has died: nobody will know how it ends.
    pub(super) orphan: bool,
    /// Its stream broke: it looks for a master.
    pub(super) astray: bool,
    /// It found one, and its trainer does not know yet.
    pub(super) reconnected: bool,
    /// Of `down`, those that came from the master before.
    pub(super) old: usize,
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
    /// The master dies. Of what was on its way to this worker a part may have come; nothing that
    /// was on its way to the master will.
    pub(super) fn lose_master(&mut self, arrived: usize) {
        self.orphan = true;
        self.up.clear();
        self.down.truncate(arrived);
        self.old = self.down.len();
        self.end_seen |= !self.alive;
        if self.worker.is_some() && self.alive {
            self.astray = true;
            self.reconnected = false;
        }
    }

    /// Its trainer learns that there is another master, and says again what that one has to know.
    pub(super) fn reconnect(&mut self, speaks: bool) {
        self.reconnected = false;
        self.asked.clear();
        // Whatever it said since its stream broke is dropped.
        self.up.clear();
        let ranges = self.held.iter().flat_map(|(&epoch, set)| {
            set.iter().map(move |r| RecordRange { epoch, start: r.start, end: r.end })
        });
        let step = self.state.as_ref().map_or(0, |s| s.step);
        self.up.push_back(FromWorker::HeldLeases { step, ranges: ranges.collect() });
        if self.newest.is_none() && self.prepared {
            self.up.push_back(FromWorker::Ready { parameters: 10 });
        }
        match (self.ring, &self.state, &self.newest) {
            (Some(ring), Some(state), _) if self.finished == Some(ring) => {
                self.up.push_back(final_report(ring, state));
            }
            (Some(generation), Some(state), _) if speaks => {
                let ledger = report(&state.ledger);
                self.up.push_back(FromWorker::Formed { generation, step, ledger });
            }
            (None, _, Some(newest)) if self.broke == Some(newest.generation) => {
                let generation = newest.generation;
                let error = "before".into();
                self.up.push_back(FromWorker::Broken {
                    generation,
                    suspect: None,
                    error,
                    unreachable: false,
                });
            }
            _ => {}
        }
        if self.leaving {
            self.up.push_back(FromWorker::Leaving);
        }
    }

    /// The newest generation that its stream brought.
    pub(super) fn heard(&self) -> Option<Membership> {
        let came = self.down.iter().filter_map(|m| match m {
            ToWorker::Membership(m) => Some(m),
            _ => None,
        });
        came.chain(&self.newest).max_by_key(|m| m.generation).cloned()
    }

    /// Its stream ends, behind what it has said on it.
    pub(super) fn close(&mut self) {
        if self.astray || self.reconnected {
            self.up.clear();
        }
        self.closed = true;
        self.end_seen |= self.astray;
        self.astray = false;
        self.reconnected = false;
    }

    pub(super) fn die(&mut self, exit: Exit) {
        if self.alive {
            self.alive = false;
            self.exit = Some(exit);
            self.close();
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

/// What a member says when the group holds the job's final state.
pub(super) fn final_report(generation: Generation, state: &State) -> FromWorker {
    let (step, ledger) = (state.step, report(&state.ledger));
    let records_trained = state.ledger.counted();
    FromWorker::Finished(Finished {
        generation,
        step,
        digest: step,
        ledger,
        records_trained,
        stopped_early: false,
        summary: None,
        failure: None,
        suspended: false,
        steps_skipped: 0,
        exported: false,
    })
}

pub(super) fn report(ledger: &Ledger) -> LedgerReport {
    LedgerReport {
        epochs_complete: ledger.epoch(),
        ranges: ledger.ranges().collect(),
        repeated: ledger.repeated(),
    }
}
