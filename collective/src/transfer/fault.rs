//! Why an operation over links or shared memory stopped, before the group gives it an error.

use std::io;

use crate::net::neighbours::LinkFault;

/// Why an operation stopped. The caller checks whether the fence was the cause.
#[derive(Debug)]
pub(crate) enum Fault {
    /// Fault among the ranks of this host.
    Local(LocalFault),
    Next(LinkFault),
    Prev(LinkFault),
    /// Fault of the link to this rank of the group.
    Rank(usize, LinkFault),
    Wait(io::Error),
}

/// Fault among ranks that share memory. Ranks are those of the group.
#[derive(Debug)]
pub(crate) enum LocalFault {
    /// The fence aborted the group.
    Aborted,
    /// This rank runs another operation.
    Broken(usize, String),
    /// This rank is gone or has failed.
    Lost(usize),
}
