//! Operations over the links of a rank: the loops that run a schedule on sockets.

pub(crate) mod chain;
mod exchange;
mod fault;
mod host_stage;
mod progress;
mod ring;
pub(crate) mod tree;

pub(crate) use exchange::{Direction, Incoming, Pair, PairLinks, Ports};
pub(crate) use fault::{Fault, LocalFault};
pub(crate) use host_stage::HostStage;
pub(crate) use progress::TransferProgress;
pub(crate) use ring::{Transfer, run_all};
