//! What the ranks of a new group tell each other about what is divided over them, and how they
//! agree on who holds which part.

use elasticdl_proto::WorkerId;
use elasticdl_tables::{Content, Member, OwnedHeader, Ownership, Placement, Recovery};
use xxhash_rust::xxh3::xxh3_64;

use super::stopped::{Stopped, decode_all};
use crate::checkpoint::RestoreError;
use crate::failure::Failure;
use crate::machine::Group;
use crate::session::InvalidData;
use crate::session::header::{self, StateHeader, SyncHeader};

/// The ranks of a group, as they have told.
#[derive(Debug, Default)]
pub(super) struct Peers {
    /// What each rank has, its host, and whether it is a table server.
    told: Vec<(Option<OwnedHeader>, u64, bool)>,
    /// The step whose parameters all ranks have, if they have committed it together.
    gathered: Option<u64>,
    /// The checkpoint from which this rank has created the state of the group of this generation:
    /// its name, and whether this run wrote it.
    restored: Option<(u64, (String, bool))>,
}

/// Where a group's shards are.
#[derive(Debug)]
pub(super) enum Source {
    /// In a checkpoint of this name; whether this run wrote it.
    Checkpoint(String, bool),
    /// On its members, and on those of earlier groups.
    Members(Recovery, Placement),
}

impl Peers {
    /// Takes in what the ranks of a new group tell.
    pub(super) fn synced(&mut self, headers: &[SyncHeader]) {
        let host = |header: &SyncHeader| xxh3_64(header.origin.host.as_bytes());
        let told = |h: &SyncHeader| (h.owned.clone(), host(h), h.origin.serves_tables);
        self.told = headers.iter().map(told).collect();
        let committed = |header: &SyncHeader| {
            let StateHeader { step, digest, .. } = header.state.filter(|_| header.is_gathered)?;
            let of = OwnedHeader::generation_of(step, std::slice::from_ref(&header.owned))?;
            Some((step, digest, header.created, of))
        };
        let first = headers.first().and_then(committed);
        let is_same = headers.iter().all(|header| committed(header) == first);
        self.gathered = first.filter(|_| is_same).map(|(step, ..)| step);
    }

    /// Whether all ranks have the parameters of `step`, those of one commit.
    pub(super) fn have_gathered(&self, step: u64) -> bool {
        self.gathered == Some(step)
    }

    /// This rank has created the state of the group of this generation from a checkpoint, which
    /// `same_run` has written, or another.
    pub(super) fn restored(&mut self, generation: u64, name: String, same_run: bool) {
        self.restored = Some((generation, (name, same_run)));
    }

    /// The group gives up its state.
    pub(super) fn go_back(&mut self) {
        self.told.iter_mut().for_each(|(header, ..)| *header = None);
        self.gathered = None;
    }

    /// The members of the group, in the order of their ranks.
    pub(super) fn members(&self, members: &[WorkerId]) -> Vec<Member> {
        let member = |(&WorkerId(worker), &(_, host, serves))| Member {
            serves,
            ..Member::new(worker, host)
        };
        members.iter().zip(&self.told).map(member).collect()
    }

    /// Generation of the group that committed `step`.
    pub(super) fn generation_of(&self, step: u64) -> Option<u64> {
        OwnedHeader::generation_of(step, &self.headers())
    }

    /// How the ranks come to one state of the shards of `step`; `None` if no rank has it.
    pub(super) fn recovery(&self, step: u64) -> Option<Recovery> {
        Recovery::plan(step, self.generation_of(step)?, &self.headers())
    }

