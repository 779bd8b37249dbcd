//! State transfer: from a member to a newcomer, beside the ring, while the ring works.
//!
//! ```text
//!   newcomer ── hello (to the donor's listener) ──▶ donor
//!   newcomer ◀── head | note | floats ── head | note | floats ── … ── donor
//!
//!   head:  magic  kind  generation  note bytes  floats
//!            u32   u32         u64         u64     u64        all little endian
//! ```
//!
//! What kinds, notes and floats mean is the caller's affair; kind 0 is the one that is not, a beat: it says that the
//! donor lives, and the receiver keeps it to itself.
//!
//! **Invariant:** neither side waits for the other for longer than its patience, but for a newcomer that waits for its
//! first parcel: a donor begins between two steps, and those may be long.

use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use crate::link::poll_until;

/// A newcomer that has dialled this endpoint, and waits.
#[derive(Debug)]
pub struct Visitor {
    member: u64,
    link: TcpStream,
}

impl Visitor {
    pub(crate) fn new(member: u64, link: TcpStream) -> Self {
        Self { member, link }
    }

    /// Its id.
    #[must_use]
    pub fn member(&self) -> u64 {
        self.member
    }

    /// Begins to serve it. `patience`: how long it may take no byte before it is given up.
    #[must_use]
    pub fn serve(self, patience: Duration) -> StateSender {
        StateSender { link: self.link, patience }
    }
}

/// What a parcel is, and whose.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct ParcelHead {
    /// The caller's; at least 1.
    pub kind: u32,
    /// The caller's.
    pub generation: u64,
    /// The caller's, at most [`NOTE_BYTES_MAX`].
    pub note: Vec<u8>,
    /// How many floats follow.
    pub floats: u64,
}

/// The donor's end. Blocks, so it belongs to a thread of its own.
#[derive(Debug)]
pub struct StateSender {
    link: TcpStream,
    patience: Duration,
}

impl StateSender {
    /// Sends one parcel: `tensors` one behind the other, each f32 in host memory, and counted together.
    ///
    /// # Errors
    /// The link's, or `TimedOut` where the newcomer has taken nothing for longer than the patience.
    pub fn send(&mut self, kind: u32, generation: u64, note: &[u8], tensors: &[&[f32]]) -> io::Result<()> {
        let floats: u64 = tensors.iter().map(|tensor| tensor.len() as u64).sum();
        let head = encode(kind, generation, note.len() as u64, floats);
        self.write(&head, note)?;
        tensors.iter().try_for_each(|tensor| self.write(bytemuck::cast_slice(tensor), &[]))
    }

    /// Says that the donor lives. To be called several times within the receiver's patience.
    ///
    /// # Errors
    /// As for [`send`](Self::send).
    pub fn beat(&mut self) -> io::Result<()> {
        self.send(BEAT, 0, &[], &[])
    }

