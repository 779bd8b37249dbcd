//! Code that the example models share.

pub mod plain;
