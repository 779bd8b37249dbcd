//! Who may hold a lease, decided. Pure: what was read and the time in, what to do out.
//!
//! **Invariant:** no two machines' clocks are compared. A holder counts from when it sent its last
//! renewal; who waits counts from when it saw that renewal, which is later. So the holder has
//! stopped before anybody else begins.

use std::time::Duration;

/// What a lease says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LeaseSnapshot {
    /// `None`: it was released.
    pub(super) holder: Option<String>,
    /// How long it is held without being renewed.
    pub(super) duration: Duration,
    /// How often it has changed hands.
    pub(super) transitions: i32,
    /// Changes whenever the lease does.
    pub(super) version: String,
}

/// One who wants a lease.
#[derive(Debug)]
pub(super) struct Candidate {
    identity: String,
    /// The version that was seen last, and since when.
    seen: Option<(String, Duration)>,
}

/// What one who wants a lease does.
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

    /// What to do about a lease that was read just now; `now` is the time since any fixed moment.
    /// `holder_has_ended`: its holder is known to have ended.
    pub(super) fn decide(
        &mut self,
        now: Duration,
        record: Option<&LeaseSnapshot>,
        holder_has_ended: bool,
    ) -> CandidateAction {
        let Some(record) = record else { return CandidateAction::Create };
        if holder_has_ended || record.holder.as_ref().is_none_or(|holder| *holder == self.identity)
        {
            return CandidateAction::Take;
        }
        let since = match &self.seen {
            Some((version, since)) if *version == record.version => *since,
            _ => {
                self.seen = Some((record.version.clone(), now));
                now
            }
        };
        match record.duration.saturating_sub(now.saturating_sub(since)) {
            Duration::ZERO => CandidateAction::Take,
            left => CandidateAction::Wait(left.min(POLL)),
        }
    }
}

/// One who holds a lease.
#[derive(Debug)]
pub(super) struct Leadership {
    pub(super) identity: String,
    pub(super) transitions: i32,
    pub(super) version: String,
    /// When the last renewal was sent that the server took.
    renewed: Duration,
    /// When the next one is due.
    due: Duration,
}

/// What a holder does about a lease that it could not renew, once it has read it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum LeaderAction {
    Create,
    /// Another holds it, or has held it since.
    Fenced(String),
    Renew,
}

impl Leadership {
    /// The server has taken `record`, sent at `sent`.
    pub(super) fn new(identity: String, record: LeaseSnapshot, sent: Duration) -> Self {
        let LeaseSnapshot { transitions, version, .. } = record;
        Self { identity, transitions, version, renewed: sent, due: sent + RENEW }
    }

    /// Until when the holder may act.
    pub(super) fn until(&self) -> Duration {
        self.renewed + HOLD - MARGIN
    }

    /// When the lease is to be renewed.
    pub(super) fn due(&self) -> Duration {
        self.due
    }

    /// The server has taken the renewal that was sent at `sent`.
    pub(super) fn on_renewed(&mut self, sent: Duration, version: String) {
        (self.renewed, self.due, self.version) = (sent, sent + RENEW, version);
    }

    /// The server could not be asked.
    pub(super) fn on_failed(&mut self, now: Duration) {
        self.due = now + RETRY;
    }

