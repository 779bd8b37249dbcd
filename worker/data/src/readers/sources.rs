//! The locations that `--training-data` names: several, and patterns.
//!
//! `*` stands for any characters of a name, `?` for one. A name that exists, or that fits nothing,
//! is taken as it is: files and keys with these characters can be named, and readers of programs
//! may give them another meaning.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use elasticdl_proto::split_sources;

use super::{files, remote};
use crate::reader::{DataError, Dataset, Reader};
use crate::storage::{Storage, StorageError};

/// Describes the data of all locations that `text` names, in their order.
///
/// # Errors
/// See [`Reader::describe`]; or a file is named twice.
pub fn describe_sources<D: Reader>(reader: &mut D, text: &str) -> Result<Dataset, DataError> {
    let sources = sources(text)?;
    if let [source] = &sources[..] {
        return reader.describe(source).map_err(|error| unmatched(source, error));
    }
    let (mut all, mut empty) = (Dataset::default(), None);
    for source in &sources {
        let Dataset { files, skipped } = match reader.describe(source) {
            // As in a folder, some files may be empty.
            Err(error @ DataError::Empty { .. }) => {
                empty.get_or_insert(error);
                continue;
            }
            described => described.map_err(|error| unmatched(source, error))?,
        };
        all.files.extend(files);
        all.skipped.add(skipped);
    }
    let mut paths = BTreeSet::new();
    if let Some(twice) = all.files.iter().find(|file| !paths.insert(&file.path)) {
        let reason = "it is named twice, by two locations of data".to_owned();
        return Err(DataError::Malformed { path: (&*twice.path).into(), line: None, reason });
    }
    match empty {
        Some(error) if all.files.is_empty() => Err(error),
        _ => Ok(all),
    }
}

/// `error`, or that nothing fits the pattern `source`, which was taken as it is.
fn unmatched(source: &str, error: DataError) -> DataError {
    let is_missing = match &error {
        DataError::Io { source, .. } => source.kind() == ErrorKind::NotFound,
        DataError::Storage(StorageError::NotFound { .. }) => true,
        _ => false,
    };
    if !is_missing || folder_of(source) == source {
        return error;
    }
    let reason = "no file or folder fits this pattern".to_owned();
    DataError::Malformed { path: source.into(), line: None, reason }
}

/// The locations in `text`, in the order in which they are given, and those of a pattern in the
/// order of their paths.
///
/// # Errors
/// Files or objects cannot be listed.
fn sources(text: &str) -> Result<Vec<String>, DataError> {
    let mut all = Vec::new();
    for source in split_sources(text) {
        let folder = folder_of(source);
        let is_listed = folder != source && is_storage(folder) && !exists(source)?;
        let found = if is_listed { matches(folder, source)? } else { Vec::new() };
        if found.is_empty() {
            all.push(source.to_owned());
        }
        all.extend(found);
    }
    Ok(all)
}

/// Where the data of a source is: the source itself, if it exists or is no pattern, or the folder
/// in which all that the pattern fits lies.
pub fn place_of(source: &str) -> &str {
    let folder = folder_of(source);
    // Storage that can't be listed is an error of the reader.
    if folder != source && is_storage(folder) && exists(source).unwrap_or(false) {
        return source;
    }
    folder
}

/// The folder in which all that a pattern fits lies; a source that is no pattern itself.
fn folder_of(source: &str) -> &str {
    let Some(wildcard) = source.find(['*', '?']) else { return source };
    let bucket =
        if Storage::is_remote(source) { source.find("://").map(|at| at + 3) } else { None };
    match source[..wildcard].rfind('/') {
        Some(slash) if bucket.is_none_or(|bucket| slash >= bucket) => &source[..=slash],
        // There is no pattern of buckets.
        _ if bucket.is_some() => source,
        _ => "./",
    }
}

/// Whether files or objects may be at `folder`.
fn is_storage(folder: &str) -> bool {
    let path = Path::new(folder.strip_prefix("file://").unwrap_or(folder));
    if Storage::is_remote(folder) { Storage::open(folder).is_ok() } else { path.is_dir() }
}

fn exists(source: &str) -> Result<bool, DataError> {
    let path = Path::new(source.strip_prefix("file://").unwrap_or(source));
    match remote::object(path)? {
        Some(object) => Ok(!object.list()?.0.is_empty()),
        None => Ok(path.symlink_metadata().is_ok()),
    }
}

/// The files and folders below `folder` that `pattern` fits.
fn matches(folder: &str, pattern: &str) -> Result<Vec<String>, DataError> {
    let root = PathBuf::from(folder.strip_prefix("file://").unwrap_or(folder));
    let wanted = pattern.strip_prefix(folder).unwrap_or(pattern).trim_end_matches('/');
    let wanted: Vec<&str> = wanted.split('/').collect();
    let (mut found, base) = (BTreeSet::new(), root.to_string_lossy().into_owned());
    let base = base.trim_end_matches('/');
    let all = files::find(folder, &root)?.unwrap_or_default();
    // The reader refuses a link to a file that does not exist.
    for found_path in all.files.iter().chain(&all.dangling) {
        let path = found_path.to_string_lossy();
        let within = path.strip_prefix(base).unwrap_or(&path).trim_start_matches('/');
        let parts: Vec<&str> = within.split('/').take(wanted.len()).collect();
        let is_fit = parts.len() == wanted.len()
            && parts.iter().zip(&wanted).all(|(name, wanted)| fits(name, wanted));
        if is_fit {
            let fitting = format!("{base}/{}", parts.join("/"));
            if fitting.contains(char::REPLACEMENT_CHARACTER) {
                files::text(found_path)?;
            }
            found.insert(fitting);
        }
    }
    Ok(found.into_iter().collect())
}

