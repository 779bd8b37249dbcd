//! The thread that accepts connections of peers, so that a dial never waits for a worker that
//! computes.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use tracing::{debug, warn};

use super::admission::DialKey;
use super::cipher::Protection;
use super::fence::Fence;
use super::handshake::{
    CONFIRMATION_BYTES, FIRST_BYTES, HandshakeError, Hello, JobDigest, Purpose, Responder,
    Unconfirmed,
};
use super::link::{Link, LinkKeys};
use super::notifier::Notifier;
use super::pending_requests::PendingRequests;
use super::socket;
use crate::{LinkEncryption, Secret};

/// Acceptor: accepts connections, answers hellos, and hands authenticated dials to the fence. Runs
/// on its own thread.
///
/// **Invariant:** the acceptor waits for no single peer. All unauthenticated connections are polled
/// together; each has a deadline, and when there are too many, the oldest one of the address with
/// the most is dropped. Bytes or silence of an unauthenticated peer delay no other peer.
///
/// **Invariant:** a dial replaces or displaces another one only after its third message. Until then
/// it costs one connection and a fraction of a millisecond of this thread.
#[derive(Debug)]
pub(crate) struct Acceptor {
    pub(crate) listener: TcpListener,
    pub(crate) identity: Arc<Identity>,
    pub(crate) fence: Fence,
    pub(crate) pending_requests: Arc<PendingRequests>,
    pub(crate) stop: Arc<Notifier>,
}

/// Identity of this worker, the secret that authenticates its peers, and how its links are
/// protected.
#[derive(Debug)]
pub(crate) struct Identity {
    pub(crate) job: JobDigest,
    pub(crate) own_id: u64,
    pub(crate) secret: Secret,
    pub(crate) link_encryption: LinkEncryption,
    pub(crate) has_digests: bool,
}

impl Acceptor {
    /// Runs until `stop` is notified.
    pub(crate) fn run(self) {
        self.run_with(socket::poll_until);
    }

