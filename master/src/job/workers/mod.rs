//! Workers: the table of launches and workers, their states, pods, heartbeats and stragglers.

pub(crate) mod heartbeat;
pub(crate) mod pod;
pub(crate) mod scheduling;
pub(crate) mod slot_use;
pub(crate) mod state;
pub(crate) mod straggler;
pub(crate) mod table;
