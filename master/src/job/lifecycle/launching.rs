//! Placement: how many pods are created, and the life of a pod until its workers connect.
//!
//! Local processes always start. Pods may be unschedulable. Then a few of them, the capacity
//! probes, stay pending: when one is scheduled, another is created, so a job grows as capacity
//! becomes available, and the cluster is never flooded with unschedulable pods. Core workers, those
//! of the first `min_workers` slots, are always created.

use std::time::Duration;

use elasticdl_proto::WorkerId;

use crate::job::action::Action;
use crate::job::event::{LaunchId, Wait};
use crate::job::job::{HELLO_WAIT, Job, Phase};
use crate::job::outbox::Timer;
use crate::job::reporting::history::clip;
use crate::job::time::Time;
use crate::job::workers::table::{ExitAccounting, Launch, Scheduling};

impl Job {
    /// Starts the missing workers that may be started now.
    pub(crate) fn launch_missing(&mut self, now: Time) {
        if self.phase != Phase::Running {
            return;
        }
        self.move_probes_down();
        // Until the data set is described, one worker is sufficient.
        let wanted = if self.dataset.is_some() { self.wanted } else { 1 };
        let vacancies = self.workers.vacancies(wanted as usize, self.spec.max_workers as usize);
        for _ in self.restarts.waiting(now)..vacancies {
            let slot = self.workers.free_slot();
            if !self.may_launch(now, slot) {
                return;
            }
            let launch = self.workers.launch(slot);
            for launch in self.workers.pod(launch) {
                self.out.set_timer(now + HELLO_WAIT, Timer::Hello(launch));
            }
            self.out.push(Action::Launch { launch, slot });
            self.out.mark_dirty();
            self.reserve_id_block();
            match self.initial_launches_left.checked_sub(self.spec.workers_per_pod) {
                Some(initial_launches_left) => self.initial_launches_left = initial_launches_left,
                None => {
                    self.history.totals.restarts += 1;
                    self.history.counters.restarts += 1;
                }
            }
        }
    }

    /// Whether a launch in this slot may be created now.
    fn may_launch(&self, now: Time, slot: u32) -> bool {
        let core = self.spec.min_workers;
        let waits = |l: &Launch| l.stays() && l.scheduling == Scheduling::Unschedulable;
        let tight = self.unschedulable_until.is_some_and(|until| now < until)
            || self.workers.launches.values().any(waits);
        slot < core || !tight || self.workers.unscheduled(core).len() < self.capacity_probes()
    }

    /// How many pods beyond the core may be pending at once.
    fn capacity_probes(&self) -> usize {
        (self.wanted as usize / self.workers.workers_per_pod / WORKERS_PER_PROBE)
            .clamp(PROBES_MIN, PROBES_MAX)
    }

    pub(crate) fn on_launch_made(&mut self, launch: LaunchId, class: Option<String>) {
        for launch in self.workers.pod(launch) {
            self.workers
                .launches
                .get_mut(&launch)
                .expect("it is of the pod")
                .class
                .clone_from(&class);
        }
    }

