//! Encodes and decodes the messages of the service.

use std::fmt;
use std::marker::PhantomData;

use bytes::{Buf, BufMut};
use prost::Message;
use tonic::Status as Error;
use tonic::codec::{DecodeBuf, Decoder, EncodeBuf, Encoder};

use super::requests::{
    CheckpointReply, CheckpointRequest, JoinRequest, JoinResponse, ScaleReply, ScaleRequest,
    StatusRequest, SuspendReply, SuspendRequest,
};
use super::{decode, encode, v1};
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
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self::default()
    }

    fn decoder(&mut self) -> Self {
        Self::default()
    }
}

impl<E: Wire, D> Encoder for Codec<E, D> {
    type Item = E;
    type Error = Error;

    fn encode(&mut self, item: E, buf: &mut EncodeBuf<'_>) -> Result<(), Error> {
        item.encode(buf);
        Ok(())
    }
}

impl<E, D: Wire> Decoder for Codec<E, D> {
    type Item = D;
    type Error = Error;

    fn decode(&mut self, buf: &mut DecodeBuf<'_>) -> Result<Option<D>, Error> {
        D::decode(buf).map(Some)
    }
}

/// A message of the service.
pub trait Wire: Send + Sized + 'static {
    /// Appends the encoded message to `buf`, which grows as needed.
    fn encode(self, buf: &mut impl BufMut);

    /// Decodes a message from all bytes of `buf`.
    ///
    /// # Errors
    /// The bytes are not a message of the schema.
    fn decode(buf: &mut impl Buf) -> Result<Self, Error>;
}

fn read<M: Message + Default>(buf: &mut impl Buf) -> Result<M, Error> {
    M::decode(buf).map_err(|error| Error::internal(error.to_string()))
}

fn put(message: &impl Message, buf: &mut impl BufMut) {
    message.encode(buf).expect("the buffer grows");
}

impl Wire for JoinRequest {
    fn encode(self, buf: &mut impl BufMut) {
        put(&encode::join_request(self), buf);
    }

    fn decode(buf: &mut impl Buf) -> Result<Self, Error> {
        read::<v1::WorkerMessage>(buf).map(decode::join_request)
    }
}

impl Wire for JoinResponse {
    fn encode(self, buf: &mut impl BufMut) {
        match self {
            Self::Invalid(_) => {}
            Self::Message(message) => buf.put_slice(message.encoded()),
            Self::Welcome(welcome) => put(&encode::welcome(*welcome), buf),
        }
    }

    fn decode(buf: &mut impl Buf) -> Result<Self, Error> {
        read::<v1::MasterMessage>(buf).map(decode::join_response)
    }
}

impl Wire for StatusRequest {
    fn encode(self, _: &mut impl BufMut) {}

    fn decode(buf: &mut impl Buf) -> Result<Self, Error> {
        read::<v1::StatusRequest>(buf).map(|_| Self)
    }
}

impl Wire for Status {
    fn encode(self, buf: &mut impl BufMut) {
        let json = serde_json::to_string(&self).expect("a status's keys are strings");
        put(&v1::StatusReply { json }, buf);
    }

    fn decode(buf: &mut impl Buf) -> Result<Self, Error> {
        let v1::StatusReply { json } = read(buf)?;
        serde_json::from_str(&json)
            .map_err(|error| Error::internal(format!("the master's status can't be read: {error}")))
    }
}

impl Wire for ScaleRequest {
    fn encode(self, buf: &mut impl BufMut) {
        put(&v1::ScaleRequest { num_workers: self.num_workers }, buf);
    }

    fn decode(buf: &mut impl Buf) -> Result<Self, Error> {
        read::<v1::ScaleRequest>(buf).map(|request| Self { num_workers: request.num_workers })
    }
}

impl Wire for ScaleReply {
    fn encode(self, buf: &mut impl BufMut) {
        put(&v1::ScaleReply { was: self.was }, buf);
    }

    fn decode(buf: &mut impl Buf) -> Result<Self, Error> {
        read::<v1::ScaleReply>(buf).map(|reply| Self { was: reply.was })
    }
}

impl Wire for CheckpointRequest {
    fn encode(self, _: &mut impl BufMut) {}

    fn decode(buf: &mut impl Buf) -> Result<Self, Error> {
        read::<v1::CheckpointRequest>(buf).map(|_| Self)
    }
}

impl Wire for CheckpointReply {
    fn encode(self, buf: &mut impl BufMut) {
        put(&v1::CheckpointReply { step: self.step }, buf);
    }

    fn decode(buf: &mut impl Buf) -> Result<Self, Error> {
        read::<v1::CheckpointReply>(buf).map(|reply| Self { step: reply.step })
    }
}

impl Wire for SuspendRequest {
    fn encode(self, buf: &mut impl BufMut) {
        put(&v1::SuspendRequest { suspend: self.suspend }, buf);
    }

    fn decode(buf: &mut impl Buf) -> Result<Self, Error> {
        read::<v1::SuspendRequest>(buf).map(|request| Self { suspend: request.suspend })
    }
}

impl Wire for SuspendReply {
    fn encode(self, buf: &mut impl BufMut) {
        put(&v1::SuspendReply { unchanged: self.unchanged }, buf);
    }

    fn decode(buf: &mut impl Buf) -> Result<Self, Error> {
        read::<v1::SuspendReply>(buf).map(|reply| Self { unchanged: reply.unchanged })
    }
}
