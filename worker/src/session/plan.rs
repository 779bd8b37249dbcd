//! Which records a step consists of, and which rank computes which of them.
//!
//! The records of a step are a **window** of the epoch's order: those that follow the records
//! absorbed so far. A rank's pending gradient counts if it lies in the window and overlaps no
//! pending gradient of a lower rank; others are dropped. The rest of the window is cut into
//! micro-batches, at multiples of their size from the window's start, and the micro-batches are
//! split so that all ranks finish at the same time, by the time that each of them needed per record
//! lately.
//!
//! Every rank knows, from the headers of the last round, what is pending on every rank and how fast
//! it is. So all ranks compute the same plan, and no message is needed to agree on it. A group of
//! any size plans the same window, unless `--minibatch-size` makes the window grow with the group.
//!
//! **Invariant:** the plan depends on its arguments alone. **Invariant:** pending gradients that
//! count, and the assigned records, are disjoint and make up the window.

use std::ops::Range;

use elasticdl_proto::{Batch, Ledger, RangeSet, RecordRange};

use crate::session::pace::relative_costs;

/// What one rank has computed for the next step, and what it could compute.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contribution {
    /// Records in a gradient that no step has absorbed.
    pub pending: Vec<RecordRange>,
    /// Number of further records that the rank can read now; `None`: any.
    pub readable: Option<u64>,
    /// Time per record, in nanoseconds; 0: not known yet.
    pub cost: u64,
    /// Whether the rank is a table server, which computes no records.
    pub serves_tables: bool,
}

/// Size of a step, and of the micro-batches that it is split into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepSize {
    pub batch: Batch,
    /// Records of a micro-batch, which one rank computes; at least 1.
    pub micro_batch: u64,
}

/// The next step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// For each rank, whether its pending gradient counts. If not, it is dropped.
    pub keeps: Vec<bool>,
    /// For each rank, the records that it computes, in addition to its pending ones; `None` while
    /// the ranks cannot read all of them.
    pub assigned: Option<Vec<Vec<RecordRange>>>,
}

impl Plan {
    /// The step that follows `ledger`, which lacks records.
    pub fn new(ledger: &Ledger, size: StepSize, ranks: &[Contribution]) -> Self {
        let mut missing = missing(ledger);
        let start = missing.iter().next().map_or(0, |range| range.start);
        let (mut counts, mut end) = (vec![0; ranks.len()], 0);
        for (rank, count) in ranks.iter().zip(&mut counts) {
            if rank.pending.is_empty() {
                continue;
            }
            let mut rest = missing.clone();
            let is_kept = rank.pending.iter().all(|range| {
                range.epoch == ledger.epoch() && rest.remove(range.records()) == range.len()
            });
            if is_kept {
                missing = rest;
                *count = rank.pending.iter().map(RecordRange::len).sum();
                end = rank.pending.iter().map(|range| range.end).fold(end, u64::max);
            }
        }
        let keeps = counts.iter().map(|count| *count > 0).collect();
        let window = size.batch.records(workers(ranks)).saturating_sub(counts.iter().sum());
        let rest = MicroBatches::of(first(&missing, window, end), start, size);
        let loads = loads(size.batch, ranks, |rank| (counts[rank], ranks[rank].readable));
        let shares = level(rest.count(), rest.size, &loads);
        Self { keeps, assigned: shares.map(|shares| rest.deal(ledger.epoch(), &shares)) }
    }
}

/// Records that `rank` will compute for the `steps` steps that follow `ledger`, if nothing happens
/// to its group, of these `ranks`: what is pending on them, and what they can read, does not count.
pub fn upcoming(
    ledger: &Ledger,
    epochs: u32,
    size: StepSize,
    (rank, ranks): (usize, &[Contribution]),
    steps: u64,
) -> Vec<RecordRange> {
    let mut ledger = ledger.clone();
    let mut ranges = Vec::new();
    let loads = loads(size.batch, ranks, |_| (0, None));
    for _ in 0..steps {
        let epoch = ledger.epoch();
        if epoch >= epochs {
            break;
        }
        let missing = missing(&ledger);
        let start = missing.iter().next().map_or(0, |range| range.start);
        let window = first(&missing, size.batch.records(workers(ranks)), 0);
        let window = MicroBatches::of(window, start, size);
        let Some(shares) = level(window.count(), window.size, &loads) else { break };
        // All ranks before this one, and this one: it needs no more of a plan for many.
        let before = shares[..rank].iter().sum();
        ranges.extend(window.deal(epoch, &[before, shares[rank]]).pop().unwrap_or_default());
        for range in window.ranges {
            ledger.absorb(RecordRange { epoch, start: range.start, end: range.end });
        }
    }
    ranges
}

