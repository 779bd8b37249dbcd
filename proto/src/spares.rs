//! What a job tells of its spares.

use serde::{Deserialize, Serialize};

/// Workers that follow the state of the group, and take the places of those that are lost. The
/// names of its fields are a public format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spares {
    /// Spares to keep.
    pub desired: u32,
    /// Those that can take a place at once: they have the state and follow it, or need none before
    /// they join.
    pub caught_up: u32,
    /// How often one of them has taken the place of a lost or leaving worker.
    pub promoted: u64,
}
