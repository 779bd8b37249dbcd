//! Code that the example models share.

pub mod charlm;
pub mod mnist;
pub mod plain;
pub mod tabular;
