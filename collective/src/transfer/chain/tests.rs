//! Tests of one rank of three or of four; the test plays its peers and writes and reads the bytes
//! of both links.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::mpsc;
use std::thread;
use std::time::Instant;

use super::*;
use crate::group::host_group::tests::{WATCHDOG, pair, watch};
use crate::net::frame::Kind;
use crate::net::neighbours::Neighbour;
use crate::{CollectiveError, Communicator, Fence, HostGroup};

const GENERATION: u64 = 5;

#[test]
fn rank_0_adds_the_partial_sums_and_sends_the_total_down() {
    let TestRank { mut ring, mut next, mut prev, .. } = one_of_three(0);
    next.write_all(&message(UP, 1, &[b"one"], &[10.0, 20.0])).unwrap();
    prev.write_all(&message(UP, 2, &[b""], &[100.0, 200.0])).unwrap();
    let mut dst = [0.0; 2];
    let notes = ring.all_reduce(b"zero", &[1.0, 2.0], &mut dst).unwrap();
    assert_eq!(notes, [b"zero".to_vec(), b"one".to_vec(), b"".to_vec()]);
    assert_eq!(dst, [111.0, 222.0]);
    let total = message(DOWN, 0, &[b"zero", b"one", b""], &[111.0, 222.0]);
    for mut child in [next, prev] {
        let mut sent = vec![0; total.len()];
        child.read_exact(&mut sent).unwrap();
        assert_eq!(sent, total);
    }
}

#[test]
fn the_end_of_a_chain_sends_its_part_up_and_receives_the_total() {
    let TestRank { mut ring, next: _next, mut prev, .. } = one_of_three(1);
    prev.write_all(&message(DOWN, 0, &[b"zero", b"one", b"two"], &[3.0])).unwrap();
    let mut dst = [0.0];
    assert_eq!(ring.all_reduce(b"one", &[1.0], &mut dst).unwrap(), [&b"zero"[..], b"one", b"two"]);
    assert_eq!(dst, [3.0]);
    let part = message(UP, 1, &[b"one"], &[1.0]);
    let mut sent = vec![0; part.len()];
    prev.read_exact(&mut sent).unwrap();
    assert_eq!(sent, part);
}

#[test]
fn a_rank_of_four_adds_its_neighbours_part_and_then_that_of_the_other_pair() {
    let TestRank { mut ring, mut next, mut prev, .. } = one_of(4, 1);
    // The other pair is faster.
    next.write_all(&message(DOWN, 2, &[b"two", b"three"], &[1200.0])).unwrap();
    prev.write_all(&message(UP, 0, &[b"zero"], &[1.0])).unwrap();
    let mut dst = [0.0];
    let notes = ring.all_reduce(b"one", &[10.0], &mut dst).unwrap();
    assert_eq!(notes, [&b"zero"[..], b"one", b"two", b"three"]);
    assert_eq!(dst, [1211.0]);
    for (mut link, expected) in [
        (prev, message(UP, 1, &[b"one"], &[10.0])),
        (next, message(DOWN, 1, &[b"zero", b"one"], &[11.0])),
    ] {
        let mut sent = vec![0; expected.len()];
        link.read_exact(&mut sent).unwrap();
        assert_eq!(sent, expected);
    }
}

#[test]
fn a_rank_of_four_needs_the_other_pair_from_the_beginning_and_its_neighbour_until_it_has_sent() {
    let TestRank { mut ring, next, prev: _prev, .. } = one_of(4, 1);
    drop(next);
    let error = ring.all_reduce(b"", &[1.0], &mut [0.0]).unwrap_err();
    assert!(matches!(error, CollectiveError::PeerLost { rank: 2, .. }), "{error}");
    let TestRank { mut ring, mut next, mut prev, .. } = one_of(4, 1);
    prev.write_all(&message(UP, 0, &[b""], &[1.0])).unwrap();
    next.write_all(&message(DOWN, 2, &[b"", b""], &[5.0])).unwrap();
    let leaves = thread::spawn(move || {
        let mut part = vec![0; message(UP, 1, &[b""], &[1.0]).len()];
        prev.read_exact(&mut part).unwrap();
    });
    let mut dst = [0.0];
    ring.all_reduce(b"", &[1.0], &mut dst).unwrap();
    leaves.join().unwrap();
    assert_eq!(dst, [7.0]);
}

