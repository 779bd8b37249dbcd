//! Timing of the pause between a group's last commit and its first one in a new generation.

use std::time::Instant;

use elasticdl_proto::{Generation, Phases};

/// Stopwatch of one worker. Most times are those of the last attempt. Trouble and stop are those of
/// the first one: a regroup that fails is part of the pause that it was meant to end.
#[derive(Debug, Default)]
pub(crate) struct GapTimer {
    committed: Option<(Generation, Instant)>,
    trouble: Option<Instant>,
    stopped: Option<Instant>,
    membership: Option<Instant>,
    connected: Option<Instant>,
    repaired: Option<Instant>,
}

impl GapTimer {
    /// A sign of trouble at `at`: a link's error, or a membership that aborts the step. The control
    /// thread may have received the latter while the trainer thread computed. The earliest one
    /// counts.
    pub(crate) fn on_trouble(&mut self, at: Instant) {
        self.trouble = Some(self.trouble.map_or(at, |known| known.min(at)));
    }

    /// The trainer thread has left the collective call or the user's code, and its links are
    /// closed.
    pub(crate) fn on_stopped(&mut self, now: Instant) {
        self.trouble.get_or_insert(now);
        self.stopped.get_or_insert(now);
    }

    pub(crate) fn on_membership(&mut self, now: Instant) {
        self.on_stopped(now);
        self.membership = Some(now);
    }

    pub(crate) fn on_connected(&mut self, now: Instant) {
        self.connected = Some(now);
    }

    pub(crate) fn on_repaired(&mut self, now: Instant) {
        self.repaired = Some(now);
    }

    /// When the ranks have agreed on a state since the last commit.
    pub(crate) fn repaired_at(&self) -> Option<Instant> {
        self.repaired
    }

    /// A step was committed in `generation`. Returns the phases if it is the first one since the
    /// generation changed.
    pub(crate) fn on_commit(&mut self, generation: Generation, now: Instant) -> Option<Phases> {
        let Self { trouble, stopped, membership, connected, repaired, committed } =
            std::mem::replace(self, Self { committed: Some((generation, now)), ..Self::default() });
        let (last_generation, last_commit) = committed.filter(|(g, _)| *g != generation)?;
        debug_assert!(last_generation < generation, "generations grow");
        let moments = [trouble, stopped, membership, connected, repaired, Some(now)];
        let mut from = last_commit;
        let micros = moments.map(|moment| {
            let until = moment.unwrap_or(from).max(from);
            let phase = until.duration_since(from);
            from = until;
            phase.as_micros() as u64
        });
        let [detect_us, abort_us, agree_us, connect_us, state_us, first_step_us] = micros;
        Some(Phases { detect_us, abort_us, agree_us, connect_us, state_us, first_step_us })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn at(start: Instant, ms: u64) -> Instant {
        start + Duration::from_millis(ms)
    }

    /// A member of generation 1 whose last commit was at 20 ms.
    fn member(start: Instant) -> GapTimer {
        let mut gap = GapTimer::default();
        gap.on_membership(at(start, 0));
        gap.on_connected(at(start, 1));
        gap.on_repaired(at(start, 2));
        assert_eq!(gap.on_commit(Generation(1), at(start, 10)), None);
        assert_eq!(gap.on_commit(Generation(1), at(start, 20)), None);
        gap
    }

    #[test]
    fn the_phases_add_up_to_the_gap() {
        let start = Instant::now();
        let mut gap = member(start);
        gap.on_trouble(at(start, 23));
        gap.on_stopped(at(start, 24));
        gap.on_membership(at(start, 27));
        gap.on_connected(at(start, 28));
        gap.on_repaired(at(start, 30));
        let phases = Phases {
            detect_us: 3000,
            abort_us: 1000,
            agree_us: 3000,
            connect_us: 1000,
            state_us: 2000,
            first_step_us: 5000,
        };
        assert_eq!(gap.on_commit(Generation(2), at(start, 35)), Some(phases));
        assert_eq!(gap.on_commit(Generation(2), at(start, 40)), None);
    }

    #[test]
    fn a_membership_that_waited_for_the_users_code_counts_from_its_arrival() {
        let start = Instant::now();
        let mut gap = member(start);
        // The links broke at 26. The membership had arrived at 22, but is read afterwards.
        gap.on_trouble(at(start, 26));
        gap.on_stopped(at(start, 27));
        gap.on_trouble(at(start, 22));
        gap.on_membership(at(start, 28));
        let phases = gap.on_commit(Generation(2), at(start, 30)).unwrap();
        assert_eq!((phases.detect_us, phases.abort_us, phases.agree_us), (2000, 5000, 1000));
        assert_eq!((phases.connect_us, phases.state_us, phases.first_step_us), (0, 0, 2000));
    }

    #[test]
    fn a_failed_attempt_lengthens_the_agreement() {
        let start = Instant::now();
        let mut gap = member(start);
        gap.on_trouble(at(start, 21));
        gap.on_stopped(at(start, 22));
        gap.on_membership(at(start, 23));
        gap.on_connected(at(start, 24));
        gap.on_trouble(at(start, 25));
        gap.on_stopped(at(start, 26));
        gap.on_membership(at(start, 30));
        gap.on_connected(at(start, 31));
        gap.on_repaired(at(start, 32));
        let phases = gap.on_commit(Generation(3), at(start, 40)).unwrap();
        assert_eq!((phases.detect_us, phases.abort_us, phases.agree_us), (1000, 1000, 8000));
        assert_eq!((phases.connect_us, phases.state_us, phases.first_step_us), (1000, 1000, 8000));
    }

    #[test]
    fn a_switch_without_trouble_has_no_abort() {
        let start = Instant::now();
        let mut gap = member(start);
        gap.on_membership(at(start, 21));
        gap.on_connected(at(start, 22));
        gap.on_repaired(at(start, 23));
        let phases = gap.on_commit(Generation(2), at(start, 33)).unwrap();
        assert_eq!((phases.detect_us, phases.abort_us, phases.agree_us), (1000, 0, 0));
    }
}