    /// The lease has changed, and says this now.
    pub(super) fn on_changed(&mut self, record: Option<LeaseSnapshot>) -> LeaderAction {
        let Some(record) = record else { return LeaderAction::Create };
        let LeaseSnapshot { holder, transitions, version, .. } = record;
        // Somebody may have come and gone meanwhile; what it has done is not known here.
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

/// How long a lease is held without being renewed.
pub(super) const HOLD: Duration = Duration::from_secs(45);
/// How often one who waits looks again.
const POLL: Duration = Duration::from_secs(5);
/// A holder stops so much earlier: what it has sent last must have arrived, and its clock may be
/// slow.
const MARGIN: Duration = Duration::from_secs(5);
const RENEW: Duration = Duration::from_secs(15);
/// After a renewal that failed.
const RETRY: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn record(holder: &str, version: &str) -> LeaseSnapshot {
        let holder = Some(holder.to_owned()).filter(|holder| !holder.is_empty());
        LeaseSnapshot { holder, duration: HOLD, transitions: 3, version: version.into() }
    }

    #[test]
    fn a_lease_is_taken_at_once_or_when_it_has_not_changed_for_its_duration() {
        let other = record("other", "1");
        // When, what is read, whether its holder has ended, and what follows.
        type Row = (u64, Option<LeaseSnapshot>, bool, CandidateAction);
        let table: [(&str, Vec<Row>); 7] = [
            ("absent", vec![(7, None, false, CandidateAction::Create)]),
            ("released", vec![(7, Some(record("", "1")), false, CandidateAction::Take)]),
            (
                "mine, though the answer was lost",
                vec![(7, Some(record("me", "1")), false, CandidateAction::Take)],
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
                    (51, Some(record("other", "2")), false, CandidateAction::Wait(s(5))),
                    (95, Some(record("other", "2")), false, CandidateAction::Wait(s(1))),
                    (96, Some(record("other", "2")), false, CandidateAction::Take),
                ],
            ),
            (
                "taken by a third one",
                vec![
                    (0, Some(other), false, CandidateAction::Wait(s(5))),
                    (45, Some(record("third", "9")), false, CandidateAction::Wait(s(5))),
                ],
            ),
        ];
        for (name, rows) in table {
            let mut candidate = Candidate::new("me".into());
            for (now, record, holder_has_ended, expected) in rows {
                assert_eq!(
                    candidate.decide(s(now), record.as_ref(), holder_has_ended),
                    expected,
                    "{name} at {now}"
                );
            }
        }
    }

    #[test]
    fn a_holder_stops_before_anybody_who_saw_its_renewal_begins() {
        let mut leadership = Leadership::new("me".into(), record("me", "1"), s(100));
        assert_eq!((leadership.due(), leadership.until()), (s(115), s(140)));
        leadership.on_renewed(s(115), "2".into());
        assert_eq!((leadership.due(), leadership.until()), (s(130), s(155)));
        // The server is away: tried again soon, and nothing is done once the time is over.
        leadership.on_failed(s(130));
        assert_eq!((leadership.due(), leadership.until()), (s(135), s(155)));
        // Who saw the renewal at the moment it was sent waits longer than that.
        let mut candidate = Candidate::new("other".into());
        let seen = record("me", "2");
        assert_eq!(candidate.decide(s(115), Some(&seen), false), CandidateAction::Wait(POLL));
        assert_ne!(candidate.decide(leadership.until(), Some(&seen), false), CandidateAction::Take);
        // And comes back before anybody else came: it goes on.
        leadership.on_renewed(s(300), "3".into());
        assert_eq!(leadership.until(), s(340));
    }

    #[test]
    fn a_lease_that_changed_is_another_masters_unless_it_is_plainly_ones_own() {
        let leadership = || Leadership::new("me".into(), record("me", "1"), s(0));
        let changed_hands = |holder: &str| LeaseSnapshot { transitions: 4, ..record(holder, "2") };
        let table = [
            (None, LeaderAction::Create),
            // An answer was lost, or somebody has put a label on it.
            (Some(record("me", "2")), LeaderAction::Renew),
            (Some(record("", "2")), LeaderAction::Renew),
            (Some(changed_hands("other")), LeaderAction::Fenced("other".into())),
            (Some(changed_hands("")), LeaderAction::Fenced("another, which has ended".into())),
        ];
        for (read, expected) in table {
            assert_eq!(leadership().on_changed(read.clone()), expected, "{read:?}");
        }
        let mut mine = leadership();
        assert_eq!(mine.on_changed(Some(record("me", "2"))), LeaderAction::Renew);
        assert_eq!(mine.version, "2");
    }
}
