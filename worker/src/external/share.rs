//! The records of each rank, for programs that have a group of their own and no master.

use std::num::NonZeroU64;

use elasticdl_proto::{Access, Batch, Ledger, Order, Shuffle};

use crate::session::header::StateRecord;
use crate::session::plan::{self, Contribution, StepSize};

/// The order of a data set, and how the ranks of a group divide its steps. A group of any size has
/// the same records in each step as a job with these options.
#[derive(Debug)]
pub struct Share {
    records: u64,
    epochs: u32,
    batch: NonZeroU64,
    order: Order,
}

/// The records of one step, and where the next one begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepShare {
    /// Epoch of the step.
    pub epoch: u32,
    /// Records of the rank.
    pub records: Vec<u64>,
    /// Number of records, over all epochs, that precede the next step.
    pub next: u64,
}

impl Share {
    /// The order of `records` records, trained in steps of `batch`.
    pub fn new(records: NonZeroU64, epochs: u32, batch: NonZeroU64, seed: Option<u64>) -> Self {
        let shuffle = if seed.is_some() { Shuffle::default() } else { Shuffle::NONE };
        let order = Order::new(shuffle, seed.unwrap_or(0), &[records.get()], Access::Record);
        Self { records: records.get(), epochs, batch, order }
    }

    /// The step after the first `absorbed` records, over all epochs, and the share of `rank`, which
    /// is below `world_size`. `None` at the end of the last epoch.
    pub fn step(&self, absorbed: u64, rank: usize, world_size: usize) -> Option<StepShare> {
        let StateRecord { epochs_complete: epoch, ranges, .. } =
            StateRecord::after(absorbed, self.records);
        let ledger = Ledger::from_parts(self.records, epoch, ranges, 0).ok()?;
        let size = StepSize { batch: Batch::Global(self.batch), micro_batch: 1 };
        // All ranks are taken to be equally fast.
        let ranks = vec![Contribution::default(); world_size];
        let share = plan::upcoming(&ledger, self.epochs, size, (rank, &ranks), 1);
        let records = share.iter().flat_map(|range| self.order.records(*range)).collect();
        let left = ledger.remaining(epoch);
        let next = absorbed + self.batch.get().min(left);
        (epoch < self.epochs).then_some(StepShare { epoch, records, next })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(seed: Option<u64>) -> Share {
        let [records, batch] = [103, 10].map(|count| NonZeroU64::new(count).unwrap());
        Share::new(records, 2, batch, seed)
    }

    #[test]
    fn a_step_has_the_same_records_for_any_number_of_ranks() {
        let share = share(Some(3));
        let (mut absorbed, mut seen) = (0, Vec::new());
        while let Some(alone) = share.step(absorbed, 0, 1) {
            for world_size in [2, 3, 7] {
                let ranks = (0..world_size).map(|rank| share.step(absorbed, rank, world_size));
                let ranks: Vec<StepShare> = ranks.map(Option::unwrap).collect();
                assert!(ranks.iter().all(|rank| rank.next == alone.next));
                let together: Vec<u64> = ranks.into_iter().flat_map(|rank| rank.records).collect();
                assert_eq!(together, alone.records);
            }
            absorbed = alone.next;
            seen.push(alone);
        }
        assert_eq!(absorbed, 206);
        for epoch in 0..2 {
            let of_epoch = seen.iter().filter(|step| step.epoch == epoch);
            let mut records: Vec<u64> = of_epoch.flat_map(|step| step.records.clone()).collect();
            assert!(!records.is_sorted());
            records.sort_unstable();
            assert_eq!(records, (0..103).collect::<Vec<_>>());
        }
    }

    #[test]
    fn without_a_seed_the_order_is_that_of_the_data() {
        let step = share(None).step(100, 0, 2).unwrap();
        assert_eq!(step, StepShare { epoch: 0, records: vec![100, 101], next: 103 });
        assert_eq!(share(None).step(206, 0, 2), None);
    }
}
