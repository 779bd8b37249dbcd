use std::io::{Read, Write};
use std::net::Ipv4Addr;
use std::thread;

use crate::group::host_group::tests::{GENERATION, TestRank, WATCHDOG, one_of_two, options, watch};
use crate::net::frame::{FRAME_BYTES, Frame, Kind};
use crate::{
    CollectiveError, Communicator, Endpoint, EndpointOptions, GroupSpec, HostGroup, Member,
    PAYLOAD_BYTES_MAX, Transport,
};

/// Header of rank 1's payload for rank 0.
fn header(bytes: u32) -> Frame {
    Frame {
        kind: Kind::Exchange,
        generation: GENERATION,
        sequence: 0,
        step: 0,
        segment: 0,
        origin: 1,
        note_bytes: bytes,
        total_bytes: 0,
        body_bytes: 0,
    }
}

#[test]
fn an_impossible_length_is_refused() {
    for bytes in [PAYLOAD_BYTES_MAX as u32 + 1, u32::MAX] {
        let TestRank { mut ring, mut to_ring, mut from_ring, .. } = one_of_two();
        to_ring.write_all(&header(bytes).encode()).unwrap();
        let error = ring.exchange(&[b"", b"payload"], &mut Vec::new()).unwrap_err();
        let CollectiveError::Protocol { rank: 1, member: 11, reason } = error else {
            panic!("{error:?}");
        };
        assert_eq!(reason, format!("expected a payload of at most 1073741824 bytes, got {bytes}"));
        from_ring.read_exact(&mut [0; FRAME_BYTES + 7]).unwrap();
        assert_eq!(from_ring.read(&mut [0]).unwrap(), 0, "the links are closed");
    }
}

#[test]
fn a_length_alone_allocates_little() {
    let TestRank { mut ring, mut to_ring, .. } = one_of_two();
    to_ring.write_all(&header(PAYLOAD_BYTES_MAX as u32).encode()).unwrap();
    to_ring.write_all(&[0; 10_000]).unwrap();
    drop(to_ring);
    let mut received = Vec::new();
    let error = ring.exchange(&[b"", b""], &mut received).unwrap_err();
    assert!(matches!(error, CollectiveError::PeerLost { rank: 1, member: 11, .. }), "{error:?}");
    assert!(received[1].capacity() <= 4 << 20, "{}", received[1].capacity());
}

#[test]
fn a_flipped_bit_in_the_header_of_a_payload_is_an_error_and_never_a_panic() {
    for bit in 0..FRAME_BYTES * 8 {
        let TestRank { mut ring, mut to_ring, .. } = one_of_two();
        let mut bytes = [&header(3).encode()[..], b"you"].concat();
        bytes[bit / 8] ^= 1 << (bit % 8);
        to_ring.write_all(&bytes).unwrap();
        drop(to_ring);
        // A shorter payload is as valid as a longer one that does not arrive.
        match ring.exchange(&[b"", b"me"], &mut Vec::new()) {
            Ok(()) => assert!((288..290).contains(&bit), "bit {bit}"),
            Err(CollectiveError::Protocol { rank: 1, .. } | CollectiveError::PeerLost { .. }) => {}
            Err(error) => panic!("bit {bit}: {error:?}"),
        }
    }
}

#[test]
fn links_between_pairs_are_built_by_the_first_exchange() {
    let ends = [0, 1, 2, 3, 4].map(|id| {
        let options = EndpointOptions { transport: Transport::Tcp, ..options(id) };
        let end = Endpoint::bind(Ipv4Addr::LOCALHOST.into(), options).unwrap();
        watch(end.fence());
        end
    });
    let members = (0..).zip(&ends).map(|(id, end)| Member { id, address: end.address() }).collect();
    let group = GroupSpec { generation: GENERATION, members };
    thread::scope(|scope| {
        for end in &ends {
            let group = &group;
            scope.spawn(move || {
                let mut ring = end.connect(group, WATCHDOG).unwrap();
                let count = |ring: &HostGroup| ring.further_links();
                ring.all_reduce(&[], &[1.0; 100_000], &mut [0.0; 100_000]).unwrap();
                assert_eq!((count(&ring), end.fence().pending_dial_count()), (0, 0));
                for _ in 0..2 {
                    ring.exchange(&[&b"payload"[..]; 5], &mut Vec::new()).unwrap();
                    assert_eq!(count(&ring), 2, "the other ranks are neighbours");
                }
            });
        }
    });
}
