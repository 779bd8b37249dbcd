//! The decisions of a worker, without their execution: no IO, no clock, no threads.
//!
//! Not for users. The feature `simulation` makes the module public, so that the workspace's
//! simulation can build whole systems from it.

pub mod checkpoint;
pub mod control;
pub mod evaluation;
pub mod halt;
pub mod header;
pub mod leases;
pub mod plan;
pub mod repair;
pub mod session;
pub mod transport_switch;
