//! The audit of steps: whether two ranks compute the same bits for the same records.
//!
//! ```text
//!  a step that is audited ─► each rank computes its part, and the part of another rank by itself
//!        ─► headers with digests of both ─► equal ──► the step is applied
//!                                        └► differ ─► no rank applies it; all compute the part again
//!        ─► headers with these digests ─► most are equal ──────► the ranks that differ fail
//!                                      ├► no majority ─────────► all fail, and the newest checkpoint
//!                                      │                         counts
//!                                      └► several ranks contradict themselves ─► the job ends
//! ```
//!
//! Which steps are audited depends on the job's seed and the step; which rank computes which part
//! again, on the plan. So all ranks know both. A part keeps its digest until its step is committed,
//! whatever happens to the group: if a group breaks, the next one compares it, or computes it
//! again. If parts of a step can't be audited, as they were computed after a loss or can't be read,
//! the next step is audited, too.
//!
//! Ranks that contradict themselves have a fault of their memory or processor, or a model that is
//! not deterministic. One of them alone has no vote, and fails; from two on, the model is blamed,
//! and no healthy worker is evicted. A group of one rank that contradicts itself goes back to the
//! newest checkpoint: its model was tried at the job's start. The loop of a program was not, and is
//! blamed if it has another result each of three times.
//!
//! **Invariant:** a verdict depends on the headers alone, so all ranks derive the same one.

use elasticdl_proto::RecordRange;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Which steps are audited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AuditPlan {
    /// Seed of the job.
    pub seed: u64,
    /// Parts per million of the steps: 1 to 1,000,000.
    pub per_million: u32,
    /// Whether the loop of a program computes the gradients. It can't be tried before a group has a
    /// state, so the first step from a state that was created or restored is audited.
    pub of_program: bool,
}

/// Records, and the digest of their gradient.
pub type Audited = (Vec<RecordRange>, u64);

/// What a rank's header says of the step's audit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuditHeader {
    /// The part of this rank's gradient that is audited.
    pub own: Option<Audited>,
    /// Parts that this rank has computed in place of other ranks.
    pub of_others: Vec<Audited>,
    /// Digests of the parts that ranks disagree about, computed again; empty if this rank can't
    /// read them now.
    pub again: Vec<u64>,
    /// Whether the step is audited in place of one that could not be. A rank that joins does not
    /// know it.
    pub is_owed: bool,
}

/// A part of which ranks have computed different gradients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Dispute {
    pub(super) ranges: Vec<RecordRange>,
    /// Ranks, and the digests that they have computed.
    pub(super) votes: Vec<(usize, u64)>,
}

impl AuditPlan {
    /// Whether the step that follows `step` committed ones is audited.
    pub(super) fn chooses(self, step: u64) -> bool {
        let draw = xxh3_64_with_seed(&step.to_le_bytes(), self.seed ^ AUDIT);
        draw % MILLION < u64::from(self.per_million)
    }

    /// How many ranks further the rank is whose part each of these ranks computes: as many as
    /// possible audit a rank of another host. The distance changes with the step.
    pub(super) fn distance(self, hosts: &[&str], step: u64) -> usize {
        let world = hosts.len();
        let others = |distance: usize| {
            (0..world).filter(|rank| hosts[*rank] != hosts[(rank + distance) % world]).count()
        };
        let counts: Vec<usize> = (1..world).map(others).collect();
        let most = counts.iter().max();
        let best = (1..world).filter(|distance| Some(&counts[distance - 1]) == most);
        let best: Vec<usize> = best.collect();
        let draw = xxh3_64_with_seed(&step.to_le_bytes(), self.seed ^ DISTANCE);
        // A rank alone audits itself.
        if best.is_empty() { 0 } else { best[(draw % best.len() as u64) as usize] }
    }
}

const MILLION: u64 = 1_000_000;
/// Seeds of the draws, beside the job's.
const AUDIT: u64 = 0x6175_6469_7400_0001;
const DISTANCE: u64 = 0x6175_6469_7400_0002;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_of_the_steps_is_audited_by_ranks_of_other_hosts_in_turn() {
        let plan = AuditPlan { seed: 3, per_million: 10_000, of_program: false };
        let chosen = (0..100_000).filter(|&step| plan.chooses(step)).count();
        assert!((900..1100).contains(&chosen), "{chosen}");
        let all = AuditPlan { per_million: 1_000_000, ..plan };
        assert!((0..1000).all(|step| all.chooses(step)));
        let distances = |hosts: &[&str]| -> Vec<usize> {
            let mut found: Vec<usize> = (0..100).map(|step| plan.distance(hosts, step)).collect();
            found.sort_unstable();
            found.dedup();
            found
        };
        assert_eq!(distances(&["a"]), [0]);
        assert_eq!(distances(&["a"; 4]), [1, 2, 3]);
        assert_eq!(distances(&["a", "a", "b", "b"]), [2]);
        assert_eq!(distances(&["a", "b", "a", "b"]), [1, 3]);
    }
}
