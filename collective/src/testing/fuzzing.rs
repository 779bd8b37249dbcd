//! Entry points of the fuzzers: one rank of a group whose neighbours send arbitrary bytes.

use std::io::{IoSliceMut, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use crate::net::cipher::Protection;
use crate::net::frame::{Frame, Kind};
use crate::net::handshake::{
    ANSWER_BYTES, CONFIRMATION_BYTES, FIRST_BYTES, Hello, Initiator, JobDigest, Purpose, Responder,
};
use crate::net::link::{Link, LinkKeys};
use crate::net::neighbours::{Links, Neighbour};
use crate::net::progress::Progress;
use crate::net::socket::set_up;
use crate::{
    CollectiveError, Communicator, Fence, HostGroup, Secret, StateReceiver, StateRequest, WireDtype,
};

/// Runs one operation against fuzzed input. The first byte selects the operation; the second
/// selects the rank, the size of the group and the links that end; the rest is the data from the
/// previous member and, in part, from the next. The operation must end by itself and without a
/// panic. Returns whether it succeeded.
pub fn ring(data: &[u8]) -> bool {
    let Some((&[operation, shape], bytes)) = data.split_first_chunk() else { return false };
    let bytes = &bytes[..bytes.len().min(BYTES_MAX)];
    let world = 2 + usize::from(shape & 1);
    let rank = usize::from(shape >> 1 & 3) % world;
    let (from_next, from_prev) = match shape >> 3 & 3 {
        0 => bytes.split_at(bytes.len() / 2),
        1 => (bytes, &bytes[..0]),
        _ => (&bytes[..0], bytes),
    };
    let (next, to_next) = pair();
    let (prev, to_prev) = pair();
    for (mut link, bytes) in [(&to_next, from_next), (&to_prev, from_prev)] {
        link.write_all(bytes).expect("a fresh socket's buffer holds that much");
        link.shutdown(Shutdown::Write).expect("the socket is open");
    }
    let neighbour = |rank, link| Neighbour { rank, member: rank as u64, link };
    let links = Links {
        next: neighbour((rank + 1) % world, Arc::new(next)),
        prev: neighbour((rank + world - 1) % world, Arc::new(prev)),
    };
    let members = (0..world as u64).collect();
    let registration = Fence::new().register(GENERATION).expect("this is the first registration");
    let wire = [WireDtype::F32, WireDtype::Bf16, WireDtype::F16][usize::from(operation >> 4) % 3];
    let mut ring = HostGroup::new(registration, Progress::new(), rank, members, Some(links))
        .with_wire_dtype(wire)
        .with_ring_bytes_min(RING_LEN * size_of::<f32>());
    let result = run(&mut ring, operation & 15);
    if result.is_err() {
        let again = ring.all_gather(&[]);
        assert!(
            matches!(again, Err(CollectiveError::Aborted { .. })),
            "{again:?} after {result:?}"
        );
    }
    result.is_ok()
}

/// Feeds bytes to both sides of a handshake, and to an encrypted link. The first byte selects the
/// message, and whether the bytes replace it or are the bits that change in it; no such message may
/// be accepted.
pub fn hello(data: &[u8]) {
    let Some((message, bytes)) = data.split_first() else { return };
    let secret = Secret::new("a secret that no fuzzer knows");
    let hello = Hello {
        purpose: Purpose::State,
        job: JobDigest::of("job"),
        generation: GENERATION,
        from: 1,
        to: 2,
        protection: Protection::Encryption,
    };
    let (initiator, first) = Initiator::new(&hello, &secret);
    let responder = Responder::new(&first, &secret).expect("it is of the same job");
    let (unconfirmed, answer) = responder.answer().expect("the key is valid");
    let is_changed = message & 4 != 0;
    match message % 4 {
        0 => {
            if let Some(forged) = forged::<FIRST_BYTES>(&first, bytes, is_changed) {
                assert!(Responder::new(&forged, &secret).is_err(), "a forged hello: {forged:?}");
            }
        }
        1 => {
            if let Some(forged) = forged::<ANSWER_BYTES>(&answer, bytes, is_changed) {
                assert!(initiator.finish(&forged).is_err(), "a forged answer: {forged:?}");
            }
        }
        2 => {
            let (_, confirmation) = initiator.finish(&answer).expect("the answer is valid");
            if let Some(forged) = forged::<CONFIRMATION_BYTES>(&confirmation, bytes, is_changed) {
                assert!(unconfirmed.confirm(forged).is_err(), "a forged proof: {forged:?}");
            }
        }
        _ => {
            let (keys, _) = initiator.finish(&answer).expect("the answer is valid");
            encrypted_link(keys, &bytes[..bytes.len().min(BYTES_MAX)]);
        }
    }
}

/// A message that differs from the valid one; `None` if it does not, or if there are too few bytes.
fn forged<const N: usize>(valid: &[u8; N], bytes: &[u8], is_changed: bool) -> Option<[u8; N]> {
    let mut forged = *valid;
    if is_changed {
        forged.iter_mut().zip(bytes).for_each(|(byte, change)| *byte ^= change);
    } else {
        forged = *bytes.first_chunk()?;
    }
    (forged != *valid).then_some(forged)
}

/// No byte that the peer has not sealed may be delivered.
fn encrypted_link(keys: LinkKeys, bytes: &[u8]) {
    let (socket, mut peer) = sockets();
    peer.write_all(bytes).expect("a fresh socket's buffer holds that much");
    peer.shutdown(Shutdown::Write).expect("the socket is open");
    let link = Link::new(socket, Some(keys));
    if let Ok(Some(bytes)) = link.recv(&mut [IoSliceMut::new(&mut [0; 64])]) {
        panic!("{bytes} forged bytes were delivered");
    }
}

/// Feeds bytes to a state receiver instead of state messages, and to a state sender instead of
/// positions. Both ends must stop by themselves and without a panic. Returns how many messages and
/// positions were accepted.
pub fn state(data: &[u8]) -> (usize, usize) {
    let data = &data[..data.len().min(BYTES_MAX)];
    let mut counts = (0, 0);
    let (end, mut to_end) = pair();
    to_end.write_all(data).expect("a fresh socket's buffer holds that much");
    to_end.shutdown(Shutdown::Write).expect("the socket is open");
    let receiver = StateReceiver::new(1, Arc::new(end), IDLE_TIMEOUT, None);
    let mut receiver = receiver.expect("the system has a thread");
    while let Ok(Some(header)) = receiver.next(IDLE_TIMEOUT) {
        counts.0 += 1;
        let floats = usize::try_from(header.floats).unwrap_or(usize::MAX).min(BYTES_MAX);
        if receiver.take(&mut vec![0.0; floats]).is_err() {
            break;
        }
    }
    let (end, mut to_end) = pair();
    to_end.write_all(data).expect("a fresh socket's buffer holds that much");
    to_end.shutdown(Shutdown::Write).expect("the socket is open");
    let mut sender = StateRequest::new(1, end).serve(IDLE_TIMEOUT);
    if sender.first_position().is_ok() {
        counts.1 += 1;
    }
    sender.finish();
    counts
}

/// Seed inputs of [`state`]: what a valid donor sends, and what a valid joiner sends.
#[must_use]
pub fn state_seeds() -> Vec<Vec<u8>> {
    let word = |magic: &[u8; 4], kind: u32, fields: [u64; 3]| {
        let fields: Vec<u8> = fields.iter().flat_map(|field| field.to_le_bytes()).collect();
        [&magic[..], &kind.to_le_bytes(), &fields].concat()
    };
    let message = |kind, note: &[u8], floats: &[f32]| {
        let header = word(b"EDLP", kind, [5, note.len() as u64, floats.len() as u64]);
        [&header, note, bytemuck::cast_slice(floats)].concat()
    };
    vec![
        [message(1, b"a record", &[]), message(5, b"a place", &[1.0; 64]), message(0, b"", &[])]
            .concat(),
        [word(b"EDLQ", 0, [0; 3]), word(b"EDLQ", 1, [7, 64, 7])].concat(),
    ]
}

/// Seed inputs of [`ring`]: what valid neighbours send, as far as it is known beforehand.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    let header = |kind, step, origin, note_bytes, total: u64, body| Frame {
        kind,
        generation: GENERATION,
        sequence: 0,
        step,
        segment: 0,
        origin,
        note_bytes,
        total_bytes: total,
        body_bytes: body,
    };
    let frame = |frame: Frame| {
        let rest = vec![1; (frame.note_bytes + frame.body_bytes) as usize];
        [frame.encode().to_vec(), rest].concat()
    };
    let chain_message = |step, origin, ranks: u32| {
        let frame = header(Kind::AllReduce, step, origin, 4 * ranks, 4, 4);
        [&frame.encode()[..], &vec![0; 4 * ranks as usize], &1_f32.to_le_bytes()].concat()
    };
    let half = RING_LEN as u32 / 2 * 4;
    let ring_bytes = RING_LEN as u64 * 4;
    let input = |operation: u8, shape: u8, frames: &[Vec<u8>]| {
        [&[operation, shape][..], &frames.concat()].concat()
    };
    vec![
        input(0, 16, &[frame(header(Kind::AllGather, 0, 1, 3, 0, 0))]),
        input(1, 16, &[chain_message(0, 1, 1)]),
        input(1, 3 | 16, &[chain_message(1, 0, 3)]),
        input(1, 1, &[chain_message(0, 1, 1), chain_message(0, 2, 1)]),
        input(
            2,
            16,
            &[
                frame(header(Kind::AllReduce, 0, 1, 5, ring_bytes, half)),
                frame(header(Kind::AllReduce, 1, 0, 0, ring_bytes, half)),
            ],
        ),
        input(
            2 | 16,
            16,
            &[
                frame(header(Kind::AllReduceBf16, 0, 1, 5, ring_bytes / 2, half / 2)),
                frame(header(Kind::AllReduceBf16, 1, 0, 0, ring_bytes / 2, half / 2)),
            ],
        ),
        input(
            3,
            16,
            &[[
                &header(Kind::Announcement, 0, 1, 10, 0, 0).encode()[..],
                &2_u64.to_le_bytes(),
                b"ab",
            ]
            .concat()],
        ),
        input(4, 16, &[frame(header(Kind::Broadcast, 0, 1, 0, 400, 400))]),
        input(5, 16, &[frame(header(Kind::Exchange, 0, 1, 300, 0, 0))]),
        input(5, 1, &[1, 2].map(|from| frame(header(Kind::Exchange, 0, from, 3, 0, 0)))),
    ]
}

