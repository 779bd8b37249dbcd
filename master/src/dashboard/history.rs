//! The history of a job for its dashboard: curves over time, evaluations, membership changes,
//! events and lifetimes of workers.
//!
//! It is built from snapshots of the job. A master that resumes a job continues the history that
//! the former one has stored.
//!
//! **Invariants:** no IO and no clock: the age of the job is part of each snapshot. Everything here
//! is bounded: curves and evaluations lose resolution, the rest loses its oldest entries.

mod curves;
mod goodput;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use elasticdl_proto::{Evaluated, MembershipChange, Status, WorkerId};
use serde::{Deserialize, Serialize};

pub(crate) use self::curves::Curves;
use self::curves::Point;
use self::goodput::Goodput;
use crate::job::{Snapshot, WorkerLifetime};

/// The history of a job. Times are seconds of the job's age. The names of its fields are read by
/// the page.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct History {
    /// Options of the job and of its program.
    pub(crate) options: Vec<(String, String)>,
    /// When the job began, in seconds since the Unix epoch.
    pub(crate) began_s: Option<f64>,
    pub(crate) curves: Curves,
    pub(crate) evaluations: Vec<EvaluationAt>,
    pub(crate) memberships: VecDeque<MembershipAt>,
    pub(crate) events: VecDeque<EventAt>,
    pub(crate) workers: BTreeMap<WorkerId, WorkerLifetime>,
    pub(crate) goodput: Goodput,
    /// Number of evaluations per entry of `evaluations`.
    evaluation_stride: u64,
    evaluations_seen: u64,
    /// What former masters have noted of workers.
    #[serde(skip)]
    earlier: BTreeMap<WorkerId, WorkerLifetime>,
    /// The table that `workers` was made from.
    #[serde(skip)]
    known: Option<Arc<BTreeMap<WorkerId, WorkerLifetime>>>,
    /// Number of event lines of the last master that `events` has or had.
    events_seen: u64,
}

/// An evaluation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct EvaluationAt {
    pub(crate) at_s: f64,
    #[serde(flatten)]
    pub(crate) evaluated: Evaluated,
}

/// A membership change.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct MembershipAt {
    /// When it was published; `None` if that is not known.
    pub(crate) at_s: Option<f64>,
    #[serde(flatten)]
    pub(crate) change: MembershipChange,
}

/// A line about an event.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct EventAt {
    pub(crate) at_s: f64,
    pub(crate) text: String,
}

/// What the page says of a job's start.
#[derive(Debug)]
pub(crate) struct JobOptions {
    /// Since the Unix epoch.
    pub(crate) began: Duration,
    /// Options of the job and of its program, with their values.
    pub(crate) options: Vec<(String, String)>,
}

impl History {
    /// The history that a former master has stored, for its successor to continue.
    pub(crate) fn resumed(self) -> Self {
        let earlier = self.workers.clone();
        let mut resumed = Self { earlier, known: None, events_seen: 0, ..self };
        resumed.goodput.resume();
        resumed
    }

    /// Adds when the job began, and its options.
    pub(crate) fn of_job(&mut self, JobOptions { began, options }: JobOptions) {
        self.began_s = Some(rounded(began.as_secs_f64()));
        self.options = options;
    }

    /// A history of which only the membership changes are known, without their times.
    pub(crate) fn of_memberships(changes: Vec<MembershipChange>) -> Self {
        let changes = changes.into_iter().map(|change| MembershipAt { at_s: None, change });
        let mut history = Self { memberships: changes.collect(), ..Self::default() };
        history.limit_memberships();
        history
    }

    /// Adds what a snapshot has in addition to the former ones.
    pub(crate) fn observe(&mut self, snapshot: &Snapshot) {
        self.goodput.observe(snapshot);
        self.observe_status(snapshot.at.0.as_secs_f64(), &snapshot.status);
        self.observe_workers(&snapshot.lifetimes);
    }

    /// Adds what the status of a job of this age has.
    pub(super) fn observe_status(&mut self, at_s: f64, status: &Status) {
        let at_s = rounded(at_s);
        if status.step > 0 || status.records_counted > 0 {
            self.curves.add(Point {
                at_s,
                step: status.step,
                samples: 1,
                loss: status.loss.filter(|loss| loss.is_finite()),
                learning_rate: status.learning_rate.filter(|rate| rate.is_finite()),
                records_per_s: status.records_per_s,
                workers: status.members().count() as f64,
            });
        }
        self.observe_evaluation(at_s, status);
        self.observe_memberships(at_s, status);
        self.observe_events(at_s, status);
    }

