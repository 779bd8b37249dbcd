//! Groups of real endpoints over loopback, one thread per rank.

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpListener, TcpStream};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use elasticdl_collective::{
    CollectiveError, Communicator, Endpoint, EndpointOptions, GroupSpec, HostGroup, Member, Secret,
    Transport, WireDtype,
};

const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// Limit that only a hang reaches.
const WATCHDOG: Duration = Duration::from_secs(60);

#[test]
fn an_all_reduce_gives_every_rank_the_same_bits_and_all_headers() {
    for world in 1..=5 {
        let mut rings = form(&endpoints(world), 1);
        for len in [0, 1, 2, 3, 7, 97, 65_537, 262_147, 1_000_000] {
            let results = on_all(&mut rings, move |ring| {
                let src = numbers(ring.rank() as u64, len);
                let mut dst = vec![f32::NAN; len];
                let headers = ring.all_reduce(&header(ring.rank()), &src, &mut dst).unwrap();
                assert_eq!(src, numbers(ring.rank() as u64, len));
                (headers, dst)
            });
            let parts: Vec<_> = (0..world).map(|rank| numbers(rank as u64, len)).collect();
            let headers: Vec<_> = (0..world).map(header).collect();
            for (rank, (got_headers, sums)) in results.iter().enumerate() {
                assert_eq!(got_headers, &headers, "rank {rank} of {world}, len {len}");
                assert!(sums.iter().zip(&results[0].1).all(|(a, b)| a.to_bits() == b.to_bits()));
            }
            for (index, sum) in results[0].1.iter().enumerate() {
                let exact: f64 = parts.iter().map(|part| f64::from(part[index])).sum();
                assert!(
                    (f64::from(*sum) - exact).abs() <= 1e-3,
                    "world {world}, len {len}, at {index}"
                );
            }
        }
    }
}

