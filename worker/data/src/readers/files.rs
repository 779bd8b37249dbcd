//! Finds files and reads parts of them, in folders and in object stores: a path that begins with a
//! scheme such as `s3://` names an object.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use super::away::{attempt, note_found};
use super::blocks::BLOCK_BYTES;
use super::kept::Kept;
use super::{remote, versions};
use crate::reader::{Access, DataError, Dataset, File, Skipped};
use crate::storage::{Storage, Version, with_retries};

/// The files of a source.
#[derive(Debug)]
pub(super) struct Listed {
    /// In the order of their paths.
    pub(super) paths: Vec<PathBuf>,
    /// Number of other files in the folder, apart from those whose names begin with a dot.
    others: u64,
    /// The first of the other files.
    first_other: Option<PathBuf>,
}

impl Listed {
    fn of_one(path: PathBuf) -> Self {
        Self { paths: vec![path], others: 0, first_other: None }
    }

    /// Adds what the folder holds and the data set does not.
    pub(super) fn note_others(&self, skipped: &mut Skipped) {
        skipped.files += self.others;
        if let (None, Some(first)) = (&skipped.first_file, &self.first_other) {
            skipped.first_file = Some(printable(&first.to_string_lossy()));
        }
    }
}

/// The files of `source`: `source` itself, whatever its extension, or the files below it with one
/// of `extensions` (without the dot; none: all files).
pub(super) fn list(source: &str, extensions: &[String]) -> Result<Listed, DataError> {
    let root = PathBuf::from(source.strip_prefix("file://").unwrap_or(source));
    let Some(found) = find(source, &root)? else {
        return Ok(Listed::of_one(root));
    };
    // Without it, the job would train on less data than the user has.
    if let Some(link) = found.dangling.iter().filter(|path| has_extension(path, extensions)).min() {
        return Err(malformed(link, DANGLING));
    }
    let (mut paths, mut others): (Vec<_>, Vec<_>) =
        found.files.into_iter().partition(|path| has_extension(path, extensions));
    if paths.is_empty() {
        let reason = match extensions {
            [] => "no files in this folder".to_owned(),
            _ => format!("no files ending in .{} in this folder", extensions.join(" or .")),
        };
        return Err(DataError::Empty { path: root, reason });
    }
    others.extend(found.unusable.into_iter().chain(found.dangling));
    paths.sort();
    Ok(Listed { paths, others: others.len() as u64, first_other: others.into_iter().min() })
}

/// As [`list`], for tables: names that begin with `_` are left out of folders, as the tools that
/// write such files do, and a file beside its compressed copy is refused.
pub(super) fn list_tables(source: &str, extensions: &[String]) -> Result<Listed, DataError> {
    let mut listed = list(source, extensions)?;
    let root = Path::new(source.strip_prefix("file://").unwrap_or(source));
    let is_internal = |path: &PathBuf| {
        let within = path.strip_prefix(root).unwrap_or(path);
        within.components().any(|part| part.as_os_str().as_encoded_bytes().starts_with(b"_"))
    };
    let (internal, paths): (Vec<_>, Vec<_>) = listed.paths.into_iter().partition(is_internal);
    if paths.is_empty() {
        let reason = "only files whose names begin with _, which are no data".to_owned();
        return Err(DataError::Empty { path: root.to_owned(), reason });
    }
    listed.others += internal.len() as u64;
    listed.first_other = internal.into_iter().chain(listed.first_other).min();
    listed.paths = paths;
    let mut plain = BTreeMap::new();
    for path in &listed.paths {
        let name = path.to_string_lossy().to_lowercase();
        let name = PACKED.iter().find_map(|packed| name.strip_suffix(packed)).unwrap_or(&name);
        if let Some(other) = plain.insert(name.to_owned(), path) {
            let reason = format!("it is beside {}: remove the copy", other.display());
            return Err(malformed(path, &reason));
        }
    }
    Ok(listed)
}

/// The entries of a folder or prefix, apart from those whose names begin with a dot.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) files: Vec<PathBuf>,
    /// Links whose targets do not exist.
    pub(super) dangling: Vec<PathBuf>,
    /// Keys that cannot be used; named pipes, sockets and devices.
    unusable: Vec<PathBuf>,
}

