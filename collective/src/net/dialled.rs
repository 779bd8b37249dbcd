//! The dialling side of a handshake: the connection until the acceptor has answered the hello.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags};

use super::acceptor::Identity;
use super::cipher::Protection;
use super::handshake::{ANSWER_BYTES, Hello, Initiator, Purpose};
use super::link::Link;
use super::socket::poll_until;

/// A connection on which the hello is sent and the acceptor's answer is awaited.
///
/// The acceptor answers at once, whatever its worker is computing, but in the worker's process: a
/// worker that is stopped does not answer.
#[derive(Debug)]
pub(crate) struct DialledLink {
    socket: TcpStream,
    initiator: Initiator,
    protection: Protection,
    answer: [u8; ANSWER_BYTES],
    read: usize,
}

/// The link that the dialling worker asks for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LinkRequest {
    pub(crate) purpose: Purpose,
    pub(crate) generation: u64,
    /// The peer's id and the address at which it was dialled.
    pub(crate) to: u64,
    pub(crate) address: SocketAddr,
    /// Address of this worker, at which the others dial it.
    pub(crate) own_address: SocketAddr,
}

/// State of a handshake after the bytes that have arrived.
#[derive(Debug)]
pub(crate) enum Handshake {
    /// The acceptor has proven itself.
    Complete(Link),
    /// Its answer is incomplete.
    Waiting(DialledLink),
}

/// Why a handshake on a dialled link failed.
#[derive(Debug)]
pub(crate) enum DialledError {
    Lost(io::Error),
    /// The peer did not prove that it knows the job's secret.
    Unauthenticated,
}

impl DialledLink {
    /// Sends the hello on a new connection. Never blocks.
    pub(crate) fn new(
        socket: TcpStream,
        identity: &Identity,
        request: LinkRequest,
    ) -> io::Result<Self> {
        let LinkRequest { purpose, generation, to, address, own_address } = request;
        let Identity { job, own_id: from, ref secret, link_encryption, has_digests } = *identity;
        let ends = (own_address.ip(), address.ip());
        let protection = link_encryption.protection(ends, &socket, has_digests)?;
        let hello = Hello { purpose, job, generation, from, to, protection };
        let (initiator, first) = Initiator::new(&hello, secret);
        // The buffer of a new socket holds many hellos, so this is one write and cannot block.
        (&socket).write_all(&first)?;
        Ok(Self { socket, initiator, protection, answer: [0; ANSWER_BYTES], read: 0 })
    }

    /// Reads what has arrived. Never blocks.
    pub(crate) fn advance(mut self) -> Result<Handshake, DialledError> {
        while self.read < ANSWER_BYTES {
            match (&self.socket).read(&mut self.answer[self.read..]) {
                Ok(0) => return Err(DialledError::Lost(ErrorKind::UnexpectedEof.into())),
                Ok(bytes) => self.read += bytes,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    return Ok(Handshake::Waiting(self));
                }
                Err(error) => return Err(DialledError::Lost(error)),
            }
        }
        let Self { socket, initiator, protection, answer, .. } = self;
        let (keys, confirmation) =
            initiator.finish(&answer).map_err(|_| DialledError::Unauthenticated)?;
        // The hello has been received, so the socket's buffer is empty.
        (&socket).write_all(&confirmation).map_err(DialledError::Lost)?;
        Ok(Handshake::Complete(Link::new(socket, keys.for_protection(protection))))
    }

    /// Waits for the acceptor's answer until `deadline`.
    ///
    /// # Errors
    /// [`DialledError`]; `None` if the deadline has passed.
    pub(crate) fn finish(
        mut self,
        deadline: Option<Instant>,
    ) -> Result<Link, Option<DialledError>> {
        loop {
            match self.advance().map_err(Some)? {
                Handshake::Complete(link) => return Ok(link),
                Handshake::Waiting(waiting) => self = waiting,
            }
            let mut fds = [PollFd::new(&self, PollFlags::IN)];
            let lost = |error| Some(DialledError::Lost(error));
            if !poll_until(&mut fds, deadline).map_err(lost)? {
                return Err(None);
            }
        }
    }
}

impl AsFd for DialledLink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
