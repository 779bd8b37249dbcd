//! The whole: a master, its processes, the wires between them, and what happens next.

use std::num::NonZeroU64;
use std::time::Duration;

use elasticdl_master::job::{Batch, CheckpointEvery, CheckpointSpec, Exit, JobSpec, LaunchId};
use elasticdl_worker::core::swap::Build;

use super::checkpoints::{Vault, Work};
use super::clock::{Clock, Dice, Micros};
use super::faults::Storm;
use super::master::Master;
use super::nccl::{Communicators, Gpus};
use super::network::{LinkId, MASTER, Network};
use super::oracles::{Books, Tally};
use super::pods;
use super::process::Process;
use super::story::{Story, tell};
use crate::job_spec;

/// What happens at some moment. `p` is a process, by the order in which they were started.
#[derive(Debug)]
pub(super) enum Event {
    /// Something reaches the kernel of the link's end `to`.
    Arrive { link: LinkId, to: usize },
    /// A worker is to give a sign of life.
    Beat { p: usize },
    /// The control thread waited long enough for the master to end the stream.
    CloseDue { p: usize },
    /// The control thread looks at its stream and at what the trainer wants said.
    Control { p: usize },
    /// A signal reaches the process.
    Die { p: usize, signal: i32 },
    /// The storm may have something in store.
    Gust,
    /// A ping on the stream `link` should have been answered by now.
    KeepAlive { p: usize, link: LinkId },
    /// A part of a checkpoint, or its manifest, is written.
    Kept { p: usize, work: Box<Work> },
    /// What a fault did is undone.
    Heal(super::faults::Undo),
    /// A leaver was not let go in time.
    LeaveDue { p: usize },
    /// The master's task looks at its inputs and its clock.
    Master,
    /// A process has built its NCCL communicator of this generation, or given up.
    Nccl { p: usize, generation: u64, build: Build },
    /// A worker was dialled, and its accepting thread looks who it is.
    Porter { p: usize, link: LinkId },
    /// A worker without a stream looks whether a master is there.
    Probe { p: usize },
    /// The master's system notices that a process has ended.
    Reap { p: usize },
    /// A process has been made and runs.
    Start { p: usize },
    /// SIGTERM reaches the process.
    Terminate { p: usize },
    /// The trainer goes on, unless it has for another reason.
    Trainer { p: usize, ticket: u32 },
}

impl Event {
    /// The process whose threads this needs.
    fn runs_in(&self) -> Option<usize> {
        match *self {
            Self::Beat { p }
            | Self::CloseDue { p }
            | Self::Control { p }
            | Self::KeepAlive { p, .. }
            | Self::Kept { p, .. }
            | Self::LeaveDue { p }
            | Self::Nccl { p, .. }
            | Self::Porter { p, .. }
            | Self::Probe { p }
            | Self::Start { p }
            | Self::Terminate { p }
            | Self::Trainer { p, .. } => Some(p),
            Self::Arrive { .. } | Self::Die { .. } | Self::Gust => None,
            Self::Heal(_) | Self::Master | Self::Reap { .. } => None,
        }
    }
}

/// What a run's seed decides before it begins.
#[derive(Clone, Debug)]
pub(super) struct Setting {
    pub(super) spec: JobSpec,
    /// Records of each file.
    pub(super) files: Vec<u64>,
    /// Parameters of a segment on the ring.
    pub(super) segment_len: usize,
    /// The longest time to describe a data set or to build a model.
    pub(super) build_us: Micros,
    /// Mean time to compute a record's gradient.
    pub(super) record_us: Micros,
    /// The longest time from the master's wish to a process's end.
    pub(super) kill_us: Micros,
    /// What the next master finds may be older than what the last one has done.
    pub(super) keeps_late: bool,
    /// `None` where workers compute on CPUs.
    pub(super) gpus: Option<Gpus>,
}

/// One run.
#[derive(Debug)]
pub(super) struct World {
    pub(super) dice: Dice,
    pub(super) clock: Clock<Event>,
    pub(super) setting: Setting,
    pub(super) net: Network,
    pub(super) master: Master,
    /// In the order in which they were started, the dead ones too.
    pub(super) processes: Vec<Process>,
    pub(super) storm: Storm,
    pub(super) vault: Vault,
    pub(super) communicators: Communicators,
    pub(super) books: Books,
    pub(super) story: Story,
    pub(super) events: u64,
    violation: Option<String>,
}

