//! A small master for the simulated world: it decides the members and leases the records.

use super::*;

impl World {
    /// Members whose group has reached one state.
    pub(super) fn donors(&self) -> Vec<(WorkerId, SocketAddr)> {
        let holds_state = |id: &&WorkerId| {
            self.nodes.iter().any(|n| n.id == **id && n.session.was_in_group)
                && self.members.contains(id)
        };
        self.members.iter().filter(holds_state).map(|id| (*id, address())).collect()
    }

    pub(super) fn send(&mut self, to: WorkerId, message: TestMessage) {
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
        // A leaving worker trains no more. The new group's report tells which of its leased records
        // were absorbed.
        let members = &self.members;
        self.leases.retain(|worker, _| members.contains(worker));
        self.requested.retain(|(worker, _), _| members.contains(worker));
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
            self.send(member, TestMessage::Membership(membership.clone()));
        }
        let donors = self.donors();
        if !donors.is_empty() {
            for joiner in self.fetching.clone() {
                self.send(joiner, TestMessage::Fetch(donors.clone()));
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
            | WorkerMessage::HeldLeases { .. } => {}
            WorkerMessage::Evaluated(Evaluated { step, records, metrics }) => {
                assert_eq!(records, VALIDATION, "seed {}", self.seed);
                let known = self.evaluations.entry(step).or_insert_with(|| metrics.clone());
                assert_eq!(*known, metrics, "seed {}: step {step} has two results", self.seed);
            }
            WorkerMessage::Formed { generation, ledger, .. } if generation == self.generation => {
                self.formed = true;
                let LedgerReport { epochs_complete, ranges, repeated } = ledger;
                let ledger =
                    Ledger::from_parts(RECORDS, epochs_complete, ranges, repeated).unwrap();
                self.rebuild(&ledger);
                self.switch();
            }
            WorkerMessage::Formed { .. } => {}
            WorkerMessage::CaughtUp { .. } => {
                if let Some(at) = self.fetching.iter().position(|id| *id == from) {
                    self.ready.push(self.fetching.remove(at));
                    self.switch();
                }
            }
            // A leaving worker receives no more leases.
            WorkerMessage::LeaseRequest { .. } if !self.members.contains(&from) => {}
            WorkerMessage::LeaseRequest { epoch, records } => {
                *self.requested.entry((from, epoch)).or_default() += records;
            }
            other => panic!("a session reports {other:?}"),
        }
        self.grant();
    }

    pub(super) fn rebuild(&mut self, ledger: &Ledger) {
        self.queue.clear();
        for epoch in ledger.epoch()..self.epochs {
            let all = RecordRange { epoch, start: 0, end: RECORDS };
            let mut queue = RangeSet::default();
            for range in ledger.missing_of(all) {
                queue.insert(range.records());
            }
            for range in self.leases.values().flatten().filter(|r| r.epoch == epoch) {
                queue.remove(range.records());
            }
            self.queue.insert(epoch, queue);
        }
    }

    pub(super) fn grant(&mut self) {
        let wanted: Vec<_> =
            self.requested.iter().filter(|(_, n)| **n > 0).map(|(k, n)| (*k, *n)).collect();
        for ((worker, epoch), mut records) in wanted {
            while records > 0 {
                let Some(queue) = self.queue.get_mut(&epoch) else { break };
                let Some(first) = queue.iter().next() else { break };
                let len = self.rng.random_range(1..=7).min(first.end - first.start);
                queue.remove(first.start..first.start + len);
                let range = RecordRange { epoch, start: first.start, end: first.start + len };
                self.leases.entry(worker).or_default().push(range);
                records = records.saturating_sub(len);
                self.send(worker, TestMessage::Lease(range));
            }
            self.requested.insert((worker, epoch), records);
        }
    }
}
