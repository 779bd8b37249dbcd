//! Conformance suite: the required behaviour of every [`Communicator`], as tests that any backend
//! can run.
//!
//! A backend provides a function that [forms](Form) a [`Group`], and calls these functions from its
//! tests; a violation panics. Every rank runs on its own thread. No test waits for longer than a
//! minute.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use crate::{BLOCK_BYTES_MAX, CollectiveError, Communicator};

mod exchanges;

use exchanges::{exchange_equal, exchange_random, sum_parts, sums_of_parts_are_right};
pub use exchanges::{exchanges_deliver_every_payload, parts_are_summed_where_they_belong};

/// One rank of a group.
pub struct Rank {
    /// Communicator of the rank. Dropping it leaves the group.
    pub communicator: Box<dyn Communicator + Send>,
    /// Aborts, from any thread, the current and all future operations of this rank in its group.
    pub abort: Arc<dyn Fn() + Send + Sync>,
}

/// All ranks of a group, in rank order.
pub type Group = Vec<Rank>;

/// Forms a new group of the given number of ranks.
pub type Form<'a> = &'a (dyn Fn(usize) -> Group + Sync);

impl std::fmt::Debug for Rank {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rank").field("rank", &self.communicator.rank()).finish_non_exhaustive()
    }
}

/// Checks sums of many lengths in groups of 1 to 9 ranks: exact, bit-identical on every rank,
/// headers in rank order, sources unchanged. `exact`: whether elements are sent without rounding.
pub fn sums_are_exact_and_identical_on_every_rank(form: Form<'_>, exact: bool) {
    for world in 1..=9 {
        let mut group = form(world);
        let lens = [0, 1, 2, 3, 7, 97, 1021, 8191, 8192, 8193, 65_537, 262_147];
        let huge = if world == 3 { &[2_097_169][..] } else { &[] };
        for &len in lens.iter().chain(huge) {
            let results = on_ranks(&mut group, move |ring| {
                let src = part(ring.rank(), len);
                let mut dst = vec![f32::NAN; len];
                let headers =
                    ring.all_reduce(&header(ring.rank()), &src, &mut dst).map_err(report)?;
                if src != part(ring.rank(), len) {
                    return Err("the source has changed".to_owned());
                }
                Ok((headers, dst))
            });
            let headers: Vec<_> = (0..world).map(header).collect();
            let context = format!("world {world}, len {len}");
            let results: Vec<_> = results
                .into_iter()
                .map(|r| r.unwrap_or_else(|e| panic!("{context}: {e}")))
                .collect();
            for (got, sums) in &results {
                assert_eq!(got, &headers, "{context}");
                let same = sums.iter().zip(&results[0].1).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{context}: replicas differ");
            }
            let parts: Vec<_> = (0..world).map(|rank| part(rank, len)).collect();
            for (index, sum) in results[0].1.iter().enumerate() {
                let sum_of_parts: f32 = parts.iter().map(|part| part[index]).sum();
                let off = (sum - sum_of_parts).abs();
                let most = if exact { 0.0 } else { world as f32 / 256.0 * 16.0 * world as f32 };
                assert!(off <= most, "{context}: {sum} at {index}, expected {sum_of_parts}");
            }
        }
    }
}

/// Checks that NaN and infinity have the same bits on every rank.
pub fn nan_and_infinity_have_the_same_bits_on_every_rank(form: Form<'_>) {
    for world in 2..=5 {
        let mut group = form(world);
        for len in [3, 50_000] {
            let sums = on_ranks(&mut group, move |ring| {
                let odd = [
                    f32::from_bits(0x7fc0_0001 + ring.rank() as u32),
                    f32::INFINITY,
                    f32::NEG_INFINITY,
                ];
                let src: Vec<f32> = (0..len).map(|index| odd[(index + ring.rank()) % 3]).collect();
                let mut dst = vec![0.0; len];
                ring.all_reduce(&[], &src, &mut dst).map_err(report)?;
                Ok::<_, String>(dst.into_iter().map(f32::to_bits).collect::<Vec<_>>())
            });
            let sums: Vec<_> =
                sums.into_iter().map(|sum| sum.unwrap_or_else(|e| panic!("{e}"))).collect();
            assert!(
                sums.iter().all(|sum| *sum == sums[0]),
                "world {world}, len {len}: replicas differ"
            );
        }
    }
}

