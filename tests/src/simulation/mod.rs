//! The whole system in one thread: the real master core, real worker sessions and the real ring
//! schedule, over a simulated network and clock. A run depends on its seed alone.
//!
//! ```text
//!              Job (real)                 Session (real)      Schedule (real)
//!                 │                            │                  │
//!   story ◀── master ◀── streams ──▶ process ── trainer ──────── ring ◀── links ──▶ others
//!                 │        network, clock: late, lost, cut off, in order     │
//!              oracles ◀──────────── what was said and done ─────────────────┘
//!                                storm: faults at bad moments
//! ```
//!
//! What stands between the cores and the wires in a real job (the master's `run` and `service`; a
//! worker's `run`, `control` and `trainer`; the collective's `endpoint`, `fence` and `transfer`) is
//! written down here once more, without sockets and threads: a fault in those is found by the tests
//! with real processes, not here.
//!
//! A seed draws a small job, the speed of its world, and a storm of faults. When the storm is over,
//! the job must end, and the oracles must have found nothing wrong on the way. A seed that fails is
//! run again to tell its story.
//!
//! **Invariant:** a run reads no clock and no environment; it is a function of its seed.

mod checkpoints;
mod clock;
mod faults;
mod fetch;
mod many;
mod master;
mod model;
mod nccl;
mod network;
mod operation;
mod oracles;
mod pods;
mod process;
mod repair;
mod ring;
mod story;
mod trainer;
mod world;

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

pub use many::{Many, run_many};
pub use oracles::Tally;

use story::Story;
use world::World;

/// Runs the job that `seed` draws, through its storm, to its end.
///
/// # Errors
/// What went wrong, with the run's story.
pub fn run(seed: u64) -> Result<Tally, Box<Failure>> {
    let (outcome, _) = live(seed, Story::new(false));
    match outcome {
        Ok(tally) => Ok(tally),
        Err(first) => {
            let (outcome, story) = tell(seed);
            let what = match outcome {
                Err(again) if again == first => first,
                other => format!("{first}; told again, it is another run: {other:?}"),
            };
            Err(Box::new(Failure { seed, what, story }))
        }
    }
}

/// As [`run`], with the story, however it ends: a line for each change of state.
pub fn tell(seed: u64) -> (Result<Tally, String>, Vec<String>) {
    live(seed, Story::new(true))
}

/// What should not have happened, and how it came to that.
#[derive(Debug)]
pub struct Failure {
    /// The run's seed.
    pub seed: u64,
    /// What is wrong.
    pub what: String,
    /// The run's story.
    pub story: Vec<String>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seed, what, story } = self;
        let tail = story.len().saturating_sub(TAIL);
        writeln!(f, "seed {seed}: {what}")?;
        writeln!(f, "its last lines of {}:", story.len())?;
        story[tail..].iter().try_for_each(|line| writeln!(f, "  {line}"))?;
        write!(
            f,
            "the whole story: cargo run -p elasticdl-tests --bin simulate -- --seed {seed} --story"
        )
    }
}

fn live(seed: u64, story: Story) -> (Result<Tally, String>, Vec<String>) {
    let mut world = World::new(seed, story);
    // A core that finds its own invariants broken panics; that is a finding like any other.
    let lived = catch_unwind(AssertUnwindSafe(|| world.run()));
    let outcome = lived.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
        Err(format!("panicked: {}", text.unwrap_or_default()))
    });
    (outcome, world.story.into_lines())
}

/// Lines of the story that a failure shows.
const TAIL: usize = 80;
