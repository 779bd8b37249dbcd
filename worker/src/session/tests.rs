//! What tests of several parts of the session share.

pub(super) mod pair;
