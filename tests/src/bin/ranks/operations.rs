//! The operations of a group alone, whose ranks are threads of this process: so more ranks fit on a
//! machine than as processes, and no model and no master take part.

use std::error::Error;
use std::net::Ipv4Addr;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use elasticdl_collective::{
    CollectiveError, Communicator as _, Endpoint, EndpointOptions, GroupSpec, Member, Secret,
    Transport,
};
use elasticdl_tests::quantile;
use rustix::process::{Resource, getrlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};

/// Measured at rank 0, over TCP, unencrypted. CPU times are those of a rank.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Operations {
    connect_ms: f64,
    connect_cpu_us: f64,
    /// Median time of an all-gather of headers.
    pub(crate) gather_us: f64,
    gather_cpu_us: f64,
    /// Median time of a sum.
    sum_us: f64,
    sum_cpu_us: f64,
}

impl Operations {
    /// Connects `world` ranks; each gathers and sums `times` times. `bytes`: length of a sum.
    pub(crate) fn measure(world: u32, bytes: u64, times: usize) -> Result<Self, Box<dyn Error>> {
        let mut limit = getrlimit(Resource::Nofile);
        limit.current = limit.maximum;
        setrlimit(Resource::Nofile, limit)?;
        let bind = |id| {
            let secret = Secret::new(b"the secret of this benchmark");
            let options = EndpointOptions {
                transport: Transport::Tcp,
                ..EndpointOptions::new("ranks", id, secret)
            };
            Endpoint::bind(Ipv4Addr::LOCALHOST.into(), options)
        };
        let endpoints: Vec<Endpoint> = (0..u64::from(world)).map(bind).collect::<Result<_, _>>()?;
        let member = |(id, endpoint): (u64, &Endpoint)| Member { id, address: endpoint.address() };
        let members: Vec<Member> = (0..).zip(&endpoints).map(member).collect();
        let barrier = Barrier::new(endpoints.len());
        let rank = &|endpoint: &Endpoint| {
            let spec = GroupSpec { generation: 1, members: members.clone() };
            measure_rank(endpoint, &spec, (bytes, times), &barrier)
        };
        thread::scope(|scope| {
            let start = |endpoint| {
                thread::Builder::new()
                    .stack_size(STACK_BYTES)
                    .spawn_scoped(scope, move || rank(endpoint))
            };
            // If a thread can't be started, the others would wait for it: this process ends.
            let others = endpoints[1..].iter().map(start);
            let others: Vec<_> =
                others.map(|started| started.expect("threads can be started")).collect();
            let first = rank(&endpoints[0])?;
            for other in others {
                other.join().expect("no rank panics")?;
            }
            Ok(first)
        })
    }

    /// The figures as an object.
    pub(crate) fn json(&self) -> Value {
        let Self { connect_ms, connect_cpu_us, gather_us, gather_cpu_us, sum_us, sum_cpu_us } =
            self;
        json!({
            "connect_ms": connect_ms, "connect_cpu_us": connect_cpu_us,
            "gather_us": gather_us, "gather_cpu_us": gather_cpu_us,
            "sum_us": sum_us, "sum_cpu_us": sum_cpu_us,
        })
    }
}

fn measure_rank(
    endpoint: &Endpoint,
    spec: &GroupSpec,
    (bytes, times): (u64, usize),
    barrier: &Barrier,
) -> Result<Operations, CollectiveError> {
    let world = spec.members.len() as f64;
    barrier.wait();
    let (began, cpu) = (Instant::now(), cpu_us());
    let mut group = endpoint.connect(spec, LIMIT)?;
    barrier.wait();
    let connect_ms = began.elapsed().as_secs_f64() * 1e3;
    let mut measured =
        Operations { connect_ms, connect_cpu_us: (cpu_us() - cpu) / world, ..Default::default() };
    let source = vec![1.0; bytes as usize / size_of::<f32>()];
    let (mut sum, header) = (source.clone(), [0; HEADER_BYTES]);
    let repeat = |operation: &mut dyn FnMut() -> Result<(), CollectiveError>| -> Repeated {
        barrier.wait();
        let (cpu, mut us) = (cpu_us(), Vec::with_capacity(times));
        for _ in 0..times {
            let began = Instant::now();
            operation()?;
            us.push(began.elapsed().as_secs_f64() * 1e6);
        }
        barrier.wait();
        Ok((quantile(&mut us, 0.5), (cpu_us() - cpu) / world / times as f64))
    };
    (measured.gather_us, measured.gather_cpu_us) =
        repeat(&mut || group.all_gather(&header).map(drop))?;
    (measured.sum_us, measured.sum_cpu_us) =
        repeat(&mut || group.all_reduce(&header, &source, &mut sum).map(drop))?;
    Ok(measured)
}

/// Median time of an operation, and its CPU time of a rank, in microseconds.
type Repeated = Result<(f64, f64), CollectiveError>;

/// CPU time of all threads of this process.
fn cpu_us() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 * 1e6 + time.tv_nsec as f64 / 1e3
}

const LIMIT: Duration = Duration::from_secs(100);
/// As long as a header of a step.
const HEADER_BYTES: usize = 75;
const STACK_BYTES: usize = 256 << 10;