    /// Gives up about half of what is known, the oldest first.
    pub(super) fn halve(&mut self) {
        self.curves.halve();
        let half = self.events.len() / 2;
        self.events.drain(..half);
        let half = self.memberships.len() / 2;
        self.memberships.drain(..half);
        self.thin_evaluations();
        let ended = self.workers.iter().filter(|(_, lifetime)| lifetime.ended_s.is_some());
        let ended: Vec<WorkerId> = ended.map(|(id, _)| *id).collect();
        let half = if ended.len() > 1 { ended.len() / 2 } else { self.workers.len() / 2 };
        let oldest = if ended.len() > 1 { ended } else { self.workers.keys().copied().collect() };
        oldest.iter().take(half).for_each(|id| drop(self.workers.remove(id)));
    }

    fn thin_evaluations(&mut self) {
        let mut number = 0;
        self.evaluations.retain(|_| {
            number += 1;
            number % 2 == 1
        });
        self.evaluation_stride = self.evaluation_stride.max(1) * 2;
    }

    fn observe_evaluation(&mut self, at_s: f64, status: &Status) {
        let Some(evaluated) = &status.evaluated else { return };
        let stride = self.evaluation_stride.max(1);
        if let Some(newest) = self.evaluations.last_mut() {
            if newest.evaluated == *evaluated {
                return;
            }
            // Between the entries that stay, the last one is always the newest evaluation.
            if !self.evaluations_seen.is_multiple_of(stride) {
                *newest = EvaluationAt { at_s, evaluated: evaluated.clone() };
                self.evaluations_seen += 1;
                return;
            }
        }
        self.evaluations.push(EvaluationAt { at_s, evaluated: evaluated.clone() });
        self.evaluations_seen += 1;
        if self.evaluations.len() > EVALUATIONS_MAX {
            self.thin_evaluations();
        }
    }

    fn observe_memberships(&mut self, at_s: f64, status: &Status) {
        for change in &status.memberships {
            let is_same = |known: &MembershipAt| known.change.generation == change.generation;
            let newest = self.memberships.back().map(|newest| newest.change.generation);
            match self.memberships.iter().rposition(is_same) {
                Some(at) if self.memberships[at].change == *change => {}
                Some(at) => self.memberships[at].change = change.clone(),
                // A change that is older than the newest one was dropped here.
                None if newest.is_some_and(|newest| newest > change.generation) => {}
                None => {
                    let change = change.clone();
                    self.memberships.push_back(MembershipAt { at_s: Some(at_s), change });
                }
            }
        }
        self.limit_memberships();
    }

    fn limit_memberships(&mut self) {
        let mut named: usize = self.memberships.iter().map(|known| known.change.named()).sum();
        while self.memberships.len() > MEMBERSHIPS_MAX
            || (named > NAMED_MAX && self.memberships.len() > 1)
        {
            named -= self.memberships.pop_front().map_or(0, |oldest| oldest.change.named());
        }
    }

    fn observe_events(&mut self, at_s: f64, status: &Status) {
        let new = status.events_emitted.saturating_sub(self.events_seen);
        self.events_seen = status.events_emitted;
        let skipped =
            status.events.len().saturating_sub(usize::try_from(new).unwrap_or(usize::MAX));
        for text in status.events.iter().skip(skipped) {
            self.events.push_back(EventAt { at_s, text: text.clone() });
        }
        let surplus = self.events.len().saturating_sub(EVENTS_MAX);
        self.events.drain(..surplus);
    }

    fn observe_workers(&mut self, table: &Arc<BTreeMap<WorkerId, WorkerLifetime>>) {
        if self.known.as_ref().is_some_and(|known| Arc::ptr_eq(known, table)) {
            return;
        }
        for (id, lifetime) in table.iter() {
            let whole = match self.earlier.get(id) {
                Some(earlier) => lifetime.after(earlier),
                None => lifetime.clone(),
            };
            self.workers.insert(*id, whole);
        }
        // The oldest workers that have ended, then the oldest of all.
        for must_have_ended in [true, false] {
            let surplus = self.workers.len().saturating_sub(LIFETIMES_MAX);
            let may_go = |lifetime: &WorkerLifetime| !must_have_ended || lifetime.ended_s.is_some();
            let oldest = self.workers.iter().filter(|(_, lifetime)| may_go(lifetime));
            let oldest: Vec<WorkerId> = oldest.map(|(id, _)| *id).take(surplus).collect();
            oldest.iter().for_each(|id| drop(self.workers.remove(id)));
        }
        self.known = Some(Arc::clone(table));
    }
}

/// A number of seconds, rounded to milliseconds.
fn rounded(seconds: f64) -> f64 {
    (seconds * 1000.0).round() / 1000.0
}

const EVALUATIONS_MAX: usize = 400;
const EVENTS_MAX: usize = 200;
const MEMBERSHIPS_MAX: usize = 500;
/// Number of workers that the membership changes name together.
const NAMED_MAX: usize = 10_000;
const LIFETIMES_MAX: usize = 500;

#[cfg(test)]
mod tests;
