//! Operations of large groups along their tree of links.

use super::HostGroup;
use crate::CollectiveError;
use crate::net::frame::Kind;
use crate::transfer::Fault;
use crate::transfer::tree::{Part, TreeLinks, TreeTransfer};

impl HostGroup {
    pub(crate) fn with_tree(self, tree: Option<TreeLinks>) -> Self {
        let world = self.rank_info.world;
        let ring_bytes_min = match &tree {
            Some(_) => TREE_BYTES_PER_RANK * world,
            None => self.ring_bytes_min,
        };
        Self { tree, ring_bytes_min, ..self }
    }

    /// The next operation along the tree; `None` in groups without one.
    pub(super) fn tree_transfer(&self, kind: Kind) -> Option<TreeTransfer<'_>> {
        let links = (self.links.as_ref()?, self.tree.as_ref()?);
        let (registration, progress) = (&self.registration, &self.progress);
        let op_tag = self.op_tag(kind);
        Some(TreeTransfer::new(links, registration, progress, op_tag, self.rank_info))
    }

    /// Replaces `note`, if there is one, and `body` by those of the root. Returns `false`, and does
    /// nothing, in groups without a tree.
    pub(super) fn broadcast_along_tree(
        &mut self,
        kind: Kind,
        root: usize,
        mut note: Option<&mut Vec<u8>>,
        body: &mut [u8],
    ) -> Result<bool, CollectiveError> {
        if self.tree.is_none() {
            return Ok(false);
        }
        let (total_bytes, has_note) = (body.len(), note.is_some());
        let mut nothing = Vec::new();
        let mut parts: Vec<&mut [u8]> = body.chunks_mut(PART_BYTES).collect();
        if parts.is_empty() {
            parts.push(&mut []);
        }
        let mut result: Result<(), Fault> = Ok(());
        for (segment, part) in parts.into_iter().enumerate() {
            let Some(transfer) = self.tree_transfer(kind) else { break };
            let note = note.as_deref_mut().unwrap_or(&mut nothing);
            let of = Part { root, segment, total_bytes, has_note };
            result = transfer.broadcast(of, note, part);
            if result.is_err() {
                break;
            }
        }
        self.end(result).map(|()| true)
    }
}

/// Length of a sum, for each rank of the group, from which the ring is faster than the tree. With
/// cost α per message and β per byte, a tree takes some 2·log2(world)·α + 3·β·bytes, and a ring
/// 2·world·α + 2·β·bytes. The two are equal at about 2·α/β bytes for each rank: 40 KB at 20 µs and
/// 1 GB/s.
const TREE_BYTES_PER_RANK: usize = 32 << 10;

/// Largest body of a frame in a broadcast.
const PART_BYTES: usize = 1 << 30;
