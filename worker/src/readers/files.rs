//! Finding files and reading parts of them, in folders and in object stores alike: a path that begins with `s3://` and the
//! like names an object.

use std::fs;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use super::remote::{self, Object};
use crate::reader::{DataError, Dataset};

/// The files behind `source`, in the order of their paths: itself, whatever its extension, or those below it
/// that have one of `extensions` (without the dot; none: all).
pub(super) fn list(source: &str, extensions: &[String]) -> Result<Vec<PathBuf>, DataError> {
    let root = PathBuf::from(source.strip_prefix("file://").unwrap_or(source));
    if let Some(object) = remote::object(&root)? {
        let mut found = object.list()?;
        let is_file = found == [root.clone()];
        found.retain(|path| is_file || has_extension(path, extensions));
        return sorted(root, found, extensions);
    }
    let kind = fs::metadata(&root).map_err(|source| io_error(&root, source))?;
    if !kind.is_dir() {
        return Ok(vec![root]);
    }
    let mut found = Vec::new();
    let mut folders = vec![root.clone()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).map_err(|source| io_error(&folder, source))? {
            let entry = entry.map_err(|source| io_error(&folder, source))?;
            let path = entry.path();
            if entry.file_name().as_encoded_bytes().starts_with(b".") {
                continue;
            }
            let kind = entry.file_type().map_err(|source| io_error(&path, source))?;
            // A link to a folder could lead back up, and the search would never end.
            if kind.is_dir() {
                folders.push(path);
            } else if (kind.is_file() || path.is_file()) && has_extension(&path, extensions) {
                found.push(path);
            }
        }
    }
    sorted(root, found, extensions)
}

fn sorted(root: PathBuf, mut found: Vec<PathBuf>, extensions: &[String]) -> Result<Vec<PathBuf>, DataError> {
    if found.is_empty() {
        let reason = match extensions {
            [] => "no file in this folder".to_owned(),
            _ => format!("no file ending in .{} in this folder", extensions.join(" or .")),
        };
        return Err(DataError::Empty { path: root, reason });
    }
    found.sort();
    Ok(found)
}

/// The files of `dataset`, unless there is no record in them.
pub(super) fn not_empty(source: &str, dataset: Dataset, reason: &str) -> Result<Dataset, DataError> {
    if dataset.files.iter().all(|file| file.records == 0) {
        return Err(DataError::Empty { path: source.into(), reason: reason.to_owned() });
    }
    Ok(dataset)
}

/// The path as text, as which it travels to the other workers.
pub(super) fn text(path: &Path) -> Result<String, DataError> {
    let text = path.to_str().ok_or_else(|| malformed(path, "the path is not UTF-8: rename it"))?;
    Ok(text.to_owned())
}

/// Whether `source` is a folder.
pub(super) fn is_folder(source: &str) -> Result<bool, DataError> {
    let path = Path::new(source);
    match remote::object(path)? {
        Some(object) => Ok(object.list()?.iter().any(|found| found != path)),
        None => Ok(path.is_dir()),
    }
}

/// A file to read from wherever one wants.
pub(super) trait Source: Read + Seek + Send {}

impl<T: Read + Seek + Send> Source for T {}

/// Opens a file.
pub(super) fn open(path: &Path) -> Result<Box<dyn Source>, DataError> {
    match remote::object(path)? {
        Some(object) => Ok(Box::new(object.open()?)),
        None => Ok(Box::new(fs::File::open(path).map_err(|source| io_error(path, source))?)),
    }
}

/// Length of a regular file, in bytes.
pub(super) fn length(path: &Path) -> Result<u64, DataError> {
    if let Some(object) = remote::object(path)? {
        return Ok(object.bytes()?);
    }
    let metadata = fs::metadata(path).map_err(|source| io_error(path, source))?;
    if !metadata.is_file() {
        return Err(malformed(path, "not a regular file"));
    }
    Ok(metadata.len())
}

/// `length` bytes of a file from `start`; fails where the file is shorter than that.
pub(super) fn read(path: &Path, start: u64, length: u64) -> Result<Vec<u8>, DataError> {
    let too_short = |held: u64| {
        let end = start.saturating_add(length);
        malformed(
            path,
            &format!("{held} bytes where data was to be read up to byte {end}: was it changed since?"),
        )
    };
    if let Some(object) = remote::object(path)? {
        return read_object(&object, start, length, too_short);
    }
    let mut file = fs::File::open(path).map_err(|source| io_error(path, source))?;
    // Asked of the file first, so that a wrong length is an error and not a huge allocation.
    let held = file.metadata().map_err(|source| io_error(path, source))?.len();
    if start.checked_add(length).is_none_or(|end| end > held) {
        return Err(too_short(held));
    }
    file.seek(SeekFrom::Start(start)).map_err(|source| io_error(path, source))?;
    let capacity = usize::try_from(length).map_err(|_| too_short(held))?;
    let mut bytes = Vec::with_capacity(capacity);
    file.take(length).read_to_end(&mut bytes).map_err(|source| io_error(path, source))?;
    if bytes.len() < capacity {
        return Err(too_short(start + bytes.len() as u64));
    }
    Ok(bytes)
}

