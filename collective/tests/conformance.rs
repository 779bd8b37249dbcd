//! Runs the conformance suite on every backend.

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use elasticdl_collective::testing::LocalRank;
use elasticdl_collective::testing::conformance::{Group, Rank};
use elasticdl_collective::{
    Communicator, EncryptedLinks, Endpoint, EndpointOptions, GroupSpec, HostGroup, LinkEncryption,
    Member, Secret, Transport, WireDtype,
};

#[macro_use]
mod suite;

conforms!(in_process, true, local);
conforms!(shared_memory, true, |world| form(world, &|end| end));
conforms!(tcp, true, |world| form(world, &|end| tcp(end)));
conforms!(tcp_bf16, true, |world| form(world, &|end| typed(tcp(end), WireDtype::Bf16)));
conforms!(tcp_f16, true, |world| form(world, &|end| typed(tcp(end), WireDtype::F16)));
conforms!(tcp_channels, true, |world| form(world, &channels));
conforms!(tcp_channels_bf16, true, |world| form(world, &|end| typed(
    channels(end),
    WireDtype::Bf16
)));

conforms!(tcp_encrypted, true, |world| form(world, &|end| encrypted(tcp(end))));
conforms!(tcp_channels_encrypted, true, |world| form(world, &|end| encrypted(channels(end))));

// Loopback addresses simulate hosts: two whose ranks alternate, and three of different sizes.
conforms!(hierarchy, true, |world| form_on(world, &|id| 1 + id % 2, &|end| end));
conforms!(hierarchy_uneven, true, |world| form_on(world, &uneven, &|end| end));
conforms!(hierarchy_bf16, true, |world| form_on(world, &uneven, &|end| typed(
    end,
    WireDtype::Bf16
)));
conforms!(hierarchy_encrypted, true, |world| form_on(world, &uneven, &encrypted));
conforms!(hierarchy_plain, true, |world| form_on(world, &uneven, &|end| EndpointOptions {
    link_encryption: LinkEncryption::Off,
    ..end
}));

/// Guards the tests above: without shared memory they would all pass over TCP.
#[test]
fn shared_memory_is_used_inside_hosts_in_every_operation() {
    let cases: [(HostOf<'_>, (bool, bool)); 4] = [
        (&|_| 1, (true, false)),
        (&|id| 1 + id % 2, (false, true)),
        (&uneven, (false, true)),
        (&|id| 1 + id, (false, false)),
    ];
    for (index, (host, expected)) in cases.into_iter().enumerate() {
        let rings = rings_on(5, host, &|end| end);
        thread::scope(|scope| {
            for (mut ring, _) in rings {
                scope.spawn(move || {
                    for len in [1, 100_000, 0, 100_000, 3_000_000] {
                        ring.all_reduce(&[], &vec![1.0; len], &mut vec![0.0; len]).unwrap();
                        let found = (ring.shares_memory(), ring.is_hierarchical());
                        assert_eq!(found, expected, "{index}");
                        let encrypted = match index {
                            0 => EncryptedLinks::NotNeeded,
                            _ => EncryptedLinks::BetweenHosts,
                        };
                        assert_eq!(ring.encrypted_links(), encrypted);
                    }
                });
            }
        });
    }
}

fn encrypted(end: EndpointOptions) -> EndpointOptions {
    EndpointOptions { link_encryption: LinkEncryption::On, ..end }
}

fn tcp(end: EndpointOptions) -> EndpointOptions {
    EndpointOptions { transport: Transport::Tcp, ..end }
}

fn typed(end: EndpointOptions, wire_dtype: WireDtype) -> EndpointOptions {
    EndpointOptions { wire_dtype, ..end }
}

fn channels(end: EndpointOptions) -> EndpointOptions {
    EndpointOptions { channels: 3, ..tcp(end) }
}

fn uneven(id: u8) -> u8 {
    [1, 2, 1, 1, 3, 3, 1, 2, 1][usize::from(id)]
}

fn local(world: usize) -> Group {
    let ranks = LocalRank::group(world, 1).into_iter().map(|rank| {
        let fence = rank.fence();
        Rank { communicator: Box::new(rank), abort: Arc::new(move || fence.abort()) }
    });
    ranks.collect()
}

/// Host of each member, by id.
type HostOf<'a> = &'a dyn Fn(u8) -> u8;

/// Builds a group of endpoints of this process, over loopback, configured by `with`.
fn form(world: usize, with: &dyn Fn(EndpointOptions) -> EndpointOptions) -> Group {
    form_on(world, &|_| 1, with)
}

/// Like `form`, with the loopback address of each endpoint chosen by `host`.
fn form_on(
    world: usize,
    host: HostOf<'_>,
    with: &dyn Fn(EndpointOptions) -> EndpointOptions,
) -> Group {
    let ranks = rings_on(world, host, with).into_iter().map(|(ring, end)| {
        // The endpoint stays open as long as the group may be aborted.
        Rank { communicator: Box::new(ring), abort: Arc::new(move || end.fence().abort_before(2)) }
    });
    ranks.collect()
}

fn rings_on(
    world: usize,
    host: HostOf<'_>,
    with: &dyn Fn(EndpointOptions) -> EndpointOptions,
) -> Vec<(HostGroup, Endpoint)> {
    let ends: Vec<_> = (0..world as u8)
        .map(|id| {
            let (ip, secret) = (Ipv4Addr::new(127, 0, 0, host(id)).into(), Secret::new("secret"));
            let options = with(EndpointOptions::new("job", id.into(), secret));
            Endpoint::bind(ip, options).expect("loopback has free ports")
        })
        .collect();
    let members = (0..).zip(&ends).map(|(id, end)| Member { id, address: end.address() }).collect();
    let spec = GroupSpec { generation: 1, members };
    let rings: Vec<HostGroup> = thread::scope(|scope| {
        let connect = |end: &Endpoint| {
            end.connect(&spec, Duration::from_secs(60)).expect("all members connect")
        };
        let rings: Vec<_> = ends.iter().map(|end| scope.spawn(move || connect(end))).collect();
        rings.into_iter().map(|ring| ring.join().expect("the thread does not panic")).collect()
    });
    rings.into_iter().zip(ends).collect()
}
