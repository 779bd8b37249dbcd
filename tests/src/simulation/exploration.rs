//! A search through all runs of a small job: every fault at every point, up to a number of them.
//!
//! A run is made by the decisions that lead to it, from its start; what no decision says is drawn
//! from the middle of its range. Where its last decision is made, each point leads to further runs,
//! one for each choice there, until the run ends or comes to a state that another run has been in
//! with as many decisions left: what follows from there is known.
//!
//! **Exhaustive:** all sets of so many decisions, each at any point of the run that the decisions
//! before it lead to. **Bounded:** events come in the order of constant latencies, apart from the
//! delays among the decisions, and times do not tell states apart.

use std::collections::HashMap;
use std::iter::Peekable;
use std::slice;
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use super::alike::Alike;
use super::caught;
use super::explored::{Choice, Decision};
use super::state::coverage::Coverage;
use super::state::event::Event;
use super::state::setting::{Explored, Setting};
use super::trace::Trace;
use super::world::World;

/// What is searched, and how far.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// The job.
    pub job: Explored,
    /// Decisions of a run at most.
    pub decisions: usize,
    /// Delays among them at most.
    pub delays: usize,
    /// The search ends after so many runs.
    pub runs: u64,
    /// The search ends after so many violations.
    pub violations: usize,
    /// Number of threads.
    pub threads: usize,
}

/// What a search has found.
#[derive(Debug, Default)]
pub struct Found {
    /// Number of different states.
    pub states: u64,
    /// Events of the longest run.
    pub depth: u64,
    /// Number of runs.
    pub runs: u64,
    /// Events of all runs.
    pub events: u64,
    /// Number of runs that came to a known state.
    pub known: u64,
    /// Number of choices that were left out, as those for another, equal worker are made.
    pub symmetric: u64,
    /// Whether all runs within the bounds were made.
    pub is_complete: bool,
    /// The violations, each with the decisions that lead to it.
    pub violations: Vec<(Vec<Decision>, String)>,
    /// Time of the search.
    pub took: Duration,
}

/// Searches all runs within the bounds.
pub fn explore(bounds: &Bounds) -> Found {
    let started = Instant::now();
    let search = Search {
        bounds,
        todo: Mutex::new(Todo { runs: vec![Vec::new()], working: 0, begun: 0 }),
        changed: Condvar::new(),
        known: Mutex::default(),
        found: Mutex::default(),
    };
    std::thread::scope(|scope| {
        for _ in 0..bounds.threads {
            scope.spawn(|| search.work());
        }
    });
    let mut found = search.found.into_inner().expect(UNPOISONED);
    found.states = search.known.into_inner().expect(UNPOISONED).len() as u64;
    found.is_complete = search.todo.into_inner().expect(UNPOISONED).runs.is_empty();
    found.violations.sort();
    found.took = started.elapsed();
    found
}

/// Runs the job by these decisions. Returns its trace, too: one line per state change.
pub fn replay(job: Explored, decisions: &[Decision]) -> (Result<(), String>, Vec<String>) {
    let mut run = Run::new(job, decisions, Trace::new(true));
    let outcome = caught(|| run.drive(|_, _, _| true));
    (outcome, run.world.trace.into_lines())
}

struct Search<'a> {
    bounds: &'a Bounds,
    todo: Mutex<Todo>,
    changed: Condvar,
    /// The states, each with a run that has been there.
    known: Mutex<HashMap<u64, Visit>>,
    found: Mutex<Found>,
}

struct Todo {
    /// The decisions of each run that is to be made.
    runs: Vec<Vec<Decision>>,
    /// Number of runs that are under way.
    working: usize,
    begun: u64,
}

/// A run that has been in a state.
#[derive(Clone, Copy)]
struct Visit {
    run: u64,
    left: Left,
}

/// Whether a state is new, or which run has been there: times do not tell states apart, so a run
/// that waits comes to the same one again.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Seen {
    ByAnother,
    ByItself,
    New,
}

/// Decisions that a run may still make, and delays among them.
#[derive(Clone, Copy)]
struct Left {
    all: usize,
    delays: usize,
}

impl Left {
    fn covers(self, other: Self) -> bool {
        self.all >= other.all && self.delays >= other.delays
    }
}