    pub(crate) fn on_launch_waits(&mut self, now: Time, launch: LaunchId, wait: Wait) {
        let pod = self.workers.pod(launch);
        if pod.is_empty() || self.workers.any_of_pod(launch, |l| l.worker.is_some()) {
            return;
        }
        let (scheduling, reason) = match wait {
            Wait::Scheduling(reason) => (Scheduling::Pending, reason),
            Wait::Capacity(reason) => (Scheduling::Unschedulable, Some(reason)),
            Wait::Start(reason) => (Scheduling::Scheduled, reason),
        };
        let mut was_awaited = false;
        let is_news = pod.iter().any(|launch| self.workers.launches[launch].waits_for != reason);
        for launch in pod {
            let l = self.workers.launches.get_mut(&launch).expect("it is of the pod");
            // A pending pod can't have become a worker.
            was_awaited |= l.disconnected.take().is_some();
            l.scheduling = scheduling;
            l.waits_for.clone_from(&reason);
            self.out.cancel_timer(Timer::Hello(launch));
        }
        if let Some(reason) = reason.filter(|_| is_news) {
            self.log_event(format!(
                "{} waits: {}",
                self.workers.name(launch, false),
                clip(&reason)
            ));
        }
        match scheduling {
            Scheduling::Pending => {}
            Scheduling::Scheduled => self.launch_missing(now),
            Scheduling::Unschedulable => {
                let until = now + UNSCHEDULABLE_FOR;
                self.unschedulable_until = Some(until);
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
        let capacity_probes = self.waiting_capacity_probes();
        capacity_probes
            .into_iter()
            .skip(self.capacity_probes())
            .for_each(|launch| self.cancel_launch(launch));
    }

    /// Moves capacity probes to the lowest free slots. A probe in a higher slot may have a lower
    /// priority class, and would wait while pods of a higher class, or of another job, get the
    /// capacity.
    fn move_probes_down(&mut self) {
        let free = self.workers.free_slots().skip_while(|&place| place < self.spec.min_workers);
        let higher =
            |&(launch, place): &(LaunchId, u32)| self.workers.launches[&launch].slot > place;
        let high: Vec<_> =
            self.waiting_capacity_probes().into_iter().rev().zip(free).take_while(higher).collect();
        high.into_iter().for_each(|(launch, _)| self.cancel_launch(launch));
    }

    /// The unschedulable pods beyond the core, lowest slot first.
    fn waiting_capacity_probes(&self) -> Vec<LaunchId> {
        let mut capacity_probes = self.workers.unscheduled(self.spec.min_workers);
        capacity_probes
            .retain(|id| self.workers.launches[id].scheduling == Scheduling::Unschedulable);
        capacity_probes
    }

    /// Deletes a pod without a worker; this is not a failure.
    fn cancel_launch(&mut self, launch: LaunchId) {
        for launch in self.workers.pod(launch) {
            let l = self.workers.launches.get_mut(&launch).expect("it is of the pod");
            l.leaving = true;
            l.accounting = ExitAccounting::Expected;
            self.initial_launches_left += 1;
        }
        self.kill(launch);
    }

    pub(crate) fn on_launch_runs(&mut self, now: Time, launch: LaunchId) {
        let is_awaited = |id: &LaunchId| {
            let l = &self.workers.launches[id];
            l.worker.is_none() && !l.killed
        };
        let awaited: Vec<LaunchId> =
            self.workers.pod(launch).into_iter().filter(is_awaited).collect();
        for &launch in &awaited {
            let l = self.workers.launches.get_mut(&launch).expect("it is of the pod");
            l.scheduling = Scheduling::Scheduled;
            l.waits_for = None;
            if !self.out.has_timer(Timer::Hello(launch)) && !matches!(self.phase, Phase::Ending(_))
            {
                self.out.set_timer(now + HELLO_WAIT, Timer::Hello(launch));
            }
        }
        if !awaited.is_empty() {
            self.launch_missing(now);
        }
    }

    /// Handles the termination of a launch from outside: its replacement may start.
    pub(crate) fn on_launch_leaves(&mut self, now: Time, launch: LaunchId, reason: &str) {
        if !self.workers.any_of_pod(launch, |l| !l.killed && l.stays()) {
            return;
        }
        let name =
            self.workers.name(launch, self.workers.any_of_pod(launch, |l| l.worker.is_some()));
        self.log_event(format!("{name} is taken away: {}", clip(reason)));
        let heard =
            self.workers.pod(launch).into_iter().filter_map(|id| self.workers.launches[&id].worker);
        let heard: Vec<WorkerId> =
            heard.filter(|id| self.workers.connected.contains_key(id)).collect();
        if !heard.is_empty() {
            // They may not have received the signal: a shell that runs them need not forward it.
            return heard.into_iter().for_each(|worker| self.on_leaving(now, worker));
        }
        for launch in self.workers.pod(launch) {
            let l = self.workers.launches.get_mut(&launch).expect("it is of the pod");
            l.leaving = true;
            l.accounting = ExitAccounting::Expected;
        }
        self.out.mark_dirty();
        self.launch_missing(now);
    }
}

/// One capacity probe per this many workers.
const WORKERS_PER_PROBE: usize = 10;
const PROBES_MAX: usize = 8;
const PROBES_MIN: usize = 2;
/// How long the cluster is assumed to be full after a pod was unschedulable.
const UNSCHEDULABLE_FOR: Duration = Duration::from_secs(60);