/// Checks random sequences of operations, from a seed: each has the documented result.
pub fn any_sequence_of_operations_is_correct(form: Form<'_>) {
    for seed in 0..27_u64 {
        let world = 1 + seed as usize % 9;
        let mut group = form(world);
        let results = on_ranks(&mut group, move |ring| {
            let mut random = Random(seed);
            (0..25).try_for_each(|step| any_operation(ring, &mut random, step))
        });
        for result in results {
            result.unwrap_or_else(|error| panic!("seed {seed}, world {world}: {error}"));
        }
    }
}

/// Checks that a rank that leaves after an operation does not fail the operation of the other
/// ranks.
pub fn a_rank_that_leaves_after_an_operation_does_not_fail_the_others(form: Form<'_>) {
    for world in 2..=5 {
        for (bytes, round) in [(0, 0), (10, 1), (100_000, 2), (100_000, 3)] {
            let results = on_each(form(world), move |mut rank| {
                // Ranks leave one after the other.
                thread::sleep(Duration::from_micros(300 * rank.communicator.rank() as u64));
                exchange_equal(&mut *rank.communicator, bytes).map_err(report)
            });
            assert_eq!(results, vec![Ok(true); world], "world {world}, round {round}");
        }
        for len in [1, 10_007] {
            for round in 0..5 {
                let sums = on_each(form(world), move |mut rank| {
                    let src = vec![1.0; len];
                    let mut dst = vec![0.0; len];
                    rank.communicator
                        .all_reduce(b"last", &src, &mut dst)
                        .map(|_| dst)
                        .map_err(report)
                });
                for sum in sums {
                    let sum =
                        sum.unwrap_or_else(|error| panic!("world {world}, round {round}: {error}"));
                    assert!(sum == vec![world as f32; len], "world {world}, round {round}");
                }
            }
        }
    }
}

/// Lets one rank leave, or aborts it, at any point of any operation. Checks that all ranks end with
/// an error, and that the results before that are correct. Groups of NCCL end slowly, so several
/// run at once.
pub fn a_rank_that_ends_at_any_point_ends_all_without_wrong_results(form: Form<'_>) {
    thread::scope(|scope| {
        for lane in 0..4 {
            scope.spawn(move || (lane..40).step_by(4).for_each(|seed| end_a_rank(form, seed)));
        }
    });
}

