//! Leader election: decides which master may hold the Lease. Pure: the Lease as read and the time
//! in, an action out.
//!
//! **Invariant:** clocks of different machines are never compared. The holder counts from the time
//! at which it sent its last renewal; a candidate counts from the time at which it saw that
//! renewal, which is later. So the holder stops before any candidate takes the Lease.

use std::time::Duration;

/// Content of a Lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LeaseSnapshot {
    /// Identity of the holder. `None`: the Lease was released.
    pub(super) holder: Option<String>,
    /// Time for which the Lease is valid without a renewal.
    pub(super) duration: Duration,
    /// Number of changes of the holder.
    pub(super) transitions: i32,
    /// Resource version; changes with each write of the Lease.
    pub(super) version: String,
}

/// A master that waits for the Lease.
#[derive(Debug)]
pub(super) struct Candidate {
    identity: String,
    /// The version that was seen last, and the time at which it was first seen.
    seen: Option<(String, Duration)>,
}

/// Next action of a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CandidateAction {
    Create,
    Take,
    Wait(Duration),
}

impl Candidate {
    pub(super) fn new(identity: String) -> Self {
        Self { identity, seen: None }
    }

    /// Decides on a Lease that was just read. `now` is the time since any fixed moment.
    /// `holder_has_ended`: the holder's processes have certainly ended.
    pub(super) fn decide(
        &mut self,
        now: Duration,
        snapshot: Option<&LeaseSnapshot>,
        holder_has_ended: bool,
    ) -> CandidateAction {
        let Some(snapshot) = snapshot else { return CandidateAction::Create };
        if holder_has_ended
            || snapshot.holder.as_ref().is_none_or(|holder| *holder == self.identity)
        {
            return CandidateAction::Take;
        }
        let since = match &self.seen {
            Some((version, since)) if *version == snapshot.version => *since,
            _ => {
                self.seen = Some((snapshot.version.clone(), now));
                now
            }
        };
        match snapshot.duration.saturating_sub(now.saturating_sub(since)) {
            Duration::ZERO => CandidateAction::Take,
            left => CandidateAction::Wait(left.min(POLL)),
        }
    }
}

/// The state of the master that holds the Lease.
#[derive(Debug)]
pub(super) struct Leadership {
    pub(super) identity: String,
    pub(super) transitions: i32,
    pub(super) version: String,
    /// Time at which the last accepted renewal was sent.
    renewed: Duration,
    /// Time at which the next renewal is due.
    due: Duration,
}

/// Next action of a holder whose renewal failed and that has read the Lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum LeaderAction {
    Create,
    /// Another master holds the Lease, or has held it since; its identity.
    Fenced(String),
    Renew,
}

impl Leadership {
    /// Creates the state from `snapshot`, an accepted write that was sent at `sent`.
    pub(super) fn new(identity: String, snapshot: LeaseSnapshot, sent: Duration) -> Self {
        let LeaseSnapshot { transitions, version, .. } = snapshot;
        Self { identity, transitions, version, renewed: sent, due: sent + RENEW }
    }

    /// Returns the time until which the holder may act.
    pub(super) fn until(&self) -> Duration {
        self.renewed + HOLD - MARGIN
    }

    /// Returns the time at which the Lease is to be renewed.
    pub(super) fn due(&self) -> Duration {
        self.due
    }

    /// Handles an accepted renewal that was sent at `sent`.
    pub(super) fn on_renewed(&mut self, sent: Duration, version: String) {
        (self.renewed, self.due, self.version) = (sent, sent + RENEW, version);
    }

    /// Handles a renewal that the server did not answer.
    pub(super) fn on_failed(&mut self, now: Duration) {
        self.due = now + RETRY;
    }

    /// Handles a Lease that has changed, and now has this content.
    pub(super) fn on_changed(&mut self, snapshot: Option<LeaseSnapshot>) -> LeaderAction {
        let Some(snapshot) = snapshot else { return LeaderAction::Create };
        let LeaseSnapshot { holder, transitions, version, .. } = snapshot;
        // Another master may have held the Lease in between; its actions are unknown here.
        let is_mine = holder.as_ref().is_none_or(|holder| *holder == self.identity);
        if !is_mine || transitions != self.transitions {
            return LeaderAction::Fenced(
                holder.unwrap_or_else(|| "another, which has ended".into()),
            );
        }
        self.version = version;
        LeaderAction::Renew
    }
}

