//! Small groups: a step is stopped at each of its points by the death of a rank.

use super::*;
use crate::owned::recovery::{OwnedHeader, Recovery};

const LAYOUT: ChunkLayout = ChunkLayout { parameters: 150, first: 0, slots: 2, chunk_len: 16 };

/// A rank: its chunks, and all parameters.
#[derive(Clone, Debug)]
struct Rank {
    chunks: Chunks,
    parameters: Vec<f32>,
}

/// The sum of the gradients of a step.
fn sum(step: u64) -> Vec<f32> {
    (0..LAYOUT.parameters as u64).map(|i| ((i * 7 + step * 3) % 11) as f32 - 5.0).collect()
}

/// A momentum, and a count of the updates.
fn apply(sum: &[f32], parameters: &mut [f32], slots: &mut [f32]) {
    let (momenta, counts) = slots.split_at_mut(sum.len());
    for (((p, m), count), s) in parameters.iter_mut().zip(momenta).zip(counts).zip(sum) {
        *m = 0.5 * *m + s;
        *p -= *m;
        *count += 1.0;
    }
}

/// The state of a worker that holds everything, after so many steps.
fn reference(steps: u64) -> (Vec<f32>, Vec<f32>) {
    let (mut parameters, mut slots) = (vec![1.0; 150], vec![0.0; 300]);
    (0..steps).for_each(|step| apply(&sum(step), &mut parameters, &mut slots));
    (parameters, slots)
}

fn members(workers: &[u64]) -> Vec<Member> {
    workers.iter().map(|&worker| Member::new(worker, worker)).collect()
}

fn without_state(worker: u64) -> Rank {
    Rank {
        chunks: Chunks::of_optimizer(worker, LAYOUT).copying(300),
        parameters: vec![f32::NAN; 150],
    }
}

/// A group of so many workers, which begins.
fn group(workers: u64) -> Vec<Rank> {
    let ids: Vec<u64> = (1..=workers).collect();
    let begin = |&worker: &u64| {
        let mut rank = without_state(worker);
        rank.chunks.create(1, members(&ids));
        rank.parameters.fill(1.0);
        rank
    };
    ids.iter().map(begin).collect()
}

/// What rank `to` receives of the messages that each rank has for all ranks.
fn received(sent: &[Vec<Vec<u8>>], to: usize) -> Vec<Vec<u8>> {
    sent.iter().map(|messages| messages[to].clone()).collect()
}

fn copy_chunks(ranks: &mut [Rank]) {
    let sent: Vec<_> = ranks.iter().filter_map(|rank| rank.chunks.copies()).collect();
    assert!(sent.is_empty() || sent.len() == ranks.len(), "all ranks come to the same");
    for (to, rank) in ranks.iter_mut().enumerate().filter(|_| !sent.is_empty()) {
        rank.chunks.receive_copies(&received(&sent, to)).unwrap();
    }
}

impl Rank {
    fn stage(&mut self, step: u64) {
        let sum = sum(step);
        let needed = (0..LAYOUT.chunks()).filter(|&chunk| self.chunks.needs_sum(chunk));
        let sums = needed.map(|chunk| (chunk, sum[LAYOUT.range(chunk)].to_vec())).collect();
        self.chunks.stage(ChunkSums { sums, norm: None });
    }

    /// Whether something is staged of the step that this group commits.
    fn commit(&mut self, generation: u64) -> bool {
        let commit = StepCommit { generation, divisor: 1.0, is_applied: true };
        let parameters = &mut self.parameters;
        let apply = |chunks: Vec<ChunkUpdate<'_>>| {
            for ChunkUpdate { range, slots, sum, .. } in chunks {
                apply(sum, &mut parameters[range], slots);
            }
        };
        self.chunks.commit(commit, apply).is_some()
    }
}

/// All ranks but those that have it already take the parameters of each chunk from its owner.
fn gather(ranks: &mut [Rank]) {
    for chunk in 0..LAYOUT.chunks() {
        let range = LAYOUT.range(chunk);
        let owner = ranks[0].chunks.holders(chunk)[0];
        let of_owner = ranks[owner].parameters[range.clone()].to_vec();
        ranks.iter_mut().for_each(|rank| rank.parameters[range.clone()].copy_from_slice(&of_owner));
    }
}

