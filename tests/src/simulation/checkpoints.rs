//! Checkpoints of the simulated workers: parts and manifests take time to be written, and are lost
//! with the process that writes them.
//!
//! **Oracle:** a checkpoint that a manifest completes is a state that its group has committed, and
//! its ledger counts the same records as its parameters.

use std::time::Duration;

use elasticdl::session::Session;
use elasticdl::session::checkpoint::{Task, Written};

use super::clock::Micros;
use super::model::digest;
use super::state::checkpoints::CheckpointWork;
use super::state::event::Event;
use super::trace::trace;
use super::world::World;

impl World {
    /// Starts the checkpoint writes that the session asks for. Called before the state changes
    /// again.
    pub(super) fn poll_checkpoint_writer(&mut self, p: usize) {
        while let Some(task) =
            self.processes[p].trainer.session.as_mut().and_then(Session::poll_checkpoint)
        {
            let trainer = &mut self.processes[p].trainer;
            let work = match task {
                Task::Commit { step, parts } => {
                    let Some((generation, record)) =
                        trainer.part_written.take_if(|(_, r)| r.step == step)
                    else {
                        continue;
                    };
                    CheckpointWork::Manifest {
                        key: (step, generation),
                        record,
                        world_size: parts.len(),
                    }
                }
                Task::Write { step, generation, rank, world_size } => {
                    let Some(state) = trainer.state().filter(|state| state.step == step) else {
                        return self.violate(format!(
                            "{} has to write a checkpoint of step {step}, and is at another step",
                            self.name(p)
                        ));
                    };
                    let record = state.record();
                    let all = &trainer.model.parameters;
                    let at = |rank: usize| all.len() * rank / world_size;
                    let bytes = all[at(rank)..at(rank + 1)].to_vec();
                    trainer.part_written = Some((generation.0, record));
                    let whole = trainer.model.digest();
                    if let Some(session) = &mut trainer.session {
                        session.copied_for_checkpoint(Duration::ZERO, whole);
                    }
                    CheckpointWork::Part { key: (step, generation.0), rank, bytes }
                }
            };
            let delay: Micros = match self.rng.below(10) {
                0 => self.rng.between(10_000, 500_000),
                _ => self.rng.between(100, 10_000),
            };
            self.clock.after(delay, Event::CheckpointWritten { p, work: Box::new(work) });
        }
    }

    /// The checkpoint thread of `p` has finished a write.
    pub(super) fn on_checkpoint_written(&mut self, p: usize, work: CheckpointWork) {
        let fails = self.rng.chance(1, 30);
        let Some(session) = &mut self.processes[p].trainer.session else { return };
        match work {
            CheckpointWork::Part { key, rank, bytes } => {
                let written = Written { bytes: bytes.len() as u64, digest: 0 };
                session.wrote_part(key.0, if fails { Err(()) } else { Ok(written) });
                self.checkpoint_store.parts.entry(key).or_default().insert(rank, bytes);
            }
            CheckpointWork::Manifest { key, record, world_size } => {
                session.committed_checkpoint(key.0, !fails);
                if fails {
                    return;
                }
                let parts = self.checkpoint_store.parts.remove(&key).unwrap_or_default();
                let whole = (0..world_size).all(|rank| parts.contains_key(&rank));
                let parameters: Vec<u8> = parts.into_values().flatten().collect();
                let counted = parameters.iter().map(|&n| u64::from(n)).sum::<u64>();
                trace!(self, "{}: the checkpoint of step {} is complete", self.name(p), key.0);
                let is_committed =
                    self.oracle.has_committed(key.1, key.0, digest(parameters.iter()));
                if !whole || !is_committed || counted != record.records_trained {
                    self.violate(format!(
                        "the checkpoint {key:?} holds no committed state: {parameters:?}"
                    ));
                }
                self.oracle.coverage.checkpoints += 1;
                self.checkpoint_store.complete.insert(key, (record, parameters));
            }
        }
    }

    /// Loads the newest checkpoint as the initial state of a group. Returns whether there is a
    /// checkpoint.
    pub(super) fn restore(&mut self, p: usize) -> bool {
        let Some((key, (record, parameters))) = self.checkpoint_store.complete.last_key_value()
        else {
            return false;
        };
        let trainer = &mut self.processes[p].trainer;
        let Some(session) = &mut trainer.session else { return false };
        let is_true = session.restore(record.clone(), true);
        trainer.model.parameters.clone_from(parameters);
        trace!(self, "{}: begins from the checkpoint of {key:?}", self.name(p));
        self.oracle.coverage.restored += 1;
        if !is_true {
            self.violate(format!("{}: a checkpoint is inconsistent", self.name(p)));
        }
        true
    }
}
