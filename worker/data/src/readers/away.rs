//! Accesses to local files whose file system may be away for a while: a network file system, a disk
//! or an automount that is unmounted for a moment leaves an empty folder, or none.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::storage::{Transient, with_retries};

/// Makes an access to the file at `path`, and retries it as [`with_retries`] does; also, once the
/// first group has formed, if its file system is away.
pub(super) fn attempt<T>(path: &Path, mut request: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let request = || request().map_err(|source| Failed { is_away: is_away(path, &source), source });
    with_retries(&path.to_string_lossy(), request).map_err(|failed| failed.source)
}

/// Notes the device that the folder of the file at `path` is on, when the file is found.
pub(super) fn note_found(path: &Path) {
    let Some(folder) = path.parent() else { return };
    let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    if !devices.contains_key(folder)
        && let Some(device) = device(folder)
    {
        devices.insert(folder.into(), device);
    }
}

/// Whether an access to a file that was found before has failed because its folder is gone, is
/// empty, or is on another device than it was. A file that is missing among others was deleted.
fn is_away(path: &Path, error: &io::Error) -> bool {
    let Some(folder) = path.parent().filter(|_| error.kind() == io::ErrorKind::NotFound) else {
        return false;
    };
    let devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(known) = devices.get(folder).copied() else { return false };
    drop(devices);
    let is_empty = || fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_none());
    device(folder).is_none_or(|found| found != known) || is_empty()
}

fn device(folder: &Path) -> Option<u64> {
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    fs::metadata(folder).ok().map(|found| found.dev())
}

/// Why an access to a file failed.
struct Failed {
    source: io::Error,
    is_away: bool,
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.is_away {
            true => write!(f, "its folder is gone, empty, or on another device: is it unmounted?"),
            false => self.source.fmt(f),
        }
    }
}

impl Transient for Failed {
    fn is_transient(&self) -> bool {
        self.source.is_transient()
    }

    fn is_refusal(&self) -> bool {
        self.is_away || self.source.is_refusal()
    }
}

/// Devices of the folders of files that were found.
static DEVICES: Mutex<BTreeMap<PathBuf, u64>> = Mutex::new(BTreeMap::new());

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_whose_folder_is_gone_or_empty_or_elsewhere_is_away_and_one_among_others_is_deleted() {
        let scratch = tempfile::tempdir().unwrap();
        let (folder, elsewhere) = (scratch.path().join("data"), scratch.path().join("elsewhere"));
        let [one, two] = ["a", "b"].map(|name| folder.join(name));
        fs::create_dir(&folder).unwrap();
        fs::write(&one, "1").unwrap();
        fs::write(&two, "2").unwrap();
        let is_waited_for = |path: &Path| {
            let source = fs::metadata(path).unwrap_err();
            Failed { is_away: is_away(path, &source), source }.is_refusal()
        };
        fs::remove_file(&one).unwrap();
        note_found(&one);
        assert!(!is_waited_for(&one), "it was deleted");
        fs::rename(&folder, &elsewhere).unwrap();
        assert!(is_waited_for(&one), "its folder is gone");
        assert!(!is_waited_for(&elsewhere.join("a")), "it was never found");
        fs::create_dir(&folder).unwrap();
        assert!(is_waited_for(&one), "its folder is empty");
        fs::write(&two, "2").unwrap();
        assert!(!is_waited_for(&one));
        *DEVICES.lock().unwrap().get_mut(&folder).unwrap() ^= 1;
        assert!(is_waited_for(&one), "its folder is on another device");
    }
}