fn run(ring: &mut HostGroup, operation: u8) -> Result<(), CollectiveError> {
    let other = (ring.rank() + 1) % ring.world_size();
    match operation {
        0 => ring.all_gather(b"me").map(drop),
        1 => ring.all_reduce(b"", &[1.0], &mut [0.0]).map(drop),
        2 => ring.all_reduce(b"me", &vec![1.0; RING_LEN], &mut vec![0.0; RING_LEN]).map(drop),
        3 => ring.broadcast_bytes(other, &mut Vec::new()),
        5 => {
            let mut received = vec![b"from before".to_vec()];
            ring.exchange(&vec![b"mine".as_slice(); ring.world_size()], &mut received)
        }
        _ => ring.broadcast(other, &mut [0.0; 100]),
    }
}

fn pair() -> (Link, TcpStream) {
    let (dialled, accepted) = sockets();
    (Link::new(dialled, None), accepted)
}

fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("loopback has free ports");
    let address = listener.local_addr().expect("the listener is bound");
    let dialled = TcpStream::connect(address).expect("the listener accepts");
    set_up(&dialled).expect("the socket is open");
    let (accepted, _) = listener.accept().expect("the listener was dialled");
    (dialled, accepted)
}

const GENERATION: u64 = 5;

/// Length from which these groups use the ring algorithm, in elements.
const RING_LEN: usize = 8194;

const BYTES_MAX: usize = 60 << 10;

/// Never reached: all input and the end of the link are there already.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);
