//! Reads the training data or the validation data of a data set that a job divides.

use std::ops::Range;

use elasticdl_data::worker::describe_sources;
use elasticdl_data::{Access, DataError, Dataset, File, Purpose, ReadOptions, Reader};
use elasticdl_proto::{DataPart, Split, Work, WorkerOptions};

use crate::model::Model;

/// The reader of `model`, for records that are used for `purpose`.
pub(crate) fn open_reader<M: Model>(
    model: &M,
    options: &WorkerOptions,
    purpose: Purpose,
) -> Result<PartReader<M::Reader>, DataError> {
    let mut reader = model.reader();
    let mut reading = ReadOptions::default();
    (reading.purpose, reading.bad_records_max) = (purpose, options.bad_records_max);
    reader.configure(reading)?;
    let thousandths = options.validation.as_ref().and_then(|spec| spec.split);
    let split = thousandths.map(|thousandths| Split::new(thousandths, options.seed));
    let part = match purpose {
        Purpose::Evaluate => DataPart::Validation,
        _ => DataPart::Training,
    };
    Ok(PartReader { reader, split: split.map(|split| (split, part)) })
}

/// What the records of a job are read for.
pub(crate) fn purpose_of(work: &Work) -> Purpose {
    match work {
        Work::Evaluate { .. } => Purpose::Evaluate,
        Work::Predict { .. } => Purpose::Predict,
        Work::Train { .. } => Purpose::Train,
    }
}

/// A reader of all records, or of those of a part.
pub(crate) struct PartReader<D> {
    pub(crate) reader: D,
    split: Option<(Split, DataPart)>,
}

impl<D> From<D> for PartReader<D> {
    fn from(reader: D) -> Self {
        Self { reader, split: None }
    }
}

impl<D: Reader> Reader for PartReader<D> {
    type Record = D::Record;

    fn describe(&mut self, source: &str) -> Result<Dataset, DataError> {
        let mut dataset = describe_sources(&mut self.reader, source)?;
        let Some((split, part)) = self.split else { return Ok(dataset) };
        for file in &mut dataset.files {
            file.records = split.count(part, &file.path, file.records);
        }
        if dataset.files.iter().all(|file| file.records == 0) {
            let what = match part {
                DataPart::Training => "training",
                DataPart::Validation => "validation",
            };
            let reason = format!("--validation-split leaves no record for {what}");
            return Err(DataError::Empty { path: source.into(), reason });
        }
        Ok(dataset)
    }

    fn access(&self, dataset: &Dataset) -> Access {
        self.reader.access(dataset)
    }

    fn read_ahead(&mut self, file: &File, range: Range<u64>) {
        match self.split {
            None => self.reader.read_ahead(file, range),
            Some(_) if range.is_empty() => {}
            Some((split, part)) => {
                let record = |index: u64| split.records(part, &file.path, &[index])[0];
                let range = record(range.start)..record(range.end - 1) + 1;
                self.reader.read_ahead(&whole(split, part, file), range);
            }
        }
    }

    fn begin_epoch(&mut self, epoch: u32) {
        self.reader.begin_epoch(epoch);
    }

    fn read(&mut self, file: &File, range: Range<u64>) -> Result<Vec<D::Record>, DataError> {
        if self.split.is_none() {
            return self.reader.read(file, range);
        }
        self.read_records(file, &range.collect::<Vec<_>>())
    }

    fn read_records(&mut self, file: &File, records: &[u64]) -> Result<Vec<D::Record>, DataError> {
        let Some((split, part)) = self.split else {
            return self.reader.read_records(file, records);
        };
        let whole = whole(split, part, file);
        let wanted = split.records(part, &file.path, records);
        let (Some(&first), Some(&last)) = (wanted.first(), wanted.last()) else {
            return Ok(Vec::new());
        };
        // One read of the whole range is faster than many short ones, unless it reads much that is
        // not wanted.
        if last - first >= 2 * wanted.len() as u64 {
            return self.reader.read_records(&whole, &wanted);
        }
        let read = self.reader.read(&whole, first..last + 1)?;
        let mut wanted = wanted.into_iter().peekable();
        let mut is_wanted = |record: &u64| wanted.next_if(|wanted| wanted == record).is_some();
        Ok((first..).zip(read).filter(|(at, _)| is_wanted(at)).map(|(_, record)| record).collect())
    }
}

