//! Restarts: which exits count as failures, and when a replacement may start.
//!
//! A process that was ended from outside is replaced, as long as the job makes progress. An exit
//! caused by the user's code is a *failure*. Failures use up a budget of `max_worker_restarts`,
//! which is refilled when the job makes progress: when the group commits a step that no group of
//! this job had reached before. So occasional failures, even over a month or on one bad node, never
//! end a job that makes progress; failures without progress do. Records on which the user's code
//! fails repeatedly end the job even if it makes progress.
//!
//! *Kills* without progress are counted apart, with a larger budget and a longer back-off: a
//! program that the kernel ends for lack of memory would be restarted for ever. A kill counts once
//! per back-off, and only of a launch that was started after it, so the count measures how long the
//! job has been without progress: some minutes of kills, however many, end no job. A worker that
//! was killed after some time is replaced at once; if its replacement is killed right after its
//! start, the next one waits, with or without progress.
//!
//! Each replacement waits longer than the previous one (exponential back-off), until no worker has
//! failed for some time.

use std::collections::BTreeMap;
use std::time::Duration;

use elasticdl_proto::RecordRange;

use crate::job::event::{Exit, LaunchId};
use crate::job::text::clip;
use crate::job::time::Time;

/// Failures so far, and delayed replacements.
#[derive(Debug)]
pub(crate) struct Restarts {
    max: u32,
    budget: Budget,
    /// When each waiting replacement may start.
    waiting: Vec<Time>,
    /// Records on which workers failed, a list for each failure, the newest last.
    failed_on: Vec<Vec<RecordRange>>,
    /// Consecutive failures, none of them long after the previous one.
    in_a_row: u32,
    last: Option<Time>,
    /// The newest launch at the last counted kill.
    newest_at_kill: LaunchId,
    /// When the replacement for the last counted kill may start.
    replaced_at: Time,
    /// For each slot with a kill: when the replacement could start, and the number of kills in a
    /// row.
    killed_slots: BTreeMap<u32, (Time, u32)>,
}

/// The part that outlives a master.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Budget {
    /// Failures since the job began.
    pub(crate) counted: u32,
    /// Failures since the last progress.
    pub(crate) since_progress: u32,
    /// Kills from outside since the last progress.
    pub(crate) kills_since_progress: u32,
    /// Highest progress at the last failure or kill: steps, or records of an inference job.
    pub(crate) progress: u64,
}

/// Why the job has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TooMany {
    /// Number of failures without progress.
    Failures(u32),
    /// Number of kills without progress.
    Kills(u32),
    /// Number of workers that failed on the same record.
    OnRecord(u32),
}

impl Restarts {
    /// Failures of a job of which this master knows `budget` at `now`.
    pub(crate) fn new(now: Time, max: u32, budget: Budget) -> Self {
        Self {
            max,
            budget,
            waiting: Vec::new(),
            failed_on: Vec::new(),
            in_a_row: 0,
            last: None,
            newest_at_kill: LaunchId(0),
            replaced_at: now + delay(budget.kills_since_progress, LONG_DELAY),
            killed_slots: BTreeMap::new(),
        }
    }

    /// Counts a failure at `progress`. Returns when the replacement may start.
    ///
    /// # Errors
    /// The job has failed.
    pub(crate) fn count(
        &mut self,
        now: Time,
        progress: u64,
        ranges: &[RecordRange],
    ) -> Result<Time, TooMany> {
        let Self { max, budget, .. } = self;
        budget.counted = budget.counted.saturating_add(1);
        budget.note_progress(progress);
        budget.since_progress = budget.since_progress.saturating_add(1);
        if budget.since_progress > *max {
            return Err(TooMany::Failures(budget.since_progress));
        }
        let on_record = self.count_on_record(ranges);
        if on_record > self.max {
            return Err(TooMany::OnRecord(on_record));
        }
        Ok(self.back_off(now))
    }

