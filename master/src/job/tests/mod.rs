//! The job under test, from outside.

mod adoption;
mod apart;
mod checkpoints;
mod cuts;
mod directed;
mod evaluations;
mod group;
mod histories;
mod leases;
mod loss;
mod oracles;
mod places;
mod pod;
mod process;
mod reports;
mod silence;
mod stall;
mod status;
mod storage_waits;
mod tally;
mod world;
