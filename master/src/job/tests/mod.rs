//! The job under test, from outside.

mod adoption;
mod apart;
mod checkpoints;
mod cuts;
mod directed;
mod disconnected;
mod evaluations;
mod group;
mod histories;
mod leases;
mod liveness;
mod loss;
mod oracles;
mod places;
mod pod;
mod process;
mod record;
mod reports;
mod stall;
mod status;
mod storage_waits;
mod tally;
mod world;
