//! The TCP connections of this process, as the kernel counts their bytes.

#![allow(unsafe_code, reason = "asks the kernel about descriptors, of which it has no safe form")]

use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use elasticdl_proto::LinkReport;

use super::seconds;

/// Counters of all connections at one time.
#[derive(Debug)]
pub(super) struct Links {
    at: Instant,
    /// By addresses at this end and at the other one.
    counters: BTreeMap<(SocketAddr, SocketAddr), Counters>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Counters {
    pub(super) sent: u64,
    received: u64,
    sent_ago: Duration,
    received_ago: Duration,
    /// Bytes that wait to be sent.
    unsent: u32,
    /// Packets that are sent and not acknowledged.
    in_flight: u32,
}

impl Counters {
    /// Whether bytes wait to be sent, and whether others are on their way. None are if the receiver
    /// has no room for them.
    pub(super) fn queues(&self) -> (bool, bool) {
        (self.unsent > 0, self.in_flight > 0)
    }
}

impl Links {
    /// Reads the counters.
    pub(super) fn read() -> Self {
        let at = Instant::now();
        let counters = sockets().filter_map(connection);
        Self { at, counters: counters.take(LINKS_MAX).collect() }
    }

    /// Waits until `least` has passed since they were read.
    pub(super) fn await_sample(&self, least: Duration) {
        std::thread::sleep(least.saturating_sub(self.at.elapsed()));
    }

    /// What has happened since `before`. Connections between two descriptors of this process are
    /// left out.
    pub(super) fn since(&self, before: &Self, master_port: Option<u16>) -> Vec<LinkReport> {
        let elapsed = (self.at - before.at).as_secs_f64().max(1e-3);
        let report = |(&(local, peer), now): (&(SocketAddr, SocketAddr), &Counters)| {
            let known = before.counters.get(&(local, peer)).copied();
            let (sent, received) = known.map_or((0, 0), |known| {
                (now.sent.saturating_sub(known.sent), now.received.saturating_sub(known.received))
            });
            LinkReport {
                local,
                peer,
                to_master: Some(peer.port()) == master_port,
                sent_bytes: now.sent,
                received_bytes: now.received,
                sent_bytes_per_s: (sent as f64 / elapsed).round(),
                received_bytes_per_s: (received as f64 / elapsed).round(),
                sent_ago_s: seconds(now.sent_ago),
                received_ago_s: seconds(now.received_ago),
            }
        };
        let is_inner =
            |(local, peer): &(SocketAddr, SocketAddr)| self.counters.contains_key(&(*peer, *local));
        self.counters.iter().filter(|(ends, _)| !is_inner(ends)).map(report).collect()
    }
}

/// The descriptors of this process that are sockets.
pub(super) fn sockets() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    entries.filter_map(|entry| {
        let target = fs::read_link(entry.path()).ok()?;
        let is_socket = target.to_str()?.starts_with("socket:");
        entry.file_name().to_str()?.parse::<i32>().ok().filter(|_| is_socket)
    })
}

/// The ends and counters of a descriptor, if it is a connection.
pub(super) fn connection(descriptor: i32) -> Option<((SocketAddr, SocketAddr), Counters)> {
    let mut info = [0_u8; INFO_BYTES];
    let mut len = INFO_BYTES as libc::socklen_t;
    let (level, option) = (libc::IPPROTO_TCP, libc::TCP_INFO);
    // SAFETY: the kernel writes at most `len` bytes, and checks the number. A descriptor that was
    // closed meanwhile, or that is none of a connection, is an error.
    let is_read = unsafe {
        libc::getsockopt(descriptor, level, option, info.as_mut_ptr().cast(), &raw mut len)
    };
    if is_read != 0 || (len as usize) < INFO_BYTES || info[0] != ESTABLISHED {
        return None;
    }
    // SAFETY: it is used for two calls, which fail if it was closed meanwhile.
    let socket = unsafe { BorrowedFd::borrow_raw(descriptor) };
    let local = SocketAddr::try_from(rustix::net::getsockname(socket).ok()?).ok()?;
    let peer = SocketAddr::try_from(rustix::net::getpeername(socket).ok()??).ok()?;
    let short =
        |at: usize| u32::from_ne_bytes(info[at..at + 4].try_into().expect("it has four bytes"));
    let long =
        |at: usize| u64::from_ne_bytes(info[at..at + 8].try_into().expect("it has eight bytes"));
    let millis = |at: usize| Duration::from_millis(short(at).into());
    let counters = Counters {
        sent: long(BYTES_ACKED),
        received: long(BYTES_RECEIVED),
        sent_ago: millis(LAST_DATA_SENT),
        received_ago: millis(LAST_DATA_RECEIVED),
        unsent: short(BYTES_UNSENT),
        in_flight: short(PACKETS_UNACKED),
    };
    Some(((local, peer), counters))
}

/// Most connections of a report.
const LINKS_MAX: usize = 256;
/// State of an open connection.
const ESTABLISHED: u8 = 1;
/// Offsets in the kernel's `tcp_info`.
const PACKETS_UNACKED: usize = 24;
const LAST_DATA_SENT: usize = 44;
const LAST_DATA_RECEIVED: usize = 52;
const BYTES_ACKED: usize = 120;
const BYTES_RECEIVED: usize = 128;
const BYTES_UNSENT: usize = 144;
const INFO_BYTES: usize = 148;

#[cfg(test)]
pub(super) mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd as _;

    use super::*;

    /// From now on, all packets to this end are lost, as in a network that delivers nothing.
    pub(crate) fn lose_packets(end: &TcpStream) {
        let drop_all = u16::try_from(libc::BPF_RET | libc::BPF_K).unwrap();
        let mut filter = [libc::sock_filter { code: drop_all, jt: 0, jf: 0, k: 0 }];
        let program = libc::sock_fprog { len: 1, filter: filter.as_mut_ptr() };
        let len = size_of_val(&program) as libc::socklen_t;
        let (level, option) = (libc::SOL_SOCKET, libc::SO_ATTACH_FILTER);
        // SAFETY: the kernel copies the program, which lives until then.
        let is_set = unsafe {
            libc::setsockopt(end.as_raw_fd(), level, option, (&raw const program).cast(), len)
        };
        assert_eq!(is_set, 0, "{}", std::io::Error::last_os_error());
    }

    #[test]
    fn the_bytes_of_a_connection_are_counted_at_both_ends() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let mut one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut other, peer) = listener.accept().unwrap();
        let ends = (peer, one.peer_addr().unwrap());
        one.write_all(&[7; 1000]).unwrap();
        other.read_exact(&mut [0; 1000]).unwrap();
        let mut links = Links::read();
        // Acknowledgements may be delayed.
        while links.counters[&ends].sent < 1000 {
            links = Links::read();
        }
        let received = links.counters[&(ends.1, ends.0)];
        assert_eq!(received.received, 1000);
        let before = Links { at: links.at - Duration::from_secs(2), counters: BTreeMap::new() };
        let of_one = |links: &Links| links.since(&before, Some(ends.1.port()));
        assert!(of_one(&links).iter().all(|link| link.local != ends.0), "both ends are here");
        links.counters.remove(&(ends.1, ends.0));
        let mut before = Links { counters: links.counters.clone(), ..before };
        before.counters.get_mut(&ends).unwrap().sent -= 500;
        let reports = links.since(&before, Some(ends.1.port()));
        let link = reports.iter().find(|link| link.local == ends.0).unwrap();
        assert!(link.to_master && link.sent_bytes_per_s == 250.0, "{link:?}");
    }
}
