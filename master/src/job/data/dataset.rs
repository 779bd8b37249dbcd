//! The data set of a job: the files that hold its records.

use std::collections::BTreeMap;
use std::ops::Range;

use elasticdl_proto::{FileList, RecordRange, shown_sources};

use crate::job::spec::{Batch, JobSpec};

/// A data set.
#[derive(Clone, Debug)]
pub(crate) struct Dataset {
    list: FileList,
    /// For each file that holds records, where they end, and those of the next file begin. The
    /// paths stay packed: they may take a hundred megabytes.
    ends: Vec<u64>,
}

impl Dataset {
    /// The data set of `list` for the job `spec`.
    ///
    /// # Errors
    /// Why the job can't run on it, for the user.
    pub(crate) fn new(list: FileList, spec: &JobSpec) -> Result<Self, String> {
        check(&list, spec)?;
        let counts = list.iter().map(|file| file.records).filter(|records| *records > 0);
        let end_of = |end: &mut u64, records| {
            *end += records;
            Some(*end)
        };
        let ends = counts.scan(0, end_of).collect();
        Ok(Self { list, ends })
    }

    /// The list of files.
    pub(crate) fn files(&self) -> &FileList {
        &self.list
    }

    /// Records of one epoch.
    pub(crate) fn records(&self) -> u64 {
        self.ends.last().copied().unwrap_or_default()
    }

    /// The records of each file that has some, in order.
    pub(crate) fn spans(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        (0..self.ends.len()).map(|file| self.records_of(file))
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
            let first = self.ends.partition_point(|end| *end <= range.start);
            let files =
                (first..self.ends.len()).take_while(|&i| self.records_of(i).start < range.end);
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
        let start = file.checked_sub(1).map_or(0, |before| self.ends[before]);
        start..self.ends[file]
    }
}

/// Checks whether the job can run on these files.
fn check(list: &FileList, spec: &JobSpec) -> Result<(), String> {
    let data = &shown_sources(&spec.options.training_data);
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
    if records.checked_mul(u64::from(spec.options.epochs)).and_then(|n| n.checked_mul(2)).is_none()
    {
        return Err(format!(
            "{data:?} holds more records over {} epochs than can be counted",
            spec.options.epochs
        ));
    }
    if records == 0 {
        return Err(format!("{data:?} holds {} files but no records", list.len()));
    }
    let (name, batch) = match spec.options.batch {
        Batch::Global(records) => ("--global-batch-size", records.get()),
        Batch::PerWorker(records) => ("--minibatch-size", records.get()),
    };
    if batch > records && spec.options.work.trains() {
        return Err(format!(
            "{name} {batch} is larger than the data set of {records} records; choose at most \
             {records}"
        ));
    }
    Ok(())
}

const FILES_MAX: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use elasticdl_proto::WorkerOptions;

    use super::*;
    use crate::job::testing::{dataset, spec};

    #[test]
    fn records_are_found_in_their_files_and_no_more_parts_than_there_is_room_for() {
        let data = Dataset::new(dataset(&[5, 0, 1, 7]), &spec()).unwrap();
        let range = |start, end| RecordRange { epoch: 4, start, end };
        let part = |file: &str, start, end| (file.to_owned(), range(start, end));
        let parts = |max| data.by_file([range(4, 8), range(0, 2)].into_iter(), max);
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
    fn data_that_no_job_can_run_on_is_refused_with_the_numbers() {
        let refused =
            |files: &[u64], spec: &JobSpec| Dataset::new(dataset(files), spec).unwrap_err();
        assert!(refused(&[], &spec()).contains("no files"));
        assert!(refused(&[0, 0], &spec()).contains("2 files but no records"));
        let error = refused(&[3], &spec());
        assert!(error.contains("--global-batch-size 4") && error.contains("3 records"), "{error}");
        let minibatch = JobSpec {
            options: WorkerOptions {
                batch: Batch::PerWorker(NonZeroU64::new(9).unwrap()),
                ..spec().options
            },
            ..spec()
        };
        let error = refused(&[3], &minibatch);
        assert!(error.contains("--minibatch-size 9") && error.contains("3 records"), "{error}");
        assert!(refused(&[u64::MAX, 1], &spec()).contains("counted"));
        assert!(
            refused(
                &[u64::MAX / 2],
                &JobSpec { options: WorkerOptions { epochs: 3, ..spec().options }, ..spec() }
            )
            .contains("counted")
        );
    }
}