fn end_a_rank(form: Form<'_>, seed: u64) {
    let mut random = Random(seed);
    let world = 2 + random.below(4);
    let (victim, is_abort) = (random.below(world), random.below(2) == 0);
    let exchanges = random.below(2) == 0;
    let len = [0, 5, 4000, 9000, 200_000, 2_000_000][random.below(6)];
    let delay = Duration::from_micros(random.below(4000) as u64);
    let group = form(world);
    let abort = group[victim].abort.clone();
    let start = Arc::new(Barrier::new(world + 1));
    let begin = start.clone();
    let aborter = thread::spawn(move || {
        begin.wait();
        thread::sleep(delay);
        if is_abort {
            abort();
        }
    });
    let results = on_each(group, move |mut rank| {
        let ring = &mut *rank.communicator;
        let src = vec![1.0; len];
        let mut dst = vec![0.0; len];
        start.wait();
        let mut rounds = 0_usize;
        loop {
            if !is_abort && ring.rank() == victim && rounds == seed as usize % 4 {
                return Ok(());
            }
            dst.fill(f32::NAN);
            let result = match exchanges {
                false => ring.all_reduce(&[7], &src, &mut dst),
                true if seed.is_multiple_of(3) => {
                    let result = sum_parts(ring, world, &mut dst);
                    if result.is_err() && dst.iter().any(|sum| !sum.is_nan()) {
                        return Err("a sum that failed has changed its destination".to_owned());
                    }
                    result.map(|()| vec![vec![7]; world])
                }
                true => exchange_equal(ring, 2 * len).map(|is_right| {
                    dst.fill(if is_right { world as f32 } else { f32::NAN });
                    vec![vec![7]; world]
                }),
            };
            match result {
                Ok(headers) if headers != vec![[7]; world] => {
                    return Err("wrong headers".to_owned());
                }
                Ok(_) if dst.iter().any(|sum| *sum != world as f32) => {
                    return Err("wrong sum".to_owned());
                }
                Ok(_) => rounds += 1,
                Err(CollectiveError::Aborted { .. } | CollectiveError::PeerLost { .. }) => {
                    break;
                }
                Err(error) => return Err(report(error)),
            }
        }
        match ring.all_gather(&[]) {
            Err(CollectiveError::Aborted { .. }) => Ok(()),
            other => Err(format!("after a failure: {other:?}")),
        }
    });
    aborter.join().expect("the thread only sleeps");
    for result in results {
        result.unwrap_or_else(|error| {
            panic!("seed {seed}, world {world}, victim {victim}, len {len}: {error}")
        });
    }
}

/// Checks that ranks that wait for an absent rank can be aborted from outside.
pub fn a_waiting_rank_can_be_aborted(form: Form<'_>) {
    for (world, len) in [(2, 1), (2, 100_000), (3, 1), (3, 100_000), (5, 1), (5, 100_000)] {
        for absent in 0..world {
            for exchanges in [false, true] {
                let mut group = form(world);
                let absent_rank = group.remove(absent);
                let aborts: Vec<_> = group.iter().map(|rank| rank.abort.clone()).collect();
                let aborter = thread::spawn(move || {
                    thread::sleep(Duration::from_millis(5));
                    aborts.iter().for_each(|abort| abort());
                });
                let results = on_each(group, move |mut rank| {
                    if exchanges {
                        return exchange_equal(&mut *rank.communicator, 10 * len).map(drop);
                    }
                    rank.communicator
                        .all_reduce(&[], &vec![1.0; len], &mut vec![0.0; len])
                        .map(drop)
                });
                aborter.join().expect("the thread only sleeps");
                for result in results {
                    // A rank that sees another rank's closed link first reports that.
                    let is_expected = matches!(
                        result,
                        Err(CollectiveError::Aborted { .. } | CollectiveError::PeerLost { .. })
                    );
                    assert!(is_expected, "world {world}, absent {absent}: {result:?}");
                }
                drop(absent_rank);
            }
        }
    }
}

