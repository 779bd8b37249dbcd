//! Admission of dials: which generations are over, and which dials wait for their group. Pure: the
//! time is an argument, and a link is any handle.
//!
//! ```text
//!   dial ──▶ of an old generation, or a second one of a linked member: refused
//!        ──▶ pending ──▶ taken by the group of its generation
//!                    ──▶ dropped: an abort, a newer group, a second dial, its age, the limit
//! ```
//!
//! The links that a call drops are returned; the caller closes them.
//!
//! **Invariant:** generations are compared only here. A frame is only checked to be of its link's
//! generation.
//!
//! **Invariant:** a pending link belongs to a generation that is neither aborted nor older than a
//! group that was begun, so no group gets a link that a later generation has fenced.
//!
//! **Invariant:** at most [`PENDING_DIALS_MAX`] links are pending, each for at most
//! [`PENDING_DIAL_TIME_MAX`], one per key. In one generation a key is taken once.

use std::collections::VecDeque;
use std::time::Duration;

use super::handshake::Purpose;

/// Admission of the dials of one endpoint.
#[derive(Clone, Debug)]
pub struct Admission<L> {
    /// Generations below this one are aborted.
    floor: u64,
    /// Newest generation of which a group was begun.
    newest: u64,
    /// Dials between pairs of generations below this one are refused: their groups have ended.
    pairs_floor: u64,
    /// Dials of the newest generation that were taken.
    taken: Vec<DialKey>,
    /// Pending dials, oldest first.
    pending: VecDeque<PendingDial<L>>,
}

/// Key of a dial: generation, dialling member, and purpose.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct DialKey {
    pub generation: u64,
    pub member: u64,
    pub purpose: Purpose,
}

/// Why a dial or a group is refused.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Refusal {
    #[error("the member already has a link in this generation")]
    Duplicate,
    #[error("its generation is too old")]
    TooOld,
}

impl<L> Default for Admission<L> {
    fn default() -> Self {
        Self { floor: 0, newest: 0, pairs_floor: 0, taken: Vec::new(), pending: VecDeque::new() }
    }
}

impl<L> Admission<L> {
    /// Aborts all generations below `generation`; has no effect if a newer one is aborted already.
    /// Returns the dropped links.
    pub fn abort_before(&mut self, generation: u64) -> Vec<L> {
        self.floor = self.floor.max(generation);
        self.drop_before(self.floor)
    }

    /// Whether `generation` is aborted.
    pub fn is_aborted(&self, generation: u64) -> bool {
        generation < self.floor
    }

    /// Whether all generations are aborted: the endpoint ends.
    pub fn is_closed(&self) -> bool {
        self.floor == u64::MAX
    }

    /// Begins a group: dials of older generations are refused from now on. Returns the dropped
    /// links.
    ///
    /// # Errors
    /// [`Refusal::TooOld`] if the generation is aborted or a newer group was begun.
    pub fn begin(&mut self, generation: u64) -> Result<Vec<L>, Refusal> {
        self.check(generation)?;
        self.newest = generation;
        self.taken.retain(|key| key.generation >= generation);
        Ok(self.drop_before(generation))
    }

    /// Ends the group of `generation`, which takes no dials between pairs any more: the dialling
    /// member would wait for it. Returns the dropped links.
    pub fn end_pairs(&mut self, generation: u64) -> Vec<L> {
        self.pairs_floor = self.pairs_floor.max(generation.saturating_add(1));
        let floor = self.pairs_floor;
        self.drop_if(|dial| dial.key.purpose == Purpose::Pair && dial.key.generation < floor)
    }

    /// Checks that dials of `generation` are not too old.
    ///
    /// # Errors
    /// [`Refusal::TooOld`].
    pub fn check(&self, generation: u64) -> Result<(), Refusal> {
        if generation < self.oldest() { Err(Refusal::TooOld) } else { Ok(()) }
    }

