//! The gRPC service, on the types of this crate.
//!
//! The generated types of the schema (`proto/elasticdl/v1/master.proto`) stay in this module: the
//! [`Codec`] converts them where bytes enter and leave.
//!
//! **Invariants:** every field of a decoded message is within its limits; a message that is not is
//! decoded as [`JoinRequest::Invalid`] or [`JoinResponse::Invalid`], with the name of the field and
//! its valid values. So the receiver decides what follows, and a core receives no message that
//! would be invalid in every state.

mod codec;
mod commits;
mod decode;
mod difference;
mod encode;
mod order;
mod requests;

pub use codec::{Codec, Receiver, Sender, Wire};
pub use requests::{
    CheckpointReply, CheckpointRequest, InspectRequest, JoinRequest, JoinResponse, ScaleReply,
    ScaleRequest, SharedMessage, StatusRequest, SuspendReply, SuspendRequest,
};

pub use crate::inspection::Inspection;
pub use crate::status::Status;

/// The generated messages of the schema.
#[allow(
    missing_docs,
    unnameable_types,
    unreachable_pub,
    unused_qualifications,
    reason = "generated"
)]
#[allow(clippy::all, clippy::or_fun_call, clippy::use_self, reason = "generated")]
mod v1 {
    tonic::include_proto!("elasticdl.v1");
}

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
    include!(concat!(env!("OUT_DIR"), "/elasticdl.v1.Master.rs"));
}

pub use service::{master_client, master_server};

#[cfg(test)]
mod tests;
