//! Whether a process that has not joined its job does anything: a start that imports, downloads or
//! reads is slow, and one that does nothing is stuck.

use std::fs;
use std::path::PathBuf;

use rustix::process::Pid;

/// What the processes of a group have used so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Activity {
    /// Clock ticks of the processor, including those of children that have ended.
    ticks: u64,
    /// Bytes that were read and written, wherever they come from.
    bytes: u64,
}

impl Activity {
    /// The activity of the process group that `leader` leads.
    pub(super) fn of_group(leader: Pid) -> Self {
        let mut sum = Self::default();
        for (folder, stat) in of_group(leader) {
            sum.ticks += ticks_in(&stat).unwrap_or(0);
            let io = fs::read_to_string(folder.join("io")).unwrap_or_default();
            sum.bytes += bytes_in(&io);
        }
        sum
    }

    /// Whether more than the polling of an idle program has happened since `before`.
    pub(super) fn is_busy_since(&self, before: &Self) -> bool {
        self.ticks.saturating_sub(before.ticks) >= TICKS_BUSY
            || self.bytes.saturating_sub(before.bytes) >= BYTES_BUSY
    }
}

/// The processes of the group that `leader` leads.
pub fn processes_of_group(leader: Pid) -> impl Iterator<Item = Pid> {
    of_group(leader)
        .filter_map(|(folder, _)| Pid::from_raw(folder.file_name()?.to_str()?.parse().ok()?))
}

/// The same, each as its folder in `/proc` and what `stat` there says.
fn of_group(leader: Pid) -> impl Iterator<Item = (PathBuf, String)> {
    let group = leader.as_raw_nonzero().to_string();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(move |entry| {
        let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
        is_of(&stat, &group).then(|| (entry.path(), stat))
    })
}

/// Whether `/proc/PID/stat` is of a process of the group.
fn is_of(stat: &str, group: &str) -> bool {
    fields(stat).is_some_and(|fields| fields.get(STAT_PGRP - STAT_STATE) == Some(&group))
}

/// The ticks that `/proc/PID/stat` states.
fn ticks_in(stat: &str) -> Option<u64> {
    let fields = fields(stat)?;
    let ticks = fields.get(STAT_UTIME - STAT_STATE..=STAT_CSTIME - STAT_STATE)?;
    Some(ticks.iter().filter_map(|text| text.parse::<u64>().ok()).sum())
}

/// The fields of `/proc/PID/stat`, from the state on.
fn fields(stat: &str) -> Option<Vec<&str>> {
    // The name is in parentheses and may contain any character; the state follows.
    Some(stat.rsplit_once(')')?.1.split_ascii_whitespace().collect())
}

/// The bytes that `/proc/PID/io` states.
fn bytes_in(io: &str) -> u64 {
    let is_total = |line: &&str| line.starts_with("rchar:") || line.starts_with("wchar:");
    let number = |line: &str| line.split_once(": ")?.1.parse::<u64>().ok();
    io.lines().filter(is_total).filter_map(number).sum()
}

/// Field numbers in `/proc/PID/stat`, from 1 as in proc(5).
const STAT_STATE: usize = 3;
const STAT_PGRP: usize = 5;
const STAT_UTIME: usize = 14;
const STAT_CSTIME: usize = 17;
/// A program that polls once per second uses less in two seconds.
const TICKS_BUSY: u64 = 5;
const BYTES_BUSY: u64 = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_and_bytes_are_those_of_the_group() {
        let stat = "31 (a) b) S 1 30 30 0 -1 4194560 9 9 0 0 10 2 3 1 20 0 1 0 77 1 1";
        assert_eq!((ticks_in(stat), is_of(stat, "30"), is_of(stat, "31")), (Some(16), true, false));
        assert_eq!((ticks_in("31 (cut"), is_of("31 (cut", "30")), (None, false));
        assert_eq!(bytes_in("rchar: 5\nwchar: 7\nsyscr: 9\nread_bytes: 3\n"), 12);
        let idle = Activity { ticks: 100, bytes: 1 << 20 };
        assert!(!Activity { ticks: 104, ..idle }.is_busy_since(&idle));
        assert!(Activity { ticks: 105, ..idle }.is_busy_since(&idle));
        assert!(Activity { bytes: (1 << 20) + (64 << 10), ..idle }.is_busy_since(&idle));
    }
}