    /// Admits an authenticated dial; its link is pending until it is taken. A second dial with the
    /// same key replaces the first one. At the limit, the oldest link is dropped. Returns the
    /// dropped links.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn admit(&mut self, key: DialKey, link: L, now: Duration) -> Result<Vec<L>, Refusal> {
        self.check(key.generation)?;
        if key.purpose == Purpose::Pair && key.generation < self.pairs_floor {
            return Err(Refusal::TooOld);
        }
        if self.taken.contains(&key) {
            return Err(Refusal::Duplicate);
        }
        let mut dropped = self.drop_if(|dial| dial.key == key);
        if self.pending.len() == PENDING_DIALS_MAX {
            dropped.extend(self.pending.pop_front().map(|dial| dial.link));
        }
        self.pending.push_back(PendingDial { key, link, received_at: now });
        Ok(dropped)
    }

    /// Takes the link of a pending dial.
    pub fn take(&mut self, key: DialKey) -> Option<L> {
        let index = self.pending.iter().position(|dial| dial.key == key)?;
        self.taken.push(key);
        self.pending.remove(index).map(|dial| dial.link)
    }

    /// Drops expired dials, and returns their links.
    pub fn expire(&mut self, now: Duration) -> Vec<L> {
        self.drop_if(|dial| dial.received_at + PENDING_DIAL_TIME_MAX <= now)
    }

    /// Time at which the next dial expires.
    pub fn next_expiry(&self) -> Option<Duration> {
        self.pending.front().map(|dial| dial.received_at + PENDING_DIAL_TIME_MAX)
    }

    /// Number of pending dials.
    #[cfg(any(test, feature = "testing"))]
    pub fn pending(&self) -> usize {
        self.pending.len()
    }

    fn oldest(&self) -> u64 {
        self.floor.max(self.newest)
    }

    fn drop_before(&mut self, generation: u64) -> Vec<L> {
        self.drop_if(|dial| dial.key.generation < generation)
    }

    fn drop_if(&mut self, is_over: impl Fn(&PendingDial<L>) -> bool) -> Vec<L> {
        let all = std::mem::take(&mut self.pending).into_iter();
        let (over, rest): (Vec<_>, _) = all.partition(|dial| is_over(dial));
        self.pending = rest.into();
        over.into_iter().map(|dial| dial.link).collect()
    }
}

#[derive(Clone, Debug)]
struct PendingDial<L> {
    key: DialKey,
    link: L,
    received_at: Duration,
}

/// Maximum number of pending dials, as many as a group has members. Half of these may dial for an
/// exchange that this one has not begun, its neighbours dial for each ring, and few generations are
/// ahead at any time.
pub const PENDING_DIALS_MAX: usize = 4096;