/// The file with all records up to the last one of `part`.
fn whole(split: Split, part: DataPart, file: &File) -> File {
    let mut whole = file.clone();
    if let Some(last) = file.records.checked_sub(1) {
        whole.records = split.records(part, &file.path, &[last])[0] + 1;
    }
    whole
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU16;

    use super::*;

    /// Records are their numbers.
    struct Numbers(Vec<u64>);

    impl Reader for Numbers {
        type Record = u64;

        fn describe(&mut self, _source: &str) -> Result<Dataset, DataError> {
            let file = |(i, &records)| File::new(format!("data/{i}"), records);
            Ok(Dataset::new(self.0.iter().enumerate().map(file).collect()))
        }

        fn read(&mut self, file: &File, range: Range<u64>) -> Result<Vec<u64>, DataError> {
            assert!(range.end <= file.records, "{range:?} of {file:?}");
            Ok(range.collect())
        }
    }

    fn part(thousandths: u16, seed: u64, part: DataPart, files: &[u64]) -> PartReader<Numbers> {
        let split = Split::new(NonZeroU16::new(thousandths).unwrap(), seed);
        PartReader { reader: Numbers(files.to_vec()), split: Some((split, part)) }
    }

    fn records(mut reader: PartReader<Numbers>) -> Vec<Vec<u64>> {
        let dataset = reader.describe("d").unwrap();
        let all = |file: &File| {
            let all = reader.read(file, 0..file.records).unwrap();
            // Piece by piece.
            let mut pieces = Vec::new();
            for start in (0..file.records).step_by(7) {
                let end = (start + 7).min(file.records);
                reader.read_ahead(file, start..end);
                pieces.extend(reader.read(file, start..end).unwrap());
            }
            assert_eq!(pieces, all);
            all
        };
        dataset.files.iter().map(all).collect()
    }

    #[test]
    fn each_record_is_in_one_part() {
        let files = [1000, 3, 1, 2345, 10, 99];
        for thousandths in [1, 100, 150, 333, 999] {
            for seed in [0, 7] {
                let of = |which| records(part(thousandths, seed, which, &files));
                let (training, validation) = (of(DataPart::Training), of(DataPart::Validation));
                for ((records, training), validation) in files.iter().zip(training).zip(validation)
                {
                    let mut all = [training, validation].concat();
                    all.sort_unstable();
                    assert_eq!(all, (0..*records).collect::<Vec<_>>(), "{thousandths} {seed}");
                }
            }
        }
    }

    #[test]
    fn the_part_has_its_share_of_each_stretch_of_the_data() {
        let validation = records(part(100, 3, DataPart::Validation, &[10_000])).remove(0);
        assert_eq!(validation.len(), 1000);
        for start in (0..10_000).step_by(100) {
            let within = validation.iter().filter(|at| (start..start + 100).contains(*at)).count();
            assert_eq!(within, 10, "from {start}");
        }
    }

    #[test]
    fn the_choice_depends_on_the_seed_and_on_the_file() {
        let of = |seed| records(part(100, seed, DataPart::Validation, &[1000, 1000]));
        let (one, other) = (of(1), of(2));
        assert_eq!(of(1), one);
        let same = |a: &[u64], b: &[u64]| a.iter().filter(|record| b.contains(record)).count();
        for (a, b) in [(&one[0], &one[1]), (&one[0], &other[0]), (&one[1], &other[1])] {
            // Two choices of one in ten agree at one in ten on average.
            assert!(same(a, b) < 30, "{a:?} {b:?}");
        }
    }

    #[test]
    fn a_part_without_records_is_refused() {
        let mut reader = part(1, 0, DataPart::Validation, &[2]);
        let error = reader.describe("d").unwrap_err().to_string();
        assert_eq!(error, "d: --validation-split leaves no record for validation");
    }
}
