//! Which rows of a table a data set contains, where rows are left out.

use xxhash_rust::xxh3::Xxh3Default;

/// The rows of a part of a table, and those of them that are left out.
#[derive(Clone, Debug, Default)]
pub(super) struct Kept {
    rows: u64,
    /// The rows that are left out, in ascending order.
    left_out: Vec<u64>,
}

impl Kept {
    /// Adds the next row.
    pub(super) fn push(&mut self, is_kept: bool) {
        if !is_kept {
            self.left_out.push(self.rows);
        }
        self.rows += 1;
    }

    /// Number of rows.
    pub(super) fn rows(&self) -> u64 {
        self.rows
    }

    /// Number of rows that are not left out.
    pub(super) fn count(&self) -> u64 {
        self.rows - self.left_out.len() as u64
    }

    /// Identifies the rows that are left out.
    pub(super) fn digest(&self) -> u32 {
        let mut digest = Xxh3Default::new();
        digest.update(&self.rows.to_le_bytes());
        self.left_out.iter().for_each(|row| digest.update(&row.to_le_bytes()));
        digest.digest() as u32
    }

    /// The row that is number `index` of those that are not left out.
    #[cfg(any(feature = "arrow", feature = "images", feature = "parquet"))]
    pub(super) fn row(&self, index: u64) -> u64 {
        // The rows that are left out before row `index + k` are at least `k` exactly up to the
        // wanted `k`.
        let (mut low, mut high) = (0, self.left_out.len());
        while low < high {
            let middle = low.midpoint(high);
            if self.left_out[middle] - middle as u64 <= index {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        index + low as u64
    }
}

#[cfg(test)]
#[cfg(feature = "full")]
mod tests {
    use super::*;
    use crate::reader::{DataError, ReadOptions, Reader};
    use crate::readers::{CsvRows, ImageFolder, ParquetRows, WebDataset};

    /// A worker reads what another one described, and what a worker with other records described.
    fn check<R: Reader<Record: std::fmt::Debug>>(make: impl Fn() -> R, source: &str) {
        let reader = || {
            let mut reader = make();
            let bad_records_max = 5;
            reader.configure(ReadOptions { bad_records_max, ..ReadOptions::default() }).unwrap();
            reader
        };
        let file = reader().describe(source).unwrap().files.remove(0);
        reader().read(&file, 0..file.records).unwrap();
        let version = file.version.unwrap();
        let read = |version| {
            let file = crate::File { version: Some(version), ..file.clone() };
            reader().read(&file, 0..1).unwrap_err()
        };
        for bit in [0, 7, 15] {
            let error = read(version ^ 1 << bit);
            assert!(matches!(error, DataError::Differs { .. }) && !error.ends_job(), "{error}");
        }
        for bit in [16, 23, 31] {
            let error = read(version ^ 1 << bit);
            assert!(matches!(error, DataError::Changed { .. }), "{error}");
        }
    }

    #[test]
    fn a_worker_that_leaves_other_records_out_than_were_described_refuses_to_read() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        let write = |name: &str, bytes: &[u8]| std::fs::write(at(name), bytes).unwrap();
        write("a.csv", b"y\n1\nx\n3\n");
        write("a.parquet", &crate::readers::parquet_table(&[0..20, 20..31]));
        let png = crate::readers::png_image(4);
        write("a.tar", &crate::readers::tar_file(&[("1.cls", b"3"), ("2.cls", b"x")]));
        std::fs::create_dir_all(at("images/cat")).unwrap();
        write("images/cat/1.png", &png);
        write("images/cat/2.png", b"no image");
        check(|| CsvRows::new().f32("y"), &at("a.csv"));
        check(|| ParquetRows::new().f32("price"), &at("a.parquet"));
        check(|| WebDataset::new().class("cls", 10), &at("a.tar"));
        check(|| ImageFolder::new([2, 3, 3], ["cat"]), &at("images"));
        // Other records are another digest.
        let digest = |pattern: u32| {
            let mut kept = Kept::default();
            (0..9).for_each(|row| kept.push(pattern >> row & 1 == 1));
            kept.digest() & 0xffff
        };
        let all = std::collections::BTreeSet::from_iter((0..1 << 9).map(digest));
        assert!(all.len() > 500, "{}", all.len());
    }

    #[test]
    fn rows_that_are_left_out_are_not_numbered() {
        for pattern in 0..1_u32 << 10 {
            let is_kept = |row: u64| pattern >> row & 1 == 1;
            let mut kept = Kept::default();
            (0..10).for_each(|row| kept.push(is_kept(row)));
            let expected: Vec<u64> = (0..10).filter(|row| is_kept(*row)).collect();
            let found: Vec<u64> = (0..kept.count()).map(|index| kept.row(index)).collect();
            assert_eq!(found, expected, "{pattern:b}");
        }
    }
}
