//! State transfer over real sockets: what a donor sends arrives, and who is silent or speaks nonsense is given up.

use std::io::{ErrorKind, Write};
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::time::{Duration, Instant};

use elasticdl_collective::{Endpoint, Member, Secret, StateReceiver, StateSender, Visitor};

/// Far beyond what anything here takes; only a hang gets there.
const WATCHDOG: Duration = Duration::from_secs(60);

fn endpoint(id: u64) -> Endpoint {
    Endpoint::bind(IpAddr::V4(Ipv4Addr::LOCALHOST), "job", id, Secret::new("open sesame"))
        .expect("loopback has free ports")
}

fn visit(donor: &Endpoint, newcomer: &Endpoint, patience: Duration) -> (Visitor, StateReceiver) {
    let receiver = newcomer
        .fetch(Member { id: 1, address: donor.address() }, WATCHDOG, patience)
        .expect("the donor listens");
    let until = Instant::now() + WATCHDOG;
    loop {
        if let Some(visitor) = donor.visitor() {
            return (visitor, receiver);
        }
        assert!(Instant::now() < until, "the visitor never shows up");
        std::thread::yield_now();
    }
}

fn pair(patience: Duration) -> (StateSender, StateReceiver, (Endpoint, Endpoint)) {
    let (donor, newcomer) = (endpoint(1), endpoint(2));
    let (visitor, receiver) = visit(&donor, &newcomer, patience);
    assert_eq!((visitor.member(), receiver.donor()), (2, 1));
    (visitor.serve(patience), receiver, (donor, newcomer))
}

#[test]
fn parcels_arrive_as_they_were_sent() {
    let (mut sender, mut receiver, _ends) = pair(WATCHDOG);
    // More than the sockets hold.
    let big: Vec<f32> = (0..3_000_000).map(|i| i as f32).collect();
    let note = vec![7; 2 << 20];
    let sending = std::thread::spawn({
        let (big, note) = (big.clone(), note.clone());
        move || {
            sender.send(1, 5, &note, &[&big, &[1.5, 2.5]]).unwrap();
            sender.beat().unwrap();
            sender.send(2, 6, &[], &[]).unwrap();
        }
    });
    let head = receiver.next(WATCHDOG).unwrap().unwrap();
    assert_eq!((head.kind, head.generation, head.floats), (1, 5, 3_000_002));
    assert!(head.note == note);
    let (mut first, mut second) = (vec![0.0; big.len()], [0.0; 2]);
    receiver.take(&mut first).unwrap();
    receiver.take(&mut second).unwrap();
    assert!(first == big);
    assert_eq!(second, [1.5, 2.5]);
    let head = receiver.next(WATCHDOG).unwrap().unwrap();
    assert_eq!((head.kind, head.generation, head.note.len(), head.floats), (2, 6, 0, 0));
    sending.join().unwrap();
    assert_eq!(receiver.next(WATCHDOG).unwrap_err().kind(), ErrorKind::UnexpectedEof);
}

#[test]
fn what_is_not_taken_or_not_there_is_an_error() {
    let (mut sender, mut receiver, _ends) = pair(WATCHDOG);
    sender.send(1, 5, &[], &[&[1.0, 2.0]]).unwrap();
    receiver.next(WATCHDOG).unwrap().unwrap();
    assert_eq!(receiver.next(WATCHDOG).unwrap_err().kind(), ErrorKind::InvalidData);
    let error = receiver.take(&mut [0.0; 3]).unwrap_err();
    assert!(error.to_string().contains("1 floats too few"), "{error}");
}

#[test]
fn a_donor_that_has_not_begun_is_waited_for_and_one_that_falls_silent_is_given_up() {
    let (mut sender, mut receiver, _ends) = pair(Duration::from_millis(30));
    // Longer than the patience, before the first byte.
    assert_eq!(receiver.next(Duration::from_millis(60)).unwrap(), None);
    sender.beat().unwrap();
    let error = loop {
        match receiver.next(Duration::from_millis(5)) {
            Ok(next) => assert_eq!(next, None),
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::TimedOut);
}

#[test]
fn a_newcomer_that_takes_nothing_is_given_up() {
    let (mut sender, _receiver, _ends) = pair(Duration::from_millis(30));
    let big = vec![0.0; 4 << 20];
    assert_eq!(sender.send(1, 1, &[], &[&big]).unwrap_err().kind(), ErrorKind::TimedOut);
}

#[test]
fn the_end_of_everything_ends_a_fetch() {
    let (_sender, mut receiver, (_, newcomer)) = pair(WATCHDOG);
    newcomer.fence().abort_before(9);
    assert_eq!(receiver.next(Duration::from_millis(1)).unwrap(), None);
    newcomer.fence().abort_before(u64::MAX);
    assert_eq!(receiver.next(WATCHDOG).unwrap_err().kind(), ErrorKind::UnexpectedEof);
}

#[test]
fn nonsense_is_refused_and_takes_no_memory() {
    let magic = *b"EDLP";
    let long = |value: u64| value.to_le_bytes();
    let head = |kind: u32, note: u64, floats: u64| {
        [&magic[..], &kind.to_le_bytes(), &long(1), &long(note), &long(floats)].concat()
    };
    for nonsense in [vec![b'x'; 32], head(1, u64::MAX, 0), head(1, (64 << 20) + 1, 0), head(0, 0, 1)] {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let newcomer = endpoint(2);
        let donor = Member { id: 1, address: listener.local_addr().unwrap() };
        let mut receiver = newcomer.fetch(donor, WATCHDOG, WATCHDOG).unwrap();
        listener.accept().unwrap().0.write_all(&nonsense).unwrap();
        assert_eq!(receiver.next(WATCHDOG).unwrap_err().kind(), ErrorKind::InvalidData);
    }
}

#[test]
fn who_does_not_know_the_secret_gets_nothing() {
    let donor = endpoint(1);
    let stranger =
        Endpoint::bind(IpAddr::V4(Ipv4Addr::LOCALHOST), "job", 2, Secret::new("open barley")).unwrap();
    let mut receiver =
        stranger.fetch(Member { id: 1, address: donor.address() }, WATCHDOG, WATCHDOG).unwrap();
    assert!(receiver.next(WATCHDOG).is_err());
    assert!(donor.visitor().is_none());
}
