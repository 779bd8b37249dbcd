//! How a data set is cut, and in which order an epoch goes through the pieces.
//!
//! **Invariants:** a shard is never empty and never crosses a file; the shards of a data set are disjoint and hold all
//! of its records; an epoch's order depends on the seed and the epoch alone.

use std::ops::Range;

use rand::SeedableRng;
use rand::rngs::ChaCha8Rng;
use rand::seq::SliceRandom;

use super::spec::{Batch, Dataset, JobSpec};

/// A data set, cut.
#[derive(Clone, Debug)]
pub(super) struct Shards {
    files: Vec<FileSpan>,
    records: u64,
    records_per_shard: u64,
    shards: u32,
    /// `None`: in order.
    shuffle_seed: Option<u64>,
}

#[derive(Clone, Debug)]
struct FileSpan {
    path: String,
    first_shard: u32,
    records: Range<u64>,
}

impl Shards {
    /// Cuts `dataset` for the job `spec`.
    ///
    /// # Errors
    /// Why the job can't run on it, for the user.
    pub(super) fn cut(dataset: &Dataset, spec: &JobSpec) -> Result<Self, String> {
        let records = check(dataset, spec)?;
        let records_per_shard = spec.records_per_shard.map_or_else(
            || {
                if !spec.work.trains() {
                    // Of the data alone: results are added shard by shard, and must not depend on who computes them.
                    return RECORDS_PER_SHARD_APART.max(records / u64::from(SHARDS_AUTO_MAX));
                }
                let wanted = records / (u64::from(spec.num_workers.max(1)) * SHARDS_PER_WORKER);
                wanted.clamp(1, RECORDS_PER_SHARD_AUTO_MAX).max(records / u64::from(SHARDS_AUTO_MAX))
            },
            |n| n.get(),
        );
        let shards: u64 = dataset.files.iter().map(|f| f.records.div_ceil(records_per_shard)).sum();
        if shards > u64::from(SHARDS_MAX) {
            return Err(format!(
                "{records_per_shard} records per shard cut the data set's {records} records into {shards} shards; \
                 at most {SHARDS_MAX} are possible: choose larger shards"
            ));
        }
        let (mut files, mut first_shard, mut start) = (Vec::new(), 0, 0);
        for file in dataset.files.iter().filter(|f| f.records > 0) {
            let records = start..start + file.records;
            start = records.end;
            files.push(FileSpan { path: file.path.clone(), first_shard, records });
            first_shard +=
                u32::try_from(file.records.div_ceil(records_per_shard)).expect("checked against SHARDS_MAX");
        }
        let shuffle_seed = spec.shuffle.then_some(spec.seed);
        Ok(Self { files, records, records_per_shard, shards: first_shard, shuffle_seed })
    }

    /// Records of one epoch.
    pub(super) fn records(&self) -> u64 {
        self.records
    }

    /// Number of shards.
    pub(super) fn len(&self) -> u32 {
        self.shards
    }

    /// Records of a shard, but for the last of each file, which may have fewer.
    pub(super) fn records_per_shard(&self) -> u64 {
        self.records_per_shard
    }

    /// The records of shard `shard`, which is less than [`Shards::len`].
    pub(super) fn range(&self, shard: u32) -> Range<u64> {
        let file = &self.files[self.files.partition_point(|f| f.first_shard <= shard) - 1];
        let start = file.records.start + u64::from(shard - file.first_shard) * self.records_per_shard;
        start..start.saturating_add(self.records_per_shard).min(file.records.end)
    }

    /// The shard that holds `record`, which lies in the data set.
    pub(super) fn of(&self, record: u64) -> u32 {
        let file = &self.files[self.files.partition_point(|f| f.records.end <= record)];
        let within = (record - file.records.start) / self.records_per_shard;
        file.first_shard + u32::try_from(within).expect("a file has fewer shards than the data set")
    }

    /// How many shards lie in `records` as a whole.
    pub(super) fn count_in(&self, records: &Range<u64>) -> u32 {
        if records.is_empty() {
            return 0;
        }
        let first = self.of(records.start);
        let first = first + u32::from(self.range(first).start < records.start);
        let end = if records.end == self.records { self.shards } else { self.of(records.end) };
        end.saturating_sub(first)
    }

    /// The order of shards in `epoch`; `None`: by number.
    pub(super) fn order(&self, epoch: u32) -> Option<Vec<u32>> {
        let seed = self.shuffle_seed?;
        let mut key = [0; 32];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        key[8..12].copy_from_slice(&epoch.to_le_bytes());
        let mut order: Vec<u32> = (0..self.shards).collect();
        order.shuffle(&mut ChaCha8Rng::from_seed(key));
        Some(order)
    }

    /// `records`, which lie in the data set, by file: its path, and the records counted within it.
    pub(super) fn by_file(&self, records: Range<u64>) -> impl Iterator<Item = (&str, Range<u64>)> {
        let first = self.files.partition_point(|f| f.records.end <= records.start);
        self.files[first..].iter().map_while(move |file| {
            let start = records.start.max(file.records.start);
            let end = records.end.min(file.records.end);
            let base = file.records.start;
            (start < end).then(|| (file.path.as_str(), start - base..end - base))
        })
    }
}

