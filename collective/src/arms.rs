//! Where a small sum meets: the ring, laid out as two arms that end at rank 0. Pure.
//!
//! ```text
//! world 5      2 ─▶ 1 ─▶ 0 ◀─ 4 ◀─ 3      up: partial sums
//!              2 ◀─ 1 ◀─ 0 ─▶ 4 ─▶ 3      down: the total
//! ```
//!
//! All links are the ring's, used both ways: 2·(world−1) messages in all, at most `world` of them
//! one after the other. The ring needs world·2·(world−1), 2·(world−1) of them one after the other,
//! but of shorter ones.

use std::ops::Range;

/// One rank's place on its arm.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Place {
    /// Where rank 0 is; none at rank 0 itself.
    pub(crate) parent: Option<Side>,
    /// Whether partial sums come from there.
    pub(crate) next_is_child: bool,
    pub(crate) prev_is_child: bool,
    /// The ranks whose parts are in what this rank sends up.
    pub(crate) subtree: Range<usize>,
}

/// A neighbour.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Side {
    Next,
    Prev,
}

/// The place of `rank` in a ring of `world`, at least 2.
pub(crate) fn place(rank: usize, world: usize) -> Place {
    assert!(rank < world && world >= 2, "rank {rank} of {world}");
    let tip = world / 2;
    match rank {
        0 => Place {
            parent: None,
            next_is_child: true,
            prev_is_child: tip + 1 < world,
            subtree: 0..world,
        },
        _ if rank <= tip => Place {
            parent: Some(Side::Prev),
            next_is_child: rank < tip,
            prev_is_child: false,
            subtree: rank..tip + 1,
        },
        _ => Place {
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
    fn every_rank_is_its_parents_child_and_rank_0_has_all() {
        for world in 2..=20 {
            for rank in 1..world {
                let Place { parent, subtree, .. } = place(rank, world);
                assert!(subtree.contains(&rank));
                let (parent, is_child) = match parent.unwrap() {
                    Side::Next => {
                        ((rank + 1) % world, place((rank + 1) % world, world).prev_is_child)
                    }
                    Side::Prev => (rank - 1, place(rank - 1, world).next_is_child),
                };
                assert!(is_child, "rank {rank} of {world}");
                let above = place(parent, world).subtree;
                assert!(
                    above.start <= subtree.start
                        && subtree.end <= above.end
                        && above.len() > subtree.len()
                );
            }
            let children = (0..world).map(|rank| place(rank, world));
            let count: usize =
                children.map(|p| usize::from(p.next_is_child) + usize::from(p.prev_is_child)).sum();
            assert_eq!(count, world - 1);
        }
    }

    #[test]
    fn what_a_rank_has_is_its_own_part_and_its_childrens() {
        for world in 2..=20 {
            for rank in 0..world {
                let own = place(rank, world);
                let mut parts = vec![rank];
                if own.next_is_child {
                    parts.extend(place(rank + 1, world).subtree);
                }
                if own.prev_is_child {
                    parts.extend(place((rank + world - 1) % world, world).subtree);
                }
                parts.sort_unstable();
                assert_eq!(parts, own.subtree.collect::<Vec<_>>(), "rank {rank} of {world}");
            }
        }
    }
}
