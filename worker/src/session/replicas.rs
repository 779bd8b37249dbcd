//! What happens to replicas that differ.
//!
//! ```text
//!  digests of all ranks ─► all equal ─────────────► on
//!                       ├► a majority is equal ───► the other ranks fail; the majority keeps its state
//!                       │                           and waits for the next membership
//!                       └► no majority ───────────► no rank can tell whose state is right: all fail, and
//!                                                   the next group starts from the newest checkpoint
//! ```
//!
//! Digests are compared at each step (a window of the state), when a group forms, and as digests of
//! the whole state at each checkpoint and before the best or the last model is exported. The step
//! at which replicas differ is not applied.
//!
//! A rank that joins has a copy of its donor's state, with the donor's faults. So it has no vote
//! before all windows of its copy have been compared.
//!
//! **Invariant:** the verdict depends on the headers alone, so all ranks derive the same one.

use std::fmt;

use elasticdl_proto::{RecordRange, WorkerId};

use crate::session::header::StepHeader;
use crate::session::origin::{Origin, Program};

/// Which ranks give up their state, because replicas differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// These ranks, in ascending order.
    pub failing: Vec<usize>,
    /// Whether the state of the other ranks is that of most ranks. If not, all ranks that have a
    /// state fail.
    pub has_majority: bool,
}

/// One rank's replica, as its header describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Replica<T> {
    /// It cannot be compared. `has_state`: whether it has a state at all.
    Other { has_state: bool },
    /// A state with this digest. A copy that did not train has no vote.
    State { digest: T, votes: bool },
}

/// Compares the replicas of all ranks; `None` if they are equal.
pub(super) fn compare<T: Copy + PartialEq>(replicas: &[Replica<T>]) -> Option<Verdict> {
    let digests = |only_votes: bool| {
        replicas.iter().filter_map(move |replica| match replica {
            Replica::State { digest, votes } if *votes || !only_votes => Some(*digest),
            _ => None,
        })
    };
    let first = digests(false).next()?;
    if digests(false).all(|digest| digest == first) {
        return None;
    }
    // Copies alone can be compared, too.
    let only_votes = digests(true).next().is_some();
    let count = digests(only_votes).count();
    let is_majority =
        |digest: T| 2 * digests(only_votes).filter(|&other| other == digest).count() > count;
    let majority = digests(only_votes).find(|&digest| is_majority(digest));
    let fails = |replica: &Replica<T>| match (replica, majority) {
        (Replica::State { digest, .. }, Some(majority)) => *digest != majority,
        (Replica::State { .. }, None) => true,
        (Replica::Other { has_state }, majority) => *has_state && majority.is_none(),
    };
    let failing = (0..replicas.len()).filter(|&rank| fails(&replicas[rank])).collect();
    Some(Verdict { failing, has_majority: majority.is_some() })
}

/// Compares what the ranks of a round report of their states at `step`. Returns how a difference
/// was found, too.
pub(super) fn compare_rounds(headers: &[StepHeader], step: u64) -> Option<(Verdict, Found)> {
    let window = |h: &StepHeader| Replica::State { digest: (h.step, h.digest), votes: !h.is_copy };
    let windows: Vec<_> = headers.iter().map(window).collect();
    if let Some(verdict) = compare(&windows) {
        return Some((of_two(verdict, headers), Found::Step));
    }
    // Two ranks at most hold a chunk, so neither can tell which of them is right.
    let chunks: Vec<_> = headers.iter().filter_map(|h| h.chunk_digest).collect();
    if headers.iter().any(|h| h.step != step) || chunks.windows(2).any(|pair| pair[0] != pair[1]) {
        let failing = (0..headers.len()).collect();
        return Some((Verdict { failing, has_majority: false }, Found::Step));
    }
    if let Some(of) = headers.iter().find_map(|h| h.checkpoint.differs) {
        let failing = (0..headers.len()).collect();
        return Some((Verdict { failing, has_majority: false }, Found::Copies(of)));
    }
    let wholes = || headers.iter().filter_map(|h| h.checkpoint.whole());
    let newest = wholes().map(|(step, _)| step).max()?;
    let whole = |h: &StepHeader| match h.checkpoint.whole() {
        Some((step, digest)) if step == newest => Replica::State { digest, votes: !h.is_copy },
        _ => Replica::Other { has_state: true },
    };
    let verdict = compare(&headers.iter().map(whole).collect::<Vec<_>>())?;
    Some((of_two(verdict, headers), Found::Whole(newest)))
}

