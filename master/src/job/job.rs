//! The job: its parts, and the dispatch of events and timers to their handlers.

use elasticdl_proto::{Generation, WorkerId, WorkerOptions};

use uuid::Uuid;

use super::action::{Action, MasterMessage, Outcome};
use super::data::job_data::JobData;
use super::event::{Event, WorkerMessage};
use super::group::broken::Suspicion;
use super::group::generation::Group;
use super::lifecycle::state::Lifecycle;
use super::outbox::{Outbox, Timer};
use super::reporting::history::JobHistory;
use super::spec::JobSpec;
use super::text::{clip, counted};
use super::time::Time;
use super::workers::table::{WorkerTable, launch_of};

/// A job: events and the time in, actions out.
#[derive(Debug)]
pub struct Job {
    pub(super) spec: JobSpec,
    pub(super) run_id: Uuid,
    pub(super) workers: WorkerTable,
    pub(super) group: Group,
    pub(super) data: JobData,
    pub(super) lifecycle: Lifecycle,
    pub(super) reporting: JobHistory,
    pub(super) out: Outbox,
}

impl Job {
    /// A job that has just been submitted; its first action starts its first worker.
    ///
    /// `spec` has passed [`JobSpec::check`].
    #[must_use]
    pub fn new(spec: JobSpec) -> Self {
        let mut job = Self::new_silent(spec);
        let WorkerOptions { table_servers, table_replicas, .. } = job.spec.options;
        if (1..u32::from(table_replicas)).contains(&table_servers) {
            job.log_event(format!(
                "{} for {table_replicas} copies of each row: the others are on workers",
                counted(table_servers.into(), "table server")
            ));
        }
        job.watch_deadline();
        job.launch_missing(Time::default());
        job
    }

    /// A job that has not started any worker yet.
    pub(super) fn new_silent(spec: JobSpec) -> Self {
        Self {
            workers: WorkerTable::new(spec.workers_per_pod, spec.server_slots()),
            group: Group::default(),
            data: JobData::default(),
            lifecycle: Lifecycle::new(&spec),
            reporting: JobHistory::default(),
            out: Outbox::default(),
            run_id: Uuid::nil(),
            spec,
        }
    }

    /// Sets the id of the run, which the status and the summary report. It is nil until then.
    pub(crate) fn with_run_id(self, run_id: Uuid) -> Self {
        Self { run_id, ..self }
    }

    /// The newest generation; 0 before the first.
    pub(crate) fn generation(&self) -> Generation {
        self.group.generation()
    }

    /// Whether a worker is a table server.
    #[must_use]
    pub fn serves_tables(&self, worker: WorkerId) -> bool {
        self.workers.serves_tables(launch_of(worker))
    }

    /// Handles an event that happened at `now`.
    ///
    /// An event that no longer applies (a message of a forgotten worker, the end of an unknown
    /// process) is ignored.
    pub fn handle(&mut self, now: Time, event: Event) {
        if self.lifecycle.has_ended() {
            return;
        }
        match event {
            Event::Checkpoint => self.on_checkpoint_requested(),
            Event::PersistRefused { reason } => {
                let error = format!("the persisted job can't be stored: {}", clip(&reason));
                self.end(now, Outcome::Failed, Some(error));
            }
            Event::PersistDelayed { reason } => {
                self.log_event(format!("the persisted job is not stored yet: {}", clip(&reason)));
            }
            Event::Connected { connection, launch, address, pid, resume } => {
                self.on_connected(now, connection, launch, address, pid, resume);
            }
            Event::Disconnected { worker } => self.on_disconnected(now, worker),
            Event::LaunchExplained { launch, explanation } => {
                let name = self.workers.name(launch);
                self.log_event(format!("{name} was {}", clip(&explanation)));
                if let Some(launch) = self.workers.get_launch_mut(launch) {
                    launch.set_explanation(clip(&explanation));
                }
            }
            Event::LaunchIsBusy { launch } => self.on_launch_is_busy(now, launch),
            Event::LaunchLeaves { launch, cause, reason } => {
                self.on_launch_leaves(now, launch, cause, &reason);
            }
            Event::LaunchLocated { launch, location } => {
                self.workers.pod_mut(launch).for_each(|l| l.locate(&location));
            }
            Event::LaunchMade { launch, class } => {
                self.workers.pod_mut(launch).for_each(|l| l.set_class(class.as_deref()));
            }
            Event::LaunchNoted { launch, note } => {
                let name = self.workers.name(launch);
                self.log_event(format!("{name} was {}", clip(&note)));
            }
            Event::LaunchPrinted { launch, lines } => {
                if let Some(launch) = self.workers.get_launch_mut(launch) {
                    launch.set_printed(lines);
                }
            }
            Event::LaunchRuns { launch } => self.on_launch_runs(now, launch),
            Event::LaunchWaits { launch, wait } => self.on_launch_waits(now, launch, wait),
            Event::Message { worker, message } => self.on_message(now, worker, message),
            Event::ProcessEnded { launch, exit } => self.on_process_ended(now, launch, &exit),
            Event::Resume => self.on_resume(now),
            Event::Scale(change) => self.on_scale(now, change),
            Event::Stop => self.on_stop_requested(now),
            Event::StopNow => self.on_stop_now(),
            Event::Suspend => self.on_suspend(now),
            Event::Traced { error } => self.on_traced(error),
            Event::Tracked { error } => self.on_tracked(error),
        }
    }

