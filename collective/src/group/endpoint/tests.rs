//! Tests of internal state: pending dials and registered groups.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::sync::mpsc;

use rustix::net::{AddressFamily, SocketType};

use super::*;
use crate::net::cipher::Protection;
use crate::net::handshake::{ANSWER_BYTES, FIRST_BYTES, Hello, Initiator};
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
    let end = endpoint_of(EndpointOptions { dial_limit: Some(WATCHDOG), ..options(1) });
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
    let end = endpoint_of(EndpointOptions { dial_limit: Some(limit), ..options(1) });
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
    let mut rings = thread::scope(|scope| {
        let first = scope.spawn(|| one.connect(&group, WATCHDOG).unwrap());
        [two.connect(&group, WATCHDOG).unwrap(), first.join().unwrap()]
    });
    assert_refused(&two, &Hello { generation: 1, ..hello() }, &secret());
    thread::scope(|scope| {
        rings.iter_mut().for_each(|ring| drop(scope.spawn(|| ring.all_gather(b"").unwrap())));
    });
}

#[test]
fn a_hello_must_be_authenticated_and_name_this_job_and_worker() {
    let end = endpoint(2);
    end.fence().abort_before(5);
    let hello = hello();
    assert_refused(&end, &hello, &Secret::new("guess"));
    assert_refused(&end, &Hello { generation: 4, ..hello }, &secret());
    assert_refused(&end, &Hello { to: 3, ..hello }, &secret());
    assert_refused(&end, &Hello { job: JobDigest::of("jobs"), ..hello }, &secret());
    assert_closed(dial_with(&end, &[7; FIRST_BYTES]));
    assert_eq!(end.fence.pending_dial_count(), 0);
    // In parts, as a slow network may deliver it.
    let (initiator, first) = Initiator::new(&hello, &secret());
    let (early, late) = first.split_at(50);
    let mut link = dial_with(&end, early);
    link.write_all(late).unwrap();
    let (_, confirmation) = initiator.finish(&answer(&mut link)).unwrap();
    let (early, late) = confirmation.split_at(5);
    link.write_all(early).unwrap();
    link.write_all(late).unwrap();
    until(|| end.fence.pending_dial_count() == 1);
    end.fence().abort_before(6);
    assert_closed(link);
}

#[test]
fn a_replayed_first_message_displaces_no_honest_link() {
    let (one, two) = (endpoint(1), endpoint(2));
    let (initiator, first) = Initiator::new(&hello(), &secret());
    let mut honest = dial_with(&two, &first);
    let (_, confirmation) = initiator.finish(&answer(&mut honest)).unwrap();
    honest.write_all(&confirmation).unwrap();
    until(|| two.fence.pending_dial_count() == 1);
    // An attacker has recorded everything, and sends it again: at once, and with the answer.
    let mut replayed = dial_with(&two, &first);
    replayed.write_all(&confirmation).unwrap();
    let mut answered = dial_with(&two, &first);
    answer(&mut answered);
    answer(&mut replayed);
    assert_closed(replayed);
    assert_eq!(two.fence.pending_dial_count(), 1);
    answered.write_all(&confirmation).unwrap();
    assert_closed(answered);
    // The honest link is the one that the group gets.
    let members = vec![member(&one), member(&two)];
    let group = GroupSpec { generation: 5, members };
    let registration = two.fence.register(group.generation).unwrap();
    let link = registration.take(1, Purpose::Ring).expect("the honest dial is still pending");
    assert_eq!(link.socket().peer_addr().unwrap(), honest.local_addr().unwrap());
}

#[test]
fn a_replayed_state_request_is_neither_served_nor_takes_the_place_of_the_joiner() {
    let donor = endpoint(2);
    donor.joiners().name([1]);
    let state = Hello { purpose: Purpose::State, generation: 0, ..hello() };
    let (initiator, first) = Initiator::new(&state, &secret());
    let mut honest = dial_with(&donor, &first);
    let (_, confirmation) = initiator.finish(&answer(&mut honest)).unwrap();
    honest.write_all(&confirmation).unwrap();
    let mut replayed = dial_with(&donor, &first);
    replayed.write_all(&confirmation).unwrap();
    answer(&mut replayed);
    assert_closed(replayed);
    let _honest = wait_for(|| donor.next_state_request());
    assert!(donor.next_state_request().is_none(), "the replay is served");
}

#[test]
fn a_request_waits_until_its_joiner_is_named() {
    let (donor, joiner) = (endpoint(2), endpoint(1));
    let fetch = || joiner.fetch(member(&donor), WATCHDOG, WATCHDOG, None).unwrap();
    let mut receiver = fetch();
    donor.joiners().name([3, 4]);
    // The second request is served, so the first one has been looked at.
    let other = endpoint(3);
    let _other = other.fetch(member(&donor), WATCHDOG, WATCHDOG, None).unwrap();
    assert_eq!(wait_for(|| donor.next_state_request()).member(), 3);
    assert!(donor.next_state_request().is_none(), "a worker that is not named is served");
    donor.joiners().name([1]);
    assert_eq!(donor.next_state_request().unwrap().member(), 1);
    // A joiner that is not named in time is refused.
    drop(receiver);
    donor.joiners().name([]);
    receiver = fetch();
    wait_for(|| donor.pending_requests.expire(Duration::ZERO));
    donor.pending_requests.expire(WATCHDOG);
    let error = receiver.next(WATCHDOG).unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset),
        "{error:?}"
    );
}

