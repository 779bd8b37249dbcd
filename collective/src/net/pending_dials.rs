//! Pending dials: connections that arrived before this worker builds their generation. Pure: time
//! is an argument.

use std::collections::VecDeque;
use std::time::Duration;

use super::handshake::Purpose;

/// Links by key, oldest first.
///
/// **Invariant:** at most [`PENDING_DIALS_MAX`] links, each for at most [`PENDING_DIAL_TIME_MAX`],
/// one per key.
#[derive(Debug)]
pub(crate) struct PendingDials<T> {
    slots: VecDeque<Slot<T>>,
}

/// Key of a dial: generation, dialling member, and purpose.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct DialKey {
    pub(crate) generation: u64,
    pub(crate) member: u64,
    pub(crate) purpose: Purpose,
}

impl<T> PendingDials<T> {
    pub(crate) fn new() -> Self {
        Self { slots: VecDeque::new() }
    }

    /// Stores `link` until it is taken. A second dial with the same key replaces the first one. At
    /// the limit, the oldest link is dropped.
    pub(crate) fn insert(&mut self, key: DialKey, link: T, now: Duration) {
        self.slots.retain(|slot| slot.key != key);
        if self.slots.len() == PENDING_DIALS_MAX {
            self.slots.pop_front();
        }
        self.slots.push_back(Slot { key, link, received_at: now });
    }

    pub(crate) fn take(&mut self, key: DialKey) -> Option<T> {
        let index = self.slots.iter().position(|slot| slot.key == key)?;
        self.slots.remove(index).map(|slot| slot.link)
    }

    pub(crate) fn drop_before(&mut self, generation: u64) {
        self.slots.retain(|slot| slot.key.generation >= generation);
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Drops expired links, and returns when the next one expires.
    pub(crate) fn expire(&mut self, now: Duration) -> Option<Duration> {
        self.slots.retain(|slot| now < slot.received_at + PENDING_DIAL_TIME_MAX);
        self.slots.front().map(|slot| slot.received_at + PENDING_DIAL_TIME_MAX)
    }
}

#[derive(Debug)]
struct Slot<T> {
    key: DialKey,
    link: T,
    received_at: Duration,
}

/// Maximum number of pending dials. The previous member dials once per generation, and few
/// generations are ahead at any time.
const PENDING_DIALS_MAX: usize = 64;

/// Lifetime of a pending dial: longer than the skew of members at a change of generation, which is
/// at most a step or two, and steps may take minutes.
const PENDING_DIAL_TIME_MAX: Duration = Duration::from_secs(600);

#[cfg(test)]
mod tests {
    use super::*;

    const T0: Duration = Duration::from_secs(1000);

    fn key(generation: u64, member: u64) -> DialKey {
        DialKey { generation, member, purpose: Purpose::Ring }
    }

    #[test]
    fn a_link_is_taken_once_by_generation_and_member() {
        let mut pending_dials = PendingDials::new();
        pending_dials.insert(key(2, 7), 'a', T0);
        assert_eq!(pending_dials.take(key(1, 7)), None);
        assert_eq!(pending_dials.take(key(2, 6)), None);
        assert_eq!(pending_dials.take(key(2, 7)), Some('a'));
        assert_eq!(pending_dials.take(key(2, 7)), None);
    }

    #[test]
    fn a_member_may_have_a_link_for_each_purpose() {
        let mut pending_dials = PendingDials::new();
        let host_ring = DialKey { purpose: Purpose::Host, ..key(2, 7) };
        pending_dials.insert(key(2, 7), 'a', T0);
        pending_dials.insert(host_ring, 'b', T0);
        assert_eq!(pending_dials.take(host_ring), Some('b'));
        assert_eq!(pending_dials.take(key(2, 7)), Some('a'));
    }

    #[test]
    fn a_second_dial_replaces_the_first_one() {
        let mut pending_dials = PendingDials::new();
        pending_dials.insert(key(2, 7), 'a', T0);
        pending_dials.insert(key(2, 7), 'b', T0);
        assert_eq!(pending_dials.take(key(2, 7)), Some('b'));
        assert_eq!(pending_dials.take(key(2, 7)), None);
    }

    #[test]
    fn older_generations_are_dropped_and_newer_ones_kept() {
        let mut pending_dials = PendingDials::new();
        for generation in 1..=3 {
            pending_dials.insert(key(generation, 7), generation, T0);
        }
        pending_dials.drop_before(2);
        assert_eq!(pending_dials.take(key(1, 7)), None);
        assert_eq!(pending_dials.take(key(2, 7)), Some(2));
        assert_eq!(pending_dials.take(key(3, 7)), Some(3));
    }

    #[test]
    fn the_number_and_age_of_dials_are_limited() {
        let mut pending_dials = PendingDials::new();
        for member in 0..=PENDING_DIALS_MAX as u64 {
            pending_dials.insert(key(1, member), member, T0 + Duration::from_secs(member));
        }
        assert_eq!(pending_dials.len(), PENDING_DIALS_MAX);
        assert_eq!(pending_dials.take(key(1, 0)), None, "the oldest is dropped");
        let first = T0 + Duration::from_secs(1) + PENDING_DIAL_TIME_MAX;
        assert_eq!(pending_dials.expire(first - Duration::from_nanos(1)), Some(first));
        assert_eq!(pending_dials.len(), PENDING_DIALS_MAX);
        assert_eq!(pending_dials.expire(first), Some(first + Duration::from_secs(1)));
        assert_eq!(pending_dials.take(key(1, 1)), None);
        assert_eq!(pending_dials.expire(first * 2), None);
    }
}
