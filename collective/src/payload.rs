//! What the pieces of an operation are made of: the caller's buffers, and the notes that ride
//! along. No IO.

use crate::schedule::{Content, Extent, Piece};
use crate::shared::{Front, SharedFault};
use crate::wire::Half;

/// The buffers of one operation on one rank.
///
/// **Invariant:** elements are received where they belong and summed there; there is no other copy
/// of them, but of a segment each way where they travel as halves.
#[derive(Debug)]
pub(crate) struct Payload<'a> {
    body: Body<'a>,
    /// By rank; what has not arrived yet is empty.
    notes: Vec<Vec<u8>>,
    /// Where this rank sums for others of its host, too.
    front: Option<Front<'a>>,
}

/// The caller's buffers, as the operation needs them.
#[derive(Debug)]
pub(crate) enum Body<'a> {
    Bytes(&'a mut [u8]),
    Empty,
    Floats(&'a mut [f32]),
    /// A sum whose elements travel as halves.
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

/// A segment each way, as it travels.
#[derive(Debug)]
pub(crate) struct Halves {
    half: Half,
    leaving: Vec<u16>,
    landing: Vec<u16>,
}

impl Halves {
    pub(crate) fn new(half: Half) -> Self {
        Self { half, leaving: Vec::new(), landing: Vec::new() }
    }
}

impl<'a> Payload<'a> {
    /// `notes`: one per rank, the own one filled in.
    pub(crate) fn new(body: Body<'a>, notes: Vec<Vec<u8>>) -> Self {
        Self { body, notes, front: None }
    }

    pub(crate) fn with_front(self, front: Option<Front<'a>>) -> Self {
        Self { front, ..self }
    }

    /// The body's length, and how many elements make a segment of `segment_bytes`.
    pub(crate) fn extent(&self, segment_bytes: usize) -> Extent {
        Extent { len: self.len(), segment_len: segment_bytes / self.element_bytes() }
    }

    /// The body's length in bytes.
    pub(crate) fn total_bytes(&self) -> usize {
        self.len() * self.element_bytes()
    }

    /// The length of a piece's elements in bytes.
    pub(crate) fn piece_bytes(&self, piece: &Piece) -> usize {
        piece.range.len() * self.element_bytes()
    }

    /// To be called before a piece is sent.
    ///
    /// # Errors
    /// Only where this rank sums for others of its host, too.
    pub(crate) fn prepare(&mut self, piece: &Piece) -> Result<(), SharedFault> {
        if piece.content == Content::Own {
            self.sum_own(piece.segment + 1)?;
        }
        let is_summed = self.front.is_some();
        let Body::Rounded { src, dst, halves } = &mut self.body else { return Ok(()) };
        let Halves { half, leaving, .. } = halves;
        leaving.resize(piece.range.len(), 0);
        let range = piece.range.clone();
        match piece.content {
            Content::Own if !is_summed => half.round(&src[range], leaving),
            Content::Own | Content::Sum => half.round(&dst[range], leaving),
            Content::Total => {
                half.round(&dst[range.clone()], leaving);
                // What the others get is what its owner keeps; whoever sends it on has it so.
                if piece.step + 1 == self.notes.len() {
                    half.widen(leaving, &mut dst[range]);
                }
            }
        }
        Ok(())
    }

    /// Sums the parts of this host's ranks, where it has several, of the first segments of the own
    /// chunk, in `dst`: nothing comes there before they have left.
    fn sum_own(&mut self, segments: usize) -> Result<(), SharedFault> {
        let Some(front) = &mut self.front else { return Ok(()) };
        let (Body::Rounded { src, dst, .. } | Body::Sum { src, dst }) = &mut self.body else {
            return Ok(());
        };
        while let Some(range) = front.next_own(segments) {
            front.sum_own(&src[range.clone()], &mut dst[range])?;
        }
        Ok(())
    }

    /// What to send for `piece`: the note, empty if none rides along, and the elements.
    pub(crate) fn outgoing(&self, piece: &Piece) -> (&[u8], &[u8]) {
        let note = if piece.note { self.notes[piece.origin].as_slice() } else { &[] };
        let range = piece.range.clone();
        let body = match &self.body {
            Body::Bytes(bytes) => &bytes[range],
            Body::Empty => &[],
            Body::Floats(floats) => bytemuck::cast_slice(&floats[range]),
            Body::Rounded { halves, .. } => bytemuck::cast_slice(&halves.leaving),
            Body::Sum { src, .. } if piece.content == Content::Own && self.front.is_none() => {
                bytemuck::cast_slice(&src[range])
            }
            Body::Sum { dst, .. } => bytemuck::cast_slice(&dst[range]),
        };
        (note, body)
    }

    /// Makes room for the note of `piece`.
    pub(crate) fn expect_note(&mut self, piece: &Piece, bytes: usize) {
        self.notes[piece.origin] = vec![0; bytes];
    }

    /// Where `piece` is to be received: the note's place, empty if none rides along, and the
    /// elements'.
    pub(crate) fn landing(&mut self, piece: &Piece) -> (&mut [u8], &mut [u8]) {
        let note: &mut [u8] = if piece.note { &mut self.notes[piece.origin] } else { &mut [] };
        let range = piece.range.clone();
        let body: &mut [u8] = match &mut self.body {
            Body::Bytes(bytes) => &mut bytes[range],
            Body::Empty => &mut [],
            Body::Floats(floats) => bytemuck::cast_slice_mut(&mut floats[range]),
            Body::Rounded { halves, .. } => {
                halves.landing.resize(range.len(), 0);
                bytemuck::cast_slice_mut(&mut halves.landing)
            }
            Body::Sum { dst, .. } => bytemuck::cast_slice_mut(&mut dst[range]),
        };
        (note, body)
    }

    /// `piece` has been received: adds the own part to a sum.
    ///
    /// The order of addition is the ring's, from the chunk's origin on, the same wherever the chunk
    /// is.
    ///
    /// # Errors
    /// Only where this rank sums for others of its host, too.
    pub(crate) fn on_landed(&mut self, piece: &Piece) -> Result<(), SharedFault> {
        let range = piece.range.clone();
        let is_sum = piece.content == Content::Sum;
        match &mut self.body {
            Body::Rounded { src, dst, halves: Halves { half, landing, .. } } => match is_sum {
                true => half.add(landing, &src[range.clone()], &mut dst[range]),
                false => half.widen(landing, &mut dst[range]),
            },
            Body::Sum { src, dst } if is_sum => {
                for (sum, own) in dst[range.clone()].iter_mut().zip(&src[range]) {
                    *sum += own;
                }
            }
            Body::Bytes(_) | Body::Empty | Body::Floats(_) | Body::Sum { .. } => {}
        }
        match self.front {
            Some(_) => self.share(piece),
            None => Ok(()),
        }
    }

    /// Adds the parts of this host's other ranks to a sum that has landed, and gives them the
    /// totals.
    fn share(&mut self, piece: &Piece) -> Result<(), SharedFault> {
        // They put in what is sent first before what comes first.
        self.sum_own(usize::MAX)?;
        let Some(front) = &mut self.front else { return Ok(()) };
        let is_total = piece.content == Content::Total || front.completes(piece.step);
        let dst = match &mut self.body {
            Body::Rounded { dst, .. } | Body::Sum { dst, .. } => &mut dst[piece.range.clone()],
            Body::Bytes(_) | Body::Empty | Body::Floats(_) => return Ok(()),
        };
        if piece.content == Content::Sum {
            front.add(dst)?;
        }
        if piece.content == Content::Sum
            && is_total
            && let Body::Rounded { dst, halves: Halves { half, landing, .. }, .. } = &mut self.body
        {
            // As it will be when it has been sent.
            let dst = &mut dst[piece.range.clone()];
            half.round(dst, landing);
            half.widen(landing, dst);
        }
        match &self.body {
            Body::Rounded { dst, .. } | Body::Sum { dst, .. } if is_total => {
                front.tell(&dst[piece.range.clone()])
            }
            _ => Ok(()),
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
