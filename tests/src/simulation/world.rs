//! The simulated world: a master, its processes, the network between them, and the next event.

use std::collections::BTreeMap;
use std::rc::Rc;

use elasticdl_master::job::{Exit, LaunchId};

use super::clock::{Clock, Micros, SimRng};
use super::coroutine::Coroutine;
use super::state::checkpoints::CheckpointStore;
use super::state::coverage::Coverage;
use super::state::event::Event;
use super::state::faults::FaultPlan;
use super::state::master::{FormerMaster, Master};
use super::state::nccl::Communicators;
use super::state::network::{MASTER, Network};
use super::state::oracle::Oracle;
use super::state::process::Process;
use super::state::setting::Setting;
use super::state::thread::ThreadId;
use super::trace::{Trace, trace};

/// One run.
#[derive(Debug)]
pub(super) struct World {
    pub(super) rng: SimRng,
    pub(super) clock: Clock<Event>,
    pub(super) setting: Rc<Setting>,
    pub(super) net: Network,
    pub(super) master: Master,
    pub(super) former_master: Option<Box<FormerMaster>>,
    /// In the order of their starts, including those that have ended.
    pub(super) processes: Vec<Process>,
    /// The threads of all processes that have not ended and do not run at the moment.
    pub(super) coroutines: BTreeMap<ThreadId, Coroutine>,
    pub(super) fault_plan: FaultPlan,
    pub(super) checkpoint_store: CheckpointStore,
    pub(super) communicators: Communicators,
    pub(super) oracle: Oracle,
    pub(super) trace: Trace,
    pub(super) events: u64,
    /// Number of actions of masters.
    pub(super) actions: u64,
    violation: Option<String>,
}

impl World {
    pub(super) fn new(seed: u64, trace: Trace) -> Self {
        let mut rng = SimRng::new(seed);
        let setting = Setting::draw(&mut rng, seed);
        let latency = rng.between(10, 150);
        let fault_plan = FaultPlan::draw(&mut rng, &setting);
        Self::with(rng, (setting, seed), latency, fault_plan, trace)
    }

    /// A world without faults, in which everything takes its mean time.
    pub(super) fn explored(setting: Setting, trace: Trace) -> Self {
        Self::with(SimRng::middle(), (setting, 0), MEAN_LATENCY_US, FaultPlan::default(), trace)
    }

    fn with(
        rng: SimRng,
        (setting, seed): (Setting, u64),
        latency: Micros,
        fault_plan: FaultPlan,
        trace: Trace,
    ) -> Self {
        Self {
            clock: Clock::new(),
            net: Network::new(latency),
            master: Master::new(setting.spec.clone()),
            former_master: None,
            processes: Vec::new(),
            coroutines: BTreeMap::new(),
            fault_plan,
            checkpoint_store: CheckpointStore::default(),
            communicators: Communicators::default(),
            oracle: Oracle::new(seed),
            trace,
            events: 0,
            actions: 0,
            violation: None,
            setting: Rc::new(setting),
            rng,
        }
    }

    /// Runs the job to its end.
    pub(super) fn run(&mut self) -> Result<Coverage, String> {
        self.begin();
        while self.master.outcome.is_none() {
            if !self.step()? {
                return Ok(self.oracle.coverage.clone());
            }
        }
        self.check_end()?;
        Ok(self.oracle.coverage.clone())
    }

    pub(super) fn begin(&mut self) {
        trace!(self, "{:?}", self.setting);
        self.oracle.coverage.control_only_runs = u64::from(self.fault_plan.is_control_only);
        self.master_acts();
        self.clock.after(0, Event::InjectFault);
    }

    /// Handles the next event. Returns whether the run goes on.
    pub(super) fn step(&mut self) -> Result<bool, String> {
        let event = self.clock.next().ok_or("no event is scheduled")?;
        self.events += 1;
        self.dispatch(event);
        self.inject();
        if let Some(violation) = self.violation.take() {
            return Err(violation);
        }
        if self.oracle.is_void {
            self.oracle.coverage.void += 1;
            return Ok(false);
        }
        if self.oracle.coverage.rows_lost > 0 {
            return Ok(false);
        }
        if let Err(late) = self.check_time() {
            self.trace_waiting();
            return Err(late);
        }
        Ok(true)
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
            Event::BreakFetch { p } => self.break_fetch(p),
            Event::Heartbeat { p } => self.on_heartbeat(p),
            Event::CloseDue { p } => self.on_close_due(p),
            Event::Control { p } => self.on_control(p),
            Event::Die { p, signal } => self.die(p, Exit::Signal(signal), false),
            Event::FormerMaster => self.on_former_master(),
            Event::InjectFault => {}
            Event::Heal(undo) => self.undo(undo),
            Event::KeepAlive { p, link } => self.on_keep_alive(p, link),
            // A write to storage that is unavailable is retried.
            Event::CheckpointWritten { .. } if self.checkpoint_store.is_unavailable.get() => {
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
            Event::Thread { thread, ticket } => self.on_thread(thread, ticket),
        }
    }

    /// Index of the process that was started for `launch`.
    pub(super) fn process_of(&self, launch: LaunchId) -> Option<usize> {
        self.processes.iter().position(|process| process.launch == launch)
    }

    /// Whether a process was started as a table server.
    pub(super) fn serves_tables(&self, p: usize) -> bool {
        self.setting.spec.server_slots().contains(&self.processes[p].index)
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
            let Process { threads, trainer, .. } = &self.processes[p];
            trace!(self, "{}: {threads:?}, {trainer:?}", self.name(p));
        }
        trace!(self, "master: {:?}", self.master.job.status(self.time()));
    }

    fn check_time(&self) -> Result<(), String> {
        let healed = self.fault_plan.healed_since;
        let has_hung = self.oracle.coverage.hung > 0;
        let most = RECOVERY_MAX_US + if has_hung { HANG_MAX_US } else { 0 };
        if healed.is_some_and(|since| self.clock.now() > since + most) {
            return Err(format!(
                "the job has not ended {} s after the last fault",
                most / 1_000_000
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

/// A job of a few steps is over long before.
const RECOVERY_MAX_US: Micros = 40_000_000;

/// A hang is noticed within an hour where the master can't tell it from the creation of a state.
const HANG_MAX_US: Micros = 3_700_000_000;

const MEAN_LATENCY_US: Micros = 100;

const STORE_RETRY_US: Micros = 100_000;

const EVENTS_MAX: u64 = 4_000_000;

/// A time-out stays until it is due: those of threads that follow a group add up.
const DUE_MAX: usize = 100_000;