impl World {
    pub(super) fn new(seed: u64, story: Story) -> Self {
        let mut dice = Dice::new(seed);
        let setting = Setting::draw(&mut dice, seed);
        let latency = dice.between(10, 150);
        let storm = Storm::draw(&mut dice, &setting.spec);
        Self {
            clock: Clock::new(),
            net: Network::new(latency),
            master: Master::new(setting.spec.clone()),
            processes: Vec::new(),
            storm,
            vault: Vault::default(),
            communicators: Communicators::default(),
            books: Books::new(seed),
            story,
            events: 0,
            violation: None,
            setting,
            dice,
        }
    }

    /// Runs the job to its end.
    ///
    /// # Errors
    /// What should not have happened.
    pub(super) fn run(&mut self) -> Result<Tally, String> {
        tell!(self, "{:?}", self.setting);
        self.books.tally.control_storms = u64::from(self.storm.is_of_control);
        self.master_acts();
        self.clock.after(0, Event::Gust);
        while self.master.outcome.is_none() {
            let Some(event) = self.clock.next() else {
                return Err("nothing can happen any more".into());
            };
            self.events += 1;
            self.dispatch(event);
            self.blow();
            if let Some(violation) = self.violation.take() {
                return Err(violation);
            }
            if let Err(late) = self.check_time() {
                self.tell_who_waits();
                return Err(late);
            }
        }
        self.check_end()?;
        Ok(self.books.tally.clone())
    }

    /// Records that something happened that must not.
    pub(super) fn violate(&mut self, what: String) {
        tell!(self, "VIOLATION: {what}");
        self.violation.get_or_insert(what);
    }

    /// How long it takes a thread to wake up.
    pub(super) fn thread_delay(&mut self) -> Micros {
        match self.dice.below(100) {
            0 => self.dice.between(100, 3000),
            _ => self.dice.between(2, 20),
        }
    }

    /// Something happens, or waits until its process goes on.
    pub(super) fn dispatch(&mut self, event: Event) {
        if let Some(p) = event.runs_in() {
            let process = &mut self.processes[p];
            if !process.is_alive() {
                return;
            }
            if process.paused {
                return process.deferred.push(event);
            }
        }
        if self.master.paused && matches!(event, Event::Master) {
            self.master.deferred = true;
            return;
        }
        match event {
            Event::Arrive { link, to } => self.on_arrive(link, to),
            Event::Beat { p } => self.on_beat(p),
            Event::CloseDue { p } => self.on_close_due(p),
            Event::Control { p } => self.on_control(p),
            Event::Die { p, signal } => self.die(p, Exit::Signal(signal), false),
            Event::Gust => {}
            Event::Heal(undo) => self.undo(undo),
            Event::KeepAlive { p, link } => self.on_keep_alive(p, link),
            // A store that is away is waited for.
            Event::Kept { .. } if self.vault.is_away => self.clock.after(STORE_RETRY_US, event),
            Event::Kept { p, work } => self.on_kept(p, *work),
            Event::LeaveDue { p } => self.on_leave_due(p),
            Event::Master => self.on_master(),
            Event::Nccl { p, generation, build } => self.on_nccl(p, generation, build),
            Event::Porter { p, link } => self.on_porter(p, link),
            Event::Probe { p } => self.on_probe(p),
            Event::Reap { p } => self.on_reaped(p),
            Event::Start { p } => self.on_start(p),
            Event::Terminate { p } => self.on_terminate(p),
            Event::Trainer { p, ticket } => self.on_trainer(p, ticket),
        }
    }

    /// The number of the process that was started for `launch`.
    pub(super) fn process_of(&self, launch: LaunchId) -> Option<usize> {
        self.processes.iter().position(|process| process.launch == launch)
    }

    /// A process, as stories name it.
    pub(super) fn name(&self, p: usize) -> String {
        match self.processes[p].worker {
            Some(worker) => format!("worker {worker}"),
            None => format!("launch {}", self.processes[p].launch.0),
        }
    }

    /// Where everybody is, for the story of a run that goes on for ever.
    fn tell_who_waits(&mut self) {
        for p in (0..self.processes.len()).filter(|&p| self.processes[p].is_alive()) {
            tell!(self, "{}: {:?}", self.name(p), self.processes[p].trainer);
        }
        tell!(self, "master: {:?}", self.master.job.status(self.time()));
    }

