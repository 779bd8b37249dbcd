//! How a data set is cut into shards, and their order in an epoch.
//!
//! **Invariants:** a shard is never empty and never crosses a file; the shards of a data set are
//! disjoint and hold all of its records; an epoch's order depends on the seed and the epoch alone.

use std::collections::BTreeMap;
use std::ops::Range;

use elasticdl_proto::{FileList, RecordRange};
use rand::SeedableRng;
use rand::rngs::ChaCha8Rng;
use rand::seq::SliceRandom;

use crate::job::spec::{Batch, JobSpec};

/// A data set, cut into shards.
#[derive(Clone, Debug)]
pub(crate) struct Shards {
    list: FileList,
    /// The files that hold records. Their paths stay packed: they may take a hundred megabytes.
    files: Vec<FileSpan>,
    records: u64,
    records_per_shard: u64,
    shards: u32,
    /// `None`: in order.
    shuffle_seed: Option<u64>,
}

#[derive(Clone, Debug)]
struct FileSpan {
    first_shard: u32,
    /// Where its records end, and those of the next file begin.
    end: u64,
}

impl Shards {
    /// Cuts the data set of `list` for the job `spec`.
    ///
    /// # Errors
    /// Why the job can't run on it, for the user.
    pub(crate) fn cut(list: &FileList, spec: &JobSpec) -> Result<Self, String> {
        let records = check(list, spec)?;
        let records_per_shard = spec.records_per_shard.map_or_else(
            || {
                if !spec.work.trains() {
                    // The size depends on the data alone: results are added shard by shard, and
                    // must not depend on the number of workers.
                    return RECORDS_PER_SHARD_INFERENCE.max(records / u64::from(SHARDS_AUTO_MAX));
                }
                let wanted = records / (u64::from(spec.num_workers.max(1)) * SHARDS_PER_WORKER);
                wanted
                    .clamp(1, RECORDS_PER_SHARD_AUTO_MAX)
                    .max(records / u64::from(SHARDS_AUTO_MAX))
            },
            |n| n.get(),
        );
        let (mut files, mut shards, mut end) = (Vec::new(), 0, 0);
        for records in list.iter().map(|file| file.records).filter(|records| *records > 0) {
            end += records;
            files.push(FileSpan { first_shard: u32::try_from(shards).unwrap_or(u32::MAX), end });
            shards += records.div_ceil(records_per_shard);
        }
        if shards > u64::from(SHARDS_MAX) {
            return Err(format!(
                "{records_per_shard} records per shard cut the data set's {records} records into \
                 {shards} shards; \
                 at most {SHARDS_MAX} are possible: choose larger shards"
            ));
        }
        let shards = u32::try_from(shards).expect("checked against SHARDS_MAX");
        let shuffle_seed = spec.shuffle.then_some(spec.seed);
        Ok(Self { list: list.clone(), files, records, records_per_shard, shards, shuffle_seed })
    }

    /// Records of one epoch.
    pub(crate) fn records(&self) -> u64 {
        self.records
    }

    /// Number of shards.
    pub(crate) fn len(&self) -> u32 {
        self.shards
    }

    /// Records of a shard, but for the last of each file, which may have fewer.
    pub(crate) fn records_per_shard(&self) -> u64 {
        self.records_per_shard
    }

    /// The records of shard `shard`, which is less than [`Shards::len`].
    pub(crate) fn range(&self, shard: u32) -> Range<u64> {
        let file = self.files.partition_point(|f| f.first_shard <= shard) - 1;
        let records = self.records_of(file);
        let start = records.start
            + u64::from(shard - self.files[file].first_shard) * self.records_per_shard;
        start..start.saturating_add(self.records_per_shard).min(records.end)
    }

    /// The shard that holds `record`, which lies in the data set.
    pub(crate) fn of(&self, record: u64) -> u32 {
        let file = self.files.partition_point(|f| f.end <= record);
        let within = (record - self.records_of(file).start) / self.records_per_shard;
        let within = u32::try_from(within).expect("a file has fewer shards than the data set");
        self.files[file].first_shard + within
    }

    /// How many shards lie in `records` as a whole.
    pub(crate) fn count_in(&self, records: &Range<u64>) -> u32 {
        if records.is_empty() {
            return 0;
        }
        let first = self.of(records.start);
        let first = first + u32::from(self.range(first).start < records.start);
        let end = if records.end == self.records { self.shards } else { self.of(records.end) };
        end.saturating_sub(first)
    }

    /// The order of shards in `epoch`; `None`: by number.
    pub(crate) fn order(&self, epoch: u32) -> Option<Vec<u32>> {
        let seed = self.shuffle_seed?;
        let mut key = [0; 32];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        key[8..12].copy_from_slice(&epoch.to_le_bytes());
        let mut order: Vec<u32> = (0..self.shards).collect();
        order.shuffle(&mut ChaCha8Rng::from_seed(key));
        Some(order)
    }

    /// Number of records per shard as text: `1 record`, `8 records`, `up to 937 records`.
    pub(crate) fn sizes(&self) -> String {
        let (mut least, mut most) = (u64::MAX, 0);
        for file in 0..self.files.len() {
            let records = self.records_of(file);
            let records = records.end - records.start;
            let rest = records % self.records_per_shard;
            most = most.max(records.min(self.records_per_shard));
            least = least.min(if rest == 0 { self.records_per_shard } else { rest });
        }
        let most_counted = counted(most, "record");
        if least == most { most_counted } else { format!("up to {most_counted}") }
    }

