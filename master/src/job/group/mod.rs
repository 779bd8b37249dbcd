//! The group: the newest generation, and the choice of the next one.

pub(crate) mod choose;
