//! Small groups without faults. Groups with faults are in the simulation of whole jobs.

use std::ops::Range;
use std::time::Duration;

use super::recovery::{OwnedHeader, Recovery};
use super::round::StepCommit;
use super::saved::SavedShard;
use super::*;
use crate::changes::changed_shard;
use crate::lookup::{BatchRows, Ids, RowGradients};
use crate::optimizer::RowOptimizer;
use crate::wire::InvalidRows;

fn worker(id: u64) -> Owned {
    lagging(id, 0)
}

/// A worker whose steps read rows of so many commits before the last one.
fn lagging(id: u64, lag: u32) -> Owned {
    let settings =
        Settings { seed: 1, shards: SHARDS_OF_TEST, copies: 2, lag, copy_bytes: 1, copy_rate: 0 };
    let tables = [Table::new("user", 2).optimized(RowOptimizer::sgd(1.0))];
    Owned::new(id, settings, tables)
}

fn members(workers: u64) -> Vec<Member> {
    (1..=workers).map(|worker| Member::new(worker, worker)).collect()
}

/// A group of so many workers, which begins.
fn group(workers: u64) -> Vec<Owned> {
    let mut group: Vec<Owned> = (1..=workers).map(worker).collect();
    group.iter_mut().for_each(|worker| worker.create(1, members(workers)));
    group
}

/// What rank `to` receives of the messages that each rank has for all ranks.
fn received(sent: &[Vec<Vec<u8>>], to: usize) -> Vec<Vec<u8>> {
    sent.iter().map(|messages| messages[to].clone()).collect()
}

/// The ids of these rows.
fn ids(rows: Range<u64>) -> Ids {
    let mut ids = Ids::new(1);
    ids.begin_record();
    rows.for_each(|id| _ = ids.push(0, id));
    ids
}

/// What each rank is given for its ids, the same for all, if the ranks answer like this.
fn looked_up(
    group: &mut [Owned],
    ids: &Ids,
    answer: impl Fn(&Owned, &[Vec<u8>]) -> Result<Vec<Vec<u8>>, InvalidRows>,
) -> Vec<BatchRows> {
    let requests: Vec<_> = group.iter().map(|worker| worker.requests(ids)).collect();
    let answers = group.iter().enumerate();
    let answers: Vec<_> =
        answers.map(|(to, worker)| answer(worker, &received(&requests, to)).unwrap()).collect();
    let rows = group.iter_mut().enumerate();
    rows.map(|(rank, worker)| worker.receive(ids, &received(&answers, rank)).unwrap()).collect()
}

/// A step whose gradients are so large at each of these rows.
fn step(group: &mut [Owned], generation: u64, rows: Range<u64>, gradient: f32) {
    let touched = ids(rows);
    stage(group, |rank, gradients, all, of_all| {
        let mut rows = of_all.of_batch(all, &touched);
        rows.of(0).1.fill(gradient * (rank as f32 + 1.0));
        gradients.add_part(rank as u64, touched.clone(), rows);
    });
    commit(group, generation);
}

/// Each rank looks up all rows, adds these gradients, by rank, and stages those of all ranks.
fn stage(group: &mut [Owned], add: impl Fn(usize, &mut RowGradients, &Ids, &BatchRows)) {
    stage_computed(group, Duration::ZERO, add);
}

/// As [`stage`], after each rank has computed for so long.
fn stage_computed(
    group: &mut [Owned],
    computed: Duration,
    add: impl Fn(usize, &mut RowGradients, &Ids, &BatchRows),
) {
    let ids = ids(0..ROWS);
    let requests: Vec<_> = group.iter().map(|worker| worker.requests(&ids)).collect();
    let replies = (0..group.len()).map(|to| group[to].replies(&received(&requests, to)).unwrap());
    let replies: Vec<_> = replies.collect();
    let mut pushes = Vec::new();
    for (rank, worker) in group.iter_mut().enumerate() {
        let rows = worker.receive(&ids, &received(&replies, rank)).unwrap();
        let mut gradients = RowGradients::default();
        add(rank, &mut gradients, &ids, &rows);
        pushes.push(worker.pushes(&gradients, computed));
    }
    for (rank, worker) in group.iter_mut().enumerate() {
        worker.stage(&received(&pushes, rank)).unwrap();
    }
}