/// A majority of one, beside copies that have trained since, can't tell who is right.
fn of_two(verdict: Verdict, headers: &[StepHeader]) -> Verdict {
    let is_voter = |rank: &usize| !headers[*rank].is_copy && !verdict.failing.contains(rank);
    if (0..headers.len()).filter(is_voter).count() > 1 {
        return verdict;
    }
    Verdict { failing: (0..headers.len()).collect(), has_majority: false }
}

/// How replicas were found to differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// By an audit: ranks have computed different gradients or losses of these records.
    Audit(RecordRange),
    /// By the part of the state that is compared at each step.
    Step,
    /// When a group formed.
    Sync,
    /// By the whole state at this step.
    Whole(u64),
    /// By all divided shards at this step, and their copies.
    Copies(u64),
}

/// Ranks of one group hold different states. The step is not applied, and the links are to be left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateMismatch {
    /// Number of committed steps.
    pub step: u64,
    pub found: Found,
    pub verdict: Verdict,
    /// The rank that reports this.
    pub rank: usize,
    /// Workers of the group, in rank order, and where they run.
    pub members: Vec<(WorkerId, Origin)>,
}

impl StateMismatch {
    /// Whether the reporting rank gives up its state and fails. If not, it leaves the links and
    /// waits for the next membership.
    pub fn is_failing(&self) -> bool {
        self.verdict.failing.contains(&self.rank)
    }

    /// Names these ranks' workers and their hosts; a long list is cut.
    fn names(&self, ranks: &[usize]) -> String {
        let name = |&rank: &usize| match self.members.get(rank) {
            Some((worker, Origin { host, .. })) if host.is_empty() => format!("worker {worker}"),
            Some((worker, Origin { host, .. })) => format!("worker {worker} on {host}"),
            None => format!("rank {rank}"),
        };
        let named: Vec<String> = ranks.iter().take(NAMED_MAX).map(name).collect();
        let more = ranks.len().saturating_sub(NAMED_MAX);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        format!("{}{more}", named.join(", "))
    }

    /// As [`Display`](fmt::Display), of an audit that has found different gradients.
    fn write_audit(&self, f: &mut fmt::Formatter<'_>, records: RecordRange) -> fmt::Result {
        let Verdict { failing, has_majority } = &self.verdict;
        let (names, step) = (self.names(failing), self.step.saturating_add(1));
        let RecordRange { epoch, start, end } = records;
        let records = format!("records {start}..{end} of epoch {epoch} in step {step}");
        let cause = self.cause();
        if *has_majority {
            let others = match self.members.len().saturating_sub(failing.len()) {
                1 => "worker, which has not applied it and computes the step without it".to_owned(),
                n => format!("{n}, which have not applied it and compute the step without it"),
            };
            write!(
                f,
                "wrong arithmetic: {names} computed another gradient or loss of {records} than \
                 the other {others}; {cause}"
            )
        } else {
            write!(
                f,
                "wrong arithmetic: {names} computed different gradients or losses of {records}, \
                 and none can tell which is right; none was applied, and the newest checkpoint \
                 counts; {cause}"
            )
        }
    }

