//! Topology of a small all-reduce: the ring, cut into two chains that meet at rank 0. Pure.
//!
//! ```text
//! world 5      2 ─▶ 1 ─▶ 0 ◀─ 4 ◀─ 3      reduce phase: partial sums move up
//!              2 ◀─ 1 ◀─ 0 ─▶ 4 ─▶ 3      broadcast phase: the total moves down
//! ```
//!
//! All links belong to the ring and are used in both directions: 2·(world−1) messages in all, at
//! most `world` of them in sequence. The ring algorithm needs world·2·(world−1) messages,
//! 2·(world−1) of them in sequence, but its messages are shorter.

use std::ops::Range;

/// Position of one rank on its chain.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct ChainPosition {
    /// Direction of rank 0; `None` at rank 0.
    pub(crate) parent: Option<Side>,
    /// Whether the next rank sends its partial sum to this rank.
    pub(crate) next_is_child: bool,
    /// Whether the previous rank sends its partial sum to this rank.
    pub(crate) prev_is_child: bool,
    /// Ranks whose contributions are in the partial sum that this rank sends up.
    pub(crate) subtree: Range<usize>,
}

/// One of the two neighbours in the ring.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Side {
    Next,
    Prev,
}

/// Returns the position of `rank` in a group of `world` ranks, at least 2.
pub(crate) fn position(rank: usize, world: usize) -> ChainPosition {
    assert!(rank < world && world >= 2, "rank {rank} of {world}");
    let tip = world / 2;
    match rank {
        0 => ChainPosition {
            parent: None,
            next_is_child: true,
            prev_is_child: tip + 1 < world,
            subtree: 0..world,
        },
        _ if rank <= tip => ChainPosition {
            parent: Some(Side::Prev),
            next_is_child: rank < tip,
            prev_is_child: false,
            subtree: rank..tip + 1,
        },
        _ => ChainPosition {
            parent: Some(Side::Next),
            next_is_child: false,
            prev_is_child: rank > tip + 1,
            subtree: tip + 1..rank + 1,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_is_a_child_of_its_parent_and_rank_0_is_the_root() {
        for world in 2..=20 {
            for rank in 1..world {
                let ChainPosition { parent, subtree, .. } = position(rank, world);
                assert!(subtree.contains(&rank));
                let (parent, is_child) = match parent.unwrap() {
                    Side::Next => {
                        ((rank + 1) % world, position((rank + 1) % world, world).prev_is_child)
                    }
                    Side::Prev => (rank - 1, position(rank - 1, world).next_is_child),
                };
                assert!(is_child, "rank {rank} of {world}");
                let above = position(parent, world).subtree;
                assert!(
                    above.start <= subtree.start
                        && subtree.end <= above.end
                        && above.len() > subtree.len()
                );
            }
            let children = (0..world).map(|rank| position(rank, world));
            let count: usize =
                children.map(|p| usize::from(p.next_is_child) + usize::from(p.prev_is_child)).sum();
            assert_eq!(count, world - 1);
        }
    }

    #[test]
    fn a_subtree_is_the_rank_and_the_subtrees_of_its_children() {
        for world in 2..=20 {
            for rank in 0..world {
                let own = position(rank, world);
                let mut parts = vec![rank];
                if own.next_is_child {
                    parts.extend(position(rank + 1, world).subtree);
                }
                if own.prev_is_child {
                    parts.extend(position((rank + world - 1) % world, world).subtree);
                }
                parts.sort_unstable();
                assert_eq!(parts, own.subtree.collect::<Vec<_>>(), "rank {rank} of {world}");
            }
        }
    }
}
