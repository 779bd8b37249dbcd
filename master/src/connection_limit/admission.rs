//! Which connection is closed when there are too many. Pure: addresses in, decisions out.
//!
//! Two limits keep peers that only hold connections open from locking out others: an address has at
//! most a part of all connections, and when all are taken, the address that has the most loses one.
//! The oldest one is closed. An honest peer is done within milliseconds, so its connection is
//! rarely the oldest; if it is, the peer dials again.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;

/// The limited connections, by address.
#[derive(Debug)]
pub(super) struct Admission {
    limits: Limits,
    /// Ids of the open connections, the oldest first. No list is empty.
    open: BTreeMap<IpAddr, VecDeque<u64>>,
    /// Id of the next connection.
    next: u64,
}

/// Largest numbers of connections.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Of all addresses together.
    pub(crate) total: usize,
    /// Of one address.
    pub(crate) per_address: usize,
}

/// An accepted connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Admitted {
    /// Id of the connection.
    pub(super) id: u64,
    /// Connection that has to be closed in its place.
    pub(super) evicted: Option<u64>,
}

impl Admission {
    pub(super) fn new(limits: Limits) -> Self {
        Self { limits, open: BTreeMap::new(), next: 0 }
    }

    /// Adds a connection of this address.
    pub(super) fn admit(&mut self, address: IpAddr) -> Admitted {
        // A listener for IPv6 reports IPv4 addresses in their mapped form.
        let address = address.to_canonical();
        let count = self.open.get(&address).map_or(0, VecDeque::len);
        let is_full = self.open.values().map(VecDeque::len).sum::<usize>() >= self.limits.total;
        let loser = if count >= self.limits.per_address {
            Some(address)
        } else if is_full {
            let most = self.open.iter().max_by_key(|(_, ids)| ids.len());
            most.map(|(&address, _)| address)
        } else {
            None
        };
        let evicted = loser.and_then(|address| self.open.get(&address)?.front().copied());
        if let Some(evicted) = evicted {
            self.release(evicted);
        }
        let id = self.next;
        self.next += 1;
        self.open.entry(address).or_default().push_back(id);
        Admitted { id, evicted }
    }

    /// Removes a connection that is limited no more, or has ended.
    pub(super) fn release(&mut self, id: u64) {
        self.open.retain(|_, ids| {
            ids.retain(|&other| other != id);
            !ids.is_empty()
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    fn admission() -> Admission {
        Admission::new(Limits { total: 6, per_address: 4 })
    }

    fn evicts(id: u64, evicted: u64) -> Admitted {
        Admitted { id, evicted: Some(evicted) }
    }

    #[test]
    fn an_address_has_a_part_of_all_connections_in_whatever_form_it_is_written() {
        let mut admission = admission();
        let IpAddr::V4(v4) = address(1) else { panic!("it is IPv4") };
        let mapped = IpAddr::V6(v4.to_ipv6_mapped());
        for (id, from) in (0..).zip([address(1), mapped, address(1), mapped]) {
            assert_eq!(admission.admit(from), Admitted { id, evicted: None });
        }
        assert_eq!(admission.admit(address(1)), evicts(4, 0));
        assert_eq!(admission.admit(mapped), evicts(5, 1));
        assert_eq!(admission.admit(address(2)), Admitted { id: 6, evicted: None });
        admission.release(2);
        assert_eq!(admission.admit(address(1)), Admitted { id: 7, evicted: None });
    }

    #[test]
    fn when_all_connections_are_taken_the_address_with_most_loses_its_oldest() {
        let mut admission = admission();
        for _ in 0..4 {
            admission.admit(address(1));
        }
        admission.admit(address(2));
        admission.admit(address(3));
        // Those with one connection keep it.
        assert_eq!(admission.admit(address(4)), evicts(6, 0));
        assert_eq!(admission.admit(address(5)), evicts(7, 1));
        assert_eq!(admission.open.values().map(VecDeque::len).sum::<usize>(), 6);
    }

    #[test]
    fn released_connections_leave_nothing_behind() {
        let mut admission = admission();
        for round in 0..1000 {
            let admitted = admission.admit(address(round as u8));
            assert_eq!(admitted.evicted, None);
            admission.release(admitted.id);
            admission.release(admitted.id);
        }
        assert!(admission.open.is_empty());
    }
}
