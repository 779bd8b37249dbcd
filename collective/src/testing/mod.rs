//! Support for tests of this crate and of code that uses it.

pub mod conformance;
/// Not for users: public so that fuzzers can call it.
#[doc(hidden)]
pub mod fuzzing;