/// The entries below `root`; `None`, if it is a file itself.
pub(super) fn find(source: &str, root: &Path) -> Result<Option<Found>, DataError> {
    if let Some(object) = remote::object(root)? {
        let (files, keys) = object.list()?;
        let unusable = keys.into_iter().map(PathBuf::from).collect();
        return Ok((files != [root]).then_some(Found { files, unusable, dangling: Vec::new() }));
    }
    let kind = with_retries(source, || fs::metadata(root)).map_err(|error| {
        if is_dangling(root) { malformed(root, DANGLING) } else { io_error(root, error) }
    })?;
    if kind.is_file() {
        return Ok(None);
    }
    if !kind.is_dir() {
        // Opening a pipe would wait for its writer.
        return Err(malformed(root, NO_FILE));
    }
    let mut found = Found::default();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        let entries = with_retries(&folder.to_string_lossy(), || fs::read_dir(&folder));
        for entry in entries.map_err(|source| io_error(&folder, source))? {
            let entry = entry.map_err(|source| io_error(&folder, source))?;
            let path = entry.path();
            if entry.file_name().as_encoded_bytes().starts_with(b".") {
                continue;
            }
            let kind = entry.file_type().map_err(|source| io_error(&path, source))?;
            // A link to a folder could point to a parent folder, and the search would not end.
            if kind.is_dir() {
                folders.push(path);
            } else if kind.is_file() || path.is_file() {
                found.files.push(path);
            } else if kind.is_symlink() && is_dangling(&path) {
                found.dangling.push(path);
            } else if !path.is_dir() {
                found.unusable.push(path);
            }
        }
    }
    Ok(Some(found))
}

/// Whether `path` is a link whose target does not exist.
fn is_dangling(path: &Path) -> bool {
    path.is_symlink() && matches!(path.try_exists(), Ok(false))
}

/// Returns `dataset`, or an error if it has no records.
pub(super) fn not_empty(
    source: &str,
    dataset: Dataset,
    reason: &str,
) -> Result<Dataset, DataError> {
    if dataset.files.iter().all(|file| file.records == 0) {
        return Err(DataError::Empty { path: source.into(), reason: reason.to_owned() });
    }
    Ok(dataset)
}

/// The path as text, as it is sent to other workers.
pub(super) fn text(path: &Path) -> Result<String, DataError> {
    let text = path.to_str().ok_or_else(|| malformed(path, "the path is not UTF-8: rename it"))?;
    Ok(text.to_owned())
}

/// Whether `source` is a folder.
pub(super) fn is_folder(source: &str) -> Result<bool, DataError> {
    let path = Path::new(source);
    match remote::object(path)? {
        Some(object) => Ok(object.list()?.0.iter().any(|found| found != path)),
        None => Ok(path.is_dir()),
    }
}

/// Digest of the versions of these files, for a description. Files that were accessed before must
/// not have changed.
pub(super) fn version(paths: &[&Path]) -> Result<u32, DataError> {
    let digests = paths.iter().map(|path| digest(path)).collect::<Result<Vec<_>, _>>()?;
    Ok(digests.into_iter().fold(0, |all, digest| all.rotate_left(1) ^ digest))
}

/// Checks that `file`, which consists of the files at `paths`, is the version that was described.
pub(super) fn check(file: &File, paths: &[&Path]) -> Result<(), DataError> {
    check_table(file, paths, false)
}

/// As [`check`]. `skips`: whether records may be left out; [`check_left_out`] compares those.
pub(super) fn check_table(file: &File, paths: &[&Path], skips: bool) -> Result<(), DataError> {
    let Some(described) = file.version else { return Ok(()) };
    let found = version(paths).map_err(|error| match error {
        // A process that has found none of the data may lack a mount, which others have.
        DataError::Io { path, source } if versions::has_found_any() => missing(&path, source),
        error => error,
    })?;
    if found == described || (skips && versions::is_of_same_file(described, found)) {
        return Ok(());
    }
    let first = paths.first().expect("a file of a data set consists of at least one file");
    let found = versions::known(first).unwrap_or(Version { bytes: 0, tag: String::new() });
    Err(versions::described_otherwise(first, &found))
}

/// The version of a file of which the records that `kept` names are left out.
pub(super) fn version_without(version: u32, kept: &Kept) -> u32 {
    versions::with_left_out(version, kept.digest())
}

/// Checks that the records that are left out of `file` are those of its description.
pub(super) fn check_left_out(file: &File, path: &Path, kept: &Kept) -> Result<(), DataError> {
    let found = |version| version_without(version, kept) == version;
    if file.version.is_none_or(found) {
        return Ok(());
    }
    let (left_out, rows) = (kept.rows() - kept.count(), kept.rows());
    let reason = format!(
        "this worker leaves {left_out} of {rows} records out, and not the same ones as the worker \
         that described the data; is it another build, or was the file read while it was written?"
    );
    Err(DataError::Differs { path: path.to_owned(), reason })
}

