//! Workers: the table of launches and workers, pods, and stragglers.

pub(crate) mod pod;
pub(crate) mod straggler;
pub(crate) mod table;
