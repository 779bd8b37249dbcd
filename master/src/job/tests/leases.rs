//! The lease table in isolation.

use std::num::NonZeroU64;
use std::time::Duration;

use elasticdl_proto::{Ledger, RangeSet, RecordRange, WorkerId};

use super::super::*;
use crate::job::data::lease_table::{LeaseTable, Share};
use crate::job::data::shards::Shards;
use crate::job::testing::{dataset, spec};

const A: WorkerId = WorkerId(1);
const B: WorkerId = WorkerId(2);
const SHARE: Share = Share { records: 4, workers: 2 };

fn records(files: &[u64], per_shard: u64) -> LeaseTable {
    let spec = JobSpec { records_per_shard: NonZeroU64::new(per_shard), shuffle: false, ..spec() };
    LeaseTable::new(Shards::cut(&dataset(files), &spec).unwrap(), 2)
}

fn range(start: u64, end: u64) -> RecordRange {
    RecordRange { epoch: 0, start, end }
}

#[test]
fn leases_never_cross_shards_or_files() {
    let mut records = records(&[10, 7], 4);
    let leases = records.lease(A, 0, 17, Share { records: 17, workers: 1 });
    let expected = [(0, 4), (4, 8), (8, 10), (10, 14), (14, 17)].map(|(s, e)| range(s, e));
    assert_eq!(leases, expected);
    assert_eq!(records.leased_to(A), 17);
}

#[test]
fn leases_shrink_towards_an_epochs_end_but_never_below_a_steps_share() {
    let mut records = records(&[100], 100);
    let mut sizes = Vec::new();
    while records.is_open(0) {
        let leases = records.lease(A, 0, 100, SHARE);
        sizes.push(leases.iter().map(RecordRange::len).sum::<u64>());
        records.commit(sizes.len() as u64, &leases).unwrap();
    }
    assert_eq!(sizes, [25, 19, 14, 11, 8, 6, 5, 4, 4, 4]);
}

#[test]
fn leases_of_the_next_epoch_do_not_block_leases_of_this_one() {
    let mut records = records(&[8], 8);
    assert_eq!(records.lease(A, 1, 4, SHARE).len(), 1);
    assert_eq!(records.lease(A, 0, 4, SHARE), [range(0, 4)]);
}

#[test]
fn leases_used_by_a_formed_group_return_if_the_next_one_is_a_step_behind() {
    let mut records = records(&[10], 5);
    assert_eq!(records.lease(A, 0, 5, SHARE), [range(0, 4)]);
    let mut ledger = Ledger::new(10);
    ledger.absorb(range(1, 3));
    records.rebuild(2, ledger, |_| true);
    let held: Vec<_> = records.leases().collect();
    assert_eq!(held, [(A, range(0, 1)), (A, range(3, 4))]);
    // Only one member had that step, and it has left; the records of A in that step are pending.
    records.rebuild(1, Ledger::new(10), |w| w == A);
    let held: Vec<_> = records.leases().map(|(_, range)| range).collect();
    assert_eq!(held.iter().map(RecordRange::len).sum::<u64>(), 4);
    assert_eq!(records.lease(B, 0, 5, SHARE), [range(4, 5), range(5, 8)]);
}

#[test]
fn requests_for_an_epoch_whose_last_step_may_be_undone_stay_pending() {
    let mut records = records(&[4], 4);
    let mut ledger = Ledger::new(4);
    ledger.absorb(range(0, 4));
    records.rebuild(1, ledger, |_| true);
    assert_eq!((records.ledger().epoch(), records.epoch_stable()), (1, 0));
    records.commit(2, &[RecordRange { epoch: 1, start: 0, end: 1 }]).unwrap();
    assert_eq!(records.epoch_stable(), 1);
}

