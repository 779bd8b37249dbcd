//! Whether this process may open as many files as a member of a group needs. A member that can't
//! open a link breaks each group that it is in.

use std::io;

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit, setrlimit};

/// Lets this process open as many files as the system allows: it has links to many workers.
pub(crate) fn raise_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // The limit stays as it is if the system refuses.
    let _ = setrlimit(Resource::Nofile, limit);
}

/// Checks that this process can open what a member with `channels` channels needs, before it
/// becomes one.
///
/// # Errors
/// It can't; the text says how much is missing, and what raises the limit.
pub(crate) fn check(channels: u8) -> Result<(), String> {
    check_process(needed(channels))
}

/// Checks that this process can open what it takes to reach the master. Without that it would
/// search for its master in vain.
///
/// # Errors
/// As of [`check`].
pub(crate) fn check_to_join() -> Result<(), String> {
    check_process(JOINING)
}

fn check_process(needed: u64) -> Result<(), String> {
    let Some(limit) = getrlimit(Resource::Nofile).current else { return Ok(()) };
    let open = match std::fs::read_dir("/proc/self/fd") {
        Ok(files) => files.count() as u64,
        // Without a descriptor for this folder none is left.
        Err(error) if is_out_of_descriptors(&error) => limit,
        // It is not known where /proc is not mounted.
        Err(_) => return Ok(()),
    };
    check_free(limit, open, needed)
}

/// Whether the process had no descriptor left.
pub(crate) fn is_out_of_descriptors(error: &io::Error) -> bool {
    Errno::from_io_error(error) == Some(Errno::MFILE)
}

fn check_free(limit: u64, open: u64, needed: u64) -> Result<(), String> {
    let free = limit.saturating_sub(open);
    if free >= needed {
        return Ok(());
    }
    Err(format!(
        "this process may open {limit} files and has {free} left, and a member of a group needs \
         {needed} for its links, the data and checkpoints; raise the limit: ulimit -n 4096, or \
         LimitNOFILE of the service"
    ))
}

/// Descriptors that a member opens: links to two neighbours, in as many rings, which those of the
/// next group overlap; and others.
fn needed(channels: u8) -> u64 {
    4 * u64::from(channels.max(RINGS_MAX)) + OTHERS
}

/// Rings of a group on several hosts that share memory: of all, of the host, of the hosts.
const RINGS_MAX: u8 = 3;

/// The event queue, signals, the connection to the master, a look at its address.
const JOINING: u64 = 6;

/// Shared memory, state requests, files of the data, a checkpoint, connections to stores.
const OTHERS: u64 = 12;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_with_too_few_descriptors_is_told_the_limit_and_what_is_needed() {
        assert_eq!(check_free(1024, 900, needed(1)), Ok(()));
        assert_eq!(check_free(34, 10, needed(1)), Ok(()));
        let error = check_free(14, 10, needed(1)).unwrap_err();
        assert!(error.starts_with("this process may open 14 files and has 4 left"), "{error}");
        assert!(error.contains("needs 24 for its links"), "{error}");
        assert!(check_free(34, 10, needed(4)).is_err());
        assert!(check_free(14, 20, needed(1)).is_err());
        assert!(is_out_of_descriptors(&Errno::MFILE.into()));
        assert!(!is_out_of_descriptors(&Errno::CONNRESET.into()));
    }
}
