//! `--autoscale`: how many workers pay.
//!
//! The policy measures the speed of the group, tries another number of workers, and keeps it or
//! goes back:
//!
//! ```text
//!  measure ──► try more ──they pay──► try more still …
//!     ▲           │ they don't
//!     │           ▼
//!     │        try fewer ──the others did not pay──► try fewer still …
//!     │           │ they did
//!     └─ pause ◄──┘ settled
//! ```
//!
//! A worker pays if it adds at least 60 % of what each of the workers before it makes on average;
//! one that adds less than 40 % is given back. In between, the number of workers stays as it is:
//! the same workers are not added and removed in turn. A trial changes the number by a quarter, and
//! by at least one pod. Workers are given up for a trial only if a larger group has not shown
//! before that they pay, or if the group has become slower since.
//!
//! **Invariant:** only a speed that was measured changes the number of workers: a group in which
//! not all of the wanted workers train, such as that of a job that waits for capacity, is left as
//! it is. A trial for which there is no capacity ends where it began.
//!
//! **Invariant:** each time that the policy settles after a measurement, the next pause is twice as
//! long, up to two hours.

use std::time::Duration;

use elasticdl_proto::Generation;

use crate::job::event::Committed;
use crate::job::spec::JobSpec;
use crate::job::text::counted;
use crate::job::time::Time;

/// The policy, with what it has found.
#[derive(Debug)]
pub(crate) struct Autoscale {
    min: u32,
    /// The user's limit: `max_workers`, or what the job was scaled to since.
    max: u32,
    max_workers: u32,
    per_pod: u32,
    /// Time that workers may take to join, before a trial ends.
    join_timeout: Duration,
    stage: Stage,
    window: Window,
    /// Records per second at which the present number of workers was found to pay.
    paid: Option<f64>,
    /// The next pause.
    pause: Duration,
    /// The last finding; empty before the first.
    finding: String,
}

/// What is measured.
#[derive(Debug)]
enum Stage {
    /// The present number of workers, before a trial.
    Measure,
    /// Nothing before this time.
    Settled(Time),
    /// Another number of workers.
    Trial(Trial),
}

/// A trial of another number of workers.
#[derive(Clone, Copy, Debug)]
struct Trial {
    /// Number of workers before it, and what they made, in records per second.
    from: u32,
    rate: f64,
    /// When it ends if its workers have not joined.
    give_up: Time,
}

/// The group, when it reports.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupSize {
    pub(crate) generation: Generation,
    /// Members that compute records.
    pub(crate) members: u32,
    pub(crate) wanted: u32,
    /// Workers that have, or had, their capacity.
    pub(crate) placed: u32,
    /// Whether a worker waits for capacity.
    pub(crate) is_full: bool,
}

/// What the policy decides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Decision {
    /// Number of workers from now on.
    pub(crate) wanted: u32,
    /// Why, for the user.
    pub(crate) why: String,
}

impl Autoscale {
    pub(crate) fn new(spec: &JobSpec) -> Self {
        Self {
            min: spec.min_workers,
            max: spec.max_workers,
            max_workers: spec.max_workers,
            per_pod: spec.workers_per_pod,
            join_timeout: spec.start_timeout * 2,
            stage: Stage::Measure,
            window: Window::default(),
            paid: None,
            pause: PAUSE_MIN,
            finding: String::new(),
        }
    }

    /// The most workers that the policy wants.
    pub(crate) fn max(&self) -> u32 {
        self.max
    }

    /// What the policy has found last; `None` before the first finding.
    pub(crate) fn finding(&self) -> Option<&str> {
        Some(&*self.finding).filter(|finding| !finding.is_empty())
    }

    /// The user wants `max` workers: the policy begins anew, and never wants more.
    pub(crate) fn limit(&mut self, max: u32) {
        (self.max, self.pause) = (max, PAUSE_MIN);
        self.restart();
    }

    /// The user changes the limits. A lower number that the job was scaled to stays the maximum.
    pub(crate) fn change_limits(&mut self, min: u32, max: u32) {
        let is_lower = self.max < self.max_workers;
        (self.min, self.max_workers) = (min, max);
        self.limit(if is_lower { self.max.clamp(min, max) } else { max });
    }

    /// Forgets what was measured: the group is another one.
    pub(crate) fn restart(&mut self) {
        (self.stage, self.window, self.paid) = (Stage::Measure, Window::default(), None);
        self.finding.clear();
    }