    /// What speaks for which cause.
    fn cause(&self) -> String {
        let programs: Vec<&Program> =
            self.members.iter().map(|(_, origin)| &origin.program).collect();
        let known: Vec<&Program> =
            programs.iter().copied().filter(|&program| *program != Program::default()).collect();
        if let Some(other) = known.iter().find(|&&program| program != known[0]) {
            let first = |program: &Program| programs.iter().position(|&other| other == program);
            let pair: Vec<usize> = [known[0], other].into_iter().filter_map(first).collect();
            return format!(
                "their programs differ (those of {}), which speaks for another build",
                self.names(&pair)
            );
        }
        let same =
            if known.len() == programs.len() { "all run the same program, and " } else { "" };
        let is_one = self.verdict.has_majority && self.verdict.failing.len() == 1;
        let what = match self.found {
            Found::Audit(_) => "worker",
            _ => "replica",
        };
        if self.members.len() == 1 {
            "it contradicts itself, which speaks for a fault of its host's memory or processor; if \
             it happens again at once, the model is not deterministic: its methods must depend on \
             their arguments alone"
                .into()
        } else if is_one {
            format!(
                "{same}one {what} alone differs, which speaks for a fault of its host's memory or \
                 processor; if it happens again at once, the model is not deterministic"
            )
        } else if self.members.len() == 2 || matches!(self.found, Found::Copies(_)) {
            format!(
                "{same}either host may have a fault of its memory or processor; if it happens \
                 again at once, the model is not deterministic: its methods must depend on their \
                 arguments alone"
            )
        } else {
            format!(
                "{same}several {what}s differ, which speaks for a model that is not deterministic \
                 (its methods must depend on their arguments alone), or for hosts that compute \
                 differently"
            )
        }
    }
}

impl fmt::Display for StateMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Verdict { failing, has_majority } = &self.verdict;
        let found = match self.found {
            Found::Audit(records) => return self.write_audit(f, records),
            Found::Step => format!("the digests of a part of the state at step {}", self.step),
            Found::Sync => format!("the digests at step {}, as a group formed", self.step),
            Found::Whole(step) => format!("the digests of the whole state at step {step}"),
            Found::Copies(step) => format!("the digests of shards and their copies at step {step}"),
        };
        let names = self.names(failing);
        if *has_majority {
            let others = match self.members.len().saturating_sub(failing.len()) {
                1 => "replica, which goes on".to_owned(),
                n => format!("{n}, which go on"),
            };
            write!(
                f,
                "replicas differ by {found}: {names} from the other {others}; {}",
                self.cause()
            )
        } else {
            write!(
                f,
                "replicas differ by {found}: {names}; no state is that of most replicas, so none \
                 is trusted, and the newest checkpoint counts; {}",
                self.cause()
            )
        }
    }
}

impl std::error::Error for StateMismatch {}

