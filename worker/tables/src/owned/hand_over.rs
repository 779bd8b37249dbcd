//! Members that leave in order give copies of their shards away before.
//!
//! ```text
//!   leaves ──▶ copies ⟲ until the others hold all ──▶ barrier ──▶ placement
//! ```
//!
//! **Invariant:** a rank adopts the placement with the copies only when all ranks have theirs. So a
//! later group can begin with the placement of any of its ranks. The members that leave are still
//! in it, as they hold their shards until a step is committed without them: one that comes back,
//! because others are lost, brings them along.

use std::mem;

use super::{Content, Owned, Ownership};
use crate::lookup::Ids;
use crate::wire::InvalidRows;

impl<C: Content> Ownership<C> {
    /// Some members of the group leave, by rank. No step is committed until the end of the
    /// hand-over.
    pub fn begin_hand_over(&mut self, leaves: &[bool]) {
        let group = self.group_mut();
        group.is_settled = false;
        group.members.iter_mut().zip(leaves).for_each(|(member, leaves)| member.leaves = *leaves);
    }

    /// Decides which shards to copy next, so that the ranks that stay hold all. Returns whether
    /// there are any.
    pub(super) fn plan_hand_over(&mut self) -> bool {
        let group = self.group_mut();
        group.copies = group.placement.copies(&group.members);
        !group.copies.is_empty()
    }

    /// This rank has received the copies of the plan. Until the end of the hand-over they do not
    /// count: some ranks may not have theirs.
    pub(super) fn hold_copies(&mut self) {
        let group = self.group_mut();
        let copied = mem::take(&mut group.copied).into_iter();
        group.placement = group.placement.after(&group.copies, &group.members);
        let committed = self.committed.as_mut().expect("a worker of a group has a state");
        committed.shards.extend(copied);
    }

    /// All ranks have their copies. A later group of any of them begins with these.
    pub fn end_hand_over(&mut self) {
        let placement = self.group().placement.clone();
        let committed = self.committed.as_mut().expect("a worker of a group has a state");
        committed.placement = placement.with_holders_of(&committed.placement);
    }
}

impl Owned {
    /// What to give each rank next, so that those that stay hold all shards; `None` when they do.
    ///
    /// # Errors
    /// As for [`replies`](Self::replies).
    pub fn handed_over(&mut self) -> Result<Option<Vec<Vec<u8>>>, InvalidRows> {
        if !self.plan_hand_over() {
            return Ok(None);
        }
        let nothing = vec![Vec::new(); self.group().members.len()];
        self.replies(&nothing).map(Some)
    }

    /// Takes in what all ranks have [handed over](Self::handed_over).
    ///
    /// # Errors
    /// As for [`receive`](Self::receive).
    pub fn take_over(&mut self, messages: &[Vec<u8>]) -> Result<(), InvalidRows> {
        self.receive(&Ids::default(), messages)?;
        self.hold_copies();
        Ok(())
    }
}
