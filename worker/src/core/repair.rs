//! How a new group comes to one state.
//!
//! A step is stable once the next one has committed anywhere, since every member had to hold it to
//! contribute; so the survivors of any failure differ by at most one step. The highest step wins. A
//! rank that is one step behind receives that step's reduced gradient and applies it; a rank
//! without state receives the state. No rank that has trained goes back.
//!
//! A donor gives newcomers stable steps only, so a newcomer that is a step ahead of a survivor has
//! that step's reduced gradient. A newcomer that is ahead without it is not followed: the
//! survivors' step counts, and the newcomer receives it.

use crate::core::header::{StateHeader, SyncHeader};

/// What the ranks of a new group send one another before their first step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repair {
    /// Who has the state that all will have: `None` where nobody has one and the first rank makes
    /// it.
    pub step: Option<u64>,
    /// The rank that sends the last step's reduced gradient, and those that apply it.
    pub result: Option<(usize, Vec<usize>)>,
    /// The rank that sends the state, and those that take it.
    pub state: Option<(usize, Vec<usize>)>,
}

/// Two ranks are at the same step with different states: a defect, or a model that is not
/// deterministic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateMismatch {
    pub step: u64,
    /// The ranks that differ from the lowest one.
    pub ranks: Vec<usize>,
    /// The rank that they differ from.
    pub from: usize,
}

impl Repair {
    /// Decides from all ranks' headers, in rank order; the same on every rank.
    pub fn plan(headers: &[SyncHeader]) -> Result<Self, StateMismatch> {
        let mut states: Vec<Option<StateHeader>> = headers.iter().map(|h| h.state).collect();
        drop_unsupported(&mut states);
        let Some(step) = states.iter().flatten().map(|s| s.step).max() else {
            let takers = (1..headers.len()).collect();
            return Ok(Self { step: None, result: None, state: Some((0, takers)) });
        };
        let at = |wanted: u64| -> Vec<usize> {
            (0..states.len()).filter(|&r| states[r].is_some_and(|s| s.step == wanted)).collect()
        };
        let tops = at(step);
        let digest = |rank: usize| states[rank].map(|s| s.digest);
        let differing: Vec<usize> =
            tops.iter().copied().filter(|&r| digest(r) != digest(tops[0])).collect();
        if !differing.is_empty() {
            return Err(StateMismatch { step, ranks: differing, from: tops[0] });
        }
        let donor = tops.iter().copied().find(|&r| states[r].is_some_and(|s| s.has_result));
        let behind = step.checked_sub(1).map(at).unwrap_or_default();
        let result = donor.filter(|_| !behind.is_empty()).map(|donor| (donor, behind.clone()));
        let served =
            |rank: usize| tops.contains(&rank) || (result.is_some() && behind.contains(&rank));
        let takers: Vec<usize> = (0..states.len()).filter(|&r| !served(r)).collect();
        let state = (!takers.is_empty()).then(|| (tops[0], takers));
        Ok(Self { step: Some(step), result, state })
    }
}

/// Drops the highest step where only newcomers hold it, none of them can hand on its reduced
/// gradient, and a rank that has trained is one step behind. Whoever committed that step is not in
/// this group, and nobody has built upon it: a rank of the group that had committed it would have
/// its reduced gradient.
fn drop_unsupported(states: &mut [Option<StateHeader>]) {
    let Some(top) = states.iter().flatten().map(|s| s.step).max() else { return };
    let is_supported = |s: &StateHeader| s.step == top && (s.has_result || s.was_in_group);
    let is_behind = |s: &StateHeader| s.was_in_group && Some(s.step) == top.checked_sub(1);
    if states.iter().flatten().any(is_behind) && !states.iter().flatten().any(is_supported) {
        states.iter_mut().filter(|s| s.is_some_and(|s| s.step == top)).for_each(|s| *s = None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(state: Option<(u64, u64, bool)>) -> SyncHeader {
        let state = state.map(|(step, digest, has_result)| StateHeader {
            step,
            digest,
            has_result,
            was_in_group: true,
        });
        SyncHeader { state, transport: Default::default() }
    }

    fn newcomer(step: u64, digest: u64, has_result: bool) -> SyncHeader {
        let state = Some(StateHeader { step, digest, has_result, was_in_group: false });
        SyncHeader { state, transport: Default::default() }
    }

    #[test]
    fn the_first_rank_makes_the_state_where_nobody_has_one() {
        let plan = Repair::plan(&[header(None), header(None)]);
        assert_eq!(plan, Ok(Repair { step: None, result: None, state: Some((0, vec![1])) }));
    }

    #[test]
    fn one_behind_gets_the_result_and_a_newcomer_the_state() {
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
    fn without_a_kept_result_one_behind_gets_the_state() {
        let headers = [header(Some((6, 1, true))), header(Some((7, 2, false)))];
        let plan = Repair::plan(&headers);
        assert_eq!(plan, Ok(Repair { step: Some(7), result: None, state: Some((1, vec![0])) }));
    }

    #[test]
    fn a_newcomer_that_is_ahead_and_cannot_hand_its_step_on_takes_the_survivors_state() {
        let survivors = [header(Some((6, 1, true))), header(Some((6, 1, false)))];
        let with = |newcomer: SyncHeader| [&survivors[..], &[newcomer]].concat();
        let back = Repair { step: Some(6), result: None, state: Some((0, vec![2])) };
        assert_eq!(Repair::plan(&with(newcomer(7, 2, false))), Ok(back));
        // With the step's reduced gradient it is followed.
        let on = Repair { step: Some(7), result: Some((2, vec![0, 1])), state: None };
        assert_eq!(Repair::plan(&with(newcomer(7, 2, true))), Ok(on));
        // So is a rank that has trained, and whoever is at its step.
        let seasoned = [with(newcomer(7, 2, false)), vec![header(Some((7, 2, true)))]].concat();
        let on = Repair { step: Some(7), result: Some((3, vec![0, 1])), state: None };
        assert_eq!(Repair::plan(&seasoned), Ok(on));
        // Survivors that are further behind were away.
        let on = Repair { step: Some(8), result: None, state: Some((2, vec![0, 1])) };
        assert_eq!(Repair::plan(&with(newcomer(8, 2, false))), Ok(on));
    }

    #[test]
    fn equal_states_need_nothing() {
        let plan = Repair::plan(&[header(Some((3, 9, true))), header(Some((3, 9, false)))]);
        assert_eq!(plan, Ok(Repair { step: Some(3), result: None, state: None }));
    }

    #[test]
    fn different_states_at_one_step_are_named() {
        let headers = [header(None), header(Some((3, 9, true))), header(Some((3, 8, true)))];
        let plan = Repair::plan(&headers);
        assert_eq!(plan, Err(StateMismatch { step: 3, ranks: vec![2], from: 1 }));
    }
}
