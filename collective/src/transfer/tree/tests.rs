//! Tests of one rank of seventeen; the test plays its peers and writes and reads the bytes of their
//! links.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::thread;

use super::*;
use crate::group::host_group::tests::{pair, watch};
use crate::net::frame::Kind;
use crate::{CollectiveError, Communicator, Fence, HostGroup};

const GENERATION: u64 = 5;
const WORLD: usize = 17;

/// One rank of a group of workers 10, 11, … and the peers' ends of its links.
struct TestRank {
    group: HostGroup,
    next: TcpStream,
    prev: TcpStream,
    /// That of the right child, and of the parent if the rank is a right child.
    right: TcpStream,
    parent: TcpStream,
    _fence: Fence,
}

fn rank_of_many(rank: usize) -> TestRank {
    let fence = Fence::new();
    watch(fence.clone());
    let registration = fence.register(GENERATION).unwrap();
    let ends = [0; 4].map(|_| pair());
    ends.iter().for_each(|(link, _)| registration.register_link(link));
    let [(to_next, next), (to_prev, prev), (to_right, right), (to_parent, parent)] = ends;
    let neighbour = |rank, link| Neighbour { rank, member: 10 + rank as u64, link };
    let links = Links {
        next: neighbour((rank + 1) % WORLD, to_next),
        prev: neighbour((rank + WORLD - 1) % WORLD, to_prev),
    };
    let position = topology::position(rank, WORLD);
    let far = position.parent.filter(|_| position.is_right_child());
    let tree = TreeLinks {
        right: position.right.map(|right| neighbour(right, to_right)),
        parent: far.map(|parent| neighbour(parent, to_parent)),
    };
    let members = (10..).take(WORLD).collect();
    let group = HostGroup::new(registration, Progress::new(), rank, members, Some(links));
    TestRank { group: group.with_tree(Some(tree)), next, prev, right, parent, _fence: fence }
}

/// A message with a note for each of `ranks`: its number.
fn message(step: u32, origin: usize, ranks: Range<usize>, elements: &[f32]) -> Vec<u8> {
    let note = |rank: usize| [&1_u32.to_le_bytes()[..], &[rank as u8]].concat();
    let notes: Vec<u8> = ranks.flat_map(note).collect();
    let bytes = size_of_val(elements);
    let frame = Frame {
        kind: Kind::AllReduce,
        generation: GENERATION,
        sequence: 0,
        step,
        segment: 0,
        origin: to_wire(origin),
        note_bytes: to_wire(notes.len()),
        total_bytes: bytes as u64,
        body_bytes: to_wire(bytes),
    };
    [&frame.encode()[..], &notes, bytemuck::cast_slice(elements)].concat()
}

fn notes() -> Vec<Vec<u8>> {
    (0..WORLD).map(|rank| vec![rank as u8]).collect()
}

/// Ranks below each child of rank 0.
const LEFT: Range<usize> = 1..9;
const RIGHT: Range<usize> = 9..17;

#[test]
fn rank_0_adds_the_sums_of_its_children_and_sends_the_total_down() {
    let TestRank { mut group, mut next, mut right, .. } = rank_of_many(0);
    right.write_all(&message(UP, 9, RIGHT, &[100.0, 200.0])).unwrap();
    next.write_all(&message(UP, 1, LEFT, &[10.0, 20.0])).unwrap();
    let mut dst = [0.0; 2];
    assert_eq!(group.all_reduce(&[0], &[1.0, 2.0], &mut dst).unwrap(), notes());
    assert_eq!(dst, [111.0, 222.0]);
    let total = message(DOWN, 0, 0..WORLD, &dst);
    for mut child in [next, right] {
        let mut sent = vec![0; total.len()];
        child.read_exact(&mut sent).unwrap();
        assert_eq!(sent, total);
    }
}

#[test]
fn a_right_child_forwards_its_sum_before_it_has_all_elements_and_the_total_likewise() {
    let TestRank { mut group, mut next, mut right, mut parent, .. } = rank_of_many(9);
    let (len, first) = (100_000, 1000);
    let ones = vec![1.0; len];
    // Notes of five bytes, the first elements and half of the next one.
    let half = |ranks: usize| FRAME_BYTES + 5 * ranks + 4 * first + 2;
    thread::scope(|scope| {
        let reducing = scope.spawn(|| {
            let mut dst = vec![0.0; len];
            group.all_reduce(&[9], &ones, &mut dst).map(|notes| (notes, dst))
        });
        let (a, b) = (message(UP, 10, 10..14, &ones), message(UP, 14, 14..17, &ones));
        next.write_all(&a[..half(4)]).unwrap();
        right.write_all(&b[..half(3)]).unwrap();
        let mut sent = vec![0; FRAME_BYTES + 5 * 8 + 4 * first];
        parent.read_exact(&mut sent).unwrap();
        let mut expected = message(UP, 9, RIGHT, &vec![3.0; len]);
        assert!(sent == expected[..sent.len()], "the first elements");
        next.write_all(&a[half(4)..]).unwrap();
        right.write_all(&b[half(3)..]).unwrap();
        let mut rest = vec![0; expected.len() - sent.len()];
        parent.read_exact(&mut rest).unwrap();
        assert!(rest == expected.split_off(sent.len()), "the other elements");
        let total = message(DOWN, 0, 0..WORLD, &vec![7.0; len]);
        let begin = FRAME_BYTES + 5 * WORLD + 4 * first;
        parent.write_all(&total[..begin]).unwrap();
        for child in [&mut next, &mut right] {
            let mut sent = vec![0; begin];
            child.read_exact(&mut sent).unwrap();
            assert!(sent == total[..begin], "the first totals");
        }
        parent.write_all(&total[begin..]).unwrap();
        for child in [&mut next, &mut right] {
            let mut sent = vec![0; total.len() - begin];
            child.read_exact(&mut sent).unwrap();
        }
        let (got, dst) = reducing.join().unwrap().unwrap();
        assert_eq!(got, notes());
        assert!(dst == vec![7.0; len]);
    });
}

