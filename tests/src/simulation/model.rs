//! The model of the simulation: it has one parameter for each record of each epoch, and counts. The
//! gradient of a record is 1 at its parameter, and the update adds. So the parameters say how often
//! each record was absorbed, independent of any ledger.

use elasticdl_proto::RecordRange;

/// Parameters and gradients of one worker.
#[derive(Debug)]
pub(super) struct Model {
    pub(super) parameters: Vec<u8>,
    pub(super) gradient: Vec<u8>,
    pub(super) reduced: Vec<u8>,
    pub(super) last_sum: Vec<u8>,
    /// Lineage of the parameters: the number of the initialization that they descend from. Not a
    /// part of the state; only the oracle reads it.
    pub(super) lineage: u64,
}

impl Model {
    pub(super) fn new(parameters: usize) -> Self {
        let zeros = || vec![0; parameters];
        Self {
            parameters: zeros(),
            gradient: zeros(),
            reduced: zeros(),
            last_sum: zeros(),
            lineage: 0,
        }
    }

    pub(super) fn digest(&self) -> u64 {
        digest(self.parameters.iter())
    }

    /// Digest of the part of the parameters that is compared at `step`.
    pub(super) fn window_digest(&self, step: u64) -> u64 {
        let first = (step % WINDOWS as u64) as usize;
        digest(self.parameters.iter().skip(first).step_by(WINDOWS))
    }

    /// Flips a bit of a parameter.
    pub(super) fn flip(&mut self, parameter: usize) {
        self.parameters[parameter] ^= FLIPPED;
    }

    /// Digest of the parameters without flipped bits.
    pub(super) fn right_digest(&self) -> u64 {
        digest(self.parameters.iter().map(|n| n % FLIPPED).collect::<Vec<_>>().iter())
    }

    /// Whether a bit has flipped in these parameters.
    pub(super) fn is_wrong(&self) -> bool {
        self.parameters.iter().any(|&n| n >= FLIPPED)
    }

    /// Computes the gradient of these records: adds 1 for each of them.
    pub(super) fn see(&mut self, ranges: &[RecordRange], records: u64) {
        count(&mut self.gradient, ranges, records);
    }

    pub(super) fn update(&mut self) {
        for (parameter, sum) in self.parameters.iter_mut().zip(&self.reduced) {
            *parameter = parameter.saturating_add(*sum);
        }
        self.retain();
    }

    /// Keeps the reduced gradient for ranks that are one step behind.
    pub(super) fn retain(&mut self) {
        std::mem::swap(&mut self.reduced, &mut self.last_sum);
    }
}

/// Adds 1 to the count of each of these records.
pub(super) fn count(counts: &mut [u8], ranges: &[RecordRange], records: u64) {
    for range in ranges {
        let first = u64::from(range.epoch) * records;
        for record in range.records() {
            let count = &mut counts[(first + record) as usize];
            *count = count.saturating_add(1);
        }
    }
}

pub(super) fn digest<'a>(counts: impl Iterator<Item = &'a u8>) -> u64 {
    counts
        .fold(0xcbf2_9ce4_8422_2325, |hash, &n| (hash ^ u64::from(n)).wrapping_mul(0x100_0000_01b3))
}

/// Number of steps within which each parameter is compared.
const WINDOWS: usize = 4;
/// No count is as high.
const FLIPPED: u8 = 0x40;
