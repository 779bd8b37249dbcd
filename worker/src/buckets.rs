//! Buckets of the gradient: each one is summed over all ranks as soon as it is complete.
//!
//! ```text
//! flat gradient    | bucket 2 |   bucket 1    |   bucket 0    | cut from the end
//! computed here           ◀──────────────────────────────────
//! summed meanwhile                            ◀── ◀─────────── bucket 2 last, with header
//! ```
//!
//! **Invariant:** all ranks sum the same buckets in the same order, whatever a model announces, and
//! when: an announcement only lets a sum start earlier. A rank without records sums zeros.
//!
//! **Invariant:** the last bucket is never summed early: it carries the header, and only a rank
//! that has received all of it commits. So a failure in any bucket is a failure of the step, to
//! which the rank contributes its whole gradient again. No sum overwrites that gradient.

use std::ops::Range;
use std::sync::mpsc::{self, Receiver, Sender};
use std::{fmt, mem, thread};

use elasticdl_collective::{CollectiveError, Communicator};
use elasticdl_proto::RecordRange;
use elasticdl_tables::BatchRows;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// The accumulator of a step's gradient: the **sum** over its records.
///
/// A model adds the gradient of a batch to it: to the [`sum`](Self::sum), or as a
/// [mean](Self::add_mean), which is then multiplied by the number of records.
#[derive(Debug)]
pub struct Gradients<'a> {
    accumulator: Accumulator<'a>,
    /// Number of records in the batch.
    records: usize,
    keys: RecordKeys,
    rows: Option<&'a mut BatchRows>,
}

/// Keys of a batch's records, for what is random about each of them.
#[derive(Clone, Debug, Default)]
pub(crate) struct RecordKeys {
    seed: u64,
    /// Positions of the records, in their order.
    positions: Vec<RecordRange>,
}

impl RecordKeys {
    pub(crate) fn new(seed: u64, positions: &[RecordRange]) -> Self {
        Self { seed, positions: positions.to_vec() }
    }

    /// Key of the record at `index` of the batch.
    fn key(&self, index: usize) -> u64 {
        let mut left = index as u64;
        let mut position = (0, left);
        for range in &self.positions {
            position = (range.epoch, range.start.saturating_add(left));
            if left < range.len() {
                break;
            }
            left -= range.len();
        }
        let [epoch, position] = [u64::from(position.0), position.1].map(u64::to_le_bytes);
        xxh3_64_with_seed(&[epoch, position].concat(), self.seed)
    }
}

#[derive(Debug)]
enum Accumulator<'a> {
    Overlapped(&'a mut (dyn Overlapped + 'a)),
    Whole(&'a mut [f32]),
}

impl<'a> Gradients<'a> {
    /// An accumulator, `[parameters]`, for a batch of `records` records in a loop or a test
    /// of your own.
    pub fn new(sum: &'a mut [f32], records: usize) -> Self {
        Self::of(sum, records, RecordKeys::default())
    }

    pub(crate) fn of(sum: &'a mut [f32], records: usize, keys: RecordKeys) -> Self {
        Self { accumulator: Accumulator::Whole(sum), records, keys, rows: None }
    }

    /// With rows of the model's tables, for a loop or a test of your own.
    #[must_use]
    pub fn with_rows(self, rows: Option<&'a mut BatchRows>) -> Self {
        Self { rows, ..self }
    }

    /// The rows, if the model has [tables](crate::TableModel).
    #[cfg(feature = "candle")]
    pub(crate) fn rows(&mut self) -> Option<&mut BatchRows> {
        self.rows.as_deref_mut()
    }

    /// The rows of the batch's [ids](crate::TableModel::ids) with the sums of their gradients, and
    /// [`sum`](Self::sum).
    ///
    /// # Panics
    /// The model has no [tables](crate::TableModel).
    pub fn rows_and_sum(&mut self) -> (&mut BatchRows, &mut [f32]) {
        let rows = self.rows.as_deref_mut().expect("a model with tables has rows");
        let sum = match &mut self.accumulator {
            Accumulator::Overlapped(gradient) => gradient.rest(),
            Accumulator::Whole(sum) => sum,
        };
        (rows, sum)
    }

    /// A key for the batch's record at `index`, for what is random about it, such as dropout: a
    /// generator that is seeded with the key gives the same numbers whichever worker computes the
    /// record, and others in each epoch. It depends on the job's seed, the epoch and the record's
    /// position in the epoch's order.
    pub fn record_key(&self, index: usize) -> u64 {
        self.keys.key(index)
    }

