//! Heartbeats: which silent workers are lost.
//!
//! A silence has two ends. Either the worker is stopped or cut off, or this master is: its network
//! was away, or it was stopped itself. The ring tells which. Every heartbeat says whether its
//! worker waits for its neighbours, so:
//!
//! | members that were heard just now | a silent member is |
//! |---|---|
//! | none | not judged: this master is cut off from all of them |
//! | some, and one of them makes progress | alive: no step is committed without it |
//! | some, and all of them wait, or their group is broken | evicted |
//!
//! A member that waits may wait for a silent one that computes for long, so its wait has to be
//! longer than the longest usual step. A control thread sends heartbeats whatever its model
//! computes: slow is not silent.
//!
//! The same evidence decides about members whose stream ended; see
//! [`disconnected`](super::disconnected).

use std::time::Duration;

use elasticdl_proto::WorkerId;

use super::crew::Worker;
use super::job::{Job, Phase, Timer};
use super::stall::Stalled;
use super::time::Time;

impl Job {
    /// Sets the timer of the next look at heartbeats, as long as there are workers.
    pub(super) fn watch_silence(&mut self, now: Time) {
        if let Some(timeout) = self.spec.worker_timeout
            && !self.crew.workers.is_empty()
            && !self.has_timer(Timer::Silence)
        {
            self.timer(now + look_every(timeout), Timer::Silence);
        }
    }

    /// Evicts silent workers that the ring shows to be lost. `at`: when the look was due.
    pub(super) fn on_silence_due(&mut self, now: Time, at: Time) {
        let Some(timeout) = self.spec.worker_timeout else { return };
        if !matches!(self.phase, Phase::Running | Phase::Stopping) {
            return;
        }
        if now.0.saturating_sub(at.0) > look_every(timeout) {
            // This master itself was kept from running: what workers sent meanwhile has not been
            // read yet.
            for w in self.crew.workers.values_mut() {
                (w.heard, w.stalled) = (now, None);
            }
        }
        let lost: Vec<(WorkerId, Duration)> = self
            .crew
            .workers
            .iter()
            .filter_map(|(&id, w)| Some((id, self.lost_after(w, now, timeout)?)))
            .collect();
        for (worker, silence) in lost {
            self.evict(now, worker, &format!("was silent for {} ms", silence.as_millis()));
        }
        self.look_for_stalls(now, timeout);
        self.watch_silence(now);
        self.settle(now);
    }

    /// Whether the members that can be heard have all come to a standstill: they wait for those
    /// that can't, or their group is broken. `false` where no member can be heard. A heartbeat from
    /// before `after` shows nothing.
    pub(super) fn stands_still(&self, now: Time, after: Time) -> bool {
        let (Some(timeout), Some(beat)) = (self.spec.worker_timeout, self.spec.heartbeat()) else {
            let is_broken = self.group.is_broken() || self.group.broken.is_some();
            return is_broken && self.taking_part().next().is_some();
        };
        let heard = || {
            self.taking_part().map(|id| &self.crew.workers[&id]).filter(|w| w.is_heard(now, beat))
        };
        if !self.spec.work.trains() || heard().next().is_none() {
            return false;
        }
        if self.group.is_broken() || self.group.broken.is_some() {
            return true;
        }
        let long = (timeout / 2).max(self.longest_step());
        let waits =
            |s: Stalled| self.is_of_group(&s) && s.since_last_byte() >= long && s.last() >= after;
        heard().all(|w| w.stalled.is_some_and(waits))
    }

    /// The longest usual step of the members, in their models' code.
    fn longest_step(&self) -> Duration {
        let here = self.crew.members().filter_map(|(_, w)| w.pace.usual_us());
        let away = self.crew.launches.values().filter_map(|l| l.away?.known?.usual_us);
        Duration::from_micros(here.chain(away).max().unwrap_or_default())
    }

    /// For how long a worker was silent, if it is lost.
    fn lost_after(&self, w: &Worker, now: Time, timeout: Duration) -> Option<Duration> {
        let silence = now.0.saturating_sub(w.heard.0);
        let beat = self.spec.heartbeat().unwrap_or_default();
        if silence <= timeout + beat {
            return None;
        }
        // A worker that stops just before its next heartbeat has already been silent for one
        // interval.
        let limit = match (w.rank.is_some() || w.released, self.spec.work.trains()) {
            (true, true) if self.stands_still(now, w.heard + timeout + beat) => timeout + beat,
            // Without a master it ends by itself.
            (true, true) => self.spec.master_timeout.max(timeout) + RETURN_SLACK,
            // A worker that is no member holds nobody up.
            (false, true) => timeout.max(NEWCOMER_SILENCE) + beat,
            (_, false) => timeout + beat,
        };
        let heard = |other: &Worker| other.is_heard(now, beat);
        let is_cut_off = !self.crew.workers.values().any(heard);
        let limit = match is_cut_off {
            true => self.spec.master_timeout.max(timeout) + RETURN_SLACK,
            false => limit,
        };
        (silence > limit).then_some(silence)
    }
}

impl Worker {
    /// Whether its last heartbeats came in time.
    pub(super) fn is_heard(&self, now: Time, beat: Duration) -> bool {
        now.0.saturating_sub(self.heard.0) <= beat * FRESH_BEATS
    }
}

/// A silence is noticed this long after it has become too long, at most.
fn look_every(timeout: Duration) -> Duration {
    timeout / 20
}

/// A worker that has been heard within this many heartbeats is not silent.
const FRESH_BEATS: u32 = 2;
/// How long a worker that is no member yet may be silent.
const NEWCOMER_SILENCE: Duration = Duration::from_secs(10);
/// What a worker that found no master in time needs to end, and the news of it to arrive.
pub(super) const RETURN_SLACK: Duration = Duration::from_secs(2);
