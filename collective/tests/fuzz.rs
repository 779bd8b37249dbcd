//! A bounded run of the fuzz targets in `fuzz/`: valid inputs with random changes.

use elasticdl_collective::testing::fuzzing;
use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};

#[test]
fn valid_inputs_succeed_and_changed_ones_terminate() {
    let seeds = fuzzing::seeds();
    for (index, seed) in seeds.iter().enumerate() {
        assert!(fuzzing::ring(seed), "seed {index}");
    }
    for seed in 0..3000 {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut data = seeds[rng.random_range(0..seeds.len())].clone();
        for _ in 0..rng.random_range(1..4) {
            change(&mut data, &mut rng);
        }
        fuzzing::ring(&data);
    }
}

#[test]
fn any_input_in_place_of_a_state_transfer_terminates_both_sides() {
    let seeds = fuzzing::state_seeds();
    assert_eq!(seeds.iter().map(|seed| fuzzing::state(seed)).collect::<Vec<_>>(), [(2, 0), (0, 1)]);
    for seed in 0..1000 {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut data = seeds[rng.random_range(0..seeds.len())].clone();
        for _ in 0..rng.random_range(1..4) {
            change(&mut data, &mut rng);
        }
        fuzzing::state(&data);
    }
}

#[test]
fn random_bytes_are_never_a_valid_hello() {
    for seed in 0..20_000 {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut data: Vec<u8> = (0..96).map(|_| rng.random()).collect();
        if rng.random() {
            data[..8].copy_from_slice(b"EDLRING1");
        }
        fuzzing::hello(&data);
    }
}

/// Applies a random change: a flipped bit, a boundary value, a piece that is removed, duplicated or
/// moved, or noise.
fn change(data: &mut Vec<u8>, rng: &mut ChaCha8Rng) {
    if data.len() < 2 {
        return;
    }
    // Most changes are in the first frame headers.
    let most = if rng.random_range(0..3) == 0 { data.len() } else { data.len().min(130) };
    let at = rng.random_range(0..most);
    let end = (at + rng.random_range(1..60)).min(data.len());
    match rng.random_range(0..6) {
        0 => data[at] ^= 1 << rng.random_range(0..8),
        1 => {
            let edge = [0_u32, 1, u32::MAX, i32::MAX as u32, 1 << 24][rng.random_range(0..5)]
                .to_le_bytes();
            let end = (at + 4).min(data.len());
            data[at..end].copy_from_slice(&edge[..end - at]);
        }
        2 => data.truncate(at),
        3 => drop(data.drain(at..end)),
        4 => {
            let piece = data[at..end].to_vec();
            data.splice(at..at, piece);
        }
        _ => data[at..end].iter_mut().for_each(|byte| *byte = rng.random()),
    }
}
