//! Tests of the job through its public interface.

mod checkpoints;
mod counters;
mod directed;
mod disconnected;
mod evaluations;
mod group;
mod histories;
mod inference;
mod leases;
mod liveness;
mod loss;
mod oracles;
mod partitions;
mod persisted;
mod placement;
mod pod;
mod process;
mod reports;
mod stall;
mod status;
mod storage_waits;
mod takeover;
mod world;