/// A whole step of a group.
fn step(ranks: &mut [Rank], generation: u64) {
    let step = ranks[0].chunks.step().unwrap();
    copy_chunks(ranks);
    ranks.iter_mut().for_each(|rank| rank.stage(step));
    assert!(ranks.iter_mut().all(|rank| rank.commit(generation)));
    let balance = ranks.iter().map(|rank| rank.chunks.compared().balance());
    assert_eq!(balance.fold(0, u64::wrapping_add), 0, "all copies are equal");
    gather(ranks);
}

/// Forms another group of these workers; ranks that are one step behind commit what they have
/// staged of the generation that has. Returns the shards that are lost, if any are.
fn regroup(ranks: &mut [Rank], generation: u64) -> Result<(), Vec<u32>> {
    let headers: Vec<Option<OwnedHeader>> = ranks.iter().map(|rank| rank.chunks.header()).collect();
    let step = ranks.iter().filter_map(|rank| rank.chunks.step()).max().unwrap();
    let of = OwnedHeader::generation_of(step, &headers).unwrap();
    let recovery = Recovery::plan(step, of, &headers).unwrap();
    for rank in ranks.iter_mut().filter(|rank| rank.chunks.step().map(|at| at + 1) == Some(step)) {
        rank.commit(of);
    }
    let placement = ranks[recovery.root].chunks.placement().unwrap().clone();
    let workers: Vec<u64> = ranks.iter().map(|rank| rank.chunks.me).collect();
    for rank in ranks.iter_mut() {
        let group = (generation, members(&workers));
        rank.chunks.regroup((step, placement.clone()), &recovery, group).map_err(|lost| lost.0)?;
    }
    gather(ranks);
    Ok(())
}

/// The state of the group is that of a worker that holds everything, and each chunk has the copies
/// that it should have, with the same bits.
fn assert_is_as_of_one(ranks: &[Rank], steps: u64, is_settled: bool) {
    let (parameters, slots) = reference(steps);
    let mut copies = vec![0; LAYOUT.chunks() as usize];
    for rank in ranks {
        assert_eq!(rank.chunks.step(), Some(steps));
        assert_eq!(rank.parameters, parameters, "parameters of worker {}", rank.chunks.me);
        for (chunk, held) in rank.chunks.held() {
            assert_eq!(&**held, LAYOUT.cut(chunk, &slots).slots(), "chunk {chunk}");
            copies[chunk as usize] += 1;
        }
    }
    let wanted = ranks.len().min(2);
    assert!(copies.iter().all(|&n| n == wanted || (!is_settled && n > 0)), "{copies:?}");
    let digests = ranks.iter().map(|rank| rank.chunks.digest()).fold(0, u64::wrapping_add);
    assert_eq!(digests, LAYOUT.digest(&slots));
}

#[test]
fn chunks_cover_the_parameters_and_are_cut_out_of_all_slots_and_pasted_back() {
    assert_eq!(LAYOUT.chunks(), 10);
    let ranges: Vec<_> = (0..10).flat_map(|chunk| LAYOUT.range(chunk)).collect();
    assert_eq!(ranges, (0..150).collect::<Vec<_>>());
    assert_eq!((LAYOUT.chunks_in(0..32), LAYOUT.chunks_in(32..150)), (0..2, 2..10));
    let slots: Vec<f32> = (0..300).map(|i| i as f32).collect();
    assert_eq!(
        LAYOUT.cut(9, &slots).slots(),
        [144, 145, 146, 147, 148, 149, 294, 295, 296, 297, 298, 299].map(|i| i as f32)
    );
    let mut pasted = vec![0.0; 300];
    for chunk in 0..10 {
        let saved = LAYOUT.decode(chunk, &LAYOUT.cut(chunk, &slots).encode()).unwrap();
        LAYOUT.paste(chunk, saved.slots(), &mut pasted);
    }
    assert_eq!(pasted, slots);
    assert!(LAYOUT.decode(9, &[0; 128]).is_err() && LAYOUT.decode(10, &[0; 128]).is_err());
    // The first 20 parameters, a chunk and a part of one, have no state.
    let layout = LAYOUT.from(20);
    let (slots, mut pasted) = (&slots[..260], vec![0.0; 260]);
    let saved: Vec<_> = (0..10).map(|chunk| layout.cut(chunk, slots)).collect();
    assert_eq!(saved[0].slots(), [0.0; 0]);
    let of_second = (0..12).chain(130..142).map(|i| i as f32).collect::<Vec<_>>();
    assert_eq!(saved[1].slots(), of_second);
    for saved in saved {
        let decoded = layout.decode(saved.number(), &saved.clone().encode()).unwrap();
        layout.paste(saved.number(), decoded.slots(), &mut pasted);
    }
    assert_eq!(pasted, slots);
    // Few parameters are few chunks, and many are no more than there may be.
    let layout = |parameters| ChunkLayout::new(parameters, 2);
    assert_eq!([1, 5000, 100 << 20].map(|n| layout(n).chunks()), [1, 2, 1024]);
    assert_eq!(layout(100 << 20).range(1023).end, 100 << 20);
}

