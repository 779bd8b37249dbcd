//! State transfer over real sockets: data arrives unchanged, and a silent or invalid peer is
//! dropped.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use elasticdl_collective::{
    Endpoint, EndpointOptions, FetchError, Member, Position, Secret, StateReceiver, StateRequest,
    StateSender,
};

/// Limit that only a hang reaches.
const WATCHDOG: Duration = Duration::from_secs(60);

fn endpoint(id: u64) -> Endpoint {
    endpoint_with(id, "open sesame")
}

fn endpoint_with(id: u64, secret: &str) -> Endpoint {
    let options = EndpointOptions::new("job", id, Secret::new(secret));
    Endpoint::bind(IpAddr::V4(Ipv4Addr::LOCALHOST), options).expect("loopback has free ports")
}

fn request_state(
    donor: &Endpoint,
    joiner: &Endpoint,
    idle_timeout: Duration,
) -> (StateRequest, StateReceiver) {
    donor.joiners().name([2]);
    let receiver = joiner
        .fetch(Member { id: 1, address: donor.address() }, WATCHDOG, idle_timeout, None)
        .expect("the donor listens");
    let until = Instant::now() + WATCHDOG;
    loop {
        if let Some(request) = donor.next_state_request() {
            return (request, receiver);
        }
        assert!(Instant::now() < until, "the visitor never shows up");
        std::thread::yield_now();
    }
}

fn pair(idle_timeout: Duration) -> (StateSender, StateReceiver, (Endpoint, Endpoint)) {
    pair_of(idle_timeout, idle_timeout)
}

/// Connects a donor and a joiner with separate idle timeouts. The joiner sends several positions
/// within its own.
fn pair_of(
    of_donor: Duration,
    of_joiner: Duration,
) -> (StateSender, StateReceiver, (Endpoint, Endpoint)) {
    let (donor, joiner) = (endpoint(1), endpoint(2));
    let (request, receiver) = request_state(&donor, &joiner, of_joiner);
    assert_eq!((request.member(), receiver.donor()), (2, 1));
    (request.serve(of_donor), receiver, (donor, joiner))
}

#[test]
fn messages_arrive_as_they_were_sent() {
    let (mut sender, mut receiver, _ends) = pair(WATCHDOG);
    // More data than the socket buffers hold.
    let big: Vec<f32> = (0..3_000_000).map(|i| i as f32).collect();
    let note = vec![7; 2 << 20];
    let sending = std::thread::spawn({
        let (big, note) = (big.clone(), note.clone());
        move || {
            sender.send(1, 5, &note, &[&big, &[1.5, 2.5]]).unwrap();
            sender.heartbeat().unwrap();
            sender.send(2, 6, &[], &[]).unwrap();
        }
    });
    let header = receiver.next(WATCHDOG).unwrap().unwrap();
    assert_eq!((header.kind, header.generation, header.floats), (1, 5, 3_000_002));
    assert!(header.note == note);
    let (mut first, mut second) = (vec![0.0; big.len()], [0.0; 2]);
    receiver.take(&mut first).unwrap();
    receiver.take(&mut second).unwrap();
    assert!(first == big);
    assert_eq!(second, [1.5, 2.5]);
    let header = receiver.next(WATCHDOG).unwrap().unwrap();
    assert_eq!((header.kind, header.generation, header.note.len(), header.floats), (2, 6, 0, 0));
    sending.join().unwrap();
    assert_eq!(receiver.next(WATCHDOG).unwrap_err().kind(), ErrorKind::UnexpectedEof);
}

#[test]
fn skipped_or_missing_floats_are_an_error() {
    let (mut sender, mut receiver, _ends) = pair(WATCHDOG);
    sender.send(1, 5, &[], &[&[1.0, 2.0]]).unwrap();
    receiver.next(WATCHDOG).unwrap().unwrap();
    assert_eq!(receiver.next(WATCHDOG).unwrap_err().kind(), ErrorKind::InvalidData);
    let error = receiver.take(&mut [0.0; 3]).unwrap_err();
    assert!(error.to_string().contains("1 floats too few"), "{error}");
}