#[test]
fn an_unexpected_message_is_a_protocol_error() {
    let valid = message(UP, 1, &[b"one"], &[10.0]);
    let header = |change: fn(&mut Frame)| {
        let mut frame = Frame::decode(valid.first_chunk().unwrap()).unwrap();
        change(&mut frame);
        [&frame.encode(), &valid[FRAME_BYTES..]].concat()
    };
    let with_note = |note: &[u8]| {
        let frame = Frame::decode(valid.first_chunk().unwrap()).unwrap();
        let frame = Frame { note_bytes: note.len() as u32, ..frame };
        [&frame.encode(), note, &10_f32.to_le_bytes()].concat()
    };
    let cases: [(&str, Vec<u8>); 12] = [
        ("generation", header(|frame| frame.generation -= 1)),
        ("operation", header(|frame| frame.kind = Kind::Broadcast)),
        ("sequence", header(|frame| frame.sequence += 1)),
        ("buffer length", header(|frame| frame.total_bytes += 4)),
        ("origin", header(|frame| frame.origin = 2)),
        ("expected step 0", header(|frame| frame.step = 1)),
        ("segment", header(|frame| frame.segment = 1)),
        ("at most", header(|frame| frame.note_bytes = u32::MAX)),
        ("the notes of 1 ranks", header(|frame| frame.note_bytes = 3)),
        ("the note of rank 1", with_note(&5_u32.to_le_bytes())),
        ("the note of rank 1", with_note(&[&u32::MAX.to_le_bytes()[..], b"abcd"].concat())),
        ("no more notes", with_note(&[&1_u32.to_le_bytes()[..], b"ab"].concat())),
    ];
    for (expected, bytes) in cases {
        let TestRank { mut ring, mut next, mut prev, .. } = one_of_three(0);
        prev.write_all(&message(UP, 2, &[b""], &[100.0])).unwrap();
        next.write_all(&bytes).unwrap();
        let error = ring.all_reduce(b"zero", &[1.0], &mut [0.0]).unwrap_err();
        let CollectiveError::Protocol { rank: 1, member: 11, reason } = error else {
            panic!("{expected}: {error:?}")
        };
        assert!(reason.contains(expected), "{expected}: {reason}");
        assert_eq!(prev.read(&mut [0]).unwrap(), 0, "{expected}: the other link is closed");
    }
}

#[test]
fn a_flipped_bit_in_a_frame_header_is_an_error_and_never_a_panic() {
    let valid = message(UP, 1, &[b"one"], &[10.0]);
    for bit in 0..(FRAME_BYTES + NOTE_LEN_BYTES) * 8 {
        let TestRank { mut ring, mut next, mut prev, .. } = one_of_three(0);
        let mut bytes = valid.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        prev.write_all(&message(UP, 2, &[b""], &[100.0])).unwrap();
        next.write_all(&bytes).unwrap();
        drop(next);
        let error = ring.all_reduce(b"zero", &[1.0], &mut [0.0]).unwrap_err();
        let is_expected = matches!(
            error,
            CollectiveError::Protocol { rank: 1, .. } | CollectiveError::PeerLost { rank: 1, .. }
        );
        assert!(is_expected, "bit {bit}: {error:?}");
    }
}

#[test]
fn a_link_that_ends_while_it_is_needed_is_a_lost_peer() {
    // A child's link, cut anywhere in its message; with the other child's message there or not.
    let part = message(UP, 2, &[b"two"], &[100.0]);
    for cut in 0..part.len() {
        let TestRank { mut ring, mut next, mut prev, .. } = one_of_three(0);
        if cut % 2 == 0 {
            next.write_all(&message(UP, 1, &[b""], &[10.0])).unwrap();
        }
        prev.write_all(&part[..cut]).unwrap();
        drop(prev);
        let error = ring.all_reduce(b"zero", &[1.0], &mut [0.0]).unwrap_err();
        assert!(
            matches!(error, CollectiveError::PeerLost { rank: 2, member: 12, .. }),
            "{cut}: {error:?}"
        );
    }
    // The parent's link, cut anywhere in the total.
    let total = message(DOWN, 0, &[b"", b"", b""], &[3.0]);
    for cut in 0..total.len() {
        let TestRank { mut ring, next: _next, mut prev, .. } = one_of_three(1);
        prev.write_all(&total[..cut]).unwrap();
        drop(prev);
        let error = ring.all_reduce(b"one", &[1.0], &mut [0.0]).unwrap_err();
        assert!(
            matches!(error, CollectiveError::PeerLost { rank: 0, member: 10, .. }),
            "{cut}: {error:?}"
        );
    }
}

#[test]
fn a_child_that_leaves_between_its_part_and_the_total_is_a_lost_peer() {
    let TestRank { mut ring, mut next, prev: _prev, .. } = one_of_three(0);
    next.write_all(&message(UP, 1, &[b""], &[10.0])).unwrap();
    drop(next);
    let error = ring.all_reduce(b"zero", &[1.0], &mut [0.0]).unwrap_err();
    assert!(matches!(error, CollectiveError::PeerLost { rank: 1, .. }), "{error:?}");
}

