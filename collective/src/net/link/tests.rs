//! Protected links: what arrives, what the wire shows, and which messages end the link.

use std::io::Write;
use std::net::{Ipv4Addr, TcpListener};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::*;
use crate::net::cipher::KEY_BYTES;
use crate::net::socket::{poll_until, set_up};

/// Limit that only a hang reaches.
const WATCHDOG: Duration = Duration::from_secs(60);

fn sockets() -> [TcpStream; 2] {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let dialled = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (accepted, _) = listener.accept().unwrap();
    let both = [dialled, accepted];
    both.iter().for_each(|socket| set_up(socket).unwrap());
    both
}

fn keys(ours: u8, theirs: u8) -> LinkKeys {
    let [seals, opens] = [ours, theirs].map(|key| DirectionKey::new(&[key; KEY_BYTES]));
    LinkKeys { seals, opens }
}

fn digests() -> LinkKeys {
    keys(1, 2).for_protection(Protection::Digests).unwrap()
}

fn encrypted_pair() -> [Link; 2] {
    let [one, two] = sockets();
    [Link::new(one, Some(keys(1, 2))), Link::new(two, Some(keys(2, 1)))]
}

/// Number of bytes that the socket takes, if it takes any.
fn send(link: &Link, bytes: &[u8]) -> Option<usize> {
    link.send(&[IoSlice::new(bytes)]).unwrap()
}

fn recv(link: &Link, buf: &mut [u8]) -> io::Result<usize> {
    let until = Instant::now().checked_add(WATCHDOG);
    loop {
        if let Some(bytes) = link.recv(&mut [IoSliceMut::new(buf)])? {
            return Ok(bytes);
        }
        let mut fds = [PollFd::new(link, PollFlags::IN)];
        assert!(poll_until(&mut fds, until).unwrap(), "nothing ever comes");
    }
}

fn recv_exact(link: &Link, mut buf: &mut [u8]) {
    while !buf.is_empty() {
        let bytes = recv(link, buf).unwrap();
        buf = &mut buf[bytes..];
    }
}

/// Bytes on the wire for one call.
fn on_the_wire(bytes: &[u8], keys: LinkKeys) -> Vec<u8> {
    let [socket, mut peer] = sockets();
    let link = Link::new(socket, Some(keys));
    assert_eq!(send(&link, bytes), Some(bytes.len()));
    drop(link);
    let mut sealed = Vec::new();
    peer.set_nonblocking(false).unwrap();
    peer.read_to_end(&mut sealed).unwrap();
    sealed
}

#[test]
fn more_bytes_than_the_sockets_hold_arrive_in_order_both_ways() {
    let ends = encrypted_pair();
    let all: Vec<u8> = (0..5_000_000_u32).map(|index| (index % 251) as u8).collect();
    std::thread::scope(|scope| {
        for end in &ends {
            scope.spawn(|| {
                let (mut rest, mut size) = (all.as_slice(), 1);
                while !rest.is_empty() {
                    // Several parts of any length, also empty ones.
                    let parts = rest.split_at(rest.len().min(size));
                    let (head, tail) = parts.0.split_at(parts.0.len() / 3);
                    let slices = [head, &[], tail].map(IoSlice::new);
                    match end.send(&slices).unwrap() {
                        Some(bytes) => {
                            rest = &rest[bytes..];
                            size = size * 7 % 300_007;
                        }
                        None => {
                            let mut fds = [PollFd::new(end, PollFlags::OUT)];
                            poll_until(&mut fds, None).unwrap();
                        }
                    }
                }
            });
            scope.spawn(|| {
                let mut received = vec![0; all.len()];
                recv_exact(end, &mut received);
                assert!(received == all);
            });
        }
    });
}

#[test]
fn a_full_socket_takes_whole_messages_and_the_caller_repeats_the_rest() {
    let [one, two] = encrypted_pair();
    let bytes = vec![3; 64 << 20];
    let mut sent = 0;
    while let Some(bytes) = send(&one, &bytes[sent..]) {
        sent += bytes;
    }
    assert!(sent > 0 && sent.is_multiple_of(SEALED_BYTES_MAX), "{sent}");
    recv_exact(&two, &mut vec![0; sent]);
    let repeated = send(&one, &bytes[sent..]);
    assert_eq!(repeated, Some(SEALED_BYTES_MAX), "the sealed message goes first");
}

