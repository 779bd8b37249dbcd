//! The job: its parts, and the dispatch of events, timers and actions.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use elasticdl_proto::{FileList, Generation, RecordRange, WorkerId};

use super::action::{Action, Outcome, ToWorker};
use super::data::lease_table::LeaseTable;
use super::event::{ConnectionId, Event, Exit, Finished, LaunchId, Resume};
use super::group::choose::Group;
use super::handlers::disconnected::Reconnected;
use super::handlers::inference::ShardResults;
use super::lifecycle::restart::{
    Budget, EXIT_MASTER_LOST, Restarts, TooMany, describe, is_own_fault,
};
use super::lifecycle::takeover::Takeover;
use super::outbox::{Outbox, Timer};
use super::reporting::counters::End;
use super::reporting::history::{JobHistory, clip};
use super::spec::JobSpec;
use super::time::Time;
use super::workers::table::{ExitAccounting, Launch, Stage, WorkerTable};

/// A job: events and the time in, actions out.
#[derive(Debug)]
pub struct Job {
    pub(super) spec: JobSpec,
    pub(super) phase: Phase,
    /// Desired number of workers, as last requested.
    pub(super) wanted: u32,
    /// Launches left that fill a slot for the first time; every further launch is a restart.
    pub(super) initial_launches_left: u32,
    pub(super) workers: WorkerTable,
    pub(super) group: Group,
    /// Set while a previous master's group is being taken over.
    pub(super) takeover: Option<Takeover>,
    /// Workers that reconnected to this master, until it is known what they hold.
    pub(super) reconnected: BTreeMap<WorkerId, Reconnected>,
    /// Number of workers to which records may be leased; updated when a worker comes or goes, not
    /// at every lease.
    pub(super) eligible: u64,
    /// Whether all workers were silent for longer than the worker timeout at the last check.
    pub(super) is_cut_off: bool,
    /// End of the join window: how long a group without a state waits for further workers.
    pub(super) join_window_until: Option<Time>,
    /// The worker that was asked to describe the data set.
    pub(super) dataset_describer: Option<WorkerId>,
    pub(super) dataset: Option<FileList>,
    pub(super) leases: Option<LeaseTable>,
    /// Results of an inference job's shards.
    pub(super) results: ShardResults,
    /// Number of parameters that the first ready worker's model has.
    pub(super) parameters: Option<u64>,
    /// Steps committed, as last reported.
    pub(super) step: u64,
    /// Whether the user has requested a checkpoint that has not been written yet.
    pub(super) checkpoint_requested: bool,
    /// The group's final report.
    pub(super) final_report: Option<Finished>,
    pub(super) restarts: Restarts,
    pub(super) history: JobHistory,
    /// See [`Job::masters`].
    pub(super) masters: u64,
    /// See [`Job::reserve_id_block`].
    pub(super) launches_reserved: u64,
    pub(super) generations_reserved: Generation,
    /// Until then new launches are assumed to be unschedulable.
    pub(super) unschedulable_until: Option<Time>,
    /// Actions, timers, and the version that has to be persisted.
    pub(super) out: Outbox,
}

/// The phase of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Ended(Outcome),
    /// All workers were asked to end.
    Ending(Outcome),
    Running,
    /// The user stopped the job; the group finishes its step.
    Stopping,
}

impl Job {
    /// A job that has just been submitted; its first action starts its first worker.
    ///
    /// `spec` has passed [`JobSpec::check`].
    #[must_use]
    pub fn new(spec: JobSpec) -> Self {
        let mut job = Self::new_silent(spec);
        job.launch_missing(Time::default());
        job
    }

    /// A job that has not started any worker yet.
    pub(super) fn new_silent(spec: JobSpec) -> Self {
        Self {
            phase: Phase::Running,
            wanted: spec.num_workers,
            initial_launches_left: spec.num_workers,
            workers: WorkerTable::new(spec.workers_per_pod),
            group: Group::default(),
            takeover: None,
            reconnected: BTreeMap::new(),
            eligible: 0,
            is_cut_off: false,
            join_window_until: None,
            dataset_describer: None,
            dataset: None,
            leases: None,
            results: ShardResults::default(),
            parameters: None,
            step: 0,
            checkpoint_requested: false,
            final_report: None,
            restarts: Restarts::new(spec.max_worker_restarts, Budget::default()),
            history: JobHistory::default(),
            masters: 1,
            launches_reserved: 0,
            generations_reserved: Generation::default(),
            unschedulable_until: None,
            out: Outbox::default(),
            spec,
        }
    }

