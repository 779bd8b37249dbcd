//! Simulated time, the queue of future events, and the random numbers of a run.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

/// Microseconds: a point in time since the run's start, or a duration.
pub(super) type Micros = u64;

/// The current time and all future events.
///
/// **Invariant:** two events of one point in time happen in the order in which they were scheduled,
/// so a run depends on its seed alone.
#[derive(Debug)]
pub(super) struct Clock<E> {
    now: Micros,
    made: u64,
    due: BinaryHeap<Reverse<Due<E>>>,
}

impl<E> Clock<E> {
    pub(super) fn new() -> Self {
        Self { now: 0, made: 0, due: BinaryHeap::new() }
    }

    pub(super) fn now(&self) -> Micros {
        self.now
    }

    /// Schedules `event` after `span`.
    pub(super) fn after(&mut self, span: Micros, event: E) {
        self.at(self.now + span, event);
    }

    /// Schedules `event` at `moment`, or now if `moment` has passed.
    pub(super) fn at(&mut self, moment: Micros, event: E) {
        self.made += 1;
        self.due.push(Reverse(Due { at: moment.max(self.now), order: self.made, event }));
    }

    /// The next event.
    pub(super) fn peek(&self) -> Option<&E> {
        self.due.peek().map(|Reverse(due)| &due.event)
    }

    /// All events, in the order in which they happen.
    pub(super) fn in_order(&self) -> impl Iterator<Item = &E> {
        let mut all: Vec<&Reverse<Due<E>>> = self.due.iter().collect();
        all.sort_unstable_by_key(|due| (due.0.at, due.0.order));
        all.into_iter().map(|Reverse(due)| &due.event)
    }

    /// Such events happen `span` after the next event at the earliest. Returns when that is.
    pub(super) fn delay(&mut self, span: Micros, is: impl Fn(&E) -> bool) -> Micros {
        let until = self.due.peek().map_or(self.now, |Reverse(due)| due.at) + span;
        let late = |Reverse(due): Reverse<Due<E>>| {
            let at = if is(&due.event) { due.at.max(until) } else { due.at };
            Reverse(Due { at, ..due })
        };
        self.due = std::mem::take(&mut self.due).into_iter().map(late).collect();
        until
    }

    /// Advances to the next event.
    pub(super) fn next(&mut self) -> Option<E> {
        let Reverse(due) = self.due.pop()?;
        self.now = due.at;
        Some(due.event)
    }

    /// Number of scheduled events.
    pub(super) fn len(&self) -> usize {
        self.due.len()
    }
}

#[derive(Debug)]
struct Due<E> {
    at: Micros,
    order: u64,
    event: E,
}

impl<E> PartialEq for Due<E> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<E> Eq for Due<E> {}

impl<E> PartialOrd for Due<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> Ord for Due<E> {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

/// The only source of randomness of a run: SplitMix64 (Steele et al., OOPSLA 2014), chosen for its
/// speed. `None`: each number is the middle of its range.
#[derive(Debug)]
pub(super) struct SimRng(Option<u64>);

impl SimRng {
    pub(super) fn new(seed: u64) -> Self {
        Self(Some(seed.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ 0x9e37_79b9_7f4a_7c15))
    }

    /// Draws the middle of each range.
    pub(super) fn middle() -> Self {
        Self(None)
    }

    /// A number from 0 to `sides - 1`; `sides` is not 0.
    pub(super) fn below(&mut self, sides: u64) -> u64 {
        let Some(state) = &mut self.0 else { return sides / 2 };
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % sides
    }

    /// A number from `low` to `high`, both included.
    pub(super) fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// True with probability `n / of`.
    pub(super) fn chance(&mut self, n: u64, of: u64) -> bool {
        self.below(of) < n
    }

    /// A random element of `from`.
    pub(super) fn pick<T: Copy>(&mut self, from: &[T]) -> Option<T> {
        match from.len() as u64 {
            0 => None,
            len => Some(from[self.below(len) as usize]),
        }
    }
}
