//! Who has not been heard for too long.
//!
//! A process that is stopped, or that the network has cut off, keeps its stream and its links open, and its neighbours
//! wait for it without end. It is silent, though: a worker's control thread beats whatever its model computes, so slow
//! is not silent.

use std::time::Duration;

use elasticdl_proto::WorkerId;

use super::job::{Job, Phase, Timer};
use super::time::Time;

impl Job {
    /// Looks at the silence of workers now and then, as long as there are some.
    pub(super) fn watch_silence(&mut self, now: Time) {
        if let Some(timeout) = self.spec.worker_timeout
            && !self.crew.workers.is_empty()
            && !self.has_timer(Timer::Silence)
        {
            self.timer(now + look_every(timeout), Timer::Silence);
        }
    }

    /// Takes out who was silent for longer than the timeout. `at`: when the look was due.
    pub(super) fn on_silence_due(&mut self, now: Time, at: Time) {
        let (Some(timeout), Some(beat)) = (self.spec.worker_timeout, self.spec.heartbeat()) else { return };
        if !matches!(self.phase, Phase::Running | Phase::Stopping) {
            return;
        }
        if now.0.saturating_sub(at.0) > look_every(timeout) {
            // This master itself was kept from running: what workers said meanwhile has not been read yet.
            for w in self.crew.workers.values_mut() {
                (w.heard, w.stalled) = (now, None);
            }
        }
        // A worker that stops just before it would have been heard has already been silent for a beat.
        let is_silent = |heard: Time| now.0.saturating_sub(heard.0) > timeout + beat;
        let silent: Vec<WorkerId> =
            self.crew.workers.iter().filter(|(_, w)| is_silent(w.heard)).map(|(&id, _)| id).collect();
        for worker in silent {
            self.evict(now, worker, &format!("was silent for {} ms", timeout.as_millis()));
        }
        self.look_for_stalls(now, timeout);
        self.watch_silence(now);
        self.settle(now);
    }
}

/// A silence is noticed this long after it has become too long, at most.
fn look_every(timeout: Duration) -> Duration {
    timeout / 20
}
