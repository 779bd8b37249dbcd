//! What a group does when all copies of rows are lost with their workers: it gives its state up, or
//! goes on with the rows of a checkpoint in their place.

use elasticdl_proto::{CheckpointNews, WorkerMessage};
use elasticdl_tables::SavedShard;

use super::Trainer;
use super::peers::refused;
use super::row_tables::{Loss, LostRows, ReplacedRows, RowTables};
use super::stopped::{Stopped, decode_all};
use crate::checkpoint::RestoreError;
use crate::failure::Failure;
use crate::machine::{CheckpointStore, Group};
use crate::model::Model;
use crate::session::InvalidData;
use crate::session::header;

impl Loss {
    /// Number of lost shards.
    pub(super) fn shards(&self) -> u32 {
        self.lost.0.len() as u32
    }
}

impl RowTables {
    /// Reads the lost rows from the newest checkpoint that all ranks can read, or begins them anew
    /// if there is none. Returns the checkpoint's name, and the touches of all rows of the group.
    fn read_older(
        &mut self,
        group: &mut dyn Group,
        (step, loss): (u64, Loss),
        store: &mut dyn CheckpointStore,
        damaged: &mut dyn FnMut(&str, &str),
    ) -> Result<(Option<String>, u64), Stopped> {
        store.forget_rows();
        let wanted = self.owned().to_be_read(&loss.lost, &loss.members);
        loop {
            let mut bytes = Vec::new();
            if group.rank() == 0 {
                let newest = store.newest(step, &mut *damaged).map_err(|error| match error {
                    RestoreError::Refused(error) => Failure::fatal(error),
                    RestoreError::Storage(error) => Failure::local(error),
                })?;
                bytes = header::encode(&newest);
            }
            group.broadcast_bytes(0, &mut bytes)?;
            let newest: Option<(String, bool)> =
                header::decode(&bytes).ok_or(InvalidData("a checkpoint's name"))?;
            let read = match &newest {
                Some((name, same_run)) => self.read_shards((name, *same_run), &wanted, store)?,
                None => Ok(self.owned().empty(&wanted)),
            };
            let (shards, error) = match read {
                Ok(shards) => (shards, None),
                Err(reason) => (Vec::new(), Some(reason)),
            };
            // A rank that passes here knows that all have the rows that they are to hold.
            let all: Vec<Option<String>> = decode_all(group.all_gather(&header::encode(&error))?)?;
            match (all.into_iter().flatten().next(), newest) {
                (Some(reason), Some((name, same_run))) => {
                    store.pass_over((&name, same_run), &reason);
                }
                (_, newest) => {
                    let checkpoint = newest.map(|(name, _)| name);
                    self.replaced.replace(ReplacedRows {
                        step,
                        shards: loss.lost.0.clone(),
                        checkpoint: checkpoint.clone(),
                    });
                    let Loss { placement, recovery, members, .. } = loss;
                    let (state, of_group) = ((step, placement), (group.generation(), members));
                    self.owned.regroup_with_older(state, &recovery, of_group, shards);
                    let touches = header::encode(&self.owned().touches());
                    let all: Vec<u64> = decode_all(group.all_gather(&touches)?)?;
                    return Ok((checkpoint, all.into_iter().sum()));
                }
            }
        }
    }

    /// Reads these shards from a checkpoint. The inner error: no worker can.
    pub(super) fn read_shards(
        &self,
        checkpoint: (&str, bool),
        wanted: &[u32],
        store: &mut dyn CheckpointStore,
    ) -> Result<Result<Vec<SavedShard>, String>, Failure> {
        let mut shards = Vec::new();
        let mut take = |number, bytes: &[u8]| {
            let shard = self.owned().decode(number, bytes);
            shards.push(shard.map_err(|error| error.reason().to_owned())?);
            Ok(())
        };
        let read = refused(store.read_rows(checkpoint, wanted, &mut take))?;
        Ok(read.map(|()| shards))
    }
}

impl<M: Model> Trainer<'_, M> {
    /// All copies of rows are lost. Returns whether the group goes on from its state.
    pub(super) fn lose_rows(&mut self, loss: Loss) -> Result<bool, Stopped> {
        let Self { session, tables, tensors, checkpoints, outbox, .. } = self;
        let Some((state, tables)) = session.state().zip(tables.as_mut()) else { return Ok(true) };
        let (step, row_touches, shards) = (state.step, state.row_touches, loss.shards());
        if !tables.goes_on_with_older {
            self.go_back(Some(shards));
            return Ok(false);
        }
        tracing::warn!(step, shards, "rows are missing; those of a checkpoint take their place");
        let group = tensors.group_mut()?;
        let tell = |news| outbox.send(WorkerMessage::Checkpoint(news));
        let is_first = group.rank() == 0;
        if is_first {
            tell(CheckpointNews::RowsLost { step, shards, row_touches });
        }
        let mut damaged = |name: &str, reason: &str| {
            let (name, reason) = (name.to_owned(), reason.to_owned());
            tell(CheckpointNews::Damaged { name, reason });
        };
        let store = &mut *checkpoints.store;
        let (name, counted) = tables.read_older(group, (step, loss), store, &mut damaged)?;
        if is_first {
            let missing = row_touches.saturating_sub(counted);
            tell(CheckpointNews::OlderRows { name, missing });
        }
        Ok(true)
    }

    /// The group goes back: this number of shards that belong to its state are lost, or those of
    /// the checkpoint that it began from can't be read.
    pub(super) fn go_back(&mut self, lost: Option<u32>) {
        let Some(state) = self.session.state() else { return };
        tracing::warn!(step = state.step, lost, "shards are missing; the group gives up its state");
        let (step, row_touches) = (state.step, state.row_touches);
        let lost = lost.map(|shards| LostRows { step, shards, row_touches });
        self.tables.iter_mut().for_each(|tables| tables.go_back(lost));
        self.sharded.iter_mut().for_each(|sharded| sharded.go_back(lost));
        if let Some(bridge) = self.model.as_bridge() {
            bridge.forget();
        }
        // Joining workers would go on with the state that the group gives up.
        self.donor.dismiss();
        self.session.go_back();
    }
}
