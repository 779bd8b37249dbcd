//! The storage of checkpoints: parts and manifests take time to be written, and are lost with the
//! process that writes them.
//!
//! **Oracle:** a checkpoint that a manifest completes is a state that its group has committed, and
//! its ledger counts the same records as its parameters.

use elasticdl::machine::{Completion, OwnShard};
use elasticdl::session::checkpoint::{Written, WrittenRows};
use elasticdl::session::header::StateRecord;

use super::clock::Micros;
use super::model::digest;
use super::state::checkpoints::{CheckpointWork, Key, Part, SavedRows};
use super::state::event::Event;
use super::trace::trace;
use super::world::World;

impl World {
    /// Starts to write a part of a checkpoint.
    pub(super) fn write_checkpoint(
        &mut self,
        p: usize,
        shard: OwnShard,
        record: StateRecord,
        part: Part,
    ) {
        let OwnShard { step, generation, rank, .. } = shard;
        self.processes[p].trainer.part_written = Some((generation, record));
        let key = (step, generation.0);
        self.write_later(p, CheckpointWork::Part { key, rank, part });
    }

    /// Starts to write the manifest of a checkpoint.
    pub(super) fn commit_checkpoint(&mut self, p: usize, step: u64, world_size: usize) {
        let written = &mut self.processes[p].trainer.part_written;
        if let Some((generation, record)) = written.take_if(|(_, record)| record.step == step) {
            let key = (step, generation.0);
            self.write_later(p, CheckpointWork::Manifest { key, record, world_size });
        }
    }

    fn write_later(&mut self, p: usize, work: CheckpointWork) {
        let delay: Micros = match self.rng.below(10) {
            0 => self.rng.between(10_000, 500_000),
            _ => self.rng.between(100, 10_000),
        };
        self.clock.after(delay, Event::CheckpointWritten { p, work: Box::new(work) });
    }

    /// The checkpoint thread of `p` has finished a write.
    pub(super) fn on_checkpoint_written(&mut self, p: usize, work: CheckpointWork) {
        let fails = self.rng.chance(1, 30);
        let failed = || "the storage refuses".to_owned();
        let completion = match work {
            CheckpointWork::Part { key, rank, part } => {
                let bytes = part.parameters.len() as u64;
                let rows = WrittenRows { balance: part.balance, ..WrittenRows::default() };
                let written = Written { bytes, rows: Some(rows), ..Written::default() };
                self.checkpoint_store.parts.entry(key).or_default().insert(rank, part);
                let result = if fails { Err(failed()) } else { Ok(written) };
                Completion::Written { step: key.0, result }
            }
            CheckpointWork::Manifest { key, record, world_size } => {
                if !fails {
                    self.complete_checkpoint(p, key, record, world_size);
                }
                let result = if fails { Err(failed()) } else { Ok(0) };
                Completion::Committed { step: key.0, name: format!("step-{}", key.0), result }
            }
        };
        self.processes[p].trainer.completions.borrow_mut().push_back(completion);
    }

    fn complete_checkpoint(&mut self, p: usize, key: Key, record: StateRecord, world_size: usize) {
        let parts = self.checkpoint_store.parts.remove(&key).unwrap_or_default();
        let whole = (0..world_size).all(|rank| parts.contains_key(&rank));
        let (mut parameters, mut rows) = (Vec::new(), SavedRows::new());
        for part in parts.into_values() {
            parameters.extend(part.parameters);
            rows.extend(part.rows);
        }
        let shards = self.setting.shards();
        let has_rows = rows.len() == shards as usize;
        let counted = parameters.iter().map(|&n| u64::from(n)).sum::<u64>();
        trace!(self, "{}: the checkpoint of step {} is complete", self.name(p), key.0);
        let is_committed = self.oracle.has_committed(key.1, key.0, digest(&parameters));
        if !whole || !has_rows || !is_committed || counted != record.records_trained {
            self.violate(format!(
                "the checkpoint {key:?} holds no committed state: {parameters:?}"
            ));
        }
        self.oracle.coverage.checkpoints += 1;
        self.checkpoint_store.complete.insert(key, (record, parameters));
        self.checkpoint_store.rows.insert(key, rows);
    }

    /// `p` creates the state of its group. Returns the newest checkpoint, if there is one.
    pub(super) fn restore(&mut self, p: usize) -> Option<(Key, (StateRecord, Vec<u8>))> {
        let lineage = self.oracle.begin_lineage();
        let trainer = &mut self.processes[p].trainer;
        (trainer.lineage, trainer.has_created) = (lineage, true);
        self.check_initial(p);
        let Some((key, newest)) = self.checkpoint_store.complete.last_key_value() else {
            trace!(self, "{}: creates the initial state", self.name(p));
            return None;
        };
        let (key, newest) = (*key, newest.clone());
        trace!(self, "{}: begins from the checkpoint of {key:?}", self.name(p));
        self.oracle.coverage.restored += 1;
        Some((key, newest))
    }
}