/// Records that each rank will compute for the step that follows `ledger`, as for [`upcoming`];
/// `None` if all epochs are over, or no rank computes records.
pub fn next(
    ledger: &Ledger,
    epochs: u32,
    size: StepSize,
    ranks: &[Contribution],
) -> Option<Vec<Vec<RecordRange>>> {
    if ledger.epoch() >= epochs {
        return None;
    }
    let without =
        |rank: &Contribution| Contribution { pending: Vec::new(), readable: None, ..*rank };
    Plan::new(ledger, size, &ranks.iter().map(without).collect::<Vec<_>>()).assigned
}

/// Cuts records of the step that follows `ledger` into micro-batches.
pub fn micro_batches(ledger: &Ledger, size: StepSize, ranges: &[RecordRange]) -> Vec<RecordRange> {
    let start = missing(ledger).iter().next().map_or(0, |range| range.start);
    let mut pieces = Vec::new();
    for range in ranges {
        let of_range = MicroBatches::of(vec![range.records()], start, size);
        let ones = vec![1; of_range.count() as usize];
        pieces.extend(of_range.deal(range.epoch, &ones).into_iter().flatten());
    }
    pieces
}

/// Whether these ranges are the records of one step: the first ones that `ledger` lacks, each once,
/// as many as `batch` asks of this number of computing ranks, or all that are left of the epoch.
pub fn is_window(ledger: &Ledger, batch: Batch, workers: usize, ranges: &[RecordRange]) -> bool {
    let mut missing = missing(ledger);
    let records: u64 = ranges.iter().map(RecordRange::len).sum();
    let end = ranges.iter().map(|range| range.end).max().unwrap_or(0);
    let window = first(&missing, batch.records(workers.max(1)), end);
    records == records_of(&window)
        && ranges.iter().all(|range| {
            range.epoch == ledger.epoch() && missing.remove(range.records()) == range.len()
        })
        && first(&missing, 0, end).is_empty()
}

/// The records of the ledger's first incomplete epoch that it lacks.
fn missing(ledger: &Ledger) -> RangeSet {
    let (epoch, end) = (ledger.epoch(), ledger.records_per_epoch());
    let mut missing = RangeSet::default();
    for range in ledger.missing_of(RecordRange { epoch, start: 0, end }) {
        missing.insert(range.records());
    }
    missing
}

/// The first `records` records of `set`, and all before `end`: a smaller group may find pending
/// records behind a window of its own size.
fn first(set: &RangeSet, mut records: u64, end: u64) -> Vec<Range<u64>> {
    let mut ranges = Vec::new();
    for range in set.iter() {
        let counted = range.start.saturating_add(records);
        let part = range.start..range.end.min(counted.max(end.max(range.start)));
        if part.is_empty() {
            break;
        }
        records = records.saturating_sub(part.end - part.start);
        ranges.push(part);
    }
    ranges
}

fn records_of(ranges: &[Range<u64>]) -> u64 {
    ranges.iter().map(|range| range.end - range.start).sum()
}

/// Time per record of each rank, in any unit. A batch per worker is shared evenly.
fn costs(batch: Batch, ranks: &[Contribution]) -> Vec<u64> {
    match batch {
        Batch::Global(_) => relative_costs(&ranks.iter().map(|rank| rank.cost).collect::<Vec<_>>()),
        Batch::PerWorker(_) => vec![1; ranks.len()],
    }
}

/// Number of ranks that compute, at least 1.
fn workers(ranks: &[Contribution]) -> usize {
    ranks.iter().filter(|rank| !rank.serves_tables).count().max(1)
}

