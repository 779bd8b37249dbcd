//! What a ring between hosts asks of the ranks that share its memory, whose code is in a folder
//! above.

use rustix::event::PollFd;

use super::LocalFault;
use crate::algorithm::payload::Payload;
use crate::algorithm::schedule::Piece;

/// Part of the other ranks of this host in an all-reduce between hosts: they contribute to what
/// this rank sends, and get the totals that it receives.
///
/// The calls may wait for the ranks of this host, which in turn wait for no network, so the wait is
/// as short as their part of the sum. Meanwhile the kernel continues to send and receive.
pub(crate) trait HostStage {
    /// Completes the elements of `piece`, which is about to be sent, with the contributions of the
    /// ranks of this host.
    fn before_send(&mut self, piece: &Piece, payload: &mut Payload<'_>) -> Result<(), LocalFault>;

    /// Adds the contributions of the ranks of this host to the received elements of `piece`, and
    /// passes totals on to them.
    fn after_receive(&mut self, piece: &Piece, payload: &mut Payload<'_>)
    -> Result<(), LocalFault>;

    /// Adds the descriptors that have an event when a rank of this host fails.
    fn watch<'s>(&'s self, fds: &mut Vec<PollFd<'s>>);

    /// Looks for a fault of this host's ranks, after such an event.
    fn check(&mut self) -> Result<(), LocalFault>;
}