    /// As [`run`](Self::run). `poll` waits for events until a time.
    fn run_with(
        self,
        mut poll: impl FnMut(&mut [PollFd<'_>], Option<Instant>) -> io::Result<bool>,
    ) {
        let started = Instant::now();
        let mut pending = PendingHandshakes::default();
        let mut resume_at = None;
        loop {
            let now = Instant::now();
            pending.0.retain(|handshake| now < handshake.arrived_at + HANDSHAKE_TIME_MAX);
            resume_at = resume_at.filter(|resume_at| now < *resume_at);
            let expiries =
                [self.fence.expire(now - started), self.pending_requests.expire(now - started)];
            let expiries = expiries.map(|expiry| expiry.map(|at| started + at));
            let oldest = pending.0.front().map(|first| first.arrived_at + HANDSHAKE_TIME_MAX);
            let wake_at = expiries.into_iter().chain([resume_at, oldest]).flatten().min();

            let listener_events =
                if resume_at.is_none() { PollFlags::IN } else { PollFlags::empty() };
            let mut fds = vec![
                PollFd::new(&*self.stop, PollFlags::IN),
                PollFd::new(&self.listener, listener_events),
            ];
            fds.extend(pending.0.iter().map(|handshake| PollFd::new(handshake, PollFlags::IN)));
            if let Err(error) = poll(&mut fds, wake_at) {
                // The kernel is short of memory: without its acceptor, this worker could join no
                // later group.
                warn!(%error, "cannot wait for peers");
                std::thread::sleep(ACCEPT_PAUSE);
                continue;
            }
            let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            if ready[0] {
                return;
            }
            let now = Instant::now();
            let mut ready_pending = ready[2..].iter();
            pending.0 = pending
                .0
                .into_iter()
                .filter_map(|handshake| {
                    let ready = *ready_pending.next().expect("one flag per handshake");
                    if ready { self.advance(handshake, now - started) } else { Some(handshake) }
                })
                .collect();
            if ready[1] {
                resume_at = self.accept(&mut pending, now, started);
            }
        }
    }

    /// Accepts pending connections. After an error of the operating system, returns when to try
    /// again.
    fn accept(
        &self,
        pending: &mut PendingHandshakes,
        now: Instant,
        started: Instant,
    ) -> Option<Instant> {
        for _ in 0..PENDING_HANDSHAKES_MAX {
            let (socket, peer) = match self.listener.accept() {
                Ok(accepted) => accepted,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return None,
                Err(error) if is_of_one_dial(error.kind()) => continue,
                Err(error) => {
                    // The process is most likely out of file descriptors: close one, and back off.
                    warn!(%error, "cannot accept a peer");
                    pending.0.pop_front();
                    return Some(now + ACCEPT_PAUSE);
                }
            };
            if let Err(error) = socket::set_up(&socket) {
                debug!(%peer, %error, "dial lost");
                continue;
            }
            let stage = Stage::Hello { bytes: [0; FIRST_BYTES], read: 0 };
            let handshake = PendingHandshake { socket, peer, stage, arrived_at: now };
            // The hello of a valid dialler arrives with the connection.
            if let Some(handshake) = self.advance(handshake, now - started) {
                pending.push(handshake);
            }
        }
        None
    }

    /// Reads what has arrived of a handshake. Returns the connection if it is still incomplete.
    fn advance(&self, handshake: PendingHandshake, now: Duration) -> Option<PendingHandshake> {
        let peer = handshake.peer;
        match self.read(handshake) {
            Ok(Progress::Complete(socket, hello, keys)) => {
                if let Err(reason) = self.admit(socket, &hello, *keys, now) {
                    debug!(%peer, reason, "dial refused");
                }
                None
            }
            Ok(Progress::Waiting(handshake)) => Some(handshake),
            Err(reason) => {
                debug!(%peer, reason, "dial refused");
                None
            }
        }
    }

    fn read(&self, mut handshake: PendingHandshake) -> Result<Progress, String> {
        loop {
            let PendingHandshake { socket, stage, .. } = &mut handshake;
            let missing = stage.missing();
            if !missing.is_empty() {
                match socket.read(missing) {
                    Ok(0) => return Err("the connection ended".to_owned()),
                    Ok(bytes) => stage.on_read(bytes),
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {
                        return Ok(Progress::Waiting(handshake));
                    }
                    Err(error) => return Err(error.to_string()),
                }
                continue;
            }
            let PendingHandshake { socket, peer, stage, arrived_at } = handshake;
            let stage = match stage {
                Stage::Hello { bytes, .. } => {
                    let unconfirmed = Box::new(self.answer(&socket, &bytes)?);
                    let bytes = [0; CONFIRMATION_BYTES];
                    Stage::Confirmation { unconfirmed, bytes, read: 0 }
                }
                Stage::Confirmation { unconfirmed, bytes, .. } => {
                    let confirmed = unconfirmed.confirm(bytes);
                    let (hello, keys) = confirmed.map_err(|error| error.to_string())?;
                    return Ok(Progress::Complete(socket, hello, Box::new(keys)));
                }
            };
            handshake = PendingHandshake { socket, peer, stage, arrived_at };
        }
    }

    /// Checks a hello, and answers it. The checks come first: they cost less.
    fn answer(
        &self,
        mut socket: &TcpStream,
        bytes: &[u8; FIRST_BYTES],
    ) -> Result<Unconfirmed, String> {
        let Identity { job, own_id, secret, link_encryption, .. } = &*self.identity;
        let checked = Responder::new(bytes, secret).and_then(|responder| {
            responder.hello().check(*job, *own_id)?;
            Ok(responder)
        });
        let responder = checked.map_err(|error| error.to_string())?;
        let requires = link_encryption.requires(socket).map_err(|error| error.to_string())?;
        if requires && responder.hello().protection != Protection::Encryption {
            return Err(HandshakeError::Unencrypted.to_string());
        }
        if responder.hello().purpose != Purpose::State {
            let generation = responder.hello().generation;
            self.fence.check(generation).map_err(|refusal| refusal.to_string())?;
        }
        let (unconfirmed, answer) = responder.answer().map_err(|error| error.to_string())?;
        // The buffer of a new socket holds many answers, so this is one write and cannot block.
        socket.write_all(&answer).map_err(|error| error.to_string())?;
        Ok(unconfirmed)
    }

    fn admit(
        &self,
        socket: TcpStream,
        hello: &Hello,
        keys: LinkKeys,
        now: Duration,
    ) -> Result<(), String> {
        let Hello { generation, from: member, purpose, protection, .. } = *hello;
        let link = Link::new(socket, keys.for_protection(protection));
        if purpose == Purpose::State {
            self.pending_requests.push(member, link, now);
            return Ok(());
        }
        let key = DialKey { generation, member, purpose };
        self.fence.admit(key, link, now).map_err(|refusal| refusal.to_string())
    }
}

/// A connection that is not yet authenticated.
#[derive(Debug)]
struct PendingHandshake {
    socket: TcpStream,
    peer: SocketAddr,
    stage: Stage,
    arrived_at: Instant,
}

/// Message that the dialling worker owes.
#[derive(Debug)]
enum Stage {
    Confirmation { unconfirmed: Box<Unconfirmed>, bytes: [u8; CONFIRMATION_BYTES], read: usize },
    Hello { bytes: [u8; FIRST_BYTES], read: usize },
}

impl Stage {
    fn missing(&mut self) -> &mut [u8] {
        match self {
            Self::Confirmation { bytes, read, .. } => &mut bytes[*read..],
            Self::Hello { bytes, read } => &mut bytes[*read..],
        }
    }

    fn on_read(&mut self, bytes: usize) {
        let (Self::Confirmation { read, .. } | Self::Hello { read, .. }) = self;
        *read += bytes;
    }
}

/// Outcome of reading what has arrived.
enum Progress {
    Complete(TcpStream, Hello, Box<LinkKeys>),
    Waiting(PendingHandshake),
}

impl AsFd for PendingHandshake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Unauthenticated connections, oldest first.
#[derive(Debug, Default)]
struct PendingHandshakes(VecDeque<PendingHandshake>);

impl PendingHandshakes {
    /// Adds a connection. If its address has too many, the oldest of these is dropped; if there are
    /// too many altogether, the oldest one of the address with the most.
    fn push(&mut self, handshake: PendingHandshake) {
        let of = |address: IpAddr| self.0.iter().filter(move |h| h.peer.ip() == address);
        let own = handshake.peer.ip();
        let crowded = if of(own).count() >= PENDING_HANDSHAKES_PER_ADDRESS_MAX {
            Some(own)
        } else if self.0.len() >= PENDING_HANDSHAKES_MAX {
            self.0.iter().map(|h| h.peer.ip()).max_by_key(|address| of(*address).count())
        } else {
            None
        };
        if let Some(at) = self.0.iter().position(|h| Some(h.peer.ip()) == crowded) {
            self.0.remove(at);
        }
        self.0.push_back(handshake);
    }
}

/// Maximum number of unauthenticated connections.
const PENDING_HANDSHAKES_MAX: usize = 128;

/// Maximum number of those from one address. A neighbour dials once per channel and purpose, and
/// the joiners of one host dial once each.
const PENDING_HANDSHAKES_PER_ADDRESS_MAX: usize = 64;

/// Deadline of a handshake. A valid dialler sends its hello with the connection and the rest after
/// one round trip; the margin is for slow networks that lose packets.
const HANDSHAKE_TIME_MAX: Duration = Duration::from_secs(5);

const ACCEPT_PAUSE: Duration = Duration::from_millis(20);

/// Whether the error concerns one connection that ended before it was accepted; the listener is
/// intact.
fn is_of_one_dial(kind: ErrorKind) -> bool {
    use ErrorKind::{
        ConnectionAborted, ConnectionReset, HostUnreachable, Interrupted, NetworkUnreachable,
    };
    matches!(
        kind,
        ConnectionAborted | ConnectionReset | HostUnreachable | Interrupted | NetworkUnreachable
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_acceptor_waits_again_after_the_kernel_was_short_of_memory() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let secret = Secret::new(b"secret");
        let (job, link_encryption) = (JobDigest::of("job"), LinkEncryption::default());
        let stop = Arc::new(Notifier::new().unwrap());
        let acceptor = Acceptor {
            listener,
            identity: Arc::new(Identity {
                job,
                own_id: 1,
                secret,
                link_encryption,
                has_digests: false,
            }),
            fence: Fence::new(),
            pending_requests: Arc::default(),
            stop: stop.clone(),
        };
        let mut failures = 2;
        acceptor.run_with(|fds, until| {
            if failures > 0 {
                failures -= 1;
                return Err(ErrorKind::OutOfMemory.into());
            }
            stop.notify();
            socket::poll_until(fds, until)
        });
        assert_eq!(failures, 0);
    }

    #[test]
    fn a_crowd_of_one_address_displaces_only_itself() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut pending = PendingHandshakes::default();
        let mut push = |host: u8, port| {
            let stage = Stage::Hello { bytes: [0; FIRST_BYTES], read: 0 };
            let peer = SocketAddr::from(([10, 0, 0, host], port));
            let (socket, arrived_at) = (socket.try_clone().unwrap(), Instant::now());
            pending.push(PendingHandshake { socket, peer, stage, arrived_at });
            let count = |host| {
                let ip = IpAddr::from([10, 0, 0, host]);
                pending.0.iter().filter(|h| h.peer.ip() == ip).count()
            };
            ([1, 2, 3, 4].map(count), pending.0.back().unwrap().peer.port())
        };
        push(1, 1);
        for port in 0..1000 {
            let (counts, newest) = push(2, port);
            assert_eq!((counts[0], newest), (1, port));
            assert!(counts[1] <= PENDING_HANDSHAKES_PER_ADDRESS_MAX);
        }
        // Together at the limit: the largest crowd gives way.
        for port in 0..63 {
            push(3, port);
        }
        assert_eq!(push(4, 1).0, [1, 63, 63, 1]);
    }
}
