//! Digests of the training state, by which ranks compare what they hold.

use elasticdl_tables::ChunkLayout;
use xxhash_rust::xxh3::{Xxh3Default, xxh3_64};

use crate::session::State;

/// Digest of the parameters, the optimizer state and the ledger. One pass over memory. It does not
/// depend on whether the optimizer state is divided over the workers.
pub(crate) fn digest_of(parameters: &[f32], slots: &[f32], state: &State) -> u64 {
    let layout = ChunkLayout::new(parameters.len(), slots.len() / parameters.len().max(1));
    let rest = digest_of_rest(slots.chunks_exact(parameters.len().max(1)).remainder());
    digest_without_slots(parameters, state).wrapping_add(layout.digest(slots)).wrapping_add(rest)
}

/// Digest of a state that is not one of each parameter.
pub(crate) fn digest_of_rest(rest: &[f32]) -> u64 {
    if rest.is_empty() { 0 } else { xxh3_64(bytemuck::cast_slice(rest)) }
}

/// As [`digest_of`], but for the optimizer state, whose digest is to be added.
pub(crate) fn digest_without_slots(parameters: &[f32], state: &State) -> u64 {
    let mut digest = Xxh3Default::new();
    digest.update(bytemuck::cast_slice(parameters));
    update_with_progress(&mut digest, state);
    digest.digest()
}

/// Digest of the ledger.
pub(crate) fn progress_digest(state: &State) -> u64 {
    let mut digest = Xxh3Default::new();
    update_with_progress(&mut digest, state);
    digest.digest()
}

/// Adds the ledger to a digest.
pub(crate) fn update_with_progress(digest: &mut Xxh3Default, state: &State) {
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
