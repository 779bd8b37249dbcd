//! Checkpoints of the simulated workers: parts and manifests that take time to be written, and die
//! with their writers.
//!
//! **Oracle:** what a manifest makes complete is the state that its group has committed, and its
//! ledger counts what its parameters count.

use std::collections::BTreeMap;

use elasticdl_worker::core::checkpoint::{Task, Written};
use elasticdl_worker::core::header::StateRecord;
use elasticdl_worker::core::session::Session;

use super::clock::Micros;
use super::model::digest;
use super::story::tell;
use super::world::{Event, World};

/// Step, and the generation that wrote it.
type Key = (u64, u64);

/// Where checkpoints are: it outlives everybody.
#[derive(Debug, Default)]
pub(super) struct Vault {
    /// By rank.
    parts: BTreeMap<Key, BTreeMap<usize, Vec<u8>>>,
    complete: BTreeMap<Key, (StateRecord, Vec<u8>)>,
    /// Nothing can be written.
    pub(super) is_away: bool,
}

/// What a worker's checkpoint thread does.
#[derive(Debug)]
pub(super) enum Work {
    Manifest { key: Key, record: StateRecord, world_size: usize },
    Part { key: Key, rank: usize, bytes: Vec<u8> },
}

impl World {
    /// Hands what there is to do for checkpoints over. To be called before the state changes again.
    pub(super) fn tend_checkpoints(&mut self, p: usize) {
        while let Some(task) =
            self.processes[p].trainer.session.as_mut().and_then(Session::poll_checkpoint)
        {
            let trainer = &mut self.processes[p].trainer;
            let work = match task {
                Task::Commit { step, parts } => {
                    let Some((generation, record)) = trainer.keeps.take_if(|(_, r)| r.step == step)
                    else {
                        continue;
                    };
                    Work::Manifest { key: (step, generation), record, world_size: parts.len() }
                }
                Task::Write { step, generation, rank, world_size } => {
                    let Some(state) = trainer.state().filter(|state| state.step == step) else {
                        return self.violate(format!(
                            "{} is to keep step {step}, and is elsewhere",
                            self.name(p)
                        ));
                    };
                    let record = state.record();
                    let all = &trainer.model.parameters;
                    let at = |rank: usize| all.len() * rank / world_size;
                    let bytes = all[at(rank)..at(rank + 1)].to_vec();
                    trainer.keeps = Some((generation.0, record));
                    Work::Part { key: (step, generation.0), rank, bytes }
                }
            };
            let delay: Micros = match self.dice.below(10) {
                0 => self.dice.between(10_000, 500_000),
                _ => self.dice.between(100, 10_000),
            };
            self.clock.after(delay, Event::Kept { p, work: Box::new(work) });
        }
    }

    /// The checkpoint thread of `p` is done with something.
    pub(super) fn on_kept(&mut self, p: usize, work: Work) {
        let fails = self.dice.chance(1, 30);
        let Some(session) = &mut self.processes[p].trainer.session else { return };
        match work {
            Work::Part { key, rank, bytes } => {
                let written = Written { bytes: bytes.len() as u64, digest: 0 };
                session.wrote_part(key.0, if fails { Err(()) } else { Ok(written) });
                self.vault.parts.entry(key).or_default().insert(rank, bytes);
            }
            Work::Manifest { key, record, world_size } => {
                session.committed_checkpoint(key.0, !fails);
                if fails {
                    return;
                }
                let parts = self.vault.parts.remove(&key).unwrap_or_default();
                let whole = (0..world_size).all(|rank| parts.contains_key(&rank));
                let parameters: Vec<u8> = parts.into_values().flatten().collect();
                let counted = parameters.iter().map(|&n| u64::from(n)).sum::<u64>();
                tell!(self, "{}: the checkpoint of step {} is complete", self.name(p), key.0);
                let is_committed = self.books.has_committed(key.1, key.0, digest(&parameters));
                if !whole || !is_committed || counted != record.records_trained {
                    self.violate(format!(
                        "a checkpoint of {key:?} is of no step that was made: {parameters:?}"
                    ));
                }
                self.books.tally.kept += 1;
                self.vault.complete.insert(key, (record, parameters));
            }
        }
    }

    /// The state that a group without one begins with, where there is a checkpoint; whether there
    /// is.
    pub(super) fn restore(&mut self, p: usize) -> bool {
        let Some((key, (record, parameters))) = self.vault.complete.last_key_value() else {
            return false;
        };
        let trainer = &mut self.processes[p].trainer;
        let Some(session) = &mut trainer.session else { return false };
        let is_true = session.restore(record.clone(), true);
        trainer.model.parameters.clone_from(parameters);
        tell!(self, "{}: begins from the checkpoint of {key:?}", self.name(p));
        self.books.tally.restored += 1;
        if !is_true {
            self.violate(format!("{}: a checkpoint makes no sense", self.name(p)));
        }
        true
    }
}
