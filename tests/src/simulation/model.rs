//! The model of the simulation: it has one parameter for each record of each epoch, and counts. The
//! gradient of a record is 1 at its parameter, and the update adds. So the parameters say how often
//! each record was absorbed, independent of any ledger.

use elasticdl_proto::RecordRange;

/// Adds 1 to the count of each of these records.
pub(super) fn count(counts: &mut [f32], ranges: &[RecordRange], records: u64) {
    for range in ranges {
        let first = u64::from(range.epoch) * records;
        for record in range.records() {
            counts[(first + record) as usize] += 1.0;
        }
    }
}

/// Parameters as counts.
pub(super) fn counts(parameters: &[f32]) -> Vec<u8> {
    parameters.iter().map(|&count| count as u8).collect()
}

pub(super) fn digest(counts: &[u8]) -> u64 {
    counts
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, &n| (hash ^ u64::from(n)).wrapping_mul(0x100_0000_01b3))
}

/// A parameter after a bit of it has flipped.
pub(super) fn flipped(parameter: f32) -> f32 {
    parameter + FLIPPED
}

/// Digest of the parameters without flipped bits.
pub(super) fn right_digest(counts: &[u8]) -> u64 {
    digest(&counts.iter().map(|n| n % FLIPPED as u8).collect::<Vec<_>>())
}

/// Whether a bit has flipped in these parameters.
pub(super) fn is_wrong(counts: &[u8]) -> bool {
    counts.iter().any(|&n| n >= FLIPPED as u8)
}

/// No count is as high.
const FLIPPED: f32 = 64.0;