    fn check_time(&self) -> Result<(), String> {
        let calm = self.storm.calm_since;
        if calm.is_some_and(|since| self.clock.now() > since + PATIENCE_US) {
            return Err(format!(
                "no end in sight, {} s after the last fault",
                PATIENCE_US / 1_000_000
            ));
        }
        if self.events > EVENTS_MAX {
            return Err(format!("no end in sight after {EVENTS_MAX} events"));
        }
        if self.clock.len() > DUE_MAX {
            return Err(format!("{} events are due", self.clock.len()));
        }
        Ok(())
    }

    /// Whether there is a master, and `p` is not cut off from its host.
    pub(super) fn reaches_master(&self, p: usize) -> bool {
        self.master.is_alive && !self.net.is_cut(MASTER, p + 1)
    }
}

impl Setting {
    fn draw(dice: &mut Dice, seed: u64) -> Self {
        let max_workers = [1, 2, 2, 3, 3, 3, 4, 4, 5][dice.below(9) as usize];
        let num_workers = dice.between(1.max(max_workers / 2), max_workers);
        let min_workers = if dice.chance(2, 3) { 1 } else { dice.between(1, num_workers) };
        let files: Vec<u64> = (0..dice.between(1, 2)).map(|_| dice.between(3, 36)).collect();
        let some = |n: u64| NonZeroU64::new(n).expect("drawn from 1 on");
        let batch = match dice.chance(3, 4) {
            true => Batch::Global(some(dice.between(1, files.iter().sum::<u64>().min(8)))),
            false => Batch::PerWorker(some(dice.between(1, 3))),
        };
        let timeout_ms = dice.chance(7, 8).then(|| dice.between(2, 8) * 100);
        // From dice of their own: other runs stay as they are.
        let per_pod = pods::draw(&mut Dice::new(seed.rotate_left(16)));
        let pods_max = if per_pod > 1 { 3 } else { u64::MAX };
        let number = |pods: u64| (pods.min(pods_max) * per_pod) as u32;
        let spec = JobSpec {
            min_workers: number(min_workers),
            max_workers: number(max_workers),
            workers_per_pod: per_pod as u32,
            epochs: dice.between(1, 3) as u32,
            max_steps: dice.chance(1, 8).then(|| dice.between(1, 12)),
            records_per_shard: NonZeroU64::new(dice.below(8)),
            shuffle: dice.chance(1, 2),
            seed,
            // Whoever ends by its own doing, for the master has cut it off, is counted as a
            // failure.
            max_worker_restarts: 1000,
            worker_timeout: timeout_ms.map(Duration::from_millis),
            // From dice of their own: other runs stay as they are.
            checkpoints: checkpoints(&mut Dice::new(!seed)),
            ..job_spec("simulated", "numbers", number(num_workers), batch)
        };
        Self {
            spec,
            files,
            segment_len: if dice.chance(1, 6) {
                dice.between(2, 6) as usize
            } else {
                usize::MAX >> 1
            },
            build_us: if dice.chance(1, 4) { 50_000 } else { 5_000 },
            record_us: dice.between(10, 800),
            kill_us: if dice.chance(1, 3) { 1_000_000 } else { 5_000 },
            keeps_late: dice.chance(1, 2),
            gpus: Gpus::draw(&mut Dice::new(seed.rotate_left(32))),
        }
    }

    /// Records of one epoch.
    pub(super) fn records(&self) -> u64 {
        self.files.iter().sum()
    }

    /// Parameters of the model: one for each record of each epoch.
    pub(super) fn parameters(&self) -> usize {
        (self.records() * u64::from(self.spec.epochs)) as usize
    }
}

fn checkpoints(dice: &mut Dice) -> Option<CheckpointSpec> {
    let steps = NonZeroU64::new(dice.between(1, 8)).expect("drawn from 1 on");
    let every = match dice.chance(3, 4) {
        true => CheckpointEvery::Steps(steps),
        false => CheckpointEvery::Time(Duration::from_millis(steps.get())),
    };
    dice.chance(1, 2).then(|| CheckpointSpec {
        dir: "vault".into(),
        every,
        keep: 1,
        exclusive: false,
    })
}

/// A job of a few steps is over long before; what takes longest are replacements that wait for one
/// another, and a worker that is told to leave when nobody can take its place.
const PATIENCE_US: Micros = 120_000_000;
const STORE_RETRY_US: Micros = 100_000;
const EVENTS_MAX: u64 = 400_000;
const DUE_MAX: usize = 10_000;
