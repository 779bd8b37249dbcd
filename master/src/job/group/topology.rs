//! The order of the ring: members of a node are neighbours, then those of a rack, then those of a
//! zone.
//!
//! Sums travel around the ring, so each zone has one link that enters it and one that leaves it,
//! and so has each rack and each node. Places come in the order of their first members: the first
//! member stays the first, and survivors keep their order, because they are arranged already.

use std::collections::BTreeMap;

use elasticdl_proto::{Location, WorkerId};

/// Arranges `members` by their places, stably. An unknown place counts as one of its own.
pub(crate) fn arrange<'a>(
    members: Vec<WorkerId>,
    location: impl Fn(WorkerId) -> Option<&'a Location>,
) -> Vec<WorkerId> {
    let unknown = Location::default();
    let levels = |id: WorkerId| {
        let Location { zone, rack, node } = location(id).unwrap_or(&unknown);
        let [zone, rack, node] = [zone, rack, node].map(String::as_str);
        [[zone, "", ""], [zone, rack, ""], [zone, rack, node]]
    };
    // Index of the first member of each place, by level.
    let mut first: [BTreeMap<[&str; 3], usize>; 3] = Default::default();
    let places: Vec<[[&str; 3]; 3]> = members.iter().map(|&id| levels(id)).collect();
    for (index, place) in places.iter().enumerate() {
        for (firsts, place) in first.iter_mut().zip(place) {
            firsts.entry(*place).or_insert(index);
        }
    }
    let mut order: Vec<usize> = (0..members.len()).collect();
    order.sort_by_key(|&index| {
        let place = &places[index];
        ([0, 1, 2].map(|level| first[level][&place[level]]), index)
    });
    order.into_iter().map(|index| members[index]).collect()
}

#[cfg(test)]
mod tests {
    use rand::rngs::ChaCha8Rng;
    use rand::{RngExt, SeedableRng};

    use super::*;

    type Places = BTreeMap<WorkerId, Location>;

    fn place(zone: &str, rack: &str, node: &str) -> Location {
        Location { zone: zone.into(), rack: rack.into(), node: node.into() }
    }

    fn arranged(places: &Places, members: &[WorkerId]) -> Vec<WorkerId> {
        arrange(members.to_vec(), |id| places.get(&id))
    }

    /// Links of the ring whose ends have different values of `of`.
    fn crossings<T: PartialEq>(ring: &[WorkerId], of: impl Fn(WorkerId) -> T) -> usize {
        let next = ring.iter().cycle().skip(1);
        ring.iter().zip(next).filter(|(a, b)| of(**a) != of(**b)).count()
    }

    /// Number of different values, or 0 for a single one, which no link leaves.
    fn places_with_links<T: Ord>(ring: &[WorkerId], of: impl Fn(WorkerId) -> T) -> usize {
        let places: std::collections::BTreeSet<T> = ring.iter().map(|&id| of(id)).collect();
        if places.len() == 1 { 0 } else { places.len() }
    }

    #[test]
    fn members_of_a_node_are_neighbours_then_those_of_a_rack_and_of_a_zone() {
        let ids = [1, 2, 3, 4, 5, 6, 7].map(WorkerId);
        let places = [
            place("b", "", "n1"),
            place("a", "r1", "n2"),
            place("b", "", "n3"),
            place("a", "r2", "n4"),
            place("a", "r1", "n5"),
            place("b", "", "n1"),
            place("a", "r1", "n2"),
        ];
        let places = ids.into_iter().zip(places).collect();
        assert_eq!(arranged(&places, &ids), [1, 6, 3, 2, 7, 5, 4].map(WorkerId));
        // Nothing is known: nothing changes.
        assert_eq!(arranged(&Places::new(), &ids), ids);
    }

    /// Through random losses and joins.
    #[test]
    fn each_zone_rack_and_node_has_one_link_in_and_one_out() {
        for seed in 0..200 {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            let (mut places, mut ring) = (Places::new(), Vec::new());
            for round in 0..20 {
                ring.retain(|_| rng.random_ratio(4, 5));
                let survivors = ring.clone();
                for joiner in 0..rng.random_range(1..8) {
                    let id = WorkerId(round * 10 + joiner);
                    // Some workers do not know where they are.
                    let zone = ["", "a", "b", "c"][rng.random_range(0..4)];
                    let rack = ["r1", "r2"][rng.random_range(0..2)];
                    let node = format!("{zone}-{rack}-{}", rng.random_range(0..3));
                    places.insert(id, place(zone, rack, &node));
                    ring.push(id);
                }
                let first = ring[0];
                ring = arranged(&places, &ring);
                assert_eq!(ring[0], first, "seed {seed}: the first member stays the first");
                let kept: Vec<_> = ring.iter().filter(|id| survivors.contains(id)).collect();
                assert!(kept.into_iter().eq(&survivors), "seed {seed}: survivors keep their order");
                let zone = |id: WorkerId| places[&id].zone.clone();
                let rack = |id: WorkerId| (zone(id), places[&id].rack.clone());
                let node = |id: WorkerId| places[&id].node.clone();
                assert_eq!(crossings(&ring, zone), places_with_links(&ring, zone), "seed {seed}");
                assert_eq!(crossings(&ring, rack), places_with_links(&ring, rack), "seed {seed}");
                assert_eq!(crossings(&ring, node), places_with_links(&ring, node), "seed {seed}");
                assert_eq!(arranged(&places, &ring), ring, "seed {seed}");
            }
        }
    }
}
