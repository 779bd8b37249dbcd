//! Event logs of workers: each process records the calls of its model as they happen. All processes
//! of a machine share one clock, so the logs can be merged.
//!
//! An event log is a file of entries of seven little-endian `u64`s, one `write` each, so that a
//! killed process leaves complete entries; they add some microseconds to a model's calls.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use crate::is_alive;

/// An entry of an event log.
#[derive(Clone, Copy, Debug)]
pub enum LogEntry {
    /// A step was applied.
    Committed(Commit),
    /// Gradients of this many records were computed.
    Computed {
        /// Their number.
        records: u64,
    },
}

/// One step, as the model of one worker saw it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Commit {
    /// From 0.
    pub step: u64,
    /// Number of records over all ranks.
    pub records: u64,
    /// Number of these records that this worker has computed.
    pub own: u64,
    /// Number of records that this worker has computed since the last step and that were discarded.
    pub undone: u64,
    /// Number of records that were counted out of turn.
    pub repeated: u64,
}

/// The writer of a worker's own event log.
#[derive(Debug)]
pub struct EventWriter {
    file: File,
}

impl EventWriter {
    /// Creates the event log of this process in `folder`, with the time of the process's start.
    pub fn create(folder: &Path) -> io::Result<Self> {
        let file = File::create_new(folder.join(std::process::id().to_string()))?;
        let mut writer = Self { file };
        writer.put([BORN, nanoseconds(birth()?), 0, 0, 0, 0, 0])?;
        Ok(writer)
    }

    /// Adds an entry with the time of this call.
    pub fn write(&mut self, entry: LogEntry) -> io::Result<()> {
        let at = nanoseconds(now());
        self.put(match entry {
            LogEntry::Committed(c) => {
                [COMMITTED, at, c.step, c.records, c.own, c.undone, c.repeated]
            }
            LogEntry::Computed { records } => [COMPUTED, at, 0, records, 0, 0, 0],
        })
    }

    fn put(&mut self, words: [u64; WORDS]) -> io::Result<()> {
        let bytes: Vec<u8> = words.into_iter().flat_map(u64::to_le_bytes).collect();
        self.file.write_all(&bytes)
    }
}

/// The event log of one worker, read while it is being written.
#[derive(Debug)]
pub struct EventLog {
    /// Process id of the worker.
    pub pid: u32,
    /// Time at which its process was started; from the system's records, rounded down to a tick (10
    /// ms).
    pub born: Duration,
    /// Its commits, with their times.
    pub commits: Vec<(Duration, Commit)>,
    /// Number of records computed after the last commit.
    pub open: u64,
    /// Whether its process runs.
    is_alive: bool,
    file: File,
    rest: Vec<u8>,
}

impl EventLog {
    fn open(pid: u32, path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        Ok(Self {
            pid,
            born: Duration::ZERO,
            commits: Vec::new(),
            open: 0,
            is_alive: true,
            file,
            rest: Vec::new(),
        })
    }

    /// The first commit with records that the worker has computed itself.
    pub fn contribution(&self) -> Option<(Duration, Commit)> {
        self.commits.iter().find(|(_, commit)| commit.own > 0).copied()
    }

    /// Whether the worker began to contribute after `at`.
    pub fn is_new(&self, at: Duration) -> bool {
        self.contribution().is_some_and(|(first, _)| first > at)
    }

    /// Time at which the worker has last applied `step`.
    pub fn time_of(&self, step: u64) -> Option<Duration> {
        self.commits.iter().rev().find(|(_, commit)| commit.step == step).map(|(at, _)| *at)
    }

    /// Number of steps committed before `at`.
    pub fn steps_before(&self, at: Duration) -> u64 {
        let before = self.commits.partition_point(|(committed, _)| *committed < at);
        before.checked_sub(1).map_or(0, |last| self.commits[last].1.step + 1)
    }

