//! The whole system in one thread: the real master core, the trainers and donors of real workers,
//! the real admission of links and the real ring schedule, over a simulated network and clock. A
//! run depends on its seed alone.
//!
//! ```text
//!              Job (real)                 Trainer (real)      Schedule (real)
//!                 │                            │                  │
//!   trace ◀── master ◀── streams ──▶ process ── threads ──────── ring ◀── links ──▶ other ranks
//!                 │        network, clock: late, lost, cut off, in order     │
//!              oracle ◀───────── every message and every state change ───────┘
//!                                fault plan: faults at bad moments
//! ```
//!
//! A worker's threads run the shipped trainer, with its session, and the shipped donor. They block
//! where those block: each thread is a coroutine (`coroutine.rs`), which the world continues when
//! simulated time has come. What trainer and donor touch outside of themselves are the traits of
//! `elasticdl::machine`, which `machine.rs` implements.
//!
//! Simulated, so that a defect of the shipped code is found by the tests with real processes and
//! not here, are: the master's event loop and service; a worker's control thread, its life until
//! its model is built, its reader, and its writer of checkpoints; the collective's endpoint, fence
//! and transfer; NCCL.
//!
//! A seed draws a small job, the latencies of its world, and a plan of faults. After the last fault
//! the job must end, and the oracle must have found no violation on the way. A seed that fails is
//! run again with its trace.
//!
//! A search (`exploration.rs`) makes all runs of a small job in which few faults hit it. There,
//! everything takes its mean time, and decisions say which fault hits the job at which point.
//!
//! What the world consists of is in `state`; what happens in it are methods of `World`, in the
//! files beside it.
//!
//! **Invariant:** a run reads no clock and no environment; it is a function of its seed, or of the
//! decisions of a search.

mod alike;
mod checkpoints;
mod clock;
mod coroutine;
mod endpoint;
mod exploration;
mod explored;
mod faults;
mod former_master;
mod identity;
mod machine;
mod many;
mod master;
mod model;
mod nccl;
mod network;
mod operation;
mod oracles;
mod pods;
mod process;
mod program;
mod replicas;
mod rows;
mod state;
mod threads;
mod timeless;
mod trace;
mod trainer;
mod transfers;
mod worker;
mod world;

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

pub use exploration::{Bounds, Found, explore, replay};
pub use explored::{Choice, Decision};
pub use many::{Many, run_many};
pub use state::coverage::Coverage;
pub use state::setting::Explored;

use trace::Trace;
use world::World;

/// Runs the job that `seed` draws, through its faults, to its end.
pub fn run(seed: u64) -> Result<Coverage, Box<Failure>> {
    let (outcome, _) = live(seed, Trace::new(false));
    match outcome {
        Ok(coverage) => Ok(coverage),
        Err(first) => {
            let (outcome, trace) = run_traced(seed);
            let what = match outcome {
                Err(again) if again == first => first,
                other => format!("{first}; the traced run differs: {other:?}"),
            };
            Err(Box::new(Failure { seed, what, trace }))
        }
    }
}

/// Runs `seed` as [`run`] does and returns the trace, however the run ends: one line per state
/// change.
pub fn run_traced(seed: u64) -> (Result<Coverage, String>, Vec<String>) {
    live(seed, Trace::new(true))
}

/// A violation, and the events that led to it.
#[derive(Debug)]
pub struct Failure {
    /// Seed of the run.
    pub seed: u64,
    /// The violation.
    pub what: String,
    /// Trace of the run.
    pub trace: Vec<String>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, what, trace } = self;
        let tail = trace.len().saturating_sub(TAIL);
        writeln!(f, "seed {seed}: {what}")?;
        writeln!(f, "its last lines of {}:", trace.len())?;
        trace[tail..].iter().try_for_each(|line| writeln!(f, "  {line}"))?;
        write!(
            f,
            "the whole trace: cargo run -p elasticdl-tests --bin simulate -- --seed {seed} --story"
        )
    }
}

fn live(seed: u64, trace: Trace) -> (Result<Coverage, String>, Vec<String>) {
    let mut world = World::new(seed, trace);
    let outcome = caught(|| world.run());
    (outcome, world.trace.into_lines())
}

/// A core that finds its own invariants broken panics; that is a violation like any other.
fn caught<T>(run: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
        Err(format!("panicked: {}", text.unwrap_or_default()))
    })
}

/// Number of trace lines that a failure shows.
const TAIL: usize = 80;
