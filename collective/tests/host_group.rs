//! Groups of real endpoints over loopback, one thread per rank.

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use elasticdl_collective::testing::conformance::{Random, on_all, on_each};
use elasticdl_collective::{
    CollectiveError, Communicator, Endpoint, EndpointOptions, GroupSpec, HostGroup, Member, Secret,
    Transport, WireDtype,
};

const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// Limit that only a hang reaches.
const WATCHDOG: Duration = Duration::from_secs(60);

#[test]
fn sums_are_identical_everywhere_within_the_rounding_error_of_their_wire_type() {
    // Largest relative error of one rounding.
    let units =
        [(WireDtype::F32, 0.0), (WireDtype::Bf16, 1.0 / 256.0), (WireDtype::F16, 1.0 / 2048.0)];
    for (wire, unit) in units {
        for world in 1..=6 {
            // Sums of up to this length are sent without conversion.
            let chain_len_max = if world == 2 { 32_768 } else { 16_384 };
            let mut rings = form(&endpoints_with(world, wire), 1);
            for len in [0, 1, chain_len_max, chain_len_max + 1, 65_537, 300_007] {
                let results = on_all(&mut rings, move |ring| {
                    let src = numbers(ring.rank() as u64, len);
                    let mut dst = vec![f32::NAN; len];
                    ring.all_reduce(&[], &src, &mut dst).unwrap();
                    assert_eq!(src, numbers(ring.rank() as u64, len));
                    dst
                });
                let parts: Vec<_> = (0..world).map(|rank| numbers(rank as u64, len)).collect();
                for (index, sum) in results[0].iter().enumerate() {
                    assert!(results.iter().all(|sums| sums[index].to_bits() == sum.to_bits()));
                    let exact: f64 = parts.iter().map(|part| f64::from(part[index])).sum();
                    let largest: f64 = parts.iter().map(|part| f64::from(part[index].abs())).sum();
                    let off = (f64::from(*sum) - exact).abs();
                    assert!(
                        off <= world as f64 * unit * largest + 1e-3,
                        "{wire:?}, {world}: {sum} for {exact}"
                    );
                }
                // The elements are in fact rounded: not all elements of a large sum can be exact.
                let exact = |index: usize| parts.iter().map(|part| part[index]).sum::<f32>();
                let is_rounded =
                    (0..len).any(|index| (results[0][index] - exact(index)).abs() > 1e-2);
                assert_eq!(
                    is_rounded,
                    unit > 0.0 && world > 1 && len > chain_len_max,
                    "{wire:?}, world {world}, len {len}"
                );
            }
        }
    }
}

#[test]
fn members_with_different_wire_types_get_a_protocol_error() {
    let bind = |id, wire| {
        let options = EndpointOptions { wire_dtype: wire, ..options(id) };
        (id, Arc::new(Endpoint::bind(LOOPBACK, options).unwrap()))
    };
    for len in [1, 100_000] {
        let mut rings = form(&[bind(100, WireDtype::F32), bind(101, WireDtype::Bf16)], 1);
        let errors = on_all(&mut rings, move |ring| {
            ring.all_reduce(&[], &vec![1.0; len], &mut vec![0.0; len]).unwrap_err()
        });
        assert!(errors.iter().all(|e| matches!(e, CollectiveError::Protocol { .. })), "{errors:?}");
    }
}

#[test]
fn broadcasts_reach_all_from_every_root_at_every_length() {
    let world = 3;
    let mut rings = form(&endpoints(world), 1);
    let segment = 256 << 10;
    for len in [0, 1, segment - 1, segment, segment + 1, 3 * segment + 5, 5_000_000] {
        for root in 0..world {
            let got = on_all(&mut rings, move |ring| {
                let mine = if ring.rank() == root { len } else { 10 };
                let mut bytes: Vec<u8> = (0..mine).map(|at| (at / 7 + ring.rank()) as u8).collect();
                ring.broadcast_bytes(root, &mut bytes).unwrap();
                bytes
            });
            let expected: Vec<u8> = (0..len).map(|at| (at / 7 + root) as u8).collect();
            assert!(got.iter().all(|got| got == &expected), "root {root}, len {len}");
        }
    }
}