#[test]
fn a_group_of_any_size_has_the_bits_of_one_worker() {
    for workers in 1..=4 {
        let mut ranks = group(workers);
        (0..3).for_each(|_| step(&mut ranks, 1));
        assert_is_as_of_one(&ranks, 3, true);
    }
}

/// Where a step is stopped: how many of the ranks have received copies, have staged, have committed
/// and have gathered the parameters of some chunks.
const POINTS: [[usize; 4]; 8] = [
    [0, 0, 0, 0],
    [3, 0, 0, 0],
    [3, 1, 0, 0],
    [3, 3, 0, 0],
    [3, 3, 1, 0],
    [3, 3, 2, 0],
    [3, 3, 3, 0],
    [3, 3, 3, 1],
];

/// Three workers have made a step; the second one is stopped at this point, and worker `killed` is
/// lost.
fn stopped(point: [usize; 4], killed: usize, generation: u64, ranks: &mut Vec<Rank>) {
    let [copied, staged, committed, gathered] = point;
    let at = ranks[0].chunks.step().unwrap();
    if copied > 0 {
        copy_chunks(ranks);
    }
    ranks.iter_mut().take(staged).for_each(|rank| rank.stage(at));
    assert!(ranks.iter_mut().take(committed).all(|rank| rank.commit(generation)));
    if gathered > 0 {
        // Half of the parameters of the first rank.
        let mut all = ranks.clone();
        gather(&mut all);
        ranks[0].parameters[..75].copy_from_slice(&all[0].parameters[..75]);
    }
    ranks.remove(killed);
}

#[test]
fn the_death_of_a_rank_at_any_point_of_a_step_loses_nothing() {
    for point in POINTS {
        for killed in 0..3 {
            let mut ranks = group(3);
            step(&mut ranks, 1);
            stopped(point, killed, 1, &mut ranks);
            let top = ranks.iter().filter_map(|rank| rank.chunks.step()).max().unwrap();
            regroup(&mut ranks, 2).unwrap();
            assert_is_as_of_one(&ranks, top, false);
            let until = top + 12;
            (top..until).for_each(|_| step(&mut ranks, 2));
            assert_is_as_of_one(&ranks, until, true);
            // Each of the two has all chunks now: another death is as harmless.
            ranks.remove(killed % 2);
            regroup(&mut ranks, 3).unwrap();
            step(&mut ranks, 3);
            assert_is_as_of_one(&ranks, until + 1, true);
        }
    }
}

#[test]
fn a_joiner_computes_at_once_and_takes_chunks_over_while_steps_go_on_also_if_one_dies() {
    for point in POINTS {
        for killed in 0..3 {
            let mut ranks = group(2);
            step(&mut ranks, 1);
            ranks.push(without_state(3));
            regroup(&mut ranks, 2).unwrap();
            assert_eq!(ranks[2].chunks.held().count(), 0);
            assert_is_as_of_one(&ranks, 1, false);
            stopped(point, killed, 2, &mut ranks);
            let top = ranks.iter().filter_map(|rank| rank.chunks.step()).max().unwrap();
            regroup(&mut ranks, 3).unwrap();
            (0..12).for_each(|_| step(&mut ranks, 3));
            assert_is_as_of_one(&ranks, top + 12, true);
        }
    }
}