    fn write(&self, mut first: &[u8], mut second: &[u8]) -> io::Result<()> {
        while !first.is_empty() || !second.is_empty() {
            match (&self.link).write_vectored(&[IoSlice::new(first), IoSlice::new(second)]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(bytes) => {
                    let of_first = bytes.min(first.len());
                    first = &first[of_first..];
                    second = &second[bytes - of_first..];
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    wait(&self.link, PollFlags::OUT, self.patience)?;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// The newcomer's end.
#[derive(Debug)]
pub struct StateReceiver {
    donor: u64,
    /// The fence holds the other reference, to shut the link down.
    link: Arc<TcpStream>,
    patience: Duration,
    /// When something came last; `None` before the first byte.
    heard: Option<Instant>,
    head: [u8; HEAD_BYTES],
    read: usize,
    /// Floats of the current parcel that are not taken yet.
    floats_left: u64,
}

impl StateReceiver {
    pub(crate) fn new(donor: u64, link: Arc<TcpStream>, patience: Duration) -> Self {
        Self { donor, link, patience, heard: None, head: [0; HEAD_BYTES], read: 0, floats_left: 0 }
    }

    /// The member at the other end.
    #[must_use]
    pub fn donor(&self) -> u64 {
        self.donor
    }

    /// The next parcel's head, if it comes within `wait`. The floats of the one before must have been
    /// [taken](Self::take).
    ///
    /// # Errors
    /// The link's; `UnexpectedEof` at its end; `TimedOut` where the donor has been silent for longer than the patience;
    /// `InvalidData` where these are no parcels.
    pub fn next(&mut self, wait: Duration) -> io::Result<Option<ParcelHead>> {
        if self.floats_left > 0 {
            return Err(invalid(format!("{} floats of the parcel before were not taken", self.floats_left)));
        }
        let until = Instant::now() + wait;
        loop {
            match (&*self.link).read(&mut self.head[self.read..]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(bytes) => {
                    self.read += bytes;
                    self.heard = Some(Instant::now());
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if self.heard.is_some_and(|heard| heard.elapsed() > self.patience) {
                        return Err(ErrorKind::TimedOut.into());
                    }
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() || !ready(&self.link, PollFlags::IN, left)? {
                        return Ok(None);
                    }
                }
                Err(error) => return Err(error),
            }
            if self.read == HEAD_BYTES {
                self.read = 0;
                if let Some(head) = self.open()? {
                    return Ok(Some(head));
                }
            }
        }
    }

    /// Takes the next `buf.len()` floats of the current parcel.
    ///
    /// # Errors
    /// As for [`next`](Self::next); `InvalidData` where the parcel has not as many; `buf` then holds unspecified values.
    pub fn take(&mut self, buf: &mut [f32]) -> io::Result<()> {
        self.floats_left = self.floats_left.checked_sub(buf.len() as u64).ok_or_else(|| {
            invalid(format!("a parcel with {} floats too few", buf.len() as u64 - self.floats_left))
        })?;
        self.read_exact(bytemuck::cast_slice_mut(buf))
    }

    /// The head that has come, with its note; `None` for a beat.
    fn open(&mut self) -> io::Result<Option<ParcelHead>> {
        let (kind, generation, note_bytes, floats) = decode(&self.head).map_err(invalid)?;
        if note_bytes > NOTE_BYTES_MAX as u64 {
            return Err(invalid(format!(
                "a note of {note_bytes} bytes; at most {NOTE_BYTES_MAX} are possible"
            )));
        }
        // The note grows with what comes, so that a length alone takes no memory.
        let mut note = Vec::new();
        while (note.len() as u64) < note_bytes {
            let have = note.len();
            note.resize(have + (note_bytes as usize - have).min(NOTE_STEP_BYTES), 0);
            self.read_exact(&mut note[have..])?;
        }
        self.floats_left = floats;
        match (kind, note_bytes, floats) {
            (BEAT, 0, 0) => Ok(None),
            (BEAT, ..) => Err(invalid("a beat with something in it".to_owned())),
            _ => Ok(Some(ParcelHead { kind, generation, note, floats })),
        }
    }

    fn read_exact(&mut self, mut bytes: &mut [u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match (&*self.link).read(bytes) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(read) => bytes = &mut bytes[read..],
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    wait(&self.link, PollFlags::IN, self.patience)?;
                }
                Err(error) => return Err(error),
            }
        }
        self.heard = Some(Instant::now());
        Ok(())
    }
}

/// The kind of a parcel that says nothing but that the donor lives.
const BEAT: u32 = 0;

/// The longest note, in bytes: 64 MiB.
pub const NOTE_BYTES_MAX: usize = 64 << 20;

const NOTE_STEP_BYTES: usize = 1 << 20;

const HEAD_BYTES: usize = 32;

const MAGIC: u32 = u32::from_le_bytes(*b"EDLP");

fn encode(kind: u32, generation: u64, note_bytes: u64, floats: u64) -> [u8; HEAD_BYTES] {
    let mut head = [0; HEAD_BYTES];
    head[..4].copy_from_slice(&MAGIC.to_le_bytes());
    head[4..8].copy_from_slice(&kind.to_le_bytes());
    head[8..16].copy_from_slice(&generation.to_le_bytes());
    head[16..24].copy_from_slice(&note_bytes.to_le_bytes());
    head[24..].copy_from_slice(&floats.to_le_bytes());
    head
}

fn decode(head: &[u8; HEAD_BYTES]) -> Result<(u32, u64, u64, u64), String> {
    let short =
        |at: usize| u32::from_le_bytes(*head[at..].first_chunk().expect("a field lies within the head"));
    let long =
        |at: usize| u64::from_le_bytes(*head[at..].first_chunk().expect("a field lies within the head"));
    match short(0) {
        MAGIC => Ok((short(4), long(8), long(16), long(24))),
        other => Err(format!("expected a parcel, got bytes that begin with {other:#010x}")),
    }
}

fn invalid(reason: String) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, reason)
}

/// Waits until `link` stirs; `TimedOut` if it does not.
fn wait(link: &TcpStream, flags: PollFlags, patience: Duration) -> io::Result<()> {
    match ready(link, flags, patience)? {
        true => Ok(()),
        false => Err(ErrorKind::TimedOut.into()),
    }
}

fn ready(link: &TcpStream, flags: PollFlags, timeout: Duration) -> io::Result<bool> {
    poll_until(&mut [PollFd::new(link, flags)], Instant::now().checked_add(timeout))
}
