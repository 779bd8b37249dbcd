//! What is remembered of a job's course, for its status and its summary.
//!
//! **Invariant:** nothing here grows without limit, and nothing here decides anything.

use std::collections::VecDeque;
use std::time::Duration;

use elasticdl_proto::{Generation, WorkerId};

use super::event::Phases;
use super::summary::{FailedShard, LossSummary, MembershipRecord, ThroughputSummary};
use super::time::Time;

/// A job's course.
#[derive(Debug, Default)]
pub(super) struct Story {
    events: VecDeque<String>,
    memberships: VecDeque<MembershipRecord>,
    failed_shards: Vec<FailedShard>,
    loss: LossSummary,
    loss_smoothed: Option<f64>,
    /// Records committed by the group's reports so far, at these times; the newest last.
    samples: VecDeque<(Time, u64)>,
    committed: u64,
    formed_first: Option<Time>,
    reported_last: Time,
    /// The largest group that formed.
    pub(super) peak: u32,
    /// Launches in the place of an ended one.
    pub(super) restarts: u64,
    /// Why the job failed or was refused.
    pub(super) error: Option<String>,
}

impl Story {
    pub(super) fn say(&mut self, line: &str) {
        if self.events.len() == EVENTS_MAX {
            self.events.pop_front();
        }
        self.events.push_back(line.to_owned());
    }

    pub(super) fn events(&self) -> Vec<String> {
        self.events.iter().cloned().collect()
    }

    pub(super) fn publish(&mut self, record: MembershipRecord) {
        if self.memberships.len() == MEMBERSHIPS_MAX {
            self.memberships.pop_front();
        }
        self.memberships.push_back(record);
    }

    /// The newest generation formed at `step`.
    pub(super) fn form(&mut self, now: Time, step: u64) {
        self.formed_first.get_or_insert(now);
        if let Some(record) = self.memberships.back_mut() {
            record.at_step = step;
            self.peak = self.peak.max(record.world_size);
        }
    }

    /// A member's first commit in `generation`; the one that lost the most time counts. Returns the gap in milliseconds
    /// of the first one.
    pub(super) fn resume(&mut self, generation: Generation, phases: Phases) -> Option<f64> {
        let record = self.memberships.iter_mut().rev().find(|r| r.generation == generation)?;
        let gap = ms(phases.gap_us());
        if record.cause == super::Cause::Start || record.gap_ms.is_some_and(|known| known >= gap) {
            return None;
        }
        let first = record.gap_ms.replace(gap).is_none();
        record.detect_ms = Some(ms(phases.detect_us));
        record.agree_ms = Some(ms(phases.agree_us));
        record.connect_ms = Some(ms(phases.connect_us));
        record.state_ms = Some(ms(phases.state_us));
        record.first_step_ms = Some(ms(phases.first_step_us));
        first.then_some(gap)
    }

    /// The group committed `records` more, with this sum of losses.
    pub(super) fn commit(&mut self, now: Time, records: u64, loss_sum: f64) {
        self.committed = self.committed.saturating_add(records);
        self.reported_last = now;
        if records > 0 {
            let loss = loss_sum / records as f64;
            self.loss.first.get_or_insert(loss);
            self.loss.last = Some(loss);
            let before = self.loss_smoothed.filter(|l| l.is_finite()).unwrap_or(loss);
            self.loss_smoothed = Some(before + (loss - before) * LOSS_SMOOTHING);
        }
        match self.samples.back_mut() {
            Some((at, committed)) if now.since(*at) < SAMPLE_EVERY => *committed = self.committed,
            _ => self.samples.push_back((now, self.committed)),
        }
        while self.samples.len() > 2 && now.since(self.samples[1].0) >= RATE_WINDOW {
            self.samples.pop_front();
        }
    }

    /// Records committed per second over the last few seconds.
    pub(super) fn records_per_s(&self, now: Time) -> f64 {
        let oldest = self.samples.iter().find(|(at, _)| now.since(*at) <= RATE_WINDOW);
        let (since, committed) = match (oldest, self.formed_first) {
            (Some(&(at, committed)), Some(formed)) => {
                let first = self.samples.front().is_some_and(|(first, _)| *first == at);
                // The first report's records were made since the group formed.
                if first && now.since(formed) <= RATE_WINDOW { (formed, 0) } else { (at, committed) }
            }
            _ => return 0.0,
        };
        per_second(self.committed - committed, now.since(since))
    }

    pub(super) fn loss(&self) -> LossSummary {
        self.loss
    }

    pub(super) fn loss_smoothed(&self) -> Option<f64> {
        self.loss_smoothed
    }

    /// `counted` records and `steps` over the time from the first group's start to the last report.
    pub(super) fn throughput(&self, counted: u64, steps: u64) -> ThroughputSummary {
        let Some(formed) = self.formed_first else {
            return ThroughputSummary::default();
        };
        let span = self.reported_last.since(formed);
        ThroughputSummary { records_per_s: per_second(counted, span), steps_per_s: per_second(steps, span) }
    }

    /// Remembers what the user's code failed on; returns whether there was room.
    pub(super) fn fail_on(&mut self, shard: FailedShard) -> bool {
        let room = self.failed_shards.len() < FAILED_SHARDS_MAX;
        if room {
            self.failed_shards.push(shard);
        }
        room
    }

    pub(super) fn failed_shards(&self) -> Vec<FailedShard> {
        self.failed_shards.clone()
    }

    pub(super) fn memberships(&self) -> Vec<MembershipRecord> {
        self.memberships.iter().cloned().collect()
    }
}

/// `text` up to a length at which it can be kept and shown.
pub(super) fn clip(text: &str) -> &str {
    let len = (0..=TEXT_BYTES_MAX.min(text.len())).rev().find(|&i| text.is_char_boundary(i));
    &text[..len.expect("0 is a boundary")]
}

/// `worker 3` or `workers 1, 2 and 4`; of very many the first.
pub(super) fn name_all(workers: &[WorkerId]) -> String {
    let shown: Vec<String> = workers.iter().take(NAMED_MAX).map(ToString::to_string).collect();
    match (shown.as_slice(), workers.len() - shown.len()) {
        ([one], 0) => format!("worker {one}"),
        ([first @ .., last], 0) => format!("workers {} and {last}", first.join(", ")),
        (all, more) => format!("workers {} and {more} more", all.join(", ")),
    }
}

fn ms(us: u64) -> f64 {
    us as f64 / 1000.0
}

fn per_second(count: u64, span: Duration) -> f64 {
    if span.is_zero() { 0.0 } else { count as f64 / span.as_secs_f64() }
}

const EVENTS_MAX: usize = 20;
const MEMBERSHIPS_MAX: usize = 10_000;
const FAILED_SHARDS_MAX: usize = 100;
const TEXT_BYTES_MAX: usize = 4096;
const NAMED_MAX: usize = 8;
const LOSS_SMOOTHING: f64 = 0.2;
const SAMPLE_EVERY: Duration = Duration::from_millis(100);
const RATE_WINDOW: Duration = Duration::from_secs(5);