    /// Number of records in the batch.
    pub fn records(&self) -> usize {
        self.records
    }

    /// The sum over records, to which the model adds: `[parameters]`, without the elements
    /// that are [complete](Self::complete_from) and being all-reduced.
    pub fn sum(&mut self) -> &mut [f32] {
        match &mut self.accumulator {
            Accumulator::Overlapped(gradient) => gradient.rest(),
            Accumulator::Whole(sum) => sum,
        }
    }

    /// Adds `mean`, a part of the gradient of the batch's mean loss, from element `start` on.
    ///
    /// # Panics
    /// If the part is not within [`sum`](Self::sum).
    pub fn add_mean(&mut self, start: usize, mean: &[f32]) {
        let records = self.records as f32;
        for (sum, mean) in self.sum()[start..start + mean.len()].iter_mut().zip(mean) {
            *sum += records * mean;
        }
    }

    /// Whether completed parts are all-reduced while the rest is computed: in the last micro-batch
    /// of a step, with [buckets](crate::Model::bucket_len) and other workers.
    pub fn is_overlapped(&self) -> bool {
        matches!(self.accumulator, Accumulator::Overlapped(_))
    }

    /// Declares the elements from `start` on complete: the model adds nothing more to them in this
    /// batch. Without [overlap](Self::is_overlapped), this has no effect.
    pub fn complete_from(&mut self, start: usize) {
        if let Accumulator::Overlapped(gradient) = &mut self.accumulator {
            gradient.complete_from(start);
        }
    }
}

/// A gradient that is computed from its end to its start, while its completed end is summed over
/// all ranks.
#[derive(Debug)]
struct Overlap<'a> {
    /// The part that may still be written.
    rest: &'a mut [f32],
    cut: Cut,
    summer: Sender<Bucket<'a>>,
}

/// Where a part of the gradient begins, and the part.
pub(crate) type Bucket<'a> = (usize, &'a [f32]);

/// Where a gradient is cut into buckets of a length.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Cut {
    FromEnd(usize),
    FromStart(usize),
}

impl Cut {
    /// Start of the bucket that ends at `end`; `None` for the last one.
    fn start_of(self, end: usize) -> Option<usize> {
        match self {
            Self::FromEnd(len) => last_bucket(end, len),
            Self::FromStart(len) => Some((end.max(1) - 1) / len.max(1) * len).filter(|at| *at > 0),
        }
    }
}

/// What becomes of the sums of buckets over all ranks.
pub(crate) trait BucketSums: Send {
    fn cut(&self) -> Cut;

    /// Sums the bucket, and gathers the headers of all ranks.
    fn sum(
        &mut self,
        ring: &mut (impl Communicator + ?Sized),
        header: &[u8],
        bucket: Bucket<'_>,
    ) -> Result<Vec<Vec<u8>>, CollectiveError>;
}

/// All sums, side by side, of buckets of a length.
struct AllSums<'a>(&'a mut [f32], usize);

impl BucketSums for AllSums<'_> {
    fn cut(&self) -> Cut {
        Cut::FromEnd(self.1)
    }

    fn sum(
        &mut self,
        ring: &mut (impl Communicator + ?Sized),
        header: &[u8],
        (start, part): Bucket<'_>,
    ) -> Result<Vec<Vec<u8>>, CollectiveError> {
        ring.all_reduce(header, part, &mut self.0[start..start + part.len()])
    }
}

/// [`Overlap`] without its lifetime, which a mutable reference can't shorten.
trait Overlapped: fmt::Debug {
    fn rest(&mut self) -> &mut [f32];
    fn complete_from(&mut self, start: usize);
}

impl Overlapped for Overlap<'_> {
    fn rest(&mut self) -> &mut [f32] {
        self.rest
    }

    fn complete_from(&mut self, start: usize) {
        let last = |len| self.cut.start_of(len).filter(|at| *at >= start);
        while let Some(at) = last(self.rest.len()) {
            let (rest, part) = mem::take(&mut self.rest).split_at_mut(at);
            self.rest = rest;
            // A failed summing thread has dropped its receiver. The step reports its error.
            let _ = self.summer.send((at, part));
        }
    }
}

