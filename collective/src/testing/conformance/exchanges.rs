//! What exchanges do.

use std::thread;
use std::time::Duration;

use super::{Form, Random, on_ranks, report};
use crate::{CollectiveError, Communicator};

/// Checks exchanges in groups of 1 to 9 ranks: empty and equal payloads, payloads of all lengths,
/// all of one rank, all for one rank, only between two, with a late rank, and into buffers that
/// hold something else.
pub fn exchanges_deliver_every_payload(form: Form<'_>) {
    for world in 1..=9 {
        let mut group = form(world);
        let late = world / 2;
        let mut receive = vec![vec![vec![7; 9]; 3]; world];
        for (case, bytes) in payload_lengths(world).into_iter().enumerate() {
            let (lens, buffers) = (bytes.clone(), std::mem::take(&mut receive));
            let results = on_ranks(&mut group, move |ring| {
                let (rank, mut got) = (ring.rank(), buffers[ring.rank()].clone());
                if case % 3 == 2 && rank == late {
                    thread::sleep(Duration::from_millis(2));
                }
                exchange(ring, &lens, &mut got).map(|()| got).map_err(report)
            });
            for (rank, got) in results.into_iter().enumerate() {
                let context = format!("world {world}, case {case}, rank {rank}");
                let got = got.unwrap_or_else(|error| panic!("{context}: {error}"));
                assert!(got == expected(rank, &bytes), "{context}: another payload");
                receive.push(got);
            }
        }
    }
}

/// Lengths of payloads, by sender and receiver.
fn payload_lengths(world: usize) -> Vec<Vec<Vec<usize>>> {
    let of = |len: &dyn Fn(usize, usize) -> usize| {
        (0..world).map(|from| (0..world).map(|to| len(from, to)).collect()).collect()
    };
    let mut random = Random(world as u64);
    let mut cases = vec![of(&|_, _| 0), of(&|_, _| 1), of(&|_, _| 4096), of(&|_, _| 65_537)];
    cases.push(of(&|from, _| if from == 0 { 300_000 } else { 0 }));
    cases.push(of(&|_, to| if to == world - 1 { 300_001 } else { 3 }));
    cases.push(of(&|from, to| if (from, to) == (world - 1, 0) { 3_000_000 } else { 0 }));
    cases.push(of(&|from, to| from * 1000 + to));
    cases.extend((0..4).map(|_| random_lengths(world, &mut random, 400_000)));
    cases.push(of(&|_, _| 0));
    cases
}

fn random_lengths(world: usize, random: &mut Random, most: usize) -> Vec<Vec<usize>> {
    (0..world).map(|_| (0..world).map(|_| random.length(most)).collect()).collect()
}

/// Gives each rank its payload of these lengths.
fn exchange(
    ring: &mut dyn Communicator,
    lens: &[Vec<usize>],
    receive: &mut Vec<Vec<u8>>,
) -> Result<(), CollectiveError> {
    let lens = lens[ring.rank()].iter().enumerate();
    let payloads: Vec<_> = lens.map(|(to, bytes)| payload(ring.rank(), to, *bytes)).collect();
    let send: Vec<&[u8]> = payloads.iter().map(Vec::as_slice).collect();
    ring.exchange(&send, receive)
}

/// The payloads that a rank gets.
fn expected(rank: usize, lens: &[Vec<usize>]) -> Vec<Vec<u8>> {
    lens.iter().enumerate().map(|(from, lens)| payload(from, rank, lens[rank])).collect()
}

/// Payload of a rank for another one.
fn payload(from: usize, to: usize, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at / 3 + from * 41 + to * 7) as u8).collect()
}

/// Gives each rank as many bytes; returns whether all payloads are right.
pub(super) fn exchange_equal(
    ring: &mut dyn Communicator,
    bytes: usize,
) -> Result<bool, CollectiveError> {
    let (rank, world) = (ring.rank(), ring.world_size());
    let payloads: Vec<_> = (0..world).map(|to| vec![(rank * 16 + to) as u8; bytes]).collect();
    let send: Vec<&[u8]> = payloads.iter().map(Vec::as_slice).collect();
    let mut got = vec![vec![9; 100]];
    ring.exchange(&send, &mut got)?;
    Ok(got == (0..world).map(|from| vec![(from * 16 + rank) as u8; bytes]).collect::<Vec<_>>())
}

/// Exchanges payloads of random lengths; returns whether all are right.
pub(super) fn exchange_random(
    ring: &mut dyn Communicator,
    random: &mut Random,
) -> Result<bool, CollectiveError> {
    let lens = random_lengths(ring.world_size(), random, 200_000);
    let mut got = Vec::new();
    exchange(ring, &lens, &mut got)?;
    Ok(got == expected(ring.rank(), &lens))
}

/// Checks sums of parts, in groups of 1 to 9 ranks: of lengths that differ between ranks, in rank
/// order, with sources unchanged.
pub fn parts_are_summed_where_they_belong(form: Form<'_>) {
    for world in 1..=9 {
        let mut group = form(world);
        let results = on_ranks(&mut group, move |ring| {
            let mut random = Random(world as u64);
            (0..6).try_for_each(|round| match sums_of_parts_are_right(ring, &mut random) {
                Ok(true) => Ok(()),
                Ok(false) => Err(format!("round {round}: wrong")),
                Err(error) => Err(report(error)),
            })
        });
        assert_eq!(results, vec![Ok(()); world], "world {world}");
    }
}

/// Sums parts of random lengths; returns whether this rank's is right.
pub(super) fn sums_of_parts_are_right(
    ring: &mut dyn Communicator,
    random: &mut Random,
) -> Result<bool, CollectiveError> {
    let (rank, world) = (ring.rank(), ring.world_size());
    let lens: Vec<usize> = (0..world).map(|_| random.length(100_000)).collect();
    // Sums of these depend on the order.
    let part = |from: usize, to: usize| -> Vec<f32> {
        (0..lens[to]).map(|at| 0.1 + (from * 7 + to * 3 + at % 101) as f32 / 3.0).collect()
    };
    let given: Vec<Vec<f32>> = (0..world).map(|to| part(rank, to)).collect();
    let src: Vec<&[f32]> = given.iter().map(Vec::as_slice).collect();
    let (mut dst, mut scratch) = (vec![f32::NAN; lens[rank]], vec![7.0; 9]);
    ring.reduce_scatter(&src, &mut dst, &mut scratch)?;
    let mut right = part(0, rank);
    for from in 1..world {
        right.iter_mut().zip(part(from, rank)).for_each(|(sum, part)| *sum += part);
    }
    Ok(dst == right && (0..world).all(|to| given[to] == part(rank, to)))
}

/// Gives ones to each of `ranks` ranks, as many as `dst` has, and sums what this one gets.
pub(super) fn sum_parts(
    ring: &mut dyn Communicator,
    ranks: usize,
    dst: &mut [f32],
) -> Result<(), CollectiveError> {
    let ones = vec![1.0; dst.len()];
    ring.reduce_scatter(&vec![&ones[..]; ranks], dst, &mut Vec::new())
}