    /// `ranges`, which lie in the data set, by file: its path, and the records counted within it;
    /// at most `max` parts. The list of files is read through for it.
    pub(crate) fn by_file(
        &self,
        ranges: impl Iterator<Item = RecordRange>,
        max: usize,
    ) -> Vec<(String, RecordRange)> {
        let mut parts: Vec<(usize, RecordRange)> = Vec::new();
        for range in ranges {
            let first = self.files.partition_point(|f| f.end <= range.start);
            let files =
                (first..self.files.len()).take_while(|&i| self.records_of(i).start < range.end);
            for file in files.take(max - parts.len()) {
                let Range { start: base, end } = self.records_of(file);
                let (start, end) = (range.start.max(base) - base, range.end.min(end) - base);
                parts.push((file, RecordRange { start, end, ..range }));
            }
        }
        let last = parts.iter().map(|(file, _)| *file + 1).max().unwrap_or_default();
        let mut paths: BTreeMap<usize, String> =
            parts.iter().map(|(file, _)| (*file, String::new())).collect();
        let named = self.list.iter().filter(|file| file.records > 0).take(last);
        for (file, listed) in named.enumerate() {
            if let Some(known) = paths.get_mut(&file) {
                *known = listed.path;
            }
        }
        parts.into_iter().map(|(file, part)| (paths[&file].clone(), part)).collect()
    }

    /// The records of a file that has some, by its number among these.
    fn records_of(&self, file: usize) -> Range<u64> {
        let start = file.checked_sub(1).map_or(0, |before| self.files[before].end);
        start..self.files[file].end
    }
}

/// The data set's records, or why the job can't run on it.
fn check(list: &FileList, spec: &JobSpec) -> Result<u64, String> {
    let data = &spec.training_data;
    if list.is_empty() {
        return Err(format!("{data:?} holds no files; name a file, or a folder with at least one"));
    }
    if list.len() > FILES_MAX {
        return Err(format!(
            "{data:?} holds {} files; at most {FILES_MAX} are possible",
            list.len()
        ));
    }
    // A sum that does not fit is shown as the largest number, which is too many.
    let records = list.records();
    // Doubled, so that sums of counted and repeated records can't overflow either.
    if records.checked_mul(u64::from(spec.epochs)).and_then(|n| n.checked_mul(2)).is_none() {
        return Err(format!(
            "{data:?} holds more records over {} epochs than can be counted",
            spec.epochs
        ));
    }
    if records == 0 {
        return Err(format!("{data:?} holds {} files but no records", list.len()));
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

/// `1 record`, `8 records`.
pub(crate) fn counted(count: u64, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// Shards per worker, where the size is chosen here: enough that one slow worker doesn't hold up an
/// epoch's end.
const SHARDS_PER_WORKER: u64 = 8;
const RECORDS_PER_SHARD_AUTO_MAX: u64 = 4096;
/// Size for inference jobs: a shard is cheap to repeat, and a file of its predictions not too
/// small.
const RECORDS_PER_SHARD_INFERENCE: u64 = 4096;
const SHARDS_AUTO_MAX: u32 = 1 << 22;
/// An epoch's order takes 4 bytes for each.
const SHARDS_MAX: u32 = 1 << 24;
const FILES_MAX: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use super::*;
    use crate::job::testing::{dataset, spec};

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
                let whole = RecordRange { epoch: 1, start: range.start, end: range.end };
                let parts = shards.by_file(std::iter::once(whole), 9);
                assert_eq!(parts.len(), 1, "{range:?} crosses a file");
                assert_eq!(parts[0].1.len(), whole.len());
                at = range.end;
            }
            assert_eq!(at, 23);
        }
    }

    #[test]
    fn records_are_found_in_their_files_and_no_more_parts_than_there_is_room_for() {
        let shards = cut(&[5, 0, 1, 7], Some(3));
        let range = |start, end| RecordRange { epoch: 4, start, end };
        let part = |file: &str, start, end| (file.to_owned(), range(start, end));
        let parts = |max| shards.by_file([range(4, 8), range(0, 2)].into_iter(), max);
        let all = [
            part("file-0", 4, 5),
            part("file-2", 0, 1),
            part("file-3", 0, 2),
            part("file-0", 0, 2),
        ];
        assert_eq!(parts(9), all);
        assert_eq!(parts(2), all[..2]);
        assert_eq!(parts(0), []);
    }

    #[test]
    fn sizes_are_told_as_they_are() {
        assert_eq!(cut(&[1; 50], Some(937)).sizes(), "1 record");
        assert_eq!(cut(&[8, 16], Some(8)).sizes(), "8 records");
        assert_eq!(cut(&[8, 17], Some(8)).sizes(), "up to 8 records");
        assert_eq!(cut(&[2, 3], Some(8)).sizes(), "up to 3 records");
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
        let refused =
            |files: &[u64], spec: &JobSpec| Shards::cut(&dataset(files), spec).unwrap_err();
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
