//! Tests of internal state: pending dials and registered groups.

use std::io::Read;
use std::net::Ipv4Addr;
use std::sync::mpsc;

use rustix::net::{AddressFamily, SocketType};

use super::*;
use crate::net::handshake::HELLO_BYTES;
use crate::{Communicator, Member};

const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// Limit that only a hang reaches.
const WATCHDOG: Duration = Duration::from_secs(60);

#[test]
fn a_dial_of_a_newer_generation_waits_until_that_group_is_built() {
    let early = endpoint(1);
    let late = endpoint(2);
    let members = [&early, &late].map(member).to_vec();
    let alone = GroupSpec { generation: 6, members: vec![member(&late)] };
    let group = GroupSpec { generation: 7, members };
    let mut old = late.connect(&alone, WATCHDOG).unwrap();
    let (done, result) = mpsc::channel();
    thread::spawn({
        let group = group.clone();
        move || done.send(early.connect(&group, WATCHDOG).map(|ring| (ring, early))).unwrap()
    });
    until(|| late.fence.pending_dial_count() == 1);
    // The dial waits; the group of the older generation still works.
    assert_eq!(old.all_gather(b"old").unwrap(), [b"old"]);
    let mut ring = late.connect(&group, WATCHDOG).unwrap();
    let (mut peer, _end) = result.recv_timeout(WATCHDOG).unwrap().unwrap();
    let gathering = thread::spawn(move || peer.all_gather(b"early").unwrap());
    assert_eq!(ring.all_gather(b"late").unwrap(), [b"early".to_vec(), b"late".to_vec()]);
    gathering.join().unwrap();
}

#[test]
fn the_fence_ends_an_unanswered_dial() {
    let silent = Silent::new();
    let end = endpoint(1).with_dial_limit(WATCHDOG);
    let fence = end.fence();
    let members = vec![member(&end), Member { id: 2, address: silent.address }];
    let (done, result) = mpsc::channel();
    let group = GroupSpec { generation: 3, members };
    thread::spawn(move || done.send(end.connect(&group, WATCHDOG * 2).map(drop)));
    until(|| fence.groups() == 1);
    fence.abort_before(4);
    let outcome = result.recv_timeout(WATCHDOG).unwrap();
    assert!(matches!(outcome, Err(CollectiveError::Aborted { generation: 3 })), "{outcome:?}");
}

#[test]
fn a_member_that_answers_no_dial_is_unreachable_long_before_the_deadline() {
    let silent = Silent::new();
    let limit = Duration::from_millis(200);
    let end = endpoint(1).with_dial_limit(limit);
    let members = vec![member(&end), Member { id: 2, address: silent.address }];
    let outcome = end.connect(&GroupSpec { generation: 3, members }, WATCHDOG * 10).unwrap_err();
    let CollectiveError::Unreachable { rank: 1, member: 2, waited } = outcome else {
        panic!("{outcome:?}")
    };
    assert_eq!((waited, outcome.member()), (limit, Some(2)));
    assert_eq!(end.fence().groups(), 0, "the attempt leaves no registration");
}

#[test]
fn a_wait_for_the_previous_members_dial_is_a_stall() {
    let (one, two) = (endpoint(1), endpoint(2));
    let group = GroupSpec { generation: 4, members: [&one, &two].map(member).to_vec() };
    let progress = one.progress();
    assert_eq!(progress.stall(), None, "the endpoint does not wait yet");
    thread::scope(|scope| {
        let first = scope.spawn(|| one.connect(&group, WATCHDOG).unwrap());
        until(|| progress.stall().is_some_and(|stall| stall.since > Duration::from_millis(20)));
        let stall = progress.stall().unwrap();
        assert_eq!((stall.generation, stall.operation, stall.received, stall.sent), (4, 0, 0, 0));
        let _ring = two.connect(&group, WATCHDOG).unwrap();
        first.join().unwrap();
    });
    assert_eq!(progress.stall(), None);
}

