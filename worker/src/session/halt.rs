//! Why a group ends before its work is done, with its newest state retained.
//!
//! ```text
//!   a rank halts ─► its header carries the reason ─► no rank applies that step ─► last checkpoint
//!                ─► final state, with the reason
//! ```
//!
//! A rank that finds that no worker could continue the job calls
//! [`Session::halt`](super::Session::halt). All ranks see the same headers, so they end
//! together, at the same step, with one text. A rank whose program has failed halts as well, so
//! that the last ranks with the state do not leave before it is stored.

use elasticdl_proto::{RecordRange, WorkerId};
use serde::{Deserialize, Serialize};

/// Finding of one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Halt {
    pub reason: Reason,
    /// Records of this rank that caused it, numbered through the data set; empty if none are at
    /// fault.
    pub ranges: Vec<RecordRange>,
}

/// Why a rank cannot continue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reason {
    /// A text that names the fault and the remedy.
    Error(String),
    /// The loss of a step, or the sum of its gradients, holds a NaN or an infinity.
    Nonfinite,
    /// The program has failed on these records. The group goes on without this rank, unless all
    /// ranks have failed.
    Program(String),
}

/// How the work of a group ends. All ranks derive the same value from the same headers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Ending {
    /// The data or the steps are exhausted, or the master stopped the job.
    #[default]
    Done,
    /// The job cannot continue; the text names ranks and records.
    Failed(String),
    /// The program has failed on every rank, each of which fails. Another group resumes from the
    /// last checkpoint.
    ProgramFailed,
    /// The members leave. Another group resumes from the last checkpoint.
    Suspended,
}

/// Why this rank wants its group to end; its headers tell the others.
#[derive(Clone, Debug, Default)]
pub(super) struct Requests {
    /// The master stops the job.
    pub(super) stop: bool,
    /// The master suspends the job.
    pub(super) suspend: bool,
    /// This rank cannot continue. It is never reset: every group that this rank joins ends, or goes
    /// on without it.
    pub(super) halt: Option<Halt>,
}

/// Combines the findings of all ranks, `halts` in rank order, into one text. `step`: number of
/// committed steps. `None` if no rank halts but those whose program has failed.
pub fn explain(step: u64, members: &[WorkerId], halts: &[Option<&Halt>]) -> Option<String> {
    let halted = || halts.iter().enumerate().filter_map(|(rank, halt)| Some((rank, (*halt)?)));
    let name = |rank: usize| match members.get(rank) {
        Some(worker) => format!("rank {rank} (worker {worker})"),
        None => format!("rank {rank}"),
    };
    // Several ranks may find the same: a file that was removed.
    let mut errors: Vec<(&str, Vec<String>)> = Vec::new();
    for (rank, halt) in halted() {
        let Reason::Error(error) = &halt.reason else { continue };
        match errors.iter_mut().find(|(known, _)| known == error) {
            Some((_, ranks)) if ranks.len() == RANKS_NAMED_MAX => {}
            Some((_, ranks)) => ranks.push(name(rank)),
            None => errors.push((error, vec![name(rank)])),
        }
    }
    let errors = errors.iter().map(|(error, ranks)| format!("{}: {error}", ranks.join(", ")));
    let mut parts: Vec<String> = errors.take(RANKS_NAMED_MAX).collect();
    if halted().any(|(_, halt)| halt.reason == Reason::Nonfinite) {
        let at_fault = halted()
            .filter(|(_, halt)| halt.reason == Reason::Nonfinite && !halt.ranges.is_empty());
        let at_fault: Vec<String> = at_fault
            .map(|(rank, halt)| format!("{} with {}", name(rank), records(&halt.ranges)))
            .collect();
        let cause = if at_fault.is_empty() {
            "every rank's own gradient is finite, so their sum has overflowed (values above 65504 \
             are infinite in f16 on the wire)"
                .to_owned()
        } else {
            let more = at_fault.len().saturating_sub(RANKS_NAMED_MAX);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            let named = at_fault.into_iter().take(RANKS_NAMED_MAX).collect::<Vec<_>>().join(", ");
            format!("not finite by itself on {named}{more}")
        };
        parts.push(format!(
            "the gradient or the loss of step {} is not finite: {cause}. The step was not applied; \
             --on-nonfinite skip leaves such steps out",
            step.saturating_add(1)
        ));
    }
    (!parts.is_empty()).then(|| parts.join("; "))
}