/// Checks that all ranks fail when they disagree on the length or on the operation.
pub fn a_disagreement_fails_every_rank(form: Form<'_>) {
    for world in 2..=5 {
        for (len, other) in [(5, 7), (5, 50_000), (50_000, 50_001), (300_000, 0)] {
            let mut group = form(world);
            let results = on_ranks(&mut group, move |ring| {
                let len = if ring.rank() == 1 { other } else { len };
                ring.all_reduce(&[], &vec![1.0; len], &mut vec![0.0; len]).map(drop)
            });
            assert!(
                results.iter().all(Result::is_err),
                "world {world}, {len} or {other}: {results:?}"
            );
            let named = results.iter().any(|r| matches!(r, Err(CollectiveError::Protocol { .. })));
            assert!(named, "world {world}, {len} or {other}: {results:?}");
        }
        let mut group = form(world);
        let results = on_ranks(&mut group, |ring| match ring.rank() {
            0 => ring.all_gather(&[]).map(drop),
            _ => ring.all_reduce(&[], &[1.0], &mut [0.0]).map(drop),
        });
        assert!(results.iter().all(Result::is_err), "world {world}: {results:?}");
        let mut group = form(world);
        let results = on_ranks(&mut group, move |ring| {
            let mut parts = vec![vec![0; 1000]; world];
            parts[0].truncate(1000 - usize::from(ring.rank() == 1));
            let mut receive: Vec<&mut [u8]> = parts.iter_mut().map(Vec::as_mut_slice).collect();
            ring.exchange_into(&vec![&[1; 1000][..]; world], &mut receive)
        });
        assert!(
            matches!(results[1], Err(CollectiveError::Protocol { rank: 0, .. })),
            "world {world}: {results:?}"
        );
        for (other, others) in (0..world).flat_map(|other| [(other, 0), (other, 1), (other, 2)]) {
            let mut group = form(world);
            let results = on_ranks(&mut group, move |ring| match (ring.rank() == other, others) {
                (false, _) => exchange_equal(ring, 1000).map(drop),
                (true, 0) => ring.all_gather(&[]).map(drop),
                (true, 1) => ring.all_reduce(&[], &[1.0], &mut [0.0]).map(drop),
                (true, _) => {
                    ring.all_reduce(&[], &vec![1.0; 100_000], &mut vec![0.0; 100_000]).map(drop)
                }
            });
            assert!(
                results.iter().all(Result::is_err),
                "world {world}, {other} in {others}: {results:?}"
            );
        }
    }
}

/// Checks that an invalid call is refused and leaves the group unchanged.
pub fn an_invalid_call_changes_nothing(form: Form<'_>) {
    for world in 1..=3 {
        let mut group = form(world);
        let results = on_ranks(&mut group, move |ring| {
            let is_invalid =
                |result: Result<(), _>| matches!(result, Err(CollectiveError::Invalid(_)));
            let refused = is_invalid(ring.all_reduce(&[], &[1.0], &mut []).map(drop))
                && is_invalid(ring.broadcast(world, &mut []))
                && is_invalid(ring.broadcast_bytes(world + 5, &mut Vec::new()))
                && is_invalid(ring.all_gather(&vec![0; BLOCK_BYTES_MAX + 1]).map(drop))
                && is_invalid(ring.exchange(&vec![&[0][..]; world + 1], &mut Vec::new()))
                && is_invalid(ring.exchange(&[], &mut Vec::new()))
                && is_invalid(ring.exchange_into(&vec![&[][..]; world], &mut []))
                && is_invalid(sum_parts(ring, world + 1, &mut [0.0]))
                && is_invalid(ring.reduce_scatter(
                    &vec![&[][..]; world],
                    &mut [0.0],
                    &mut Vec::new(),
                ))
                && is_invalid(
                    ring.all_reduce(&vec![0; BLOCK_BYTES_MAX + 1], &[1.0], &mut [0.0]).map(drop),
                );
            (refused, ring.all_gather(b"still here").map_err(report))
        });
        assert_eq!(results, vec![(true, Ok(vec![b"still here".to_vec(); world])); world]);
    }
}

