//! Links: authenticated connections to other workers, plain, with digests, or encrypted.
//!
//! ```text
//!   message:  length (u32, little endian) tag │ bytes tag
//!            sealed              16 bytes      sealed, at most 64 KiB
//! ```
//!
//! Digests take the place of the cipher's tags; the bytes are then as the caller's.
//!
//! The length has a tag of its own, so a modified length is detected before it is waited for.
//!
//! **Invariant:** a message holds bytes of one call of [`send`](Link::send). Of the messages that
//! follow the one it reads, a receiver takes at most the length from the socket, so a link with
//! unread bytes is [marked](Link::has_unread) or readable for `poll`.
//!
//! **Invariant:** on a plain link, a call is one system call on the caller's buffers.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, MutexGuard};

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags};

use super::cipher::{DirectionKey, Protection, TAG_BYTES};

/// Link to another worker, after the handshake. Any thread may use it; one at a time sends, and one
/// at a time receives.
#[derive(Debug)]
pub(crate) struct Link {
    socket: TcpStream,
    cipher: Option<Box<Cipher>>,
}

/// Keys of an authenticated link.
#[derive(Debug)]
pub(crate) struct LinkKeys {
    pub(crate) seals: DirectionKey,
    pub(crate) opens: DirectionKey,
}

impl LinkKeys {
    /// What protects the bytes after the handshake, if anything does.
    pub(crate) fn for_protection(self, protection: Protection) -> Option<Self> {
        match protection {
            Protection::None => None,
            Protection::Digests => {
                Some(Self { seals: DirectionKey::digests(), opens: DirectionKey::digests() })
            }
            Protection::Encryption => Some(self),
        }
    }
}

#[derive(Debug)]
struct Cipher {
    sealer: Mutex<Sealer>,
    opener: Mutex<Opener>,
}

impl Link {
    /// `socket`: non-blocking. `keys`: `None` for a plain link.
    pub(crate) fn new(socket: TcpStream, keys: Option<LinkKeys>) -> Self {
        let cipher = keys.map(|LinkKeys { seals, opens }| {
            let sealer = Sealer { key: seals, message: Vec::new(), written: 0, bytes: 0 };
            let opener = Opener {
                key: opens,
                length: [0; LENGTH_BYTES],
                message: Vec::new(),
                read: 0,
                body: None,
                unread: 0,
            };
            Box::new(Cipher { sealer: Mutex::new(sealer), opener: Mutex::new(opener) })
        });
        Self { socket, cipher }
    }

    /// Sends bytes of `parts`, from the start of the first one, without blocking. Returns how many
    /// the kernel has accepted; `None` if it accepts none now. The next call must then begin with
    /// the same bytes: they may be sealed already.
    pub(crate) fn send(&self, parts: &[IoSlice<'_>]) -> io::Result<Option<usize>> {
        loop {
            let sent = match &self.cipher {
                None => {
                    let mut nothing = SendAncillaryBuffer::default();
                    rustix::net::sendmsg(&self.socket, parts, &mut nothing, SendFlags::NOSIGNAL)
                }
                Some(cipher) => lock(&cipher.sealer).send(&self.socket, parts),
            };
            match sent {
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => {}
                sent => return Ok(Some(sent?)),
            }
        }
    }

    /// Receives into `parts`, of which the first is not empty, without blocking. Returns how many
    /// bytes; `None` if there are none now.
    ///
    /// # Errors
    /// The socket's; `UnexpectedEof` at the end of the link; `InvalidData` if the bytes are not
    /// those that the peer sent.
    pub(crate) fn recv(&self, parts: &mut [IoSliceMut<'_>]) -> io::Result<Option<usize>> {
        loop {
            match self.read(parts) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(bytes) => return Ok(Some(bytes)),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(error),
            }
        }
    }

    fn read(&self, parts: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match &self.cipher {
            None => (&self.socket).read_vectored(parts),
            Some(cipher) => {
                let mut opener = lock(&cipher.opener);
                if !opener.fill(&self.socket)? {
                    return Ok(0);
                }
                let bytes = copy(opener.unread(), parts);
                opener.unread -= bytes;
                Ok(bytes)
            }
        }
    }

    /// Like [`recv`](Self::recv), but leaves the bytes on the link. Returns 0 at its end.
    ///
    /// # Errors
    /// The socket's; `WouldBlock`; `InvalidData`.
    pub(crate) fn peek(&self, buf: &mut [u8]) -> io::Result<usize> {
        match &self.cipher {
            None => self.socket.peek(buf),
            Some(cipher) => {
                let mut opener = lock(&cipher.opener);
                if !opener.fill(&self.socket)? {
                    return Ok(0);
                }
                Ok(copy(opener.unread(), &mut [IoSliceMut::new(buf)]))
            }
        }
    }

    /// Whether bytes are received that `poll` does not show.
    pub(crate) fn has_unread(&self) -> bool {
        self.cipher.as_ref().is_some_and(|cipher| lock(&cipher.opener).unread > 0)
    }

    pub(crate) fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        self.socket.shutdown(how)
    }

    /// Returns the pending error of the socket, if there is one.
    pub(crate) fn take_error(&self) -> Option<io::Error> {
        self.socket.take_error().ok().flatten()
    }

