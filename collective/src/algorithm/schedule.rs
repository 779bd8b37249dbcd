//! Schedule of the ring algorithms: which piece each rank sends and receives, in which order. Pure;
//! knows nothing about sockets or numbers.
//!
//! A **piece** is one segment in one ring step. In step `t` rank `r` sends chunk `r−t` to rank
//! `r+1` and receives chunk `r−1−t` from rank `r−1`. A rank sends in step `t+1` what it receives in
//! step `t`, so each direction is one continuous sequence of pieces:
//!
//! ```text
//! all-reduce, world 3, rank 0                     step 0     step 1     step 2     step 3
//!   sends     own chunk, then sums, then totals   c0         c2         c1         c0
//!   receives  sums, then totals                   c2 (sum)   c1 (total) c0 (total) c2 (total)
//! ```
//!
//! (In step `world−2`, the last one of the reduce-scatter, the received sum plus this rank's
//! contribution is the total.)
//!
//! **Invariant:** the first `free` sends, the rank's own data, have no dependency; send `free + m`
//! depends on receive `m`. So a segment moves on as soon as it is reduced, across steps; there is
//! no barrier between steps or phases.
//!
//! **Invariant:** pieces are sent and received in sequence order, so both ends know every next
//! piece exactly.
//!
//! **Invariant:** a total is received into memory whose partial sum, or own contribution, is
//! already sent: the total contains it.
//!
//! Patarasuk & Yuan, J. Parallel Distrib. Comput. 69 (2009).

use std::ops::Range;

use super::chunk;

/// Schedule of one rank in one operation: the pieces to send and receive next.
#[derive(Clone, Debug)]
pub struct Schedule {
    sends: PieceSequence,
    receives: PieceSequence,
    free: usize,
    sent: usize,
    received: usize,
}

/// One segment in one ring step.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Piece {
    pub step: usize,
    pub segment: usize,
    /// Rank to which the chunk and the note belong.
    pub origin: usize,
    /// Range of elements in the operation's buffer.
    pub range: Range<usize>,
    /// Whether the frame carries the note of `origin`.
    pub note: bool,
    pub content: Content,
}

/// Content of a piece's elements.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Content {
    /// The sender's own contribution.
    Own,
    /// Partial sum; the receiver adds its own contribution.
    Sum,
    /// Final result, copied unchanged.
    Total,
}

/// A rank and the size of its group.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct RankInfo {
    pub rank: usize,
    pub world: usize,
}

/// Length of a buffer and of its segments, in elements.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Span {
    pub len: usize,
    pub segment_len: usize,
}

impl Schedule {
    /// All-gather of the notes: `world − 1` steps without elements.
    pub fn all_gather(rank_info: RankInfo) -> Self {
        let steps = rank_info.world - 1;
        Self::ring(
            rank_info,
            Span { len: 0, segment_len: 1 },
            Phases { steps, summing: 0, noting: steps },
        )
    }

    /// Sends every rank's note to the next rank.
    pub fn exchange(rank_info: RankInfo) -> Self {
        Self::ring(
            rank_info,
            Span { len: 0, segment_len: 1 },
            Phases { steps: 1, summing: 0, noting: 1 },
        )
    }

    /// Reduce-scatter in the first `world − 1` steps, which also carry the notes, and all-gather in
    /// the following ones.
    pub fn all_reduce(rank_info: RankInfo, span: Span) -> Self {
        let half = rank_info.world - 1;
        Self::ring(rank_info, span, Phases { steps: 2 * half, summing: half, noting: half })
    }

    /// Broadcast of the buffer of `root` along the chain `root → root+1 → … → root−1`, as a
    /// sequence of segments. With `note`, the first segment carries the root's note.
    pub fn broadcast(rank_info: RankInfo, root: usize, span: Span, note: bool) -> Self {
        let RankInfo { rank, world } = rank_info;
        let hops = (rank + world - root) % world;
        let sequence = |steps| PieceSequence {
            world,
            span,
            phases: Phases { steps, summing: 0, noting: usize::from(note) },
            first: root,
            whole: true,
            sending: false,
            step: 0,
            segment: 0,
        };
        let sends = sequence(usize::from(hops + 1 < world));
        let receives = sequence(usize::from(hops > 0));
        let free = if hops == 0 { usize::MAX } else { 0 };
        Self { sends, receives, free, sent: 0, received: 0 }
    }

    /// Returns the piece to send now; `None` if all are sent, or if the next one depends on a
    /// pending receive.
    pub fn next_send(&self) -> Option<Piece> {
        if self.sent >= self.free.saturating_add(self.received) {
            return None;
        }
        self.sends.piece()
    }

    /// Returns the piece to receive next; `None` if all have arrived.
    pub fn next_receive(&self) -> Option<Piece> {
        self.receives.piece()
    }

    /// Whether the next piece to receive would overwrite data that this rank still has to send.
    /// Peers that follow the schedule cannot send it yet.
    pub fn next_receive_is_early(&self) -> bool {
        let PieceSequence { step, segment, phases, .. } = self.receives;
        step >= phases.summing
            && phases.summing > 0
            && (self.sends.step, self.sends.segment) <= (step - phases.summing, segment)
    }