#[test]
fn only_a_donor_that_falls_silent_after_the_first_byte_times_out() {
    let (mut sender, mut receiver, _ends) = pair(Duration::from_millis(30));
    // Longer than the idle timeout, before the first byte.
    assert_eq!(receiver.next(Duration::from_millis(60)).unwrap(), None);
    sender.heartbeat().unwrap();
    let error = loop {
        match receiver.next(Duration::from_millis(5)) {
            Ok(next) => assert_eq!(next, None),
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::TimedOut);
}

#[test]
fn a_joiner_that_neither_reads_nor_reports_times_out() {
    let (mut sender, _receiver, _ends) = pair_of(Duration::from_millis(30), WATCHDOG);
    let big = vec![0.0; 4 << 20];
    assert_eq!(sender.send(1, 1, &[], &[&big]).unwrap_err().kind(), ErrorKind::TimedOut);
}

#[test]
fn a_joiner_busy_for_longer_than_the_idle_timeout_gets_all_data() {
    // A busy machine may delay the joiner's reports, of which there are several in this time.
    let idle_timeout = Duration::from_secs(3);
    let (mut sender, mut receiver, _ends) = pair(idle_timeout);
    let big = vec![1.0; 4 << 20];
    let sending = std::thread::spawn({
        let big = big.clone();
        move || sender.send(1, 1, &[], &[&big])
    });
    receiver.next(WATCHDOG).unwrap().unwrap();
    // Simulates a slow digest or update; the link is full meanwhile.
    std::thread::sleep(idle_timeout + Duration::from_secs(1));
    let mut taken = vec![0.0; big.len()];
    receiver.take(&mut taken).unwrap();
    sending.join().unwrap().unwrap();
    assert!(taken == big);
}

#[test]
fn a_donor_receives_the_joiners_position() {
    let (donor, joiner) = (endpoint(1), endpoint(2));
    let (request, receiver) = request_state(&donor, &joiner, WATCHDOG);
    let mut sender = request.serve(WATCHDOG);
    assert_eq!(sender.first_position().unwrap(), None);
    let position = Position { snapshot: 7, floats: 64, step: 7 };
    receiver.report(position);
    let until = Instant::now() + WATCHDOG;
    while sender.position().unwrap() != Some(position) {
        assert!(Instant::now() < until, "the position never arrives");
        std::thread::yield_now();
    }
    drop(receiver);
    let at = Member { id: 1, address: donor.address() };
    let _receiver = joiner.fetch(at, WATCHDOG, WATCHDOG, Some(position)).unwrap();
    let request = loop {
        assert!(Instant::now() < until, "the visitor never shows up");
        if let Some(request) = donor.next_state_request() {
            break request;
        }
        std::thread::yield_now();
    };
    // The earlier link is closed.
    while sender.position().is_ok() {
        assert!(Instant::now() < until, "the link never ends");
        std::thread::yield_now();
    }
    let link = request.link();
    let mut sender = request.serve(WATCHDOG);
    assert_eq!(sender.first_position().unwrap(), Some(position));
    link.shut_down();
    assert!(sender.heartbeat().is_err());
}

#[test]
fn raising_the_fence_above_all_generations_ends_a_fetch() {
    let (_sender, mut receiver, (_, joiner)) = pair(WATCHDOG);
    joiner.fence().abort_before(9);
    assert_eq!(receiver.next(Duration::from_millis(1)).unwrap(), None);
    joiner.fence().abort_before(u64::MAX);
    assert_eq!(receiver.next(WATCHDOG).unwrap_err().kind(), ErrorKind::UnexpectedEof);
}

#[test]
fn a_joiner_without_the_secret_gets_nothing() {
    let donor = endpoint(1);
    let unauthenticated = endpoint_with(2, "open barley");
    donor.joiners().name([2]);
    let donor_member = Member { id: 1, address: donor.address() };
    let error = unauthenticated.fetch(donor_member, WATCHDOG, WATCHDOG, None).unwrap_err();
    assert!(matches!(error, FetchError::Lost { member: 1, .. }), "{error:?}");
    assert!(donor.next_state_request().is_none());
}