fn any_operation(
    ring: &mut dyn Communicator,
    random: &mut Random,
    step: usize,
) -> Result<(), String> {
    let (rank, world) = (ring.rank(), ring.world_size());
    let bytes = |rank: usize, len: usize| vec![(rank * 31 + len + step) as u8; len];
    let root = random.below(world);
    let lens: Vec<_> = (0..world).map(|_| random.below(3000)).collect();
    let len = [lens[0], lens[0] * 10][random.below(2)];
    let is_right = match random.below(6) {
        0 => {
            let all: Vec<_> = (0..world).map(|rank| bytes(rank, lens[rank])).collect();
            ring.all_gather(&all[rank]).map_err(report)? == all
        }
        1 => {
            let mut dst = vec![f32::NAN; len];
            let all: Vec<_> = (0..world).map(|rank| bytes(rank, lens[rank])).collect();
            let headers =
                ring.all_reduce(&all[rank], &vec![rank as f32; len], &mut dst).map_err(report)?;
            let sum = (world * (world - 1) / 2) as f32;
            headers == all && dst == vec![sum; len]
        }
        2 => {
            // The length on the root does not depend on the length on other ranks.
            let mut got = bytes(rank, lens[rank] * 200);
            ring.broadcast_bytes(root, &mut got).map_err(report)?;
            got == bytes(root, lens[root] * 200)
        }
        3 => exchange_random(ring, random).map_err(report)?,
        4 => sums_of_parts_are_right(ring, random).map_err(report)?,
        _ => {
            let mut buf = part(rank, len);
            ring.broadcast(root, &mut buf).map_err(report)?;
            buf == part(root, len)
        }
    };
    if is_right { Ok(()) } else { Err(format!("rank {rank}, step {step}: wrong result")) }
}

/// Runs `act` on every rank concurrently.
fn on_ranks<T: Send + 'static>(
    group: &mut Group,
    act: impl Fn(&mut dyn Communicator) -> T + Send + Sync + 'static,
) -> Vec<T> {
    on_all(group, move |rank| act(&mut *rank.communicator))
}

/// As [`on_each`], with items that are kept, in their order.
#[doc(hidden)]
pub fn on_all<S: Send + 'static, T: Send + 'static>(
    items: &mut Vec<S>,
    act: impl Fn(&mut S) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let both = on_each(std::mem::take(items), move |mut item| {
        let result = act(&mut item);
        (item, result)
    });
    let (kept, results) = both.into_iter().unzip();
    *items = kept;
    results
}

/// Runs `act` on each rank, or what it is made of, on a thread of its own. A panic on one drops its
/// communicator and so ends the others; a hang panics here.
#[doc(hidden)]
pub fn on_each<S: Send + 'static, T: Send + 'static>(
    items: Vec<S>,
    act: impl Fn(S) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let act = Arc::new(act);
    let (done, results) = mpsc::channel();
    let count = items.len();
    for (index, item) in items.into_iter().enumerate() {
        let (done, act) = (done.clone(), act.clone());
        thread::spawn(move || done.send((index, act(item))));
    }
    drop(done);
    let mut all: Vec<(usize, T)> = (0..count)
        .map(|_| match results.recv_timeout(WATCHDOG) {
            Ok(result) => result,
            Err(RecvTimeoutError::Timeout) => panic!("a rank hangs"),
            Err(RecvTimeoutError::Disconnected) => panic!("a rank has panicked"),
        })
        .collect();
    all.sort_by_key(|(index, _)| *index);
    all.into_iter().map(|(_, result)| result).collect()
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn report(error: CollectiveError) -> String {
    format!("{error:?}")
}

fn header(rank: usize) -> Vec<u8> {
    vec![rank as u8; rank * 5000]
}

/// Contribution of a rank: whole numbers from -8 to 7, so that every sum is exact in any order and
/// dtype.
fn part(rank: usize, len: usize) -> Vec<f32> {
    (0..len).map(|index| ((index * 7 + index / 16 + rank * 5) % 16) as f32 - 8.0).collect()
}

/// Sebastiano Vigna's splitmix64.
#[doc(hidden)]
#[derive(Debug)]
pub struct Random(pub u64);

impl Random {
    /// Returns a length up to `most`: every order of magnitude is equally likely, and values next
    /// to a power of two are frequent, since algorithms change there.
    fn length(&mut self, most: usize) -> usize {
        let power = 1_usize << self.below(most.ilog2() as usize + 1);
        let len = match self.below(3) {
            0 => power - 1 + self.below(3),
            _ => power + self.below(power) - self.below(2),
        };
        len.min(most)
    }

    /// Draws a number below `bound`.
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % bound as u64) as usize
    }
}

/// Limit that only a hang reaches.
const WATCHDOG: Duration = Duration::from_secs(60);
