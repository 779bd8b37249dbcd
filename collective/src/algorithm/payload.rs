//! Payload of an operation: the caller's buffers, and the notes that accompany them. Pure.

use super::schedule::{Content, Piece, Span};
use super::wire_dtype::Half;

/// Buffers of one operation on one rank.
///
/// **Invariant:** elements are received at their final address and summed there. There is no other
/// copy of them, except for one segment per direction if the wire type has 16 bits.
#[derive(Debug)]
pub(crate) struct Payload<'a> {
    body: Body<'a>,
    /// Notes by rank; empty until they arrive.
    notes: Vec<Vec<u8>>,
    /// Whether this rank also reduces for other ranks of its host. Then the host's contribution is
    /// summed in the output before it is sent.
    is_leader: bool,
}

/// The caller's buffers, by operation.
#[derive(Debug)]
pub(crate) enum Body<'a> {
    Bytes(&'a mut [u8]),
    Empty,
    Floats(&'a mut [f32]),
    /// An all-reduce with 16-bit elements on the wire.
    Rounded {
        src: &'a [f32],
        dst: &'a mut [f32],
        halves: Halves,
    },
    Sum {
        src: &'a [f32],
        dst: &'a mut [f32],
    },
}

/// Wire buffers of one segment per direction.
#[derive(Debug)]
pub(crate) struct Halves {
    half: Half,
    send_buf: Vec<u16>,
    recv_buf: Vec<u16>,
}

impl Halves {
    pub(crate) fn new(half: Half) -> Self {
        Self { half, send_buf: Vec::new(), recv_buf: Vec::new() }
    }
}

impl<'a> Payload<'a> {
    /// `notes`: one per rank; the entry of this rank is filled in.
    pub(crate) fn new(body: Body<'a>, notes: Vec<Vec<u8>>) -> Self {
        Self { body, notes, is_leader: false }
    }

    /// If `is_leader`, this rank's contribution is sent from the output, where the caller sums the
    /// contributions of all ranks of the host beforehand.
    pub(crate) fn of_leader(self, is_leader: bool) -> Self {
        Self { is_leader, ..self }
    }

    /// Span of the body, with segments of `segment_bytes`.
    pub(crate) fn span(&self, segment_bytes: usize) -> Span {
        Span { len: self.len(), segment_len: segment_bytes / self.element_bytes() }
    }

    /// Length of the body in bytes.
    pub(crate) fn total_bytes(&self) -> usize {
        self.len() * self.element_bytes()
    }

    /// Length of a piece's elements in bytes.
    pub(crate) fn piece_bytes(&self, piece: &Piece) -> usize {
        piece.range.len() * self.element_bytes()
    }

    /// Prepares a piece for sending: converts it to the wire type.
    pub(crate) fn prepare(&mut self, piece: &Piece) {
        let Body::Rounded { src, dst, halves } = &mut self.body else { return };
        let Halves { half, send_buf, .. } = halves;
        send_buf.resize(piece.range.len(), 0);
        let range = piece.range.clone();
        match piece.content {
            Content::Own if !self.is_leader => half.round(&src[range], send_buf),
            Content::Own | Content::Sum => half.round(&dst[range], send_buf),
            Content::Total => {
                half.round(&dst[range.clone()], send_buf);
                // The owner of a chunk keeps the rounded values that the other ranks receive; a
                // rank that forwards them has these values already.
                if piece.step + 1 == self.notes.len() {
                    half.widen(send_buf, &mut dst[range]);
                }
            }
        }
    }

    /// Returns the data to send for `piece`: the note, empty if there is none, and the elements.
    pub(crate) fn send_bufs(&self, piece: &Piece) -> (&[u8], &[u8]) {
        let note = if piece.note { self.notes[piece.origin].as_slice() } else { &[] };
        let range = piece.range.clone();
        let body = match &self.body {
            Body::Bytes(bytes) => &bytes[range],
            Body::Empty => &[],
            Body::Floats(floats) => bytemuck::cast_slice(&floats[range]),
            Body::Rounded { halves, .. } => bytemuck::cast_slice(&halves.send_buf),
            Body::Sum { src, .. } if piece.content == Content::Own && !self.is_leader => {
                bytemuck::cast_slice(&src[range])
            }
            Body::Sum { dst, .. } => bytemuck::cast_slice(&dst[range]),
        };
        (note, body)
    }

    /// Allocates the note of `piece`.
    pub(crate) fn expect_note(&mut self, piece: &Piece, bytes: usize) {
        self.notes[piece.origin] = vec![0; bytes];
    }

    /// Returns the receive buffers of `piece`: for the note, empty if there is none, and for the
    /// elements.
    pub(crate) fn recv_bufs(&mut self, piece: &Piece) -> (&mut [u8], &mut [u8]) {
        let note: &mut [u8] = if piece.note { &mut self.notes[piece.origin] } else { &mut [] };
        let range = piece.range.clone();
        let body: &mut [u8] = match &mut self.body {
            Body::Bytes(bytes) => &mut bytes[range],
            Body::Empty => &mut [],
            Body::Floats(floats) => bytemuck::cast_slice_mut(&mut floats[range]),
            Body::Rounded { halves, .. } => {
                halves.recv_buf.resize(range.len(), 0);
                bytemuck::cast_slice_mut(&mut halves.recv_buf)
            }
            Body::Sum { dst, .. } => bytemuck::cast_slice_mut(&mut dst[range]),
        };
        (note, body)
    }

    /// Handles a received piece: adds this rank's contribution to a partial sum.
    ///
    /// The order of addition is that of the ring, starting at the chunk's origin, on every rank.
    pub(crate) fn on_received(&mut self, piece: &Piece) {
        let range = piece.range.clone();
        let is_sum = piece.content == Content::Sum;
        match &mut self.body {
            Body::Rounded { src, dst, halves: Halves { half, recv_buf, .. } } => {
                if is_sum {
                    half.add(recv_buf, &src[range.clone()], &mut dst[range]);
                } else {
                    half.widen(recv_buf, &mut dst[range]);
                }
            }
            Body::Sum { src, dst } if is_sum => {
                for (sum, own) in dst[range.clone()].iter_mut().zip(&src[range]) {
                    *sum += own;
                }
            }
            Body::Bytes(_) | Body::Empty | Body::Floats(_) | Body::Sum { .. } => {}
        }
    }

    /// Returns input and output of a sum.
    pub(crate) fn sum_bufs(&mut self) -> (&[f32], &mut [f32]) {
        match &mut self.body {
            Body::Rounded { src, dst, .. } | Body::Sum { src, dst } => (src, dst),
            Body::Bytes(_) | Body::Empty | Body::Floats(_) => {
                unreachable!("only sums have two buffers")
            }
        }
    }

    /// Rounds a total as the wire does, so that all ranks hold the same bits.
    pub(crate) fn round_total(&mut self, piece: &Piece) {
        if let Body::Rounded { dst, halves: Halves { half, recv_buf, .. }, .. } = &mut self.body {
            let dst = &mut dst[piece.range.clone()];
            half.round(dst, recv_buf);
            half.widen(recv_buf, dst);
        }
    }

    pub(crate) fn into_notes(self) -> Vec<Vec<u8>> {
        self.notes
    }

    fn len(&self) -> usize {
        match &self.body {
            Body::Bytes(bytes) => bytes.len(),
            Body::Empty => 0,
            Body::Floats(floats) => floats.len(),
            Body::Rounded { dst, .. } | Body::Sum { dst, .. } => dst.len(),
        }
    }

    fn element_bytes(&self) -> usize {
        match &self.body {
            Body::Bytes(_) | Body::Empty => 1,
            Body::Rounded { .. } => size_of::<u16>(),
            Body::Floats(_) | Body::Sum { .. } => size_of::<f32>(),
        }
    }
}
