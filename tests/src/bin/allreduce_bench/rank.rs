//! Process of one rank.

use std::io::{stdin, stdout};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::time::{Duration, Instant};
use std::{iter, thread};

use elasticdl_collective::{
    Communicator, Endpoint, EndpointOptions, GroupSpec, HostGroup, Member, Secret, zeros,
};
use rustix::process::{Signal, getpid, kill_process};
use rustix::time::{ClockId, clock_gettime};

use crate::{Arguments, Encryption, Fallible, Operation, Transport, name, print_line, quantiles};

/// Value of `--peers`: the addresses are exchanged over standard output and input.
pub(crate) const ASK: &str = "-";

/// Time of an event in a rank, by a clock that all processes of a machine share.
pub(crate) struct Event {
    pub(crate) at: Duration,
}

impl Event {
    fn now() -> Self {
        let now = clock_gettime(ClockId::Monotonic);
        let (seconds, nanos) = (now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs());
        Self { at: Duration::from_secs(seconds) + Duration::from_nanos(nanos) }
    }

    fn print(&self) {
        print_line(stdout(), &self.at.as_nanos().to_string());
    }

    pub(crate) fn decode(line: &str) -> Fallible<Self> {
        Ok(Self { at: Duration::from_nanos(line.parse()?) })
    }
}

pub(crate) fn run(arguments: &Arguments, rank: usize, peers: &str) -> Fallible<()> {
    let (listener, addresses) = listen(rank, peers, arguments)?;
    let world = addresses.len();
    let members: Vec<Member> =
        (0..).zip(addresses).map(|(id, address)| Member { id, address }).collect();
    let secret = Secret::new("allreduce_bench");
    let options = EndpointOptions {
        wire_dtype: arguments.wire.dtype(),
        transport: arguments.transport.choice(),
        link_encryption: arguments.link_encryption.choice(),
        has_digests: arguments.link_encryption == Encryption::Digests,
        channels: arguments.channels,
        ..EndpointOptions::new("allreduce_bench", rank as u64, secret)
    };
    let endpoint = Endpoint::from_listener(listener, options)?;
    let ring = connect_all(&endpoint, &GroupSpec { generation: 1, members: members.clone() })?;
    let mut bench = Bench::new(ring, arguments);
    bench.warm_up()?;
    if arguments.transport == Transport::Shm && !bench.ring.shares_memory() {
        return Err(
            "the ranks do not share memory: are they processes of one user, on one host?".into()
        );
    }
    if arguments.transport == Transport::Hier && !bench.ring.is_hierarchical() {
        return Err(
            "the ranks do not share memory inside hosts: are several on each, of one user?".into(),
        );
    }
    if !arguments.recover {
        let times = iter::repeat_with(|| bench.timed())
            .take(arguments.iters as usize)
            .collect::<Result<Vec<_>, _>>()?;
        bench.check()?;
        if rank == 0 {
            print_line(stdout(), &line(arguments, world, times));
        }
        return Ok(());
    }

    let [median, _] =
        quantiles(iter::repeat_with(|| bench.timed()).take(5).collect::<Result<Vec<_>, _>>()?);
    bench.ring.all_gather(&[])?;
    if rank + 1 == world {
        thread::spawn(move || {
            thread::sleep(Duration::from_secs_f64(median / 2.0));
            Event::now().print();
            let _ = kill_process(getpid(), Signal::KILL);
        });
        bench.run()?;
        // The kill may be delayed.
        thread::sleep(CONNECT_TIME_MAX);
        return Err("still alive".into());
    }
    // A rank that had finished before the kill fails in the next operation.
    while bench.run().is_ok() {}
    let failed = Event::now();
    endpoint.fence().abort_before(2);
    let survivors = GroupSpec { generation: 2, members: members[..world - 1].to_vec() };
    bench.ring = endpoint.connect(&survivors, CONNECT_TIME_MAX)?;
    // All ranks are in the new group once they have completed an operation in it.
    bench.ring.all_gather(&[])?;
    let regrouped = Event::now();
    bench.run()?;
    let retried = Event::now();
    bench.check()?;
    [failed, regrouped, retried].iter().for_each(Event::print);
    Ok(())
}

/// Retries the connection: peers that are started by hand may start later.
fn connect_all(endpoint: &Endpoint, group: &GroupSpec) -> Fallible<HostGroup> {
    let started = Instant::now();
    loop {
        match endpoint.connect(group, CONNECT_TIME_MAX) {
            Err(error) if started.elapsed() > CONNECT_TIME_MAX => return Err(error.into()),
            Err(_) => thread::sleep(Duration::from_millis(50)),
            Ok(ring) => return Ok(ring),
        }
    }
}

