//! What the example models share.

pub mod ops;