    /// Takes in a report of `steps` new steps. Returns a decision when one is due.
    pub(crate) fn observe(
        &mut self,
        now: Time,
        group: GroupSize,
        steps: u64,
        report: &Committed,
    ) -> Option<Decision> {
        let decision = match group.members == group.wanted && !group.is_full {
            true => self.judge(now, group, steps, report)?,
            false => self.give_up(now, group)?,
        };
        self.finding.clone_from(&decision.why);
        Some(decision)
    }

    /// Measures the group, and decides what follows.
    fn judge(
        &mut self,
        now: Time,
        group: GroupSize,
        steps: u64,
        report: &Committed,
    ) -> Option<Decision> {
        if let Stage::Settled(until) = self.stage {
            if now < until {
                return None;
            }
            self.stage = Stage::Measure;
        }
        let rate = self.window.measure(group.generation, steps, report)?;
        self.window = Window::default();
        let wanted = group.wanted;
        Some(match self.stage {
            Stage::Trial(trial) if trial.from < wanted => self.judge_more(now, trial, wanted, rate),
            Stage::Trial(trial) => self.judge_fewer(now, trial, wanted, rate),
            Stage::Measure | Stage::Settled(_) => {
                self.go_on(now, wanted, rate, &format!("{} {}", make(wanted), per_s(rate)))
            }
        })
    }

    /// Ends a trial of more workers that don't join.
    fn give_up(&mut self, now: Time, group: GroupSize) -> Option<Decision> {
        self.window = Window::default();
        let Stage::Trial(Trial { from, give_up, .. }) = self.stage else { return None };
        let is_late = now >= give_up;
        if from >= group.wanted || !(is_late || group.is_full) {
            return None;
        }
        let missing = match is_late {
            true => format!("{} have not joined", counted_workers(group.wanted)),
            false => format!("there is no capacity for {}", counted_workers(group.wanted)),
        };
        // Those that have their capacity can be tried.
        if !is_late && (from + 1..group.wanted).contains(&group.placed) {
            let why = format!("{missing}; trying {}", group.placed);
            return Some(Decision { wanted: group.placed, why });
        }
        self.stage = Stage::Settled(now + PAUSE_MIN);
        Some(Decision { wanted: from, why: format!("{missing}{}", stay(from, PAUSE_MIN)) })
    }

    fn judge_more(&mut self, now: Time, trial: Trial, wanted: u32, rate: f64) -> Decision {
        let Trial { from, rate: before, .. } = trial;
        let gain = rate / before - 1.0;
        let share = gain / (f64::from(wanted - from) / f64::from(from));
        let what = format!(
            "{} {}, {} than {from}",
            make(wanted),
            per_s(rate),
            percent(gain, ["more", "less"])
        );
        if share >= PAYS {
            self.paid = Some(rate);
            return self.go_on(now, wanted, rate, &format!("{what}, so they pay"));
        }
        let what = format!("{what}, so the further ones don't pay");
        match share < IDLE {
            true => self.go_on_with_fewer(now, from, before, &what),
            false => self.settle(now, from, &what),
        }
    }

    fn judge_fewer(&mut self, now: Time, trial: Trial, wanted: u32, rate: f64) -> Decision {
        let Trial { from, rate: before, .. } = trial;
        let loss = 1.0 - rate / before;
        let share = (before / rate - 1.0) / (f64::from(from - wanted) / f64::from(wanted));
        let what = format!(
            "{} {}, {} than {from}",
            make(wanted),
            per_s(rate),
            percent(loss, ["less", "more"])
        );
        if share < IDLE {
            self.paid = None;
            let what = format!("{what}, so the others did not pay");
            return self.go_on_with_fewer(now, wanted, rate, &what);
        }
        self.paid = Some(before);
        self.settle(now, from, &format!("{what}, so all {from} pay"))
    }

    /// Tries more than these workers, which make `rate`, or else fewer. `what` was found.
    fn go_on(&mut self, now: Time, from: u32, rate: f64, what: &str) -> Decision {
        let more = self.max.min(from.saturating_add(self.step(from)));
        match more > from {
            true => self.attempt(now, (from, rate), more, what),
            false => self.go_on_with_fewer(now, from, rate, what),
        }
    }

    /// Tries fewer than these workers, which make `rate`, unless they are known to pay.
    fn go_on_with_fewer(&mut self, now: Time, from: u32, rate: f64, what: &str) -> Decision {
        let fewer = self.min.max(from.saturating_sub(self.step(from)));
        let pay = self.paid.is_some_and(|paid| rate >= paid * STILL_PAYS);
        match fewer < from && !pay {
            true => self.attempt(now, (from, rate), fewer, what),
            false => self.settle(now, from, what),
        }
    }

