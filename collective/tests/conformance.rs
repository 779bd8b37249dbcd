//! Every backend under the same suite.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use elasticdl_collective::conformance::{Group, Rank};
use elasticdl_collective::{
    CollectiveError, Communicator, Endpoint, GroupSpec, LocalRank, Member, Secret, TcpRing, Transport,
    WireDtype,
};

#[macro_use]
mod suite;

conforms!(in_process, true, local);
conforms!(shared_memory, true, |world| form(world, &|end| end));
conforms!(tcp, true, |world| form(world, &|end| end.with_transport(Transport::Tcp)));
conforms!(tcp_bf16, true, |world| form(world, &|end| end
    .with_wire_dtype(WireDtype::Bf16)
    .with_transport(Transport::Tcp)));
conforms!(tcp_f16, true, |world| form(world, &|end| end
    .with_wire_dtype(WireDtype::F16)
    .with_transport(Transport::Tcp)));

fn local(world: usize) -> Group {
    let ranks = LocalRank::group(world, 1).into_iter().map(|rank| {
        let fence = rank.fence();
        Rank { communicator: Box::new(rank), abort: Arc::new(move || fence.abort()) }
    });
    ranks.collect()
}

/// A ring, and the endpoint that it must not outlive.
struct Held {
    ring: TcpRing,
    _end: Arc<Endpoint>,
}

/// Endpoints of this process, over loopback, set up by `with`.
fn form(world: usize, with: &dyn Fn(Endpoint) -> Endpoint) -> Group {
    let ends: Vec<_> = (0..world as u64)
        .map(|id| {
            let ip = IpAddr::V4(Ipv4Addr::LOCALHOST);
            let end = Endpoint::bind(ip, "job", id, Secret::new("secret")).expect("loopback has free ports");
            Arc::new(with(end))
        })
        .collect();
    let members = (0..).zip(&ends).map(|(id, end)| Member { id, address: end.address() }).collect();
    let spec = GroupSpec { generation: 1, members };
    thread::scope(|scope| {
        let connect = |end: &Arc<Endpoint>| end.connect(&spec, Duration::from_secs(60));
        let rings: Vec<_> = ends.iter().map(|end| (end.clone(), scope.spawn(move || connect(end)))).collect();
        rings
            .into_iter()
            .map(|(end, ring)| {
                let ring = ring.join().expect("it does not panic").expect("all members connect");
                let fence = end.fence();
                let communicator = Box::new(Held { ring, _end: end });
                Rank { communicator, abort: Arc::new(move || fence.abort_before(2)) }
            })
            .collect()
    })
}

impl Communicator for Held {
    fn rank(&self) -> usize {
        self.ring.rank()
    }

    fn world_size(&self) -> usize {
        self.ring.world_size()
    }

    fn generation(&self) -> u64 {
        self.ring.generation()
    }

    fn all_gather(&mut self, mine: &[u8]) -> Result<Vec<Vec<u8>>, CollectiveError> {
        self.ring.all_gather(mine)
    }

    fn all_reduce(
        &mut self,
        header: &[u8],
        src: &[f32],
        dst: &mut [f32],
    ) -> Result<Vec<Vec<u8>>, CollectiveError> {
        self.ring.all_reduce(header, src, dst)
    }

    fn broadcast_bytes(&mut self, root: usize, bytes: &mut Vec<u8>) -> Result<(), CollectiveError> {
        self.ring.broadcast_bytes(root, bytes)
    }

    fn broadcast(&mut self, root: usize, buf: &mut [f32]) -> Result<(), CollectiveError> {
        self.ring.broadcast(root, buf)
    }
}
