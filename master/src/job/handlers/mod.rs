//! Handlers of events that span workers, group and data: one file for each concern.

pub(crate) mod disconnected;
pub(crate) mod inference;
pub(crate) mod liveness;
pub(crate) mod publish;
pub(crate) mod stall;
pub(crate) mod worker_messages;