    /// Tries another number of workers than those that make a rate.
    fn attempt(&mut self, now: Time, of: (u32, f64), wanted: u32, what: &str) -> Decision {
        let (from, rate) = of;
        self.stage = Stage::Trial(Trial { from, rate, give_up: now + self.join_timeout });
        Decision { wanted, why: format!("{what}; trying {wanted}") }
    }

    fn settle(&mut self, now: Time, wanted: u32, what: &str) -> Decision {
        let pause = self.pause;
        self.stage = Stage::Settled(now + pause);
        self.pause = (pause * 2).min(PAUSE_MAX);
        Decision { wanted, why: format!("{what}{}", stay(wanted, pause)) }
    }

    /// By how many workers a trial changes this number.
    fn step(&self, workers: u32) -> u32 {
        (workers / STEP_PART / self.per_pod * self.per_pod).max(self.per_pod)
    }
}

/// The speed of a group, in parts: most of them show it even if a few are disturbed, as by an
/// evaluation, the end of an epoch or other programs.
#[derive(Debug, Default)]
struct Window {
    generation: Generation,
    parts: Vec<Part>,
}

/// Steps of a part.
#[derive(Clone, Copy, Debug, Default)]
struct Part {
    steps: u64,
    records: f64,
    time: Duration,
}

impl Window {
    /// Adds a report of `steps` new steps. Returns the records per second once they are known.
    fn measure(&mut self, generation: Generation, steps: u64, report: &Committed) -> Option<f64> {
        if self.generation != generation {
            *self = Self { generation, parts: Vec::new() };
        }
        // The first step of a generation has no time of its own.
        let timed = report.times.steps.min(steps);
        if timed > 0 {
            if self.parts.last().is_none_or(Part::is_complete) {
                self.parts.push(Part::default());
            }
            let part = self.parts.last_mut().expect("one was pushed");
            part.steps += timed;
            part.records += report.records as f64 * timed as f64 / steps as f64;
            part.time += Duration::from_micros(report.times.step_us);
        }
        let is_complete = self.parts.len() >= PARTS && self.parts.last()?.is_complete();
        // In the first one, new workers warm up.
        let mut rates: Vec<f64> =
            self.parts.iter().skip(1).filter(|_| is_complete).map(Part::rate).collect();
        rates.sort_by(f64::total_cmp);
        rates.get(rates.len() / 2).copied().filter(|rate| rate.is_normal())
    }
}

impl Part {
    fn is_complete(&self) -> bool {
        self.steps >= PART_STEPS && self.time >= PART_TIME
    }

    fn rate(&self) -> f64 {
        self.records / self.time.as_secs_f64()
    }
}

fn counted_workers(workers: u32) -> String {
    counted(workers.into(), "worker")
}

fn make(workers: u32) -> String {
    let verb = if workers == 1 { "makes" } else { "make" };
    format!("{} {verb}", counted_workers(workers))
}

fn per_s(rate: f64) -> String {
    let decimals = if rate < 100.0 { 1 } else { 0 };
    format!("{rate:.decimals$} records/s")
}

/// A share, with the word for a positive or a negative one.
fn percent(share: f64, [more, less]: [&str; 2]) -> String {
    let word = if share < 0.0 { less } else { more };
    format!("{:.0} % {word}", share.abs() * 100.0)
}

/// That this number of workers is kept.
fn stay(workers: u32, pause: Duration) -> String {
    let verb = if workers == 1 { "stays" } else { "stay" };
    format!("; {workers} {verb}, to be measured again in {} min", pause.as_secs() / 60)
}

/// What a worker adds that pays, as a part of what each of the others makes.
const PAYS: f64 = 0.6;
/// A worker that adds less is given back.
const IDLE: f64 = 0.4;
/// Workers that have paid still do at this part of the speed that they had.
const STILL_PAYS: f64 = 0.9;
/// A trial changes the number of workers by one in so many.
const STEP_PART: u32 = 4;
/// Parts of a measurement, with the first one, which is dropped.
const PARTS: usize = 6;
const PART_STEPS: u64 = 3;
const PART_TIME: Duration = Duration::from_secs(1);
const PAUSE_MIN: Duration = Duration::from_secs(600);
const PAUSE_MAX: Duration = Duration::from_secs(7200);

#[cfg(test)]
mod tests;
