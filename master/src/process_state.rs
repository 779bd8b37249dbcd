//! What the kernel says of a process of this machine that does not answer.

use std::fs;
use std::path::Path;

use elasticdl_proto::{KernelThread, ProcessState};

/// The state of a process; `None` if it has ended.
pub(crate) fn read(pid: u32) -> Option<ProcessState> {
    let folder = Path::new("/proc").join(pid.to_string());
    let state = state_in(&fs::read_to_string(folder.join("status")).ok()?);
    let entries = fs::read_dir(folder.join("task")).into_iter().flatten().flatten();
    let threads = entries.filter_map(|entry| thread(&entry.path())).take(THREADS_MAX).collect();
    Some(ProcessState { state, threads })
}

fn thread(folder: &Path) -> Option<KernelThread> {
    let read = |file: &str| {
        let text = fs::read_to_string(folder.join(file)).unwrap_or_default();
        text.trim().replace(char::is_control, " ")
    };
    Some(KernelThread {
        tid: folder.file_name()?.to_str()?.parse().ok()?,
        name: read("comm"),
        state: state_in(&fs::read_to_string(folder.join("status")).ok()?),
        waits_in: read("wchan"),
    })
}

fn state_in(status: &str) -> String {
    status.lines().find_map(|line| line.strip_prefix("State:\t")).unwrap_or("unknown").to_owned()
}

const THREADS_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_threads_of_a_process_are_listed_until_it_has_ended() {
        let own = read(std::process::id()).unwrap();
        let this = std::thread::current().name().unwrap().chars().take(15).collect::<String>();
        assert!(own.threads.iter().any(|thread| thread.name == this), "{own:?}");
        assert!(own.threads.iter().all(|thread| !thread.state.is_empty()), "{own:?}");
        assert_eq!(read(u32::MAX), None);
    }
}