/// The data set's records, or why the job can't run on it.
fn check(dataset: &Dataset, spec: &JobSpec) -> Result<u64, String> {
    let data = &spec.training_data;
    if dataset.files.is_empty() {
        return Err(format!("{data:?} holds no files; name a file, or a folder with at least one"));
    }
    if dataset.files.len() > FILES_MAX {
        return Err(format!(
            "{data:?} holds {} files; at most {FILES_MAX} are possible",
            dataset.files.len()
        ));
    }
    let too_many = || format!("{data:?} holds more records over {} epochs than can be counted", spec.epochs);
    let sum = |sum: u64, file: &super::File| sum.checked_add(file.records);
    let records = dataset.files.iter().try_fold(0, sum).ok_or_else(too_many)?;
    // Twice over, so that sums of what was counted and what was repeated can't overflow either.
    records.checked_mul(u64::from(spec.epochs)).and_then(|n| n.checked_mul(2)).ok_or_else(too_many)?;
    if records == 0 {
        return Err(format!("{data:?} holds {} files but no records", dataset.files.len()));
    }
    let (name, batch) = match spec.batch {
        Batch::Global(records) => ("global batch", records.get()),
        Batch::PerWorker(records) => ("minibatch", records.get()),
    };
    if batch > records && spec.work.trains() {
        return Err(format!(
            "the {name} of {batch} records is larger than the data set of {records} records; \
             choose one of at most {records}"
        ));
    }
    Ok(records)
}

/// Shards per worker, where the size is chosen here: enough that one slow worker doesn't hold up an epoch's end.
const SHARDS_PER_WORKER: u64 = 8;
const RECORDS_PER_SHARD_AUTO_MAX: u64 = 4096;
/// Where shards are worked on apart: one is little to repeat, and a file of its predictions not too small.
const RECORDS_PER_SHARD_APART: u64 = 4096;
const SHARDS_AUTO_MAX: u32 = 1 << 22;
/// An epoch's order takes 4 bytes for each.
const SHARDS_MAX: u32 = 1 << 24;
const FILES_MAX: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use super::super::testing::{dataset, spec};
    use super::*;

    fn cut(files: &[u64], per_shard: Option<u64>) -> Shards {
        let spec = JobSpec { records_per_shard: per_shard.and_then(NonZeroU64::new), ..spec() };
        Shards::cut(&dataset(files), &spec).unwrap()
    }

    #[test]
    fn shards_never_cross_files_and_hold_every_record_once() {
        for per_shard in 1..12 {
            let shards = cut(&[5, 0, 1, 7, 10], Some(per_shard));
            let mut at = 0;
            for shard in 0..shards.len() {
                let range = shards.range(shard);
                assert_eq!(range.start, at);
                assert!(range.end > range.start && range.end - range.start <= per_shard);
                assert_eq!(shards.by_file(range.clone()).count(), 1, "{range:?} crosses a file");
                at = range.end;
            }
            assert_eq!(at, 23);
        }
    }

    #[test]
    fn a_shard_size_of_its_own_choice_lies_between_1_and_4096() {
        assert_eq!(cut(&[10], None).records_per_shard(), 1);
        assert_eq!(cut(&[2400], None).records_per_shard(), 100);
        assert_eq!(cut(&[1_000_000], None).records_per_shard(), 4096);
    }

    #[test]
    fn the_order_differs_by_epoch_and_is_the_same_by_seed() {
        let shards = cut(&[100], Some(1));
        let order = |epoch| shards.order(epoch).unwrap();
        assert_ne!(order(0), order(1));
        assert_eq!(order(1), cut(&[100], Some(1)).order(1).unwrap());
        let mut sorted = order(0);
        sorted.sort_unstable();
        assert_eq!(sorted, Vec::from_iter(0..100));
        let other = Shards::cut(&dataset(&[100]), &JobSpec { seed: 8, ..spec() }).unwrap();
        assert_ne!(other.order(0).unwrap().first_chunk::<20>(), order(0).first_chunk());
        assert_eq!(
            Shards::cut(&dataset(&[100]), &JobSpec { shuffle: false, ..spec() }).unwrap().order(0),
            None
        );
    }

    #[test]
    fn data_that_no_job_can_run_on_is_refused_with_the_numbers() {
        let refused = |files: &[u64], spec: &JobSpec| Shards::cut(&dataset(files), spec).unwrap_err();
        assert!(refused(&[], &spec()).contains("no files"));
        assert!(refused(&[0, 0], &spec()).contains("2 files but no records"));
        let error = refused(&[3], &spec());
        assert!(error.contains("global batch of 4") && error.contains("3 records"), "{error}");
        let minibatch = JobSpec { batch: Batch::PerWorker(NonZeroU64::new(9).unwrap()), ..spec() };
        let error = refused(&[3], &minibatch);
        assert!(error.contains("minibatch of 9") && error.contains("3 records"), "{error}");
        assert!(refused(&[u64::MAX, 1], &spec()).contains("counted"));
        assert!(refused(&[u64::MAX / 2], &JobSpec { epochs: 3, ..spec() }).contains("counted"));
        let one = JobSpec { records_per_shard: NonZeroU64::new(1), ..spec() };
        assert!(refused(&[1 << 40], &one).contains("larger shards"));
    }
}