/// Lifetime of a pending dial: longer than the skew of members at a change of generation, which is
/// at most a step or two, and steps may take minutes.
pub const PENDING_DIAL_TIME_MAX: Duration = Duration::from_secs(600);

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    const T0: Duration = Duration::from_secs(1000);

    fn key(generation: u64, member: u64) -> DialKey {
        DialKey { generation, member, purpose: Purpose::Ring }
    }

    #[test]
    fn a_link_is_taken_once_by_generation_and_member() {
        let mut admission = Admission::default();
        assert_eq!(admission.admit(key(2, 7), 'a', T0), Ok(vec![]));
        assert_eq!(admission.take(key(1, 7)), None);
        assert_eq!(admission.take(key(2, 6)), None);
        assert_eq!(admission.take(key(2, 7)), Some('a'));
        assert_eq!(admission.take(key(2, 7)), None);
        assert_eq!(admission.admit(key(2, 7), 'b', T0), Err(Refusal::Duplicate));
    }

    #[test]
    fn a_member_may_have_a_link_for_each_purpose() {
        let mut admission = Admission::default();
        let host_ring = DialKey { purpose: Purpose::Host, ..key(2, 7) };
        admission.admit(key(2, 7), 'a', T0).unwrap();
        admission.admit(host_ring, 'b', T0).unwrap();
        assert_eq!(admission.take(host_ring), Some('b'));
        assert_eq!(admission.take(key(2, 7)), Some('a'));
    }

    #[test]
    fn a_second_dial_replaces_the_first_one() {
        let mut admission = Admission::default();
        admission.admit(key(2, 7), 'a', T0).unwrap();
        assert_eq!(admission.admit(key(2, 7), 'b', T0), Ok(vec!['a']));
        assert_eq!(admission.take(key(2, 7)), Some('b'));
    }

    #[test]
    fn a_begun_group_and_an_abort_drop_older_dials_and_keep_newer_ones() {
        for is_abort in [false, true] {
            let mut admission = Admission::default();
            for generation in 1..=3 {
                admission.admit(key(generation, 7), generation, T0).unwrap();
            }
            let dropped =
                if is_abort { admission.abort_before(2) } else { admission.begin(2).unwrap() };
            assert_eq!(dropped, [1]);
            assert_eq!(admission.admit(key(1, 7), 4, T0), Err(Refusal::TooOld));
            assert_eq!(admission.begin(1), Err(Refusal::TooOld));
            assert_eq!((admission.is_aborted(1), admission.is_aborted(2)), (is_abort, false));
            assert_eq!(admission.take(key(2, 7)), Some(2));
            assert_eq!(admission.take(key(3, 7)), Some(3));
        }
    }

    #[test]
    fn a_group_that_has_ended_takes_no_more_pairs() {
        let mut admission = Admission::default();
        let pair = |generation| DialKey { purpose: Purpose::Pair, ..key(generation, 7) };
        for generation in [2, 3] {
            admission.admit(key(generation, 7), 'r', T0).unwrap();
            admission.admit(pair(generation), 'p', T0).unwrap();
        }
        assert_eq!(admission.end_pairs(2), ['p']);
        assert_eq!(admission.end_pairs(1), []);
        assert_eq!(admission.admit(pair(2), 'q', T0), Err(Refusal::TooOld));
        assert_eq!(admission.take(key(2, 7)), Some('r'));
        assert_eq!(admission.take(pair(3)), Some('p'));
    }

    #[test]
    fn the_number_and_age_of_dials_are_limited() {
        let mut admission = Admission::default();
        let at = |millis| T0 + Duration::from_millis(millis);
        for member in 0..PENDING_DIALS_MAX as u64 {
            admission.admit(key(1, member), member, at(member)).unwrap();
        }
        let last = PENDING_DIALS_MAX as u64;
        let now = at(last);
        assert_eq!(admission.admit(key(1, last), last, now), Ok(vec![0]), "the oldest is dropped");
        assert_eq!(admission.pending(), PENDING_DIALS_MAX);
        let first = at(1) + PENDING_DIAL_TIME_MAX;
        assert_eq!(admission.next_expiry(), Some(first));
        assert_eq!(admission.expire(first - Duration::from_nanos(1)), []);
        assert_eq!(admission.expire(first), [1]);
        assert_eq!(admission.next_expiry(), Some(first + Duration::from_millis(1)));
        assert_eq!(admission.expire(first * 2).len(), PENDING_DIALS_MAX - 1);
        assert_eq!(admission.next_expiry(), None);
    }

    /// Every history of four calls, against a description of what each call does.
    #[test]
    fn every_link_is_refused_or_pending_until_it_is_dropped_or_taken_once() {
        let mut histories = 0;
        explore(&Admission::default(), &Model::default(), 4, &mut histories);
        assert_eq!(histories, 18_usize.pow(4));
    }

    #[derive(Clone, Default)]
    struct Model {
        floor: u64,
        newest: u64,
        pending: BTreeMap<(u64, u64), u32>,
        taken: BTreeSet<(u64, u64)>,
        links: u32,
    }

    impl Model {
        fn drop_before(&mut self, generation: u64) -> BTreeSet<u32> {
            let newer = self.pending.split_off(&(generation, 0));
            std::mem::replace(&mut self.pending, newer).into_values().collect()
        }
    }

    fn explore(admission: &Admission<u32>, model: &Model, calls: u32, histories: &mut usize) {
        if calls == 0 {
            *histories += 1;
            return;
        }
        let mut next = |call: &dyn Fn(&mut Admission<u32>, &mut Model)| {
            let (mut admission, mut model) = (admission.clone(), model.clone());
            call(&mut admission, &mut model);
            assert_eq!(admission.pending(), model.pending.len());
            explore(&admission, &model, calls - 1, histories);
        };
        for generation in 1..=3 {
            next(&|admission, model| {
                model.floor = model.floor.max(generation);
                let dropped: BTreeSet<_> = admission.abort_before(generation).into_iter().collect();
                assert_eq!(dropped, model.drop_before(generation));
            });
            next(&|admission, model| {
                let begun = admission.begin(generation);
                if generation < model.floor.max(model.newest) {
                    return assert_eq!(begun, Err(Refusal::TooOld));
                }
                model.newest = generation;
                let dropped: BTreeSet<_> = begun.unwrap().into_iter().collect();
                assert_eq!(dropped, model.drop_before(generation));
            });
            for member in [7, 8] {
                next(&|admission, model| {
                    model.links += 1;
                    let admitted = admission.admit(key(generation, member), model.links, T0);
                    if generation < model.floor.max(model.newest) {
                        return assert_eq!(admitted, Err(Refusal::TooOld));
                    }
                    if model.taken.contains(&(generation, member)) {
                        return assert_eq!(admitted, Err(Refusal::Duplicate));
                    }
                    let replaced = model.pending.insert((generation, member), model.links);
                    assert_eq!(admitted.unwrap(), Vec::from_iter(replaced));
                });
                next(&|admission, model| {
                    let taken = model.pending.remove(&(generation, member));
                    model.taken.extend(taken.map(|_| (generation, member)));
                    assert_eq!(admission.take(key(generation, member)), taken);
                });
            }
        }
    }
}
