//! What exchanges do.

use std::thread;
use std::time::Duration;

use super::{Form, Random, on_all, report};
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
            let results = on_all(&mut group, move |ring| {
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
