//! Topology of the short operations of a large group: a binary tree over the ranks, whose subtrees
//! are ranges of ranks. Pure.
//!
//! ```text
//! world 8            0
//!               1         5         the left child of a rank is the next one,
//!             2   4     6   7       the right child follows the left one's subtree
//!            3
//! ```
//!
//! Links to left children belong to the ring. So a rank has at most two links more: to its right
//! child, and from the rank whose right child it is.

use std::ops::Range;

/// Position of one rank in the tree.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct TreePosition {
    /// `None` at rank 0.
    pub(crate) parent: Option<usize>,
    /// The next rank.
    pub(crate) left: Option<usize>,
    pub(crate) right: Option<usize>,
    /// This rank and all below it, in ascending order.
    pub(crate) subtree: Range<usize>,
}

/// Returns the position of `rank` in a group of `world` ranks.
pub(crate) fn position(rank: usize, world: usize) -> TreePosition {
    assert!(rank < world, "rank {rank} of {world}");
    let (mut parent, mut subtree) = (None, 0..world);
    loop {
        let top = subtree.start;
        let below = subtree.end - top - 1;
        let middle = top + 1 + below.div_ceil(2);
        if rank == top {
            let left = (below > 0).then_some(top + 1);
            let right = (middle < subtree.end).then_some(middle);
            return TreePosition { parent, left, right, subtree };
        }
        parent = Some(top);
        subtree = if rank < middle { top + 1..middle } else { middle..subtree.end };
    }
}

impl TreePosition {
    /// Whether the parent reaches this rank by a link that is not of the ring.
    pub(crate) fn is_right_child(&self) -> bool {
        self.parent.is_some_and(|parent| parent + 1 != self.subtree.start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_is_a_child_of_its_parent_and_a_subtree_is_its_rank_and_those_of_its_children() {
        for world in (1..=40).chain([1000]) {
            for rank in 0..world {
                let TreePosition { parent, left, right, subtree } = position(rank, world);
                let children = || left.into_iter().chain(right);
                assert!(children().all(|child| position(child, world).parent == Some(rank)));
                assert!(left.is_none_or(|left| left == rank + 1));
                let below = children().flat_map(|child| position(child, world).subtree);
                let all: Vec<usize> = std::iter::once(rank).chain(below).collect();
                assert_eq!(all, subtree.collect::<Vec<_>>(), "rank {rank} of {world}");
                assert_eq!(parent.is_none(), rank == 0);
                let is_right = parent.is_some_and(|up| position(up, world).right == Some(rank));
                assert_eq!(position(rank, world).is_right_child(), is_right);
            }
        }
    }

    #[test]
    fn the_depth_is_the_logarithm_of_the_ranks() {
        let depth = |world| {
            let up = |rank: &usize| position(*rank, world).parent;
            (0..world).map(|rank| std::iter::successors(Some(rank), up).count() - 1).max()
        };
        assert_eq!([1, 2, 3, 8, 1000].map(depth), [0, 1, 1, 3, 9].map(Some));
    }
}
