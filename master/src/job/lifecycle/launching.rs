//! Placement: how many pods are created, and the life of a pod until its workers connect.
//!
//! Local processes always start. Pods may be unschedulable. Then a few of them, the capacity
//! probes, stay pending: when one is scheduled, another is created, so a job grows as capacity
//! becomes available, and the cluster is never flooded with unschedulable pods. A job that does not
//! know yet whether its pods are schedulable doubles: at most as many pods are pending as were
//! scheduled at once before, or as many as the probes. Core workers, those of the first
//! `min_workers` slots, are always created. A pod that waits in a queue is treated as an
//! unschedulable one.

use std::ops::RangeInclusive;
use std::time::Duration;

use elasticdl_proto::WorkerId;

use super::autoscale::{Decision, GroupSize};
use crate::job::action::Action;
use crate::job::event::{Committed, LaunchId, ReclaimCause, Wait};
use crate::job::job::Job;
use crate::job::outbox::Timer;
use crate::job::scaling::Scaling;
use crate::job::text::{clip, counted};
use crate::job::time::Time;
use crate::job::workers::scheduling::Scheduling;
use crate::job::workers::state::Launch;
use crate::job::workers::table::{launch_of, worker_of};

impl Job {
    /// Starts the missing workers that may be started now.
    pub(crate) fn launch_missing(&mut self, now: Time) {
        if !self.lifecycle.is_running() || self.lifecycle.is_suspended {
            return;
        }
        self.move_probes_down();
        // Until the data set is described, one worker is sufficient; but a gang starts as a whole.
        let policies = &self.spec.policies;
        let wanted = match self.data.files() {
            None if policies.starts_core_together => self.spec.min_workers,
            None if !policies.starts_together => 1,
            None | Some(_) => self.lifecycle.wanted + self.spec.spares,
        };
        if let Some(most) = &mut self.lifecycle.scheduled_most {
            *most = self.workers.scheduled().max(*most);
        }
        let vacancies = self.workers.vacancies(wanted, self.spec.max_workers + self.spec.spares);
        let mut servers = Vec::new();
        if self.data.files().is_some() || policies.starts_core_together || policies.starts_together
        {
            servers = self.workers.free_server_slots();
        }
        let waiting = self.lifecycle.restarts.waiting(now);
        for slot in self.workers.free_slots().take(vacancies.saturating_sub(waiting)) {
            if !self.may_launch(now, slot) {
                break;
            }
            self.launch_in(now, slot);
        }
        for slot in servers.into_iter().skip(waiting.saturating_sub(vacancies)) {
            self.launch_in(now, slot);
        }
    }

    /// Starts the pod whose first worker has this slot.
    fn launch_in(&mut self, now: Time, slot: u32) {
        let launch = self.workers.launch(slot);
        for launch in self.workers.pod(launch) {
            self.await_hello(now, launch);
            self.reporting.lifetimes.launch(now, worker_of(launch));
        }
        let avoid = self.nodes_to_avoid(now);
        self.out.push(Action::Launch { launch, slot, avoid });
        self.out.mark_dirty();
        self.reserve_id_block();
        let initial = &mut self.lifecycle.initial_launches_left;
        match initial.checked_sub(self.spec.workers_per_pod) {
            Some(left) => *initial = left,
            None => self.reporting.count_restart(),
        }
    }

    /// Whether a launch in this slot may be created now.
    fn may_launch(&self, now: Time, slot: u32) -> bool {
        let core = self.spec.min_workers;
        let waits = |l: &Launch| l.stays() && l.scheduling().is_held();
        let is_tight = self.lifecycle.unschedulable_until.is_some_and(|until| now < until)
            || self.workers.launches().any(|(_, l)| waits(l));
        let probes = self.capacity_probes();
        let pending_max = match self.lifecycle.scheduled_most {
            _ if is_tight => probes,
            Some(most) => most.max(probes),
            None => return true,
        };
        slot < core || self.workers.unscheduled(core).len() < pending_max
    }

    /// How many pods beyond the core may be pending at once.
    fn capacity_probes(&self) -> usize {
        ((self.lifecycle.wanted / self.spec.workers_per_pod / WORKERS_PER_PROBE) as usize)
            .clamp(PROBES_MIN, PROBES_MAX)
    }