#[test]
fn data_of_a_root_arrives_after_the_root_is_gone() {
    let bytes: Vec<u8> = (0..100_000).map(|at| (at % 251) as u8).collect();
    let mut ends = endpoints(2);
    let mut rings = form(&ends, 1);
    let mut root = rings.remove(0);
    root.broadcast_bytes(0, &mut bytes.clone()).unwrap();
    drop((root, ends.remove(0)));
    let got = on_all(&mut rings, |ring| {
        let mut got = Vec::new();
        ring.broadcast_bytes(0, &mut got).map(|()| got)
    });
    assert!(got[0].as_ref().unwrap() == &bytes);
}

#[test]
fn a_mismatched_rank_is_named_and_fails_every_rank() {
    for (world, len) in
        [3, 4, 5, 19].into_iter().flat_map(|world| [5, 8191, 20_000].map(|len| (world, len)))
    {
        let mut rings = form(&endpoints(world), 1);
        let errors = on_all(&mut rings, move |ring| {
            let len = if ring.rank() == 1 { len } else { len + 2 };
            ring.all_reduce(b"", &vec![1.0; len], &mut vec![0.0; len]).unwrap_err()
        });
        // The mismatched rank and its neighbours name each other, whichever detects it first.
        let names = |reporter: usize, error: &CollectiveError| match error {
            CollectiveError::Protocol { rank, .. } => *rank == 1 || reporter == 1,
            _ => false,
        };
        let named = errors.iter().enumerate().any(|(reporter, error)| names(reporter, error));
        assert!(named, "{errors:?}");
    }
}

#[test]
fn a_large_group_sums_gathers_and_broadcasts_along_its_tree() {
    for world in [17, 22, 33] {
        let mut rings = form(&endpoints(world), 1);
        // Less than the scratch memory of a rank, more, and so much that the ring sums.
        for len in [0, 1, 1000, 130_000, 400_000] {
            let parts: Vec<_> = (0..world).map(|rank| numbers(rank as u64, len)).collect();
            let own = parts.clone();
            let header = |rank: usize| vec![rank as u8; rank * 7];
            let results = on_all(&mut rings, move |ring| {
                let (rank, mut sum) = (ring.rank(), vec![f32::NAN; len]);
                let headers = ring.all_reduce(&header(rank), &own[rank], &mut sum).unwrap();
                (headers, sum)
            });
            let bits = |sum: &[f32]| sum.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            for (headers, sum) in &results {
                assert!(headers.iter().enumerate().all(|(rank, got)| *got == header(rank)));
                assert!(bits(sum) == bits(&results[0].1), "world {world}, len {len}");
            }
            for at in (0..len).step_by(997) {
                let exact: f64 = parts.iter().map(|part| f64::from(part[at])).sum();
                assert!((f64::from(results[0].1[at]) - exact).abs() < 0.1, "element {at}");
            }
        }
        for (root, len) in [(0, 0), (5, 9), (world - 1, 700_000), (9, 262_144), (1, 262_145)] {
            let got = on_all(&mut rings, move |ring| {
                let mine = if ring.rank() == root { len } else { 10 };
                let mut bytes: Vec<u8> = (0..mine).map(|at| (at / 7 + ring.rank()) as u8).collect();
                ring.broadcast_bytes(root, &mut bytes).unwrap();
                let mut floats = vec![ring.rank() as f32; len / 4];
                ring.broadcast(root, &mut floats).unwrap();
                assert!(floats == vec![root as f32; len / 4]);
                bytes
            });
            let expected: Vec<u8> = (0..len).map(|at| (at / 7 + root) as u8).collect();
            assert!(got.iter().all(|got| got == &expected), "root {root}, len {len}");
        }
    }
}