    /// All ranks agree on where the shards of `step` are, of which this rank has `owned`.
    pub(super) fn source<C: Content>(
        &self,
        group: &mut dyn Group,
        step: u64,
        owned: &Ownership<C>,
    ) -> Result<Source, Stopped> {
        if let Some(recovery) = self.recovery(step) {
            let placement = owned.placement().filter(|_| group.rank() == recovery.root);
            let mut bytes = placement.map(header::encode).unwrap_or_default();
            group.broadcast_bytes(recovery.root, &mut bytes)?;
            let placement = header::decode(&bytes).ok_or(InvalidData("a placement of shards"))?;
            return Ok(Source::Members(recovery, placement));
        }
        let generation = group.generation();
        let restored = self.restored.as_ref().filter(|(of, _)| *of == generation);
        // The first rank creates the state.
        let mut bytes = header::encode(&restored.map(|(_, checkpoint)| checkpoint));
        group.broadcast_bytes(0, &mut bytes)?;
        let restored: Option<(String, bool)> =
            header::decode(&bytes).ok_or(InvalidData("a checkpoint's name"))?;
        Ok(match restored {
            Some((name, same_run)) => Source::Checkpoint(name, same_run),
            None => {
                let recovery = Recovery::of_nothing(generation, group.world_size());
                Source::Members(recovery, owned.held_by_none())
            }
        })
    }

    fn headers(&self) -> Vec<Option<OwnedHeader>> {
        self.told.iter().map(|(header, ..)| header.clone()).collect()
    }
}

/// Separates what no worker can read, the inner error, from what this one can't read now.
pub(super) fn refused<T>(read: Result<T, RestoreError>) -> Result<Result<T, String>, Failure> {
    match read {
        Ok(read) => Ok(Ok(read)),
        Err(RestoreError::Refused(error)) => Ok(Err(error)),
        Err(RestoreError::Storage(error)) => Err(Failure::local(error)),
    }
}

/// All ranks learn whether each has `read` its shards, and if not, the first reason.
pub(super) fn all_have_read(
    group: &mut dyn Group,
    read: Result<(), String>,
) -> Result<Result<(), String>, Stopped> {
    let all: Vec<Option<String>> = decode_all(group.all_gather(&header::encode(&read.err()))?)?;
    Ok(all.into_iter().flatten().next().map_or(Ok(()), Err))
}

#[cfg(test)]
mod tests {
    use elasticdl_tables::{ChunkLayout, Chunks};

    use super::*;

    /// A rank with the parameters of step 0, whose chunks are those of the group of `generation`.
    fn header(generation: u64) -> SyncHeader {
        let state = StateHeader { step: 0, digest: 1, has_result: true, was_in_group: true };
        let mut chunks = Chunks::of_optimizer(1, ChunkLayout::new(10, 1));
        chunks.create(generation, vec![Member::new(1, 1)]);
        let owned = chunks.header();
        SyncHeader { state: Some(state), owned, is_gathered: true, ..SyncHeader::default() }
    }

    #[test]
    fn ranks_have_gathered_a_step_if_they_have_its_parameters_of_the_same_commit() {
        let has_gathered = |other: SyncHeader| {
            let mut peers = Peers::default();
            peers.synced(&[header(1), other.clone()]);
            let in_any_order = peers.have_gathered(0);
            peers.synced(&[other, header(1)]);
            assert_eq!(peers.have_gathered(0), in_any_order);
            assert!(!peers.have_gathered(1));
            in_any_order
        };
        assert!(has_gathered(header(1)));
        let has_result = StateHeader { has_result: false, ..header(1).state.unwrap() };
        assert!(has_gathered(SyncHeader { state: Some(has_result), ..header(1) }));
        assert!(!has_gathered(SyncHeader { is_gathered: false, ..header(1) }));
        assert!(!has_gathered(SyncHeader { created: 9, ..header(1) }));
        assert!(!has_gathered(SyncHeader { owned: None, ..header(1) }));
        assert!(!has_gathered(header(2)));
        for (step, digest) in [(0, 2), (1, 1)] {
            let state = StateHeader { step, digest, ..header(1).state.unwrap() };
            assert!(!has_gathered(SyncHeader { state: Some(state), ..header(1) }));
        }
        assert!(!has_gathered(SyncHeader::default()));
    }

    #[test]
    fn a_group_that_gives_up_its_state_has_gathered_none() {
        let mut peers = Peers::default();
        peers.synced(&[header(1), header(1)]);
        peers.go_back();
        assert!(!peers.have_gathered(0));
    }
}