fn read_object(
    object: &Object,
    start: u64,
    length: u64,
    too_short: impl Fn(u64) -> DataError,
) -> Result<Vec<u8>, DataError> {
    let end = start.checked_add(length).ok_or_else(|| too_short(0))?;
    if length == 0 {
        return Ok(Vec::new());
    }
    match object.read(start..end) {
        Ok(bytes) if bytes.len() as u64 == length => Ok(bytes.to_vec()),
        // An object that is as long as it should be has another reason not to be read.
        other => match object.bytes()? {
            held if held < end => Err(too_short(held)),
            held => Err(other.map_or_else(DataError::from, |_| too_short(held))),
        },
    }
}

pub(super) fn io_error(path: &Path, source: std::io::Error) -> DataError {
    DataError::Io { path: path.to_owned(), source }
}

pub(super) fn malformed(path: &Path, reason: &str) -> DataError {
    DataError::Malformed { path: path.to_owned(), line: None, reason: reason.to_owned() }
}

fn has_extension(path: &Path, extensions: &[String]) -> bool {
    let extension = path.extension().and_then(|extension| extension.to_str());
    extensions.is_empty() || extensions.iter().any(|wanted| Some(wanted.as_str()) == extension)
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let extensions: Vec<String> = extensions.iter().map(|&e| e.to_owned()).collect();
        let found = list(folder.path().to_str().unwrap(), &extensions).unwrap();
        found
            .iter()
            .map(|path| path.strip_prefix(folder.path()).unwrap().to_str().unwrap().to_owned())
            .collect()
    }

    #[test]
    fn a_folder_is_searched_to_the_bottom_in_the_order_of_paths() {
        let folder = folder(&["b.rs", "a/z.rs", "a/b/c.md", "c", ".git/x.rs", "a/.hidden.rs", "x.rst"]);
        assert_eq!(names(&folder, &[]), ["a/b/c.md", "a/z.rs", "b.rs", "c", "x.rst"]);
        assert_eq!(names(&folder, &["rs"]), ["a/z.rs", "b.rs"]);
        assert_eq!(names(&folder, &["rs", "md"]), ["a/b/c.md", "a/z.rs", "b.rs"]);
    }

    #[cfg(unix)]
    #[test]
    fn links_to_files_are_read_and_links_to_folders_are_not_followed() {
        let folder = folder(&["a/b.txt"]);
        std::os::unix::fs::symlink(folder.path(), folder.path().join("a/up")).unwrap();
        std::os::unix::fs::symlink(folder.path().join("a/b.txt"), folder.path().join("link.txt")).unwrap();
        assert_eq!(names(&folder, &[]), ["a/b.txt", "link.txt"]);
    }

    #[test]
    fn a_folder_without_the_wanted_files_is_an_error_that_says_what_was_wanted() {
        let folder = folder(&["a.txt"]);
        let source = folder.path().to_str().unwrap();
        let error = list(source, &["rs".to_owned(), "md".to_owned()]).unwrap_err();
        assert_eq!(error.to_string(), format!("{source}: no file ending in .rs or .md in this folder"));
        let empty = tempfile::tempdir().unwrap();
        let source = empty.path().to_str().unwrap();
        assert_eq!(list(source, &[]).unwrap_err().to_string(), format!("{source}: no file in this folder"));
    }

    #[test]
    fn a_missing_source_is_an_error_that_names_it() {
        let folder = folder(&[]);
        let source = folder.path().join("nowhere").to_str().unwrap().to_owned();
        let error = list(&source, &[]).unwrap_err();
        assert!(matches!(&error, DataError::Io { path, .. } if path == Path::new(&source)), "{error}");
    }

    #[test]
    fn reading_past_the_end_is_an_error_and_allocates_nothing() {
        let folder = folder(&["abc"]);
        let path = folder.path().join("abc");
        assert_eq!(read(&path, 1, 2).unwrap(), b"bc");
        for (start, length) in [(1, 3), (4, 0), (0, u64::MAX), (u64::MAX, 1)] {
            let error = read(&path, start, length).unwrap_err();
            assert!(matches!(error, DataError::Malformed { .. }), "{start} {length}: {error}");
        }
    }
}
