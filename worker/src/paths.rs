//! Paths as users write them.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Component, Path, PathBuf};

use elasticdl_data::worker::absolute;

/// `path` as an absolute path without links, as far as it exists. `None`, if it is no path.
pub(crate) fn resolved(path: &str) -> Option<PathBuf> {
    let whole = absolute(path).ok()?;
    let (exists, rest) = whole.ancestors().find_map(|ancestor| {
        let rest = whole.strip_prefix(ancestor).expect("it begins with its ancestors");
        Some((ancestor.canonicalize().ok()?, rest))
    })?;
    Some(exists.join(rest).components().collect())
}

/// Whether `address` is something that no file may replace: a device, a pipe or a socket of this
/// machine.
pub(crate) fn names_device(address: &str) -> bool {
    let path = Path::new(address.strip_prefix("file://").unwrap_or(address));
    path.metadata().is_ok_and(|found| !found.is_file() && !found.is_dir())
        || ["/dev", "/proc", "/sys"].iter().any(|system| path.starts_with(system))
            && !path.starts_with("/dev/shm")
}

/// Whether a name of this machine is in use, be it by a folder or a link.
pub(crate) fn is_taken(address: &str) -> bool {
    let path = address.strip_prefix("file://").unwrap_or(address);
    !path.contains("://") && Path::new(path).symlink_metadata().is_ok()
}

/// Whether two names of this machine are of one file.
pub(crate) fn is_same_file(one: &str, other: &str) -> bool {
    let found = [one, other].map(|address| {
        let path = Path::new(address.strip_prefix("file://").unwrap_or(address));
        path.metadata().map(|found| (found.dev(), found.ino())).ok()
    });
    found[0].is_some() && found[0] == found[1]
}

/// Whether `address` names a folder although a file is expected: an existing folder of this
/// machine, or any address whose last component ends with `/` or is missing.
pub(crate) fn names_folder(address: &str) -> bool {
    let (is_path, path) = match address.split_once("://") {
        None => (true, address),
        Some(("file", path)) => (true, path),
        Some((_, rest)) => (false, rest.split_once('/').map_or("", |(_, key)| key)),
    };
    let last = Path::new(path).components().next_back();
    let is_named = matches!(last, Some(Component::Normal(_)));
    path.ends_with('/') || !is_named || (is_path && Path::new(path).is_dir())
}

/// The name of the file at `address` that was replaced, of this number from 1 on.
pub(crate) fn previous_of(address: &str, number: u32) -> String {
    match number {
        1 => format!("{address}{PREVIOUS}"),
        _ => format!("{address}{PREVIOUS}.{number}"),
    }
}

/// Suffix of the name of a file that was not replaced.
pub(crate) const PREVIOUS: &str = ".previous";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_and_pipes_are_recognized() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        rustix::fs::mkfifoat(rustix::fs::CWD, at("pipe"), 0o600.into()).unwrap();
        std::os::unix::fs::symlink("/dev/null", at("link")).unwrap();
        for name in ["pipe", "link"] {
            assert!(names_device(at(name).to_str().unwrap()), "{name}");
        }
        assert!(names_device("/dev/null") && names_device("file:///dev/stdout"));
        assert!(!names_device("/dev/shm/m") && !names_device(at("new").to_str().unwrap()));
        assert!(!names_device("s3://b/m") && !names_device(at("").to_str().unwrap()));
    }

    #[test]
    fn folders_are_distinguished_from_files_that_do_not_exist_yet() {
        let folder = tempfile::tempdir().unwrap();
        let here = folder.path().to_str().unwrap();
        for address in
            [here, &format!("file://{here}"), "new/", "/", "..", "s3://bucket", "gs://b/a/"]
        {
            assert!(names_folder(address), "{address}");
        }
        for address in [&format!("{here}/m"), "m", "../m", "s3://bucket/m", "az://b/a/m"] {
            assert!(!names_folder(address), "{address}");
        }
    }
}