#[test]
fn a_group_that_breaks_again_before_its_step_keeps_what_an_earlier_one_has_staged() {
    let mut ranks = group(2);
    ranks.iter_mut().for_each(|rank| rank.stage(0));
    assert!(ranks[0].commit(1));
    // The only rank that has committed is away in the next group, and comes back.
    let away = ranks.remove(0);
    regroup(&mut ranks, 2).unwrap();
    ranks[0].stage(0);
    ranks.insert(0, away);
    regroup(&mut ranks, 3).unwrap();
    assert_is_as_of_one(&ranks, 1, true);
}

#[test]
fn those_that_leave_hand_their_chunks_over_before() {
    let mut ranks = group(4);
    step(&mut ranks, 1);
    let leaves = [false, true, true, false];
    ranks.iter_mut().for_each(|rank| rank.chunks.begin_hand_over(&leaves));
    loop {
        let sent: Vec<_> = ranks.iter_mut().filter_map(|rank| rank.chunks.handed_over()).collect();
        if sent.is_empty() {
            break;
        }
        for (to, rank) in ranks.iter_mut().enumerate() {
            rank.chunks.take_over(&received(&sent, to)).unwrap();
        }
    }
    ranks.iter_mut().for_each(|rank| rank.chunks.end_hand_over());
    let mut leavers: Vec<Rank> = ranks.drain(1..3).collect();
    // All others are lost: those that have left come back with what they held.
    let held = leavers.iter().flat_map(|rank| rank.chunks.held());
    let held: Vec<u32> = held.map(|(chunk, _)| chunk).collect();
    let lost = regroup(&mut leavers, 2).unwrap_err();
    assert!((0..LAYOUT.chunks()).all(|chunk| held.contains(&chunk) != lost.contains(&chunk)));
    regroup(&mut ranks, 2).unwrap();
    assert_is_as_of_one(&ranks, 1, true);
    step(&mut ranks, 2);
    assert_is_as_of_one(&ranks, 2, true);
}

#[test]
fn the_loss_of_both_copies_is_found_by_all() {
    let mut ranks = group(4);
    step(&mut ranks, 1);
    let before = ranks[0].chunks.placement().unwrap().clone();
    ranks.truncate(2);
    let held_by_others = |chunk: &u32| before.holders(*chunk).iter().all(|&worker| worker > 2);
    let lost: Vec<u32> = (0..LAYOUT.chunks()).filter(held_by_others).collect();
    assert!(!lost.is_empty());
    assert_eq!(regroup(&mut ranks, 2), Err(lost));
}

#[test]
fn a_step_that_is_not_applied_changes_nothing_but_the_placement() {
    let mut ranks = group(2);
    step(&mut ranks, 1);
    let before = ranks[0].clone();
    let commit = StepCommit { generation: 1, divisor: 1.0, is_applied: false };
    ranks[0].stage(1);
    assert!(ranks[0].chunks.commit(commit, |_| panic!("nothing is applied")).is_some());
    assert_eq!(ranks[0].chunks.digest(), before.chunks.digest());
    assert_eq!(ranks[0].chunks.step(), Some(2));
}

#[test]
fn copies_that_are_not_what_was_asked_for_are_refused() {
    let mut ranks = group(2);
    ranks.push(without_state(3));
    step(&mut ranks[..2], 1);
    regroup(&mut ranks, 2).unwrap();
    let sent: Vec<_> = ranks.iter().filter_map(|rank| rank.chunks.copies()).collect();
    let good = received(&sent, 2);
    let from = good.iter().position(|message| !message.is_empty()).unwrap();
    let mut changed = |change: fn(&mut Vec<u8>)| {
        let mut messages = good.clone();
        change(&mut messages[from]);
        ranks[2].chunks.receive_copies(&messages).is_err()
    };
    assert!(changed(|message| message[0] ^= 1));
    assert!(changed(|message| message.truncate(9)));
    assert!(changed(|message| message.push(0)));
    assert!(!changed(|_| ()));
}
