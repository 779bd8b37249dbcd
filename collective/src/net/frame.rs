//! Header of every frame on a ring link. Pure.
//!
//! ```text
//! magic kind generation sequence step segment origin note bytes total bytes body bytes digest │
//!   u32  u32        u64      u64  u32     u32    u32        u32         u64        u32    u64 │
//! note body
//! ```
//!
//! All fields are little endian. The body holds elements of the operation's buffer in their memory
//! representation, little endian: f32, or 16-bit elements if the kind says so. The note is the
//! caller's header of an all-reduce, block of an all-gather or payload of an exchange. The digest
//! is the XXH3 of the fields before it: a receiver would wait for ever for a changed length.
//!
//! **Invariant:** a receiver knows every field but the length of the note beforehand, and accepts
//! no other value.

use std::fmt::Debug;

use xxhash_rust::xxh3::xxh3_64;

/// Frame header; describes the note and the body that follow it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Frame {
    pub(crate) kind: Kind,
    pub(crate) generation: u64,
    /// Sequence number of the operation in its generation, from 0.
    pub(crate) sequence: u64,
    pub(crate) step: u32,
    pub(crate) segment: u32,
    pub(crate) origin: u32,
    pub(crate) note_bytes: u32,
    /// Length of the operation's whole buffer, so that a mismatch shows in the first frame.
    pub(crate) total_bytes: u64,
    pub(crate) body_bytes: u32,
}

/// Fields that all frames of one operation have in common.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpTag {
    pub(crate) kind: Kind,
    pub(crate) generation: u64,
    pub(crate) sequence: u64,
}

/// Operation of a frame.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Kind {
    AllGather = 1,
    AllReduce = 2,
    /// All-reduce with bf16 elements on the wire.
    AllReduceBf16 = 6,
    /// All-reduce with f16 elements on the wire.
    AllReduceF16 = 7,
    /// Length of a `broadcast_bytes`, with all bytes if they are few.
    Announcement = 3,
    Broadcast = 4,
    BroadcastBytes = 5,
    /// Headers of an operation on device memory.
    Device = 16,
    /// Payload of an exchange, as the note.
    Exchange = 9,
    /// Negotiation of the transport.
    Negotiation = 8,
}

impl Frame {
    pub(crate) fn encode(&self) -> [u8; FRAME_BYTES] {
        let fields: [&[u8]; 10] = [
            &MAGIC.to_le_bytes(),
            &(self.kind as u32).to_le_bytes(),
            &self.generation.to_le_bytes(),
            &self.sequence.to_le_bytes(),
            &self.step.to_le_bytes(),
            &self.segment.to_le_bytes(),
            &self.origin.to_le_bytes(),
            &self.note_bytes.to_le_bytes(),
            &self.total_bytes.to_le_bytes(),
            &self.body_bytes.to_le_bytes(),
        ];
        let mut bytes = [0; FRAME_BYTES];
        let mut rest = bytes.as_mut_slice();
        for field in fields {
            let (target, after) = rest.split_at_mut(field.len());
            target.copy_from_slice(field);
            rest = after;
        }
        let digest = xxh3_64(&bytes[..FIELDS_BYTES]);
        bytes[FIELDS_BYTES..].copy_from_slice(&digest.to_le_bytes());
        bytes
    }

    /// Decodes a frame header.
    ///
    /// # Errors
    /// A message with the mismatch, if the bytes are not a frame header.
    pub(crate) fn decode(bytes: &[u8; FRAME_BYTES]) -> Result<Self, String> {
        let mut rest = bytes.as_slice();
        let magic = take_u32(&mut rest);
        if magic != MAGIC {
            return Err(format!("expected a frame, got bytes that begin with {magic:#010x}"));
        }
        let (fields, digest) = bytes.split_at(FIELDS_BYTES);
        if *digest != xxh3_64(fields).to_le_bytes() {
            return Err("expected a frame header, got one that was changed on the way".to_owned());
        }
        let kind = Kind::try_from(take_u32(&mut rest))?;
        Ok(Self {
            kind,
            generation: take_u64(&mut rest),
            sequence: take_u64(&mut rest),
            step: take_u32(&mut rest),
            segment: take_u32(&mut rest),
            origin: take_u32(&mut rest),
            note_bytes: take_u32(&mut rest),
            total_bytes: take_u64(&mut rest),
            body_bytes: take_u32(&mut rest),
        })
    }

