//! How the data set of an inference job is cut into shards.
//!
//! **Invariants:** a shard is never empty and never crosses a file; the shards of a data set are
//! disjoint and hold all of its records.

use std::num::NonZeroU64;
use std::ops::Range;

use super::dataset::Dataset;
use crate::job::text::counted;

/// The shards of a data set.
#[derive(Clone, Debug)]
pub(crate) struct Shards {
    /// The files that hold records.
    files: Vec<FileSpan>,
    records_per_shard: u64,
    shards: u32,
}

#[derive(Clone, Debug)]
struct FileSpan {
    first_shard: u32,
    records: Range<u64>,
}

impl Shards {
    /// Cuts `dataset` into shards of `records_per_shard` records; `None` chooses their size.
    ///
    /// # Errors
    /// There are too many shards, for the user.
    pub(crate) fn cut(
        dataset: &Dataset,
        records_per_shard: Option<NonZeroU64>,
    ) -> Result<Self, String> {
        let total = dataset.records();
        let records_per_shard = records_per_shard.map_or_else(
            // The size depends on the data alone: results are added shard by shard, and must not
            // depend on the number of workers.
            || RECORDS_PER_SHARD.max(total / u64::from(SHARDS_AUTO_MAX)),
            NonZeroU64::get,
        );
        let (mut files, mut shards) = (Vec::new(), 0);
        for records in dataset.spans() {
            let count = (records.end - records.start).div_ceil(records_per_shard);
            files
                .push(FileSpan { first_shard: u32::try_from(shards).unwrap_or(u32::MAX), records });
            shards += count;
        }
        if shards > u64::from(SHARDS_MAX) {
            return Err(format!(
                "{records_per_shard} records per shard cut the data set's {total} records into \
                 {shards} shards; \
                 at most {SHARDS_MAX} are possible: choose larger shards"
            ));
        }
        let shards = u32::try_from(shards).expect("checked against SHARDS_MAX");
        Ok(Self { files, records_per_shard, shards })
    }

    /// Number of shards.
    pub(crate) fn len(&self) -> u32 {
        self.shards
    }

    /// The records of shard `shard`, which is less than [`Shards::len`].
    pub(crate) fn range(&self, shard: u32) -> Range<u64> {
        let file = self.files.partition_point(|f| f.first_shard <= shard) - 1;
        let FileSpan { first_shard, records } = &self.files[file];
        let start = records.start + u64::from(shard - first_shard) * self.records_per_shard;
        start..start.saturating_add(self.records_per_shard).min(records.end)
    }

    /// The shard that holds `record`; `None` if it lies outside the data set.
    pub(crate) fn of(&self, record: u64) -> Option<u32> {
        let file = self.files.partition_point(|f| f.records.end <= record);
        let FileSpan { first_shard, records } = self.files.get(file)?;
        let within = (record - records.start) / self.records_per_shard;
        let within = u32::try_from(within).expect("a file has fewer shards than the data set");
        Some(first_shard + within)
    }

    /// Number of records per shard as text: `1 record`, `8 records`, `up to 937 records`.
    pub(crate) fn sizes(&self) -> String {
        let (mut least, mut most) = (u64::MAX, 0);
        for FileSpan { records, .. } in &self.files {
            let records = records.end - records.start;
            let rest = records % self.records_per_shard;
            most = most.max(records.min(self.records_per_shard));
            least = least.min(if rest == 0 { self.records_per_shard } else { rest });
        }
        let most_counted = counted(most, "record");
        if least == most { most_counted } else { format!("up to {most_counted}") }
    }
}

/// Default size: a shard is cheap to repeat, and a file of its predictions not too small.
const RECORDS_PER_SHARD: u64 = 4096;
const SHARDS_AUTO_MAX: u32 = 1 << 22;
const SHARDS_MAX: u32 = 1 << 24;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::testing::{dataset, spec};

    fn cut(files: &[u64], per_shard: Option<u64>) -> Result<Shards, String> {
        let data = Dataset::new(dataset(files), &spec()).unwrap();
        Shards::cut(&data, per_shard.and_then(NonZeroU64::new))
    }

    #[test]
    fn shards_never_cross_files_and_hold_every_record_once() {
        let ends = [5, 6, 13, 23];
        for per_shard in 1..12 {
            let shards = cut(&[5, 0, 1, 7, 10], Some(per_shard)).unwrap();
            let mut at = 0;
            for shard in 0..shards.len() {
                let range = shards.range(shard);
                assert_eq!(range.start, at);
                assert!(range.end > range.start && range.end - range.start <= per_shard);
                assert!(!ends.iter().any(|end| range.start < *end && *end < range.end));
                assert!(range.clone().all(|record| shards.of(record) == Some(shard)));
                at = range.end;
            }
            assert_eq!((at, shards.of(at)), (23, None));
        }
    }

    #[test]
    fn sizes_are_told_as_they_are() {
        let sizes = |files: &[u64], per_shard| cut(files, Some(per_shard)).unwrap().sizes();
        assert_eq!(sizes(&[1; 50], 937), "1 record");
        assert_eq!(sizes(&[8, 16], 8), "8 records");
        assert_eq!(sizes(&[8, 17], 8), "up to 8 records");
        assert_eq!(sizes(&[2, 3], 8), "up to 3 records");
    }

    #[test]
    fn a_shard_has_4096_records_unless_that_makes_too_many_shards() {
        let size = |records: u64| cut(&[records], None).unwrap().records_per_shard;
        assert_eq!((size(10), size(1 << 34), size(1 << 40)), (4096, 4096, 1 << 18));
        assert!(cut(&[1 << 40], Some(1)).unwrap_err().contains("larger shards"));
    }
}
