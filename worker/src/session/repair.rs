//! How the ranks of a new group reach one state.
//!
//! A step is stable once any rank has committed the next one, because every member had to hold it
//! to contribute. So the survivors of any failure differ by at most one step. The highest step
//! wins: a rank that is one step behind receives that step's reduced gradient and applies it, and a
//! rank without state receives the state. No rank that has trained goes back, unless the group
//! gives up its state; that of an earlier creation does not count from then on.
//!
//! A donor sends stable steps only to joining workers, so a joiner that is one step ahead of a
//! survivor has that step's reduced gradient. If a joiner is ahead without it, the survivors' step
//! counts and the joiner receives their state.

use crate::session::header::{StateHeader, SyncHeader};
use crate::session::replicas::{Replica, Verdict, compare};

/// Transfers between the ranks of a new group before its first step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repair {
    /// Step of the common state; `None` if no rank has a state and the first rank creates it.
    pub step: Option<u64>,
    /// The rank that sends the last step's reduced gradient, and the ranks that apply it.
    pub result: Option<(usize, Vec<usize>)>,
    /// The rank that sends the state, and the ranks that receive it.
    pub state: Option<(usize, Vec<usize>)>,
}

/// Ranks at the highest step hold different states.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unequal {
    /// That step.
    pub step: u64,
    pub verdict: Verdict,
}

impl Repair {
    /// Derives the plan from the headers of all ranks, in rank order. The result is the same on
    /// every rank.
    ///
    /// # Errors
    /// Replicas differ, and some ranks must fail. A joiner's copy has no vote: it stems from
    /// another rank.
    pub fn plan(headers: &[SyncHeader]) -> Result<Self, Unequal> {
        // What a group has given up does not come back with a rank that it had lost before.
        let newest = headers.iter().filter(|h| h.state.is_some()).map(|h| h.created).max();
        let state = |header: &SyncHeader| header.state.filter(|_| Some(header.created) == newest);
        let mut states: Vec<Option<StateHeader>> = headers.iter().map(state).collect();
        drop_unsupported(&mut states);
        let Some(step) = states.iter().flatten().map(|s| s.step).max() else {
            let receivers = (1..headers.len()).collect();
            return Ok(Self { step: None, result: None, state: Some((0, receivers)) });
        };
        let at = |wanted: u64| -> Vec<usize> {
            (0..states.len()).filter(|&r| states[r].is_some_and(|s| s.step == wanted)).collect()
        };
        let tops = at(step);
        let replica = |state: &Option<StateHeader>| match state {
            Some(s) if s.step == step => Replica::State { digest: s.digest, votes: s.was_in_group },
            other => Replica::Other { has_state: other.is_some() },
        };
        if let Some(verdict) = compare(&states.iter().map(replica).collect::<Vec<_>>()) {
            return Err(Unequal { step, verdict });
        }
        let donor = tops.iter().copied().find(|&r| states[r].is_some_and(|s| s.has_result));
        let behind = step.checked_sub(1).map(at).unwrap_or_default();
        let served =
            |rank: usize| tops.contains(&rank) || (donor.is_some() && behind.contains(&rank));
        let receivers: Vec<usize> = (0..states.len()).filter(|&r| !served(r)).collect();
        // A rank that is behind and comes back later may have the only copy of a shard: it reaches
        // this step with the result alone, which those that receive the state keep for it.
        let is_divided = headers.iter().any(|header| header.owned.is_some());
        let is_needed = !behind.is_empty() || (is_divided && !receivers.is_empty());
        let result = donor.filter(|_| is_needed).map(|donor| (donor, behind));
        let state = (!receivers.is_empty()).then(|| (tops[0], receivers));
        Ok(Self { step: Some(step), result, state })
    }
}

/// Drops the states at the highest step if only joiners hold it, none of them has its reduced
/// gradient, and a rank that has trained is one step behind. The ranks that committed that step are
/// not in this group, and no rank has built upon it: a rank of this group that had committed it
/// would have its reduced gradient.
fn drop_unsupported(states: &mut [Option<StateHeader>]) {
    let Some(top) = states.iter().flatten().map(|s| s.step).max() else { return };
    let is_supported = |s: &StateHeader| s.step == top && (s.has_result || s.was_in_group);
    let is_behind = |s: &StateHeader| s.was_in_group && Some(s.step) == top.checked_sub(1);
    if states.iter().flatten().any(is_behind) && !states.iter().flatten().any(is_supported) {
        states.iter_mut().filter(|s| s.is_some_and(|s| s.step == top)).for_each(|s| *s = None);
    }
}

/// Drops the states of ranks whose kind of device differs from the first rank's. Those ranks leave,
/// and a differing state of theirs is no mismatch of the others.
pub(super) fn without_mismatched_devices(headers: &[SyncHeader]) -> Vec<SyncHeader> {
    let first = headers.first().is_some_and(|header| header.transport.gpu);
    let fits = |header: &&SyncHeader| header.transport.gpu == first;
    let state = |header| Some(header).filter(fits).and_then(|header| header.state);
    headers.iter().map(|header| SyncHeader { state: state(header), ..header.clone() }).collect()
}

#[cfg(test)]
mod tests {
    use elasticdl_tables::OwnedHeader;

    use super::*;
    use crate::session::transport_switch::TransportHeader;

    fn header(state: Option<(u64, u64, bool)>) -> SyncHeader {
        let state = state.map(|(step, digest, has_result)| StateHeader {
            step,
            digest,
            has_result,
            was_in_group: true,
        });
        SyncHeader { state, ..SyncHeader::default() }
    }

