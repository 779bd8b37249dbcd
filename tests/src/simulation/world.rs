//! The simulated world: a master, its processes, the network between them, and the next event.

use std::num::NonZeroU64;
use std::time::Duration;

use elasticdl::core::transport_switch::NcclBuild;
use elasticdl_master::job::{Batch, CheckpointEvery, CheckpointSpec, Exit, JobSpec, LaunchId};

use super::checkpoints::{CheckpointStore, CheckpointWork};
use super::clock::{Clock, Micros, SimRng};
use super::faults::FaultPlan;
use super::master::Master;
use super::nccl::{Communicators, Gpus};
use super::network::{LinkId, MASTER, Network};
use super::oracles::{Coverage, Oracle};
use super::pods;
use super::process::Process;
use super::trace::{Trace, trace};
use crate::job_spec;

/// An event at some point in time. `p` is the index of a process, in the order of their starts.
#[derive(Debug)]
pub(super) enum Event {
    /// A packet reaches the kernel of the link's end `to`.
    Arrive { link: LinkId, to: usize },
    /// A worker is due to send a heartbeat.
    Heartbeat { p: usize },
    /// The control thread has waited long enough for the master to end the stream.
    CloseDue { p: usize },
    /// The control thread polls its stream and the trainer's messages.
    Control { p: usize },
    /// A signal kills the process.
    Die { p: usize, signal: i32 },
    /// The fault plan is polled.
    InjectFault,
    /// A ping on the stream `link` should have been answered by now.
    KeepAlive { p: usize, link: LinkId },
    /// A part of a checkpoint, or its manifest, is written.
    CheckpointWritten { p: usize, work: Box<CheckpointWork> },
    /// A temporary fault ends.
    Heal(super::faults::Undo),
    /// A leaving worker was not released in time.
    LeaveDue { p: usize },
    /// The master's task polls its inputs and its timers.
    Master,
    /// A process has built its NCCL communicator of this generation, or has given up.
    Nccl { p: usize, generation: u64, build: NcclBuild },
    /// A worker was dialled, and its acceptor reads the handshake.
    Acceptor { p: usize, link: LinkId },
    /// A worker without a stream probes for a master.
    Probe { p: usize },
    /// The system of the master notices that a process has ended.
    Reap { p: usize },
    /// A process has been created and runs.
    Start { p: usize },
    /// SIGTERM reaches the process.
    Terminate { p: usize },
    /// The trainer continues, unless another wake-up came first.
    Trainer { p: usize, ticket: u32 },
}

impl Event {
    /// The process whose threads handle the event.
    fn runs_in(&self) -> Option<usize> {
        match *self {
            Self::Heartbeat { p }
            | Self::CloseDue { p }
            | Self::Control { p }
            | Self::KeepAlive { p, .. }
            | Self::CheckpointWritten { p, .. }
            | Self::LeaveDue { p }
            | Self::Nccl { p, .. }
            | Self::Acceptor { p, .. }
            | Self::Probe { p }
            | Self::Start { p }
            | Self::Terminate { p }
            | Self::Trainer { p, .. } => Some(p),
            Self::Arrive { .. } | Self::Die { .. } | Self::InjectFault => None,
            Self::Heal(_) | Self::Master | Self::Reap { .. } => None,
        }
    }
}

/// The parameters of a run, which are drawn from its seed before it begins.
#[derive(Clone, Debug)]
pub(super) struct Setting {
    pub(super) spec: JobSpec,
    /// Number of records of each file.
    pub(super) files: Vec<u64>,
    /// Number of parameters of a segment on the ring.
    pub(super) segment_len: usize,
    /// Maximum time to describe a data set or to build a model.
    pub(super) build_us: Micros,
    /// Mean time to compute the gradient of a record.
    pub(super) record_us: Micros,
    /// Maximum time from the master's order to the end of the process.
    pub(super) kill_us: Micros,
    /// Whether the snapshot that the next master finds may be older than the last actions of this
    /// one.
    pub(super) may_restore_stale: bool,
    /// `None`: workers compute on CPUs.
    pub(super) gpus: Option<Gpus>,
}

/// One run.
#[derive(Debug)]
pub(super) struct World {
    pub(super) rng: SimRng,
    pub(super) clock: Clock<Event>,
    pub(super) setting: Setting,
    pub(super) net: Network,
    pub(super) master: Master,
    /// In the order of their starts, including those that have ended.
    pub(super) processes: Vec<Process>,
    pub(super) fault_plan: FaultPlan,
    pub(super) checkpoint_store: CheckpointStore,
    pub(super) communicators: Communicators,
    pub(super) oracle: Oracle,
    pub(super) trace: Trace,
    pub(super) events: u64,
    violation: Option<String>,
}

