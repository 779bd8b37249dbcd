//! A model of a worker process.

use std::collections::VecDeque;

use elasticdl_proto::{Generation, Ledger, RecordRange, WorkerId};

use super::super::*;
use super::partitions::Stuck;

/// The true state of a worker process.
#[derive(Debug, Default)]
pub(super) struct Process {
    pub(super) worker: Option<WorkerId>,
    pub(super) alive: bool,
    pub(super) frozen: bool,
    /// Partitioned: no data passes between the process and its peers.
    pub(super) partitioned: bool,
    pub(super) stuck: Option<Stuck>,
    pub(super) sent_hello: bool,
    pub(super) launched: Time,
    pub(super) silent_for_long: bool,
    /// The master that started the process has died, so its exit status will be unknown.
    pub(super) orphan: bool,
    /// The stream broke, and the process searches for a master.
    pub(super) searching_for_master: bool,
    /// The process has found a master, and its trainer does not know yet.
    pub(super) reconnected: bool,
    /// Number of messages in `down` that came from the former master.
    pub(super) old: usize,
    /// Exit of the process, until the master learns of it.
    pub(super) exit: Option<Exit>,
    /// Messages in flight to the master; the end of the stream follows them if `closed`.
    pub(super) up: VecDeque<WorkerMessage>,
    pub(super) closed: bool,
    pub(super) end_seen: bool,
    pub(super) down: VecDeque<MasterMessage>,
    pub(super) newest: Option<Membership>,
    /// The ring that the process is a member of, once that has formed.
    pub(super) ring: Option<Generation>,
    pub(super) state: Option<State>,
    /// A step that other ranks have committed and this one is about to commit.
    pub(super) half_committed: Option<State>,
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
    /// Ranges that the last step added.
    pub(super) added: Vec<RecordRange>,
}

impl Process {
    /// The master dies. The first `arrived` messages in flight to this worker still arrive;
    /// messages in flight to the master are lost.
    pub(super) fn lose_master(&mut self, arrived: usize) {
        self.orphan = true;
        self.up.clear();
        self.down.truncate(arrived);
        self.old = self.down.len();
        self.end_seen |= !self.alive;
        if self.worker.is_some() && self.alive {
            self.searching_for_master = true;
            self.reconnected = false;
        }
    }

    /// The trainer learns of the new master and repeats everything that it must know.
    pub(super) fn reconnect(&mut self, speaks: bool) {
        self.reconnected = false;
        // Messages after the end of the stream are dropped.
        self.up.clear();
        let step = self.state.as_ref().map_or(0, |s| s.step);
        self.up.push_back(WorkerMessage::Reconnected { step });
        if self.newest.is_none() && self.prepared {
            self.up.push_back(WorkerMessage::Ready { parameters: 10 });
        }
        match (self.ring, &self.state, &self.newest) {
            (Some(ring), Some(state), _) if self.finished == Some(ring) => {
                self.up.push_back(final_report(ring, state));
            }
            (Some(generation), Some(state), _) if speaks => {
                let ledger = report(&state.ledger);
                self.up.push_back(WorkerMessage::Formed { generation, step, ledger });
            }
            (None, _, Some(newest)) if self.broke == Some(newest.generation) => {
                let generation = newest.generation;
                let error = "before".into();
                self.up.push_back(WorkerMessage::Broken {
                    generation,
                    suspect: None,
                    error,
                    unreachable: false,
                });
            }
            _ => {}
        }
        if self.leaving {
            self.up.push_back(WorkerMessage::Leaving);
        }
    }

    /// The newest membership that its stream delivered.
    pub(super) fn known_membership(&self) -> Option<Membership> {
        let came = self.down.iter().filter_map(|m| match m {
            MasterMessage::Membership(m) => Some(m),
            _ => None,
        });
        came.chain(&self.newest).max_by_key(|m| m.generation).cloned()
    }

    /// The stream ends after the messages that were sent on it.
    pub(super) fn close(&mut self) {
        if self.searching_for_master || self.reconnected {
            self.up.clear();
        }
        self.closed = true;
        self.end_seen |= self.searching_for_master;
        self.searching_for_master = false;
        self.reconnected = false;
    }

    pub(super) fn die(&mut self, exit: Exit) {
        if self.alive {
            self.alive = false;
            self.exit = Some(exit);
            self.close();
            self.half_committed = None;
            self.down.clear();
        }
    }

    pub(super) fn adopt(&mut self, state: State) {
        self.state = Some(state);
    }

    /// Leaves a broken ring: for the next one if it is known, otherwise with a report to the
    /// master.
    pub(super) fn leave_ring(&mut self, generation: Generation, suspect: Option<WorkerId>) {
        self.ring = None;
        self.half_committed = None;
        if self.newest.as_ref().is_some_and(|m| m.generation > generation) {
            return self.stand_by_if_excluded();
        }
        self.broke = Some(generation);
        self.up.push_back(WorkerMessage::Broken {
            generation,
            suspect,
            error: "link".into(),
            unreachable: false,
        });
    }

    /// Says that it has left its ring if the newest membership excludes this worker.
    pub(super) fn stand_by_if_excluded(&mut self) {
        if self.newest.is_some() && !self.is_of_newest() {
            let step = self.state.as_ref().map(|s| s.step);
            self.up.push_back(WorkerMessage::CaughtUp { step });
        }
    }

    /// Whether it is in the newest membership that it knows.
    pub(super) fn is_of_newest(&self) -> bool {
        let newest = self.newest.as_ref();
        newest.is_some_and(|m| m.members.iter().any(|(w, _)| Some(*w) == self.worker))
    }
}

/// The final report of a member when the group holds the final state.
pub(super) fn final_report(generation: Generation, state: &State) -> WorkerMessage {
    let (step, ledger) = (state.step, report(&state.ledger));
    let records_trained = state.ledger.counted();
    WorkerMessage::Finished(Finished {
        generation,
        step,
        digest: step,
        ledger,
        records_trained,
        ..Finished::default()
    })
}

pub(super) fn report(ledger: &Ledger) -> LedgerReport {
    LedgerReport {
        epochs_complete: ledger.epoch(),
        ranges: ledger.ranges().collect(),
        repeated: ledger.repeated(),
    }
}