fn digest(path: &Path) -> Result<u32, DataError> {
    match remote::object(path)? {
        Some(object) => versions::digest(path, &object.version()?, true),
        None => versions::digest(path, &stat(path)?.1, false),
    }
}

/// A seekable file or object.
pub(super) trait Source: Read + Seek + Send {}

impl<T: Read + Seek + Send> Source for T {}

/// Opens a file.
pub(super) fn open(path: &Path) -> Result<Box<dyn Source>, DataError> {
    match remote::object(path)? {
        Some(object) => Ok(Box::new(object.open()?)),
        None => Ok(Box::new(OpenFile::new(path)?)),
    }
}

/// Length of a regular file, in bytes.
pub(super) fn length(path: &Path) -> Result<u64, DataError> {
    if let Some(object) = remote::object(path)? {
        return Ok(object.version()?.bytes);
    }
    let (metadata, version) = stat(path)?;
    if !metadata.is_file() {
        return Err(malformed(path, "not a regular file"));
    }
    Ok(version.bytes)
}

/// Reads the metadata of a local file, which must be the known version.
fn stat(path: &Path) -> Result<(fs::Metadata, Version), DataError> {
    let metadata = attempt(path, || fs::metadata(path));
    let metadata = metadata.map_err(|source| match versions::known(path) {
        Some(_) => missing(path, source),
        None => io_error(path, source),
    })?;
    let version = versions::of_file(&metadata);
    versions::compare(path, &version)?;
    note_found(path);
    Ok((metadata, version))
}

/// Reads `length` bytes of a file, starting at `start`. A file that is shorter is an error.
pub(super) fn read(path: &Path, start: u64, length: u64) -> Result<Vec<u8>, DataError> {
    // The length is checked first, so that a wrong length is an error, not a huge allocation.
    let held = self::length(path)?;
    let end = start.checked_add(length).filter(|end| *end <= held);
    let Some(end) = end else {
        let end = start.saturating_add(length);
        let reason =
            format!("{held} bytes, but data up to byte {end} was expected: has it changed?");
        return Err(malformed(path, &reason));
    };
    if let Some(object) = remote::object(path)? {
        return Ok(object.read(start..end)?.into());
    }
    let mut file = OpenFile::new(path)?;
    file.at = start;
    let mut bytes = Vec::with_capacity(length as usize);
    file.take(length).read_to_end(&mut bytes).map_err(|source| io_error(path, source))?;
    if (bytes.len() as u64) < length {
        return Err(malformed(path, "it became shorter while it was being read: has it changed?"));
    }
    Ok(bytes)
}

/// Reads `length` bytes of a file at each of `places`.
pub(super) fn read_each(
    path: &Path,
    places: impl Iterator<Item = u64>,
    length: u64,
) -> Result<Vec<Vec<u8>>, DataError> {
    if remote::object(path)?.is_some() {
        return places.map(|start| read(path, start, length)).collect();
    }
    let held = self::length(path)?;
    let mut file = OpenFile::new(path)?;
    let at = |start: u64| {
        let end = start.saturating_add(length);
        if end > held {
            let reason =
                format!("{held} bytes, but data up to byte {end} was expected: has it changed?");
            return Err(malformed(path, &reason));
        }
        file.at = start;
        let mut bytes = vec![0; length as usize];
        file.read_exact(&mut bytes).map_err(|source| io_error(path, source))?;
        Ok(bytes)
    };
    places.map(at).collect()
}

/// How files whose records have `bytes` bytes are read well: a local file record by record, an
/// object in blocks of about a quarter of a megabyte, which is what is requested at once.
pub(super) fn access(dataset: &Dataset, bytes: u64) -> Access {
    if is_remote(dataset) {
        Access::Block { records: (BLOCK_BYTES / bytes.max(1)).max(1) }
    } else {
        Access::Record
    }
}

/// Whether one of the data set's files is an object.
pub(super) fn is_remote(dataset: &Dataset) -> bool {
    dataset.files.iter().any(|file| Storage::is_remote(&file.path))
}

/// Announces that these bytes will be read soon: those of an object are fetched in the background.
pub(super) fn read_ahead(path: &Path, start: u64, length: u64) {
    if let Ok(Some(object)) = remote::object(path) {
        object.read_ahead(start..start.saturating_add(length));
    }
}