/// `of`: for each rank the records that it has computed, and can read.
fn loads(
    batch: Batch,
    ranks: &[Contribution],
    of: impl Fn(usize) -> (u64, Option<u64>),
) -> Vec<Load> {
    let load = |(rank, cost)| {
        let (computed, readable): (u64, Option<u64>) = of(rank);
        let serves_tables = ranks[rank].serves_tables;
        let readable = if serves_tables { 0 } else { readable.unwrap_or(u64::MAX) };
        Load { computed, readable, cost }
    };
    (0..).zip(costs(batch, ranks)).map(load).collect()
}

/// What a rank has computed, and what it can compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Load {
    /// Records.
    computed: u64,
    /// Further records.
    readable: u64,
    /// Time per record, at least 1, in a unit that all ranks share.
    cost: u64,
}

/// Splits `count` micro-batches of `size` records over ranks so that all finish as nearly as
/// possible at the same time; of what is left over, the lowest ranks get one each. No rank gets
/// more than it can read. `None` if the ranks can't read all.
fn level(count: u64, size: u64, loads: &[Load]) -> Option<Vec<u64>> {
    let (first, ranks) = (*loads.first()?, loads.len() as u64);
    let most = count.div_ceil(ranks).saturating_mul(size);
    let is_even = first.computed == 0 && first.readable >= most;
    if is_even && loads.iter().all(|load| *load == first) {
        // The same shares, in a time that matters less in large groups.
        let share = |rank| count / ranks + u64::from(rank < count % ranks);
        return Some((0..ranks).map(share).collect());
    }
    level_by_time(count, size, loads)
}

/// As [`level`], by a search for the time at which all ranks finish.
fn level_by_time(count: u64, size: u64, loads: &[Load]) -> Option<Vec<u64>> {
    let shares = |time: u64| -> Vec<u64> {
        let share = |load: &Load| {
            (time / load.cost).saturating_sub(load.computed).min(load.readable) / size
        };
        loads.iter().map(share).collect()
    };
    let total =
        |shares: &[u64]| shares.iter().fold(0, |sum: u64, share| sum.saturating_add(*share));
    // The latest time at which no more than `count` are finished, and the next one.
    let most = |load: &Load| {
        let records = load.computed.saturating_add(count.saturating_mul(size));
        records.saturating_add(1).saturating_mul(load.cost)
    };
    let (mut low, mut high) = (0, loads.iter().map(most).max()?);
    if total(&shares(high)) < count {
        return None;
    }
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if total(&shares(middle)) <= count { low = middle } else { high = middle }
    }
    let mut split = shares(low);
    let mut rest = count - total(&split);
    for (share, more) in split.iter_mut().zip(shares(low + 1)) {
        let extra = (more - *share).min(rest);
        *share += extra;
        rest -= extra;
    }
    Some(split)
}

/// Records of a window in pieces that are computed whole.
struct MicroBatches {
    /// Disjoint, in ascending order.
    ranges: Vec<Range<u64>>,
    /// Start of the window: pieces end at multiples of `size` from here.
    start: u64,
    size: u64,
}

impl MicroBatches {
    fn of(ranges: Vec<Range<u64>>, start: u64, size: StepSize) -> Self {
        Self { ranges, start, size: size.micro_batch.max(1) }
    }

    /// Number, from 0, of the micro-batch that contains `position`.
    fn number(&self, position: u64) -> u64 {
        (position - self.start) / self.size
    }

    /// Number of micro-batches, whole ones and parts.
    fn count(&self) -> u64 {
        let count = |range: &Range<u64>| self.number(range.end - 1) - self.number(range.start) + 1;
        self.ranges.iter().filter(|range| !range.is_empty()).map(count).sum()
    }

