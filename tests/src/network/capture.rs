//! What an observer of the network sees.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::Timeout;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, eth, sockopt};
use rustix::thread::LinkNameSpaceType;

use super::Network;

/// An observer of all packets between the hosts of a [`Network`], who looks for certain bytes.
#[derive(Debug)]
pub struct Capture {
    ended: Arc<AtomicBool>,
    thread: JoinHandle<Observed>,
}

/// Bytes to look for. The search skips as far as the last byte of a window allows (Horspool): an
/// observer that compares everywhere does not keep up.
struct Pattern {
    bytes: Vec<u8>,
    skips: [usize; 256],
}

impl Pattern {
    fn new(bytes: Vec<u8>) -> Self {
        let mut skips = [bytes.len(); 256];
        let (_, front) = bytes.split_last().expect("a pattern is not empty");
        for (index, byte) in front.iter().enumerate() {
            skips[usize::from(*byte)] = front.len() - index;
        }
        Self { bytes, skips }
    }

    fn is_in(&self, packet: &[u8]) -> bool {
        let mut at = 0;
        while let Some(window) = packet.get(at..at + self.bytes.len()) {
            if window == self.bytes {
                return true;
            }
            at += self.skips[usize::from(window[window.len() - 1])];
        }
        false
    }
}

/// What an observer has seen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observed {
    /// Bytes of all packets.
    pub bytes: u64,
    /// In how many packets each pattern was.
    pub packets: Vec<u64>,
}

impl Network {
    /// Observes the packets between the hosts from now on, and looks for `patterns` in each.
    pub fn capture(&self, patterns: Vec<Vec<u8>>) -> Capture {
        let hub = File::open(format!("/run/netns/{}", self.namespace("hub")))
            .expect("the hub's namespace exists");
        let patterns: Vec<Pattern> = patterns.into_iter().map(Pattern::new).collect();
        let ended = Arc::new(AtomicBool::new(false));
        let has_ended = Arc::clone(&ended);
        let (listens, listening) = std::sync::mpsc::channel();
        let thread = thread::spawn(move || {
            // A namespace is a property of a thread, and a socket keeps that of its creator.
            rustix::thread::move_into_link_name_space(
                hub.as_fd(),
                Some(LinkNameSpaceType::Network),
            )
            .expect("this user has made the namespace");
            let socket = rustix::net::socket_with(
                AddressFamily::PACKET,
                SocketType::RAW,
                SocketFlags::CLOEXEC,
                Some(eth::ALL),
            )
            .expect("this user is root");
            let wake = Some(Duration::from_millis(50));
            sockopt::set_socket_timeout(&socket, Timeout::Recv, wake).expect("it is a socket");
            // The kernel drops what does not fit; the larger, the less.
            let _ = sockopt::set_socket_recv_buffer_size_force(&socket, 256 << 20);
            listens.send(()).expect("the caller waits");
            let mut observed = Observed { bytes: 0, packets: vec![0; patterns.len()] };
            let mut packet = vec![0; 1 << 17];
            while !has_ended.load(Ordering::Relaxed) {
                match rustix::net::recv(&socket, &mut packet, RecvFlags::empty()) {
                    Ok((bytes, _)) => observed.add(&packet[..bytes], &patterns),
                    Err(Errno::AGAIN | Errno::INTR) => {}
                    Err(errno) => panic!("packets can't be received: {errno}"),
                }
            }
            observed
        });
        listening.recv().expect("the observer begins");
        Capture { ended, thread }
    }
}

impl Observed {
    fn add(&mut self, packet: &[u8], patterns: &[Pattern]) {
        self.bytes += packet.len() as u64;
        for (count, pattern) in self.packets.iter_mut().zip(patterns) {
            *count += u64::from(pattern.is_in(packet));
        }
    }
}

impl Capture {
    /// Ends the observation.
    pub fn finish(self) -> Observed {
        self.ended.store(true, Ordering::Relaxed);
        self.thread.join().expect("the observer does not fail")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_is_found_wherever_it_is() {
        for pattern in [&b"abcab"[..], b"x", &[0; 16]] {
            let found = Pattern::new(pattern.to_vec());
            for at in 0..40 {
                let mut packet = b"abcabx".repeat(7);
                packet.retain(|byte| !pattern.contains(byte));
                packet.resize(40, 1);
                assert!(!found.is_in(&packet));
                packet.splice(at..at, pattern.iter().copied());
                assert!(found.is_in(&packet), "{pattern:?} at {at}");
            }
        }
    }
}
