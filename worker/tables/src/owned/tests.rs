//! Tests of rounds without faults; those with faults are in the simulation.

use super::round::StepCommit;
use super::*;
use crate::lookup::{Ids, RowGradients};
use crate::optimizer::RowOptimizer;
use crate::table::Table;

/// Digests of the rows after one step of so many workers, whose gradients have these positions.
fn digest_after(parts_of_ranks: &[&[(u64, f32)]]) -> u64 {
    let tables = [Table::new("user", 2).optimized(RowOptimizer::sgd(1.0))];
    let settings = Settings { seed: 1, shards: 8, copies: 2, copy_bytes: 1 };
    let workers = parts_of_ranks.len() as u64;
    let members = (0..workers).map(|worker| Member { worker, host: worker, leaves: false });
    let members: Vec<Member> = members.collect();
    let mut ranks: Vec<Owned> = Vec::new();
    for worker in 0..workers {
        let mut owned = Owned::new(worker, settings, tables.clone());
        owned.create(1, members.clone());
        ranks.push(owned);
    }
    // What rank `to` receives of the messages that each rank has for all ranks.
    let received = |sent: &[Vec<Vec<u8>>], to: usize| -> Vec<Vec<u8>> {
        sent.iter().map(|messages| messages[to].clone()).collect()
    };
    let mut ids = Ids::new(1);
    ids.begin_record();
    (0..20).for_each(|id| assert_eq!(ids.push(0, id), id as usize));
    let requests: Vec<_> = ranks.iter().map(|rank| rank.requests(&ids)).collect();
    let replies = (0..ranks.len()).map(|to| ranks[to].replies(&received(&requests, to)).unwrap());
    let replies: Vec<_> = replies.collect();
    let mut pushes = Vec::new();
    for (to, (rank, parts)) in ranks.iter_mut().zip(parts_of_ranks).enumerate() {
        let rows = rank.receive(&ids, &received(&replies, to)).unwrap();
        let mut gradients = RowGradients::default();
        for &(position, gradient) in *parts {
            let mut rows = rows.clone();
            rows.of(0).1.fill(gradient);
            gradients.add_part(position, ids.clone(), rows);
        }
        pushes.push(rank.pushes(&gradients));
    }
    for (to, rank) in ranks.iter_mut().enumerate() {
        rank.stage(&received(&pushes, to)).unwrap();
        assert!(rank.commit(StepCommit { generation: 1, records: 3, is_applied: true }));
    }
    assert_eq!(ranks.iter().map(Owned::touches).sum::<u64>(), 60);
    ranks.iter().map(Owned::digest).fold(0, u64::wrapping_add)
}

#[test]
fn rows_have_the_same_bits_whichever_ranks_compute_the_parts() {
    // Their sum depends on the order.
    let [first, second, third] = [(0, 1e8), (4, 1.0), (8, -1e8)];
    let alone = digest_after(&[&[first, second, third]]);
    assert_eq!(digest_after(&[&[second], &[third, first]]), alone);
    assert_eq!(digest_after(&[&[third], &[second], &[first], &[]]), alone);
    let other = (2, -1e8);
    assert_ne!(digest_after(&[&[first, second, other]]), alone);
}