impl World {
    pub(super) fn new(seed: u64, trace: Trace) -> Self {
        let mut rng = SimRng::new(seed);
        let setting = Setting::draw(&mut rng, seed);
        let latency = rng.between(10, 150);
        let fault_plan = FaultPlan::draw(&mut rng, &setting.spec);
        Self {
            clock: Clock::new(),
            net: Network::new(latency),
            master: Master::new(setting.spec.clone()),
            processes: Vec::new(),
            fault_plan,
            checkpoint_store: CheckpointStore::default(),
            communicators: Communicators::default(),
            oracle: Oracle::new(seed),
            trace,
            events: 0,
            violation: None,
            setting,
            rng,
        }
    }

    /// Runs the job to its end.
    ///
    /// # Errors
    /// The violation that was found.
    pub(super) fn run(&mut self) -> Result<Coverage, String> {
        trace!(self, "{:?}", self.setting);
        self.oracle.coverage.control_only_runs = u64::from(self.fault_plan.is_control_only);
        self.master_acts();
        self.clock.after(0, Event::InjectFault);
        while self.master.outcome.is_none() {
            let Some(event) = self.clock.next() else {
                return Err("no event is scheduled".into());
            };
            self.events += 1;
            self.dispatch(event);
            self.inject();
            if let Some(violation) = self.violation.take() {
                return Err(violation);
            }
            if let Err(late) = self.check_time() {
                self.trace_waiting();
                return Err(late);
            }
        }
        self.check_end()?;
        Ok(self.oracle.coverage.clone())
    }

    /// Records a violation of an invariant.
    pub(super) fn violate(&mut self, what: String) {
        trace!(self, "VIOLATION: {what}");
        self.violation.get_or_insert(what);
    }

    /// Draws the time that a thread takes to wake up.
    pub(super) fn thread_delay(&mut self) -> Micros {
        match self.rng.below(100) {
            0 => self.rng.between(100, 3000),
            _ => self.rng.between(2, 20),
        }
    }

    /// Handles an event, or defers it while its process is stopped.
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
            Event::Heartbeat { p } => self.on_heartbeat(p),
            Event::CloseDue { p } => self.on_close_due(p),
            Event::Control { p } => self.on_control(p),
            Event::Die { p, signal } => self.die(p, Exit::Signal(signal), false),
            Event::InjectFault => {}
            Event::Heal(undo) => self.undo(undo),
            Event::KeepAlive { p, link } => self.on_keep_alive(p, link),
            // A write to storage that is unavailable is retried.
            Event::CheckpointWritten { .. } if self.checkpoint_store.is_unavailable => {
                self.clock.after(STORE_RETRY_US, event)
            }
            Event::CheckpointWritten { p, work } => self.on_checkpoint_written(p, *work),
            Event::LeaveDue { p } => self.on_leave_due(p),
            Event::Master => self.on_master(),
            Event::Nccl { p, generation, build } => self.on_nccl(p, generation, build),
            Event::Acceptor { p, link } => self.on_acceptor(p, link),
            Event::Probe { p } => self.on_probe(p),
            Event::Reap { p } => self.on_reaped(p),
            Event::Start { p } => self.on_start(p),
            Event::Terminate { p } => self.on_terminate(p),
            Event::Trainer { p, ticket } => self.on_trainer(p, ticket),
        }
    }

    /// Index of the process that was started for `launch`.
    pub(super) fn process_of(&self, launch: LaunchId) -> Option<usize> {
        self.processes.iter().position(|process| process.launch == launch)
    }

    /// Name of a process in the trace.
    pub(super) fn name(&self, p: usize) -> String {
        match self.processes[p].worker {
            Some(worker) => format!("worker {worker}"),
            None => format!("launch {}", self.processes[p].launch.0),
        }
    }

    /// Traces the state of all processes, for a run that does not end.
    fn trace_waiting(&mut self) {
        for p in (0..self.processes.len()).filter(|&p| self.processes[p].is_alive()) {
            trace!(self, "{}: {:?}", self.name(p), self.processes[p].trainer);
        }
        trace!(self, "master: {:?}", self.master.job.status(self.time()));
    }

    fn check_time(&self) -> Result<(), String> {
        let healed = self.fault_plan.healed_since;
        if healed.is_some_and(|since| self.clock.now() > since + RECOVERY_MAX_US) {
            return Err(format!(
                "the job has not ended {} s after the last fault",
                RECOVERY_MAX_US / 1_000_000
            ));
        }
        if self.events > EVENTS_MAX {
            return Err(format!("the job has not ended after {EVENTS_MAX} events"));
        }
        if self.clock.len() > DUE_MAX {
            return Err(format!("{} events are due", self.clock.len()));
        }
        Ok(())
    }

    /// Whether the master is alive, and `p` is not cut off from its host.
    pub(super) fn reaches_master(&self, p: usize) -> bool {
        self.master.is_alive && !self.net.is_cut(MASTER, p + 1)
    }
}