/// All ranks commit what is staged of the group of this generation.
fn commit(group: &mut [Owned], generation: u64) {
    let commit = StepCommit { generation, divisor: 3.0, is_applied: true };
    assert!(group.iter_mut().all(|worker| worker.commit(commit)));
    assert_eq!(balance(group), 0, "all copies are equal");
}

/// What the workers have compared.
fn balance(group: &[Owned]) -> u64 {
    group.iter().map(|worker| worker.compared().balance()).fold(0, u64::wrapping_add)
}

/// The workers, of which all but a joiner hold rows of `step`, form another group.
fn regroup(group: &mut [Owned], step: u64, generation: u64) {
    let workers: Vec<u64> = (1..=group.len() as u64).collect();
    regroup_of(group, step, generation, &workers);
}

/// As [`regroup`], of these workers.
fn regroup_of(group: &mut [Owned], step: u64, generation: u64, workers: &[u64]) {
    let of = group[0].committed().generation;
    let joins = Some(OwnedHeader::of_joiner(step, of));
    let headers: Vec<_> =
        group.iter().map(|worker| worker.header().or_else(|| joins.clone())).collect();
    let recovery = Recovery::plan(step, of, &headers).unwrap();
    let placement = group[0].placement().unwrap().clone();
    let member = |&worker: &u64| Member::new(worker, worker);
    for worker in group {
        let group = (generation, workers.iter().map(member).collect());
        worker.regroup((step, placement.clone()), &recovery, group).unwrap();
    }
}

/// Each rank touches all rows.
fn touch(rank: usize, gradients: &mut RowGradients, ids: &Ids, rows: &BatchRows) {
    gradients.add_part(rank as u64, ids.clone(), rows.clone());
}