    /// Handles an event that happened at `now`.
    ///
    /// An event that no longer applies (a message of a forgotten worker, the end of an unknown
    /// process) is ignored.
    pub fn handle(&mut self, now: Time, event: Event) {
        if matches!(self.phase, Phase::Ended(_)) {
            return;
        }
        match event {
            Event::Checkpoint => self.on_checkpoint_requested(),
            Event::PersistRefused { reason } => {
                let error = format!("the job's record can't be stored: {}", clip(&reason));
                self.end(now, Outcome::Failed, Some(error));
            }
            Event::PersistDelayed { reason } => {
                self.log_event(format!("the job's record is not stored yet: {}", clip(&reason)));
            }
            Event::Connected { connection, launch, address, pid, resume } => {
                self.on_connected(now, connection, launch, address, pid, resume);
            }
            Event::Disconnected { worker } => self.on_disconnected(now, worker),
            Event::LaunchExplained { launch, explanation } => {
                self.log_event(format!(
                    "{} was {}",
                    self.workers.name(launch, true),
                    clip(&explanation)
                ));
            }
            Event::LaunchLeaves { launch, reason } => self.on_launch_leaves(now, launch, &reason),
            Event::LaunchMade { launch, class } => self.on_launch_made(launch, class),
            Event::LaunchPrinted { launch, lines } => {
                if let Some(launch) = self.workers.launches.get_mut(&launch) {
                    launch.printed = Some(lines);
                }
            }
            Event::LaunchRuns { launch } => self.on_launch_runs(now, launch),
            Event::LaunchWaits { launch, wait } => self.on_launch_waits(now, launch, wait),
            Event::Message { worker, message } => self.on_message(now, worker, message),
            Event::ProcessEnded { launch, exit } => self.on_process_ended(now, launch, &exit),
            Event::Scale { num_workers } => self.on_scale(now, num_workers),
            Event::Stop => self.on_stop(now),
        }
    }

