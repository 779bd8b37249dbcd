//! The phase of a job, what the user wants, and what a master waits for.

use std::time::Duration;

use elasticdl_proto::{Generation, WorkerId};

use super::autoscale::Autoscale;
use super::bad_hosts::BadHosts;
use super::failed_slots::FailedSlots;
use super::fatal_reports::FatalReports;
use super::host_checks::HostChecks;
use super::restart::{Budget, Restarts};
use super::slow_links::SlowLinks;
use super::takeover_state::Takeover;
use crate::job::action::Outcome;
use crate::job::event::Exit;
use crate::job::scaling::Scaling;
use crate::job::spec::JobSpec;
use crate::job::time::Time;

/// The life of a job.
#[derive(Debug)]
pub(crate) struct Lifecycle {
    pub(super) phase: Phase,
    /// Desired number of workers.
    pub(super) wanted: u32,
    /// What users have changed of it, and of its limits, whatever other causes changed since.
    pub(super) requested: Scaling,
    /// What changes this number if the user does not.
    pub(super) autoscale: Option<Autoscale>,
    /// Launches left that fill a slot for the first time; every further launch is a restart.
    pub(super) initial_launches_left: u32,
    pub(super) restarts: Restarts,
    pub(super) fatal_reports: FatalReports,
    pub(super) failed_slots: FailedSlots,
    /// The node of the last failure, and until when it is avoided.
    avoided: Option<(String, Time)>,
    pub(super) bad_hosts: BadHosts,
    pub(crate) host_checks: HostChecks,
    pub(crate) slow_links: SlowLinks,
    /// When the first worker was asked to describe the data set.
    pub(crate) describing_since: Option<Time>,
    /// The longest evaluation of the group so far.
    pub(crate) longest_evaluation: Duration,
    /// When a group last began without a state, if this master knows it.
    pub(super) began: Option<Time>,
    /// Set while a previous master's group is being taken over.
    pub(super) takeover: Option<Takeover>,
    /// End of the join window: how long a group without a state waits for further workers.
    join_window_until: Option<Time>,
    /// Until then new launches are assumed to be unschedulable.
    pub(super) unschedulable_until: Option<Time>,
    /// The most pods that were scheduled at once; `None` until a launch has waited for a scheduler.
    pub(super) scheduled_most: Option<usize>,
    /// Whether the user has suspended the job.
    pub(super) is_suspended: bool,
    /// The generation that was asked to end with a checkpoint.
    pub(super) suspended_generation: Option<Generation>,
    /// Whether the job ended because it was stopped, whatever its outcome.
    pub(crate) was_stopping: bool,
    /// Why the job stops, unless the user asked for it.
    pub(super) stop_reason: Option<String>,
    /// Until when the programs of a complete job are waited for, from the moment on that most of
    /// them take to end.
    pub(super) awaits_programs_until: Option<Time>,
    /// The last step when a member ended by itself, without a report.
    pub(super) exited_at: Option<u64>,
    /// Slot and exit of the last worker that ended in peace, or refused its arguments, and had
    /// never joined.
    pub(super) exited_unjoined: Option<(Option<u32>, Exit)>,
    /// Why the job fails, while its group stores its state before.
    pub(super) failing: Option<String>,
    /// See [`Job::masters`](crate::job::Job::masters).
    pub(super) masters: u64,
    pub(super) reserved: ReservedIds,
    divergence: Divergence,
}

/// Replicas of the group's state that differed.
#[derive(Clone, Copy, Debug, Default)]
struct Divergence {
    /// Whether no group has formed since.
    is_open: bool,
    /// The job's step when replicas differed last.
    step: Option<u64>,
}

/// The phase of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Ended(Outcome),
    /// All workers were asked to end.
    Ending(Outcome),
    Running,
    /// The user stopped the job; the group finishes its step.
    Stopping,
}

/// No later launch, and no later generation, has been made. See
/// [`Job::reserve_id_block`](crate::job::Job).
#[derive(Clone, Copy, Debug)]
pub(super) struct ReservedIds {
    pub(super) launches: u64,
    pub(super) generations: Generation,
}

impl Lifecycle {
    pub(crate) fn new(spec: &JobSpec) -> Self {
        Self {
            phase: Phase::Running,
            wanted: spec.num_workers,
            requested: Scaling::default(),
            autoscale: spec.autoscale.then(|| Autoscale::new(spec)),
            initial_launches_left: spec.num_workers + spec.spares + spec.options.table_servers,
            restarts: Restarts::new(Time::default(), spec.max_worker_restarts, Budget::default()),
            fatal_reports: FatalReports::default(),
            failed_slots: FailedSlots::default(),
            avoided: None,
            bad_hosts: BadHosts::default(),
            host_checks: HostChecks::default(),
            slow_links: SlowLinks::default(),
            describing_since: None,
            longest_evaluation: Duration::ZERO,
            began: None,
            takeover: None,
            join_window_until: None,
            unschedulable_until: None,
            scheduled_most: None,
            is_suspended: spec.policies.starts_suspended,
            suspended_generation: None,
            was_stopping: false,
            stop_reason: None,
            awaits_programs_until: None,
            exited_at: None,
            exited_unjoined: None,
            failing: None,
            masters: 1,
            // As if the first generation were published: a master whose record is older than the
            // first group must not use that group's generation again.
            reserved: ReservedIds { launches: 0, generations: Generation(1 + ID_BLOCK) },
            divergence: Divergence::default(),
        }
    }