impl Search<'_> {
    fn work(&self) {
        while let Some((number, decisions)) = self.next() {
            let following = self.run(number, &decisions);
            let mut todo = self.todo.lock().expect(UNPOISONED);
            todo.runs.extend(following);
            todo.working -= 1;
            self.changed.notify_all();
        }
        self.changed.notify_all();
    }

    /// The number and the decisions of the next run; `None`: the search is over.
    fn next(&self) -> Option<(u64, Vec<Decision>)> {
        let mut todo = self.todo.lock().expect(UNPOISONED);
        loop {
            let is_over = self.found.lock().expect(UNPOISONED).violations.len();
            if todo.begun >= self.bounds.runs || is_over >= self.bounds.violations {
                return None;
            }
            if let Some(decisions) = todo.runs.pop() {
                (todo.working, todo.begun) = (todo.working + 1, todo.begun + 1);
                return Some((todo.begun, decisions));
            }
            if todo.working == 0 {
                return None;
            }
            todo = self.changed.wait(todo).expect(UNPOISONED);
        }
    }

    /// Makes a run. Returns the decisions of those that follow from it.
    fn run(&self, number: u64, decisions: &[Decision]) -> Vec<Vec<Decision>> {
        let delays = decisions.iter().filter(|one| one.choice == Choice::Late).count();
        let all = self.bounds.decisions - decisions.len();
        let left = Left { all, delays: all.min(self.bounds.delays - delays) };
        let visit = Visit { run: number, left };
        let mut following = Vec::new();
        let mut at_last = (0, 0);
        let mut seen = Seen::New;
        let mut run = Run::new(self.bounds.job, decisions, Trace::new(false));
        run.has_choices = left.all > 0;
        let outcome = caught(|| {
            run.drive(|world, at, choices| {
                let Coverage { commits, generations, .. } = world.oracle.coverage;
                let moves = std::mem::replace(&mut at_last, (commits, generations)) != at_last;
                // A run without a decision left is compared where that is likely to end it.
                let is_compared = if left.all > 0 { !choices.is_empty() } else { moves };
                if is_compared && at == world.events {
                    seen = self.note(world.identity(), visit);
                }
                let may_follow = |choice: &&Choice| **choice != Choice::Late || left.delays > 0;
                if seen == Seen::New {
                    let next = choices.iter().filter(may_follow);
                    let next = next.map(|&choice| Decision { at, choice });
                    following.extend(next.map(|next| [decisions, &[next]].concat()));
                }
                seen != Seen::ByAnother
            })
        });
        let mut found = self.found.lock().expect(UNPOISONED);
        found.runs += 1;
        found.events += run.world.events;
        found.depth = found.depth.max(run.world.events);
        found.known += u64::from(seen == Seen::ByAnother);
        found.symmetric += run.alike.left_out;
        if let Err(what) = outcome {
            found.violations.push((decisions.to_vec(), what));
        }
        following
    }

    /// Notes that a run is in a state. Returns who has been there with as much left to decide.
    fn note(&self, state: u64, visit: Visit) -> Seen {
        let mut known = self.known.lock().expect(UNPOISONED);
        match known.insert(state, visit) {
            Some(before) if before.run == visit.run => Seen::ByItself,
            Some(before) if before.left.covers(visit.left) => {
                known.insert(state, before);
                Seen::ByAnother
            }
            _ => Seen::New,
        }
    }
}

/// A run by decisions.
struct Run<'a> {
    world: World,
    decisions: Peekable<slice::Iter<'a, Decision>>,
    alike: Alike,
    /// Whether further decisions may follow.
    has_choices: bool,
}

impl<'a> Run<'a> {
    fn new(job: Explored, decisions: &'a [Decision], trace: Trace) -> Self {
        let world = World::explored(Setting::explored(job), trace);
        Self {
            world,
            decisions: decisions.iter().peekable(),
            alike: Alike::default(),
            has_choices: false,
        }
    }

    /// Runs to the end. When all decisions are made, `at` gets the world, the number of events
    /// before a choice, and the choices there, and returns whether to go on.
    fn drive(&mut self, mut at: impl FnMut(&World, u64, &[Choice]) -> bool) -> Result<(), String> {
        let Self { world, decisions, alike, has_choices } = self;
        world.begin();
        while world.master.outcome.is_none() {
            let here = world.events;
            while let Some(decision) = decisions.next_if(|decision| decision.at <= here) {
                world.decide(decision.choice);
                alike.note_choice(decision.choice);
            }
            let event = world.clock.peek().ok_or("no event is scheduled")?;
            let is_free = decisions.peek().is_none();
            let is_of_master = matches!(event, Event::Master);
            if is_free {
                let choices = if *has_choices { alike.choices(world, event) } else { Vec::new() };
                if !at(world, here, &choices) {
                    return Ok(());
                }
            }
            alike.note(world, event);
            let before = world.actions;
            if !world.step()? {
                return Ok(());
            }
            if is_free && is_of_master && *has_choices {
                let within = (1..world.actions - before).map(Choice::KillMaster);
                at(world, here, &within.collect::<Vec<_>>());
            }
        }
        world.check_end().map(drop)
    }
}

const UNPOISONED: &str = "nothing panics under this lock";
