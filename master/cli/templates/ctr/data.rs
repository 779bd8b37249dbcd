//! Clicks as the model sees them, generated or from files in Criteo's format.
//!
//! A line of such a file has a label, 13 integers and 26 categories of hexadecimal digits,
//! separated by tabs. Integers and categories may be empty.

use std::ops::Range;

use elasticdl::readers::{CsvRows, Row};
use elasticdl::{Access, DataError, Dataset, File, ReadOptions, Reader, id_of};

use crate::clicks::{self, CATEGORIES, Click, Clicks, DENSE};

/// Reads `clicks:FROM..TO`, or a path to files in Criteo's format.
#[derive(Debug)]
pub(crate) struct Data {
    generated: Clicks,
    criteo: CsvRows,
}

impl Data {
    pub(crate) fn new(generated: Clicks) -> Self {
        let numbers = (1..=DENSE).map(|column| column.to_string());
        let rows = CsvRows::new().headerless().separator(b'\t');
        let rows = rows.class("0", 2).label().f32s(numbers).fill(0.0);
        let categories = DENSE + 1..=DENSE + CATEGORIES;
        let criteo = categories.fold(rows, |rows, column| rows.text(&column.to_string()));
        Self { generated, criteo }
    }

    /// Where the model gets the clicks of a file from; `None`: they are generated.
    fn files(&mut self, path: &str) -> Option<&mut CsvRows> {
        (!clicks::are_generated(path)).then_some(&mut self.criteo)
    }
}

impl Reader for Data {
    type Record = Click;

    fn configure(&mut self, options: ReadOptions) -> Result<(), DataError> {
        self.criteo.configure(options)
    }

    fn describe(&mut self, source: &str) -> Result<Dataset, DataError> {
        match self.files(source) {
            Some(files) => files.describe(source),
            None => self.generated.describe(source),
        }
    }

    fn access(&self, dataset: &Dataset) -> Access {
        match dataset.files.iter().all(|file| clicks::are_generated(&file.path)) {
            true => self.generated.access(dataset),
            false => self.criteo.access(dataset),
        }
    }

    fn read_ahead(&mut self, file: &File, range: Range<u64>) {
        if let Some(files) = self.files(&file.path) {
            files.read_ahead(file, range);
        }
    }

    fn read(&mut self, file: &File, range: Range<u64>) -> Result<Vec<Click>, DataError> {
        match self.files(&file.path) {
            Some(files) => Ok(files.read(file, range)?.iter().map(click).collect()),
            None => self.generated.read(file, range),
        }
    }

    fn read_records(&mut self, file: &File, records: &[u64]) -> Result<Vec<Click>, DataError> {
        match self.files(&file.path) {
            Some(files) => Ok(files.read_records(file, records)?.iter().map(click).collect()),
            None => self.generated.read_records(file, records),
        }
    }
}

/// A row of a file. Counts are compressed by a logarithm, and a category that is empty has an id
/// like any other.
fn click(row: &Row) -> Click {
    let numbers = row.f32s(1);
    let dense = |column: usize| numbers[column].signum() * numbers[column].abs().ln_1p() / 4.0;
    Click {
        label: row.class(0) as f32,
        dense: std::array::from_fn(dense),
        // The upper bits of an id are its column.
        ids: std::array::from_fn(|column| id_of(row.text(2 + column)) >> 8),
        logit: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_in_criteos_format_are_clicks() {
        let folder = std::env::temp_dir().join(format!("criteo-{}", std::process::id()));
        let categories: Vec<String> = (0..CATEGORIES).map(|n| format!("68fd1e{n:02x}")).collect();
        let numbers = (1..=DENSE).map(|n| n.to_string()).collect::<Vec<_>>().join("\t");
        let full = format!("1\t{numbers}\t{}", categories.join("\t"));
        let empty = format!("0{}", "\t".repeat(DENSE + CATEGORIES));
        let negative = full.replacen("1\t1\t2", "0\t-3\t2", 1);
        std::fs::write(&folder, [&*full, &*empty, &*negative, ""].join("\n")).unwrap();
        let mut data = Data::new(Clicks { seed: 1, ids: 1000 });
        let found = data.describe(folder.to_str().unwrap());
        let clicks = found.and_then(|found| data.read(&found.files[0], 0..3));
        std::fs::remove_file(&folder).unwrap();
        let clicks = clicks.unwrap();
        assert_eq!(clicks.iter().map(|click| click.label).collect::<Vec<_>>(), [1.0, 0.0, 0.0]);
        let third = |click: &Click| (click.dense[2] * 4.0).exp_m1();
        assert!((third(&clicks[0]) - 3.0).abs() < 1e-4 && clicks[1].dense == [0.0; DENSE]);
        assert!(clicks[2].dense[0] < 0.0 && clicks[2].dense[1] == clicks[0].dense[1]);
        assert_eq!(clicks[0].ids, clicks[2].ids);
        assert!(clicks[0].ids.windows(2).all(|pair| pair[0] != pair[1]));
        assert!(clicks[1].ids.iter().all(|id| *id == id_of("") >> 8 && id >> 56 == 0));
    }
}