#[test]
fn a_peer_without_the_secret_is_refused_by_the_dialling_side() {
    let end = endpoint(1);
    // It repeats an honest worker's answer, it answers with bytes of its own, and it has another
    // secret.
    let honest = endpoint(2);
    let (_, first) = Initiator::new(&hello(), &secret());
    let recorded = answer(&mut dial_with(&honest, &first));
    for answer in [recorded, [7; ANSWER_BYTES]] {
        let listener = TcpListener::bind((LOOPBACK, 0)).unwrap();
        let impostor = Member { id: 2, address: listener.local_addr().unwrap() };
        let group = GroupSpec { generation: 5, members: vec![member(&end), impostor] };
        let answering = thread::spawn(move || {
            let mut links = Vec::new();
            for _ in 0..2 {
                let (mut link, _) = listener.accept().unwrap();
                link.read_exact(&mut [0; FIRST_BYTES]).unwrap();
                link.write_all(&answer).unwrap();
                links.push(link);
            }
            links
        });
        let error = end.connect(&group, WATCHDOG).unwrap_err();
        assert!(
            matches!(error, CollectiveError::Unauthenticated { rank: 1, member: 2 }),
            "{error:?}"
        );
        assert!(error.to_string().contains("worker 2"), "{error}");
        let error = end.fetch(impostor, WATCHDOG, WATCHDOG, None).unwrap_err();
        assert!(matches!(error, FetchError::Unauthenticated { member: 2 }), "{error:?}");
        // It has received nothing but the two hellos.
        for mut link in answering.join().unwrap() {
            assert_eq!(link.read(&mut [0]).unwrap(), 0);
        }
    }
    let other = endpoint_of(EndpointOptions { secret: Secret::new("guess"), ..options(2) });
    let group = GroupSpec { generation: 6, members: vec![member(&end), member(&other)] };
    let error = end.connect(&group, WATCHDOG).unwrap_err();
    assert_eq!(error.member(), Some(2), "{error:?}");
}

#[test]
fn an_answer_that_does_not_come_is_a_stall_at_the_next_member() {
    let listener = TcpListener::bind((LOOPBACK, 0)).unwrap();
    let silent = Member { id: 2, address: listener.local_addr().unwrap() };
    let end = endpoint(1);
    let (progress, fence) = (end.progress(), end.fence());
    let group = GroupSpec { generation: 5, members: vec![member(&end), silent] };
    thread::scope(|scope| {
        let connecting = scope.spawn(|| end.connect(&group, WATCHDOG));
        until(|| progress.stall().is_some());
        let stall = progress.stall().unwrap();
        assert_eq!((stall.generation, stall.operation, stall.waits_for_next), (5, 0, true));
        fence.abort_before(6);
        let error = connecting.join().unwrap().unwrap_err();
        assert!(matches!(error, CollectiveError::Aborted { generation: 5 }), "{error:?}");
    });
    let limit = Duration::from_millis(20);
    let group = GroupSpec { generation: 7, ..group };
    let error = end.connect(&group, limit).unwrap_err();
    assert!(matches!(error, CollectiveError::Deadline { member: 2, .. }), "{error:?}");
    let error = end.fetch(silent, limit, WATCHDOG, None).unwrap_err();
    assert!(matches!(error, FetchError::Deadline { member: 2, .. }), "{error:?}");
    assert_eq!(error.to_string(), "worker 2 did not answer within 20ms");
}

#[test]
fn a_link_that_is_not_encrypted_is_refused_where_encryption_is_required() {
    let end = endpoint_of(EndpointOptions { link_encryption: LinkEncryption::On, ..options(2) });
    for protection in [Protection::None, Protection::Digests] {
        assert_refused(&end, &Hello { protection, ..hello() }, &secret());
    }
    assert_eq!(end.fence.pending_dial_count(), 0);
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
    endpoint_of(options(own_id))
}

fn endpoint_of(options: EndpointOptions) -> Endpoint {
    Endpoint::bind(LOOPBACK, options).unwrap()
}

fn options(own_id: u64) -> EndpointOptions {
    EndpointOptions::new("job", own_id, secret())
}

fn member(end: &Endpoint) -> Member {
    Member { id: end.identity.own_id, address: end.address() }
}

fn secret() -> Secret {
    Secret::new("secret")
}

/// Hello of worker 1 to worker 2, in generation 5.
fn hello() -> Hello {
    Hello {
        purpose: Purpose::Ring,
        job: JobDigest::of("job"),
        generation: 5,
        from: 1,
        to: 2,
        protection: Protection::Encryption,
    }
}

/// Dials, and sends bytes in place of the first message.
fn dial_with(end: &Endpoint, bytes: &[u8]) -> TcpStream {
    let mut link = TcpStream::connect(end.address()).unwrap();
    link.set_read_timeout(Some(WATCHDOG)).unwrap();
    link.write_all(bytes).unwrap();
    link
}

fn answer(link: &mut TcpStream) -> [u8; ANSWER_BYTES] {
    let mut answer = [0; ANSWER_BYTES];
    link.read_exact(&mut answer).unwrap();
    answer
}

/// Dials with `hello`, goes on if it is answered, and expects the acceptor to close the link.
fn assert_refused(end: &Endpoint, hello: &Hello, secret: &Secret) {
    let (initiator, first) = Initiator::new(hello, secret);
    let mut link = dial_with(end, &first);
    let mut answer = [0; ANSWER_BYTES];
    if link.read_exact(&mut answer).is_ok() {
        let (_, confirmation) = initiator.finish(&answer).unwrap();
        link.write_all(&confirmation).unwrap();
    }
    assert_closed(link);
}

fn assert_closed(mut link: TcpStream) {
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

fn wait_for<T>(poll: impl Fn() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(value) = poll() {
            return value;
        }
        assert!(started.elapsed() < WATCHDOG, "nothing ever comes");
        thread::yield_now();
    }
}