#[test]
fn a_total_without_this_ranks_part_is_a_protocol_error() {
    for bytes in [FRAME_BYTES + 2, usize::MAX] {
        let TestRank { mut group, mut prev, next: _next, right: _right, .. } = rank_of_many(1);
        let total = message(DOWN, 0, 0..WORLD, &[3.0]);
        prev.write_all(&total[..bytes.min(total.len())]).unwrap();
        let src = [1.0];
        let error = group.all_reduce(&[1], &src, &mut [0.0]).unwrap_err();
        let CollectiveError::Protocol { rank: 0, member: 10, reason } = error else {
            panic!("{error:?}")
        };
        assert!(reason.contains("without this rank's part"), "{reason}");
        assert_eq!(src, [1.0]);
    }
}

#[test]
fn an_unexpected_message_is_a_protocol_error_and_closes_the_other_links() {
    let valid = message(UP, 9, RIGHT, &[10.0]);
    let header = |change: fn(&mut Frame)| {
        let mut frame = Frame::decode(valid.first_chunk().unwrap()).unwrap();
        change(&mut frame);
        [&frame.encode()[..], &valid[FRAME_BYTES..]].concat()
    };
    let mut long_note = valid.clone();
    long_note[FRAME_BYTES] = 200;
    let cases: [(&str, Vec<u8>); 8] = [
        ("generation", header(|frame| frame.generation -= 1)),
        ("operation", header(|frame| frame.kind = Kind::Broadcast)),
        ("sequence", header(|frame| frame.sequence += 1)),
        ("buffer length", header(|frame| frame.total_bytes += 4)),
        ("origin", header(|frame| frame.origin = 2)),
        ("expected step 0", header(|frame| frame.step = 1)),
        ("at most", header(|frame| frame.note_bytes = u32::MAX)),
        ("the note of rank 9", long_note),
    ];
    for (expected, bytes) in cases {
        let TestRank { mut group, mut next, mut right, .. } = rank_of_many(0);
        right.write_all(&bytes).unwrap();
        let error = group.all_reduce(&[0], &[1.0], &mut [0.0]).unwrap_err();
        let CollectiveError::Protocol { rank: 9, member: 19, reason } = error else {
            panic!("{expected}: {error:?}")
        };
        assert!(reason.contains(expected), "{expected}: {reason}");
        assert_eq!(next.read(&mut [0]).unwrap(), 0, "{expected}: the other link is closed");
    }
}

#[test]
fn a_link_that_ends_while_it_is_needed_is_a_lost_peer() {
    let part = message(UP, 9, RIGHT, &[10.0]);
    for cut in 0..=part.len() {
        let TestRank { mut group, next: _next, mut right, .. } = rank_of_many(0);
        right.write_all(&part[..cut]).unwrap();
        drop(right);
        let error = group.all_reduce(&[0], &[1.0], &mut [0.0]).unwrap_err();
        let is_lost = matches!(error, CollectiveError::PeerLost { rank: 9, member: 19, .. });
        assert!(is_lost, "{cut}: {error:?}");
    }
}

#[test]
fn a_wait_names_the_far_members_that_have_to_do_something() {
    let far = |rank: usize, send: fn(&mut TestRank)| {
        let mut test = rank_of_many(rank);
        let progress = test.group.progress().clone();
        send(&mut test);
        let TestRank { mut group, next, prev, right, parent, _fence: fence } = test;
        thread::scope(|scope| {
            scope.spawn(move || group.all_reduce(&[rank as u8], &[1.0], &mut [0.0]).unwrap_err());
            let mut seen = None;
            // Until the wait is the last one: it does not change any more.
            for _ in 0..50 {
                let stall = progress.stall().map(|stall| (stall.far, stall.waits_for_next));
                seen = stall.or(seen);
                thread::yield_now();
                thread::park_timeout(std::time::Duration::from_millis(1));
            }
            fence.abort_before(u64::MAX);
            drop((next, prev, right, parent));
            seen
        })
    };
    // Rank 9 waits for both children, then for its parent.
    assert_eq!(far(9, |_| {}), Some(([Some(24), None], true)));
    let left = |test: &mut TestRank| {
        test.next.write_all(&message(UP, 10, 10..14, &[1.0])).unwrap();
    };
    assert_eq!(far(9, left), Some(([Some(24), None], false)));
    let both = |test: &mut TestRank| {
        test.next.write_all(&message(UP, 10, 10..14, &[1.0])).unwrap();
        test.right.write_all(&message(UP, 14, 14..17, &[1.0])).unwrap();
    };
    assert_eq!(far(9, both), Some(([Some(10), None], false)));
    // The parent of rank 1 is its neighbour.
    assert_eq!(far(1, |_| {}), Some(([Some(16), None], true)));
}