/// A local file, whose file system may be temporarily unreachable.
struct OpenFile {
    path: PathBuf,
    file: fs::File,
    at: u64,
}

impl OpenFile {
    fn new(path: &Path) -> Result<Self, DataError> {
        stat(path)?;
        let file = attempt(path, || fs::File::open(path));
        let file = file.map_err(|source| io_error(path, source))?;
        Ok(Self { path: path.into(), file, at: 0 })
    }
}

impl Read for OpenFile {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let mut failed = false;
        let bytes = attempt(&self.path, || {
            if failed {
                // A file handle can become stale permanently.
                self.file = fs::File::open(&self.path)?;
            }
            failed = true;
            self.file.read_at(buf, self.at)
        })?;
        self.at += bytes as u64;
        Ok(bytes)
    }
}

impl Seek for OpenFile {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let (from, offset) = match to {
            SeekFrom::Start(at) => (at, 0),
            SeekFrom::Current(offset) => (self.at, offset),
            SeekFrom::End(offset) => (self.file.metadata()?.len(), offset),
        };
        self.at = from.checked_add_signed(offset).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.at)
    }
}

/// Converts an error of a [`Source`]. An error of an object contains a complete `DataError`.
pub(super) fn io_error(path: &Path, source: io::Error) -> DataError {
    match source.downcast() {
        Ok(error) => error,
        Err(source) => DataError::Io { path: path.to_owned(), source },
    }
}

/// The error for a file that was there before, and cannot be opened.
fn missing(path: &Path, source: io::Error) -> DataError {
    match source.kind() {
        io::ErrorKind::NotADirectory | io::ErrorKind::NotFound => {
            DataError::Changed { path: path.to_owned(), reason: "it was deleted or moved".into() }
        }
        _ => io_error(path, source),
    }
}

/// Text from a file, escaped and truncated for an error message.
pub(super) fn printable(text: &str) -> String {
    let mut shown: String = text.escape_debug().take(SHOWN_MAX).collect();
    if text.len() > shown.len() {
        shown.push('…');
    }
    shown
}

pub(super) fn malformed(path: &Path, reason: &str) -> DataError {
    DataError::Malformed { path: path.to_owned(), line: None, reason: reason.to_owned() }
}

const SHOWN_MAX: usize = 300;
const DANGLING: &str = "a link to a file that does not exist: restore the file, or remove the link";
const NO_FILE: &str = "a pipe, socket or device: data must be a file or a folder, as it is read \
                       more than once; write it to a file first";

/// Extensions of compressed text files.
pub(super) const PACKED: [&str; 2] = [".gz", ".zst"];

