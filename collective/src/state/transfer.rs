//! State transfer from a member (the donor) to a joiner, concurrently with the group's operations.
//!
//! ```text
//!   joiner ── handshake, position (to the donor's listener) ──▶ donor
//!   joiner ◀── header | note | floats ── header | note | floats ── … ── donor
//!   joiner ── position ── position ── … ──▶ donor
//!
//!   header:    magic  kind  generation  note bytes  floats
//!                u32   u32         u64         u64     u64        all little endian
//!   position:  magic  kind    snapshot      floats    step
//!                u32   u32         u64         u64     u64
//! ```
//!
//! The caller defines the kinds, notes and floats of its messages. Kind 0 is reserved for
//! heartbeats of the donor, which the receiver handles itself. A joiner's [`Position`] is both its
//! heartbeat and the point at which a transfer resumes when its link breaks. A separate thread
//! sends it, so a joiner that is busy with received data is not considered dead.
//!
//! **Invariant:** neither side waits for the other for longer than its idle timeout without a sign
//! of life. The exception is a joiner that waits for its first message: a donor begins between two
//! steps, and steps may be long.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::net::Shutdown;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use crate::net::link::Link;
use crate::net::socket::poll_until;

/// State request of a joiner that has dialled this endpoint and waits.
#[derive(Debug)]
pub struct StateRequest {
    member: u64,
    link: Arc<Link>,
}

impl StateRequest {
    pub(crate) fn new(member: u64, link: Link) -> Self {
        Self { member, link: Arc::new(link) }
    }

    /// Id of the joiner.
    #[must_use]
    pub fn member(&self) -> u64 {
        self.member
    }

    /// Handle to close the link from any thread.
    #[must_use]
    pub fn link(&self) -> StateLink {
        StateLink(Arc::clone(&self.link))
    }

    /// Begins to serve the request. `idle_timeout`: limit of the time in which the joiner neither
    /// takes a byte nor sends a position.
    #[must_use]
    pub fn serve(self, idle_timeout: Duration) -> StateSender {
        StateSender {
            link: self.link,
            idle_timeout,
            alive_at: Instant::now(),
            position: None,
            bytes: [0; POSITION_BYTES],
            read: 0,
        }
    }
}

/// Handle to the link of a joiner.
#[derive(Clone, Debug)]
pub struct StateLink(Arc<Link>);

impl StateLink {
    /// Closes the link: a thread that waits for the joiner gets an error.
    pub fn shut_down(&self) {
        // The link may be closed already.
        let _ = self.0.shutdown(Shutdown::Both);
    }
}

/// Header of a state message.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct StateMessageHeader {
    /// Kind, defined by the caller; at least 1.
    pub kind: u32,
    /// Generation, defined by the caller.
    pub generation: u64,
    /// Note, defined by the caller; at most [`NOTE_BYTES_MAX`] bytes.
    pub note: Vec<u8>,
    /// Number of floats that follow.
    pub floats: u64,
}

/// Progress of a joiner with one snapshot of the state.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Position {
    /// Step of the snapshot.
    pub snapshot: u64,
    /// Number of floats of the snapshot that the joiner has received and verified.
    pub floats: u64,
    /// Step of the joiner's state, once it has all floats of the snapshot; until then the step of
    /// the snapshot.
    pub step: u64,
}

/// Donor's end of a state transfer. Its calls block, so it runs on a thread of its own.
#[derive(Debug)]
pub struct StateSender {
    link: Arc<Link>,
    idle_timeout: Duration,
    /// Time when the joiner last took or sent a byte.
    alive_at: Instant,
    /// Last position of the joiner; the inner `None` if it has no data.
    position: Option<Option<Position>>,
    bytes: [u8; POSITION_BYTES],
    read: usize,
}

impl StateSender {
    /// Waits for the joiner's first position; `None` if it has no data.
    ///
    /// # Errors
    /// As for [`send`](Self::send).
    pub fn first_position(&mut self) -> io::Result<Option<Position>> {
        loop {
            let received = self.receive_positions();
            if let Some(position) = self.position {
                return Ok(position);
            }
            received?;
            self.wait(PollFlags::IN)?;
        }
    }

    /// Returns the joiner's last position.
    ///
    /// # Errors
    /// As for [`send`](Self::send).
    pub fn position(&mut self) -> io::Result<Option<Position>> {
        self.receive_positions()?;
        Ok(self.position.flatten())
    }

