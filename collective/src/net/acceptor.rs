use std::collections::VecDeque;
use std::io::{ErrorKind, Read};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use tracing::{debug, warn};

use super::admission::DialKey;
use super::fence::Fence;
use super::handshake::{HELLO_BYTES, Hello, JobDigest, Purpose};
use super::link;
use super::notifier::Notifier;
use super::pending_requests::PendingRequests;
use crate::Secret;

/// Acceptor: accepts connections, reads hellos, and hands authenticated dials to the fence. Runs on
/// its own thread.
///
/// **Invariant:** the acceptor waits for no single peer. All unauthenticated connections are polled
/// together; each has a deadline, and when there are too many, the oldest is dropped. Bytes or
/// silence of an unauthenticated peer delay no other peer.
#[derive(Debug)]
pub(crate) struct Acceptor {
    pub(crate) listener: TcpListener,
    pub(crate) identity: Arc<Identity>,
    pub(crate) fence: Fence,
    pub(crate) pending_requests: Arc<PendingRequests>,
    pub(crate) stop: Arc<Notifier>,
}

/// Identity of this worker, and the secret that authenticates its peers.
#[derive(Debug)]
pub(crate) struct Identity {
    pub(crate) job: JobDigest,
    pub(crate) own_id: u64,
    pub(crate) secret: Secret,
}

impl Acceptor {
    /// Runs until `stop` is notified.
    pub(crate) fn run(self) {
        let started = Instant::now();
        let mut pending = VecDeque::new();
        let mut resume_at = None;
        loop {
            let now = Instant::now();
            pending
                .retain(|handshake: &PendingHandshake| now < handshake.arrived_at + HELLO_TIME_MAX);
            resume_at = resume_at.filter(|resume_at| now < *resume_at);
            let expiry = self.fence.expire(now - started).map(|at| started + at);
            let oldest = pending.front().map(|handshake| handshake.arrived_at + HELLO_TIME_MAX);
            let wake_at = [resume_at, expiry, oldest].into_iter().flatten().min();

            let listener_events =
                if resume_at.is_none() { PollFlags::IN } else { PollFlags::empty() };
            let mut fds = vec![
                PollFd::new(&*self.stop, PollFlags::IN),
                PollFd::new(&self.listener, listener_events),
            ];
            fds.extend(pending.iter().map(|handshake| PollFd::new(&handshake.link, PollFlags::IN)));
            if let Err(error) = link::poll_until(&mut fds, wake_at) {
                warn!(%error, "no longer accepting peers");
                return;
            }
            let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            if ready[0] {
                return;
            }
            let now = Instant::now();
            let mut ready_pending = ready[2..].iter();
            pending = pending
                .into_iter()
                .filter_map(|handshake| {
                    let ready = *ready_pending.next().expect("one flag per handshake");
                    if ready { self.read_hello(handshake, now - started) } else { Some(handshake) }
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
        pending: &mut VecDeque<PendingHandshake>,
        now: Instant,
        started: Instant,
    ) -> Option<Instant> {
        for _ in 0..PENDING_HANDSHAKES_MAX {
            let (link, peer) = match self.listener.accept() {
                Ok(accepted) => accepted,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return None,
                Err(error) if is_of_one_dial(error.kind()) => continue,
                Err(error) => {
                    // The process is most likely out of file descriptors: close one, and back off.
                    warn!(%error, "cannot accept a peer");
                    pending.pop_front();
                    return Some(now + ACCEPT_PAUSE);
                }
            };
            if let Err(error) = link::set_up(&link) {
                debug!(%peer, %error, "dial lost");
                continue;
            }
            let handshake =
                PendingHandshake { link, peer, bytes: [0; HELLO_BYTES], read: 0, arrived_at: now };
            // The hello of a valid dialler arrives with the connection.
            if let Some(handshake) = self.read_hello(handshake, now - started) {
                if pending.len() == PENDING_HANDSHAKES_MAX {
                    pending.pop_front();
                }
                pending.push_back(handshake);
            }
        }
        None
    }

    /// Reads the available bytes of a hello. Returns the connection if the hello is still
    /// incomplete.
    fn read_hello(
        &self,
        mut handshake: PendingHandshake,
        now: Duration,
    ) -> Option<PendingHandshake> {
        while handshake.read < HELLO_BYTES {
            match handshake.link.read(&mut handshake.bytes[handshake.read..]) {
                Ok(0) => return None,
                Ok(bytes) => handshake.read += bytes,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Some(handshake),
                Err(_) => return None,
            }
        }
        if let Err(reason) = self.handle_hello(&handshake.bytes, handshake.link, now) {
            debug!(peer = %handshake.peer, reason, "dial refused");
        }
        None
    }

    fn handle_hello(
        &self,
        bytes: &[u8; HELLO_BYTES],
        link: TcpStream,
        now: Duration,
    ) -> Result<(), String> {
        let Identity { job, own_id, secret } = &*self.identity;
        let hello = Hello::decode(bytes, secret).map_err(|error| error.to_string())?;
        hello.check(*job, *own_id).map_err(|error| error.to_string())?;
        if hello.purpose == Purpose::State {
            self.pending_requests.push(hello.from, link);
            return Ok(());
        }
        let Hello { generation, from: member, purpose, .. } = hello;
        let key = DialKey { generation, member, purpose };
        self.fence.admit(key, link, now).map_err(|refusal| refusal.to_string())
    }
}

/// A connection that is not yet authenticated.
#[derive(Debug)]
struct PendingHandshake {
    link: TcpStream,
    peer: SocketAddr,
    bytes: [u8; HELLO_BYTES],
    read: usize,
    arrived_at: Instant,
}

const PENDING_HANDSHAKES_MAX: usize = 64;

/// Deadline of a hello. A valid dialler sends it with the connection; the margin is for slow
/// networks.
const HELLO_TIME_MAX: Duration = Duration::from_secs(5);

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