/// Whether the file has one of these extensions, in whatever case.
fn has_extension(path: &Path, extensions: &[String]) -> bool {
    // A name that is not UTF-8 is refused later, with what it should be.
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let has = |wanted: &String| {
        name.strip_suffix(&wanted.to_lowercase())
            .is_some_and(|stem| stem.len() > 1 && stem.ends_with('.'))
    };
    extensions.is_empty() || extensions.iter().any(has)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt as _;
    use std::os::unix::fs::symlink;

    use super::*;

    fn strings(words: &[&str]) -> Vec<String> {
        words.iter().map(|&word| word.to_owned()).collect()
    }

    fn folder(files: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for file in files {
            let path = folder.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, file).unwrap();
        }
        folder
    }

    fn names(folder: &tempfile::TempDir, extensions: &[&str]) -> Vec<String> {
        let found = list(folder.path().to_str().unwrap(), &strings(extensions)).unwrap();
        found
            .paths
            .iter()
            .map(|path| path.strip_prefix(folder.path()).unwrap().to_str().unwrap().to_owned())
            .collect()
    }

    #[test]
    fn a_folder_is_searched_recursively_in_the_order_of_paths() {
        let folder =
            folder(&["b.rs", "a/z.rs", "a/b/c.md", "c", ".git/x.rs", "a/.hidden.rs", "x.rst"]);
        assert_eq!(names(&folder, &[]), ["a/b/c.md", "a/z.rs", "b.rs", "c", "x.rst"]);
        assert_eq!(names(&folder, &["rs"]), ["a/z.rs", "b.rs"]);
        assert_eq!(names(&folder, &["rs", "md"]), ["a/b/c.md", "a/z.rs", "b.rs"]);
    }

    #[test]
    fn files_that_writers_of_tables_leave_are_no_tables_and_are_counted() {
        let files =
            ["part-0.csv", "B.CSV", "_SUCCESS", "_temporary/0/a.csv", "d.txt", ".crc/a.csv"];
        let folder = folder(&files);
        let source = folder.path().to_str().unwrap();
        let extensions = ["csv", "csv.gz"].map(str::to_owned);
        let listed = list_tables(source, &extensions).unwrap();
        assert_eq!(listed.paths, ["B.CSV", "part-0.csv"].map(|name| folder.path().join(name)));
        let mut skipped = Skipped::default();
        listed.note_others(&mut skipped);
        assert_eq!(skipped.files, 3);
        assert!(skipped.first_file.unwrap().ends_with("/_SUCCESS"));
        // A file that is named is read, and other readers know no such names.
        let named = folder.path().join("_temporary/0/a.csv");
        assert_eq!(list_tables(named.to_str().unwrap(), &extensions).unwrap().paths, [named]);
        assert_eq!(list(source, &extensions).unwrap().paths.len(), 3);
        fs::write(folder.path().join("part-0.csv.gz"), "").unwrap();
        let error = list_tables(source, &extensions).unwrap_err().to_string();
        assert!(error.ends_with("/part-0.csv: remove the copy"), "{error}");
    }

    #[cfg(unix)]
    #[test]
    fn links_to_files_are_read_and_links_to_folders_are_not_followed() {
        let folder = folder(&["a/b.txt"]);
        symlink(folder.path(), folder.path().join("a/up")).unwrap();
        symlink(folder.path().join("a/b.txt"), folder.path().join("link.txt")).unwrap();
        assert_eq!(names(&folder, &[]), ["a/b.txt", "link.txt"]);
    }

    #[test]
    fn what_would_be_data_and_cannot_be_read_is_refused_and_the_rest_is_counted() {
        let refused = |name: &OsStr, extensions: &[&str]| {
            let folder = folder(&["a.csv"]);
            symlink("nowhere", folder.path().join(name)).unwrap();
            list(folder.path().to_str().unwrap(), &strings(extensions)).map_err(|e| e.to_string())
        };
        for extensions in [&["csv"][..], &[]] {
            let error = refused(OsStr::new("b.csv"), extensions).unwrap_err();
            assert!(error.ends_with(&format!("b.csv: {DANGLING}")), "{error}");
        }
        let listed = refused(OsStr::new("b.txt"), &["csv"]).unwrap();
        assert_eq!((listed.paths.len(), listed.others), (1, 1));
        let folder = folder(&["a.csv"]);
        fs::write(folder.path().join(OsStr::from_bytes(b"b\xff.csv")), "").unwrap();
        let pipe = folder.path().join("c.csv");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, 0o600.into()).unwrap();
        let listed = list(folder.path().to_str().unwrap(), &strings(&["csv"])).unwrap();
        assert_eq!((listed.paths.len(), listed.others), (2, 1), "the pipe is no data");
        let error = text(&listed.paths[1]).unwrap_err().to_string();
        assert!(error.ends_with("the path is not UTF-8: rename it"), "{error}");
        let error = list(pipe.to_str().unwrap(), &[]).unwrap_err().to_string();
        assert!(error.ends_with(NO_FILE), "{error}");
    }

    #[test]
    fn a_folder_without_matching_files_is_an_error_with_the_extensions() {
        let folder = folder(&["a.txt"]);
        let source = folder.path().to_str().unwrap();
        let error = list(source, &["rs".to_owned(), "md".to_owned()]).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("{source}: no files ending in .rs or .md in this folder")
        );
        let empty = tempfile::tempdir().unwrap();
        let source = empty.path().to_str().unwrap();
        assert_eq!(
            list(source, &[]).unwrap_err().to_string(),
            format!("{source}: no files in this folder")
        );
    }

    #[test]
    fn a_missing_source_is_an_error_that_names_it() {
        let folder = folder(&[]);
        let source = folder.path().join("nowhere").to_str().unwrap().to_owned();
        let error = list(&source, &[]).unwrap_err();
        assert!(
            matches!(&error, DataError::Io { path, .. } if path == Path::new(&source)),
            "{error}"
        );
    }

    #[test]
    fn reading_past_the_end_is_an_error_without_an_allocation() {
        let folder = folder(&["abc"]);
        let path = folder.path().join("abc");
        assert_eq!(read(&path, 1, 2).unwrap(), b"bc");
        for (start, length) in [(1, 3), (4, 0), (0, u64::MAX), (u64::MAX, 1)] {
            let error = read(&path, start, length).unwrap_err();
            assert!(matches!(error, DataError::Malformed { .. }), "{start} {length}: {error}");
        }
    }
}