    /// Marks the piece returned by `next_send` as sent.
    pub fn on_sent(&mut self) {
        self.sends.advance();
        self.sent += 1;
    }

    /// Marks the piece returned by `next_receive` as received and reduced.
    pub fn on_received(&mut self) {
        self.receives.advance();
        self.received += 1;
    }

    pub fn has_sends_left(&self) -> bool {
        self.sends.piece().is_some()
    }

    pub fn is_done(&self) -> bool {
        !self.has_sends_left() && self.next_receive().is_none()
    }

    fn ring(rank_info: RankInfo, span: Span, phases: Phases) -> Self {
        let RankInfo { rank, world } = rank_info;
        let sequence = |first, sending| PieceSequence {
            world,
            span,
            phases,
            first,
            whole: false,
            sending,
            step: 0,
            segment: 0,
        };
        let sends = sequence(rank, true);
        let receives = sequence((rank + world - 1) % world, false);
        let own = chunk::chunk(span.len, world, rank);
        let free = chunk::segment_count(&own, span.segment_len);
        Self { sends, receives, free, sent: 0, received: 0 }
    }
}

/// Pieces of one direction in order, and the current position.
#[derive(Clone, Debug)]
struct PieceSequence {
    world: usize,
    span: Span,
    phases: Phases,
    /// Origin in step 0.
    first: usize,
    /// Whether the buffer is one chunk, instead of one per rank.
    whole: bool,
    sending: bool,
    step: usize,
    segment: usize,
}

/// Number of ring steps in total, and how many of them, from the first, carry sums and notes.
#[derive(Clone, Copy, Debug)]
struct Phases {
    steps: usize,
    summing: usize,
    noting: usize,
}

impl PieceSequence {
    fn piece(&self) -> Option<Piece> {
        if self.step >= self.phases.steps {
            return None;
        }
        let content = match self.step {
            0 if self.sending && self.phases.summing > 0 => Content::Own,
            step if step < self.phases.summing => Content::Sum,
            _ => Content::Total,
        };
        Some(Piece {
            step: self.step,
            segment: self.segment,
            origin: self.origin(),
            range: chunk::segment(&self.chunk(), self.span.segment_len, self.segment),
            note: self.segment == 0 && self.step < self.phases.noting,
            content,
        })
    }

    fn advance(&mut self) {
        self.segment += 1;
        if self.segment == chunk::segment_count(&self.chunk(), self.span.segment_len) {
            self.segment = 0;
            self.step += 1;
        }
    }

    fn chunk(&self) -> Range<usize> {
        if self.whole {
            return 0..self.span.len;
        }
        chunk::chunk(self.span.len, self.world, self.origin())
    }

    fn origin(&self) -> usize {
        (self.first + self.world - self.step % self.world) % self.world
    }
}

#[cfg(test)]
mod simulation;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rank_0_of_3_sends_and_receives_as_documented() {
        let rank_info = RankInfo { rank: 0, world: 3 };
        let mut schedule = Schedule::all_reduce(rank_info, Span { len: 3, segment_len: 8 });
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        while !schedule.is_done() {
            if let Some(piece) = schedule.next_send() {
                sends.push((piece.origin, piece.content, piece.note));
                schedule.on_sent();
            } else {
                let piece = schedule.next_receive().unwrap();
                receives.push((piece.origin, piece.content, piece.note));
                schedule.on_received();
            }
        }
        use Content::{Own, Sum, Total};
        assert_eq!(sends, [(0, Own, true), (2, Sum, true), (1, Total, false), (0, Total, false)]);
        assert_eq!(
            receives,
            [(2, Sum, true), (1, Sum, true), (0, Total, false), (2, Total, false)]
        );
    }

    #[test]
    fn a_rank_sends_what_the_next_one_expects() {
        for world in 1..=9 {
            for len in 0..=20 {
                for rank in 0..world {
                    let span = Span { len, segment_len: 2 };
                    let mut sender = Schedule::all_reduce(RankInfo { rank, world }, span);
                    let mut receiver =
                        Schedule::all_reduce(RankInfo { rank: (rank + 1) % world, world }, span);
                    loop {
                        let position =
                            |piece: Piece| (piece.step, piece.segment, piece.range, piece.note);
                        let sent = sender.sends.piece().map(position);
                        assert_eq!(
                            sent,
                            receiver.next_receive().map(position),
                            "world {world}, len {len}"
                        );
                        if sent.is_none() {
                            break;
                        }
                        sender.on_sent();
                        receiver.on_received();
                    }
                }
            }
        }
    }

    #[test]
    fn a_total_is_early_until_this_ranks_contribution_is_sent() {
        let rank_info = RankInfo { rank: 0, world: 2 };
        let mut schedule = Schedule::all_reduce(rank_info, Span { len: 4, segment_len: 1 });
        assert!(!schedule.next_receive_is_early());
        schedule.on_received();
        schedule.on_received();
        assert!(schedule.next_receive_is_early());
        schedule.on_sent();
        assert!(!schedule.next_receive_is_early());
        schedule.on_received();
        assert!(schedule.next_receive_is_early());
    }
}
