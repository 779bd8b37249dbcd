//! The overhead of a step in groups that are larger than a machine can run, computed from what was
//! measured in smaller ones.
//!
//! ```text
//! overhead(W) = hops(W) · (network + hop) + fixed + W · header
//! ```
//!
//! `hop`: time from a rank's write to the next rank's return from its wait, measured between two
//! ranks over loopback. `fixed` and `header`: CPU time of a trainer in a step, a line through the
//! measured groups; it includes the bytes that grow with the ranks. `network`: assumed. Not in it:
//! gradients that are long enough for bandwidth to matter, stragglers, lost packets.

use std::error::Error;
use std::fmt;

use crate::operations::Operations;

/// What a step costs, in microseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Costs {
    hop_us: f64,
    network_us: f64,
    fixed_us: f64,
    header_us: f64,
}

impl Costs {
    /// `measured`: numbers of ranks, and the CPU time of a trainer in a step of them, in
    /// microseconds. `None` if there are fewer than two.
    pub(crate) fn of(measured: &[(f64, f64)], network_us: f64) -> Option<Self> {
        let count = measured.len() as f64;
        let [x, y] = [0, 1].map(|at| {
            let sum: f64 = measured.iter().map(|point| [point.0, point.1][at]).sum();
            sum / count
        });
        let spread: f64 = measured.iter().map(|point| (point.0 - x).powi(2)).sum();
        if measured.len() < 2 || spread == 0.0 {
            return None;
        }
        let common: f64 = measured.iter().map(|point| (point.0 - x) * (point.1 - y)).sum();
        let header_us = (common / spread).max(0.0);
        let fixed_us = (y - header_us * x).max(0.0);
        Some(Self { hop_us: hop_us().ok()?, network_us, fixed_us, header_us })
    }

    /// Time of a step beyond the computation.
    pub(crate) fn overhead_us(&self, ranks: u32) -> f64 {
        let hops = f64::from(hops(ranks));
        hops * (self.network_us + self.hop_us) + self.fixed_us + f64::from(ranks) * self.header_us
    }
}

impl fmt::Display for Costs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { hop_us, fixed_us, header_us, .. } = self;
        write!(
            f,
            "from: {hop_us:.1} µs for a hop, {fixed_us:.0} µs of CPU time in a step and \
             {header_us:.2} µs for each rank's header"
        )
    }
}

/// Messages that follow one another in a step, each of which waits for the one before: up and down
/// the tree of a large group.
fn hops(ranks: u32) -> u32 {
    2 * ranks.ilog2()
}

/// Median time of a message between two ranks over loopback, and of the wake-up by it.
fn hop_us() -> Result<f64, Box<dyn Error>> {
    Ok(Operations::measure(2, 4, MESSAGES)?.gather_us)
}

const MESSAGES: usize = 2000;
