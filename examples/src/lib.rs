//! Code that the example models share.

mod composed;
pub mod ops;
pub mod plain;
