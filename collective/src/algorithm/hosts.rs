//! Placement of a group's ranks on hosts. Pure.

use std::net::IpAddr;

/// Ranks of a group by host: hosts in the order of their first ranks, and the ranks of each host in
/// ascending order. The ranks of one host need not be neighbours.
///
/// Members with the same address may be on one host; whether they are shows when they share memory.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Hosts(Vec<Vec<usize>>);

/// Position of a rank.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct HostPosition {
    pub(crate) host: usize,
    /// Index among the ranks of the host. Rank 0 of a host is its leader: it communicates with
    /// other hosts.
    pub(crate) local_rank: usize,
}

impl Hosts {
    /// `addresses`: of all ranks, in rank order.
    pub(crate) fn of(addresses: impl IntoIterator<Item = IpAddr>) -> Self {
        let mut hosts: Vec<(IpAddr, Vec<usize>)> = Vec::new();
        for (rank, address) in addresses.into_iter().enumerate() {
            match hosts.iter_mut().find(|(of_host, _)| *of_host == address) {
                Some((_, ranks)) => ranks.push(rank),
                None => hosts.push((address, vec![rank])),
            }
        }
        Self(hosts.into_iter().map(|(_, ranks)| ranks).collect())
    }

    /// Hosts with the given numbers of ranks, in rank order.
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

    /// Ranks of a host.
    pub(crate) fn ranks(&self, host: usize) -> &[usize] {
        &self.0[host]
    }

    /// Leader of each host.
    pub(crate) fn leaders(&self) -> Vec<usize> {
        self.0.iter().map(|ranks| ranks[0]).collect()
    }

    /// Largest number of ranks on one host.
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
    fn ranks_with_one_address_are_on_one_host_wherever_they_are_in_the_ring() {
        let hosts = Hosts::of([7, 5, 7, 6, 5].map(|last| [10, 0, 0, last].into()));
        assert_eq!(hosts.count(), 3);
        assert_eq!([0, 1, 2].map(|host| hosts.ranks(host)), [&[0, 2][..], &[1, 4], &[3]]);
        assert_eq!(hosts.leaders(), [0, 1, 3]);
        assert_eq!(hosts.largest(), 2);
        assert_eq!(hosts.position(4), HostPosition { host: 1, local_rank: 1 });
    }
}
