//! Paths of this machine.

use std::ffi::OsStr;
use std::hash::{BuildHasher as _, RandomState};
use std::io;
use std::path::{Component, PathBuf};

/// `path` as an absolute path without `.` and `..` that leads to the same file.
///
/// `..` after a symbolic link is the parent of the link's target, so the part before it is resolved
/// as far as it exists. A path without `..` keeps its links.
pub fn absolute(path: &str) -> io::Result<PathBuf> {
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

/// Sixteen random hexadecimal digits, unique among writers: process ids are not unique where
/// several containers share a folder.
pub fn random_digits() -> String {
    format!("{:016x}", RandomState::new().hash_one(OsStr::new("staged")))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

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
}