    #[cfg(test)]
    pub(crate) fn socket(&self) -> &TcpStream {
        &self.socket
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Seals what is sent. Holds at most one message, until the kernel has accepted all of it.
#[derive(Debug)]
struct Sealer {
    key: DirectionKey,
    message: Vec<u8>,
    written: usize,
    /// Number of the caller's bytes in the message; 0 if there is no message.
    bytes: usize,
}

impl Sealer {
    fn send(&mut self, socket: &TcpStream, parts: &[IoSlice<'_>]) -> rustix::io::Result<usize> {
        let given: usize = parts.iter().map(|part| part.len()).sum();
        if self.bytes == 0 {
            self.seal(parts, given.min(SEALED_BYTES_MAX));
        }
        assert!(self.bytes <= given, "a call repeats the bytes of the one that would have blocked");
        // More follows at once: the kernel need not send the last packet half empty.
        let more = if self.bytes < given { SendFlags::MORE } else { SendFlags::empty() };
        while self.written < self.message.len() {
            let rest = &self.message[self.written..];
            self.written += rustix::net::send(socket, rest, SendFlags::NOSIGNAL | more)?;
        }
        Ok(std::mem::take(&mut self.bytes))
    }

    /// Seals the first `bytes` bytes of `parts` as the next message.
    fn seal(&mut self, parts: &[IoSlice<'_>], bytes: usize) {
        let Self { key, message, .. } = self;
        message.clear();
        self.written = 0;
        self.bytes = bytes;
        if bytes == 0 {
            return;
        }
        let mut length = u32::try_from(bytes).expect("a message is short").to_le_bytes();
        let tag = key.seal(&mut length);
        message.extend_from_slice(&length);
        message.extend_from_slice(&tag);
        let mut left = bytes;
        for part in parts {
            let taken = left.min(part.len());
            message.extend_from_slice(&part[..taken]);
            left -= taken;
        }
        let tag = key.seal(&mut message[LENGTH_BYTES..]);
        message.extend_from_slice(&tag);
    }
}

/// Opens what is received, message by message.
#[derive(Debug)]
struct Opener {
    key: DirectionKey,
    /// Sealed length of the next message.
    length: [u8; LENGTH_BYTES],
    /// Bytes of the message and their tag, then the sealed length of the message after it.
    message: Vec<u8>,
    /// Bytes read of the sealed length, or of `message` if the length is known.
    read: usize,
    /// Number of bytes of the message; `None` until its length is complete.
    body: Option<usize>,
    /// Number of opened bytes that the caller has not taken: the last ones of the message.
    unread: usize,
}

impl Opener {
    /// Reads until there are unread bytes. Returns false at the end of the link.
    fn fill(&mut self, mut socket: &TcpStream) -> io::Result<bool> {
        while self.unread == 0 {
            let missing = match self.body {
                Some(_) => &mut self.message[self.read..],
                None => &mut self.length[self.read..],
            };
            if !missing.is_empty() {
                match socket.read(missing)? {
                    0 => return Ok(false),
                    bytes => self.read += bytes,
                }
            }
            match self.body {
                Some(body) if self.read >= body + TAG_BYTES => self.open_body(body)?,
                None if self.read == LENGTH_BYTES => self.open_length()?,
                Some(_) | None => {}
            }
        }
        Ok(true)
    }

    fn open_length(&mut self) -> io::Result<()> {
        let (sealed, tag) = self.length.split_first_chunk_mut::<4>().expect("it begins with a u32");
        let tag = *tag.first_chunk().expect("it ends with a tag");
        self.key.open(sealed, tag).map_err(|_| changed())?;
        let body = u32::from_le_bytes(*sealed) as usize;
        if !(1..=SEALED_BYTES_MAX).contains(&body) {
            let reason = format!("a message of {body} bytes; the limit is {SEALED_BYTES_MAX}");
            return Err(io::Error::new(ErrorKind::InvalidData, reason));
        }
        self.message.resize(body + TAG_BYTES + LENGTH_BYTES, 0);
        self.body = Some(body);
        self.read = 0;
        Ok(())
    }

    fn open_body(&mut self, body: usize) -> io::Result<()> {
        let (sealed, rest) = self.message.split_at_mut(body);
        let tag = *rest.first_chunk().expect("the tag follows");
        self.key.open(sealed, tag).map_err(|_| changed())?;
        self.read -= body + TAG_BYTES;
        self.length[..self.read].copy_from_slice(&rest[TAG_BYTES..TAG_BYTES + self.read]);
        self.body = None;
        self.unread = body;
        self.message.truncate(body);
        Ok(())
    }

    fn unread(&self) -> &[u8] {
        &self.message[self.message.len() - self.unread..]
    }
}

/// Largest number of bytes in a message: its plain and sealed bytes fit into a core's cache, and a
/// message that is opened overlaps with the next one on its way.
const SEALED_BYTES_MAX: usize = 64 << 10;

/// Length of a message's sealed length.
const LENGTH_BYTES: usize = size_of::<u32>() + TAG_BYTES;

fn changed() -> io::Error {
    io::Error::new(
        ErrorKind::InvalidData,
        "expected the bytes that the peer sealed, got bytes that were changed on the way",
    )
}

/// Copies as much as fits into `parts`.
fn copy(mut bytes: &[u8], parts: &mut [IoSliceMut<'_>]) -> usize {
    let mut copied = 0;
    for part in parts {
        let (now, later) = bytes.split_at(bytes.len().min(part.len()));
        part[..now.len()].copy_from_slice(now);
        copied += now.len();
        bytes = later;
    }
    copied
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("nothing under this lock panics")
}

#[cfg(test)]
mod tests;
