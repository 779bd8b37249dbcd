//! Why a group ends before its work is done, with its newest state kept.
//!
//! ```text
//!   a rank halts ─► its header says so ─► no rank applies that step ─► last checkpoint ─► final state, with the reason
//! ```
//!
//! A rank that finds that the job can't go on, whoever works on it, calls
//! [`Session::halt`](super::session::Session::halt). All ranks see the same headers, so they end
//! together, at the same step, with one text.

use elasticdl_proto::{RecordRange, WorkerId};
use serde::{Deserialize, Serialize};

/// What one rank has found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Halt {
    pub reason: Reason,
    /// The records of this rank that it was found on; empty where they are not at fault.
    pub ranges: Vec<RecordRange>,
}

/// Why a rank can't go on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reason {
    /// In words that name what is wrong and what would be right.
    Error(String),
    /// A step's loss, or the sum of its gradients, holds a NaN or an infinity.
    Nonfinite,
}

/// How the work of a group ends. All ranks find the same, from the same headers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Ending {
    /// The data or the steps are at their end, or the job was told to stop.
    #[default]
    Done,
    /// It can't go on; the text names ranks and records.
    Failed(String),
    /// Its members leave. Another group goes on from the last checkpoint.
    Suspended,
}

/// One text for what the ranks say, `halts` in rank order. `step`: steps committed. `None` where no
/// rank halts.
pub fn explain(step: u64, members: &[WorkerId], halts: &[Option<&Halt>]) -> Option<String> {
    let said = || halts.iter().enumerate().filter_map(|(rank, halt)| Some((rank, (*halt)?)));
    let name = |rank: usize| match members.get(rank) {
        Some(worker) => format!("rank {rank} (worker {worker})"),
        None => format!("rank {rank}"),
    };
    let errors = said().filter_map(|(rank, halt)| match &halt.reason {
        Reason::Error(error) => Some(format!("{}: {error}", name(rank))),
        Reason::Nonfinite => None,
    });
    let mut parts: Vec<String> = errors.take(RANKS_NAMED_MAX).collect();
    if said().any(|(_, halt)| halt.reason == Reason::Nonfinite) {
        let at_fault =
            said().filter(|(_, halt)| halt.reason == Reason::Nonfinite && !halt.ranges.is_empty());
        let at_fault: Vec<String> = at_fault
            .map(|(rank, halt)| format!("{} with {}", name(rank), records(&halt.ranges)))
            .collect();
        let of = match at_fault.is_empty() {
            true => "every rank's own gradient is finite, so their sum has overflowed (what travels as f16 \
                     is infinite above 65504)"
                .to_owned(),
            false => {
                let more = at_fault.len().saturating_sub(RANKS_NAMED_MAX);
                let more = if more > 0 { format!(" and {more} more") } else { String::new() };
                let named = at_fault.into_iter().take(RANKS_NAMED_MAX).collect::<Vec<_>>().join(", ");
                format!("not finite by itself on {named}{more}")
            }
        };
        parts.push(format!(
            "the gradient or the loss of step {} is not finite: {of}. The step was not applied; --on-nonfinite skip leaves \
             such steps out",
            step.saturating_add(1)
        ));
    }
    (!parts.is_empty()).then(|| parts.join("; "))
}

/// Ranges in words; of many the first.
fn records(ranges: &[RecordRange]) -> String {
    let named: Vec<String> = ranges
        .iter()
        .take(RANGES_NAMED_MAX)
        .map(|r| format!("{}..{} of epoch {}", r.start, r.end, r.epoch))
        .collect();
    let more = ranges.len().saturating_sub(RANGES_NAMED_MAX);
    let more = if more > 0 { format!(" and {more} ranges more") } else { String::new() };
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
    fn ranks_and_records_that_are_not_finite_are_named() {
        let (bad, good) = (nonfinite(&[(30, 45), (60, 65)]), nonfinite(&[]));
        let text = explain(12, &MEMBERS, &[Some(&good), Some(&bad), Some(&good)]).unwrap();
        let expected = "of step 13 is not finite: not finite by itself on rank 1 (worker 7) with records 30..45 of epoch 0, \
                        60..65 of epoch 0. The step was not applied";
        assert!(text.contains(expected), "{text}");
        assert!(text.contains("--on-nonfinite skip"), "{text}");
    }

    #[test]
    fn a_sum_that_overflows_is_no_ranks_fault() {
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
                && text.contains("and 996 ranges more")
                && text.contains("and 992 more"),
            "{text}"
        );
    }
}
