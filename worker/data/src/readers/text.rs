//! Text as windows of bytes.

use std::ops::Range;
use std::path::Path;

use super::files;
use crate::reader::{Access, DataError, Dataset, File, Reader};

/// Reads text as overlapping windows of bytes, for byte-level language models.
///
/// A record has `context + 1` bytes: all but the last are inputs, all but the first are targets.
/// The next record starts `context` bytes later, so every byte of a file except the first is a
/// target once. A remainder that is shorter than a window is ignored, and so are files without a
/// window. The bytes need not be UTF-8.
#[derive(Clone, Debug)]
pub struct TextWindows {
    context: u64,
    extensions: Vec<String>,
    limit: u64,
}

impl TextWindows {
    /// Windows of `context + 1` bytes.
    ///
    /// # Panics
    /// If `context` is 0.
    pub fn new(context: usize) -> Self {
        assert!(context > 0, "a window has at least one byte of context");
        Self { context: context as u64, extensions: Vec::new(), limit: u64::MAX }
    }

    /// In folders, reads only files with one of these extensions, given without the dot.
    pub fn extensions(mut self, extensions: &[&str]) -> Self {
        self.extensions = extensions.iter().map(|&extension| extension.to_owned()).collect();
        self
    }

    /// Reads only the first `bytes` bytes, counted through all files in order.
    pub fn limit_bytes(mut self, bytes: u64) -> Self {
        self.limit = bytes;
        self
    }
}

impl Reader for TextWindows {
    /// `[context + 1]` bytes.
    type Record = Vec<u8>;

    fn describe(&mut self, source: &str) -> Result<Dataset, DataError> {
        let mut dataset = Dataset::default();
        let mut rest = self.limit;
        let listed = files::list(source, &self.extensions)?;
        for path in &listed.paths {
            let used = files::length(path)?.min(rest);
            rest -= used;
            let records = used.saturating_sub(1) / self.context;
            if records > 0 {
                let version = Some(files::version(&[path])?);
                dataset.files.push(File { path: files::text(path)?, records, version });
            }
        }
        let reason = format!("no file is long enough: a record needs {} bytes", self.context + 1);
        listed.note_others(&mut dataset.skipped);
        files::not_empty(source, dataset, &reason)
    }

    fn access(&self, dataset: &Dataset) -> Access {
        files::access(dataset, self.context)
    }

    fn read_ahead(&mut self, file: &File, range: Range<u64>) {
        let length = (range.end - range.start).saturating_mul(self.context).saturating_add(1);
        files::read_ahead(Path::new(&file.path), range.start.saturating_mul(self.context), length);
    }

    fn read(&mut self, file: &File, range: Range<u64>) -> Result<Vec<Vec<u8>>, DataError> {
        if range.is_empty() {
            return Ok(Vec::new());
        }
        let start = range.start.saturating_mul(self.context);
        let length = (range.end - range.start).saturating_mul(self.context).saturating_add(1);
        files::check(file, &[Path::new(&file.path)])?;
        let bytes = files::read(Path::new(&file.path), start, length)?;
        // The bytes fit into memory, so the context, which is not longer, fits into a usize.
        let context = self.context as usize;
        Ok(bytes.windows(context + 1).step_by(context).map(<[u8]>::to_vec).collect())
    }

    fn read_records(&mut self, file: &File, records: &[u64]) -> Result<Vec<Vec<u8>>, DataError> {
        files::check(file, &[Path::new(&file.path)])?;
        let places = records.iter().map(|record| record.saturating_mul(self.context));
        files::read_each(Path::new(&file.path), places, self.context.saturating_add(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        folder
    }

    fn counts(folder: &tempfile::TempDir, mut windows: TextWindows) -> Vec<(String, u64)> {
        let dataset = windows.describe(folder.path().to_str().unwrap()).unwrap();
        let name =
            |file: &File| Path::new(&file.path).file_name().unwrap().to_str().unwrap().to_owned();
        dataset.files.iter().map(|file| (name(file), file.records)).collect()
    }

    #[test]
    fn windows_overlap_by_one_byte_and_a_short_remainder_is_ignored() {
        let folder = folder(&[("a", "abcdefghi")]);
        let mut windows = TextWindows::new(3);
        let dataset = windows.describe(folder.path().join("a").to_str().unwrap()).unwrap();
        let file = &dataset.files[0];
        assert_eq!(file.records, 2);
        assert_eq!(windows.read(file, 0..2).unwrap(), [b"abcd", b"defg"]);
        assert_eq!(windows.read(file, 1..2).unwrap(), [b"defg"]);
        assert_eq!(windows.read(file, 1..1).unwrap(), Vec::<Vec<u8>>::new());
    }

    #[test]
    fn files_without_a_window_are_ignored() {
        let folder = folder(&[
            ("3", "abc"),
            ("4", "abcd"),
            ("6", "abcdef"),
            ("7", "abcdefg"),
            ("empty", ""),
        ]);
        let expected =
            [("4", 1), ("6", 1), ("7", 2)].map(|(name, records)| (name.to_owned(), records));
        assert_eq!(counts(&folder, TextWindows::new(3)), expected);
    }

    #[test]
    fn the_limit_is_counted_through_all_files() {
        let folder = folder(&[("a", "abcdefg"), ("b", "abcdefg"), ("c", "abcdefg")]);
        let expected = [("a", 3), ("b", 2)].map(|(name, records)| (name.to_owned(), records));
        assert_eq!(counts(&folder, TextWindows::new(2).limit_bytes(12)), expected);
    }

    #[test]
    fn extensions_choose_the_files() {
        let folder = folder(&[("a.rs", "abcdefg"), ("b.md", "abcdefg"), ("c.txt", "abcdefg")]);
        let expected = [("a.rs", 3), ("b.md", 3)].map(|(name, records)| (name.to_owned(), records));
        assert_eq!(counts(&folder, TextWindows::new(2).extensions(&["md", "rs"])), expected);
    }

    #[test]
    fn text_shorter_than_a_window_is_an_error_with_the_window_length() {
        let folder = folder(&[("a", "abc")]);
        let source = folder.path().to_str().unwrap();
        let error = TextWindows::new(3).describe(source).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("{source}: no file is long enough: a record needs 4 bytes")
        );
        assert!(matches!(
            TextWindows::new(2).limit_bytes(0).describe(source),
            Err(DataError::Empty { .. })
        ));
        assert!(matches!(
            TextWindows::new(2).describe("/nowhere/at all"),
            Err(DataError::Io { .. })
        ));
    }

    #[test]
    fn a_file_that_has_shrunk_is_an_error_that_names_both_lengths() {
        let folder = folder(&[("a", "abcdefg")]);
        let path = folder.path().join("a").to_str().unwrap().to_owned();
        let error = TextWindows::new(3).read(&File::new(&*path, 3), 2..3).unwrap_err();
        let text = format!("{path}: 7 bytes, but data up to byte 10 was expected: has it changed?");
        assert_eq!(error.to_string(), text);
    }
}