    /// Gives each rank as many micro-batches as its share, in rank order.
    fn deal(&self, epoch: u32, shares: &[u64]) -> Vec<Vec<RecordRange>> {
        let mut rest = self.ranges.iter().filter(|range| !range.is_empty()).cloned();
        let mut range = rest.next().unwrap_or_default();
        let mut deal_one = |share: &u64| {
            let (mut share, mut dealt) = (*share, Vec::new());
            while share > 0 {
                if range.is_empty() {
                    range = rest.next().expect("the shares make up the ranges");
                }
                let number = self.number(range.start);
                let cut = number.saturating_add(share).saturating_mul(self.size);
                let end = range.end.min(self.start.saturating_add(cut));
                dealt.push(RecordRange { epoch, start: range.start, end });
                share -= self.number(end - 1) - number + 1;
                range.start = end;
            }
            dealt
        };
        shares.iter().map(&mut deal_one).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use rand::rngs::ChaCha8Rng;
    use rand::{RngExt, SeedableRng};

    use super::*;

    fn global(records: u64) -> StepSize {
        StepSize { batch: Batch::Global(NonZeroU64::new(records).unwrap()), micro_batch: 1 }
    }

    fn per_worker(records: u64) -> StepSize {
        StepSize { batch: Batch::PerWorker(NonZeroU64::new(records).unwrap()), micro_batch: 1 }
    }

    fn range(start: u64, end: u64) -> RecordRange {
        RecordRange { epoch: 0, start, end }
    }

    /// A ledger of 1000 records that has absorbed the first `absorbed`.
    fn ledger(absorbed: u64) -> Ledger {
        let mut ledger = Ledger::new(1000);
        ledger.absorb(range(0, absorbed));
        ledger
    }

    fn pending(ranges: &[RecordRange]) -> Contribution {
        Contribution { pending: ranges.to_vec(), ..Default::default() }
    }

    fn readable(records: u64) -> Contribution {
        Contribution { readable: Some(records), ..Default::default() }
    }

    fn assigned(ledger: &Ledger, size: StepSize, ranks: &[Contribution]) -> Vec<Vec<RecordRange>> {
        Plan::new(ledger, size, ranks).assigned.unwrap()
    }

    #[test]
    fn a_full_step_is_split_evenly_with_the_remainder_to_the_lowest_ranks() {
        let plan = assigned(&ledger(20), global(10), &vec![Contribution::default(); 4]);
        let expected = [range(20, 23), range(23, 26), range(26, 28), range(28, 30)];
        assert_eq!(plan, expected.map(|range| vec![range]));
        let plan = assigned(&ledger(20), per_worker(3), &vec![Contribution::default(); 2]);
        assert_eq!(plan, [vec![range(20, 23)], vec![range(23, 26)]]);
    }

    #[test]
    fn equal_ranks_get_the_shares_that_a_search_would_find() {
        for (cost, readable) in [(16, u64::MAX), (1, 60), (700, u64::MAX)] {
            let load = Load { computed: 0, readable, cost };
            for ranks in 1..=9 {
                for count in 0..=40 {
                    for size in [1, 3] {
                        let loads = vec![load; ranks];
                        let by_time = level_by_time(count, size, &loads);
                        assert_eq!(level(count, size, &loads), by_time, "{ranks}, {count}, {size}");
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_read_ahead_is_what_the_next_plans_assign() {
        let server = Contribution { serves_tables: true, ..Contribution::default() };
        let slow = Contribution { cost: 500, ..Contribution::default() };
        let fast = Contribution { cost: 100, ..Contribution::default() };
        for ranks in [vec![Contribution::default(); 5], vec![slow, server, fast.clone(), fast]] {
            for micro_batch in [1, 4] {
                let size = StepSize { micro_batch, ..global(23) };
                for rank in 0..ranks.len() {
                    let (mut ledger, mut expected) = (ledger_at(3), Vec::new());
                    for _ in 0..3 {
                        let mut assigned = next(&ledger, 1, size, &ranks).unwrap();
                        for range in assigned.iter().flatten() {
                            ledger.absorb(*range);
                        }
                        expected.append(&mut assigned[rank]);
                    }
                    let ahead = upcoming(&ledger_at(3), 1, size, (rank, &ranks), 3);
                    assert_eq!(ahead, expected, "rank {rank}");
                }
            }
        }
    }

    /// A ledger with a gap: a group has absorbed records behind it.
    fn ledger_at(absorbed: u64) -> Ledger {
        let mut ledger = ledger(absorbed);
        ledger.absorb(range(10, 17));
        ledger
    }

    #[test]
    fn the_last_step_of_an_epoch_takes_what_is_left() {
        let plan = assigned(&ledger(997), global(10), &vec![Contribution::default(); 2]);
        assert_eq!(plan, [vec![range(997, 999)], vec![range(999, 1000)]]);
    }

    #[test]
    fn what_a_lost_rank_has_computed_is_computed_by_the_others() {
        // Rank 1 of three is lost; rank 2 had computed its part.
        let ranks = [pending(&[range(0, 4)]), pending(&[range(8, 12)])];
        let plan = Plan::new(&ledger(0), global(12), &ranks);
        assert_eq!(plan.keeps, [true, true]);
        assert_eq!(plan.assigned.unwrap(), [vec![range(4, 6)], vec![range(6, 8)]]);
        // A joiner takes the larger part.
        let ranks = [&ranks[..], &[Contribution::default()]].concat();
        assert_eq!(assigned(&ledger(0), global(12), &ranks), [vec![], vec![], vec![range(4, 8)]]);
    }

    #[test]
    fn a_pending_gradient_that_does_not_fit_is_dropped() {
        let overlapping = [pending(&[range(0, 4)]), pending(&[range(3, 8)])];
        let plan = Plan::new(&ledger(0), global(8), &overlapping);
        assert_eq!(plan.keeps, [true, false]);
        assert_eq!(plan.assigned.unwrap(), [vec![], vec![range(4, 8)]]);
        let absorbed = [pending(&[range(0, 4)]), pending(&[range(4, 8)])];
        assert_eq!(Plan::new(&ledger(2), global(8), &absorbed).keeps, [false, true]);
        let twice = [pending(&[range(0, 4), range(2, 5)])];
        assert_eq!(Plan::new(&ledger(0), global(8), &twice).keeps, [false]);
    }

    #[test]
    fn a_smaller_group_keeps_what_lies_behind_its_own_window() {
        let ranks = [pending(&[range(0, 4)]), pending(&[range(12, 16)])];
        let plan = assigned(&ledger(0), per_worker(4), &ranks);
        assert_eq!(plan, [vec![range(4, 8)], vec![range(8, 12)]]);
    }

    #[test]
    fn ranks_that_cannot_read_leave_their_share_to_others() {
        let ranks = [readable(1), Contribution::default(), readable(0)];
        let plan = assigned(&ledger(0), global(9), &ranks);
        assert_eq!(plan, [vec![range(0, 1)], vec![range(1, 9)], vec![]]);
        assert_eq!(Plan::new(&ledger(0), global(9), &[readable(4), readable(4)]).assigned, None);
        let rest = assigned(&ledger(992), global(9), &[readable(4), readable(4)]);
        assert_eq!(rest, [vec![range(992, 996)], vec![range(996, 1000)]]);
    }

    fn of_costs(costs: &[u64]) -> Vec<Contribution> {
        costs.iter().map(|cost| Contribution { cost: *cost, ..Default::default() }).collect()
    }

    fn counts(assigned: &[Vec<RecordRange>]) -> Vec<u64> {
        assigned.iter().map(|ranges| ranges.iter().map(RecordRange::len).sum()).collect()
    }

    #[test]
    fn ranks_get_shares_in_proportion_to_their_speed() {
        let shares = |costs: &[u64]| counts(&assigned(&ledger(0), global(120), &of_costs(costs)));
        assert_eq!(shares(&[10, 20]), [80, 40]);
        assert_eq!(shares(&[10, 20, 10]), [48, 24, 48]);
        // Small differences, and ranks whose speed is not known.
        assert_eq!(shares(&[1000, 1100, 0]), [40, 40, 40]);
        assert_eq!(shares(&[1, 1_000_000]), [119, 1]);
        let per_worker = assigned(&ledger(0), per_worker(60), &of_costs(&[10, 20]));
        assert_eq!(counts(&per_worker), [60, 60]);
    }

    #[test]
    fn a_table_server_gets_no_records_and_a_step_does_not_grow_with_it() {
        let server = Contribution { serves_tables: true, ..Default::default() };
        let ranks =
            [server.clone(), Contribution { cost: 7, ..Default::default() }, server.clone()];
        assert_eq!(counts(&assigned(&ledger(0), global(60), &ranks)), [0, 60, 0]);
        assert_eq!(counts(&assigned(&ledger(0), per_worker(4), &ranks)), [0, 4, 0]);
        assert_eq!(
            upcoming(&ledger(0), 1, global(60), (1, &ranks), 2),
            [range(0, 60), range(60, 120)]
        );
        assert_eq!(upcoming(&ledger(0), 1, global(60), (2, &ranks), 2), []);
        // Without a worker there is no step, not even an empty one.
        for size in [global(60), per_worker(4)] {
            let alone = std::slice::from_ref(&server);
            assert_eq!(Plan::new(&ledger(0), size, alone).assigned, None);
            assert_eq!(next(&ledger(0), 1, size, alone), None);
        }
    }

    #[test]
    fn a_slow_rank_that_has_computed_gets_nothing_more() {
        let computed = Contribution { cost: 20, ..pending(&[range(0, 30)]) };
        let fast = Contribution { cost: 10, ..Default::default() };
        assert_eq!(counts(&assigned(&ledger(0), global(60), &[computed, fast])), [0, 30]);
    }

    #[test]
    fn micro_batches_are_whole_and_lie_at_multiples_of_their_size() {
        let size = StepSize { micro_batch: 4, ..global(30) };
        let ranks = [pending(&[range(28, 32)]), Contribution::default()];
        let plan = assigned(&ledger(20), size, &ranks);
        assert_eq!(plan, [vec![range(20, 28), range(32, 36)], vec![range(36, 50)]]);
        let cut = micro_batches(&ledger(20), size, &[range(36, 50)]);
        assert_eq!(cut, [range(36, 40), range(40, 44), range(44, 48), range(48, 50)]);
    }

    #[test]
    fn upcoming_records_are_those_that_the_plans_assign() {
        let (size, mut ledger) = (global(70), Ledger::new(1000));
        let costs = [100, 200, 0];
        let ranks = costs.map(|cost| Contribution { cost, ..Default::default() });
        let mut planned = Vec::new();
        let predicted = upcoming(&ledger, 2, size, (1, &ranks), 100);
        while ledger.epoch() < 2 {
            let assigned = Plan::new(&ledger, size, &ranks).assigned.unwrap();
            planned.extend(assigned[1].clone());
            let all: Vec<RecordRange> = assigned.into_iter().flatten().collect();
            assert!(is_window(&ledger, size.batch, 3, &all));
            all.into_iter().for_each(|range| assert_eq!(ledger.absorb(range), 0));
        }
        assert_eq!(predicted, planned);
    }

    /// For any pending gradients, what is kept and what is assigned is the window.
    #[test]
    fn every_plan_makes_up_the_window() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        for _ in 0..20_000 {
            let mut ledger = Ledger::new(40);
            ledger.absorb(range(0, rng.random_range(0..40)));
            let mut size = match rng.random_range(0..2) {
                0 => global(rng.random_range(1..20)),
                _ => per_worker(rng.random_range(1..8)),
            };
            size.micro_batch = rng.random_range(1..6);
            let mut random_range = |_| {
                let start = rng.random_range(0..40);
                range(start, rng.random_range(start..=40))
            };
            let mut ranges: Vec<RecordRange> = (0..8).map(&mut random_range).collect();
            let ranks = rng.random_range(1..5);
            let ranks: Vec<Contribution> = (0..ranks)
                .map(|_| Contribution {
                    pending: ranges.split_off(ranges.len() - rng.random_range(0..2)),
                    readable: None,
                    cost: rng.random_range(0..5000),
                    serves_tables: false,
                })
                .collect();
            let plan = Plan::new(&ledger, size, &ranks);
            let mut all: Vec<RecordRange> = plan.assigned.unwrap().into_iter().flatten().collect();
            for (rank, keeps) in ranks.iter().zip(plan.keeps) {
                all.extend(rank.pending.iter().filter(|_| keeps));
            }
            assert!(is_window(&ledger, size.batch, ranks.len(), &all), "{ledger:?} {all:?}");
        }
    }
}
