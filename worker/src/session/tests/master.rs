//! A small master for the simulated world: it decides the members.

use super::*;

impl World {
    /// Members whose group has reached one state.
    pub(super) fn donors(&self) -> Vec<(WorkerId, SocketAddr)> {
        let holds_state = |id: &&WorkerId| {
            self.nodes.iter().any(|n| n.id == **id && n.session.memberships.was_in_group)
                && self.members.contains(id)
        };
        self.members.iter().filter(holds_state).map(|id| (*id, address())).collect()
    }

    pub(super) fn send(&mut self, to: WorkerId, message: MasterMessage) {
        if let Some(node) = self.nodes.iter_mut().find(|n| n.id == to) {
            node.inbox.push_back(message);
        }
    }

    /// Admits and releases workers while no other switch is in flight.
    pub(super) fn switch(&mut self) {
        if self.formed && !(self.ready.is_empty() && self.leaving.is_empty()) {
            self.publish(false);
        }
    }

    pub(super) fn publish(&mut self, abort: bool) {
        let before = self.members.clone();
        let nodes = &self.nodes;
        self.members.retain(|m| nodes.iter().any(|n| n.id == *m));
        // The last holders of the state stay until other members hold it too.
        if self.members.iter().any(|m| !self.leaving.contains(m)) {
            let leaving = std::mem::take(&mut self.leaving);
            self.members.retain(|m| !leaving.contains(m));
        } else if self.ready.is_empty() && !abort {
            return;
        }
        if self.members.is_empty() {
            self.ready.append(&mut self.fetching);
        }
        self.members.append(&mut self.ready);
        if self.members.is_empty() {
            self.formed = true;
            return;
        }
        self.generation = self.generation.next();
        self.formed = false;
        let membership = Membership {
            generation: self.generation,
            members: self.members.iter().map(|m| (*m, address())).collect(),
            abort,
        };
        let mut recipients = before;
        recipients.retain(|m| !self.members.contains(m));
        recipients.extend(&self.members);
        let ring = Ring { world_size: self.members.len(), ..Ring::default() };
        self.rings.insert(self.generation.0, ring);
        for member in recipients {
            self.send(member, MasterMessage::Membership(membership.clone()));
        }
        let donors = self.donors();
        if !donors.is_empty() {
            for joiner in self.fetching.clone() {
                self.send(joiner, MasterMessage::Fetch(donors.clone()));
            }
        }
    }

    pub(super) fn handle_report(&mut self, from: WorkerId, report: WorkerMessage) {
        match report {
            WorkerMessage::Broken { generation, .. } if generation == self.generation => {
                self.publish(true)
            }
            WorkerMessage::Broken { .. }
            | WorkerMessage::Committed(_)
            | WorkerMessage::Reconnected { .. } => {}
            WorkerMessage::Evaluated(Evaluated { step, records, metrics }) => {
                assert_eq!(records, VALIDATION, "seed {}", self.seed);
                let known = self.evaluations.entry(step).or_insert_with(|| metrics.clone());
                assert_eq!(*known, metrics, "seed {}: step {step} has two results", self.seed);
            }
            WorkerMessage::Formed { generation, ledger, .. } if generation == self.generation => {
                self.formed = true;
                let LedgerReport { epochs_complete, ranges, repeated } = ledger;
                Ledger::from_parts(RECORDS, epochs_complete, ranges, repeated).unwrap();
                self.switch();
            }
            WorkerMessage::Formed { .. } => {}
            WorkerMessage::Finished(finished) => {
                let node = self.nodes.iter_mut().find(|node| node.id == from);
                node.expect("the reporter lives").finished = Some(finished.generation);
            }
            WorkerMessage::CaughtUp { .. } => {
                if let Some(at) = self.fetching.iter().position(|id| *id == from) {
                    self.ready.push(self.fetching.remove(at));
                    self.switch();
                }
            }
            other => panic!("a session reports {other:?}"),
        }
    }
}
