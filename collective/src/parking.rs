//! Dials that came before this worker was ready for them. Pure: time is an argument.

use std::collections::VecDeque;
use std::time::Duration;

use crate::hello::Purpose;

/// Links by generation and dialler, oldest first.
///
/// **Invariant:** at most [`PARKED_MAX`] links, each for at most [`PARKED_TIME_MAX`], one per
/// generation and dialler, for each purpose.
#[derive(Debug)]
pub(crate) struct Parking<T> {
    slots: VecDeque<Slot<T>>,
}

/// Who dialled, in which generation, and what for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Dialler {
    pub(crate) generation: u64,
    pub(crate) member: u64,
    pub(crate) purpose: Purpose,
}

impl<T> Parking<T> {
    pub(crate) fn new() -> Self {
        Self { slots: VecDeque::new() }
    }

    /// Keeps `link` until it is taken. A dialler that dials again has given up its former link;
    /// when all slots are taken, the oldest goes.
    pub(crate) fn park(&mut self, dialler: Dialler, link: T, now: Duration) {
        self.slots.retain(|slot| slot.dialler != dialler);
        if self.slots.len() == PARKED_MAX {
            self.slots.pop_front();
        }
        self.slots.push_back(Slot { dialler, link, parked_at: now });
    }

    pub(crate) fn take(&mut self, dialler: Dialler) -> Option<T> {
        let index = self.slots.iter().position(|slot| slot.dialler == dialler)?;
        self.slots.remove(index).map(|slot| slot.link)
    }

    pub(crate) fn drop_before(&mut self, generation: u64) {
        self.slots.retain(|slot| slot.dialler.generation >= generation);
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Drops what has waited too long, and says when to come back.
    pub(crate) fn expire(&mut self, now: Duration) -> Option<Duration> {
        self.slots.retain(|slot| now < slot.parked_at + PARKED_TIME_MAX);
        self.slots.front().map(|slot| slot.parked_at + PARKED_TIME_MAX)
    }
}

#[derive(Debug)]
struct Slot<T> {
    dialler: Dialler,
    link: T,
    parked_at: Duration,
}

/// A group's previous member dials once per generation; there are never many generations ahead.
const PARKED_MAX: usize = 64;

/// Longer than members lie apart in a switch: at most a step or two, which may take minutes.
const PARKED_TIME_MAX: Duration = Duration::from_secs(600);

#[cfg(test)]
mod tests {
    use super::*;

    const T0: Duration = Duration::from_secs(1000);

    fn dialler(generation: u64, member: u64) -> Dialler {
        Dialler { generation, member, purpose: Purpose::Ring }
    }

    #[test]
    fn a_link_is_taken_once_by_generation_and_member() {
        let mut parking = Parking::new();
        parking.park(dialler(2, 7), 'a', T0);
        assert_eq!(parking.take(dialler(1, 7)), None);
        assert_eq!(parking.take(dialler(2, 6)), None);
        assert_eq!(parking.take(dialler(2, 7)), Some('a'));
        assert_eq!(parking.take(dialler(2, 7)), None);
    }

    #[test]
    fn a_member_may_have_a_link_for_each_purpose() {
        let mut parking = Parking::new();
        let home = Dialler { purpose: Purpose::Home, ..dialler(2, 7) };
        parking.park(dialler(2, 7), 'a', T0);
        parking.park(home, 'b', T0);
        assert_eq!(parking.take(home), Some('b'));
        assert_eq!(parking.take(dialler(2, 7)), Some('a'));
    }

    #[test]
    fn who_dials_again_replaces_his_link() {
        let mut parking = Parking::new();
        parking.park(dialler(2, 7), 'a', T0);
        parking.park(dialler(2, 7), 'b', T0);
        assert_eq!(parking.take(dialler(2, 7)), Some('b'));
        assert_eq!(parking.take(dialler(2, 7)), None);
    }

    #[test]
    fn older_generations_go_and_newer_ones_stay() {
        let mut parking = Parking::new();
        for generation in 1..=3 {
            parking.park(dialler(generation, 7), generation, T0);
        }
        parking.drop_before(2);
        assert_eq!(parking.take(dialler(1, 7)), None);
        assert_eq!(parking.take(dialler(2, 7)), Some(2));
        assert_eq!(parking.take(dialler(3, 7)), Some(3));
    }

    #[test]
    fn places_and_time_are_bounded() {
        let mut parking = Parking::new();
        for member in 0..=PARKED_MAX as u64 {
            parking.park(dialler(1, member), member, T0 + Duration::from_secs(member));
        }
        assert_eq!(parking.len(), PARKED_MAX);
        assert_eq!(parking.take(dialler(1, 0)), None, "the oldest went");
        let first = T0 + Duration::from_secs(1) + PARKED_TIME_MAX;
        assert_eq!(parking.expire(first - Duration::from_nanos(1)), Some(first));
        assert_eq!(parking.len(), PARKED_MAX);
        assert_eq!(parking.expire(first), Some(first + Duration::from_secs(1)));
        assert_eq!(parking.take(dialler(1, 1)), None);
        assert_eq!(parking.expire(first * 2), None);
    }
}