#[test]
fn sums_with_a_16_bit_wire_type_are_identical_everywhere_within_rounding_error() {
    // Largest relative error of one rounding.
    for (wire, unit) in [(WireDtype::Bf16, 1.0 / 256.0), (WireDtype::F16, 1.0 / 2048.0)] {
        for world in 1..=6 {
            // Sums of up to this length are sent without conversion.
            let chain_len_max = if world < 6 { 8192 } else { 16_384 };
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
                    world > 1 && len > chain_len_max,
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
fn any_sequence_of_operations_is_correct() {
    for seed in 0..12_u64 {
        let world = 1 + seed as usize % 5;
        let mut rings = form(&endpoints(world), seed);
        on_all(&mut rings, move |ring| {
            let mut random = Splitmix(seed);
            for step in 0..30 {
                let (rank, context) = (ring.rank(), format!("seed {seed}, step {step}"));
                let bytes = |rank: usize, len: usize| vec![(rank * 31 + len + step) as u8; len];
                let root = random.below(world);
                let lens: Vec<_> = (0..world).map(|_| random.below(3000)).collect();
                match random.below(4) {
                    0 => {
                        let all: Vec<_> = (0..world).map(|rank| bytes(rank, lens[rank])).collect();
                        assert_eq!(ring.all_gather(&all[rank]).unwrap(), all, "{context}");
                    }
                    1 => {
                        let src = vec![rank as f32; lens[0]];
                        let mut dst = vec![0.0; lens[0]];
                        let all: Vec<_> = (0..world).map(|rank| bytes(rank, lens[rank])).collect();
                        assert_eq!(
                            ring.all_reduce(&all[rank], &src, &mut dst).unwrap(),
                            all,
                            "{context}"
                        );
                        let sum = (world * (world - 1) / 2) as f32;
                        assert_eq!(dst, vec![sum; lens[0]], "{context}");
                    }
                    2 => {
                        // The length on the root does not depend on the length on other ranks.
                        let mut got = bytes(rank, lens[rank] * 200);
                        ring.broadcast_bytes(root, &mut got).unwrap();
                        assert!(got == bytes(root, lens[root] * 200), "{context}");
                    }
                    _ => {
                        let mut buf = numbers(rank as u64, lens[0]);
                        ring.broadcast(root, &mut buf).unwrap();
                        assert_eq!(buf, numbers(root as u64, lens[0]), "{context}");
                    }
                }
            }
        });
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
fn a_group_of_one_works_without_links() {
    let mut ring = form(&endpoints(1), 9).remove(0);
    assert_eq!((ring.rank(), ring.world_size(), ring.generation()), (0, 1, 9));
    let mut dst = [0.0; 2];
    assert_eq!(ring.all_reduce(b"h", &[1.0, 2.0], &mut dst).unwrap(), [b"h"]);
    assert_eq!(dst, [1.0, 2.0]);
    assert_eq!(ring.all_gather(b"x").unwrap(), [b"x"]);
    let (mut bytes, mut floats) = (b"abc".to_vec(), [3.0]);
    ring.broadcast_bytes(0, &mut bytes).unwrap();
    ring.broadcast(0, &mut floats).unwrap();
    assert_eq!((bytes.as_slice(), floats), (b"abc".as_slice(), [3.0]));
}

#[test]
fn a_lost_rank_fails_the_operation_of_all_others_and_ends_their_groups() {
    for world in 2..=5 {
        for victim in 0..world {
            for len in [0, 1, 300_000] {
                let mut rings = form(&endpoints(world), 1);
                let lost = rings.remove(victim);
                let (entered, entries) = mpsc::channel();
                let dropper = thread::spawn(move || {
                    // All other ranks are about to enter the operation when the victim leaves.
                    (1..world).for_each(|_| entries.recv_timeout(WATCHDOG).unwrap());
                    drop(lost);
                });
                on_all(&mut rings, move |ring| {
                    let src = numbers(1, len);
                    let mut dst = vec![0.0; len];
                    entered.send(()).unwrap();
                    let error = ring.all_reduce(b"", &src, &mut dst).unwrap_err();
                    assert!(matches!(error, CollectiveError::PeerLost { .. }), "{error:?}");
                    assert_eq!(src, numbers(1, len));
                    let again = ring.all_gather(b"").unwrap_err();
                    assert!(
                        matches!(again, CollectiveError::Aborted { generation: 1 }),
                        "{again:?}"
                    );
                });
                dropper.join().unwrap();
            }
        }
    }
}

#[test]
fn ranks_that_leave_after_an_operation_do_not_fail_the_others() {
    for round in 0..20 {
        for world in 2..=5 {
            let rings = form(&endpoints(world), 1);
            let sums = on_each(rings, move |mut ring| {
                let src = vec![1.0; 10_007];
                let mut dst = vec![0.0; src.len()];
                ring.all_reduce(b"last", &src, &mut dst).map(|_| dst)
            });
            for sum in sums {
                assert!(sum.unwrap() == vec![world as f32; 10_007], "round {round}, world {world}");
            }
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
fn peers_that_disagree_on_the_length_both_get_a_protocol_error() {
    for lens in [[3, 4], [0, 1], [1_000_000, 999_999]] {
        let mut rings = form(&endpoints(2), 1);
        on_all(&mut rings, move |ring| {
            let len = lens[ring.rank()];
            let error = ring.all_reduce(b"", &vec![1.0; len], &mut vec![0.0; len]).unwrap_err();
            let CollectiveError::Protocol { rank, member, reason } = error else {
                panic!("{error:?}");
            };
            assert_eq!((rank, member), (1 - ring.rank(), 101 - ring.rank() as u64));
            assert!(reason.contains("buffer length"), "{reason}");
        });
    }
}

#[test]
fn a_mismatched_rank_is_named_and_fails_every_rank() {
    for (world, len) in (3..=5).flat_map(|world| [5, 8191, 20_000].map(|len| (world, len))) {
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
fn peers_in_different_operations_get_a_protocol_error() {
    let mut rings = form(&endpoints(2), 1);
    on_all(&mut rings, move |ring| {
        let error = match ring.rank() {
            0 => ring.all_gather(b"").unwrap_err(),
            _ => ring.all_reduce(b"", &[1.0], &mut [0.0]).unwrap_err(),
        };
        assert!(matches!(error, CollectiveError::Protocol { .. }), "{error:?}");
    });
}

#[test]
fn an_invalid_call_sends_nothing_and_leaves_the_group_unchanged() {
    let mut rings = form(&endpoints(2), 1);
    let is_invalid = |result| matches!(result, Err(CollectiveError::Invalid(_)));
    on_all(&mut rings, move |ring| {
        assert!(is_invalid(ring.all_reduce(b"", &[1.0], &mut []).map(drop)));
        assert!(is_invalid(ring.broadcast(2, &mut [])));
        assert!(is_invalid(ring.broadcast_bytes(7, &mut Vec::new())));
        assert!(is_invalid(ring.all_gather(&vec![0; (16 << 20) + 1]).map(drop)));
        assert_eq!(ring.all_gather(b"still here").unwrap(), [b"still here"; 2]);
    });
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
    let mut random = Splitmix(7);
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

/// Runs `act` on every rank concurrently.
fn on_all<T: Send + 'static>(
    rings: &mut Vec<HostGroup>,
    act: impl Fn(&mut HostGroup) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let both = on_each(std::mem::take(rings), move |mut ring| {
        let result = act(&mut ring);
        (ring, result)
    });
    both.into_iter()
        .map(|(ring, result)| {
            rings.push(ring);
            result
        })
        .collect()
}

/// Runs each item on its own thread. A panic drops its group and so ends the others; a hang fails
/// the test.
fn on_each<S: Send + 'static, T: Send + 'static>(
    items: Vec<S>,
    act: impl Fn(S) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let act = Arc::new(act);
    let (done, results) = mpsc::channel();
    let count = items.len();
    for (index, item) in items.into_iter().enumerate() {
        let (done, act) = (done.clone(), act.clone());
        thread::spawn(move || {
            let result = act(item);
            drop(act);
            done.send((index, result))
        });
    }
    drop(done);
    let mut all: Vec<_> = (0..count)
        .map(|_| results.recv_timeout(WATCHDOG).expect("no rank hangs or panics"))
        .collect();
    all.sort_by_key(|(index, _)| *index);
    all.into_iter().map(|(_, result)| result).collect()
}

fn header(rank: usize) -> Vec<u8> {
    vec![rank as u8; rank * 1000]
}

fn numbers(seed: u64, len: usize) -> Vec<f32> {
    let mut random = Splitmix(seed);
    (0..len).map(|_| random.below(1 << 20) as f32 / 1024.0 - 512.0 + 1e-5).collect()
}

/// Sebastiano Vigna's splitmix64.
struct Splitmix(u64);

impl Splitmix {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % bound as u64) as usize
    }
}