    fn joiner(step: u64, digest: u64, has_result: bool) -> SyncHeader {
        let state = Some(StateHeader { step, digest, has_result, was_in_group: false });
        SyncHeader { state, ..SyncHeader::default() }
    }

    #[test]
    fn the_first_rank_creates_the_state_if_no_rank_has_one() {
        let plan = Repair::plan(&[header(None), header(None)]);
        assert_eq!(plan, Ok(Repair { step: None, result: None, state: Some((0, vec![1])) }));
    }

    #[test]
    fn a_rank_one_step_behind_receives_the_result_and_a_joiner_the_state() {
        let headers = [
            header(Some((6, 1, true))),
            header(Some((7, 2, true))),
            header(None),
            header(Some((7, 2, true))),
        ];
        let plan = Repair::plan(&headers);
        assert_eq!(
            plan,
            Ok(Repair { step: Some(7), result: Some((1, vec![0])), state: Some((1, vec![2])) })
        );
    }

    #[test]
    fn a_joiner_keeps_the_result_for_ranks_with_shards_that_come_back() {
        let owned = Some(OwnedHeader::of_joiner(0, 1));
        let holder = SyncHeader { owned, ..header(Some((7, 2, true))) };
        let plan = Repair::plan(&[holder.clone(), header(None)]);
        let result = Some((0, Vec::new()));
        assert_eq!(plan, Ok(Repair { step: Some(7), result, state: Some((0, vec![1])) }));
        let plan = Repair::plan(&[holder.clone(), holder]);
        assert_eq!(plan, Ok(Repair { step: Some(7), result: None, state: None }));
    }

    #[test]
    fn without_a_retained_result_a_rank_one_step_behind_receives_the_state() {
        let headers = [header(Some((6, 1, true))), header(Some((7, 2, false)))];
        let plan = Repair::plan(&headers);
        assert_eq!(plan, Ok(Repair { step: Some(7), result: None, state: Some((1, vec![0])) }));
    }

    #[test]
    fn a_joiner_that_is_ahead_without_the_result_receives_the_survivors_state() {
        let survivors = [header(Some((6, 1, true))), header(Some((6, 1, false)))];
        let with = |joiner: SyncHeader| [&survivors[..], &[joiner]].concat();
        let back = Repair { step: Some(6), result: None, state: Some((0, vec![2])) };
        assert_eq!(Repair::plan(&with(joiner(7, 2, false))), Ok(back));
        // With the step's reduced gradient the joiner's state wins.
        let on = Repair { step: Some(7), result: Some((2, vec![0, 1])), state: None };
        assert_eq!(Repair::plan(&with(joiner(7, 2, true))), Ok(on));
        // So does the state of a rank that has trained, and of any rank at the same step.
        let with_trained = [with(joiner(7, 2, false)), vec![header(Some((7, 2, true)))]].concat();
        let on = Repair { step: Some(7), result: Some((3, vec![0, 1])), state: None };
        assert_eq!(Repair::plan(&with_trained), Ok(on));
        // Survivors that are further behind were cut off.
        let on = Repair { step: Some(8), result: None, state: Some((2, vec![0, 1])) };
        assert_eq!(Repair::plan(&with(joiner(8, 2, false))), Ok(on));
    }

    #[test]
    fn a_state_that_a_group_has_given_up_does_not_come_back() {
        let header = |step, created| SyncHeader { created, ..header(Some((step, 1, true))) };
        let back = Repair { step: Some(4), result: None, state: Some((1, vec![0])) };
        assert_eq!(Repair::plan(&[header(9, 1), header(4, 3), header(4, 3)]), Ok(back));
    }

    #[test]
    fn equal_states_need_no_transfer() {
        let plan = Repair::plan(&[header(Some((3, 9, true))), header(Some((3, 9, false)))]);
        assert_eq!(plan, Ok(Repair { step: Some(3), result: None, state: None }));
    }

    #[test]
    fn of_states_that_differ_at_the_highest_step_the_minority_fails() {
        let failing = |headers: &[SyncHeader]| {
            let Unequal { step, verdict } = Repair::plan(headers).unwrap_err();
            (step, verdict.failing, verdict.has_majority)
        };
        let state = |step, digest| header(Some((step, digest, true)));
        let two = [header(None), state(3, 9), state(3, 8), state(2, 1)];
        assert_eq!(failing(&two), (3, vec![1, 2, 3], false));
        let three = [state(3, 9), state(2, 1), state(3, 8), state(3, 9)];
        assert_eq!(failing(&three), (3, vec![2], true));
        let copies = [joiner(3, 8, false), state(3, 9), joiner(3, 8, true)];
        assert_eq!(failing(&copies), (3, vec![0, 2], true));
    }

    #[test]
    fn the_state_of_a_rank_on_another_kind_of_device_is_ignored() {
        let header = |digest, gpu| SyncHeader {
            state: Some(StateHeader { step: 3, digest, has_result: true, was_in_group: true }),
            transport: TransportHeader { gpu, failures: 0 },
            ..SyncHeader::default()
        };
        let headers = [header(1, true), header(2, false), header(1, true)];
        let found: Vec<_> = without_mismatched_devices(&headers)
            .iter()
            .map(|h| h.state.map(|s| s.digest))
            .collect();
        assert_eq!(found, [Some(1), None, Some(1)]);
        assert_eq!(without_mismatched_devices(&headers[1..2]), headers[1..2]);
    }
}
