//! Which records of a data set are validation data, and which are trained.
//!
//! The records of a file are divided into strata of consecutive records. In each, a permutation
//! that the seed, the file's name and the number of the stratum determine chooses the same number
//! of records. So the choice takes no memory, and data that is sorted is divided evenly.

use std::num::NonZeroU16;

use xxhash_rust::xxh3::xxh3_64;

use crate::order::permuted;

/// Which records are validation data.
#[derive(Clone, Copy, Debug)]
pub struct Split {
    /// Number of records of a stratum.
    stratum: u64,
    /// Number of validation records of a stratum; less than `stratum`.
    chosen: u64,
    seed: u64,
}

/// A part of a data set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataPart {
    /// The records that are trained.
    Training,
    /// The records that the model is evaluated on.
    Validation,
}

impl Split {
    /// The choice of this many thousandths of the records by a seed.
    ///
    /// # Panics
    /// They are more than 999.
    #[must_use]
    pub fn new(thousandths: NonZeroU16, seed: u64) -> Self {
        assert!(thousandths.get() < 1000, "some records are left for training");
        let chosen = u64::from(thousandths.get());
        let divisor = (1..=chosen).rev().find(|d| chosen.is_multiple_of(*d) && 1000 % d == 0);
        let divisor = divisor.expect("1 divides all numbers");
        Self { stratum: 1000 / divisor, chosen: chosen / divisor, seed }
    }

    /// Number of records of `part` in the file at `path`, which has `records`.
    #[must_use]
    pub fn count(self, part: DataPart, path: &str, records: u64) -> u64 {
        let (whole, rest) = (records / self.stratum, records % self.stratum);
        let in_rest = self.chosen_in(path, whole).into_iter().filter(|at| *at < rest).count();
        let validation = whole * self.chosen + in_rest as u64;
        match part {
            DataPart::Training => records - validation,
            DataPart::Validation => validation,
        }
    }

    /// The records of the file that have the numbers `indices` in `part`. The choice is made once
    /// for those of a stratum that follow each other.
    #[must_use]
    pub fn records(self, part: DataPart, path: &str, indices: &[u64]) -> Vec<u64> {
        let per_stratum = match part {
            DataPart::Training => self.stratum - self.chosen,
            DataPart::Validation => self.chosen,
        };
        let mut records = Vec::with_capacity(indices.len());
        for stratum in indices.chunk_by(|a, b| a / per_stratum == b / per_stratum) {
            let number = stratum[0] / per_stratum;
            let chosen = self.chosen_in(path, number);
            for index in stratum.iter().map(|index| index % per_stratum) {
                let at = match part {
                    DataPart::Validation => chosen[index as usize],
                    DataPart::Training => {
                        chosen.iter().fold(index, |at, &c| if c <= at { at + 1 } else { at })
                    }
                };
                records.push(number * self.stratum + at);
            }
        }
        records
    }

    /// The part that a record of the file belongs to, and its number there: the inverse of
    /// [`records`](Self::records).
    #[must_use]
    pub fn part_of(self, path: &str, record: u64) -> (DataPart, u64) {
        let (number, at) = (record / self.stratum, record % self.stratum);
        let chosen = self.chosen_in(path, number);
        let before = chosen.partition_point(|&chosen| chosen < at) as u64;
        match chosen.contains(&at) {
            true => (DataPart::Validation, number * self.chosen + before),
            false => (DataPart::Training, number * (self.stratum - self.chosen) + at - before),
        }
    }

    /// The validation records of a stratum, in ascending order, from 0.
    fn chosen_in(self, path: &str, number: u64) -> Vec<u64> {
        // A folder may have another name on another machine.
        let name = path.rsplit_once('/').map_or(path, |(_, name)| name);
        let choice = permuted(self.stratum, self.seed ^ xxh3_64(name.as_bytes()), number);
        let mut chosen: Vec<u64> = (0..self.chosen).map(choice).collect();
        chosen.sort_unstable();
        chosen
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_part_of_a_record_and_its_number_there_are_the_inverse_of_the_choice() {
        for (thousandths, seed) in [(1, 0), (100, 7), (150, 1), (333, 2), (999, 3)] {
            let split = Split::new(NonZeroU16::new(thousandths).unwrap(), seed);
            for record in 0..2500 {
                let (part, number) = split.part_of("d/a.csv", record);
                assert_eq!(split.records(part, "d/a.csv", &[number]), [record], "{split:?}");
                assert_eq!(split.count(part, "d/a.csv", record), number, "{split:?}");
            }
        }
    }
}
