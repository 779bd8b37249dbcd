//! The gRPC service, on the types of this crate.
//!
//! Messages are encoded by serde and postcard, without names or numbers of fields: both sides have
//! the same types. A change of a message is a change of the version of the package in `build.rs`,
//! so that a peer of another version is refused before it sends a message. Only a [`Status`] is
//! JSON, which commands of other releases can read.
//!
//! **Invariants:** every field of a decoded message is within its limits; a message that is not, or
//! that can't be decoded, becomes [`JoinRequest::Invalid`] or [`JoinResponse::Invalid`], with the
//! name of the field and its valid values. So the receiver decides what follows, and a core
//! receives no message that would be invalid in every state.

mod check;
mod codec;
mod difference;
mod requests;

pub use codec::{Codec, Receiver, Sender, Wire};
pub use requests::{
    CheckpointReply, CheckpointRequest, JoinRequest, JoinResponse, ScaleReply, ScaleRequest,
    SharedMessage, StatusRequest, SuspendReply, SuspendRequest,
};

pub use crate::status::Status;

/// The generated service.
#[allow(
    missing_docs,
    missing_debug_implementations,
    unused_qualifications,
    elided_lifetimes_in_paths,
    reason = "generated"
)]
#[allow(clippy::all, clippy::or_fun_call, clippy::use_self, reason = "generated")]
mod service {
    include!(concat!(env!("OUT_DIR"), "/elasticdl.v2.Master.rs"));
}

pub use service::{master_client, master_server};

#[cfg(test)]
mod tests;
