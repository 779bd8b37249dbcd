use std::collections::VecDeque;
use std::io::{ErrorKind, Read};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use tracing::{debug, warn};

use crate::bell::Bell;
use crate::fence::Fence;
use crate::hello::{HELLO_BYTES, Hello, JobDigest, Purpose};
use crate::lobby::Lobby;
use crate::parking::Dialler;
use crate::{Secret, Visitor, link};

/// Opens the door: accepts, reads hellos, and hands what is proven to the fence. Runs on its own
/// thread.
///
/// **Invariant:** nobody is waited for. All unproven connections are polled together; each has a
/// deadline, and when there are too many, the oldest goes. A stranger's bytes, or silence, delay no
/// one.
#[derive(Debug)]
pub(crate) struct Porter {
    pub(crate) listener: TcpListener,
    pub(crate) identity: Arc<Identity>,
    pub(crate) fence: Fence,
    pub(crate) lobby: Arc<Lobby>,
    pub(crate) quit: Arc<Bell>,
}

/// Who this worker is, and how it knows its peers.
#[derive(Debug)]
pub(crate) struct Identity {
    pub(crate) job: JobDigest,
    pub(crate) me: u64,
    pub(crate) secret: Secret,
}

impl Porter {
    /// Returns when `quit` is rung.
    pub(crate) fn run(self) {
        let started = Instant::now();
        let mut guests = VecDeque::new();
        let mut resume_at = None;
        loop {
            let now = Instant::now();
            guests.retain(|guest: &Guest| now < guest.arrived_at + HELLO_TIME_MAX);
            resume_at = resume_at.filter(|resume_at| now < *resume_at);
            let expiry = self.fence.expire(now - started).map(|at| started + at);
            let oldest = guests.front().map(|guest| guest.arrived_at + HELLO_TIME_MAX);
            let wake_at = [resume_at, expiry, oldest].into_iter().flatten().min();

            let door = if resume_at.is_none() { PollFlags::IN } else { PollFlags::empty() };
            let mut fds =
                vec![PollFd::new(&*self.quit, PollFlags::IN), PollFd::new(&self.listener, door)];
            fds.extend(guests.iter().map(|guest| PollFd::new(&guest.link, PollFlags::IN)));
            if let Err(error) = link::poll_until(&mut fds, wake_at) {
                warn!(%error, "no longer accepting peers");
                return;
            }
            let stirred: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
            if stirred[0] {
                return;
            }
            let now = Instant::now();
            let mut stirred_guests = stirred[2..].iter();
            guests = guests
                .into_iter()
                .filter_map(|guest| {
                    let stirred = *stirred_guests.next().expect("one flag per guest");
                    if stirred { self.hear(guest, now - started) } else { Some(guest) }
                })
                .collect();
            if stirred[1] {
                resume_at = self.accept(&mut guests, now, started);
            }
        }
    }

    /// Lets in who stands at the door. After a refusal by the operating system, says when to try
    /// again.
    fn accept(
        &self,
        guests: &mut VecDeque<Guest>,
        now: Instant,
        started: Instant,
    ) -> Option<Instant> {
        for _ in 0..GUESTS_MAX {
            let (link, peer) = match self.listener.accept() {
                Ok(accepted) => accepted,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return None,
                Err(error) if is_the_diallers(error.kind()) => continue,
                Err(error) => {
                    // Most likely out of file descriptors: free one, and do not spin.
                    warn!(%error, "cannot accept a peer");
                    guests.pop_front();
                    return Some(now + ACCEPT_PAUSE);
                }
            };
            if let Err(error) = link::set_up(&link) {
                debug!(%peer, %error, "dial lost");
                continue;
            }
            let guest = Guest { link, peer, bytes: [0; HELLO_BYTES], read: 0, arrived_at: now };
            // An honest dialler's hello is here already.
            if let Some(guest) = self.hear(guest, now - started) {
                if guests.len() == GUESTS_MAX {
                    guests.pop_front();
                }
                guests.push_back(guest);
            }
        }
        None
    }

    /// Reads what has come of a hello; gives the guest back if that is not all of it.
    fn hear(&self, mut guest: Guest, now: Duration) -> Option<Guest> {
        while guest.read < HELLO_BYTES {
            match guest.link.read(&mut guest.bytes[guest.read..]) {
                Ok(0) => return None,
                Ok(bytes) => guest.read += bytes,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Some(guest),
                Err(_) => return None,
            }
        }
        if let Err(reason) = self.judge(&guest.bytes, guest.link, now) {
            debug!(peer = %guest.peer, reason, "dial refused");
        }
        None
    }

    fn judge(
        &self,
        bytes: &[u8; HELLO_BYTES],
        link: TcpStream,
        now: Duration,
    ) -> Result<(), String> {
        let hello =
            Hello::decode(bytes, &self.identity.secret).map_err(|error| error.to_string())?;
        if hello.job != self.identity.job {
            return Err("it is of another job".to_owned());
        }
        if hello.to != self.identity.me {
            return Err(format!("it is for worker {}", hello.to));
        }
        if hello.purpose == Purpose::State {
            self.lobby.enter(Visitor::new(hello.from, link));
            return Ok(());
        }
        let Hello { generation, from: member, purpose, .. } = hello;
        let dialler = Dialler { generation, member, purpose };
        self.fence.admit(dialler, link, now).map_err(|refusal| refusal.to_string())
    }
}

/// A connection that has not proven itself yet.
#[derive(Debug)]
struct Guest {
    link: TcpStream,
    peer: SocketAddr,
    bytes: [u8; HELLO_BYTES],
    read: usize,
    arrived_at: Instant,
}

const GUESTS_MAX: usize = 64;

/// An honest dialler sends its hello with the connection; this is for slow networks.
const HELLO_TIME_MAX: Duration = Duration::from_secs(5);

const ACCEPT_PAUSE: Duration = Duration::from_millis(20);

/// Errors of one connection that ended before it was accepted; the listener is fine.
fn is_the_diallers(kind: ErrorKind) -> bool {
    use ErrorKind::{
        ConnectionAborted, ConnectionReset, HostUnreachable, Interrupted, NetworkUnreachable,
    };
    matches!(
        kind,
        ConnectionAborted | ConnectionReset | HostUnreachable | Interrupted | NetworkUnreachable
    )
}
