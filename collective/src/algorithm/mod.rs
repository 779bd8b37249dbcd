//! Algorithms without IO: which rank sends which elements when, and what happens to the elements.

pub(crate) mod bf16;
pub(crate) mod chain_topology;
pub(crate) mod chunk;
pub(crate) mod hosts;
pub(crate) mod payload;
#[doc(hidden)]
pub mod schedule;
pub(crate) mod tree_topology;
pub(crate) mod wire_dtype;
