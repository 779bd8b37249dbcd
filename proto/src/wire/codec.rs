//! Encodes and decodes the messages of the service.

use std::fmt;
use std::marker::PhantomData;

use bytes::{Buf, BufMut};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tonic::Status as Error;
use tonic::codec::{DecodeBuf, Decoder, EncodeBuf, Encoder};

use super::check;
use super::difference::MembershipChange;
use super::requests::{
    CheckpointReply, CheckpointRequest, JoinRequest, JoinResponse, ScaleReply, ScaleRequest,
    SharedMessage, StatusRequest, SuspendReply, SuspendRequest,
};
use crate::job::Welcome;
use crate::members::Members;
use crate::message::MasterMessage;
use crate::status::Status;

/// The codec of a method that sends `E` and receives `D`.
pub struct Codec<E, D>(PhantomData<(E, D)>);

impl<E, D> Default for Codec<E, D> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<E, D> fmt::Debug for Codec<E, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Codec")
    }
}

impl<E: Wire, D: Wire> tonic::codec::Codec for Codec<E, D> {
    type Encode = E;
    type Decode = D;
    type Encoder = Sender<E>;
    type Decoder = Receiver<D>;

    fn encoder(&mut self) -> Sender<E> {
        Sender { membership: None, messages: PhantomData }
    }

    fn decoder(&mut self) -> Receiver<D> {
        Receiver { members: Members::default(), messages: PhantomData }
    }
}

/// Encodes the messages of one stream.
#[derive(Debug)]
pub struct Sender<E> {
    /// The newest membership that was sent.
    membership: Option<SharedMessage>,
    messages: PhantomData<fn(E)>,
}

impl<E: Wire> Encoder for Sender<E> {
    type Item = E;
    type Error = Error;

    fn encode(&mut self, item: E, buf: &mut EncodeBuf<'_>) -> Result<(), Error> {
        item.encode(&mut self.membership, buf);
        Ok(())
    }
}

/// Decodes the messages of one stream.
#[derive(Debug)]
pub struct Receiver<D> {
    /// The members of the newest membership that was received.
    members: Members,
    messages: PhantomData<fn() -> D>,
}

impl<D: Wire> Decoder for Receiver<D> {
    type Item = D;
    type Error = Error;

    fn decode(&mut self, buf: &mut DecodeBuf<'_>) -> Result<Option<D>, Error> {
        D::decode(&mut self.members, buf).map(Some)
    }
}

/// A message of the service.
pub trait Wire: Send + Sized + 'static {
    /// Appends the encoded message to `buf`, which grows as needed. `sent`: the newest membership
    /// on its stream.
    fn encode(self, sent: &mut Option<SharedMessage>, buf: &mut impl BufMut);

    /// Decodes a message from all bytes of `buf`. `received`: the members of the newest membership
    /// on its stream.
    ///
    /// # Errors
    /// The bytes are not a message of this type.
    fn decode(received: &mut Members, buf: &mut impl Buf) -> Result<Self, Error>;
}

pub(super) fn put(message: &impl Serialize, buf: &mut impl BufMut) {
    postcard::to_io(message, buf.writer()).expect("the buffer grows");
}

fn read<M: DeserializeOwned>(buf: &mut impl Buf) -> Result<M, String> {
    let bytes = buf.copy_to_bytes(buf.remaining());
    match postcard::take_from_bytes(&bytes) {
        Ok((message, [])) => Ok(message),
        Ok((_, rest)) => Err(format!("a message is followed by {} more bytes", rest.len())),
        Err(error) => Err(format!("a message can't be decoded: {error}")),
    }
}

impl Wire for JoinRequest {
    fn encode(self, _sent: &mut Option<SharedMessage>, buf: &mut impl BufMut) {
        put(&self, buf);
    }

    fn decode(_received: &mut Members, buf: &mut impl Buf) -> Result<Self, Error> {
        let checked = read(buf).and_then(|mut request| {
            check::join_request(&mut request)?;
            Ok(request)
        });
        Ok(checked.unwrap_or_else(Self::Invalid))
    }
}

/// A [`JoinResponse`] as it is sent.
#[derive(Serialize, Deserialize)]
pub(super) enum Frame<W, M> {
    /// A membership with many of the members of the one before on the stream.
    Change(MembershipChange),
    /// Any other message after the welcome.
    Message(M),
    /// The first message.
    Welcome(W),
}

impl Wire for JoinResponse {
    fn encode(self, sent: &mut Option<SharedMessage>, buf: &mut impl BufMut) {
        match self {
            Self::Invalid(_) => {}
            Self::Message(message) => {
                let change = sent.as_ref().and_then(|before| message.encoded_after(before));
                buf.put_slice(change.unwrap_or_else(|| message.encoded()));
                if matches!(message.get(), MasterMessage::Membership(_)) {
                    *sent = Some(message);
                }
            }
            Self::Welcome(welcome) => put(&Frame::<_, ()>::Welcome(welcome), buf),
        }
    }

    fn decode(received: &mut Members, buf: &mut impl Buf) -> Result<Self, Error> {
        let checked = read::<Frame<Box<Welcome>, MasterMessage>>(buf).and_then(|frame| {
            let mut message = match frame {
                Frame::Change(change) => MasterMessage::Membership(change.apply(received)?),
                Frame::Message(message) => message,
                Frame::Welcome(mut welcome) => {
                    check::options(&mut welcome.options)?;
                    return Ok(Self::Welcome(welcome));
                }
            };
            check::master_message(&mut message)?;
            if let MasterMessage::Membership(membership) = &message {
                *received = membership.members.clone();
            }
            Ok(Self::Message(message.into()))
        });
        Ok(checked.unwrap_or_else(Self::Invalid))
    }
}

impl Wire for Status {
    fn encode(self, _sent: &mut Option<SharedMessage>, buf: &mut impl BufMut) {
        serde_json::to_writer(buf.writer(), &self).expect("a status's keys are strings");
    }

    fn decode(_received: &mut Members, buf: &mut impl Buf) -> Result<Self, Error> {
        serde_json::from_slice(&buf.copy_to_bytes(buf.remaining()))
            .map_err(|error| Error::internal(format!("the master's status can't be read: {error}")))
    }
}

macro_rules! requests_and_replies {
    ($($message:ty),*) => {$(
        impl Wire for $message {
            fn encode(self, _sent: &mut Option<SharedMessage>, buf: &mut impl BufMut) {
                put(&self, buf);
            }

            fn decode(_received: &mut Members, buf: &mut impl Buf) -> Result<Self, Error> {
                read(buf).map_err(Error::internal)
            }
        }
    )*};
}

requests_and_replies!(
    CheckpointReply,
    CheckpointRequest,
    ScaleReply,
    ScaleRequest,
    StatusRequest,
    SuspendReply,
    SuspendRequest
);
