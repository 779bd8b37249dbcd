//! Code shared by the example models.

pub mod plain;
