//! Notes of the processes that masters have started.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write as _};
use std::path::Path;

use super::files::PROCESSES;
use super::process_identity::ProcessIdentity;
use crate::job::LaunchId;

/// Notes in the file at `path` that `launch` runs.
pub(crate) fn note_process(
    path: &Path,
    launch: LaunchId,
    started: ProcessIdentity,
) -> io::Result<()> {
    let (ProcessIdentity { pid, start_ticks }, boot) = (started, boot_id());
    let line = format!("{} {pid} {start_ticks} {boot}\n", launch.0);
    // One write of a short line is atomic.
    fs::File::options().append(true).create(true).open(path)?.write_all(line.as_bytes())
}

/// Reads the processes that were noted in the directory `root` since the machine was started: start
/// times count from then, so after a reboot another process may have the same.
pub(super) fn read_notes(root: &Path) -> io::Result<BTreeMap<LaunchId, ProcessIdentity>> {
    match fs::read_to_string(root.join(PROCESSES)) {
        Ok(notes) => {
            let boot = boot_id();
            Ok(notes.lines().filter_map(|line| parse_note(line, &boot)).collect())
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(BTreeMap::new()),
        Err(error) => Err(error),
    }
}

fn parse_note(line: &str, boot: &str) -> Option<(LaunchId, ProcessIdentity)> {
    let mut fields = line.split(' ');
    let mut next = || fields.next()?.parse::<u64>().ok();
    let (launch, pid, at) = (next()?, next()?, next()?);
    if fields.next()? != boot {
        return None;
    }
    Some((LaunchId(launch), ProcessIdentity { pid: u32::try_from(pid).ok()?, start_ticks: at }))
}

/// Identity of the machine's boot; empty where the system has none.
pub(super) fn boot_id() -> String {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_of_before_a_reboot_are_not_taken_for_those_of_now() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(PROCESSES);
        let process = ProcessIdentity { pid: 70, start_ticks: 9 };
        note_process(&path, LaunchId(1), process).unwrap();
        assert_eq!(read_notes(folder.path()).unwrap(), [(LaunchId(1), process)].into());
        let before = fs::read_to_string(&path).unwrap().replace(&boot_id(), "another-boot");
        fs::write(&path, before).unwrap();
        assert_eq!(read_notes(folder.path()).unwrap(), BTreeMap::new());
    }
}
