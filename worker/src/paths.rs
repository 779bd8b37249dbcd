//! Paths as users write them.

use std::ffi::OsStr;
use std::hash::{BuildHasher as _, RandomState};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Component, Path, PathBuf};

/// `path` as an absolute path without `.` and `..` that leads to the same file.
///
/// `..` after a symbolic link is the parent of the link's target, so the part before it is resolved
/// as far as it exists. A path without `..` keeps its links.
pub(crate) fn absolute(path: &str) -> io::Result<PathBuf> {
    let whole = std::path::absolute(path)?;
    let mut clean = PathBuf::new();
    for component in whole.components() {
        match component {
            Component::CurDir => {}
            Component::ParentDir => {
                match clean.canonicalize() {
                    Ok(resolved) => clean = resolved,
                    // A component that does not exist yet is created under the name that was given.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    Err(error) => return Err(error),
                }
                // The root is its own parent.
                clean.pop();
            }
            other => clean.push(other),
        }
    }
    Ok(clean)
}

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

/// Sixteen random hexadecimal digits, unique among writers: process ids are not unique where
/// several containers share a folder.
pub(crate) fn random_digits() -> String {
    format!("{:016x}", RandomState::new().hash_one(OsStr::new("staged")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_with_dots_resolves_as_the_system_resolves_it() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        std::fs::create_dir_all(root.join("real/deep/inside")).unwrap();
        std::fs::create_dir(root.join("a")).unwrap();
        std::os::unix::fs::symlink(root.join("real/deep"), root.join("a/link")).unwrap();
        let of = |path: &str| absolute(&format!("{}/{path}", root.display())).unwrap();
        let table = [
            ("a/../b", "b"),
            ("a/./x", "a/x"),
            // The parent of the link's target.
            ("a/link/../x", "real/x"),
            ("a/link/x", "a/link/x"),
            ("not/there/../yet", "not/yet"),
            ("not/../a/link/..", "real"),
            ("a/link/inside/../../x", "real/x"),
        ];
        for (path, expected) in table {
            assert_eq!(of(path), root.join(expected), "{path}");
        }
        assert_eq!(absolute("/../../etc").unwrap(), Path::new("/etc"));
        let here = std::env::current_dir().unwrap();
        assert_eq!(
            absolute("../x").unwrap(),
            here.canonicalize().unwrap().parent().unwrap().join("x")
        );
        assert_eq!(absolute("x").unwrap(), here.join("x"));
    }

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