const NAMED_MAX: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    fn trained(digest: u64) -> Replica<u64> {
        Replica::State { digest, votes: true }
    }

    fn copy(digest: u64) -> Replica<u64> {
        Replica::State { digest, votes: false }
    }

    fn verdict(failing: &[usize], has_majority: bool) -> Option<Verdict> {
        Some(Verdict { failing: failing.to_vec(), has_majority })
    }

    #[test]
    fn a_minority_fails_and_without_a_majority_all_do() {
        let (a, b, c) = (trained(1), trained(2), trained(3));
        let stateless = Replica::Other { has_state: false };
        let behind = Replica::Other { has_state: true };
        let table: &[(&[Replica<u64>], Option<Verdict>)] = &[
            (&[], None),
            (&[a], None),
            (&[a, a, stateless, behind], None),
            (&[a, b, a], verdict(&[1], true)),
            // The first rank has no privilege.
            (&[b, a, a], verdict(&[0], true)),
            (&[a, b, a, c, a], verdict(&[1, 3], true)),
            (&[a, b, a, stateless, behind], verdict(&[1], true)),
            (&[a, b], verdict(&[0, 1], false)),
            (&[a, b, c], verdict(&[0, 1, 2], false)),
            (&[a, a, b, b], verdict(&[0, 1, 2, 3], false)),
            (&[a, b, stateless, behind], verdict(&[0, 1, 3], false)),
            // The copies of joiners stem from the others, and prove nothing.
            (&[a, copy(2)], verdict(&[1], true)),
            (&[a, copy(2), copy(2)], verdict(&[1, 2], true)),
            (&[a, b, copy(2)], verdict(&[0, 1, 2], false)),
            (&[copy(1), copy(1)], None),
            (&[copy(1), copy(2)], verdict(&[0, 1], false)),
        ];
        for (replicas, expected) in table {
            assert_eq!(compare(replicas), *expected, "{replicas:?}");
        }
    }

    #[test]
    fn a_copy_does_not_add_a_vote_to_its_donors() {
        let header = |digest, is_copy| StepHeader { digest, is_copy, ..StepHeader::default() };
        let (right, wrong) = (header(1, false), header(2, false));
        let (right_copy, wrong_copy) = (header(1, true), header(2, true));
        let found = |headers: &[&StepHeader]| {
            let headers: Vec<StepHeader> = headers.iter().map(|&h| h.clone()).collect();
            compare_rounds(&headers, 0).map(|(verdict, _)| verdict)
        };
        assert_eq!(found(&[&right, &wrong, &wrong_copy]), verdict(&[0, 1, 2], false));
        assert_eq!(found(&[&right, &right, &wrong, &wrong_copy]), verdict(&[2, 3], true));
        assert_eq!(found(&[&right, &right, &wrong_copy]), verdict(&[2], true));
        // Either of two may be wrong, although one has copied the other's state.
        assert_eq!(found(&[&wrong, &right_copy]), verdict(&[0, 1], false));
        assert_eq!(found(&[&right_copy, &right_copy, &wrong_copy]), verdict(&[0, 1, 2], false));
        assert_eq!(found(&[&right, &right_copy, &right_copy]), None);
    }

    #[test]
    fn no_rank_keeps_a_state_whose_shards_differ_from_their_copies() {
        let mut headers = vec![StepHeader::default(); 3];
        assert_eq!(compare_rounds(&headers, 0), None);
        headers[2].checkpoint.differs = Some(7);
        let found = compare_rounds(&headers, 0).unwrap();
        assert_eq!(found, (verdict(&[0, 1, 2], false).unwrap(), Found::Copies(7)));
    }

    fn mismatch(programs: &[u64], failing: &[usize], has_majority: bool) -> StateMismatch {
        let member = |(i, &program): (usize, &u64)| {
            let program = Program { executable: program, ..Program::default() };
            (
                WorkerId(i as u64 + 1),
                Origin { host: format!("node-{i}"), program, ..Origin::default() },
            )
        };
        StateMismatch {
            step: 152,
            found: Found::Step,
            verdict: Verdict { failing: failing.to_vec(), has_majority },
            rank: 0,
            members: programs.iter().enumerate().map(member).collect(),
        }
    }

    #[test]
    fn the_text_names_worker_host_step_and_what_speaks_for_the_cause() {
        let table: [(StateMismatch, &[&str]); 5] = [
            (
                mismatch(&[7, 7], &[1], true),
                &["worker 2 on node-1 from the other replica, which goes"],
            ),
            (
                mismatch(&[7, 7, 7], &[1], true),
                &["step 152: worker 2 on node-1 from the other 2", "same program", "memory"],
            ),
            (
                mismatch(&[7, 7, 8], &[2], true),
                &["worker 3 on node-2", "those of worker 1 on node-0, worker 3", "another build"],
            ),
            (
                mismatch(&[7, 7], &[0, 1], false),
                &[
                    "worker 1 on node-0, worker 2 on node-1; no state",
                    "newest checkpoint",
                    "either",
                ],
            ),
            (mismatch(&[0, 0, 0], &[0, 1, 2], false), &["replicas differ, which", "deterministic"]),
        ];
        for (mismatch, parts) in table {
            let text = mismatch.to_string();
            for part in parts {
                assert!(text.contains(part), "{part}: {text}");
            }
        }
        let all: Vec<usize> = (0..1000).collect();
        assert!(mismatch(&[1; 1000], &all, false).to_string().len() < 1000);
    }
}
