//! Files of this machine, written atomically like objects in a store.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, Write as _};
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use xxhash_rust::xxh3::xxh3_64;

use super::listing::{Listing, Version};
use crate::paths;

/// Reads bytes `range` of a file; fewer if it ends before, and at least one.
pub(super) fn read_range(path: &Path, range: &Range<u64>) -> io::Result<Bytes> {
    let file = fs::File::open(path)?;
    let bytes = file.metadata()?.len();
    let end = range.end.min(bytes);
    if range.start >= end {
        let text = format!("no bytes from {} to {}: it has {bytes}", range.start, range.end);
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    let mut read = vec![0; (end - range.start) as usize];
    file.read_exact_at(&mut read, range.start)?;
    Ok(read.into())
}

/// Makes the content of the file at `path` another file too, whose name has `suffix` at its end.
pub(super) fn copy_beside(path: &Path, suffix: &str) -> io::Result<()> {
    let mut to = path.as_os_str().to_owned();
    to.push(suffix);
    match fs::remove_file(&to) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // Writing a file replaces it, so its content stays under the other name. Some file systems have
    // no hard links.
    let path = fs::canonicalize(path)?;
    fs::hard_link(&path, &to).or_else(|_| fs::copy(path, &to).map(drop))
}

/// Version of a file.
pub(super) fn version(path: &Path) -> io::Result<Version> {
    let metadata = fs::metadata(path)?;
    if metadata.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    Ok(of(&metadata))
}

/// Lists the files below a folder. Links to folders are not followed, and what is removed meanwhile
/// is not listed.
pub(super) fn list(root: &Path) -> io::Result<Listing> {
    let mut listing = Listing::default();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        let entries = match fs::read_dir(&folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            // The root may be a file, below which nothing is.
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => continue,
            entries => entries?,
        };
        for entry in entries {
            let path = entry?.path();
            let within = path.strip_prefix(root).unwrap_or(&path);
            let metadata = match fs::symlink_metadata(&path) {
                Ok(found) if found.is_dir() => {
                    folders.push(path);
                    continue;
                }
                Ok(found) if found.is_symlink() => fs::metadata(&path),
                other => other,
            };
            match (metadata, within.to_str()) {
                (Ok(found), Some(within)) if found.is_file() && !is_staged(&path) => {
                    listing.files.push((within.to_owned(), of(&found)));
                }
                (Ok(_), Some(_)) => {}
                (Ok(_), None) => listing.left_out.push(within.display().to_string()),
                (Err(error), _) if error.kind() == io::ErrorKind::NotFound => {}
                (Err(error), _) => return Err(error),
            }
        }
    }
    listing.files.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(listing)
}

/// The names of the folders in `root` that begin with `prefix`. None, if there is no such root.
pub(super) fn folders(root: &Path, prefix: &str) -> io::Result<Vec<String>> {
    let entries = match fs::read_dir(root) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        // The root may be a file, as an exported model is.
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry?;
        if let Ok(name) = entry.file_name().into_string()
            && name.starts_with(prefix)
            && entry.path().is_dir()
        {
            names.push(name);
        }
    }
    Ok(names)
}

/// Writes a file sequentially in this thread: parts that several threads write reach the disk out
/// of order. A link stays: the file that it leads to is written.
pub(super) fn write(path: &Path, parts: &[Bytes]) -> io::Result<()> {
    let path = &linked(path);
    let folder = path.parent().unwrap_or_else(|| Path::new("/"));
    let is_new = !folder.exists();
    fs::create_dir_all(folder)?;
    let staged = folder.join(staged_start(path) + &paths::random_digits()[8..]);
    let written =
        fs::OpenOptions::new().write(true).create_new(true).open(&staged).and_then(|mut file| {
            parts.iter().try_for_each(|part| file.write_all(part))?;
            file.sync_all()?;
            fs::rename(&staged, path)
        });
    let written = written.map_err(|error| match error.kind() {
        // For a read this means that there is no such file.
        io::ErrorKind::IsADirectory => io::Error::other("there is a folder with this name"),
        _ => error,
    });
    if written.is_err() {
        drop(fs::remove_file(&staged));
        if is_new {
            // It stays if another rank has written into it.
            drop(fs::remove_dir(folder));
        }
    }
    // Syncs the directory entries too, of the file and of a folder that was just created, where the
    // system allows it.
    for folder in folder.ancestors().take(2) {
        drop(fs::File::open(folder).and_then(|folder| folder.sync_all()));
    }
    written
}

/// Removes the temporary files that killed writers of the file at `path` have left.
pub(super) fn remove_unfinished(path: &Path) -> io::Result<()> {
    let path = &linked(path);
    let start = staged_start(path);
    let folder = path.parent().unwrap_or_else(|| Path::new("/"));
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name();
        if name.to_str().is_some_and(|name| name.starts_with(&start)) && is_staged(Path::new(&name))
        {
            fs::remove_file(folder.join(name))?;
        }
    }
    Ok(())
}

/// The file that `path` leads to.
fn linked(path: &Path) -> PathBuf {
    let target = path.is_symlink().then(|| path.canonicalize().ok()).flatten();
    target.unwrap_or_else(|| path.to_owned())
}

/// How the names of the temporary files begin that become the file at `path`. No listing shows
/// them. Random digits follow, as writers on other machines may have the same process id. Their
/// length does not depend on that of the file's name, which may be as long as the file system
/// allows.
fn staged_start(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().as_encoded_bytes();
    format!("{STAGED}{:08x}", xxh3_64(name) as u32)
}

fn is_staged(path: &Path) -> bool {
    let name = path.file_name().and_then(OsStr::to_str);
    let digits = name.and_then(|name| name.strip_prefix(STAGED));
    digits.is_some_and(|d| d.len() == 16 && d.bytes().all(|digit| digit.is_ascii_hexdigit()))
}

fn of(metadata: &fs::Metadata) -> Version {
    let tag = format!("{}-{}.{:09}", metadata.ino(), metadata.mtime(), metadata.mtime_nsec());
    Version { bytes: metadata.len(), tag }
}

const STAGED: &str = ".#";