#[test]
fn bytes_are_left_by_a_peek_and_by_a_short_buffer() {
    let [one, two] = encrypted_pair();
    send(&one, b"gradients").unwrap();
    send(&one, b"more").unwrap();
    let mut some = [0; 4];
    assert_eq!((recv(&two, &mut some).unwrap(), &some), (4, b"grad"));
    assert!(two.has_unread());
    let mut rest = [0; 64];
    assert_eq!((two.peek(&mut rest).unwrap(), &rest[..5]), (5, &b"ients"[..]));
    assert_eq!((recv(&two, &mut rest).unwrap(), &rest[..5]), (5, &b"ients"[..]));
    assert!(!two.has_unread());
    // Poll shows what follows.
    let until = Instant::now().checked_add(WATCHDOG);
    assert!(poll_until(&mut [PollFd::new(&two, PollFlags::IN)], until).unwrap());
    assert_eq!((recv(&two, &mut rest).unwrap(), &rest[..4]), (4, &b"more"[..]));
    drop(one);
    assert_eq!(recv(&two, &mut rest).unwrap_err().kind(), ErrorKind::UnexpectedEof);
}

#[test]
fn the_wire_shows_nothing_of_the_bytes() {
    let bytes = b"the model's parameters".repeat(5000);
    let sealed = on_the_wire(&bytes[..SEALED_BYTES_MAX], keys(1, 2));
    assert_eq!(sealed.len(), SEALED_BYTES_MAX + LENGTH_BYTES + TAG_BYTES);
    for window in sealed.windows(5) {
        assert!(!bytes[..22 + 5].windows(5).any(|plain| plain == window), "{window:?}");
    }
}

#[test]
fn any_flipped_bit_ends_the_link() {
    let cases: [(LinkKeys, fn() -> LinkKeys); 2] =
        [(keys(1, 2), || keys(2, 1)), (digests(), digests)];
    for (seals, opens) in cases {
        let sealed = on_the_wire(b"gradients", seals);
        for bit in 0..sealed.len() * 8 {
            let mut forged = sealed.clone();
            forged[bit / 8] ^= 1 << (bit % 8);
            let [socket, mut attacker] = sockets();
            let link = Link::new(socket, Some(opens()));
            attacker.write_all(&forged).unwrap();
            let error = recv(&link, &mut [0; 9]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidData, "bit {bit}: {error}");
        }
        let [socket, mut peer] = sockets();
        peer.write_all(&sealed).unwrap();
        let mut opened = [0; 9];
        recv_exact(&Link::new(socket, Some(opens())), &mut opened);
        assert_eq!(&opened, b"gradients");
    }
}

#[test]
fn repeated_and_skipped_messages_end_the_link() {
    let [first, second] = {
        let [socket, mut peer] = sockets();
        let link = Link::new(socket, Some(keys(1, 2)));
        [b"one", b"two"].map(|bytes| {
            send(&link, bytes).unwrap();
            let mut sealed = vec![0; 3 + LENGTH_BYTES + TAG_BYTES];
            peer.set_nonblocking(false).unwrap();
            peer.read_exact(&mut sealed).unwrap();
            sealed
        })
    };
    for (sequence, valid) in
        [(vec![&first, &second], 2), (vec![&first, &first], 1), (vec![&second], 0)]
    {
        let [socket, mut attacker] = sockets();
        let link = Link::new(socket, Some(keys(2, 1)));
        sequence.iter().for_each(|message| attacker.write_all(message).unwrap());
        drop(attacker);
        let received = (0..).map_while(|_| recv(&link, &mut [0; 9]).ok());
        assert_eq!(received.count(), valid);
    }
}

#[test]
fn a_message_without_bytes_or_above_the_limit_is_refused() {
    for length in [0_u32, SEALED_BYTES_MAX as u32 + 1, u32::MAX] {
        let mut key = DirectionKey::new(&[1; KEY_BYTES]);
        let mut sealed = length.to_le_bytes();
        let tag = key.seal(&mut sealed);
        let [socket, mut peer] = sockets();
        peer.write_all(&[&sealed[..], &tag].concat()).unwrap();
        let error = recv(&Link::new(socket, Some(keys(2, 1))), &mut [0; 9]).unwrap_err();
        assert!(error.to_string().contains("the limit is"), "{error}");
    }
}