/// Returns the listener and the addresses of all ranks.
fn listen(
    rank: usize,
    peers: &str,
    arguments: &Arguments,
) -> Fallible<(TcpListener, Vec<SocketAddr>)> {
    let parse =
        |list: &str| list.trim().split(',').map(str::parse).collect::<Result<Vec<SocketAddr>, _>>();
    if peers != ASK {
        let addresses = parse(peers)?;
        let own = addresses.get(rank).ok_or("--rank is not the index of one of --peers")?;
        return Ok((TcpListener::bind(own)?, addresses));
    }
    let host = u8::try_from(rank % usize::from(arguments.hosts))? + 1;
    let ip = IpAddr::from(Ipv4Addr::new(127, 0, 0, host));
    let listener = TcpListener::bind((ip, 0))?;
    print_line(stdout(), &listener.local_addr()?.to_string());
    let mut list = String::new();
    stdin().read_line(&mut list)?;
    Ok((listener, parse(&list)?))
}

struct Bench {
    ring: HostGroup,
    buffers: Buffers,
}

enum Buffers {
    AllReduce { src: Vec<f32>, dst: Vec<f32> },
    Exchange { send: Vec<Vec<u8>>, receive: Vec<Vec<u8>> },
}

impl Bench {
    fn new(ring: HostGroup, arguments: &Arguments) -> Self {
        let (rank, world) = (ring.rank(), ring.world_size());
        let buffers = match arguments.operation {
            Operation::AllReduce => {
                let len = arguments.bytes / size_of::<f32>();
                let mut src = zeros(len);
                src.iter_mut().enumerate().for_each(|(index, value)| *value = part(rank, index));
                Buffers::AllReduce { src, dst: zeros(len) }
            }
            Operation::Exchange => {
                let send = (0..world).map(|to| payload(rank, to, arguments.bytes)).collect();
                Buffers::Exchange { send, receive: Vec::new() }
            }
        };
        Self { ring, buffers }
    }

    fn warm_up(&mut self) -> Fallible<()> {
        for _ in 0..3 {
            match &mut self.buffers {
                Buffers::AllReduce { dst, .. } => dst.fill(f32::NAN),
                Buffers::Exchange { receive, .. } => receive.iter_mut().for_each(|p| p.fill(0)),
            }
            self.run()?;
            self.check()?;
        }
        Ok(())
    }

    fn run(&mut self) -> Fallible<()> {
        match &mut self.buffers {
            Buffers::AllReduce { src, dst } => drop(self.ring.all_reduce(&[], src, dst)?),
            Buffers::Exchange { send, receive } => {
                let send: Vec<&[u8]> = send.iter().map(Vec::as_slice).collect();
                self.ring.exchange(&send, receive)?;
            }
        }
        Ok(())
    }

    /// Returns the duration of one operation in seconds, from the point at which all ranks are
    /// ready.
    fn timed(&mut self) -> Fallible<f64> {
        self.ring.all_reduce(&[], &[], &mut [])?;
        let started = Instant::now();
        self.run()?;
        Ok(started.elapsed().as_secs_f64())
    }

    fn check(&self) -> Fallible<()> {
        let (own, world) = (self.ring.rank(), self.ring.world_size());
        match &self.buffers {
            Buffers::AllReduce { dst, .. } => {
                for (index, sum) in dst.iter().enumerate() {
                    let exact: f32 = (0..world).map(|rank| part(rank, index)).sum();
                    if *sum != exact {
                        return Err(format!("element {index} is {sum}; expected {exact}").into());
                    }
                }
            }
            Buffers::Exchange { send, receive } => {
                for (rank, got) in receive.iter().enumerate() {
                    if *got != payload(rank, own, send[own].len()) {
                        return Err(format!("rank {rank}'s payload is not what it sent").into());
                    }
                }
            }
        }
        Ok(())
    }
}

/// What a rank gives to another one.
fn payload(from: usize, to: usize, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|index| (index / 64 + from * 7 + to * 3) as u8).collect()
}

/// Contribution of a rank: small whole numbers, so that the sum is exact in any order.
fn part(rank: usize, index: usize) -> f32 {
    ((index * 7 + rank) % 16) as f32
}

fn line(arguments: &Arguments, world: usize, times: Vec<f64>) -> String {
    let Arguments { bytes, iters, .. } = arguments;
    let [median, p99] = quantiles(times);
    let others = (world - 1) as f64;
    let traffic = *bytes as f64
        * match arguments.operation {
            Operation::AllReduce => 2.0 * others / world as f64,
            Operation::Exchange => others,
        };
    format!(
        "{{\"operation\":\"{}\",\"world\":{world},\"bytes\":{bytes},\"transport\":\"{}\",\
         \"wire\":\"{}\",\"link_encryption\":\"{}\",\"iters\":{iters},\"median_s\":{median:.9},\
         \"p99_s\":{p99:.9},\"busbw_gbs\":{:.3}}}",
        name(arguments.operation),
        name(arguments.transport),
        name(arguments.wire),
        name(arguments.link_encryption),
        traffic / median / 1e9
    )
}

const CONNECT_TIME_MAX: Duration = Duration::from_secs(20);
