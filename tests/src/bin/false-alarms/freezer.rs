//! Processes that stand still for a while.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use elasticdl_tests::send;
use rustix::process::Signal;

/// How processes are frozen.
#[derive(Debug)]
pub(crate) enum Freezer {
    /// By the kernel, in a control group.
    Group { group: PathBuf, kind: &'static Hierarchy },
    /// By SIGSTOP, where no control group can be made.
    Stop,
}

/// Where control groups are, the file that freezes one, and what is written to it.
#[derive(Debug)]
pub(crate) struct Hierarchy {
    root: &'static str,
    file: &'static str,
    frozen: &'static str,
    thawed: &'static str,
}

impl Freezer {
    /// The best one that this user may use.
    pub(crate) fn new() -> Self {
        for kind in &HIERARCHIES {
            let group =
                Path::new(kind.root).join(format!("elasticdl-false-alarms-{}", std::process::id()));
            if fs::create_dir(&group).is_ok() {
                if fs::write(group.join(kind.file), kind.thawed).is_ok() {
                    return Self::Group { group, kind };
                }
                let _ = fs::remove_dir(&group);
            }
        }
        Self::Stop
    }

    /// What freezes them, for the result.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Group { .. } => "cgroup",
            Self::Stop => "SIGSTOP",
        }
    }

    /// Freezes these processes for this time. Those that have ended are no error.
    pub(crate) fn freeze(&self, pids: &[u32], time: Duration) {
        match self {
            Self::Group { group, kind } => {
                let members = |folder: &Path| {
                    for pid in pids {
                        let _ = fs::write(folder.join("cgroup.procs"), pid.to_string());
                    }
                };
                members(group);
                let _ = fs::write(group.join(kind.file), kind.frozen);
                std::thread::sleep(time);
                let _ = fs::write(group.join(kind.file), kind.thawed);
                members(Path::new(kind.root));
            }
            Self::Stop => {
                pids.iter().for_each(|pid| send(*pid, Signal::STOP));
                std::thread::sleep(time);
                pids.iter().for_each(|pid| send(*pid, Signal::CONT));
            }
        }
    }
}

impl Drop for Freezer {
    fn drop(&mut self) {
        if let Self::Group { group, .. } = self {
            let _ = fs::remove_dir(group);
        }
    }
}

/// Versions 1 and 2.
const HIERARCHIES: [Hierarchy; 2] = [
    Hierarchy {
        root: "/sys/fs/cgroup/freezer",
        file: "freezer.state",
        frozen: "FROZEN",
        thawed: "THAWED",
    },
    Hierarchy { root: "/sys/fs/cgroup", file: "cgroup.freeze", frozen: "1", thawed: "0" },
];
