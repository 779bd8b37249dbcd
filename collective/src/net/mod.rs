//! Links between ranks: how they are dialled, accepted, authenticated, encrypted, fenced and waited
//! for.

pub(crate) mod acceptor;
#[doc(hidden)]
pub mod admission;
pub(crate) mod cipher;
pub(crate) mod dialled;
pub(crate) mod encryption;
pub(crate) mod fence;
pub(crate) mod frame;
pub(crate) mod handshake;
pub(crate) mod link;
pub(crate) mod neighbours;
pub(crate) mod notifier;
pub(crate) mod pending_requests;
pub(crate) mod progress;
pub(crate) mod secret;
pub(crate) mod socket;
pub(crate) mod spin_wait;