    /// Counts a kill from outside of `launch` at `progress`; `newest` is the newest launch.
    ///
    /// # Errors
    /// The job has failed.
    pub(crate) fn count_kill(
        &mut self,
        now: Time,
        progress: u64,
        launch: LaunchId,
        newest: LaunchId,
    ) -> Result<(), TooMany> {
        self.budget.note_progress(progress);
        let most = self.kills_max();
        let kills = &mut self.budget.kills_since_progress;
        // Other kills belong to the same trouble: those of launches that ran beside the killed one,
        // or were started before its replacement.
        if *kills == 0 || (launch > self.newest_at_kill && now >= self.replaced_at) {
            *kills = kills.saturating_add(1);
            self.newest_at_kill = newest;
            self.replaced_at = now + delay(*kills, LONG_DELAY);
        }
        if *kills > most {
            return Err(TooMany::Kills(*kills));
        }
        Ok(())
    }

    /// The most counted kills without progress that do not fail the job.
    pub(crate) fn kills_max(&self) -> u32 {
        self.max.max(KILLS_MAX)
    }

    /// Delays the replacement of a killed worker of this slot, whose kill is counted. Returns when
    /// it may start.
    pub(crate) fn delay_killed(&mut self, now: Time, slot: u32) -> Time {
        let of_slot = self.killed_slots.get(&slot);
        let in_a_row = of_slot.filter(|(start, _)| now.since(*start) < SOON);
        let in_a_row = in_a_row.map_or(1, |(_, kills)| kills.saturating_add(1));
        let start = self.replaced_at.max(now + delay(in_a_row, LONG_DELAY));
        self.killed_slots.insert(slot, (start, in_a_row));
        self.wait_until(now, start);
        start
    }

    /// Delays a replacement that has failed often. Returns when it may start.
    pub(crate) fn wait_long(&mut self, now: Time) -> Time {
        let start = now + LONG_DELAY;
        self.wait_until(now, start);
        start
    }

    /// Delays the replacement that would start at `start`: the longer, the more failures there were
    /// in a row. Returns when it may start.
    pub(crate) fn delay_longer(&mut self, now: Time, start: Time) -> Time {
        if let Some(own) = self.waiting.iter().position(|&waiting| waiting == start) {
            self.waiting.swap_remove(own);
        }
        let start = now + delay(self.in_a_row + STUBBORN, LONG_DELAY);
        self.wait_until(now, start);
        start
    }

    fn wait_until(&mut self, now: Time, start: Time) {
        if start > now {
            self.waiting.push(start);
        }
    }

    /// Delays a replacement, longer than the one before. Returns when it may start.
    pub(crate) fn back_off(&mut self, now: Time) -> Time {
        let is_in_a_row = self.last.is_some_and(|last| now.0.saturating_sub(last.0) < CALM);
        self.in_a_row = if is_in_a_row { self.in_a_row.saturating_add(1) } else { 1 };
        self.last = Some(now);
        let start = now + delay(self.in_a_row, DELAY_MAX);
        self.wait_until(now, start);
        start
    }

    /// Adds a failure on `ranges`. Returns the largest number of failures, including this one, that
    /// share one record.
    fn count_on_record(&mut self, ranges: &[RecordRange]) -> u32 {
        if ranges.is_empty() {
            return 0;
        }
        if self.failed_on.len() == FAILURES_KEPT {
            self.failed_on.remove(0);
        }
        self.failed_on.push(ranges.to_vec());
        // The number can only change where a range begins.
        let holds = |ranges: &[RecordRange], epoch, record| {
            ranges.iter().any(|r| r.epoch == epoch && r.start <= record && record < r.end)
        };
        let begins = self.failed_on.iter().flatten().map(|r| (r.epoch, r.start));
        let depth = |(epoch, record)| {
            let of_this = holds(ranges, epoch, record);
            let all = self.failed_on.iter().filter(|failed| holds(failed, epoch, record)).count();
            if of_this { all } else { 0 }
        };
        let deepest = begins.map(depth).max().unwrap_or_default();
        u32::try_from(deepest).unwrap_or(u32::MAX)
    }

