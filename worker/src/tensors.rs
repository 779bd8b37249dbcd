//! A worker's big buffers: parameters, optimizer state and gradients.

use std::sync::Arc;

use xxhash_rust::xxh3::{Xxh3Default, xxh3_64_with_seed};

use crate::core::session::State;

/// The buffers, each of as many `f32`s as the model has parameters, `slots` of as many times that. Newcomers are sent
/// copies of the shared ones; whoever writes to one that is still being copied writes to a copy of its own.
#[derive(Debug)]
pub(crate) struct Tensors {
    pub(crate) parameters: Arc<Vec<f32>>,
    /// The optimizer's state, `[slots · parameters]`.
    pub(crate) slots: Arc<Vec<f32>>,
    /// This worker's gradient, summed over its records of the step. No reduce writes to it.
    pub(crate) gradient: Vec<f32>,
    /// The reduced gradient of the last committed step, for ranks that are a step behind.
    pub(crate) kept: Arc<Vec<f32>>,
    /// Where the next reduced gradient goes.
    pub(crate) reduced: Vec<f32>,
}

impl Tensors {
    /// Takes the memory at once: a page that the system hands out at its first use would be waited for by the whole group,
    /// in the first step.
    pub(crate) fn new(parameters: usize, slots: usize) -> Self {
        Self {
            parameters: Arc::new(zeros(parameters)),
            slots: Arc::new(zeros(parameters * slots)),
            gradient: zeros(parameters),
            kept: Arc::new(zeros(parameters)),
            reduced: zeros(parameters),
        }
    }

    /// Keeps the sum in `reduced`, which the last commit applied, and makes room for the next one.
    pub(crate) fn keep_reduced(&mut self) {
        let reduced = Arc::new(std::mem::take(&mut self.reduced));
        let old = std::mem::replace(&mut self.kept, reduced);
        // A newcomer may not have been sent the old one yet.
        self.reduced = Arc::try_unwrap(old).unwrap_or_else(|old| vec![0.0; old.len()]);
    }

    /// Digest of parameters, optimizer state and ledger.
    pub(crate) fn digest(&self, state: &State) -> u64 {
        let mut digest = Xxh3Default::new();
        digest.update(bytemuck::cast_slice(self.parameters.as_slice()));
        digest.update(bytemuck::cast_slice(self.slots.as_slice()));
        update_with_record(&mut digest, state);
        digest.digest()
    }

    /// As [`Tensors::digest`], but of the tensors only that part whose turn it is: for a group that waits for it.
    pub(crate) fn quick_digest(&self, state: &State) -> u64 {
        let mut digest = Xxh3Default::new();
        digest.update(&self.window_digest(state.step).to_le_bytes());
        update_with_record(&mut digest, state);
        digest.digest()
    }

    /// Digest of the part of the state whose turn it is at `step`: all of it over [`WINDOWS`] steps, so that comparing
    /// replicas at every step costs next to nothing.
    pub(crate) fn window_digest(&self, step: u64) -> u64 {
        let digest = |tensor: &[f32]| {
            let turn = (step % WINDOWS) as usize;
            let (len, n) = (tensor.len(), WINDOWS as usize);
            let window = &tensor[len * turn / n..len * (turn + 1) / n];
            xxh3_64_with_seed(bytemuck::cast_slice(window), step)
        };
        digest(&self.parameters) ^ digest(&self.slots).rotate_left(1)
    }
}

/// `len` zeros in memory that is there.
pub(crate) fn zeros(len: usize) -> Vec<f32> {
    let mut zeros = vec![0.0; len];
    // Zeroed memory is handed out lazily; a write that the compiler can't see through makes it be there.
    zeros.iter_mut().step_by(PAGE_FLOATS).for_each(|first| *first = std::hint::black_box(0.0));
    zeros
}

fn update_with_record(digest: &mut Xxh3Default, state: &State) {
    digest.update(&state.step.to_le_bytes());
    digest.update(&state.records_trained.to_le_bytes());
    digest.update(&state.ledger.epoch().to_le_bytes());
    digest.update(&state.ledger.repeated().to_le_bytes());
    for range in state.ledger.ranges() {
        digest.update(&range.epoch.to_le_bytes());
        digest.update(&range.start.to_le_bytes());
        digest.update(&range.end.to_le_bytes());
    }
}

/// A shared buffer, to write to: a copy of its own, if it is being copied.
pub(crate) fn writable(shared: &mut Arc<Vec<f32>>) -> &mut [f32] {
    Arc::make_mut(shared).as_mut_slice()
}

/// Floats of the smallest page.
const PAGE_FLOATS: usize = 4096 / size_of::<f32>();

/// The state is compared in this many parts, one at each step.
const WINDOWS: u64 = 64;

#[cfg(test)]
mod tests {
    use elasticdl_proto::Ledger;

    use super::*;

    #[test]
    fn a_flipped_bit_is_seen_at_once_by_the_digest_and_within_all_windows_by_their_digests() {
        let state =
            State { step: 3, ledger: Ledger::new(9), records_trained: 0, evaluation: Default::default() };
        let whole = Tensors::new(1000, 2);
        for at in [0, 1, 999, 1000, 2999] {
            let mut other = Tensors::new(1000, 2);
            match at {
                0..1000 => Arc::make_mut(&mut other.parameters)[at] = f32::from_bits(1),
                _ => Arc::make_mut(&mut other.slots)[at - 1000] = f32::from_bits(1),
            }
            assert_ne!(whole.digest(&state), other.digest(&state));
            let at_step = |step| State { step, ..state.clone() };
            let quick =
                (0..WINDOWS).filter(|&s| whole.quick_digest(&at_step(s)) != other.quick_digest(&at_step(s)));
            assert_eq!(quick.count(), 1, "element {at}");
            let differing = (0..WINDOWS).filter(|&s| whole.window_digest(s) != other.window_digest(s));
            assert_eq!(differing.count(), 1, "element {at}");
        }
    }
}
