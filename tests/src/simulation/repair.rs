//! How the ranks of a new group reach one state, modelled after `elasticdl`'s `trainer`:
//! broadcasts of a step's result and of a state, as the session plans them.

use elasticdl::core::repair::Repair;
use elasticdl::core::session::Session;

use super::operation::{Collective, Note};
use super::trace::trace;
use super::trainer::Trainer;
use super::world::World;

impl World {
    /// Brings this rank to the state of its new group, by the plan that all ranks have computed
    /// alike.
    pub(super) fn repair(&mut self, p: usize, plan: &Repair) {
        let rank = self.processes[p]
            .trainer
            .session
            .as_ref()
            .and_then(Session::group_rank)
            .map_or(0, |(_, r)| r);
        if plan.step.is_none() && rank == 0 {
            self.begin_initial(p);
        }
        let repair = &mut self.processes[p].trainer.repair;
        repair.clear();
        if let Some((donor, behind)) = &plan.result {
            let apply = behind.contains(&rank);
            repair.push_back(Collective::ResultHeaders { donor: *donor });
            repair.push_back(Collective::Result { donor: *donor, apply });
        }
        if let Some((donor, takers)) = &plan.state {
            let take = takers.contains(&rank);
            repair.push_back(Collective::StateRecord { donor: *donor });
            repair.push_back(Collective::State { donor: *donor, take });
        }
        if self.is_to_build_nccl(p) {
            self.processes[p].trainer.repair.push_back(Collective::NcclId);
        }
        self.processes[p].trainer.passed = None;
        self.continue_repair(p);
    }

    fn begin_initial(&mut self, p: usize) {
        let lineage = self.oracle.begin_lineage();
        let trainer = &mut self.processes[p].trainer;
        trainer.model.lineage = lineage;
        if !self.restore(p) {
            let trainer = &mut self.processes[p].trainer;
            trainer.model.parameters.fill(0);
            trainer.session.iter_mut().for_each(Session::begin);
            trace!(self, "{}: creates the initial state", self.name(p));
        }
        self.check_initial(p);
    }

    /// Starts the next part of the repair, or ends it.
    pub(super) fn continue_repair(&mut self, p: usize) {
        let trainer = &mut self.processes[p].trainer;
        if let Some(what) = trainer.repair.pop_front() {
            return self.operate(p, what);
        }
        trainer.passed = None;
        let Some(session) = &mut trainer.session else { return };
        let place = session.group_rank();
        session.repaired();
        trainer.model.gradient_is_pending &= !session.pending_ranges().is_empty();
        if let Some((generation, _)) = place {
            self.check_repaired(p, generation);
        }
        self.turn_later(p);
    }

    /// What the donor broadcasts in a part of the repair.
    pub(super) fn donor_part(&self, p: usize, what: &Collective) -> (Option<Note>, Vec<u8>) {
        let Trainer { session: Some(session), model, .. } = &self.processes[p].trainer else {
            return (None, Vec::new());
        };
        match what {
            Collective::ResultHeaders { .. } => {
                (session.last_headers().map(|h| Note::Headers(h.to_vec())), Vec::new())
            }
            Collective::Result { .. } => (None, model.last_sum.clone()),
            Collective::StateRecord { .. } => {
                (session.state().map(|s| Note::Record(s.record(), model.lineage)), Vec::new())
            }
            Collective::State { .. } => (None, model.parameters.clone()),
            Collective::NcclId
            | Collective::Step
            | Collective::Synchronize
            | Collective::IdleRound => (None, Vec::new()),
        }
    }

    /// Installs the state: its record came first, its parameters have come now.
    pub(super) fn take_state(&mut self, p: usize, parameters: Vec<u8>) {
        self.oracle.coverage.repaired_by_state += 1;
        let trainer = &mut self.processes[p].trainer;
        let Some((record, lineage)) = trainer.ring.as_mut().and_then(|ring| ring.record.take())
        else {
            return;
        };
        trainer.model.parameters = parameters;
        trainer.model.lineage = lineage;
        let passed = trainer.passed.take();
        if passed.is_some() {
            std::mem::swap(&mut trainer.model.reduced, &mut trainer.model.last_sum);
        }
        if trainer.session.as_mut().is_some_and(|s| !s.install(record, passed)) {
            self.violate(format!("{}: a broadcast state is inconsistent", self.name(p)));
        }
    }
}