#[test]
fn a_large_group_that_loses_a_rank_fails_everywhere_and_forms_again() {
    let mut ends = endpoints(20);
    for (generation, victim) in [(1, 10), (2, 0), (3, 17)] {
        let mut rings = form(&ends, generation);
        on_all(&mut rings, |ring| ring.all_gather(b"").unwrap());
        drop((rings.remove(victim), ends.remove(victim)));
        on_all(&mut rings, |ring| ring.all_reduce(b"", &[0.0; 100], &mut [0.0; 100]).unwrap_err());
        for (_, end) in &ends {
            end.fence().abort_before(generation + 1);
        }
    }
}

#[test]
fn an_invalid_group_is_refused() {
    let ends = endpoints(2);
    let connect =
        |members: Vec<Member>| ends[0].1.connect(&GroupSpec { generation: 1, members }, WATCHDOG);
    let members = spec(1, &ends).members;
    for group in [vec![], vec![members[1]], vec![members[0], members[0]]] {
        assert!(matches!(connect(group), Err(CollectiveError::Invalid(_))));
    }
    assert!(matches!(
        Endpoint::bind(LOOPBACK, EndpointOptions { secret: Secret::new(""), ..options(1) }),
        Err(CollectiveError::Invalid(_))
    ));
}

#[test]
fn unauthenticated_peers_neither_block_nor_join_a_group() {
    let ends = endpoints(3);
    let mut unauthenticated_peers = Vec::new();
    let mut random = Random(7);
    for (_, end) in &ends {
        for number in 0..150 {
            let mut unauthenticated_peer = TcpStream::connect(end.address()).unwrap();
            let noise: Vec<u8> = (0..random.below(300)).map(|_| random.below(256) as u8).collect();
            if number % 2 == 0 {
                // The acceptor may close the connection during the write.
                let _ = unauthenticated_peer.write_all(&noise);
            }
            unauthenticated_peers.push(unauthenticated_peer);
        }
    }
    let mut rings = form(&ends, 1);
    on_all(&mut rings, move |ring| assert_eq!(ring.all_gather(b"").unwrap(), vec![b""; 3]));
    drop(unauthenticated_peers);
}

#[test]
fn a_peer_with_another_secret_or_job_is_refused() {
    for (job, secret) in [("job", "wrong"), ("jobs", "secret")] {
        let valid = Endpoint::bind(LOOPBACK, options(100)).unwrap();
        let other = EndpointOptions::new(job, 101, Secret::new(secret));
        let other = Endpoint::bind(LOOPBACK, other).unwrap();
        let peers = vec![(100, Arc::new(valid)), (101, Arc::new(other))];
        let group = spec(1, &peers);
        let errors = on_each(peers, move |(_, end)| end.connect(&group, WATCHDOG).map(drop));
        for error in errors {
            assert!(matches!(error, Err(CollectiveError::PeerLost { .. })), "{error:?}");
        }
    }
}

#[test]
fn an_older_generation_is_refused() {
    let ends = endpoints(2);
    let alone = GroupSpec { generation: 2, members: vec![spec(2, &ends).members[1]] };
    ends[1].1.connect(&alone, WATCHDOG).unwrap();
    let error = ends[0].1.connect(&spec(1, &ends), WATCHDOG).unwrap_err();
    assert!(matches!(error, CollectiveError::PeerLost { rank: 1, member: 101, .. }), "{error:?}");
    let error = ends[1].1.connect(&spec(1, &ends), WATCHDOG).unwrap_err();
    assert!(matches!(error, CollectiveError::Aborted { generation: 1 }), "{error:?}");
}

#[test]
fn connect_gives_up_at_its_deadline() {
    let ends = endpoints(2);
    let error = ends[0].1.connect(&spec(1, &ends), Duration::from_millis(20)).unwrap_err();
    assert!(matches!(error, CollectiveError::Deadline { rank: 1, member: 101, .. }), "{error:?}");
}

