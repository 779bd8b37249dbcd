//! Operations over the links of a rank: the loops that run a schedule on sockets.

pub(crate) mod chain;
mod ring;

pub(crate) use ring::{
    Fault, LinkFault, OpTag, Transfer, TransferProgress, check_idle_link, run_all, to_wire,
};
