//! Identity of processes of this machine.

use std::fs;
use std::io;

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal};

/// Identity of a process. The id alone does not suffice, because the system reuses ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessIdentity {
    /// Process id.
    pub pid: u32,
    /// Start time in clock ticks since the system booted.
    pub start_ticks: u64,
}

impl ProcessIdentity {
    /// Looks up the process with id `pid`; `None` if it has ended.
    pub(crate) fn look_up(pid: u32) -> Option<Self> {
        let (runs, found) = Self::read(pid)?;
        runs.then_some(found)
    }

    /// Reads the process with id `pid`, and whether it runs: a zombie keeps its id until its parent
    /// has waited for it.
    fn read(pid: u32) -> Option<(bool, Self)> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name is in parentheses and may contain any character. The third field, the state,
        // follows its closing parenthesis.
        let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
        let runs = !matches!(fields.next()?, "Z" | "X");
        let start_ticks = fields.nth(STAT_STARTTIME - STAT_STATE - 1)?.parse().ok()?;
        Some((runs, Self { pid, start_ticks }))
    }

    /// Returns whether the process, running or a zombie, still has its id. Then the process group
    /// with this id is its own.
    pub(crate) fn has_its_id(self) -> bool {
        Self::read(self.pid).is_some_and(|(_, found)| found == self)
    }

    /// Signals this process, but no other process that reuses its id. Returns whether the process
    /// existed.
    pub(crate) fn signal(self, signal: Signal) -> io::Result<bool> {
        let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) else {
            return Ok(false);
        };
        let descriptor = match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
            Err(Errno::SRCH) => return Ok(false),
            descriptor => descriptor?,
        };
        // The descriptor is opened before the look-up, so that both refer to the same process.
        if Self::look_up(self.pid) != Some(self) {
            return Ok(false);
        }
        match rustix::process::pidfd_send_signal(&descriptor, signal) {
            Err(Errno::SRCH) => Ok(false),
            sent => Ok(sent.map(|()| true)?),
        }
    }
}

/// Field numbers in `/proc/PID/stat`, from 1 as in proc(5).
const STAT_STATE: usize = 3;
const STAT_STARTTIME: usize = 22;