#[test]
fn a_rebuilt_lease_table_offers_all_records_but_the_absorbed_and_the_leased() {
    let mut records = records(&[20], 5);
    records.lease(A, 0, 4, SHARE);
    records.lease(B, 0, 4, SHARE);
    let held: Vec<_> = records.leases().collect();
    assert_eq!(held, [(A, range(0, 4)), (B, range(4, 5)), (B, range(5, 8))]);
    records.forget(B);
    // B may have trained the records of its leases, so they are not leased again before the group
    // has reported its ledger.
    let all = Share { records: 20, workers: 1 };
    assert_eq!(records.lease(A, 0, 20, all), [range(8, 10), range(10, 15), range(15, 20)]);
    let mut ledger = Ledger::new(20);
    ledger.absorb(range(2, 6));
    records.rebuild(1, ledger, |w| w == A);
    let held: Vec<_> = records.leases().collect();
    let kept = [(0, 2), (8, 10), (10, 15), (15, 20)].map(|(s, e)| (A, range(s, e)));
    assert_eq!(held, kept);
    assert_eq!(records.lease(B, 0, 20, all), [range(6, 8)]);
}

#[test]
fn an_undone_commit_returns_its_leases_to_their_owner() {
    let mut records = records(&[8], 8);
    records.lease(A, 0, 4, SHARE);
    records.commit(1, &[range(0, 2)]).unwrap();
    records.commit(2, &[range(2, 4)]).unwrap();
    assert_eq!(records.leased_to(A), 0);
    let mut ledger = Ledger::new(8);
    ledger.absorb(range(0, 2));
    records.rebuild(1, ledger, |_| true);
    assert_eq!(records.leases().collect::<Vec<_>>(), [(A, range(2, 4))]);
    assert_eq!(records.lease(B, 0, 4, SHARE), [range(4, 8)]);
}

#[test]
fn reports_outside_the_data_set_have_no_effect() {
    let mut records = records(&[8], 8);
    let report = |epochs_complete, ranges: &[RecordRange], repeated| LedgerReport {
        epochs_complete,
        ranges: ranges.to_vec(),
        repeated,
    };
    let past = RecordRange { epoch: 2, start: 0, end: 1 };
    for wrong in [range(0, 9), range(3, 3), range(5, 4), range(8, u64::MAX), past] {
        assert_eq!(records.commit(1, &[range(0, 1), wrong]), Err(wrong));
        assert!(records.check(&report(0, &[wrong], 0)).is_err());
    }
    assert_eq!(records.ledger().counted(), 0);
    for wrong in [
        report(3, &[], 0),
        report(u32::MAX, &[], 0),
        report(0, &[], u64::MAX),
        report(0, &[range(0, 4), range(3, 5)], 0),
        report(1, &[range(0, 1)], 0),
        report(2, &[RecordRange { epoch: 1, start: 0, end: 1 }], 0),
    ] {
        assert!(records.check(&wrong).is_err(), "{wrong:?}");
    }
    assert_eq!(records.check(&report(2, &[], 7)).unwrap().counted(), 16);
}

#[test]
fn an_epoch_is_leased_completely_in_any_order_of_shards() {
    for seed in 0..50 {
        let spec = JobSpec { seed, records_per_shard: NonZeroU64::new(1 + seed % 7), ..spec() };
        let mut records = LeaseTable::new(Shards::cut(&dataset(&[13, 0, 29]), &spec).unwrap(), 1);
        let mut leased = RangeSet::default();
        loop {
            let leases = records.lease(A, 0, 1 + seed % 5, Share { records: 42, workers: 1 });
            if leases.is_empty() {
                break;
            }
            for lease in leases {
                assert_eq!(leased.insert(lease.records()), 0, "seed {seed}");
            }
        }
        assert_eq!(leased, RangeSet::from_range(0..42), "seed {seed}");
    }
}

/// The complete core with a million shards and a thousand workers: the cost of a lease grows with
/// neither.
#[test]
fn a_lease_is_found_without_a_scan_of_all_shards() {
    let spec = JobSpec {
        num_workers: 1000,
        max_workers: 1000,
        epochs: 1,
        records_per_shard: NonZeroU64::new(1),
        batch: Batch::Global(NonZeroU64::new(1 << 20).unwrap()),
        ..spec()
    };
    let mut job = super::directed::started(spec, &[1 << 20]);
    let mut leased = 0;
    for i in 0..200_000 {
        let message = WorkerMessage::LeaseRequest { epoch: 0, records: 1 };
        job.handle(
            Time(Duration::from_secs(9)),
            Event::Message { worker: WorkerId(i % 1000 + 1), message },
        );
        while let Some(action) = job.poll_action() {
            leased += usize::from(matches!(
                action,
                Action::Send { message: MasterMessage::Lease(_), .. }
            ));
        }
    }
    assert_eq!(leased, 200_000);
}
