//! How the ranks of a new group come to one state, after `elasticdl_worker`'s `trainer`: broadcasts
//! of a step's result and of a state, as the session plans them.

use elasticdl_worker::core::repair::Repair;
use elasticdl_worker::core::session::Session;

use super::operation::{Note, What};
use super::story::tell;
use super::trainer::Trainer;
use super::world::World;

impl World {
    /// Brings this rank to its new group's state, as all ranks have planned it.
    pub(super) fn repair(&mut self, p: usize, plan: &Repair) {
        let rank = self.processes[p]
            .trainer
            .session
            .as_ref()
            .and_then(Session::place)
            .map_or(0, |(_, r)| r);
        if plan.step.is_none() && rank == 0 {
            self.begin_from_nothing(p);
        }
        let repair = &mut self.processes[p].trainer.repair;
        repair.clear();
        if let Some((donor, behind)) = &plan.result {
            let apply = behind.contains(&rank);
            repair.push_back(What::ResultHeaders { donor: *donor });
            repair.push_back(What::Result { donor: *donor, apply });
        }
        if let Some((donor, takers)) = &plan.state {
            let take = takers.contains(&rank);
            repair.push_back(What::StateRecord { donor: *donor });
            repair.push_back(What::State { donor: *donor, take });
        }
        if self.is_to_build_nccl(p) {
            self.processes[p].trainer.repair.push_back(What::NcclId);
        }
        self.processes[p].trainer.passed = None;
        self.go_on_repairing(p);
    }

    fn begin_from_nothing(&mut self, p: usize) {
        let era = self.books.begin_era();
        let trainer = &mut self.processes[p].trainer;
        trainer.model.era = era;
        if !self.restore(p) {
            let trainer = &mut self.processes[p].trainer;
            trainer.model.parameters.fill(0);
            trainer.session.iter_mut().for_each(Session::begin);
            tell!(self, "{}: makes the initial state", self.name(p));
        }
        self.check_beginning(p);
    }

    /// The next part of the repair, or its end.
    pub(super) fn go_on_repairing(&mut self, p: usize) {
        let trainer = &mut self.processes[p].trainer;
        if let Some(what) = trainer.repair.pop_front() {
            return self.operate(p, what);
        }
        trainer.passed = None;
        let Some(session) = &mut trainer.session else { return };
        let place = session.place();
        session.repaired();
        trainer.model.gradient_is_pending &= !session.pending_ranges().is_empty();
        if let Some((generation, _)) = place {
            self.check_repaired(p, generation);
        }
        self.turn_later(p);
    }

    /// What the donor says in a repair.
    pub(super) fn donated(&self, p: usize, what: &What) -> (Option<Note>, Vec<u8>) {
        let Trainer { session: Some(session), model, .. } = &self.processes[p].trainer else {
            return (None, Vec::new());
        };
        match what {
            What::ResultHeaders { .. } => {
                (session.kept().map(|h| Note::Headers(h.to_vec())), Vec::new())
            }
            What::Result { .. } => (None, model.kept.clone()),
            What::StateRecord { .. } => {
                (session.state().map(|s| Note::Record(s.record(), model.era)), Vec::new())
            }
            What::State { .. } => (None, model.parameters.clone()),
            What::NcclId | What::Step | What::Synchronize | What::Talk => (None, Vec::new()),
        }
    }

    /// The state has come, its record before its parameters.
    pub(super) fn take_state(&mut self, p: usize, parameters: Vec<u8>) {
        self.books.tally.repaired_by_state += 1;
        let trainer = &mut self.processes[p].trainer;
        let Some((record, era)) = trainer.ring.as_mut().and_then(|ring| ring.record.take()) else {
            return;
        };
        trainer.model.parameters = parameters;
        trainer.model.era = era;
        let passed = trainer.passed.take();
        if passed.is_some() {
            std::mem::swap(&mut trainer.model.reduced, &mut trainer.model.kept);
        }
        if trainer.session.as_mut().is_some_and(|s| !s.install(record, passed)) {
            self.violate(format!("{}: a state makes no sense", self.name(p)));
        }
    }
}
