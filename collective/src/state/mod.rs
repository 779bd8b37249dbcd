//! State transfer from a member to a joiner.

mod transfer;

pub use transfer::{
    NOTE_BYTES_MAX, Position, StateLink, StateMessageHeader, StateReceiver, StateRequest,
    StateSender,
};
