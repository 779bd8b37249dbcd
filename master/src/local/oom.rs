//! Kills for lack of memory. The kernel ends a process with SIGKILL and says nothing to its parent,
//! but it counts such kills.

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};

/// The kills that this master has attributed to its processes, or found when it started.
#[derive(Debug)]
pub(super) struct OomKills {
    attributed: AtomicU64,
}

impl Default for OomKills {
    fn default() -> Self {
        Self { attributed: AtomicU64::new(count()) }
    }
}

impl OomKills {
    /// Whether a kill is not attributed yet; attributes one.
    pub(super) fn take_one(&self) -> bool {
        self.take_one_of(count())
    }

    fn take_one_of(&self, count: u64) -> bool {
        let next = |known: u64| (count > known).then_some(known + 1);
        self.attributed.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).is_ok()
    }
}

/// Kills so far: those of this process's cgroup, or, where they are not known, of the machine.
fn count() -> u64 {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let group = groups.lines().find_map(|line| line.strip_prefix("0::")).unwrap_or("/");
    let files = [
        format!("/sys/fs/cgroup{}/memory.events", group.trim_end_matches('/')),
        "/proc/vmstat".into(),
    ];
    let count = |file: &String| count_in(&fs::read_to_string(file).ok()?);
    files.iter().find_map(count).unwrap_or_default()
}

fn count_in(text: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix("oom_kill "))?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kill_is_attributed_once() {
        assert_eq!(count_in("low 0\noom 3\noom_kill 2\noom_group_kill 0\n"), Some(2));
        assert_eq!(count_in("nr_free_pages 5\n"), None);
        let kills = OomKills { attributed: AtomicU64::new(2) };
        assert_eq!([2, 4, 4, 4].map(|count| kills.take_one_of(count)), [false, true, true, false]);
    }
}
