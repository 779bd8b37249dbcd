//! Tests of one rank of two; the test plays its peer and writes and reads the bytes of both links.

use std::io::{IoSlice, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::{Arc, LazyLock, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use super::*;
use crate::net::cipher::DirectionKey;
use crate::net::frame::{FRAME_BYTES, Frame};
use crate::net::link::{Link, LinkKeys};
use crate::net::neighbours::Neighbour;
use crate::net::socket::set_up;
use crate::{Endpoint, EndpointOptions, Fence, GroupSpec, Member, Secret};

pub(crate) const GENERATION: u64 = 5;

/// Limit that only a hang reaches.
pub(crate) const WATCHDOG: Duration = Duration::from_secs(60);

#[test]
fn an_all_reduce_with_a_valid_peer_succeeds() {
    let TestRank { mut ring, mut to_ring, mut from_ring, .. } = one_of_two();
    for piece in reduce_frames(0) {
        to_ring.write_all(&piece).unwrap();
    }
    let mut dst = [0.0; 2];
    assert_eq!(
        ring.all_reduce(b"me", &[1.0, 2.0], &mut dst).unwrap(),
        [b"me".to_vec(), b"you".to_vec()]
    );
    assert_eq!(dst, [11.0, 22.0]);
    let mut sent = [0; 2 * FRAME_BYTES + 2 + 2 * 4];
    from_ring.read_exact(&mut sent).unwrap();
    assert_eq!(&sent[FRAME_BYTES..FRAME_BYTES + 2], b"me");
    assert_eq!(sent[FRAME_BYTES + 2..FRAME_BYTES + 6], 1_f32.to_le_bytes());
    assert_eq!(sent[2 * FRAME_BYTES + 6..], 22_f32.to_le_bytes());
}

#[test]
fn a_protocol_error_names_a_member_that_is_no_neighbour() {
    let registration = Fence::new().register(GENERATION).unwrap();
    let members = vec![10, 11, 12, 13];
    let group = HostGroup::new(registration, Progress::new(), 0, members, None);
    let error = group.protocol_error(2, "another length".to_owned());
    assert_eq!(error.to_string(), "rank 2 (worker 12) broke the protocol: another length");
}

#[test]
fn an_unexpected_frame_is_a_protocol_error() {
    let [sum, total] = reduce_frames(0);
    let header = |change: fn(&mut Frame)| {
        let mut frame = Frame::decode(sum.first_chunk().unwrap()).unwrap();
        change(&mut frame);
        [&frame.encode(), &sum[FRAME_BYTES..]].concat()
    };
    let cases: [(&str, Vec<u8>); 11] = [
        ("generation", header(|frame| frame.generation -= 1)),
        ("generation", header(|frame| frame.generation += 1)),
        ("operation", header(|frame| frame.kind = Kind::Broadcast)),
        ("sequence", header(|frame| frame.sequence += 1)),
        ("buffer length", header(|frame| frame.total_bytes += 4)),
        ("origin", header(|frame| frame.origin = 0)),
        ("segment length", header(|frame| frame.body_bytes = 0)),
        ("at most", header(|frame| frame.note_bytes = u32::MAX)),
        ("expected step 1, got 0", [sum.clone(), header(|frame| frame.origin = 0)].concat()),
        ("origin", [sum.clone(), sum.clone()].concat()),
        ("expected a frame", [sum.clone(), b"x".to_vec(), total].concat()),
    ];
    for (expected, bytes) in cases {
        let TestRank { mut ring, mut to_ring, .. } = one_of_two();
        to_ring.write_all(&bytes).unwrap();
        let src = [1.0, 2.0];
        let error = ring.all_reduce(b"me", &src, &mut [0.0; 2]).unwrap_err();
        let CollectiveError::Protocol { rank: 1, member: 11, reason } = error else {
            panic!("{error:?}")
        };
        assert!(reason.contains(expected), "{expected}: {reason}");
        assert_eq!(src, [1.0, 2.0]);
    }
}

#[test]
fn a_duplicate_of_the_last_frame_fails_the_next_operation() {
    let TestRank { mut ring, mut to_ring, .. } = one_of_two();
    let frame = gather_frame(0);
    to_ring.write_all(&[frame.clone(), frame].concat()).unwrap();
    ring.all_gather(b"").unwrap();
    let error = ring.all_gather(b"").unwrap_err();
    let CollectiveError::Protocol { rank: 1, reason, .. } = error else { panic!("{error:?}") };
    assert!(reason.contains("sequence"), "{reason}");
}

#[test]
fn a_link_that_ends_anywhere_in_an_operation_is_a_lost_peer() {
    let whole = reduce_frames(0).concat();
    for cut in 0..whole.len() {
        let TestRank { mut ring, mut to_ring, .. } = one_of_two();
        to_ring.write_all(&whole[..cut]).unwrap();
        drop(to_ring);
        let error = ring.all_reduce(b"me", &[1.0, 2.0], &mut [0.0; 2]).unwrap_err();
        assert!(
            matches!(error, CollectiveError::PeerLost { rank: 1, member: 11, .. }),
            "{cut}: {error:?}"
        );
    }
}

#[test]
fn after_a_failure_both_links_are_closed_and_the_group_is_dead() {
    let TestRank { mut ring, mut to_ring, mut from_ring, .. } = one_of_two();
    to_ring.write_all(&[0; FRAME_BYTES]).unwrap();
    ring.all_gather(b"").unwrap_err();
    // Both ends detect it while the group still exists.
    let mut sent = Vec::new();
    from_ring.read_to_end(&mut sent).unwrap();
    assert_eq!(sent.len(), FRAME_BYTES);
    assert_eq!(to_ring.read(&mut [0]).unwrap(), 0);
    let again = ring.broadcast(0, &mut []).unwrap_err();
    assert!(matches!(again, CollectiveError::Aborted { generation: GENERATION }), "{again:?}");
}

#[test]
fn bytes_against_the_direction_of_a_link_are_a_protocol_error() {
    let TestRank { mut ring, to_ring: _to_ring, mut from_ring, .. } = one_of_two();
    from_ring.write_all(b"!").unwrap();
    let error = ring.all_reduce(b"", &[1.0, 2.0], &mut [0.0; 2]).unwrap_err();
    assert!(matches!(error, CollectiveError::Protocol { rank: 1, .. }), "{error:?}");
}

#[test]
fn a_next_member_that_leaves_while_it_is_needed_is_a_lost_peer() {
    let TestRank { mut ring, to_ring: _to_ring, from_ring, .. } = one_of_two();
    drop(from_ring);
    let error = ring.all_reduce(b"", &[1.0, 2.0], &mut [0.0; 2]).unwrap_err();
    assert!(matches!(error, CollectiveError::PeerLost { rank: 1, .. }), "{error:?}");
}

#[test]
fn a_next_member_that_has_received_everything_may_leave() {
    let TestRank { mut ring, mut to_ring, mut from_ring, .. } = one_of_two();
    let (done, result) = mpsc::channel();
    thread::spawn(move || done.send(ring.all_gather(b"mine")));
    from_ring.read_exact(&mut [0; FRAME_BYTES + 4]).unwrap();
    drop(from_ring);
    to_ring.write_all(&gather_frame(0)).unwrap();
    let gathered = result.recv_timeout(WATCHDOG).unwrap().unwrap();
    assert_eq!(gathered, [b"mine".to_vec(), b"you".to_vec()]);
}

#[test]
fn a_total_without_this_ranks_part_is_a_protocol_error() {
    // The peer reads nothing, so most of this rank's contribution cannot be sent.
    let len = 8 << 20;
    let TestRank { mut ring, mut to_ring, from_ring: _from_ring, .. } = one_of_two();
    ring.segment_bytes = 4 * len;
    let (done, result) = mpsc::channel();
    thread::spawn(move || done.send(ring.all_reduce(b"", &vec![1.0; len], &mut vec![0.0; len])));
    let bytes = |content| Frame {
        kind: Kind::AllReduce,
        generation: GENERATION,
        sequence: 0,
        step: content,
        segment: 0,
        origin: 1 - content,
        note_bytes: 0,
        total_bytes: 4 * len as u64,
        body_bytes: 2 * len as u32,
    };
    to_ring.write_all(&bytes(0).encode()).unwrap();
    to_ring.write_all(&vec![0; 2 * len]).unwrap();
    to_ring.write_all(&bytes(1).encode()).unwrap();
    let error = result.recv_timeout(WATCHDOG).unwrap().unwrap_err();
    let CollectiveError::Protocol { rank: 1, reason, .. } = error else { panic!("{error:?}") };
    assert!(reason.contains("this rank's part"), "{reason}");
}

#[test]
fn the_fence_ends_a_blocked_operation_and_closes_its_links() {
    let TestRank { mut ring, mut to_ring, mut from_ring, fence } = one_of_two();
    let (done, result) = mpsc::channel();
    thread::spawn(move || {
        let error = ring.all_reduce(b"", &[1.0, 2.0], &mut [0.0; 2]).unwrap_err();
        done.send((ring, error)).unwrap();
    });
    // The rank is in the operation: its first frame has arrived.
    from_ring.read_exact(&mut [0; FRAME_BYTES + 4]).unwrap();
    fence.abort_before(GENERATION);
    assert!(result.try_recv().is_err());
    fence.abort_before(GENERATION + 1);
    let (_ring, error) = result.recv_timeout(WATCHDOG).unwrap();
    assert!(matches!(error, CollectiveError::Aborted { generation: GENERATION }), "{error:?}");
    assert_eq!(from_ring.read(&mut [0]).unwrap(), 0);
    assert_eq!(to_ring.read(&mut [0]).unwrap(), 0);
}

#[test]
fn the_fence_closes_the_links_of_an_idle_group_at_once() {
    let TestRank { mut ring, mut to_ring, mut from_ring, fence } = one_of_two();
    fence.abort_before(GENERATION + 1);
    assert_eq!(from_ring.read(&mut [0]).unwrap(), 0);
    assert_eq!(to_ring.read(&mut [0]).unwrap(), 0);
    let error = ring.all_gather(b"").unwrap_err();
    assert!(matches!(error, CollectiveError::Aborted { generation: GENERATION }), "{error:?}");
}

#[test]
fn a_flipped_bit_in_a_frame_header_is_an_error_and_never_a_panic() {
    let whole = reduce_frames(0).concat();
    for bit in 0..FRAME_BYTES * 8 {
        let TestRank { mut ring, mut to_ring, .. } = one_of_two();
        let mut bytes = whole.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        to_ring.write_all(&bytes).unwrap();
        drop(to_ring);
        let error = ring.all_reduce(b"me", &[1.0, 2.0], &mut [0.0; 2]).unwrap_err();
        let is_expected = matches!(
            error,
            CollectiveError::Protocol { rank: 1, .. } | CollectiveError::PeerLost { rank: 1, .. }
        );
        assert!(is_expected, "bit {bit}: {error:?}");
    }
}

#[test]
fn an_invalid_announcement_is_a_protocol_error() {
    let too_long = (BROADCAST_BYTES_MAX as u64 + 1).to_le_bytes();
    let more_than_said = [&1_u64.to_le_bytes()[..], b"ab"].concat();
    let behind_a_long_one = [&(1_u64 << 20).to_le_bytes()[..], b"a"].concat();
    for note in [&b""[..], &too_long, &more_than_said, &behind_a_long_one, &u64::MAX.to_le_bytes()]
    {
        let TestRank { mut ring, mut to_ring, mut from_ring, .. } = one_of_two();
        let frame = Frame {
            kind: Kind::Announcement,
            origin: 1,
            note_bytes: note.len() as u32,
            total_bytes: 0,
            ..Frame::decode(gather_frame(0).first_chunk().unwrap()).unwrap()
        };
        to_ring.write_all(&[&frame.encode(), note].concat()).unwrap();
        let mut bytes = b"before".to_vec();
        let error = ring.broadcast_bytes(1, &mut bytes).unwrap_err();
        assert!(matches!(error, CollectiveError::Protocol { rank: 1, .. }), "{note:?}: {error:?}");
        assert_eq!(from_ring.read(&mut [0]).unwrap(), 0, "the links are closed");
    }
}

#[test]
fn every_link_has_nodelay_at_both_ends() {
    let bind = |me| Endpoint::bind(Ipv4Addr::LOCALHOST.into(), options(me)).unwrap();
    let ends = [bind(1), bind(2)];
    let members =
        [(1, &ends[0]), (2, &ends[1])].map(|(id, end)| Member { id, address: end.address() });
    let group = GroupSpec { generation: 1, members: members.to_vec() };
    thread::scope(|scope| {
        let rings =
            ends.each_ref().map(|end| scope.spawn(|| end.connect(&group, WATCHDOG).unwrap()));
        for ring in rings.map(|ring| ring.join().unwrap()) {
            let links = ring.links.as_ref().unwrap();
            let nodelay = |link: &Link| link.socket().nodelay().unwrap();
            assert!(nodelay(&links.next.link) && nodelay(&links.prev.link));
        }
    });
}

#[test]
fn bytes_changed_on_an_encrypted_link_end_it_with_the_peers_name() {
    for forged in [0, 30] {
        let fence = Fence::new();
        watch(fence.clone());
        let registration = fence.register(GENERATION).unwrap();
        let (next, _from_ring) = sockets();
        let (prev, mut attacker) = sockets();
        let neighbour = |socket, ours: u8, theirs: u8| {
            let [seals, opens] = [ours, theirs].map(|key| DirectionKey::new(&[key; 32]));
            let link = Arc::new(Link::new(socket, Some(LinkKeys { seals, opens })));
            Neighbour { rank: 1, member: 11, link }
        };
        let links = Links { next: neighbour(next, 1, 2), prev: neighbour(prev, 3, 4) };
        let mut ring = HostGroup::new(registration, Progress::new(), 0, vec![10, 11], Some(links));
        // The peer's end seals with the key with which this end opens.
        let (socket, mut wire) = sockets();
        neighbour(socket, 4, 3).link.send(&[IoSlice::new(&gather_frame(0))]).unwrap();
        let mut sealed = vec![0; 20 + gather_frame(0).len() + 16];
        wire.read_exact(&mut sealed).unwrap();
        sealed[forged] ^= 1;
        attacker.write_all(&sealed).unwrap();
        let error = ring.all_gather(b"me").unwrap_err();
        let named = matches!(error, CollectiveError::Protocol { rank: 1, member: 11, .. });
        assert!(named && error.to_string().contains("were changed"), "{error:?}");
    }
}

#[test]
fn a_link_registered_after_the_abort_is_shut_down() {
    let fence = Fence::new();
    let registration = fence.register(1).unwrap();
    fence.abort_before(2);
    let (link, mut peer) = pair();
    registration.register_link(&link);
    assert_eq!(peer.read(&mut [0]).unwrap(), 0);
}

#[test]
fn an_operation_reports_its_wait_points_until_it_ends() {
    let TestRank { mut ring, mut to_ring, from_ring: _from_ring, fence } = one_of_two();
    let progress = ring.progress.clone();
    let place = || progress.stall().map(|s| (s.generation, s.operation, s.received, s.sent));
    let waits_at = |expected| {
        let started = Instant::now();
        while place() != Some(expected) {
            assert!(started.elapsed() < WATCHDOG, "{expected:?} is never reached: {:?}", place());
            thread::yield_now();
        }
    };
    let (done, results) = mpsc::channel();
    thread::spawn(move || {
        for _ in 0..3 {
            done.send(ring.all_reduce(b"me", &[1.0, 2.0], &mut [0.0; 2]).is_ok()).unwrap();
        }
    });
    let frame = FRAME_BYTES as u64;
    let (sum, total) = (frame + 2 + 4, frame + 4);
    let [first, second] = reduce_frames(0);
    waits_at((GENERATION, 1, 0, sum));
    let [early, late] = [progress.stall(), progress.stall()].map(|stall| stall.unwrap().since);
    assert!(early < late, "the wait began once: {early:?}, {late:?}");
    to_ring.write_all(&first[..7]).unwrap();
    waits_at((GENERATION, 1, 7, sum));
    to_ring.write_all(&first[7..]).unwrap();
    waits_at((GENERATION, 1, first.len() as u64, sum + total));
    to_ring.write_all(&second).unwrap();
    assert!(results.recv_timeout(WATCHDOG).unwrap());
    waits_at((GENERATION, 2, 0, sum));
    to_ring.write_all(&reduce_frames(1).concat()).unwrap();
    assert!(results.recv_timeout(WATCHDOG).unwrap());
    waits_at((GENERATION, 3, 0, sum));
    fence.abort_before(GENERATION + 1);
    assert!(!results.recv_timeout(WATCHDOG).unwrap());
    assert_eq!(place(), None, "no operation runs");
}

#[test]
fn long_sums_use_all_channels_and_short_ones_the_first() {
    let ends = [0, 1].map(|id| {
        let options = EndpointOptions { transport: Transport::Tcp, channels: 3, ..options(id) };
        let end = Endpoint::bind(Ipv4Addr::LOCALHOST.into(), options).unwrap();
        watch(end.fence());
        end
    });
    let members = (0..).zip(&ends).map(|(id, end)| Member { id, address: end.address() }).collect();
    let group = GroupSpec { generation: GENERATION, members };
    let long = 3 * CHANNEL_BYTES_MIN / size_of::<f32>();
    thread::scope(|scope| {
        for end in &ends {
            let group = &group;
            scope.spawn(move || {
                let mut ring = end.connect(group, WATCHDOG).unwrap();
                let sums = |ring: &mut HostGroup, len| {
                    let notes = ring.all_reduce(&[7], &vec![1.0; len], &mut vec![0.0; len])?;
                    assert_eq!(notes, [[7], [7]]);
                    Ok::<_, CollectiveError>(())
                };
                sums(&mut ring, long).unwrap();
                if ring.rank() == 0 {
                    ring.channels[1].next.link.shutdown(std::net::Shutdown::Both).unwrap();
                }
                sums(&mut ring, long - 1).unwrap();
                let lost = sums(&mut ring, long).unwrap_err();
                assert!(matches!(lost, CollectiveError::PeerLost { .. }), "{lost:?}");
            });
        }
    });
}

#[test]
fn an_invalid_number_of_channels_is_refused() {
    for channels in [0, 17, 255] {
        let options = EndpointOptions { channels, ..options(1) };
        let error = Endpoint::bind(Ipv4Addr::LOCALHOST.into(), options).unwrap_err().to_string();
        assert!(error.contains("1 to 16"), "{error}");
    }
}

pub(crate) fn options(id: u64) -> EndpointOptions {
    EndpointOptions::new("job", id, Secret::new("secret"))
}

/// Rank 0 of a group of workers 10 and 11, and the peer's ends of its links.
pub(crate) struct TestRank {
    pub(crate) ring: HostGroup,
    pub(crate) to_ring: TcpStream,
    pub(crate) from_ring: TcpStream,
    pub(crate) fence: Fence,
}

pub(crate) fn one_of_two() -> TestRank {
    let fence = Fence::new();
    watch(fence.clone());
    let registration = fence.register(GENERATION).unwrap();
    let neighbour = |link| Neighbour { rank: 1, member: 11, link };
    let (next, from_ring) = pair();
    let (prev, to_ring) = pair();
    registration.register_link(&next);
    registration.register_link(&prev);
    let links = Links { next: neighbour(next), prev: neighbour(prev) };
    let ring = HostGroup::new(registration, Progress::new(), 0, vec![10, 11], Some(links))
        .with_ring_bytes_min(0);
    TestRank { ring, to_ring, from_ring, fence }
}

pub(crate) fn pair() -> (Arc<Link>, TcpStream) {
    let (dialled, accepted) = sockets();
    (Arc::new(Link::new(dialled, None)), accepted)
}

fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let dialled = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    set_up(&dialled).unwrap();
    let (accepted, _) = listener.accept().unwrap();
    accepted.set_read_timeout(Some(WATCHDOG)).unwrap();
    (dialled, accepted)
}

/// Aborts a group that hangs, so that its test fails.
pub(crate) fn watch(fence: Fence) {
    static WATCHED: LazyLock<mpsc::Sender<(Instant, Fence)>> = LazyLock::new(|| {
        let (watched, fences) = mpsc::channel::<(Instant, Fence)>();
        thread::spawn(move || {
            for (deadline, fence) in fences {
                while let Some(left) = deadline.checked_duration_since(Instant::now()) {
                    thread::park_timeout(left);
                }
                fence.abort_before(u64::MAX);
            }
        });
        watched
    });
    WATCHED.send((Instant::now() + WATCHDOG, fence)).unwrap();
}

/// Frames that rank 1 sends in an all-reduce of `[1, 2]` and `[10, 20]`: its own chunk 1, then the
/// total of chunk 0.
fn reduce_frames(sequence: u64) -> [Vec<u8>; 2] {
    [(1, 20_f32, b"you".as_slice()), (0, 11_f32, b"")].map(|(origin, number, note)| {
        let frame = Frame {
            kind: Kind::AllReduce,
            generation: GENERATION,
            sequence,
            step: 1 - origin,
            segment: 0,
            origin,
            note_bytes: note.len() as u32,
            total_bytes: 8,
            body_bytes: 4,
        };
        [&frame.encode(), note, &number.to_le_bytes()].concat()
    })
}

/// Frame that rank 1 sends in an all-gather.
fn gather_frame(sequence: u64) -> Vec<u8> {
    let [frame, _] = reduce_frames(sequence);
    let frame = Frame {
        kind: Kind::AllGather,
        total_bytes: 0,
        body_bytes: 0,
        ..Frame::decode(frame.first_chunk().unwrap()).unwrap()
    };
    [&frame.encode(), b"you".as_slice()].concat()
}