#[test]
fn a_second_dial_of_a_linked_member_is_refused() {
    let (one, two) = (endpoint(1), endpoint(2));
    let group = GroupSpec { generation: 1, members: [&one, &two].map(member).to_vec() };
    let hello =
        Hello { purpose: Purpose::Ring, job: JobDigest::of("job"), generation: 1, from: 1, to: 2 };
    let mut rings = thread::scope(|scope| {
        let first = scope.spawn(|| one.connect(&group, WATCHDOG).unwrap());
        [two.connect(&group, WATCHDOG).unwrap(), first.join().unwrap()]
    });
    assert_refused(&two, &hello.encode(&secret()));
    thread::scope(|scope| {
        rings.iter_mut().for_each(|ring| drop(scope.spawn(|| ring.all_gather(b"").unwrap())));
    });
}

#[test]
fn a_hello_must_be_authenticated_and_name_this_job_and_worker() {
    let end = endpoint(2);
    end.fence().abort_before(5);
    let hello =
        Hello { purpose: Purpose::Ring, job: JobDigest::of("job"), generation: 5, from: 1, to: 2 };
    assert_refused(&end, &hello.encode(&Secret::new("guess")));
    assert_refused(&end, &Hello { generation: 4, ..hello }.encode(&secret()));
    assert_refused(&end, &Hello { to: 3, ..hello }.encode(&secret()));
    assert_refused(&end, &Hello { job: JobDigest::of("jobs"), ..hello }.encode(&secret()));
    assert_refused(&end, &[7; HELLO_BYTES]);
    assert_eq!(end.fence.pending_dial_count(), 0);
    let mut link = TcpStream::connect(end.address()).unwrap();
    link.set_read_timeout(Some(WATCHDOG)).unwrap();
    // In two parts, as a slow network may deliver it.
    let bytes = hello.encode(&secret());
    let (first, second) = bytes.split_at(50);
    link.write_all(first).unwrap();
    link.write_all(second).unwrap();
    until(|| end.fence.pending_dial_count() == 1);
    end.fence().abort_before(6);
    assert_eq!(link.read(&mut [0]).unwrap(), 0, "the fence closes pending dials");
}

#[test]
fn dropping_a_group_removes_its_registration() {
    let end = endpoint(1);
    let group = GroupSpec { generation: 1, members: vec![member(&end)] };
    let ring = end.connect(&group, WATCHDOG).unwrap();
    assert_eq!(end.fence.groups(), 1);
    drop(ring);
    assert_eq!(end.fence.groups(), 0);
}

/// An address that does not answer: a listener whose backlog is full drops new connections.
struct Silent {
    address: SocketAddr,
    _listener: TcpListener,
    _fillers: Vec<TcpStream>,
}

impl Silent {
    fn new() -> Self {
        let full = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&full, &SocketAddr::from((LOOPBACK, 0))).unwrap();
        rustix::net::listen(&full, 0).unwrap();
        let listener = TcpListener::from(full);
        let address = listener.local_addr().unwrap();
        let fence = Fence::new();
        let registration = fence.register(1).unwrap();
        let soon = Duration::from_millis(100);
        let mut fillers = Vec::new();
        while let Ok(filler) = dial(address, Some(&registration), Instant::now().checked_add(soon))
        {
            fillers.push(filler);
            assert!(fillers.len() < 100, "the queue never fills");
        }
        Self { address, _listener: listener, _fillers: fillers }
    }
}

fn endpoint(own_id: u64) -> Endpoint {
    Endpoint::bind(LOOPBACK, "job", own_id, secret()).unwrap()
}

fn member(end: &Endpoint) -> Member {
    Member { id: end.identity.own_id, address: end.address() }
}

fn secret() -> Secret {
    Secret::new("secret")
}

/// Dials with `hello` and expects the acceptor to close the link.
fn assert_refused(end: &Endpoint, hello: &[u8]) {
    let mut link = TcpStream::connect(end.address()).unwrap();
    link.set_read_timeout(Some(WATCHDOG)).unwrap();
    link.write_all(hello).unwrap();
    match link.read(&mut [0]) {
        Ok(0) => {}
        Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
        other => panic!("{other:?}"),
    }
}

fn until(condition: impl Fn() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < WATCHDOG, "the condition is never true");
        thread::yield_now();
    }
}