    /// Sends one message: `tensors` one after the other, each f32 in host memory, counted together.
    ///
    /// # Errors
    /// The link's; `UnexpectedEof` if the joiner has closed it; `InvalidData` if it sends no valid
    /// positions; `TimedOut` if it has neither taken nor sent a byte for longer than the idle
    /// timeout.
    pub fn send(
        &mut self,
        kind: u32,
        generation: u64,
        note: &[u8],
        tensors: &[&[f32]],
    ) -> io::Result<()> {
        let floats: u64 = tensors.iter().map(|tensor| tensor.len() as u64).sum();
        let header = encode(MAGIC, kind, [generation, note.len() as u64, floats]);
        self.alive_at = Instant::now();
        self.write(&header, note)?;
        tensors.iter().try_for_each(|tensor| self.write(bytemuck::cast_slice(tensor), &[]))
    }

    /// Sends a heartbeat. The caller sends several within the receiver's idle timeout.
    ///
    /// # Errors
    /// As for [`send`](Self::send).
    pub fn heartbeat(&mut self) -> io::Result<()> {
        self.send(HEARTBEAT, 0, &[], &[])
    }

    /// Waits until the joiner has received everything and closed the link, at most for the idle
    /// timeout. A link that is closed earlier may be reset, and then the joiner loses unread data.
    pub fn finish(mut self) {
        let end = Instant::now() + self.idle_timeout;
        if self.link.shutdown(Shutdown::Write).is_ok() {
            while Instant::now() < end
                && self.receive_positions().is_ok()
                && self.wait(PollFlags::IN).is_ok()
            {}
        }
    }

    fn write(&mut self, mut first: &[u8], mut second: &[u8]) -> io::Result<()> {
        while !first.is_empty() || !second.is_empty() {
            match self.link.send(&[IoSlice::new(first), IoSlice::new(second)])? {
                Some(0) => return Err(ErrorKind::WriteZero.into()),
                Some(bytes) => {
                    self.alive_at = Instant::now();
                    let of_first = bytes.min(first.len());
                    first = &first[of_first..];
                    second = &second[bytes - of_first..];
                }
                None => {
                    self.wait(PollFlags::OUT | PollFlags::IN)?;
                    self.receive_positions()?;
                }
            }
        }
        Ok(())
    }

    /// Waits until the link has an event; `TimedOut` after the idle timeout.
    fn wait(&self, flags: PollFlags) -> io::Result<()> {
        let until = self.alive_at.checked_add(self.idle_timeout);
        if poll_until(&mut [PollFd::new(&*self.link, flags)], until)? {
            return Ok(());
        }
        Err(ErrorKind::TimedOut.into())
    }

    /// Reads the joiner's available positions. Never blocks.
    fn receive_positions(&mut self) -> io::Result<()> {
        while let Some(bytes) =
            self.link.recv(&mut [IoSliceMut::new(&mut self.bytes[self.read..])])?
        {
            self.read += bytes;
            if self.read == POSITION_BYTES {
                self.read = 0;
                self.alive_at = Instant::now();
                self.position = Some(decode_position(&self.bytes).map_err(invalid)?);
            }
        }
        Ok(())
    }
}

/// Joiner's end of a state transfer.
#[derive(Debug)]
pub struct StateReceiver {
    donor: u64,
    /// The fence has a weak reference, to shut the link down.
    link: Arc<Link>,
    reporter: Arc<PositionReporter>,
    idle_timeout: Duration,
    /// Time of the last received byte; `None` before the first one.
    received_at: Option<Instant>,
    header: [u8; HEADER_BYTES],
    read: usize,
    /// Number of floats of the current message that are not taken yet.
    floats_left: u64,
}

impl StateReceiver {
    /// Starts to receive on a link after the handshake. Reports the joiner's
    /// position at once, and then several times within `idle_timeout`, from a separate thread.
    pub(crate) fn new(
        donor: u64,
        link: Arc<Link>,
        idle_timeout: Duration,
        position: Option<Position>,
    ) -> io::Result<Self> {
        let state = ReporterState { position, unsent: Vec::new(), is_stopped: false };
        let reporter = Arc::new(PositionReporter {
            link: Arc::clone(&link),
            state: Mutex::new(state),
            stopped: Condvar::new(),
        });
        reporter.send(&mut reporter.lock());
        let reporting = Arc::clone(&reporter);
        std::thread::Builder::new()
            .name("state-heartbeat".to_owned())
            .spawn(move || reporting.report_every(idle_timeout / HEARTBEATS_PER_TIMEOUT))?;
        Ok(Self {
            donor,
            link,
            reporter,
            idle_timeout,
            received_at: None,
            header: [0; HEADER_BYTES],
            read: 0,
            floats_left: 0,
        })
    }