/// Lets `compute` fill the gradient while complete buckets are summed into `sums`. Returns its
/// result and the number of summed buckets.
pub(crate) fn overlap<T>(
    ring: &mut (impl Communicator + Send),
    gradient: &mut [f32],
    sums: &mut [f32],
    batch: (usize, RecordKeys),
    bucket_len: usize,
    compute: impl FnOnce(&mut Gradients<'_>) -> T,
) -> (T, Result<usize, CollectiveError>) {
    overlap_with(ring, gradient, &mut AllSums(sums, bucket_len), batch, compute)
}

/// As [`overlap`], with what `sums` makes of the sums.
pub(crate) fn overlap_with<T>(
    ring: &mut (impl Communicator + Send),
    gradient: &mut [f32],
    sums: &mut impl BucketSums,
    (records, keys): (usize, RecordKeys),
    compute: impl FnOnce(&mut Gradients<'_>) -> T,
) -> (T, Result<usize, CollectiveError>) {
    let cut = sums.cut();
    if cut.start_of(gradient.len()).is_none() {
        // The only bucket is the last one.
        return (compute(&mut Gradients::of(gradient, records, keys)), Ok(0));
    }
    let (summer, buckets) = mpsc::channel();
    thread::scope(|scope| {
        let summed = scope.spawn(move || sum_all(ring, sums, &buckets));
        let mut overlap = Overlap { rest: gradient, cut, summer };
        let accumulator = Accumulator::Overlapped(&mut overlap);
        let result = compute(&mut Gradients { accumulator, records, keys, rows: None });
        drop(overlap);
        (result, summed.join().expect("summing does not panic"))
    })
}

/// Sums buckets until the channel is closed.
fn sum_all(
    ring: &mut impl Communicator,
    sums: &mut impl BucketSums,
    buckets: &Receiver<Bucket<'_>>,
) -> Result<usize, CollectiveError> {
    let mut summed = 0;
    for bucket in buckets {
        sums.sum(ring, &[], bucket)?;
        summed += 1;
    }
    Ok(summed)
}

/// The buckets of a gradient, of which some are summed already.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SummedBuckets {
    /// Length of a bucket.
    pub(crate) len: usize,
    /// Number of buckets that are summed.
    pub(crate) summed: usize,
}

/// Sums all buckets that are not summed already, the last one with the header. Returns the headers
/// of all ranks.
pub(crate) fn sum_rest(
    ring: &mut (impl Communicator + ?Sized),
    header: &[u8],
    gradient: &[f32],
    sums: &mut [f32],
    buckets: SummedBuckets,
) -> Result<Vec<Vec<u8>>, CollectiveError> {
    let SummedBuckets { len, summed } = buckets;
    sum_rest_with(ring, header, gradient, &mut AllSums(sums, len), summed)
}

/// As [`sum_rest`], with what `sums` makes of the sums. `summed`: number of buckets that have been
/// summed.
pub(crate) fn sum_rest_with(
    ring: &mut (impl Communicator + ?Sized),
    header: &[u8],
    gradient: &[f32],
    sums: &mut impl BucketSums,
    summed: usize,
) -> Result<Vec<Vec<u8>>, CollectiveError> {
    let cut = sums.cut();
    for range in ranges_by(gradient.len(), move |end| cut.start_of(end)).skip(summed) {
        let is_last = range.start == 0;
        let header = if is_last { header } else { &[] };
        let headers = sums.sum(ring, header, (range.start, &gradient[range]))?;
        if is_last {
            return Ok(headers);
        }
    }
    unreachable!("the last bucket is summed here alone")
}

/// All buckets of a gradient, in the order in which they are summed. `start_of` is the start of the
/// bucket with this end; `None` for the last one.
pub(crate) fn ranges_by(
    len: usize,
    start_of: impl Fn(usize) -> Option<usize>,
) -> impl Iterator<Item = Range<usize>> {
    let mut end = Some(len);
    std::iter::from_fn(move || {
        let range = start_of(end?).unwrap_or(0)..end?;
        end = (range.start > 0).then_some(range.start);
        Some(range)
    })
}

/// Start of the last bucket of the first `len` elements; `None` if it is the only one.
pub(crate) fn last_bucket(len: usize, bucket: usize) -> Option<usize> {
    len.checked_sub(bucket.max(1)).filter(|at| *at > 0)
}

#[cfg(test)]
mod tests {
    use elasticdl_collective::testing::LocalRank;

    use super::*;

    #[test]
    fn buckets_cover_the_gradient_from_its_end() {
        let all = |len, cut: Cut| {
            let ranges = ranges_by(len, move |end| cut.start_of(end));
            ranges.map(|range| (range.start, range.end)).collect::<Vec<_>>()
        };
        assert_eq!(all(10, Cut::FromEnd(4)), [(6, 10), (2, 6), (0, 2)]);
        assert_eq!(all(8, Cut::FromEnd(4)), [(4, 8), (0, 4)]);
        assert_eq!(all(3, Cut::FromEnd(4)), [(0, 3)]);
        assert_eq!(all(0, Cut::FromEnd(4)), [(0, 0)]);
        assert_eq!(all(2, Cut::FromEnd(0)), [(1, 2), (0, 1)]);
        assert_eq!(all(10, Cut::FromStart(4)), [(8, 10), (4, 8), (0, 4)]);
        assert_eq!(all(8, Cut::FromStart(4)), [(4, 8), (0, 4)]);
        assert_eq!(all(3, Cut::FromStart(4)), [(0, 3)]);
        assert_eq!(all(0, Cut::FromStart(4)), [(0, 0)]);
    }

    /// One rank's step over 10 elements in buckets of 4. Declares the elements from each of
    /// `announced` on complete, one after the other.
    fn step(mut ring: LocalRank, announced: &[usize]) -> (Vec<Vec<u8>>, Vec<f32>, Vec<usize>) {
        let header = vec![ring.rank() as u8];
        let (mut gradient, mut sums) = (vec![0.0; 10], vec![f32::NAN; 10]);
        let ((), summed) = overlap(&mut ring, &mut gradient, &mut sums, one(), 4, |gradients| {
            let mut end = 10;
            for &start in announced {
                for at in start..end {
                    gradients.sum()[at] += at as f32;
                }
                gradients.complete_from(start);
                end = start;
            }
            for at in 0..end {
                gradients.sum()[at] += at as f32;
            }
        });
        let headers = sum_rest(
            &mut ring,
            &header,
            &gradient,
            &mut sums,
            SummedBuckets { len: 4, summed: summed.unwrap() },
        )
        .unwrap();
        (headers, sums, ring.summed().to_vec())
    }

    /// A batch of one record.
    fn one() -> (usize, RecordKeys) {
        (1, RecordKeys::default())
    }

    #[test]
    fn a_record_has_the_same_key_in_any_batch() {
        let range = |epoch, start, end| RecordRange { epoch, start, end };
        let key = |seed, positions: &[RecordRange], index| {
            let mut sum = [];
            Gradients::of(&mut sum, 9, RecordKeys::new(seed, positions)).record_key(index)
        };
        let expected = key(7, &[range(1, 20, 21)], 0);
        assert_eq!(key(7, &[range(1, 10, 30)], 10), expected);
        assert_eq!(key(7, &[range(1, 3, 5), range(1, 18, 30)], 4), expected);
        for other in [(8, 1, 20), (7, 0, 20), (7, 1, 21)] {
            assert_ne!(key(other.0, &[range(other.1, other.2, 30)], 0), expected);
        }
    }

    #[test]
    fn ranks_with_different_announcements_sum_the_same_buckets() {
        let announcements: [&[usize]; 4] = [&[], &[7, 6, 0], &[3], &[0]];
        thread::scope(|scope| {
            let steps: Vec<_> = LocalRank::group(announcements.len(), 1)
                .into_iter()
                .zip(announcements)
                .map(|(rank, announced)| scope.spawn(move || step(rank, announced)))
                .collect();
            for step in steps {
                let (headers, sums, lens) = step.join().unwrap();
                assert_eq!(headers, [[0], [1], [2], [3]]);
                assert_eq!(sums, (0..10).map(|at| 4.0 * at as f32).collect::<Vec<_>>());
                assert_eq!(lens, [4, 4, 2]);
            }
        });
    }

    #[test]
    fn a_mean_is_added_as_often_as_there_are_records() {
        let mut sum = [1.0; 4];
        let mut gradients = Gradients::new(&mut sum, 3);
        gradients.add_mean(1, &[0.5, -2.0]);
        gradients.complete_from(1);
        gradients.sum()[3] += 0.25;
        assert_eq!(sum, [1.0, 2.5, -5.0, 1.25]);
    }

    #[test]
    fn an_early_failure_leaves_the_gradient_intact() {
        let mut group = LocalRank::group(2, 1);
        drop(group.pop());
        let (mut gradient, mut sums) = (vec![0.0; 10], vec![0.0; 10]);
        let ((), summed) =
            overlap(&mut group[0], &mut gradient, &mut sums, one(), 4, |gradients| {
                gradients.sum()[6..].fill(1.0);
                gradients.complete_from(6);
                gradients.sum().fill(2.0);
            });
        assert!(matches!(summed, Err(CollectiveError::PeerLost { .. })), "{summed:?}");
        assert_eq!(gradient, [2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0]);
    }
}
