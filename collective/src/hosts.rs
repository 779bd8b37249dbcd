//! How the ranks of a group lie on hosts. Pure.

use crate::Member;

/// A group's ranks by host: the hosts in the order of their first ranks, each with its ranks in
/// ascending order. Ranks of one host need not be neighbours.
///
/// What says the same address may be one host; whether it is shows when it shares memory.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Hosts(Vec<Vec<usize>>);

/// Where a rank is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct HostPosition {
    pub(crate) host: usize,
    /// Among the ranks of the host. The first one leads: it speaks with other hosts.
    pub(crate) local_rank: usize,
}

impl Hosts {
    pub(crate) fn of(members: &[Member]) -> Self {
        let mut hosts: Vec<Vec<usize>> = Vec::new();
        for (rank, member) in members.iter().enumerate() {
            let is_there =
                |host: &&mut Vec<usize>| members[host[0]].address.ip() == member.address.ip();
            match hosts.iter_mut().find(is_there) {
                Some(host) => host.push(rank),
                None => hosts.push(vec![rank]),
            }
        }
        Self(hosts)
    }

    /// Hosts of so many ranks, one after the other.
    #[cfg(test)]
    pub(crate) fn of_sizes(sizes: &[usize]) -> Self {
        let mut ranks = 0..;
        Self(sizes.iter().map(|size| ranks.by_ref().take(*size).collect()).collect())
    }

    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn rank_count(&self) -> usize {
        self.0.iter().map(Vec::len).sum()
    }

    /// The ranks of a host.
    pub(crate) fn ranks(&self, host: usize) -> &[usize] {
        &self.0[host]
    }

    /// The ranks that speak for their hosts.
    pub(crate) fn leaders(&self) -> Vec<usize> {
        self.0.iter().map(|ranks| ranks[0]).collect()
    }

    /// The most ranks on one host.
    pub(crate) fn largest(&self) -> usize {
        self.0.iter().map(Vec::len).max().unwrap_or(0)
    }

    pub(crate) fn position(&self, rank: usize) -> HostPosition {
        let position = self.0.iter().enumerate().find_map(|(host, ranks)| {
            let local_rank = ranks.iter().position(|other| *other == rank)?;
            Some(HostPosition { host, local_rank })
        });
        position.expect("every rank is on a host")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_one_address_are_together_wherever_they_are_in_the_ring() {
        let member = |id, last| Member { id, address: ([10, 0, 0, last], 1000 + id as u16).into() };
        let members = [member(0, 7), member(1, 5), member(2, 7), member(3, 6), member(4, 5)];
        let hosts = Hosts::of(&members);
        assert_eq!(hosts.count(), 3);
        assert_eq!([0, 1, 2].map(|host| hosts.ranks(host)), [&[0, 2][..], &[1, 4], &[3]]);
        assert_eq!(hosts.leaders(), [0, 1, 3]);
        assert_eq!(hosts.largest(), 2);
        assert_eq!(hosts.position(4), HostPosition { host: 1, local_rank: 1 });
    }
}
