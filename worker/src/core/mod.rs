//! What a worker decides, without doing any of it: no IO, no clock, no threads.
//!
//! Not for users: public so that the workspace's simulation can put whole systems together out of
//! it.

pub mod checkpoint;
pub mod evaluation;
pub mod halt;
pub mod header;
pub mod leases;
pub mod plan;
pub mod repair;
pub mod session;
pub mod transport_switch;
