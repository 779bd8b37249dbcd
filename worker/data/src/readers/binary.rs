//! Records of one fixed size, stored contiguously.

use std::ops::Range;
use std::path::Path;

use super::files;
use crate::reader::{Access, DataError, Dataset, File, Reader};

/// Reads files that consist of records of one fixed size.
///
/// The meaning of the bytes is up to the model. Empty files are ignored.
#[derive(Clone, Debug)]
pub struct FixedRecords {
    bytes: u64,
    extensions: Vec<String>,
}

impl FixedRecords {
    /// Records of `bytes` bytes.
    ///
    /// # Panics
    /// If `bytes` is 0.
    pub fn new(bytes: usize) -> Self {
        assert!(bytes > 0, "a record has at least one byte");
        Self { bytes: bytes as u64, extensions: Vec::new() }
    }

    /// In folders, reads only files with one of these extensions, given without the dot.
    pub fn extensions(mut self, extensions: &[&str]) -> Self {
        self.extensions = extensions.iter().map(|&extension| extension.to_owned()).collect();
        self
    }
}

impl Reader for FixedRecords {
    /// The bytes of one record.
    type Record = Vec<u8>;

    fn describe(&mut self, source: &str) -> Result<Dataset, DataError> {
        let mut dataset = Dataset::default();
        let listed = files::list(source, &self.extensions)?;
        for path in &listed.paths {
            let length = files::length(path)?;
            let (records, rest) = (length / self.bytes, length % self.bytes);
            if rest > 0 {
                let reason = format!(
                    "{length} bytes is not a multiple of the record size, {}; remainder: {rest}",
                    self.bytes
                );
                return Err(files::malformed(path, &reason));
            }
            if records > 0 {
                let version = Some(files::version(&[path])?);
                dataset.files.push(File { path: files::text(path)?, records, version });
            }
        }
        listed.note_others(&mut dataset.skipped);
        files::not_empty(source, dataset, &format!("no record of {} bytes", self.bytes))
    }

    fn access(&self, dataset: &Dataset) -> Access {
        files::access(dataset, self.bytes)
    }

    fn read_ahead(&mut self, file: &File, range: Range<u64>) {
        let length = (range.end - range.start).saturating_mul(self.bytes);
        files::read_ahead(Path::new(&file.path), range.start.saturating_mul(self.bytes), length);
    }

    fn read(&mut self, file: &File, range: Range<u64>) -> Result<Vec<Vec<u8>>, DataError> {
        if range.is_empty() {
            return Ok(Vec::new());
        }
        let start = range.start.saturating_mul(self.bytes);
        let length = (range.end - range.start).saturating_mul(self.bytes);
        files::check(file, &[Path::new(&file.path)])?;
        let bytes = files::read(Path::new(&file.path), start, length)?;
        // The bytes fit into memory, so a record, which is not longer, fits into a usize.
        Ok(bytes.chunks_exact(self.bytes as usize).map(<[u8]>::to_vec).collect())
    }

    fn read_records(&mut self, file: &File, records: &[u64]) -> Result<Vec<Vec<u8>>, DataError> {
        files::check(file, &[Path::new(&file.path)])?;
        let places = records.iter().map(|record| record.saturating_mul(self.bytes));
        files::read_each(Path::new(&file.path), places, self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, bytes) in files {
            std::fs::write(folder.path().join(name), bytes).unwrap();
        }
        folder
    }

    #[test]
    fn records_are_read_in_order() {
        let folder =
            folder(&[("a.bin", b"aabbcc"), ("b.bin", b""), ("c.bin", b"dd"), ("d.txt", b"odd")]);
        let mut records = FixedRecords::new(2).extensions(&["bin"]);
        let dataset = records.describe(folder.path().to_str().unwrap()).unwrap();
        assert_eq!(dataset.files.iter().map(|file| file.records).collect::<Vec<_>>(), [3, 1]);
        assert_eq!(records.read(&dataset.files[0], 1..3).unwrap(), [b"bb", b"cc"]);
        assert_eq!(records.read(&dataset.files[0], 3..3).unwrap(), Vec::<Vec<u8>>::new());
        assert_eq!(records.read(&dataset.files[1], 0..1).unwrap(), [b"dd"]);
    }

    #[test]
    fn a_length_that_is_not_a_multiple_is_an_error_with_the_remainder() {
        let folder = folder(&[("a", b"aabbc")]);
        let path = folder.path().join("a").to_str().unwrap().to_owned();
        let error = FixedRecords::new(2).describe(&path).unwrap_err();
        let text = format!("{path}: 5 bytes is not a multiple of the record size, 2; remainder: 1");
        assert_eq!(error.to_string(), text);
    }

    #[test]
    fn no_data_is_an_error() {
        let folder = folder(&[("a", b"")]);
        let source = folder.path().to_str().unwrap();
        let error = FixedRecords::new(2).describe(source).unwrap_err();
        assert_eq!(error.to_string(), format!("{source}: no record of 2 bytes"));
        assert!(matches!(
            FixedRecords::new(2).describe("/nowhere/at all"),
            Err(DataError::Io { .. })
        ));
    }

    #[test]
    fn a_file_that_has_shrunk_is_an_error() {
        let folder = folder(&[("a", b"aabb")]);
        let path = folder.path().join("a").to_str().unwrap().to_owned();
        let error = FixedRecords::new(2).read(&File::new(path, 3), 1..3).unwrap_err();
        assert!(
            error.to_string().contains("4 bytes, but data up to byte 6 was expected"),
            "{error}"
        );
    }
}
