//! Membership changes: what the history keeps of each, and the pause of the newest one, which its
//! members report with their first steps.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use elasticdl_proto::{Cause, Generation, MembershipChange, WorkerId};

use crate::job::event::Phases;
use crate::job::time::Time;

/// The membership changes of a job.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    newest: VecDeque<MembershipChange>,
    /// Number of workers that `newest` names.
    named: usize,
    /// The newest change, until its pause has been told.
    change: Option<Change>,
}

/// A membership change in progress: members have not committed their first step yet.
#[derive(Debug)]
struct Change {
    generation: Generation,
    published: Time,
    /// Survivors that have not reported their first step.
    waiting: BTreeSet<WorkerId>,
    /// Time of the first report.
    resumed: Option<Time>,
}

/// A change whose pause is final, and when the first member reported its first step.
pub(super) type Recovered = (Time, MembershipChange);

impl Changes {
    pub(super) fn restore(newest: Vec<MembershipChange>) -> Self {
        let named = newest.iter().map(MembershipChange::named).sum();
        Self { newest: newest.into(), named, change: None }
    }

    /// The newest changes, oldest first.
    pub(crate) fn all(&self) -> impl DoubleEndedIterator<Item = &MembershipChange> {
        self.newest.iter()
    }

    /// Those that the status shows, oldest first.
    pub(super) fn shown(&self) -> Vec<MembershipChange> {
        let hidden = self.newest.len().saturating_sub(SHOWN);
        self.newest.range(hidden..).cloned().collect()
    }

    /// Adds a published generation; `survivors` continue in it. Returns the change before, if its
    /// pause is known.
    pub(super) fn publish(
        &mut self,
        now: Time,
        record: MembershipChange,
        survivors: BTreeSet<WorkerId>,
    ) -> Option<Recovered> {
        let recovered = self.recovered();
        let generation = record.generation;
        self.change =
            Some(Change { generation, published: now, waiting: survivors, resumed: None });
        self.named += record.named();
        self.newest.push_back(record);
        while self.newest.len() > CHANGES_MAX
            || (self.named > NAMED_TOTAL_MAX && self.newest.len() > 1)
        {
            let oldest = self.newest.pop_front().expect("there is more than one");
            self.named -= oldest.named();
        }
        recovered
    }

    /// Notes that the newest generation formed at `step`. Returns its change, and when that was
    /// published if no member will report a pause.
    pub(super) fn form(&mut self, step: u64) -> Option<(&MembershipChange, Option<Time>)> {
        let record = self.newest.back_mut()?;
        record.at_step = step;
        let change = self.change.as_ref().filter(|change| change.waiting.is_empty());
        Some((record, change.map(|change| change.published)))
    }

    /// Notes `worker`'s first commit in `generation`; the longest pause of all members counts.
    /// Returns whether all survivors have reported, and the change if its pause is known only now,
    /// after the next change.
    pub(super) fn resume(
        &mut self,
        now: Time,
        worker: WorkerId,
        generation: Generation,
        phases: Phases,
    ) -> (bool, Option<Recovered>) {
        let newest_first = self.newest.iter_mut().rev();
        let record = newest_first.take_while(|r| r.generation >= generation).last();
        let timed =
            |r: &&mut MembershipChange| r.generation == generation && r.cause != Cause::Start;
        let Some(record) = record.filter(timed) else { return (false, None) };
        let gap = ms(phases.gap_us());
        let is_first = record.gap_ms.is_none();
        if record.gap_ms.is_none_or(|known| known < gap) {
            record_phases(record, gap, phases);
        }
        let Some(change) = self.change.as_mut().filter(|c| c.generation == generation) else {
            return (false, is_first.then(|| (now, record.clone())));
        };
        change.resumed.get_or_insert(now);
        change.waiting.remove(&worker);
        (change.waiting.is_empty(), None)
    }

    /// Whether the wait for further reports is over. A member that had never committed a step
    /// reports no pause.
    pub(crate) fn is_late(&self, now: Time) -> bool {
        let resumed = self.change.as_ref().and_then(|change| change.resumed);
        resumed.is_some_and(|at| now.since(at) >= RESUME_WAIT)
    }

    /// The newest change, whose pause is final now; given once, and only if a member has reported.
    pub(super) fn take_recovered(&mut self) -> Option<Recovered> {
        let recovered = self.recovered();
        self.change.take_if(|change| change.resumed.is_some());
        recovered
    }

    fn recovered(&self) -> Option<Recovered> {
        let Change { generation, resumed, .. } = self.change.as_ref()?;
        let record = self.newest.back().filter(|record| record.generation == *generation)?;
        Some(((*resumed)?, record.clone()))
    }
}

/// The log line about a pause.
pub(super) fn recovery_line(record: &MembershipChange) -> Option<String> {
    let known = record.phases().into_iter().filter_map(|(name, ms)| Some((name, ms?)));
    let phases: Vec<String> = known.map(|(name, ms)| format!("{name} {ms:.1}")).collect();
    Some(format!(
        "generation {} ({}): continued at step {}, {:.1} ms after the last step before the change \
         ({})",
        record.generation,
        record.cause.name(),
        record.at_step,
        record.gap_ms?,
        phases.join(", ")
    ))
}

fn record_phases(record: &mut MembershipChange, gap: f64, phases: Phases) {
    record.gap_ms = Some(gap);
    record.detect_ms = Some(ms(phases.detect_us));
    record.abort_ms = Some(ms(phases.abort_us));
    record.agree_ms = Some(ms(phases.agree_us));
    record.connect_ms = Some(ms(phases.connect_us));
    record.state_ms = Some(ms(phases.state_us));
    record.first_step_ms = Some(ms(phases.first_step_us));
}

fn ms(us: u64) -> f64 {
    us as f64 / 1000.0
}

const CHANGES_MAX: usize = 10_000;
/// A membership change can name every worker: all of them together name at most this many (except
/// the newest).
const NAMED_TOTAL_MAX: usize = 100_000;
const SHOWN: usize = 20;
/// After the first report of a change, how long further reports are awaited.
const RESUME_WAIT: Duration = Duration::from_secs(1);