/// Whether a name fits a pattern.
fn fits(name: &str, pattern: &str) -> bool {
    let (name, pattern): (Vec<char>, Vec<char>) =
        (name.chars().collect(), pattern.chars().collect());
    let (mut at, mut wanted) = (0, 0);
    // The newest `*`, and where what follows it was tried.
    let mut star: Option<(usize, usize)> = None;
    while at < name.len() {
        match pattern.get(wanted) {
            Some('*') => {
                star = Some((wanted, at));
                wanted += 1;
            }
            Some(c) if *c == '?' || *c == name[at] => (at, wanted) = (at + 1, wanted + 1),
            _ => {
                let Some((tried, from)) = star else { return false };
                star = Some((tried, from + 1));
                (at, wanted) = (from + 1, tried + 1);
            }
        }
    }
    pattern[wanted..].iter().all(|c| *c == '*')
}

#[cfg(test)]
mod tests {
    use elasticdl_proto::join_sources;

    use super::*;
    use crate::readers::CsvRows;

    #[test]
    fn patterns_name_files_and_folders_and_names_that_exist_are_taken_as_they_are() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        for name in
            ["2026-1/a.csv", "2026-2/b.csv", "2025-1/a.csv", "a.csv", "b.csv", "b.txt", "*x"]
        {
            std::fs::create_dir_all(Path::new(&at(name)).parent().unwrap()).unwrap();
            std::fs::write(at(name), "y\n1\n").unwrap();
        }
        let of = |pattern: &str| {
            let found = sources(&at(pattern)).unwrap();
            let root = format!("{}/", folder.path().display());
            found.iter().map(|path| path.replace(&root, "")).collect::<Vec<_>>()
        };
        assert_eq!(of("*.csv"), ["a.csv", "b.csv"]);
        assert_eq!(of("b.???"), ["b.csv", "b.txt"]);
        assert_eq!(of("2026-*"), ["2026-1", "2026-2"]);
        assert_eq!(of("202?-1/*.csv"), ["2025-1/a.csv", "2026-1/a.csv"]);
        assert_eq!(of("*x"), ["*x"], "it exists");
        assert_eq!(place_of(&at("*x")), at("*x"));
        assert_eq!(place_of(&at("2026-1/*.csv")), at("2026-1/"));
        assert_eq!(of("none"), ["none"], "its absence is an error of the reader");
        assert_eq!(of("*.tsv"), ["*.tsv"]);
        for other in ["rows?count=7", "sql://host/table?where=*", "no/folder/*"] {
            assert_eq!(sources(other).unwrap(), [other]);
        }
        let several = join_sources(&[at("b.txt"), at("2026-*"), at("a.csv")]);
        let expected = ["b.txt", "2026-1", "2026-2", "a.csv"].map(at);
        assert_eq!(sources(&several).unwrap(), expected);
    }

    #[test]
    fn a_pattern_of_keys_is_listed_below_its_first_part() {
        for (pattern, folder) in [
            ("s3://b/k/a*.csv", "s3://b/k/"),
            ("s3://b/*", "s3://b/"),
            ("s3://b*/x", "s3://b*/x"),
            ("s3://b/k", "s3://b/k"),
            ("a*/b?", "./"),
            ("d/a*/b?", "d/"),
            ("/a*", "/"),
        ] {
            assert_eq!(folder_of(pattern), folder);
        }
        for (name, pattern, expected) in [
            ("abc", "a*c", true),
            ("abcbc", "*bc", true),
            ("abc", "a*b", false),
            ("ü.csv", "?.csv", true),
            ("", "*", true),
            ("a", "??", false),
        ] {
            assert_eq!(fits(name, pattern), expected, "{name} {pattern}");
        }
    }

    #[test]
    fn the_records_of_several_locations_are_one_data_set() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        std::fs::write(at("a.csv"), "y\n1\n2\n").unwrap();
        std::fs::write(at("b.csv"), "y\n").unwrap();
        std::fs::write(at("c.csv"), "y\n3\n").unwrap();
        let describe = |sources: &[String]| {
            describe_sources(&mut CsvRows::new().f32("y"), &join_sources(sources))
        };
        let found = describe(&[at("c.csv"), at("[ab].csv").replace("[ab]", "?")]);
        let error = found.unwrap_err().to_string();
        assert!(error.ends_with("c.csv: it is named twice, by two locations of data"), "{error}");
        for others in [&[][..], &[at("a.csv")]] {
            let error = describe(&[others, &[at("*.cvs")]].concat()).unwrap_err().to_string();
            assert!(error.ends_with("*.cvs: no file or folder fits this pattern"), "{error}");
        }
        let found = describe(&["c.csv", "b.csv", "a.csv"].map(at)).unwrap();
        let files: Vec<_> = found.files.iter().map(|file| (&*file.path, file.records)).collect();
        assert_eq!(files, [(&*at("c.csv"), 1), (&*at("a.csv"), 2)]);
        let error = describe(&[at("b.csv"), at("b.csv")]).unwrap_err().to_string();
        assert!(error.ends_with("no row below the header"), "{error}");
    }
}