    pub(crate) fn on_launch_waits(&mut self, now: Time, launch: LaunchId, wait: Wait) {
        let pod = self.workers.pod(launch);
        if pod.is_empty() || self.workers.any_of_pod(launch, Launch::has_registered) {
            return;
        }
        let (scheduling, reason) = match wait {
            Wait::Scheduling(reason) => (Scheduling::Pending, reason),
            Wait::Capacity(reason) => (Scheduling::Unschedulable, Some(reason)),
            Wait::Queue(reason) => (Scheduling::Queued, Some(reason)),
            Wait::Start(reason) => (Scheduling::Scheduled, reason),
        };
        self.lifecycle.scheduled_most.get_or_insert_default();
        let is_news = self.workers.any_of_pod(launch, |l| l.waits_for() != reason.as_deref());
        // A pending pod can't have become a worker.
        let was_awaited = self.workers.any_of_pod(launch, |l| l.disconnected().is_some());
        for launch in pod {
            self.workers.forget_disconnected(launch);
            self.out.cancel_timer(Timer::Hello(launch));
        }
        self.workers.pod_mut(launch).for_each(|l| l.schedule(scheduling, reason.as_deref()));
        if let Some(reason) = reason.filter(|_| is_news) {
            let name = self.workers.name(launch);
            self.log_event(format!("{name} waits: {}", clip(&reason)));
        }
        match scheduling {
            Scheduling::Pending => {}
            Scheduling::Scheduled => self.launch_missing(now),
            Scheduling::Queued | Scheduling::Unschedulable => {
                let until = now + UNSCHEDULABLE_FOR;
                self.lifecycle.unschedulable_until = Some(until);
                self.out.set_timer(until, Timer::Relaunch);
                self.cancel_excess_probes();
                self.launch_missing(now);
            }
        }
        if was_awaited {
            self.on_awaited_returned(now);
        }
    }

    /// Deletes unschedulable pods, from the highest slot down, except the capacity probes.
    fn cancel_excess_probes(&mut self) {
        for launch in self.waiting_probes().into_iter().skip(self.capacity_probes()) {
            self.cancel_launch(launch);
        }
    }

    /// Moves capacity probes to the lowest free slots. A probe in a higher slot may have a lower
    /// priority class, and would wait while pods of a higher class, or of another job, get the
    /// capacity.
    fn move_probes_down(&mut self) {
        let free = self.workers.free_slots().skip_while(|&slot| slot < self.spec.min_workers);
        let is_higher = |&(launch, slot): &(LaunchId, u32)| {
            self.workers.get_launch(launch).is_some_and(|l| l.slot() > slot)
        };
        let high: Vec<_> =
            self.waiting_probes().into_iter().rev().zip(free).take_while(is_higher).collect();
        high.into_iter().for_each(|(launch, _)| self.cancel_launch(launch));
    }

    /// The unschedulable pods beyond the core, lowest slot first.
    fn waiting_probes(&self) -> Vec<LaunchId> {
        let is_probe = |l: &Launch| l.scheduling().is_held();
        let mut probes = self.workers.unscheduled(self.spec.min_workers);
        probes.retain(|&id| self.workers.get_launch(id).is_some_and(is_probe));
        probes
    }

    /// Deletes a pod without a worker; this is not a failure.
    fn cancel_launch(&mut self, launch: LaunchId) {
        for l in self.workers.pod_mut(launch) {
            l.leave();
            l.expect_exit();
        }
        self.lifecycle.initial_launches_left += self.spec.workers_per_pod;
        self.kill(launch);
    }

    pub(crate) fn on_launch_runs(&mut self, now: Time, launch: LaunchId) {
        for launch in self.workers.pod(launch) {
            let l = self.workers.get_launch_mut(launch);
            let Some(l) = l.filter(|l| !l.has_registered() && !l.is_killed()) else { continue };
            l.schedule(Scheduling::Scheduled, None);
            if !self.out.has_timer(Timer::Hello(launch)) && !self.lifecycle.is_ending() {
                self.await_hello(now, launch);
            }
        }
        // Its worker may have connected before its start became known.
        self.launch_missing(now);
    }

    /// Handles the termination of a launch from outside: its replacement may start, unless the user
    /// wants something else.
    pub(crate) fn on_launch_leaves(
        &mut self,
        now: Time,
        launch: LaunchId,
        cause: ReclaimCause,
        reason: &str,
    ) {
        let is_ruled = self.apply_rule_for_leaving(now, launch, cause, reason);
        if is_ruled && !self.lifecycle.is_active() {
            return;
        }
        if self.workers.any_of_pod(launch, |l| !l.is_killed() && l.stays()) {
            self.let_leave(now, launch, (!is_ruled).then_some(reason));
        }
        if is_ruled {
            self.retire_surplus(now);
            self.reconcile(now);
        }
    }

    /// Lets a launch end whose process is being terminated. `reason` is for the user, who may know
    /// it already.
    fn let_leave(&mut self, now: Time, launch: LaunchId, reason: Option<&str>) {
        if let Some(reason) = reason {
            let name = self.workers.name(launch);
            self.log_event(format!("{name} is being removed by the cluster: {}", clip(reason)));
        }
        self.workers.pod_mut(launch).for_each(Launch::leave);
        let pod = self.workers.pod(launch).into_iter().map(worker_of);
        let heard: Vec<WorkerId> = pod.filter(|&id| self.workers.is_connected(id)).collect();
        if !heard.is_empty() {
            // They may not have received the signal: a shell that runs them need not forward it.
            return heard.into_iter().for_each(|worker| self.on_leaving(now, worker));
        }
        self.workers.pod_mut(launch).for_each(Launch::expect_exit);
        self.out.mark_dirty();
        self.launch_missing(now);
    }