    /// The next action.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.out.poll_action()
    }

    /// The time at which [`Job::handle_timeout`] has to be called.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Time> {
        self.out.poll_timeout()
    }

    /// Runs the timers that are due at `now`.
    pub fn handle_timeout(&mut self, now: Time) {
        while let Some((at, timer)) = self.out.pop_due(now) {
            self.on_timer(now, at, timer);
        }
    }

    fn on_timer(&mut self, now: Time, at: Time, timer: Timer) {
        match timer {
            Timer::Broken(generation) => self.on_broken_due(now, generation),
            Timer::End => self.end_now(),
            Timer::Hello(launch) => self.on_hello_due(now, launch),
            Timer::Kill(launch) => self.on_kill_due(launch),
            Timer::Leave(worker) => self.on_leave_due(now, worker),
            Timer::Relaunch => self.launch_missing(now),
            Timer::Reconnect => self.on_reconnect_due(now),
            Timer::HeartbeatCheck => self.on_heartbeat_check(now, at),
            Timer::Stop => self.on_stop_due(),
            Timer::Suspend => self.on_suspend_due(),
            Timer::Window => self.reconcile(now),
        }
    }

    // ---- streams ----

    fn on_connected(
        &mut self,
        now: Time,
        connection: ConnectionId,
        launch: LaunchId,
        address: SocketAddr,
        pid: u32,
        resume: Option<Resume>,
    ) {
        let refusal = match self.workers.launches.get(&launch) {
            _ if matches!(self.phase, Phase::Ending(_)) => Some("the job is over"),
            None => Some("this master knows no such launch, or it has ended"),
            Some(l) if l.killed => Some("this launch is not wanted any more"),
            Some(_) if resume.is_some() => None,
            Some(l) if l.worker.is_some() => Some("this launch has already registered"),
            Some(l) if !l.stays() => Some("this launch is not wanted any more"),
            Some(_) => None,
        };
        if let Some(reason) = refusal {
            self.out.push(Action::Refuse { connection, reason: reason.into() });
            return;
        }
        if let Some(resume) = resume {
            return self.on_reconnected(now, connection, launch, address, pid, resume);
        }
        self.out.mark_dirty();
        self.out.cancel_timer(Timer::Hello(launch));
        let was_awaited =
            self.workers.launches.get(&launch).is_some_and(|l| l.disconnected.is_some());
        let worker = self.workers.admit(now, launch, address, pid);
        self.watch_heartbeats(now);
        self.out.push(Action::Admit { connection, worker });
        // In a container every process has id 1, which identifies nothing.
        let process = if pid == 1 { String::new() } else { format!(" (process {pid})") };
        self.log_event(format!("worker {worker} is up{process}"));
        if self.phase == Phase::Stopping {
            self.release(now, worker, "the job is stopping");
            return;
        }
        self.welcome(worker);
        if was_awaited {
            self.on_awaited_returned(now);
        }
    }

    /// Sends a new worker its first request.
    pub(super) fn welcome(&mut self, worker: WorkerId) {
        let (stage, message) = match &self.dataset {
            Some(dataset) => (Stage::Preparing, ToWorker::Prepare(dataset.clone())),
            None if self.dataset_describer.is_none() => {
                self.dataset_describer = Some(worker);
                (Stage::Describing, ToWorker::Describe)
            }
            None => return,
        };
        if let Some(w) = self.workers.connected.get_mut(&worker) {
            w.stage = stage;
        }
        self.send(worker, message);
    }

    /// Forgets a worker whose stream ended or that is not trusted, and releases the rest of its
    /// pod. If its process still runs after `grace`, it is killed. The kill is delayed because the
    /// stream of a dying process ends before its exit is known, and a kill would replace its exit
    /// code.
    pub(super) fn forget_with_pod(&mut self, now: Time, worker: WorkerId, grace: Duration) {
        let grace = self.exit_wait(grace);
        let Some(w) = self.workers.connected.get(&worker) else { return };
        let (launch, finished) = (w.launch, self.group.finished.contains_key(&worker));
        self.forget(now, worker, grace);
        if !finished {
            self.release_rest_of_pod(now, launch);
        }
    }

    /// How long a process may outlive its worker. The other workers of its pod get time to end by
    /// themselves.
    pub(super) fn exit_wait(&self, grace: Duration) -> Duration {
        if self.spec.workers_per_pod > 1 { grace.max(POD_GRACE) } else { grace }
    }

    fn forget(&mut self, now: Time, worker: WorkerId, grace: Duration) {
        let Some(gone) = self.workers.connected.remove(&worker) else {
            return;
        };
        self.out.mark_dirty();
        if let Some(takeover) = &mut self.takeover {
            takeover.awaiting_holdings.remove(&worker);
            takeover.steps.remove(&worker);
        }
        if let Some(leases) = &mut self.leases {
            leases.forget(worker);
        }
        self.reconnected.remove(&worker);
        self.count_eligible();
        self.reassign_describer(worker);
        let finished = self.group.finished.contains_key(&worker);
        let in_order = gone.leaving || gone.released;
        if gone.rank.is_some() && !finished {
            if in_order { &mut self.group.left } else { &mut self.group.lost }.push(worker);
        }
        let Some(launch) = self.workers.launches.get_mut(&gone.launch) else {
            return;
        };
        if finished {
            launch.accounting = ExitAccounting::Expected;
        }
        if !matches!(self.phase, Phase::Running | Phase::Stopping) {
            return;
        }
        if in_order || finished {
            self.out.set_timer(now + RELEASE_WAIT, Timer::Kill(gone.launch));
        } else {
            self.out.set_timer(now + grace, Timer::Kill(gone.launch));
            self.log_event(format!("worker {worker} is gone"));
        }
    }

    /// If `worker` was asked to describe the data set, asks another worker.
    pub(super) fn reassign_describer(&mut self, worker: WorkerId) {
        if self.dataset_describer != Some(worker) {
            return;
        }
        self.dataset_describer = None;
        let next =
            self.workers.connected.iter().find(|(_, w)| w.stage == Stage::Joining && !w.released);
        if let Some((&next, _)) = next {
            self.welcome(next);
        }
    }

    // ---- processes ----

    fn on_process_ended(&mut self, now: Time, launch: LaunchId, exit: &Exit) {
        let pod = self.workers.pod(launch);
        let Some(&first) = pod.first() else {
            return;
        };
        let name = self.workers.name(first, self.workers.any_of_pod(first, |l| l.worker.is_some()));
        // Before the launches are forgotten: a worker's final report may make its exit an expected
        // one.
        for launch in &pod {
            if let Some(worker) = self.workers.launches[launch].worker {
                self.forget(now, worker, ZOMBIE_GRACE);
            }
            self.forget_disconnected(*launch);
        }
        let ended: Vec<Launch> =
            pod.iter().filter_map(|launch| self.workers.launches.remove(launch)).collect();
        self.out.mark_dirty();
        self.out.cancel_launches(&pod);
        let end = describe(exit);
        match self.phase {
            Phase::Ended(_) => {}
            Phase::Ending(_) if self.workers.launches.is_empty() => self.end_now(),
            Phase::Ending(_) => {}
            Phase::Running | Phase::Stopping => {
                // A worker that never reached its master was not searching for it again.
                let has_lost_way = *exit == Exit::Code(EXIT_MASTER_LOST)
                    && ended.iter().all(|l| l.worker.is_none());
                let is_own_fault = is_own_fault(exit) || has_lost_way;
                let excused = ended
                    .iter()
                    .all(|l| l.accounting == ExitAccounting::Expected || l.leaving || l.retired);
                let counted = ended.iter().any(|l| l.accounting == ExitAccounting::Counted);
                self.history.counters.end(if excused {
                    End::Terminated
                } else if counted {
                    End::Failed
                } else {
                    End::of(exit, is_own_fault)
                });
                if excused || counted {
                    self.log_event(format!("{name} has ended ({end})"));
                } else if is_own_fault {
                    self.count_failure(now, &format!("{name} {end}"), &[]);
                    self.history.explain_error(ended.iter().find_map(|l| l.printed.as_deref()));
                } else {
                    self.log_event(format!("{name} {end}, which is not counted as its failure"));
                }
                self.launch_missing(now);
                self.reconcile(now);
            }
        }
    }

    fn on_hello_due(&mut self, now: Time, launch: LaunchId) {
        let Some(silent) =
            self.workers.launches.get_mut(&launch).filter(|l| l.worker.is_none() && !l.killed)
        else {
            return;
        };
        silent.accounting = ExitAccounting::Counted;
        self.release_rest_of_pod(now, launch);
        self.kill(launch);
        let what = format!("launch {} sent no message for {} s", launch.0, HELLO_WAIT.as_secs());
        self.count_failure(now, &what, &[]);
        self.reconcile(now);
    }

    /// Counts a failure, with the records that were processed if known; fails the job if it exceeds
    /// the budget.
    pub(super) fn count_failure(&mut self, now: Time, what: &str, ranges: &[RecordRange]) {
        match self.phase {
            Phase::Running => {}
            // No replacement is started.
            Phase::Stopping => return self.log_event(what.to_owned()),
            Phase::Ended(_) | Phase::Ending(_) => return,
        }
        self.out.mark_dirty();
        self.history.last_failure = Some(what.to_owned());
        let max = self.spec.max_worker_restarts;
        let counted = self.leases.as_ref().map_or(0, |leases| leases.ledger().counted());
        let progress = if self.spec.work.trains() { self.step } else { counted };
        let error = match self.restarts.count(now, progress, ranges) {
            Ok(start) => {
                let counted = self.restarts.budget().since_progress;
                self.log_event(format!(
                    "{what} (failure {counted} of at most {max} without progress)"
                ));
                return self.out.set_timer(start, Timer::Relaunch);
            }
            Err(TooMany::Failures(counted)) => format!(
                "{what}; this is failure {counted} of workers since the job made progress, and \
                 at most {max} are \
                 allowed (--max-worker-restarts)"
            ),
            Err(TooMany::OnRecord(counted)) => format!(
                "{what}; {counted} workers have failed on the same record, and at most {max} may \
                 (--max-worker-restarts)"
            ),
        };
        self.end(now, Outcome::Failed, Some(error));
    }

    fn on_scale(&mut self, now: Time, num_workers: u32) {
        let allowed = self.spec.min_workers..=self.spec.max_workers;
        if self.phase != Phase::Running
            || !allowed.contains(&num_workers)
            || num_workers == self.wanted
        {
            return;
        }
        self.log_event(format!("{num_workers} workers are wanted in place of {}", self.wanted));
        let before = std::mem::replace(&mut self.wanted, num_workers);
        self.out.mark_dirty();
        self.initial_launches_left = (self.initial_launches_left
            + num_workers.saturating_sub(before))
        .saturating_sub(before.saturating_sub(num_workers));
        for launch in self.workers.surplus(num_workers as usize) {
            self.retire_slot(now, launch);
        }
        self.launch_missing(now);
        self.reconcile(now);
    }

    /// Releases a pod that is not replaced (scale down).
    fn retire_slot(&mut self, now: Time, launch: LaunchId) {
        for launch in self.workers.pod(launch) {
            self.workers.launches.get_mut(&launch).expect("it is of the pod").retired = true;
        }
        if self.workers.is_heard(launch) {
            // A member leaves at a step boundary, with the next membership.
            self.release_pod(now, launch, "fewer workers are wanted");
        } else if !self.workers.any_of_pod(launch, |l| l.disconnected.is_some()) {
            // A disconnected worker leaves when it reconnects.
            self.kill(launch);
        }
    }

    /// Asks a worker to end, in order.
    pub(super) fn release(&mut self, now: Time, worker: WorkerId, reason: &str) {
        let Some(w) = self.workers.connected.get_mut(&worker) else {
            return;
        };
        w.released = true;
        let launch = w.launch;
        self.count_eligible();
        self.expect_exit(now, launch);
        self.send(worker, ToWorker::Shutdown(reason.into()));
    }

    pub(super) fn count_eligible(&mut self) {
        self.eligible = self.workers.connected.values().filter(|w| w.is_eligible()).count() as u64;
    }

    /// Marks the exit of a process as expected; the process is killed if it does not end in time.
    pub(super) fn expect_exit(&mut self, now: Time, launch: LaunchId) {
        if let Some(l) = self.workers.launches.get_mut(&launch) {
            l.leaving = true;
            self.out.mark_dirty();
            if l.accounting == ExitAccounting::Undecided {
                l.accounting = ExitAccounting::Expected;
            }
            self.out.set_timer(now + RELEASE_WAIT, Timer::Kill(launch));
            self.release_rest_of_pod(now, launch);
        }
    }

    /// Kills a pod.
    pub(super) fn kill(&mut self, launch: LaunchId) {
        let pod = self.workers.pod(launch);
        let Some(&first) = pod.first().filter(|first| !self.workers.launches[first].killed) else {
            return;
        };
        for launch in pod {
            self.workers.launches.get_mut(&launch).expect("it is of the pod").killed = true;
        }
        self.out.mark_dirty();
        self.out.push(Action::Kill { launch: first });
    }

    // ---- out ----

    /// Sends a worker a message, if its stream is open.
    pub(super) fn send(&mut self, worker: WorkerId, message: ToWorker) {
        if self.workers.connected.contains_key(&worker) {
            self.out.push(Action::Send { worker, message });
        }
    }

    pub(super) fn log_event(&mut self, line: String) {
        self.history.log_event(&line);
        self.out.push(Action::Log(line));
    }
}

/// How long a process may outlive its stream before it is killed.
pub(super) const ZOMBIE_GRACE: Duration = Duration::from_millis(250);
/// How long a pod's supervisor gives its processes, and a margin.
const POD_GRACE: Duration = Duration::from_secs(3);
/// How long a released worker may take to end.
pub(super) const RELEASE_WAIT: Duration = Duration::from_secs(10);
pub(super) const HELLO_WAIT: Duration = Duration::from_secs(60);