/// Digests of the rows after one step of so many workers, whose gradients have these positions.
fn digest_after(parts_of_ranks: &[&[(u64, f32)]]) -> u64 {
    let mut group = group(parts_of_ranks.len() as u64);
    stage(&mut group, |rank, gradients, ids, rows| {
        for &(position, gradient) in parts_of_ranks[rank] {
            let mut rows = rows.clone();
            rows.of(0).1.fill(gradient);
            gradients.add_part(position, ids.clone(), rows);
        }
    });
    commit(&mut group, 1);
    assert_eq!(group.iter().map(Owned::touches).sum::<u64>(), 3 * ROWS);
    group.iter().map(Owned::digest).fold(0, u64::wrapping_add)
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

#[test]
fn a_joiner_is_given_its_shards_one_after_the_other() {
    let mut group = group(2);
    stage(&mut group, touch);
    commit(&mut group, 1);
    group.push(worker(3));
    regroup(&mut group, 1, 2);
    let steps = u64::from(SHARDS_OF_TEST) + 2;
    for _ in 0..steps {
        stage(&mut group, touch);
        commit(&mut group, 2);
    }
    let wanted = Placement::new(SHARDS_OF_TEST, 2, &members(3));
    for worker in &group {
        assert!(worker.placement().unwrap().is_as(&wanted));
        assert!(worker.held().map(|(shard, _)| shard).eq(wanted.held_by(worker.me)));
    }
    let touches: u64 = group.iter().map(Owned::touches).sum();
    assert_eq!(touches, ROWS * (2 + 3 * steps));
}

#[test]
fn rows_that_are_looked_up_early_and_their_changes_are_what_a_look_up_brings() {
    let mut group = group(3);
    assert!(!group[0].may_look_ahead(), "shards may have to move");
    step(&mut group, 1, 0..ROWS / 2, 1.0);
    assert!(group.iter().all(Owned::may_look_ahead));
    let wanted = ids(ROWS / 4..ROWS);
    let requests: Vec<_> = group.iter().map(|worker| worker.requests(&wanted)).collect();
    let answered = group.iter().enumerate();
    let answered: Vec<_> =
        answered.map(|(to, rank)| rank.answer_early(received(&requests, to)).unwrap()).collect();
    let rows: Vec<_> = answered.iter().map(|answered| answered.rows().to_vec()).collect();
    let mut early: Vec<_> =
        (0..3).map(|to| group[to].receive_early(&wanted, &received(&rows, to)).unwrap()).collect();
    assert_eq!(early, looked_up(&mut group, &wanted, Owned::replies));
    // Rows change that were there, and others come into being; most do neither.
    step(&mut group, 1, ROWS / 2 - 4..ROWS / 2 + 4, 2.0);
    assert_ne!(early, looked_up(&mut group, &wanted, Owned::replies));
    let changes: Vec<_> = group
        .iter()
        .zip(&answered)
        .map(|(rank, answered)| rank.changes(answered).unwrap())
        .collect();
    let bytes: usize = changes.iter().flatten().map(Vec::len).sum();
    assert_eq!(bytes, 9 * 4 + 3 * 8 * (4 + 2 * 4), "three ranks have asked for eight rows each");
    for (to, early) in early.iter_mut().enumerate() {
        let mut torn = received(&changes, to);
        group[to].receive_changes(&wanted, early, &torn).unwrap();
        torn.iter_mut().for_each(|changes| changes.push(0));
        assert!(group[to].receive_changes(&wanted, &mut early.clone(), &torn).is_err());
        let other = ids(0..1);
        let unasked = received(&changes, to);
        assert!(group[to].receive_changes(&other, &mut early.clone(), &unasked).is_err());
    }
    assert_eq!(early, looked_up(&mut group, &wanted, Owned::replies));
}

#[test]
fn a_step_reads_rows_exactly_as_many_commits_old_as_the_lag_is() {
    const LAG: usize = 2;
    let mut group: Vec<Owned> = (1..=2).map(|id| lagging(id, LAG as u32)).collect();
    group.iter_mut().for_each(|worker| worker.create(1, members(2)));
    let all = ids(0..ROWS);
    // Rows as of each step.
    let mut as_of = vec![looked_up(&mut group, &all, Owned::replies).remove(0)];
    let mut generation = 1;
    for number in 0..30_u64 {
        let read = looked_up(&mut group, &all, Owned::replies_of_step);
        let expected = &as_of[as_of.len().saturating_sub(LAG + 1)];
        assert!(read.iter().all(|rows| rows == expected), "step {number}");
        let asked: Vec<_> = group.iter().map(|rank| rank.requests(&all).swap_remove(0)).collect();
        let may_look_ahead = group[0].may_look_ahead();
        let early = may_look_ahead.then(|| group[0].answer_early(asked.clone()).unwrap());
        step(&mut group, generation, number % 5..ROWS / 2 + number % 7, 0.5);
        as_of.push(looked_up(&mut group, &all, Owned::replies).remove(0));
        // What was answered before the commit is what the next step reads.
        if let Some(early) = early {
            assert_eq!(early.rows(), group[0].replies_of_step(&asked).unwrap(), "step {number}");
        }
        match number {
            // A joiner is given the shards with what they were.
            6 => group.push(lagging(3, LAG as u32)),
            // A holder is lost.
            22 => drop(group.remove(0)),
            _ => continue,
        }
        generation += 1;
        let workers: Vec<_> = group.iter().map(|worker| worker.me).collect();
        regroup_of(&mut group, number + 1, generation, &workers);
    }
    // So does a worker that begins from a checkpoint, of whole shards or of changes.
    let mut kept = 0;
    for saved in group[0].save().owned {
        let whole = saved.clone().encode();
        let changes = saved.clone().encode_changes(30);
        let changed = changed_shard(&group[0].content, &whole, &changes).unwrap();
        for bytes in [whole, changed] {
            let read = group[0].decode(saved.number, &bytes).unwrap();
            assert_eq!(read.shard.history, saved.shard.history);
            kept += usize::from(!read.shard.history.is_empty());
        }
    }
    assert!(kept > 4);
}

#[test]
fn a_shard_that_differs_from_its_copies_is_found() {
    let mut group = group(3);
    let before = group.clone();
    stage(&mut group, touch);
    commit(&mut group, 1);
    for (rank, worker) in before.iter().enumerate() {
        for (number, shard) in worker.held() {
            let mut wrong = group.clone();
            let shards = &mut wrong[rank].committed.as_mut().unwrap().shards;
            let right = shards.insert(number, Arc::clone(shard)).unwrap();
            assert_eq!(balance(&wrong) != 0, right.rows() > 0, "shard {number} of rank {rank}");
        }
    }
}

#[test]
fn workers_of_a_host_are_counted_once_all_shards_lie_where_they_should() {
    let member = |worker| Member::new(worker, worker / 3);
    let mut group: Vec<Owned> = (1..=3).map(worker).collect();
    group.iter_mut().for_each(|worker| worker.create(1, (1..=3).map(member).collect()));
    let of_hosts = |group: &[Owned]| -> Vec<u64> {
        group.iter().map(|worker| worker.workers_of_host()).collect()
    };
    assert_eq!(of_hosts(&group), [1, 1, 1]);
    stage(&mut group, touch);
    commit(&mut group, 1);
    assert_eq!(of_hosts(&group), [2, 2, 1]);
}

#[test]
fn a_worker_whose_group_was_lost_before_it_had_read_its_shards_does_not_count_as_their_holder() {
    let mut group = group(3);
    group[2] = worker(3);
    // Another loss follows before a step is committed.
    for generation in [2, 3] {
        regroup(&mut group, 0, generation);
        let is_named = |worker: &Owned| worker.placement().unwrap().held_by(3).next().is_some();
        assert!(!group.iter().any(is_named), "generation {generation}");
    }
    stage(&mut group, touch);
    commit(&mut group, 3);
    assert_eq!(group.iter().map(Owned::touches).sum::<u64>(), 3 * ROWS);
}

#[test]
fn what_an_earlier_group_has_staged_is_committed_with_a_rank_that_has() {
    let mut group = group(2);
    stage(&mut group, touch);
    commit(&mut group, 1);
    regroup(&mut group, 1, 2);
    stage(&mut group, touch);
    regroup(&mut group, 1, 3);
    stage(&mut group, touch);
    // A rank that was not in the third group has committed the step in the second one.
    commit(&mut group, 2);
    assert!(group.iter().all(|worker| worker.step() == Some(2)));
}

/// Two of four workers go on from step 3 with rows of `saved` in place of those that are lost with
/// the others. Returns the lost shards.
fn go_on(group: &mut [Owned], generation: u64, saved: &BTreeMap<u32, Arc<Shard>>) -> Vec<u32> {
    let headers: Vec<_> = group.iter().map(Owned::header).collect();
    let recovery = Recovery::plan(3, 1, &headers).unwrap();
    let placement = group[0].placement().unwrap().clone();
    let of_group = || (generation, members(2));
    let mut lost = Vec::new();
    for worker in group {
        let state = || (3, placement.clone());
        let found = worker.regroup(state(), &recovery, of_group()).unwrap_err();
        let older = worker.to_be_read(&found, &members(2)).into_iter();
        let older =
            older.map(|number| SavedShard { number, shard: Arc::clone(&saved[&number]) }).collect();
        worker.regroup_with_older(state(), &recovery, of_group(), older);
        lost = found.0;
    }
    lost
}

#[test]
fn older_rows_take_the_place_of_lost_ones_with_the_next_commit() {
    let shards = |group: &[Owned]| -> BTreeMap<u32, Arc<Shard>> {
        let held = group.iter().flat_map(Owned::held);
        held.map(|(number, shard)| (number, Arc::clone(shard))).collect()
    };
    let counted = |group: &[Owned]| group.iter().map(Owned::touches).sum::<u64>();
    let mut group = group(4);
    let empty = shards(&group);
    stage(&mut group, touch);
    commit(&mut group, 1);
    let saved = shards(&group);
    for _ in 0..2 {
        stage(&mut group, touch);
        commit(&mut group, 1);
    }
    // With two workers, both copies of some shards are lost.
    group.truncate(2);
    let lost = go_on(&mut group, 2, &saved);
    assert!(!lost.is_empty() && lost.len() < SHARDS_OF_TEST as usize, "{lost:?}");
    let is_lost = |id: &u64| lost.contains(&shard_of(0, *id, SHARDS_OF_TEST));
    let lost_rows = (0..ROWS).filter(is_lost).count() as u64;
    let left = 4 * 3 * ROWS - 4 * 2 * lost_rows;
    assert!(lost_rows > 0 && counted(&group) == left, "{lost_rows} rows");
    // The group breaks before its next step: the same rows are lost to the next one, for which the
    // checkpoint is damaged.
    stage(&mut group, touch);
    assert_eq!(go_on(&mut group, 3, &empty), lost);
    assert_eq!(counted(&group), left - 4 * lost_rows);
    stage(&mut group, touch);
    // A rank has committed the step in the second group.
    commit(&mut group, 2);
    assert_eq!(counted(&group), left + 2 * ROWS);
    regroup(&mut group, 4, 4);
    for _ in 0..=SHARDS_OF_TEST {
        stage(&mut group, touch);
        commit(&mut group, 4);
    }
    let digests = |worker: &Owned| -> Vec<u64> { worker.held().map(|(_, s)| s.digest()).collect() };
    assert_eq!(digests(&group[0]).len(), SHARDS_OF_TEST as usize);
    assert_eq!(digests(&group[0]), digests(&group[1]), "copies are equal");
}

#[test]
fn only_rows_of_the_history_of_the_step_belong_to_its_state() {
    let header = |step, generation, staged: &[u64]| {
        Some(OwnedHeader { step, generation, staged: Some(staged.to_vec()) })
    };
    // The group of generation 3 has committed step 5.
    let headers = [
        header(4, 2, &[]),
        header(4, 2, &[2, 4]),
        header(5, 4, &[]),
        Some(OwnedHeader::of_joiner(5, 3)),
        header(4, 2, &[2, 3]),
        header(5, 3, &[6]),
        None,
    ];
    let holds = vec![false, false, false, false, true, true, false];
    assert_eq!(
        Recovery::plan(5, 3, &headers),
        Some(Recovery { generation: 3, holds, root: 4 }),
        "those that have committed it, or staged it in that group"
    );
    assert_eq!(Recovery::plan(5, 3, &headers[..4]), None);
}

const SHARDS_OF_TEST: u32 = 16;
const ROWS: u64 = 20;

#[test]
fn the_longer_a_step_computes_the_more_shards_are_copied_after_it() {
    let copied = |computed| {
        let mut group = group(3);
        group.push(worker(4));
        group.iter_mut().for_each(|worker| worker.settings.copy_rate = 50);
        regroup(&mut group, 0, 2);
        stage_computed(&mut group, Duration::from_micros(computed), touch);
        commit(&mut group, 2);
        let copies = &group[0].group().copies;
        assert!(group.iter().all(|worker| worker.group().copies == *copies));
        copies.iter().filter(|copy| copy.to == 4).count()
    };
    assert_eq!(copied(0), 1);
    assert!(copied(100) > 1, "{}", copied(100));
}