    /// Replacements that may not start yet.
    pub(crate) fn waiting(&mut self, now: Time) -> usize {
        self.waiting.retain(|&start| start > now);
        self.waiting.len()
    }

    /// Lets all replacements start now.
    pub(crate) fn end_pauses(&mut self) {
        self.waiting.clear();
    }

    /// The state that a take-over needs.
    pub(crate) fn budget(&self) -> Budget {
        self.budget
    }
}

impl Budget {
    fn note_progress(&mut self, progress: u64) {
        if progress > self.progress {
            (self.progress, self.since_progress, self.kills_since_progress) = (progress, 0, 0);
        }
    }
}

/// Whether a process was ended from outside by a signal.
pub(crate) fn is_kill(exit: &Exit) -> bool {
    matches!(exit, Exit::Signal(SIGHUP | SIGINT | SIGKILL | SIGTERM))
}

/// Whether this can be the end of a process that received SIGTERM.
pub(crate) fn is_term(exit: &Exit) -> bool {
    matches!(exit, Exit::Code(0 | EXIT_TERMINATED) | Exit::Signal(SIGTERM))
}

/// Whether an unexpected exit was caused by the user's code or its resource use.
pub(crate) fn is_own_fault(exit: &Exit) -> bool {
    match exit {
        Exit::Code(EXIT_MASTER_LOST | EXIT_TERMINATED) => false,
        Exit::Code(_) | Exit::NotStarted(_) | Exit::OverLimit(_) => true,
        Exit::Signal(_) => !is_kill(exit),
        Exit::Reclaimed { .. } | Exit::Unknown => false,
    }
}

/// Describes an exit for the user.
pub(crate) fn describe(exit: &Exit) -> String {
    match exit {
        Exit::Code(code @ EXIT_MASTER_LOST) => {
            format!("exited with code {code}: it found no master, or none that wants it")
        }
        Exit::Code(code) => format!("exited with code {code}"),
        Exit::NotStarted(error) => {
            format!("could not be started: {}", clip(error))
        }
        Exit::OverLimit(what) => {
            format!("exceeded a limit: {}", clip(what))
        }
        Exit::Reclaimed { detail, .. } => {
            format!("was removed by the cluster: {}", clip(detail))
        }
        Exit::Signal(signal) => match NAMES.iter().find(|(number, _)| number == signal) {
            Some((_, name)) => format!("killed by {name}"),
            None => format!("killed by signal {signal}"),
        },
        Exit::Unknown => "ended, reason unknown".into(),
    }
}

/// Delay of the replacement for the `counted`th consecutive failure (from 1).
fn delay(counted: u32, longest: Duration) -> Duration {
    match counted {
        0 | 1 => Duration::ZERO,
        n => DELAY_FIRST.saturating_mul(1 << (n - 2).min(16)).min(longest),
    }
}

/// Exit code of a worker that found no master in time, or none that accepts it.
pub(crate) const EXIT_MASTER_LOST: i32 = 70;
/// Exit code of a worker that received SIGTERM and was not released in time.
const EXIT_TERMINATED: i32 = 143;

/// A failure this long after the previous one starts a new sequence.
const CALM: Duration = Duration::from_secs(300);
/// A worker that is killed within this time of its start is killed soon.
const SOON: Duration = Duration::from_secs(5);
/// Counted kills without progress after which the job fails, unless more failures are allowed. With
/// their back-off they take at least six minutes.
const KILLS_MAX: u32 = 20;
/// Failures whose records are compared.
const FAILURES_KEPT: usize = 64;

/// The pauses of a slot that fails again and again begin with this many doublings.
const STUBBORN: u32 = 4;
const DELAY_FIRST: Duration = Duration::from_millis(250);
const DELAY_MAX: Duration = Duration::from_secs(5);
const LONG_DELAY: Duration = Duration::from_secs(30);