/// Time for which a Lease is valid without a renewal.
pub(super) const HOLD: Duration = Duration::from_secs(45);
/// Interval at which a candidate reads the Lease.
const POLL: Duration = Duration::from_secs(5);
/// A holder stops this much before the end of the validity: its last request must have arrived, and
/// its clock may be slow.
const MARGIN: Duration = Duration::from_secs(5);
const RENEW: Duration = Duration::from_secs(15);
/// Delay after a failed renewal.
const RETRY: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn snapshot(holder: &str, version: &str) -> LeaseSnapshot {
        let holder = Some(holder.to_owned()).filter(|holder| !holder.is_empty());
        LeaseSnapshot { holder, duration: HOLD, transitions: 3, version: version.into() }
    }

    #[test]
    fn a_lease_is_taken_when_it_is_free_or_unchanged_for_its_duration() {
        let other = snapshot("other", "1");
        // Time, Lease as read, whether its holder has ended, and the expected action.
        type Row = (u64, Option<LeaseSnapshot>, bool, CandidateAction);
        let table: [(&str, Vec<Row>); 7] = [
            ("absent", vec![(7, None, false, CandidateAction::Create)]),
            ("released", vec![(7, Some(snapshot("", "1")), false, CandidateAction::Take)]),
            (
                "mine, though the answer was lost",
                vec![(7, Some(snapshot("me", "1")), false, CandidateAction::Take)],
            ),
            ("its holder has ended", vec![(7, Some(other.clone()), true, CandidateAction::Take)]),
            (
                "silent",
                vec![
                    (7, Some(other.clone()), false, CandidateAction::Wait(s(5))),
                    (50, Some(other.clone()), false, CandidateAction::Wait(s(2))),
                    (52, Some(other.clone()), false, CandidateAction::Take),
                ],
            ),
            (
                "renewed",
                vec![
                    (7, Some(other.clone()), false, CandidateAction::Wait(s(5))),
                    (51, Some(snapshot("other", "2")), false, CandidateAction::Wait(s(5))),
                    (95, Some(snapshot("other", "2")), false, CandidateAction::Wait(s(1))),
                    (96, Some(snapshot("other", "2")), false, CandidateAction::Take),
                ],
            ),
            (
                "taken by a third master",
                vec![
                    (0, Some(other), false, CandidateAction::Wait(s(5))),
                    (45, Some(snapshot("third", "9")), false, CandidateAction::Wait(s(5))),
                ],
            ),
        ];
        for (name, rows) in table {
            let mut candidate = Candidate::new("me".into());
            for (now, snapshot, holder_has_ended, expected) in rows {
                assert_eq!(
                    candidate.decide(s(now), snapshot.as_ref(), holder_has_ended),
                    expected,
                    "{name} at {now}"
                );
            }
        }
    }

    #[test]
    fn a_holder_stops_before_a_candidate_that_saw_its_renewal_starts() {
        let mut leadership = Leadership::new("me".into(), snapshot("me", "1"), s(100));
        assert_eq!((leadership.due(), leadership.until()), (s(115), s(140)));
        leadership.on_renewed(s(115), "2".into());
        assert_eq!((leadership.due(), leadership.until()), (s(130), s(155)));
        // The server is unreachable: the renewal is retried soon, and the holder does not act
        // after the validity has ended.
        leadership.on_failed(s(130));
        assert_eq!((leadership.due(), leadership.until()), (s(135), s(155)));
        // A candidate that saw the renewal at the moment at which it was sent waits longer than
        // that.
        let mut candidate = Candidate::new("other".into());
        let seen = snapshot("me", "2");
        assert_eq!(candidate.decide(s(115), Some(&seen), false), CandidateAction::Wait(POLL));
        assert_ne!(candidate.decide(leadership.until(), Some(&seen), false), CandidateAction::Take);
        // The server comes back before another master takes the Lease: the holder continues.
        leadership.on_renewed(s(300), "3".into());
        assert_eq!(leadership.until(), s(340));
    }

    #[test]
    fn a_changed_lease_fences_the_holder_unless_it_still_names_it() {
        let leadership = || Leadership::new("me".into(), snapshot("me", "1"), s(0));
        let changed_hands =
            |holder: &str| LeaseSnapshot { transitions: 4, ..snapshot(holder, "2") };
        let table = [
            (None, LeaderAction::Create),
            // An answer was lost, or another client has set a label.
            (Some(snapshot("me", "2")), LeaderAction::Renew),
            (Some(snapshot("", "2")), LeaderAction::Renew),
            (Some(changed_hands("other")), LeaderAction::Fenced("other".into())),
            (Some(changed_hands("")), LeaderAction::Fenced("another, which has ended".into())),
        ];
        for (read, expected) in table {
            assert_eq!(leadership().on_changed(read.clone()), expected, "{read:?}");
        }
        let mut mine = leadership();
        assert_eq!(mine.on_changed(Some(snapshot("me", "2"))), LeaderAction::Renew);
        assert_eq!(mine.version, "2");
    }
}
