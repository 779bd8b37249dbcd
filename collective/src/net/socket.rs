//! Sockets of links: creation, configuration and waits.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use super::fence::GroupRegistration;
use crate::CollectiveError;

/// Why a dial failed.
#[derive(Debug)]
pub(crate) enum DialError {
    /// The attempt ended for a reason that concerns no peer.
    Ended(CollectiveError),
    Lost(io::Error),
    /// The deadline has passed.
    TimedOut,
    /// No answer within this time, although dialled more than once.
    Unanswered(Duration),
}

/// Connects to `address`, until `deadline` or until `registration`, if there is one, is aborted.
///
/// The peer's kernel answers, so a peer that is busy computing does not delay the dial.
pub(crate) fn dial(
    address: SocketAddr,
    registration: Option<&GroupRegistration>,
    deadline: Option<Instant>,
) -> Result<TcpStream, DialError> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket =
        rustix::net::socket_with(family, SocketType::STREAM, flags, None).map_err(|errno| {
            DialError::Ended(CollectiveError::Io {
                action: "create a socket",
                source: errno.into(),
            })
        })?;
    if is_same_host(address) {
        disable_pacing(&socket);
    }
    match rustix::net::connect(&socket, &address) {
        Ok(()) => {}
        Err(Errno::INPROGRESS | Errno::INTR) => loop {
            let mut fds = vec![PollFd::new(&socket, PollFlags::OUT)];
            fds.extend(
                registration
                    .map(|registration| PollFd::new(registration.notifier(), PollFlags::IN)),
            );
            let in_time = poll_until(&mut fds, deadline).map_err(DialError::Lost)?;
            let connected = !fds[0].revents().is_empty();
            if let Some(registration) = registration {
                registration.notifier().clear();
                registration.check().map_err(DialError::Ended)?;
            }
            if connected {
                sockopt::socket_error(&socket)
                    .and_then(|outcome| outcome)
                    .map_err(|errno| DialError::Lost(errno.into()))?;
                break;
            }
            if !in_time {
                return Err(DialError::TimedOut);
            }
        },
        Err(errno) => return Err(DialError::Lost(errno.into())),
    }
    let link = TcpStream::from(socket);
    // A dial to a free port of this host can connect to itself (TCP simultaneous open).
    if link.local_addr().map_err(DialError::Lost)? == address {
        return Err(DialError::Lost(ErrorKind::ConnectionRefused.into()));
    }
    set_up(&link).map_err(DialError::Lost)?;
    Ok(link)
}

/// Configures a new socket as a link: non-blocking, without Nagle's delay.
pub(crate) fn set_up(link: &TcpStream) -> io::Result<()> {
    link.set_nonblocking(true)?;
    link.set_nodelay(true)?;
    if link.local_addr()?.ip() == link.peer_addr()?.ip() {
        // Within a host there is no round-trip time to cover, and a short queue stays in the cache.
        // The receive buffer is left to the kernel: a window that a few of loopback's large
        // segments fill closes repeatedly, and opens, at the worst, only on a window probe 200 ms
        // later. If the kernel refuses the option, the link is only slower.
        let _ = sockopt::set_socket_send_buffer_size(link, SAME_HOST_BUFFER_BYTES);
        disable_pacing(link);
    }
    Ok(())
}

/// Configures a new listener so that connections it accepts within this host are not paced.
pub(crate) fn set_up_listener(listener: &TcpListener) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    if listener.local_addr()?.ip().is_loopback() {
        disable_pacing(listener);
    }
    Ok(())
}

/// Selects a congestion control without pacing: within a host there is nothing to pace. It has to
/// be selected before the socket is connected: a socket that used bbr for a moment is paced by
/// timers for its whole life, which took a fifth of the time of large sums. If the kernel refuses
/// the option, the link is only slower.
fn disable_pacing(socket: impl AsFd) {
    let _ = sockopt::set_tcp_congestion(socket, "reno");
}

/// Whether `address` belongs to this host: then packets to it have that source address.
fn is_same_host(address: SocketAddr) -> bool {
    address_towards(address).is_ok_and(|own| own == address.ip())
}

/// Address of this host on the route to `peer`, at which the peer reaches it. Sends nothing.
///
/// # Errors
/// There is no route to `peer`.
pub fn address_towards(peer: SocketAddr) -> io::Result<IpAddr> {
    let any: IpAddr =
        if peer.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    // Connecting a datagram socket looks up the route without sending a packet.
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(peer)?;
    Ok(socket.local_addr()?.ip())
}

/// Polls until an event occurs (true) or `deadline` has passed (false).
pub(crate) fn poll_until(fds: &mut [PollFd<'_>], deadline: Option<Instant>) -> io::Result<bool> {
    loop {
        let timeout =
            deadline.map(|deadline| timespec(deadline.saturating_duration_since(Instant::now())));
        match poll(fds, timeout.as_ref()) {
            Ok(0) => return Ok(false),
            Ok(_) => return Ok(true),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

fn timespec(duration: Duration) -> Timespec {
    let tv_sec = duration.as_secs().try_into().unwrap_or(i64::MAX);
    Timespec { tv_sec, tv_nsec: duration.subsec_nanos().into() }
}

/// Two segments: one is in flight while the other is reduced.
const SAME_HOST_BUFFER_BYTES: usize = 512 << 10;