    /// Id of the donor.
    #[must_use]
    pub fn donor(&self) -> u64 {
        self.donor
    }

    /// Reports the position of this joiner to the donor. Never blocks.
    pub fn report(&self, position: Position) {
        let mut state = self.reporter.lock();
        state.position = Some(position);
        self.reporter.send(&mut state);
    }

    /// Returns the header of the next message, if it arrives within `wait`. The floats of the
    /// previous message must have been [taken](Self::take).
    ///
    /// # Errors
    /// The link's; `UnexpectedEof` at its end; `TimedOut` if the donor has been silent for longer
    /// than the idle timeout; `InvalidData` if the bytes are not a message.
    pub fn next(&mut self, wait: Duration) -> io::Result<Option<StateMessageHeader>> {
        if self.floats_left > 0 {
            return Err(invalid(format!(
                "{} floats of the previous message were not taken",
                self.floats_left
            )));
        }
        let until = Instant::now() + wait;
        loop {
            match self.link.recv(&mut [IoSliceMut::new(&mut self.header[self.read..])])? {
                Some(bytes) => {
                    self.read += bytes;
                    self.received_at = Some(Instant::now());
                }
                None => {
                    if self.received_at.is_some_and(|at| at.elapsed() > self.idle_timeout) {
                        return Err(ErrorKind::TimedOut.into());
                    }
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() || !ready(&self.link, PollFlags::IN, left)? {
                        return Ok(None);
                    }
                }
            }
            if self.read == HEADER_BYTES {
                self.read = 0;
                if let Some(header) = self.open()? {
                    return Ok(Some(header));
                }
            }
        }
    }

    /// Reads the next `buf.len()` floats of the current message.
    ///
    /// # Errors
    /// As for [`next`](Self::next); `InvalidData` if the message has fewer floats; `buf` then holds
    /// unspecified values.
    pub fn take(&mut self, buf: &mut [f32]) -> io::Result<()> {
        self.floats_left = self.floats_left.checked_sub(buf.len() as u64).ok_or_else(|| {
            invalid(format!(
                "a message with {} floats too few",
                buf.len() as u64 - self.floats_left
            ))
        })?;
        self.read_exact(bytemuck::cast_slice_mut(buf))
    }

    /// Decodes a received header and reads its note; `None` for a heartbeat.
    fn open(&mut self) -> io::Result<Option<StateMessageHeader>> {
        let (kind, [generation, note_bytes, floats]) = decode(MAGIC, &self.header)
            .map_err(|got| invalid(format!("expected a message, got {got}")))?;
        if note_bytes > NOTE_BYTES_MAX as u64 {
            return Err(invalid(format!(
                "a note of {note_bytes} bytes; the limit is {NOTE_BYTES_MAX}"
            )));
        }
        // The note grows with the received data, so that a length alone does not allocate memory.
        let mut note = Vec::new();
        while (note.len() as u64) < note_bytes {
            let have = note.len();
            note.resize(have + (note_bytes as usize - have).min(NOTE_INCREMENT_BYTES), 0);
            self.read_exact(&mut note[have..])?;
        }
        self.floats_left = floats;
        match (kind, note_bytes, floats) {
            (HEARTBEAT, 0, 0) => Ok(None),
            (HEARTBEAT, ..) => Err(invalid("a heartbeat with content".to_owned())),
            _ => Ok(Some(StateMessageHeader { kind, generation, note, floats })),
        }
    }

    fn read_exact(&mut self, mut bytes: &mut [u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match self.link.recv(&mut [IoSliceMut::new(bytes)])? {
                Some(read) => bytes = &mut bytes[read..],
                None if ready(&self.link, PollFlags::IN, self.idle_timeout)? => {}
                None => return Err(ErrorKind::TimedOut.into()),
            }
        }
        self.received_at = Some(Instant::now());
        Ok(())
    }
}

impl Drop for StateReceiver {
    fn drop(&mut self) {
        self.reporter.lock().is_stopped = true;
        self.reporter.stopped.notify_all();
        // The reporter thread may keep the link open a little longer.
        let _ = self.link.shutdown(Shutdown::Both);
    }
}

/// Sends a joiner's positions to its donor, from two threads.
#[derive(Debug)]
struct PositionReporter {
    link: Arc<Link>,
    state: Mutex<ReporterState>,
    stopped: Condvar,
}

#[derive(Debug)]
struct ReporterState {
    position: Option<Position>,
    /// Rest of a position of which the link accepted only a part.
    unsent: Vec<u8>,
    is_stopped: bool,
}

