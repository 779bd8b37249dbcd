//! Notes of the processes that masters have started.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write as _};
use std::path::Path;

use super::files::PROCESSES;
use crate::job::LaunchId;
use crate::local::ProcessIdentity;

/// Notes in the file at `path` that `launch` runs.
pub(crate) fn note_process(
    path: &Path,
    launch: LaunchId,
    started: ProcessIdentity,
) -> io::Result<()> {
    let line = format!("{} {} {}\n", launch.0, started.pid, started.start_ticks);
    // One write of a short line is atomic.
    fs::File::options().append(true).create(true).open(path)?.write_all(line.as_bytes())
}

/// Reads the processes that were noted in the directory `root`.
pub(super) fn read_notes(root: &Path) -> io::Result<BTreeMap<LaunchId, ProcessIdentity>> {
    match fs::read_to_string(root.join(PROCESSES)) {
        Ok(notes) => Ok(notes.lines().filter_map(parse_note).collect()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(BTreeMap::new()),
        Err(error) => Err(error),
    }
}

fn parse_note(line: &str) -> Option<(LaunchId, ProcessIdentity)> {
    let mut fields = line.split(' ');
    let mut next = || fields.next()?.parse::<u64>().ok();
    let (launch, pid, at) = (next()?, next()?, next()?);
    Some((LaunchId(launch), ProcessIdentity { pid: u32::try_from(pid).ok()?, start_ticks: at }))
}