    /// Checks this frame header against the expected one.
    ///
    /// `note_bytes_max`: 0 if the frame has no note; `expected.note_bytes` is ignored.
    ///
    /// # Errors
    /// A message with the first difference.
    pub(crate) fn check(&self, expected: &Self, note_bytes_max: usize) -> Result<(), String> {
        same("generation", self.generation, expected.generation)?;
        same("operation", self.kind, expected.kind)?;
        same("sequence number", self.sequence, expected.sequence)?;
        same("buffer length in bytes", self.total_bytes, expected.total_bytes)?;
        same("origin", self.origin, expected.origin)?;
        same("step", self.step, expected.step)?;
        same("segment", self.segment, expected.segment)?;
        same("segment length in bytes", self.body_bytes, expected.body_bytes)?;
        if self.note_bytes as usize > note_bytes_max {
            let note_bytes = self.note_bytes;
            return Err(format!(
                "expected at most {note_bytes_max} bytes of notes, got {note_bytes}"
            ));
        }
        Ok(())
    }
}

impl TryFrom<u32> for Kind {
    type Error = String;

    fn try_from(number: u32) -> Result<Self, String> {
        use Kind::{
            AllGather, AllReduce, AllReduceBf16, AllReduceF16, Announcement, Broadcast,
            BroadcastBytes, Device, Exchange, Negotiation,
        };
        [
            AllGather,
            AllReduce,
            AllReduceBf16,
            AllReduceF16,
            Announcement,
            Broadcast,
            BroadcastBytes,
            Device,
            Exchange,
            Negotiation,
        ]
        .into_iter()
        .find(|kind| *kind as u32 == number)
        .ok_or_else(|| format!("expected an operation, got number {number}"))
    }
}

/// Converts a step, segment, rank or length to its type on the wire; limits keep all of them small.
pub(crate) fn to_wire(number: usize) -> u32 {
    u32::try_from(number).expect("group sizes, segments and blocks are limited")
}

/// Length of a frame header.
pub(crate) const FRAME_BYTES: usize = FIELDS_BYTES + size_of::<u64>();

/// Length of what its digest covers.
const FIELDS_BYTES: usize = 52;

pub(crate) const MAGIC: u32 = u32::from_le_bytes(*b"EDL2");

fn same<T: Debug + PartialEq>(what: &str, got: T, expected: T) -> Result<(), String> {
    if got == expected {
        return Ok(());
    }
    Err(format!("expected {what} {expected:?}, got {got:?}"))
}

fn take_u32(rest: &mut &[u8]) -> u32 {
    let (field, after) = rest.split_first_chunk().expect("the fields add up to FRAME_BYTES");
    *rest = after;
    u32::from_le_bytes(*field)
}

fn take_u64(rest: &mut &[u8]) -> u64 {
    let (field, after) = rest.split_first_chunk().expect("the fields add up to FRAME_BYTES");
    *rest = after;
    u64::from_le_bytes(*field)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FRAME: Frame = Frame {
        kind: Kind::AllReduce,
        generation: 0x0102_0304_0506_0708,
        sequence: 9,
        step: 10,
        segment: 11,
        origin: 12,
        note_bytes: 13,
        total_bytes: 1 << 40,
        body_bytes: 14,
    };

    #[test]
    fn a_frame_survives_the_wire() {
        assert_eq!(Frame::decode(&FRAME.encode()), Ok(FRAME));
    }

    #[test]
    fn every_field_but_the_length_of_the_note_is_checked() {
        let mutants = [
            Frame { kind: Kind::Broadcast, ..FRAME },
            Frame { generation: FRAME.generation - 1, ..FRAME },
            Frame { generation: FRAME.generation + 1, ..FRAME },
            Frame { sequence: 8, ..FRAME },
            Frame { step: 9, ..FRAME },
            Frame { segment: 10, ..FRAME },
            Frame { origin: 11, ..FRAME },
            Frame { total_bytes: 0, ..FRAME },
            Frame { body_bytes: 15, ..FRAME },
        ];
        for mutant in mutants {
            assert!(mutant.check(&FRAME, 13).is_err(), "{mutant:?}");
        }
        assert_eq!(Frame { note_bytes: 0, ..FRAME }.check(&FRAME, 13), Ok(()));
        assert!(FRAME.check(&FRAME, 12).is_err());
        assert!(Frame { note_bytes: u32::MAX, ..FRAME }.check(&FRAME, 16 << 20).is_err());
    }

    #[test]
    fn other_bytes_are_not_a_frame() {
        assert!(Frame::decode(&[0; FRAME_BYTES]).unwrap_err().contains("expected a frame"));
        for bit in 0..8 * FRAME_BYTES {
            let mut bytes = FRAME.encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(Frame::decode(&bytes).is_err(), "bit {bit}");
        }
        let mut bytes = FRAME.encode();
        bytes[4] = 99;
        let digest = xxh3_64(&bytes[..FIELDS_BYTES]).to_le_bytes();
        bytes[FIELDS_BYTES..].copy_from_slice(&digest);
        assert_eq!(Frame::decode(&bytes), Err("expected an operation, got number 99".to_owned()));
    }
}