impl PositionReporter {
    fn lock(&self) -> MutexGuard<'_, ReporterState> {
        self.state.lock().expect("nothing under this lock panics")
    }

    /// Sends the position, as far as the link accepts it. Errors of the link show when it is read.
    fn send(&self, state: &mut ReporterState) {
        if !state.unsent.is_empty() && !self.send_rest(state) {
            // The link still holds earlier positions, which are signs of life as well.
            return;
        }
        state.unsent.extend(encode_position(state.position));
        self.send_rest(state);
    }

    /// Sends the rest of a position. Returns whether all of it is sent.
    fn send_rest(&self, state: &mut ReporterState) -> bool {
        if let Ok(Some(bytes)) = self.link.send(&[IoSlice::new(&state.unsent)]) {
            state.unsent.drain(..bytes);
        }
        state.unsent.is_empty()
    }

    fn report_every(&self, interval: Duration) {
        let mut state = self.lock();
        while !state.is_stopped {
            let waited = self.stopped.wait_timeout(state, interval);
            state = waited.expect("nothing under this lock panics").0;
            if !state.is_stopped {
                self.send(&mut state);
            }
        }
    }
}

/// Kind of a donor's heartbeat, and of the position of a joiner that has no data.
const HEARTBEAT: u32 = 0;

/// Kind of a joiner's position.
const POSITION: u32 = 1;

const HEARTBEATS_PER_TIMEOUT: u32 = 4;

/// Maximum length of a note, in bytes: 64 MiB.
pub const NOTE_BYTES_MAX: usize = 64 << 20;

const NOTE_INCREMENT_BYTES: usize = 1 << 20;

const HEADER_BYTES: usize = 32;
const POSITION_BYTES: usize = HEADER_BYTES;

const MAGIC: u32 = u32::from_le_bytes(*b"EDLP");
const POSITION_MAGIC: u32 = u32::from_le_bytes(*b"EDLQ");

fn encode(magic: u32, kind: u32, fields: [u64; 3]) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..4].copy_from_slice(&magic.to_le_bytes());
    header[4..8].copy_from_slice(&kind.to_le_bytes());
    for (to, field) in header[8..].chunks_exact_mut(8).zip(fields) {
        to.copy_from_slice(&field.to_le_bytes());
    }
    header
}

/// Decodes kind and fields; the error describes the bytes.
fn decode(magic: u32, header: &[u8; HEADER_BYTES]) -> Result<(u32, [u64; 3]), String> {
    let short = |at: usize| {
        u32::from_le_bytes(*header[at..].first_chunk().expect("a field lies within the head"))
    };
    let long = |at: usize| {
        u64::from_le_bytes(*header[at..].first_chunk().expect("a field lies within the head"))
    };
    match short(0) {
        got if got == magic => Ok((short(4), [long(8), long(16), long(24)])),
        other => Err(format!("bytes that begin with {other:#010x}")),
    }
}

fn encode_position(position: Option<Position>) -> [u8; POSITION_BYTES] {
    match position {
        None => encode(POSITION_MAGIC, HEARTBEAT, [0; 3]),
        Some(Position { snapshot, floats, step }) => {
            encode(POSITION_MAGIC, POSITION, [snapshot, floats, step])
        }
    }
}

fn decode_position(bytes: &[u8; POSITION_BYTES]) -> Result<Option<Position>, String> {
    match decode(POSITION_MAGIC, bytes) {
        Ok((HEARTBEAT, [0, 0, 0])) => Ok(None),
        Ok((POSITION, [snapshot, floats, step])) => Ok(Some(Position { snapshot, floats, step })),
        Ok((kind, _)) => Err(format!("expected a position, got a message of kind {kind}")),
        Err(got) => Err(format!("expected a position, got {got}")),
    }
}

fn invalid(reason: String) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, reason)
}

fn ready(link: &Link, flags: PollFlags, timeout: Duration) -> io::Result<bool> {
    poll_until(&mut [PollFd::new(link, flags)], Instant::now().checked_add(timeout))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::group::host_group::tests::{WATCHDOG, pair};

    #[test]
    fn malformed_messages_are_refused_without_allocation() {
        let header = |kind: u32, note: u64, floats: u64| encode(MAGIC, kind, [1, note, floats]);
        for nonsense in
            [[b'x'; 32], header(1, u64::MAX, 0), header(1, (64 << 20) + 1, 0), header(0, 0, 1)]
        {
            let (link, mut donor) = pair();
            let mut receiver = StateReceiver::new(1, link, WATCHDOG, None).unwrap();
            donor.write_all(&nonsense).unwrap();
            assert_eq!(receiver.next(WATCHDOG).unwrap_err().kind(), ErrorKind::InvalidData);
        }
    }
}