/// Formats ranges for display; a long list is cut.
fn records(ranges: &[RecordRange]) -> String {
    let named: Vec<String> = ranges
        .iter()
        .take(RANGES_NAMED_MAX)
        .map(|r| format!("{}..{} of epoch {}", r.start, r.end, r.epoch))
        .collect();
    let more = ranges.len().saturating_sub(RANGES_NAMED_MAX);
    let more = if more > 0 { format!(" and {more} more ranges") } else { String::new() };
    format!("records {}{more}", named.join(", "))
}

const RANKS_NAMED_MAX: usize = 8;
const RANGES_NAMED_MAX: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;

    const MEMBERS: [WorkerId; 3] = [WorkerId(4), WorkerId(7), WorkerId(9)];

    fn nonfinite(ranges: &[(u64, u64)]) -> Halt {
        let ranges =
            ranges.iter().map(|&(start, end)| RecordRange { epoch: 0, start, end }).collect();
        Halt { reason: Reason::Nonfinite, ranges }
    }

    #[test]
    fn ranks_with_one_reason_are_named_together() {
        let halt = |error: &str| Halt { reason: Reason::Error(error.into()), ranges: Vec::new() };
        let (gone, other) = (halt("a.csv was deleted"), halt("b.csv was deleted"));
        let text = explain(12, &MEMBERS, &[Some(&gone), Some(&other), Some(&gone)]);
        let expected = [
            "rank 0 (worker 4), rank 2 (worker 9): a.csv was deleted",
            "rank 1 (worker 7): b.csv was deleted",
        ];
        assert_eq!(text, Some(expected.join("; ")));
    }

    #[test]
    fn ranks_and_records_that_are_not_finite_are_named() {
        let (bad, good) = (nonfinite(&[(30, 45), (60, 65)]), nonfinite(&[]));
        let text = explain(12, &MEMBERS, &[Some(&good), Some(&bad), Some(&good)]).unwrap();
        let expected = "of step 13 is not finite: not finite by itself on rank 1 (worker 7) with \
                        records 30..45 of epoch 0, 60..65 of epoch 0. The step was not applied";
        assert!(text.contains(expected), "{text}");
        assert!(text.contains("--on-nonfinite skip"), "{text}");
    }

    #[test]
    fn an_overflow_of_the_sum_is_not_attributed_to_a_rank() {
        let good = nonfinite(&[]);
        let text = explain(0, &MEMBERS, &[Some(&good); 3]).unwrap();
        assert!(
            text.contains("of step 1 is not finite: every rank's own gradient is finite"),
            "{text}"
        );
    }

    #[test]
    fn an_error_names_its_rank_and_long_lists_are_cut() {
        let error =
            Halt { reason: Reason::Error("data.csv has changed".into()), ranges: Vec::new() };
        let text = explain(5, &MEMBERS, &[None, None, Some(&error)]);
        assert_eq!(text.as_deref(), Some("rank 2 (worker 9): data.csv has changed"));
        assert_eq!(explain(5, &MEMBERS, &[None; 3]), None);
        let many: Vec<(u64, u64)> = (0..1000).map(|i| (2 * i, 2 * i + 1)).collect();
        let many = nonfinite(&many);
        let text = explain(5, &[], &vec![Some(&many); 1000]).unwrap();
        assert!(
            text.len() < 4096
                && text.contains("and 996 more ranges")
                && text.contains("and 992 more"),
            "{text}"
        );
    }
}