#[test]
fn a_dead_peer_is_lost_at_once() {
    let mut ends = endpoints(2);
    let group = spec(1, &ends);
    drop(ends.pop());
    let error = ends[0].1.connect(&group, WATCHDOG).unwrap_err();
    assert!(matches!(error, CollectiveError::PeerLost { rank: 1, .. }), "{error:?}");
}

#[test]
fn a_bit_that_flips_on_the_way_is_found_on_links_with_digests() {
    for (world, len) in [(2, 1), (2, 30_000), (4, 1), (4, 30_000)] {
        let bind = |id| {
            let options = EndpointOptions { has_digests: true, ..options(id) };
            (id, Arc::new(Endpoint::bind(LOOPBACK, options).unwrap()))
        };
        let peers: Vec<Peer> = (100..).take(world).map(bind).collect();
        for generation in 1..=25 {
            // Of this generation: bytes of an earlier one may still be on their way.
            let flips = Arc::new(AtomicU64::new(0));
            let through_proxy = |(id, end): &Peer| Member {
                id: *id,
                address: flipping_proxy(end.address(), flips.clone()),
            };
            let members = peers.iter().map(through_proxy).collect();
            let group = GroupSpec { generation, members };
            let mut rings =
                on_each(peers.clone(), move |(_, end)| end.connect(&group, WATCHDOG).unwrap());
            let sum = move |ring: &mut HostGroup| {
                let src = vec![1.0 + ring.rank() as f32; len];
                let mut dst = vec![0.0; len];
                ring.all_reduce(&[], &src, &mut dst).map(|_| dst)
            };
            let expected = vec![(world * (world + 1) / 2) as f32; len];
            let sums = on_all(&mut rings, sum);
            assert!(sums.iter().all(|sum| sum.as_ref().unwrap() == &expected));
            flips.store(generation, Ordering::SeqCst);
            let (right, errors): (Vec<_>, Vec<_>) =
                on_all(&mut rings, sum).into_iter().partition(Result::is_ok);
            assert_eq!(flips.load(Ordering::SeqCst), 0, "a bit has flipped");
            assert!(right.iter().all(|sum| sum.as_ref().unwrap() == &expected), "{errors:?}");
            let is_told = |sum: &Result<_, CollectiveError>| {
                sum.as_ref().unwrap_err().to_string().contains("were changed on the way")
            };
            assert!(errors.iter().any(is_told), "{errors:?}");
        }
    }
}