impl Setting {
    fn draw(rng: &mut SimRng, seed: u64) -> Self {
        let max_workers = [1, 2, 2, 3, 3, 3, 4, 4, 5][rng.below(9) as usize];
        let num_workers = rng.between(1.max(max_workers / 2), max_workers);
        let min_workers = if rng.chance(2, 3) { 1 } else { rng.between(1, num_workers) };
        let files: Vec<u64> = (0..rng.between(1, 2)).map(|_| rng.between(3, 36)).collect();
        let some = |n: u64| NonZeroU64::new(n).expect("drawn from 1 on");
        let batch = if rng.chance(3, 4) {
            Batch::Global(some(rng.between(1, files.iter().sum::<u64>().min(8))))
        } else {
            Batch::PerWorker(some(rng.between(1, 3)))
        };
        let timeout_ms = rng.chance(7, 8).then(|| rng.between(2, 8) * 100);
        // From a generator of their own, so that the other draws of a seed stay as they are.
        let per_pod = pods::draw(&mut SimRng::new(seed.rotate_left(16)));
        let pods_max = if per_pod > 1 { 3 } else { u64::MAX };
        let number = |pods: u64| (pods.min(pods_max) * per_pod) as u32;
        let spec = JobSpec {
            min_workers: number(min_workers),
            max_workers: number(max_workers),
            workers_per_pod: per_pod as u32,
            epochs: rng.between(1, 3) as u32,
            max_steps: rng.chance(1, 8).then(|| rng.between(1, 12)),
            records_per_shard: NonZeroU64::new(rng.below(8)),
            shuffle: rng.chance(1, 2),
            seed,
            // A worker that ends by itself, because it is cut off from the master, counts as a
            // failure.
            max_worker_restarts: 1000,
            worker_timeout: timeout_ms.map(Duration::from_millis),
            // From a generator of their own, so that the other draws of a seed stay as they are.
            checkpoints: checkpoints(&mut SimRng::new(!seed)),
            ..job_spec("simulated", "numbers", number(num_workers), batch)
        };
        Self {
            spec,
            files,
            segment_len: if rng.chance(1, 6) {
                rng.between(2, 6) as usize
            } else {
                usize::MAX >> 1
            },
            build_us: if rng.chance(1, 4) { 50_000 } else { 5_000 },
            record_us: rng.between(10, 800),
            kill_us: if rng.chance(1, 3) { 1_000_000 } else { 5_000 },
            may_restore_stale: rng.chance(1, 2),
            gpus: Gpus::draw(&mut SimRng::new(seed.rotate_left(32))),
        }
    }

    /// Number of records of one epoch.
    pub(super) fn records(&self) -> u64 {
        self.files.iter().sum()
    }

    /// Number of parameters of the model: one for each record of each epoch.
    pub(super) fn parameters(&self) -> usize {
        (self.records() * u64::from(self.spec.epochs)) as usize
    }
}

fn checkpoints(rng: &mut SimRng) -> Option<CheckpointSpec> {
    let steps = NonZeroU64::new(rng.between(1, 8)).expect("drawn from 1 on");
    let every = if rng.chance(3, 4) {
        CheckpointEvery::Steps(steps)
    } else {
        CheckpointEvery::Time(Duration::from_millis(steps.get()))
    };
    rng.chance(1, 2).then(|| CheckpointSpec {
        dir: "vault".into(),
        every,
        keep: 1,
        exclusive: false,
    })
}

/// A job of a few steps is over long before. What takes longest are replacements that wait for one
/// another, and a worker that got SIGTERM when no other one can take its place.
const RECOVERY_MAX_US: Micros = 120_000_000;
const STORE_RETRY_US: Micros = 100_000;
const EVENTS_MAX: u64 = 400_000;
const DUE_MAX: usize = 10_000;
