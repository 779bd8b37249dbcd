//! A membership as its difference to the one before: a change of one member among thousands is sent
//! to all of them.

use std::collections::HashSet;
use std::net::SocketAddr;

use crate::ids::WorkerId;
use crate::members::Members;

/// What turns the members of one generation into those of another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Difference {
    /// Ranks among the members before, of those that are no members any more; ascending.
    pub(super) left: Vec<u32>,
    /// Members that were none before, with their ranks; ascending.
    pub(super) joined: Vec<(u32, (WorkerId, SocketAddr))>,
}

impl Difference {
    /// The difference from `before` to `after`; `None` if members that stay change their order, or
    /// if the whole list is about as short.
    pub(super) fn between(before: &Members, after: &Members) -> Option<Self> {
        let members_before: HashSet<_> = before.iter().collect();
        let members_after: HashSet<_> = after.iter().collect();
        let has_left = |(_, member): &(u32, &_)| !members_after.contains(member);
        let left: Vec<u32> = (0..).zip(before).filter(has_left).map(|(rank, _)| rank).collect();
        let mut kept = before.iter().filter(|member| members_after.contains(member)).peekable();
        let mut joined = Vec::new();
        for (rank, member) in (0..).zip(after) {
            if kept.next_if_eq(&member).is_some() {
                continue;
            }
            if members_before.contains(member) {
                return None;
            }
            joined.push((rank, *member));
        }
        let is_short = left.len() + joined.len() <= after.len() / 2;
        (is_short && kept.next().is_none()).then_some(Self { left, joined })
    }

    /// The members after `before`.
    ///
    /// # Errors
    /// This is no difference to `before`; how.
    pub(super) fn apply(self, before: &Members) -> Result<Vec<(WorkerId, SocketAddr)>, String> {
        let Self { left, joined } = self;
        let mut left = left.into_iter().peekable();
        let mut members = Vec::with_capacity(before.len() + joined.len());
        let mut joined = joined.into_iter().peekable();
        for (rank, member) in (0..).zip(before) {
            if left.next_if_eq(&rank).is_some() {
                continue;
            }
            while let Some(member) = next_at(&mut joined, members.len()) {
                members.push(member);
            }
            members.push(*member);
        }
        while let Some(member) = next_at(&mut joined, members.len()) {
            members.push(member);
        }
        if let Some(rank) = left.next() {
            let count = before.len();
            return Err(format!("left: {rank} is not in order, or no rank of {count} members"));
        }
        match joined.next() {
            Some((rank, _)) => Err(format!("joined: {rank} is not in order, or beyond the ring")),
            None => Ok(members),
        }
    }
}

/// The next member, if it has this rank.
fn next_at(
    joined: &mut std::iter::Peekable<impl Iterator<Item = (u32, (WorkerId, SocketAddr))>>,
    rank: usize,
) -> Option<(WorkerId, SocketAddr)> {
    joined.next_if(|(next, _)| *next as usize == rank).map(|(_, member)| member)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn members(ids: &[u64]) -> Members {
        let address = |id| SocketAddr::from(([10, 0, 0, 1], 1000 + id as u16));
        ids.iter().map(|&id| (WorkerId(id), address(id))).collect()
    }

    /// Members at random, most of them those of `before` in their order.
    fn changed(before: &[u64], random: &mut impl FnMut(u64) -> u64, fresh: &mut u64) -> Vec<u64> {
        let mut after: Vec<u64> = before.iter().copied().filter(|_| random(6) > 0).collect();
        for _ in 0..random(4) {
            *fresh += 1;
            after.insert(random(after.len() as u64 + 1) as usize, *fresh);
        }
        if random(8) == 0 && after.len() > 1 {
            after.swap(0, 1);
        }
        after
    }

    #[test]
    fn applying_a_difference_gives_the_members_that_it_was_made_for() {
        let mut state = 7_u64;
        let mut random = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % below
        };
        let (mut fresh, mut applied) = (20, 0);
        let mut before: Vec<u64> = (1..=20).collect();
        for _ in 0..2000 {
            let after = changed(&before, &mut random, &mut fresh);
            if let Some(difference) = Difference::between(&members(&before), &members(&after)) {
                applied += 1;
                let result = difference.apply(&members(&before)).unwrap();
                assert_eq!(Members::from(result), members(&after), "{before:?}");
            }
            before = if after.len() < 4 { (1..=20).collect() } else { after };
        }
        assert!(applied > 1000, "{applied}");
    }

    #[test]
    fn another_order_another_address_and_a_short_list_have_no_or_a_right_difference() {
        let before = members(&[1, 2, 3, 4, 5, 6]);
        assert_eq!(Difference::between(&before, &members(&[2, 1, 3, 4, 5, 6])), None);
        assert_eq!(Difference::between(&before, &members(&[7, 8, 9])), None);
        let mut moved = before.to_vec();
        moved[2].1 = SocketAddr::from(([10, 0, 0, 2], 9));
        let difference = Difference::between(&before, &moved.clone().into()).unwrap();
        assert_eq!(difference, Difference { left: vec![2], joined: vec![(2, moved[2])] });
        assert_eq!(difference.apply(&before).unwrap(), moved);
    }

    #[test]
    fn a_difference_to_other_members_is_refused() {
        let before = members(&[1, 2, 3]);
        let member = before[0];
        for (left, joined) in [
            (vec![3], vec![]),
            (vec![1, 0], vec![]),
            (vec![1, 1], vec![]),
            (vec![], vec![(4, member)]),
            (vec![], vec![(1, member), (1, member)]),
            (vec![0], vec![(3, member)]),
        ] {
            let difference = Difference { left, joined };
            let refused = difference.clone().apply(&before);
            assert!(refused.is_err(), "{difference:?}: {refused:?}");
        }
    }
}