/// Forwards all bytes to `to`, and flips a bit of the next ones when `seed` is not 0, which then
/// becomes 0. Its threads end with the connections.
fn flipping_proxy(to: SocketAddr, seed: Arc<AtomicU64>) -> SocketAddr {
    let listener = TcpListener::bind((LOOPBACK, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let forward = |mut from: TcpStream, mut to: TcpStream, seed: Arc<AtomicU64>| {
        thread::spawn(move || {
            let mut bytes = vec![0; 1 << 16];
            while let Ok(count @ 1..) = from.read(&mut bytes) {
                let mut random = Random(seed.swap(0, Ordering::SeqCst));
                if random.0 > 0 {
                    bytes[random.below(count)] ^= 1 << random.below(8);
                }
                if to.write_all(&bytes[..count]).is_err() {
                    break;
                }
            }
            let _ = to.shutdown(Shutdown::Write);
        })
    };
    thread::spawn(move || {
        for dialled in listener.incoming().flatten() {
            let Ok(accepted) = TcpStream::connect(to) else { continue };
            let copies = (dialled.try_clone().unwrap(), accepted.try_clone().unwrap());
            forward(dialled, accepted, seed.clone());
            forward(copies.1, copies.0, seed.clone());
        }
    });
    address
}

#[test]
fn the_fence_ends_a_connect_that_waits_for_the_previous_member() {
    let (me, end) = endpoints(1).remove(0);
    let silent = TcpListener::bind((LOOPBACK, 0)).unwrap();
    let silent_member = Member { id: 5, address: silent.local_addr().unwrap() };
    let members = vec![Member { id: me, address: end.address() }, silent_member];
    let group = GroupSpec { generation: 3, members };
    let fence = end.fence();
    let (done, result) = mpsc::channel();
    thread::spawn(move || done.send(end.connect(&group, WATCHDOG * 2).map(drop)));
    let (mut link, _) = silent.accept().unwrap();
    link.read_exact(&mut [0; 96]).unwrap();
    fence.abort_before(3);
    fence.abort_before(2);
    assert!(result.try_recv().is_err(), "generation 3 is not before 3");
    fence.abort_before(4);
    let error = result.recv_timeout(WATCHDOG).expect("the fence ends it");
    assert!(matches!(error, Err(CollectiveError::Aborted { generation: 3 })), "{error:?}");
}

#[test]
fn the_fence_ends_groups_of_older_generations_only() {
    let ends = endpoints(2);
    let mut old = form(&ends, 1);
    let mut new = form(&ends, 2);
    ends[0].1.fence().abort_before(2);
    let errors = on_all(&mut old, |ring| ring.all_gather(b"").unwrap_err());
    assert!(matches!(errors[0], CollectiveError::Aborted { generation: 1 }), "{errors:?}");
    assert!(matches!(errors[1], CollectiveError::PeerLost { rank: 0, .. }), "{errors:?}");
    on_all(&mut new, move |ring| assert_eq!(ring.all_gather(b"").unwrap(), [b"", b""]));
    let error = ends[0].1.connect(&spec(1, &ends), WATCHDOG).unwrap_err();
    assert!(matches!(error, CollectiveError::Aborted { generation: 1 }), "{error:?}");
}

#[test]
fn survivors_build_generation_after_generation_in_the_same_process() {
    let mut ends = endpoints(5);
    for generation in 1.. {
        let mut rings = form(&ends, generation);
        let world = ends.len();
        on_all(&mut rings, move |ring| assert_eq!(ring.all_gather(b"").unwrap().len(), world));
        if world == 1 {
            break;
        }
        let victim = generation as usize % world;
        drop((rings.remove(victim), ends.remove(victim)));
        on_all(&mut rings, move |ring| {
            ring.all_reduce(b"", &[0.0; 100], &mut [0.0; 100]).unwrap_err()
        });
        for (_, end) in &ends {
            end.fence().abort_before(generation + 1);
        }
    }
}

/// A worker's id and its endpoint.
type Peer = (u64, Arc<Endpoint>);

/// Endpoints of workers 100, 101, …
fn endpoints(world: usize) -> Vec<Peer> {
    endpoints_with(world, WireDtype::F32)
}

fn endpoints_with(world: usize, wire: WireDtype) -> Vec<Peer> {
    let bind = |id| {
        let options = EndpointOptions { wire_dtype: wire, ..options(id) };
        Endpoint::bind(LOOPBACK, options).expect("loopback has free ports")
    };
    (100..).take(world).map(|id| (id, Arc::new(bind(id)))).collect()
}

fn options(id: u64) -> EndpointOptions {
    let options = EndpointOptions::new("job", id, Secret::new("secret"));
    EndpointOptions { transport: Transport::Tcp, ..options }
}

fn spec(generation: u64, peers: &[Peer]) -> GroupSpec {
    let members =
        peers.iter().map(|(id, end)| Member { id: *id, address: end.address() }).collect();
    GroupSpec { generation, members }
}

fn form(peers: &[Peer], generation: u64) -> Vec<HostGroup> {
    let group = spec(generation, peers);
    on_each(peers.to_vec(), move |(_, end)| {
        end.connect(&group, WATCHDOG).expect("all members connect")
    })
}

fn numbers(seed: u64, len: usize) -> Vec<f32> {
    let mut random = Random(seed);
    (0..len).map(|_| random.below(1 << 20) as f32 / 1024.0 - 512.0 + 1e-5).collect()
}
