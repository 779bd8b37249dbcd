//! What other ranks send, and what any peer sends before its handshake.

use elasticdl_collective::testing::fuzzing;
use rand::RngExt as _;

use crate::harness::Target;

#[test]
fn valid_frames_succeed_and_changed_ones_terminate() {
    let seeds = fuzzing::seeds();
    for (index, seed) in seeds.iter().enumerate() {
        assert!(fuzzing::ring(seed), "seed {index}");
    }
    // Most changes are in the first frame headers.
    let target = Target { name: "ring", inputs: 3000, head: 130 };
    target.run_changed(&seeds, |data| {
        let _ = fuzzing::ring(data);
    });
}

#[test]
fn any_input_in_place_of_a_state_transfer_terminates_both_sides() {
    let seeds = fuzzing::state_seeds();
    assert_eq!(seeds.iter().map(|seed| fuzzing::state(seed)).collect::<Vec<_>>(), [(2, 0), (0, 1)]);
    let target = Target { name: "state", inputs: 1000, head: 130 };
    target.run_changed(&seeds, |data| {
        let _ = fuzzing::state(data);
    });
}

#[test]
fn no_changed_message_is_a_part_of_a_valid_handshake() {
    let target = Target { name: "hello", inputs: 600, head: 0 };
    target.run_generated(
        |rng| {
            let mut data = vec![0; rng.random_range(100..300)];
            data[0] = rng.random();
            if data[0] & 4 == 0 {
                data[1..].iter_mut().for_each(|byte| *byte = rng.random());
            } else {
                // Some bits of the valid message, which is shorter, change.
                for _ in 0..rng.random_range(1..4) {
                    let at = rng.random_range(1..data.len().min(150));
                    data[at] ^= 1 << rng.random_range(0..8);
                }
            }
            if data[0] & 4 == 0 && rng.random() {
                data[1..9].copy_from_slice(b"EDLLINK2");
            }
            data
        },
        fuzzing::hello,
    );
}
