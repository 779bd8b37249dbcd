//! Encodes and decodes the messages of the service.

use std::fmt;
use std::marker::PhantomData;

use bytes::{Buf, BufMut};
use prost::Message;
use tonic::Status as Error;
use tonic::codec::{DecodeBuf, Decoder, EncodeBuf, Encoder};

use super::requests::{
    CheckpointReply, CheckpointRequest, InspectRequest, JoinRequest, JoinResponse, ScaleReply,
    ScaleRequest, SharedMessage, StatusRequest, SuspendReply, SuspendRequest,
};
use super::{decode, encode, v1};
use crate::inspection::Inspection;
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
        Sender(E::Sent::default())
    }

    fn decoder(&mut self) -> Receiver<D> {
        Receiver(D::Received::default())
    }
}

/// Encodes the messages of one stream.
#[derive(Debug)]
pub struct Sender<E: Wire>(E::Sent);

impl<E: Wire> Encoder for Sender<E> {
    type Item = E;
    type Error = Error;

    fn encode(&mut self, item: E, buf: &mut EncodeBuf<'_>) -> Result<(), Error> {
        item.encode(&mut self.0, buf);
        Ok(())
    }
}

/// Decodes the messages of one stream.
#[derive(Debug)]
pub struct Receiver<D: Wire>(D::Received);

impl<D: Wire> Decoder for Receiver<D> {
    type Item = D;
    type Error = Error;

    fn decode(&mut self, buf: &mut DecodeBuf<'_>) -> Result<Option<D>, Error> {
        D::decode(&mut self.0, buf).map(Some)
    }
}

/// A message of the service.
pub trait Wire: Send + Sized + 'static {
    /// What later messages of a stream refer to, on the side that sends it.
    type Sent: Default + fmt::Debug + Send + 'static;
    /// The same, on the side that receives it.
    type Received: Default + fmt::Debug + Send + 'static;

    /// Appends the encoded message to `buf`, which grows as needed. `sent`: of the messages before
    /// it on its stream.
    fn encode(self, sent: &mut Self::Sent, buf: &mut impl BufMut);

    /// Decodes a message from all bytes of `buf`. `received`: of the messages before it on its
    /// stream.
    ///
    /// # Errors
    /// The bytes are not a message of the schema.
    fn decode(received: &mut Self::Received, buf: &mut impl Buf) -> Result<Self, Error>;
}

fn read<M: Message + Default>(buf: &mut impl Buf) -> Result<M, Error> {
    M::decode(buf).map_err(|error| Error::internal(error.to_string()))
}

fn put(message: &impl Message, buf: &mut impl BufMut) {
    message.encode(buf).expect("the buffer grows");
}

impl Wire for JoinRequest {
    type Sent = ();
    type Received = ();

    fn encode(self, _sent: &mut (), buf: &mut impl BufMut) {
        put(&encode::join_request(self), buf);
    }

    fn decode(_received: &mut (), buf: &mut impl Buf) -> Result<Self, Error> {
        read::<v1::WorkerMessage>(buf).map(decode::join_request)
    }
}

impl Wire for JoinResponse {
    /// The newest membership.
    type Sent = Option<SharedMessage>;
    /// The members of the newest membership.
    type Received = Members;

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
            Self::Welcome(welcome) => put(&encode::welcome(*welcome), buf),
        }
    }

    fn decode(received: &mut Members, buf: &mut impl Buf) -> Result<Self, Error> {
        let response = decode::join_response(received, read::<v1::MasterMessage>(buf)?);
        if let Self::Message(message) = &response
            && let MasterMessage::Membership(membership) = message.get()
        {
            *received = membership.members.clone();
        }
        Ok(response)
    }
}

/// Encodes and decodes replies that the schema has as JSON.
macro_rules! as_json {
    ($($reply:ident is $message:ident)*) => {$(
        impl Wire for $message {
            type Sent = ();
            type Received = ();

            fn encode(self, _sent: &mut (), buf: &mut impl BufMut) {
                let json = serde_json::to_string(&self).expect("its keys are strings");
                put(&v1::$reply { json }, buf);
            }

            fn decode(_received: &mut (), buf: &mut impl Buf) -> Result<Self, Error> {
                let v1::$reply { json } = read(buf)?;
                serde_json::from_str(&json).map_err(|error| {
                    let reply = stringify!($reply);
                    Error::internal(format!("the master's {reply} can't be read: {error}"))
                })
            }
        }
    )*};
}

as_json! {
    InspectReply is Inspection
    StatusReply is Status
}

/// Encodes and decodes requests and replies whose fields are those of the schema.
macro_rules! as_in_schema {
    ($($message:ident { $($field:ident),* })*) => {$(
        impl Wire for $message {
            type Sent = ();
            type Received = ();

            fn encode(self, _sent: &mut (), buf: &mut impl BufMut) {
                let Self { $($field),* } = self;
                put(&v1::$message { $($field),* }, buf);
            }

            fn decode(_received: &mut (), buf: &mut impl Buf) -> Result<Self, Error> {
                let v1::$message { $($field),* } = read(buf)?;
                Ok(Self { $($field),* })
            }
        }
    )*};
}

as_in_schema! {
    CheckpointReply { step }
    CheckpointRequest {}
    InspectRequest {}
    ScaleReply { was }
    ScaleRequest { num_workers, min_workers, max_workers }
    StatusRequest {}
    SuspendReply { unchanged }
    SuspendRequest { suspend }
}