const SIGHUP: i32 = 1;
const SIGINT: i32 = 2;
const SIGKILL: i32 = 9;
const SIGTERM: i32 = 15;
/// Linux signal numbers on all common architectures.
const NAMES: [(i32, &str); 9] = [
    (SIGHUP, "SIGHUP"),
    (SIGINT, "SIGINT"),
    (4, "SIGILL"),
    (6, "SIGABRT"),
    (7, "SIGBUS"),
    (8, "SIGFPE"),
    (SIGKILL, "SIGKILL"),
    (11, "SIGSEGV"),
    (SIGTERM, "SIGTERM"),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::event::ReclaimCause;

    #[test]
    fn only_what_a_process_does_itself_is_its_fault() {
        let table = [
            (Exit::Code(0), true),
            (Exit::Code(1), true),
            (Exit::Code(70), false),
            (Exit::Code(101), true),
            (Exit::Code(143), false),
            (Exit::NotStarted("no such file".into()), true),
            (Exit::OverLimit("memory".into()), true),
            (Exit::reclaimed(ReclaimCause::Preempted, "preempted"), false),
            (Exit::Signal(1), false),
            (Exit::Signal(2), false),
            (Exit::Signal(4), true),
            (Exit::Signal(6), true),
            (Exit::Signal(7), true),
            (Exit::Signal(8), true),
            (Exit::Signal(9), false),
            (Exit::Signal(11), true),
            (Exit::Signal(15), false),
            (Exit::Signal(31), true),
            (Exit::Unknown, false),
        ];
        for (exit, own) in table {
            assert_eq!(is_own_fault(&exit), own, "{exit:?}");
        }
    }

    fn at(s: u64) -> Time {
        Time(Duration::from_secs(s))
    }

    #[test]
    fn replacements_wait_twice_as_long_each_time_and_never_over_5_s() {
        let mut restarts = Restarts::new(at(0), 40, Budget::default());
        let now = at(100);
        let mut delays = Vec::new();
        for _ in 0..40 {
            delays.push(restarts.count(now, 0, &[]).unwrap().since(now).as_millis());
        }
        assert_eq!(delays[..8], [0, 250, 500, 1000, 2000, 4000, 5000, 5000]);
        assert!(delays[8..].iter().all(|&ms| ms == 5000));
        assert_eq!(restarts.waiting(now), 39);
        assert_eq!(restarts.waiting(now + Duration::from_millis(250)), 38);
        assert_eq!(restarts.waiting(now + Duration::from_secs(5)), 0);
        assert_eq!(restarts.count(now, 0, &[]), Err(TooMany::Failures(41)));
    }

    /// Kills launches one after the other, each some milliseconds after it was started, until the
    /// job fails or `until`. Returns the time, in seconds, and the pauses before the launches.
    fn kill_each_launch(run_ms: u64, until: Time) -> (u64, Vec<u128>, Result<(), TooMany>) {
        let mut restarts = Restarts::new(at(0), 3, Budget::default());
        let (mut now, mut pauses) = (Time::default(), Vec::new());
        for launch in (1..).map(LaunchId) {
            now = now + Duration::from_millis(run_ms);
            if let Err(error) = restarts.count_kill(now, 0, launch, launch) {
                return (now.0.as_secs(), pauses, Err(error));
            }
            pauses.push(restarts.delay_killed(now, 0).since(now).as_millis());
            now = now + Duration::from_millis(*pauses.last().unwrap() as u64);
            if now >= until {
                break;
            }
        }
        (now.0.as_secs(), pauses, Ok(()))
    }

    #[test]
    fn kills_without_progress_wait_longer_each_time_and_end_the_job() {
        let (ended, pauses, failed) = kill_each_launch(300, at(3600));
        assert_eq!((ended, failed), (398, Err(TooMany::Kills(21))));
        assert_eq!(pauses[..9], [0, 250, 500, 1000, 2000, 4000, 8000, 16000, 30000]);
        assert!(pauses[9..].iter().all(|&ms| ms == 30000));
    }

    #[test]
    fn kills_of_a_storm_count_once_per_back_off() {
        let mut restarts = Restarts::new(at(0), 3, Budget::default());
        let mut launch = 0;
        let mut kill = |ms, progress| {
            launch += 1;
            let now = Time(Duration::from_millis(ms));
            // Two more launches run beside it.
            let newest = LaunchId(launch + 2);
            restarts.count_kill(now, progress, LaunchId(launch), newest).unwrap();
            restarts.budget().kills_since_progress
        };
        // Two workers are killed together, and one that was started before.
        assert_eq!([kill(0, 0), kill(0, 0), kill(9000, 0)], [1, 1, 1]);
        // Ten kills per second for a minute.
        let counts: Vec<u32> = (90..690).map(|i| kill(100 * i, 0)).collect();
        assert_eq!((counts[0], counts[599]), (2, 9));
        // Progress refills the budget.
        assert_eq!(kill(69_000, 1), 1);
    }

    #[test]
    fn replacements_that_are_killed_at_once_wait_and_a_worker_that_has_worked_is_replaced_at_once()
    {
        let mut restarts = Restarts::new(at(0), 3, Budget::default());
        let (mut now, mut launch) = (at(1000), 0);
        // The job makes progress all the time.
        let mut kill = |slot, run_ms| {
            (now, launch) = (now + Duration::from_millis(run_ms), launch + 1);
            restarts.count_kill(now, launch, LaunchId(launch), LaunchId(launch)).unwrap();
            let start = restarts.delay_killed(now, slot);
            let pause = start.since(now);
            now = start;
            pause.as_millis()
        };
        assert_eq!(
            [0; 9].map(|_| kill(7, 150)),
            [0, 250, 500, 1000, 2000, 4000, 8000, 16000, 30000]
        );
        assert_eq!(kill(7, 150), 30_000);
        // Other slots are not concerned, and a worker that runs for some time ends the sequence.
        assert_eq!([kill(3, 0), kill(7, 5000), kill(7, 150), kill(3, 20_000)], [0, 0, 250, 0]);
    }

    #[test]
    fn a_failure_after_a_calm_time_is_replaced_at_once() {
        let mut restarts = Restarts::new(at(0), 9, Budget::default());
        assert_eq!(restarts.count(at(0), 0, &[]), Ok(at(0)));
        assert!(restarts.count(at(299), 0, &[]).unwrap() > at(299));
        assert_eq!(restarts.count(at(599), 0, &[]), Ok(at(599)));
    }

    #[test]
    fn progress_refills_the_budget_and_steps_that_are_made_again_do_not() {
        let mut restarts = Restarts::new(at(0), 2, Budget::default());
        for step in 1..=100 {
            assert!(restarts.count(at(step), step, &[]).is_ok(), "{step}");
        }
        // The state was lost: steps up to 100 have been made before.
        assert!(restarts.count(at(200), 5, &[]).is_ok());
        let mut next = Restarts::new(at(201), 2, restarts.budget());
        assert_eq!(next.count(at(201), 100, &[]), Err(TooMany::Failures(3)));
        assert_eq!(
            next.budget(),
            Budget { counted: 102, since_progress: 3, progress: 100, kills_since_progress: 0 }
        );
    }

    #[test]
    fn a_record_on_which_every_worker_fails_ends_the_job_though_it_makes_progress() {
        let records = |start, end| RecordRange { epoch: 0, start, end };
        let mut restarts = Restarts::new(at(0), 2, Budget::default());
        assert!(restarts.count(at(0), 1, &[records(0, 10)]).is_ok());
        assert!(restarts.count(at(1), 2, &[records(10, 20)]).is_ok());
        assert!(restarts.count(at(2), 3, &[records(30, 40), records(8, 9)]).is_ok());
        // Record 9 was part of the first failure alone, record 8 of two.
        assert!(restarts.count(at(3), 4, &[records(9, 10)]).is_ok());
        assert!(restarts.count(at(4), 5, &[RecordRange { epoch: 1, start: 0, end: 40 }]).is_ok());
        assert_eq!(restarts.count(at(5), 6, &[records(5, 9)]), Err(TooMany::OnRecord(3)));
    }
}