#[test]
fn the_fence_ends_a_chain_reduce_and_closes_its_links() {
    let TestRank { mut ring, mut next, mut prev, fence } = one_of_three(1);
    let (done, result) = mpsc::channel();
    thread::spawn(move || {
        let error = ring.all_reduce(b"", &[1.0], &mut [0.0]).unwrap_err();
        done.send((ring, error)).unwrap();
    });
    prev.read_exact(&mut vec![0; message(UP, 1, &[b""], &[1.0]).len()]).unwrap();
    fence.abort_before(GENERATION + 1);
    let (_ring, error) = result.recv_timeout(WATCHDOG).unwrap();
    assert!(matches!(error, CollectiveError::Aborted { generation: GENERATION }), "{error:?}");
    assert_eq!(prev.read(&mut [0]).unwrap(), 0);
    assert_eq!(next.read(&mut [0]).unwrap(), 0);
}

#[test]
fn progress_counts_bytes_in_flight_on_both_links() {
    let TestRank { mut ring, mut next, mut prev, fence } = one_of_three(0);
    let progress = ring.progress().clone();
    let place = || progress.stall().map(|s| (s.operation, s.received, s.sent, s.waits_for_next));
    let waits_at = |expected| {
        let started = Instant::now();
        while place() != Some(expected) {
            assert!(started.elapsed() < WATCHDOG, "{expected:?} is never reached: {:?}", place());
            thread::yield_now();
        }
    };
    let (done, result) = mpsc::channel();
    thread::spawn(move || done.send(ring.all_reduce(b"", &[1.0], &mut [0.0]).is_ok()));
    let start = 1 << 62;
    waits_at((1, start, start, true));
    let part = message(UP, 2, &[b""], &[100.0]);
    prev.write_all(&part).unwrap();
    waits_at((1, start + part.len() as u64, start, true));
    next.write_all(&message(UP, 1, &[b""], &[10.0])[..7]).unwrap();
    waits_at((1, start + part.len() as u64, start - 7, true));
    fence.abort_before(GENERATION + 1);
    assert!(!result.recv_timeout(WATCHDOG).unwrap());
    assert_eq!(place(), None);

    let TestRank { mut ring, prev: _prev, .. } = one_of_three(1);
    let progress = ring.progress().clone();
    thread::spawn(move || ring.all_reduce(b"", &[1.0], &mut [0.0]).is_ok());
    let sent = message(UP, 1, &[b""], &[1.0]).len() as u64;
    let started = Instant::now();
    while progress.stall().map(|s| (s.received, s.sent, s.waits_for_next))
        != Some((start - sent, start, false))
    {
        assert!(started.elapsed() < WATCHDOG, "{:?}", progress.stall());
        thread::yield_now();
    }
}

/// One rank of a group of workers 10, 11 and 12, and the peers' ends of its links.
struct TestRank {
    ring: HostGroup,
    next: TcpStream,
    prev: TcpStream,
    fence: Fence,
}

fn one_of_three(rank: usize) -> TestRank {
    one_of(3, rank)
}

fn one_of(world: usize, rank: usize) -> TestRank {
    let fence = Fence::new();
    watch(fence.clone());
    let registration = fence.register(GENERATION).unwrap();
    let neighbour = |rank, link| Neighbour { rank, member: 10 + rank as u64, link };
    let (to_next, next) = pair();
    let (to_prev, prev) = pair();
    registration.register_link(&to_next);
    registration.register_link(&to_prev);
    let links = Links {
        next: neighbour((rank + 1) % world, to_next),
        prev: neighbour((rank + world - 1) % world, to_prev),
    };
    let members = (10..10 + world as u64).collect();
    let ring = HostGroup::new(registration, Progress::new(), rank, members, Some(links));
    TestRank { ring, next, prev, fence }
}

fn message(step: u32, origin: u32, notes: &[&[u8]], elements: &[f32]) -> Vec<u8> {
    let notes: Vec<u8> = notes
        .iter()
        .flat_map(|note| [&(note.len() as u32).to_le_bytes(), *note].concat())
        .collect();
    let bytes = elements.len() * 4;
    let frame = Frame {
        kind: Kind::AllReduce,
        generation: GENERATION,
        sequence: 0,
        step,
        segment: 0,
        origin,
        note_bytes: notes.len() as u32,
        total_bytes: bytes as u64,
        body_bytes: bytes as u32,
    };
    [&frame.encode(), notes.as_slice(), bytemuck::cast_slice(elements)].concat()
}
