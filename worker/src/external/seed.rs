//! Seeds for random numbers of the program.

use xxhash_rust::xxh3::xxh3_64;

/// What random numbers belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keyed {
    /// A record in an epoch.
    Record {
        /// Epoch.
        epoch: u32,
        /// Number, from 0.
        number: u64,
    },
    /// A step, from 0.
    Step(u64),
}

/// A seed below 2⁶³ that depends on the job's seed, the key and the stream alone: not on the
/// workers, nor on time. `stream` distinguishes several uses of one key.
///
/// A released version of this function never changes.
#[must_use]
pub fn seed_of(job_seed: u64, key: Keyed, stream: u64) -> u64 {
    let [kind, epoch, number] = match key {
        Keyed::Record { epoch, number } => [0, epoch.into(), number],
        Keyed::Step(step) => [1, 0, step],
    };
    let mut input = [0; 40];
    for (i, word) in [job_seed, kind, epoch, number, stream].into_iter().enumerate() {
        input[8 * i..8 * i + 8].copy_from_slice(&word.to_le_bytes());
    }
    xxh3_64(&input) >> 1
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_key_and_stream_has_a_seed_of_its_own() {
        let mut seeds = BTreeSet::new();
        for job in 0..3 {
            for stream in 0..3 {
                for number in 0..20 {
                    seeds.insert(seed_of(job, Keyed::Step(number), stream));
                    for epoch in 0..3 {
                        seeds.insert(seed_of(job, Keyed::Record { epoch, number }, stream));
                    }
                }
            }
        }
        assert_eq!(seeds.len(), 3 * 3 * 20 * 4);
        assert!(seeds.last().is_some_and(|seed| *seed < 1 << 63));
    }

    #[test]
    fn seeds_are_the_same_in_every_release() {
        let record = Keyed::Record { epoch: 1, number: 2 };
        assert_eq!(seed_of(7, record, 3), RECORD);
        assert_eq!(seed_of(7, Keyed::Step(2), 3), STEP);
    }

    const RECORD: u64 = 7_792_618_755_033_390_990;
    const STEP: u64 = 746_033_862_092_155_745;
}