    /// What users have changed of the number of workers and of its limits, whatever other causes
    /// have changed since.
    #[must_use]
    pub fn requested(&self) -> Scaling {
        self.lifecycle.requested
    }

    pub(crate) fn on_scale(&mut self, now: Time, change: Scaling) {
        let before = self.lifecycle.wanted;
        let Ok(scaled) = self.spec.scaled(before, change) else { return };
        if !self.lifecycle.is_running() {
            return;
        }
        self.lifecycle.requested = change.or(self.lifecycle.requested);
        let num_workers = scaled.num_workers;
        let are_new = self.change_limits(scaled.limits());
        if let Some(most) = change.num_workers {
            self.lifecycle.limit_autoscale(most);
        }
        self.out.mark_dirty();
        if num_workers == before && !are_new {
            return;
        }
        if num_workers != before {
            let when = if self.lifecycle.is_suspended { ", once the job is resumed" } else { "" };
            let is_limit = self.spec.autoscale && change.num_workers.is_some();
            let limit = if is_limit { ", which --autoscale does not exceed" } else { "" };
            self.log_event(format!(
                "scaling from {} to {num_workers}{limit}{when}",
                counted(before.into(), "worker")
            ));
        }
        self.set_wanted(now, num_workers);
    }

    /// Changes the limits of the number of workers, unless they are so already: a group that trains
    /// goes on even if it has fewer members, and the next one has as many as the new minimum.
    fn change_limits(&mut self, limits: RangeInclusive<u32>) -> bool {
        if limits == self.spec.limits() {
            return false;
        }
        let (min, max) = limits.into_inner();
        self.lifecycle.change_autoscale_limits(min, max);
        let first = self.spec.num_workers.clamp(min, max);
        (self.spec.min_workers, self.spec.num_workers, self.spec.max_workers) = (min, first, max);
        self.log_event(format!("the job takes {min} to {max} workers from now on"));
        true
    }

    /// Lets the policy of `--autoscale` take in a report of `steps` new steps, and does what it
    /// decides.
    pub(crate) fn autoscale(&mut self, now: Time, steps: u64, report: &Committed) {
        let is_changing = !self.lifecycle.is_running()
            || self.lifecycle.is_suspended
            || self.lifecycle.is_taking_over();
        if is_changing || !self.spec.autoscale {
            return;
        }
        let is_held = |(_, l): (LaunchId, &Launch)| l.stays() && l.scheduling().is_held();
        let computes = |id: &&WorkerId| !self.workers.serves_tables(launch_of(**id));
        let members = self.group.members().iter().filter(computes).count();
        let group = GroupSize {
            generation: report.generation,
            members: u32::try_from(members).expect("members are limited by max_workers"),
            wanted: self.lifecycle.wanted,
            placed: self.workers.placed_workers().saturating_sub(self.spec.spares),
            is_full: self.workers.launches().any(is_held),
        };
        let policy = self.lifecycle.autoscale.as_mut();
        let decision = policy.and_then(|policy| policy.observe(now, group, steps, report));
        if let Some(Decision { wanted, why }) = decision {
            self.log_event(format!("autoscale: {why}"));
            self.set_wanted(now, wanted);
        }
    }

    fn set_wanted(&mut self, now: Time, num_workers: u32) {
        let before = std::mem::replace(&mut self.lifecycle.wanted, num_workers);
        self.out.mark_dirty();
        let initial = &mut self.lifecycle.initial_launches_left;
        *initial = (*initial + num_workers.saturating_sub(before))
            .saturating_sub(before.saturating_sub(num_workers));
        self.retire_surplus(now);
        self.launch_missing(now);
        self.reconcile(now);
    }

    /// Releases the pods that are more than wanted.
    pub(crate) fn retire_surplus(&mut self, now: Time) {
        if !self.lifecycle.is_running() {
            return;
        }
        let keeps_spares = self.spec.spares > 0;
        for launch in self.workers.surplus(self.lifecycle.wanted + self.spec.spares, keeps_spares) {
            self.retire_slot(now, launch);
        }
    }

    /// Releases a pod that is not replaced (scale down).
    fn retire_slot(&mut self, now: Time, launch: LaunchId) {
        self.workers.pod_mut(launch).for_each(|l| l.retire());
        if self.workers.is_heard(launch) {
            // A member leaves at a step boundary, with the next membership.
            self.release_pod(now, launch, "the job is scaled down");
        } else if !self.workers.any_of_pod(launch, |l| l.disconnected().is_some()) {
            // A disconnected worker leaves when it reconnects.
            self.kill(launch);
        }
    }
}

/// One capacity probe per this many workers.
const WORKERS_PER_PROBE: u32 = 10;
const PROBES_MAX: usize = 8;
const PROBES_MIN: usize = 2;
/// How long the cluster is assumed to be full after a pod was unschedulable.
const UNSCHEDULABLE_FOR: Duration = Duration::from_secs(60);
