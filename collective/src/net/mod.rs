//! Links between ranks: how they are dialled, accepted, authenticated, fenced and waited for.

pub(crate) mod acceptor;
#[doc(hidden)]
pub mod admission;
pub(crate) mod fence;
pub(crate) mod frame;
pub(crate) mod handshake;
pub(crate) mod link;
pub(crate) mod neighbours;
pub(crate) mod notifier;
pub(crate) mod pending_requests;
pub(crate) mod progress;
pub(crate) mod secret;
pub(crate) mod spin_wait;