    fn on_message(&mut self, now: Time, worker: WorkerId, message: WorkerMessage) {
        let Some(w) = self.workers.get_mut(worker).filter(|_| self.lifecycle.is_active()) else {
            return;
        };
        w.hear(now);
        match message {
            WorkerMessage::Heartbeat(heartbeat) => self.on_heartbeat(now, worker, heartbeat),
            WorkerMessage::Broken { generation, suspect, error, unreachable } => {
                let suspicion =
                    suspect.map(|suspect| Suspicion { suspect, is_unreachable: unreachable });
                self.on_broken(now, worker, generation, suspicion, &error);
            }
            WorkerMessage::BestExport { step, kept, error } => {
                self.on_best_export(step, kept, error);
            }
            WorkerMessage::Checkpoint(news) => {
                self.on_checkpoint_news(now, worker, news);
                self.restart_stop_wait(now);
            }
            WorkerMessage::Committed(report) => self.on_committed(now, worker, &report),
            WorkerMessage::RecordsSkipped(skipped) => self.on_records_skipped(worker, skipped),
            WorkerMessage::Described(outcome, order) => {
                self.on_described(now, worker, outcome, order)
            }
            WorkerMessage::Diverged { error, has_majority, by_audit } => {
                let replaced = self.on_diverged(now, worker, &error, has_majority);
                if by_audit {
                    self.reporting.note_audit(replaced.is_first, replaced.workers);
                }
            }
            WorkerMessage::Evaluated(report, took) => {
                self.note_evaluation(now);
                self.on_evaluated(now, report, took);
            }
            WorkerMessage::ShardDone { range, metrics } => {
                self.on_shard_done(now, worker, range, metrics);
            }
            WorkerMessage::Failed { error, ranges, fatal, exported } => {
                self.reporting.note_export_of_failed(exported);
                self.on_failed(now, worker, &error, &ranges, fatal);
            }
            WorkerMessage::Finished(report) => self.on_finished(now, worker, report),
            WorkerMessage::Formed { generation, step, ledger } => {
                self.on_formed(now, worker, generation, step, &ledger);
            }
            WorkerMessage::HostChecked(report) => self.on_host_checked(now, worker, *report),
            WorkerMessage::LeaseRequest { shards } => self.on_lease_request(worker, shards),
            WorkerMessage::Leaving => self.on_leaving(now, worker),
            WorkerMessage::CaughtUp { step } => self.on_caught_up(now, worker, step),
            WorkerMessage::Reconnected { step } => self.on_returned(now, worker, step),
            WorkerMessage::Ready { parameters } => self.on_ready(now, worker, parameters),
            WorkerMessage::StorageWait { storage, waited } => {
                self.on_storage_wait(worker, storage, waited);
            }
            WorkerMessage::AllreduceTransport { generation, what } => {
                self.on_allreduce_transport(worker, generation, &what);
            }
            // What it says is for people.
            WorkerMessage::Report { .. } => self.on_stacks(now, worker),
            WorkerMessage::Resumed { generation, phases, .. } => {
                self.on_resumed(now, worker, generation, phases);
            }
        }
    }

    /// The next action.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.out.poll_action()
    }

    /// How the job ends, once that is decided.
    #[must_use]
    pub fn outcome(&self) -> Option<Outcome> {
        self.lifecycle.outcome()
    }

    /// The time at which [`Job::handle_timeout`] has to be called.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Time> {
        self.out.poll_timeout()
    }

    /// Runs the timers that are due at `now`.
    pub fn handle_timeout(&mut self, now: Time) {
        while let Some((at, timer)) = self.out.pop_due(now) {
            match timer {
                Timer::Broken(generation) => self.on_broken_due(now, generation),
                Timer::Deadline => self.on_deadline_due(now),
                Timer::Describe => self.on_describe_due(now),
                Timer::End => self.on_end_due(now),
                Timer::GiveUp => self.on_give_up_due(now),
                Timer::Hello(launch) => self.on_hello_due(now, launch),
                Timer::Hung(worker) => self.on_hung_due(now, worker),
                Timer::Kill(launch) => self.on_kill_due(launch),
                Timer::Leave(worker) => self.on_leave_due(now, worker),
                Timer::Relaunch => self.launch_missing(now),
                Timer::Reconnect => self.on_reconnect_due(now),
                Timer::HeartbeatCheck => self.on_heartbeat_check(now, at),
                Timer::Stop => self.on_stop_due(now),
                Timer::Suspend => self.on_suspend_due(),
                Timer::Window => self.reconcile(now),
            }
        }
    }

    // ---- out ----

    /// Sends a worker a message, if its stream is open.
    pub(super) fn send(&mut self, worker: WorkerId, message: MasterMessage) {
        if self.workers.is_connected(worker) {
            self.out.push(Action::Send { worker, message });
        }
    }

    /// Logs a line for the user.
    pub(super) fn log_event(&mut self, line: String) {
        self.reporting.log_event(&line);
        self.out.push(Action::Log(line));
    }

    /// Logs the pause of the last membership change, once, if any member has reported it.
    pub(super) fn log_recovery(&mut self) {
        if let Some(line) = self.reporting.recovery_line() {
            self.log_event(line);
        }
    }
}
