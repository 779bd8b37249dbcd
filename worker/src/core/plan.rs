//! Each rank's share of the next step.
//!
//! Every rank knows, from the headers of the last round, how many records every rank holds. So all
//! ranks compute the same plan, and no message is needed to agree on it.
//!
//! **Invariant:** the plan depends on its arguments alone.

use elasticdl_proto::Batch;

/// Records that one rank can contribute to the next step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AvailableRecords {
    /// Number of records in a gradient that is computed and that no step has absorbed.
    pub pending: u64,
    /// Number of held records of the current epoch.
    pub held: u64,
}

/// Number of records that each rank computes for the next step, in addition to its pending ones;
/// `None` if no step can be made yet.
///
/// Steps are full, except for the last of an epoch: the group waits while records of the epoch
/// (`remaining`: those not absorbed) are held by no rank.
pub fn quotas(batch: Batch, remaining: u64, ranks: &[AvailableRecords]) -> Option<Vec<u64>> {
    let pending: u64 = ranks.iter().map(|r| r.pending).sum();
    let at_hand: u64 = pending + ranks.iter().map(|r| r.held).sum::<u64>();
    let full = match batch {
        Batch::Global(records) => records.get(),
        Batch::PerWorker(records) => records.get().saturating_mul(ranks.len() as u64),
    };
    if at_hand == 0 || at_hand < full.min(remaining) {
        return None;
    }
    let quotas = match batch {
        Batch::Global(records) => split(records.get(), ranks),
        Batch::PerWorker(records) => {
            let records = records.get();
            let quotas: Vec<u64> =
                ranks.iter().map(|r| records.saturating_sub(r.pending).min(r.held)).collect();
            // If a rank has too few while others hold more, its records may not have arrived yet.
            let short = quotas.iter().zip(ranks).any(|(q, r)| q + r.pending < records);
            if short && at_hand < remaining {
                return None;
            }
            quotas
        }
    };
    (pending + quotas.iter().sum::<u64>() > 0).then_some(quotas)
}

/// Splits a global batch: even shares first. Ranks that hold more then fill up the rest, in rank
/// order.
fn split(records: u64, ranks: &[AvailableRecords]) -> Vec<u64> {
    let n = ranks.len() as u64;
    let mut quotas: Vec<u64> = (0..n)
        .zip(ranks)
        .map(|(rank, r)| {
            let share = records / n + u64::from(rank < records % n);
            share.saturating_sub(r.pending).min(r.held)
        })
        .collect();
    let total = |quotas: &[u64]| -> u64 {
        quotas.iter().sum::<u64>() + ranks.iter().map(|r| r.pending).sum::<u64>()
    };
    // Pending gradients alone may fill the step or exceed it: they cannot be split.
    while total(&quotas) < records {
        let short = records - total(&quotas);
        let spare: Vec<usize> = (0..ranks.len()).filter(|&i| quotas[i] < ranks[i].held).collect();
        if spare.is_empty() {
            break;
        }
        let part = short.div_ceil(spare.len() as u64);
        let mut short = short;
        for i in spare {
            let more = part.min(ranks[i].held - quotas[i]).min(short);
            quotas[i] += more;
            short -= more;
        }
    }
    // The sum exceeds the batch if pending gradients exceed their shares.
    let mut over = total(&quotas).saturating_sub(records);
    for quota in quotas.iter_mut().rev() {
        let less = over.min(*quota);
        *quota -= less;
        over -= less;
    }
    quotas
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use super::*;

    fn global(records: u64) -> Batch {
        Batch::Global(NonZeroU64::new(records).unwrap())
    }

    fn per_worker(records: u64) -> Batch {
        Batch::PerWorker(NonZeroU64::new(records).unwrap())
    }

    fn held(held: &[u64]) -> Vec<AvailableRecords> {
        held.iter().map(|&held| AvailableRecords { pending: 0, held }).collect()
    }

    #[test]
    fn a_full_step_is_split_evenly_with_the_remainder_to_the_lowest_ranks() {
        let plan = quotas(global(10), 1000, &held(&[50, 50, 50, 50]));
        assert_eq!(plan, Some(vec![3, 3, 2, 2]));
    }

    #[test]
    fn ranks_that_hold_more_fill_the_step() {
        let plan = quotas(global(12), 1000, &held(&[0, 50, 2, 50]));
        assert_eq!(plan, Some(vec![0, 5, 2, 5]));
    }

    #[test]
    fn the_group_waits_for_records_that_no_rank_holds() {
        assert_eq!(quotas(global(12), 1000, &held(&[3, 3, 3])), None);
        assert_eq!(quotas(global(12), 9, &held(&[3, 3, 3])), Some(vec![3, 3, 3]));
        assert_eq!(quotas(global(12), 9, &held(&[3, 3, 2])), None);
        assert_eq!(quotas(per_worker(4), 1000, &held(&[3, 9])), None);
        assert_eq!(quotas(per_worker(4), 12, &held(&[3, 9])), Some(vec![3, 4]));
    }

    #[test]
    fn pending_gradients_count_and_are_topped_up() {
        let ranks = [
            AvailableRecords { pending: 3, held: 9 },
            AvailableRecords { pending: 3, held: 9 },
            AvailableRecords::default(),
        ];
        assert_eq!(quotas(global(9), 1000, &ranks), Some(vec![2, 1, 0]));
        let over =
            [AvailableRecords { pending: 20, held: 9 }, AvailableRecords { pending: 0, held: 9 }];
        assert_eq!(quotas(global(9), 1000, &over), Some(vec![0, 0]));
    }

    #[test]
    fn a_step_is_exactly_full_or_takes_all_remaining_records() {
        for a in 0..6 {
            for b in 0..6 {
                for pending in 0..4 {
                    for batch in 1..10 {
                        let ranks = [
                            AvailableRecords { pending, held: a },
                            AvailableRecords { pending: 0, held: b },
                        ];
                        let at_hand = a + b + pending;
                        let Some(plan) = quotas(global(batch), at_hand, &ranks) else {
                            assert_eq!(at_hand, 0);
                            continue;
                        };
                        assert!(plan[0] <= a && plan[1] <= b);
                        let total = plan[0] + plan[1] + pending;
                        assert_eq!(
                            total,
                            batch.max(pending).min(at_hand),
                            "{ranks:?} {batch} {plan:?}"
                        );
                    }
                }
            }
        }
    }
}
