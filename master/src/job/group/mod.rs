//! The group: the newest generation, the choice of the next one, and which links are at fault.

pub(crate) mod broken;
pub(crate) mod choose;
pub(crate) mod generation;
pub(crate) mod stall;
pub(crate) mod topology;
