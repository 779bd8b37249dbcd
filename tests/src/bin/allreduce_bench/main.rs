//! Benchmark of an f32 all-reduce, or of an exchange: measures the time, checks the result, and
//! prints one line of JSON.
//!
//! ```sh
//! cargo run --release -p elasticdl-tests --bin allreduce_bench -- \
//!     --world 4 --bytes 67108864 --iters 9 --transport tcp
//! ```
//!
//! This runs four ranks as processes on this machine. With `--rank R --peers a:p,b:p,…` the process
//! is one rank of a group whose other ranks are started in the same way elsewhere. With
//! `--operation exchange` each rank gives each rank as many bytes. With `--recover`
//! each iteration builds a group that loses its last rank in the middle of an operation. The line
//! then reports the time until the survivors had detected the loss, until they were in a new group,
//! and until the retried operation was complete.

mod rank;

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::process::{Child, ChildStdout, Command, ExitCode, Stdio};

use clap::{Parser, ValueEnum};
use elasticdl_collective::{LinkEncryption, WireDtype};

use crate::rank::Event;

/// Benchmark an all-reduce of f32 sums, or an exchange
#[derive(Debug, Parser)]
struct Arguments {
    /// Number of ranks
    #[arg(long, default_value_t = 2)]
    world: usize,
    /// Operation to measure
    #[arg(long, default_value = "all-reduce", conflicts_with = "recover")]
    operation: Operation,
    /// Length in bytes of the buffer, rounded down to whole elements, or of each payload
    #[arg(long, default_value_t = 64 << 20)]
    bytes: usize,
    /// Measured operations, after three warm-up operations
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..))]
    iters: u32,
    /// Transport; `hier` is shared memory inside hosts and TCP between them
    #[arg(long, default_value = "auto")]
    transport: Transport,
    /// Number of simulated hosts, assigned to the ranks in turn; each host is one loopback address
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=200))]
    hosts: u8,
    /// Data type on the wire
    #[arg(long, default_value = "f32")]
    wire: Wire,
    /// Channels: parallel links between two neighbours, for sums over TCP alone: 1 to 16
    #[arg(long, default_value_t = 1)]
    channels: u8,
    /// Which links are encrypted; `auto`: those between different addresses
    #[arg(long, default_value = "auto")]
    link_encryption: Encryption,
    /// Measure the recovery of a group after one rank is killed in the middle of an operation
    #[arg(long)]
    recover: bool,
    /// Run only this rank; its peers run elsewhere
    #[arg(long, requires = "peers")]
    rank: Option<usize>,
    /// Addresses of all ranks, in rank order; `-` prints the own address on standard output and
    /// reads the list from standard input
    #[arg(long, value_name = "ADDRESS,…", requires = "rank")]
    peers: Option<String>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum Transport {
    Auto,
    Hier,
    Shm,
    Tcp,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum Operation {
    AllReduce,
    Exchange,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum Encryption {
    Auto,
    /// None, but digests of all bytes.
    Digests,
    Off,
    On,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum Wire {
    Bf16,
    F16,
    F32,
}

type Fallible<T> = Result<T, Box<dyn Error>>;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let done = match (&arguments.rank, &arguments.peers) {
        (Some(rank), Some(peers)) => rank::run(&arguments, *rank, peers),
        _ if arguments.recover => recover(&arguments),
        _ => reduce(&arguments),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let mut message = error.to_string();
            let mut cause = error.source();
            while let Some(deeper) = cause {
                message += &format!(": {deeper}");
                cause = deeper.source();
            }
            print_line(std::io::stderr(), &format!("allreduce_bench: {message}"));
            ExitCode::FAILURE
        }
    }
}

/// Starts the ranks; rank 0 reports the times.
fn reduce(arguments: &Arguments) -> Fallible<()> {
    let mut ranks = Ranks::start(arguments.world)?;
    let line = ranks.line(0)?;
    ranks.wait()?;
    print_line(std::io::stdout(), &line);
    Ok(())
}

fn recover(arguments: &Arguments) -> Fallible<()> {
    if arguments.world < 2 {
        return Err("a recovery takes at least two ranks".into());
    }
    let victim = arguments.world - 1;
    let mut gaps = [const { Vec::new() }; 3];
    for _ in 0..arguments.iters {
        let mut ranks = Ranks::start(arguments.world)?;
        let killed = Event::decode(&ranks.line(victim)?)?.at;
        let mut latest = [0.0_f64; 3];
        for rank in 0..victim {
            for latest in &mut latest {
                let gap =
                    Event::decode(&ranks.line(rank)?)?.at.saturating_sub(killed).as_secs_f64();
                *latest = latest.max(gap);
            }
        }
        // The victim fails, and the others have reported everything.
        let _ = ranks.wait();
        gaps.iter_mut().zip(latest).for_each(|(gaps, gap)| gaps.push(gap));
    }
    let [detected, regrouped, retried] = gaps.map(|gaps| quantiles(gaps).map(|s| s * 1e3));
    let Arguments { world, bytes, iters, .. } = arguments;
    let (transport, encryption) = (name(arguments.transport), name(arguments.link_encryption));
    print_line(
        std::io::stdout(),
        &format!(
            "{{\"world\":{world},\"bytes\":{bytes},\"transport\":\"{transport}\",\
             \"link_encryption\":\"{encryption}\",\"iters\":{iters},\
             \"detected_median_ms\":{:.3},\"detected_p99_ms\":{:.3},\"regrouped_median_ms\":{:.3},\
             \"regrouped_p99_ms\":{:.3},\"retried_median_ms\":{:.3},\"retried_p99_ms\":{:.3}}}",
            detected[0], detected[1], regrouped[0], regrouped[1], retried[0], retried[1]
        ),
    );
    Ok(())
}

/// Processes of a group. Those that still run when this is dropped are killed.
struct Ranks {
    children: Vec<(Child, BufReader<ChildStdout>)>,
}

impl Ranks {
    /// Starts the processes, with the options of this one, and sends all of them the list of
    /// addresses.
    fn start(world: usize) -> Fallible<Self> {
        let mut ranks = Self { children: Vec::new() };
        for rank in 0..world {
            let mut child = Command::new(std::env::current_exe()?)
                .args(std::env::args_os().skip(1))
                .args(["--rank", &rank.to_string(), "--peers", rank::ASK])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()?;
            let lines = BufReader::new(child.stdout.take().expect("the pipe is set up"));
            ranks.children.push((child, lines));
        }
        let addresses: Result<Vec<SocketAddr>, Box<dyn Error>> =
            (0..world).map(|rank| Ok(ranks.line(rank)?.parse()?)).collect();
        let list = addresses?.iter().map(SocketAddr::to_string).collect::<Vec<_>>().join(",");
        for (child, _) in &mut ranks.children {
            let mut input = child.stdin.take().expect("the pipe is set up");
            writeln!(input, "{list}")?;
        }
        Ok(ranks)
    }

    /// Reads the next line of a rank's output.
    fn line(&mut self, rank: usize) -> Fallible<String> {
        let mut line = String::new();
        self.children[rank].1.read_line(&mut line)?;
        match line.trim_end() {
            "" => Err(format!("rank {rank} ended early").into()),
            line => Ok(line.to_owned()),
        }
    }

    fn wait(mut self) -> Fallible<()> {
        for (rank, (child, _)) in self.children.iter_mut().enumerate() {
            let status = child.wait()?;
            if !status.success() {
                return Err(format!("rank {rank}: {status}").into());
            }
        }
        Ok(())
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for (child, _) in &mut self.children {
            // A process that has ended is only reaped.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Transport {
    /// Shared memory can be requested but not forced: a rank that does not get it reports an error.
    fn choice(self) -> elasticdl_collective::Transport {
        match self {
            Self::Auto | Self::Hier | Self::Shm => elasticdl_collective::Transport::Auto,
            Self::Tcp => elasticdl_collective::Transport::Tcp,
        }
    }
}

impl Encryption {
    fn choice(self) -> LinkEncryption {
        match self {
            Self::Auto => LinkEncryption::Auto,
            Self::Digests | Self::Off => LinkEncryption::Off,
            Self::On => LinkEncryption::On,
        }
    }
}

impl Wire {
    fn dtype(self) -> WireDtype {
        match self {
            Self::Bf16 => WireDtype::Bf16,
            Self::F16 => WireDtype::F16,
            Self::F32 => WireDtype::F32,
        }
    }
}

/// Returns the value as the option that sets it has it.
fn name(value: impl ValueEnum) -> String {
    value.to_possible_value().expect("each value can be given").get_name().to_owned()
}

/// Returns the median and the 99th percentile.
fn quantiles(mut samples: Vec<f64>) -> [f64; 2] {
    samples.sort_by(f64::total_cmp);
    [samples[samples.len() / 2], samples[(samples.len() * 99).div_ceil(100) - 1]]
}

/// Prints a line; a closed output is ignored.
fn print_line(mut to: impl Write, line: &str) {
    let _ = writeln!(to, "{line}");
    let _ = to.flush();
}