    /// Steps whose work was lost here: computed and discarded, or applied more than once. What a
    /// joiner does before it contributes costs no other worker a step.
    pub fn steps_lost(&self) -> Vec<u64> {
        let first = self.commits.iter().position(|(_, commit)| commit.own > 0);
        let commits = &self.commits[first.unwrap_or(self.commits.len())..];
        let undone = commits.iter().filter(|(_, commit)| commit.undone > 0);
        let twice =
            commits.windows(2).filter(|pair| pair[1].1.step <= pair[0].1.step).map(|pair| &pair[1]);
        undone.chain(twice).map(|(_, commit)| commit.step).collect()
    }

    fn refresh(&mut self) -> io::Result<()> {
        if !self.is_alive {
            return Ok(());
        }
        // Checked before the file is read, so that the last entries are read too.
        self.is_alive = is_alive(self.pid);
        self.file.read_to_end(&mut self.rest)?;
        let whole = self.rest.len() / ENTRY_BYTES * ENTRY_BYTES;
        let read: Vec<u8> = self.rest.drain(..whole).collect();
        for entry in read.chunks_exact(ENTRY_BYTES) {
            let (words, _) = entry.as_chunks::<{ size_of::<u64>() }>();
            let word = |i: usize| u64::from_le_bytes(words[i]);
            let at = Duration::from_nanos(word(1));
            match word(0) {
                BORN => self.born = at,
                COMPUTED => self.open += word(3),
                _ => {
                    let [step, records, own, undone, repeated] = [2, 3, 4, 5, 6].map(word);
                    self.open = 0;
                    self.commits.push((at, Commit { step, records, own, undone, repeated }));
                }
            }
        }
        Ok(())
    }
}

/// All event logs of a job.
#[derive(Debug)]
pub struct EventLogs {
    /// Their folder.
    pub folder: PathBuf,
    /// The event logs, by process id.
    pub all: BTreeMap<u32, EventLog>,
}

impl EventLogs {
    /// Creates the folder.
    pub fn create(folder: PathBuf) -> io::Result<Self> {
        std::fs::create_dir_all(&folder)?;
        Ok(Self { folder, all: BTreeMap::new() })
    }

    /// Reads the entries that were added since the last call.
    pub fn refresh(&mut self) -> io::Result<()> {
        for entry in std::fs::read_dir(&self.folder)? {
            let entry = entry?;
            if let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok())
                && !self.all.contains_key(&pid)
            {
                self.all.insert(pid, EventLog::open(pid, &entry.path())?);
            }
        }
        self.all.values_mut().try_for_each(EventLog::refresh)
    }

    /// Event logs of the processes that ran at the last refresh.
    pub fn living(&self) -> impl Iterator<Item = &EventLog> {
        self.all.values().filter(|log| log.is_alive)
    }

    /// Time at which each step was first applied by any worker, with its records.
    pub fn steps(&self) -> BTreeMap<u64, (Duration, u64)> {
        let mut steps = BTreeMap::new();
        for (at, commit) in self.all.values().flat_map(|log| &log.commits) {
            let first = steps.entry(commit.step).or_insert((*at, commit.records));
            first.0 = first.0.min(*at);
        }
        steps
    }
}

/// Time since the machine's start; the same clock for all processes.
pub fn now() -> Duration {
    since_start(ClockId::Monotonic)
}

fn since_start(clock: ClockId) -> Duration {
    let time = clock_gettime(clock);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Time at which this process was started.
fn birth() -> io::Result<Duration> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    // After the command's name in brackets comes the third field; the 22nd is the start in ticks.
    let field = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(22 - 3));
    let ticks: Option<u64> = field.and_then(|field| field.parse().ok());
    let ticks = ticks.ok_or_else(|| io::Error::other("the start of this process can't be read"))?;
    let born = Duration::from_secs(ticks) / rustix::param::clock_ticks_per_second() as u32;
    // The system's count includes the time that the machine was suspended, the monotonic clock does
    // not.
    let slept = since_start(ClockId::Boottime).saturating_sub(now());
    Ok(born.saturating_sub(slept))
}

fn nanoseconds(time: Duration) -> u64 {
    time.as_nanos() as u64
}

const BORN: u64 = 0;
const COMPUTED: u64 = 1;
const COMMITTED: u64 = 2;
const WORDS: usize = 7;
const ENTRY_BYTES: usize = WORDS * size_of::<u64>();
