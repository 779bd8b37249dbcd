//! What the ranks of a new group send each other before its first step: the broadcasts of the
//! session's repair, and the creation of a state.

use std::rc::Rc;

use elasticdl::session::{Broadcast, Session};

use super::state::operation::{Done, Note};
use super::state::trainer::Trainer;
use super::trace::trace;
use super::world::World;

impl World {
    pub(super) fn create_state(&mut self, p: usize) {
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
        self.turn_later(p);
    }

    pub(super) fn end_repair(&mut self, p: usize) {
        self.check_obstacle(p);
        let Some(session) = &mut self.processes[p].trainer.session else { return };
        let place = session.group_rank();
        session.repaired();
        if let Some((generation, _)) = place {
            self.check_repaired(p, generation);
        }
        self.turn_later(p);
    }

    /// What the root of a broadcast sends.
    pub(super) fn root_part(&self, p: usize, what: Broadcast) -> (Option<Note>, Vec<u8>) {
        let Trainer { session: Some(session), model, .. } = &self.processes[p].trainer else {
            return (None, Vec::new());
        };
        match what {
            Broadcast::ResultHeaders | Broadcast::StateRecord => {
                (Some(Note::Bytes(session.broadcast_bytes(what), model.lineage)), Vec::new())
            }
            Broadcast::Result { .. } => (None, model.last_sum.clone()),
            Broadcast::State => (None, model.parameters.clone()),
        }
    }

    /// A broadcast is complete on this rank.
    pub(super) fn broadcast(&mut self, p: usize, what: Broadcast, done: Done) {
        let Done { notes, body, is_root, .. } = done;
        let Trainer { session: Some(session), model, ring: Some(ring), .. } =
            &mut self.processes[p].trainer
        else {
            return;
        };
        let had_state = session.state().is_some();
        let mut differs = false;
        let accepted = match what {
            Broadcast::ResultHeaders | Broadcast::StateRecord => {
                let Some(Note::Bytes(bytes, lineage)) =
                    notes.iter().flatten().next().map(Rc::as_ref)
                else {
                    return self.violate(format!("{} got no bytes", self.name(p)));
                };
                ring.lineage = *lineage;
                session.bytes_broadcast(bytes)
            }
            Broadcast::Result { is_kept } => {
                if !is_root {
                    model.reduced = body;
                }
                if is_kept {
                    model.retain();
                }
                session.tensors_broadcast(true)
            }
            Broadcast::State => {
                if is_root {
                    self.oracle.is_void |= model.is_wrong();
                } else {
                    differs = had_state && model.parameters != body;
                    model.parameters = body;
                }
                let accepted = session.tensors_broadcast(true);
                if !had_state {
                    model.lineage = ring.lineage;
                    self.oracle.coverage.repaired_by_state += 1;
                }
                accepted
            }
        };
        if let Err(error) = accepted {
            self.violate(format!("{}: {error}", self.name(p)));
        }
        if differs {
            self.violate(format!("{} holds another state than the donor", self.name(p)));
        }
        self.turn_later(p);
    }
}