    pub(crate) fn phase(&self) -> Phase {
        self.phase
    }

    pub(crate) fn is_running(&self) -> bool {
        self.phase == Phase::Running
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.phase == Phase::Stopping
    }

    /// Whether the job is running or stopping.
    pub(crate) fn is_active(&self) -> bool {
        matches!(self.phase, Phase::Running | Phase::Stopping)
    }

    /// Whether all workers were asked to end, and some may not have.
    pub(crate) fn is_ending(&self) -> bool {
        matches!(self.phase, Phase::Ending(_))
    }

    pub(crate) fn has_ended(&self) -> bool {
        matches!(self.phase, Phase::Ended(_))
    }

    /// Whether the user has suspended the job: no worker is started.
    pub(crate) fn is_suspended(&self) -> bool {
        self.is_suspended
    }

    /// Why the job stops, unless the user asked for it.
    pub(crate) fn stop_reason(&self) -> Option<&str> {
        self.stop_reason.as_deref()
    }

    /// How the job ends, once that is decided.
    pub(crate) fn outcome(&self) -> Option<Outcome> {
        match self.phase {
            Phase::Ending(outcome) | Phase::Ended(outcome) => Some(outcome),
            Phase::Running | Phase::Stopping => None,
        }
    }

    /// Desired number of workers.
    pub(crate) fn wanted(&self) -> u32 {
        self.wanted
    }

    /// What the policy of `--autoscale` has found last.
    pub(crate) fn autoscale_finding(&self) -> Option<&str> {
        self.autoscale.as_ref()?.finding()
    }

    /// The group that was measured has ended.
    pub(super) fn restart_autoscale(&mut self) {
        if let Some(autoscale) = &mut self.autoscale {
            autoscale.restart();
        }
    }

    /// The user, or a rule of the user, sets the number of workers: no policy takes more.
    pub(super) fn limit_autoscale(&mut self, workers: u32) {
        if let Some(autoscale) = &mut self.autoscale {
            autoscale.limit(workers);
        }
    }

    /// The user changes the limits of the number of workers.
    pub(super) fn change_autoscale_limits(&mut self, min: u32, max: u32) {
        if let Some(autoscale) = &mut self.autoscale {
            autoscale.change_limits(min, max);
        }
    }

    #[cfg(test)]
    pub(crate) fn set_phase(&mut self, phase: Phase) {
        self.phase = phase;
    }

    /// Notes a failure on `node`, if its name is known: other nodes are better for a while.
    pub(crate) fn avoid_node(&mut self, now: Time, node: &str) {
        if !node.is_empty() {
            self.avoided = Some((node.to_owned(), now + AVOID_NODE_FOR));
        }
    }

    /// The node on which a worker has failed a short while ago.
    pub(crate) fn avoided_node(&self, now: Time) -> Option<&str> {
        let (node, until) = self.avoided.as_ref()?;
        (now < *until).then_some(node)
    }

    /// Notes that a group begins without a state.
    pub(crate) fn begin(&mut self, now: Time) {
        self.began = Some(now);
    }

    /// Failures of workers so far.
    #[cfg(test)]
    pub(crate) fn failures(&self) -> u32 {
        self.restarts.budget().counted
    }

    /// Whether a previous master's group is being taken over.
    pub(crate) fn is_taking_over(&self) -> bool {
        self.takeover.is_some()
    }

    /// Whether the generation that is being taken over had formed already.
    pub(crate) fn had_formed(&self) -> bool {
        self.takeover.as_ref().is_some_and(|takeover| takeover.was_formed)
    }

    /// Notes that replicas differ at this step of the job. Returns `None` if that is known: several
    /// workers report it. Otherwise, whether it has happened before without progress since.
    pub(crate) fn note_divergence(&mut self, step: u64) -> Option<bool> {
        if std::mem::replace(&mut self.divergence.is_open, true) {
            return None;
        }
        let before = self.divergence.step;
        self.divergence.step = before.max(Some(step));
        Some(before.is_some_and(|before| step <= before))
    }

    /// Notes that a group has formed: its replicas are equal.
    pub(crate) fn close_divergence(&mut self) {
        self.divergence.is_open = false;
    }

    /// Expects no report from a worker that has gone.
    pub(crate) fn forget_worker(&mut self, worker: WorkerId) {
        if let Some(takeover) = &mut self.takeover {
            takeover.forget(worker);
        }
    }

    /// Notes that this master has published a generation.
    pub(crate) fn note_published(&mut self) {
        if let Some(takeover) = &mut self.takeover {
            takeover.was_formed = false;
            takeover.has_published = true;
        }
        self.join_window_until = None;
    }

    /// Whether the join window is open at `now`.
    pub(crate) fn is_join_window_open(&self, now: Time) -> bool {
        self.join_window_until.is_none_or(|until| now < until)
    }

    /// Opens the join window until `until`. Returns whether it was not open.
    pub(crate) fn open_join_window(&mut self, until: Time) -> bool {
        let is_new = self.join_window_until.is_none();
        self.join_window_until.get_or_insert(until);
        is_new
    }

    pub(crate) fn close_join_window(&mut self) {
        self.join_window_until = None;
    }
}

/// Ids that may be used before the next write.
pub(super) const ID_BLOCK: u64 = 16;
/// How long a node is avoided after a failure. Longer than the pauses between replacements.
const AVOID_NODE_FOR: Duration = Duration::from_secs(300);
