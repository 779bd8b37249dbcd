//! Where the time went between a group's last commit and its first one in a new generation.

use std::time::Instant;

use elasticdl_proto::Generation;

use crate::messages::Phases;

/// Stopwatch of one worker. Moments are those of the last attempt, save for the error, which is the first one.
#[derive(Debug, Default)]
pub(crate) struct Gap {
    committed: Option<(Generation, Instant)>,
    error: Option<Instant>,
    membership: Option<Instant>,
    connected: Option<Instant>,
    repaired: Option<Instant>,
}

impl Gap {
    pub(crate) fn on_error(&mut self, now: Instant) {
        self.error.get_or_insert(now);
    }

    pub(crate) fn on_membership(&mut self, now: Instant) {
        self.error.get_or_insert(now);
        self.membership = Some(now);
    }

    pub(crate) fn on_connected(&mut self, now: Instant) {
        self.connected = Some(now);
    }

    pub(crate) fn on_repaired(&mut self, now: Instant) {
        self.repaired = Some(now);
    }

    /// A step was committed in `generation`; if it is the first one since this worker saw the generation change, the
    /// phases.
    pub(crate) fn on_commit(&mut self, generation: Generation, now: Instant) -> Option<Phases> {
        let Self { error, membership, connected, repaired, committed } =
            std::mem::replace(self, Self { committed: Some((generation, now)), ..Self::default() });
        let (last_generation, last_commit) = committed.filter(|(g, _)| *g != generation)?;
        debug_assert!(last_generation < generation, "generations grow");
        let moments = [error, membership, connected, repaired, Some(now)];
        let mut from = last_commit;
        let micros = moments.map(|moment| {
            let until = moment.unwrap_or(from).max(from);
            let phase = until.duration_since(from);
            from = until;
            phase.as_micros() as u64
        });
        let [detect_us, agree_us, connect_us, state_us, first_step_us] = micros;
        Some(Phases { detect_us, agree_us, connect_us, state_us, first_step_us })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_phases_of_a_gap_add_up_to_it() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let place = Generation;
        let mut gap = Gap::default();
        gap.on_membership(at(0));
        gap.on_connected(at(1));
        gap.on_repaired(at(2));
        assert_eq!(gap.on_commit(place(1), at(10)), None);
        assert_eq!(gap.on_commit(place(1), at(20)), None);
        gap.on_error(at(23));
        gap.on_error(at(24));
        gap.on_membership(at(27));
        gap.on_connected(at(28));
        gap.on_repaired(at(30));
        let phases =
            Phases { detect_us: 3000, agree_us: 4000, connect_us: 1000, state_us: 2000, first_step_us: 5000 };
        assert_eq!(gap.on_commit(place(2), at(35)), Some(phases));
        assert_eq!(gap.on_commit(place(2), at(40)), None);
    }
}
