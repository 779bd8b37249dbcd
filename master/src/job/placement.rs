//! Places to run at: how many pods are asked for, and what becomes of one until its workers say
//! hello.
//!
//! Processes start wherever they are asked for. Pods may find no room. Then a few of them, the
//! probes, wait for it: when one gets a place, another is asked for, so a job grows as room comes,
//! and a cluster is never flooded with pods that can't run. The core, which is as many as the job
//! can't do without, always asks.

use std::time::Duration;

use elasticdl_proto::WorkerId;

use super::action::Action;
use super::event::{LaunchId, Wait};
use super::history::clip;
use super::job::{HELLO_WAIT, Job, Phase, Timer};
use super::time::Time;
use super::workers::{ExitAccounting, Launch, Scheduling};

impl Job {
    /// Starts as many workers as are missing and may be started now.
    pub(super) fn launch_missing(&mut self, now: Time) {
        if self.phase != Phase::Running {
            return;
        }
        self.move_probes_down();
        // Until the data is known to be usable, one worker is enough to look at it.
        let wanted = if self.dataset.is_some() { self.wanted } else { 1 };
        let vacancies = self.workers.vacancies(wanted as usize, self.spec.max_workers as usize);
        for _ in self.restarts.waiting(now)..vacancies {
            let slot = self.workers.free_slot();
            if !self.may_launch(now, slot) {
                return;
            }
            let launch = self.workers.launch(slot);
            for launch in self.workers.pod(launch) {
                self.set_timer(now + HELLO_WAIT, Timer::Hello(launch));
            }
            self.push(Action::Launch { launch, slot });
            self.mark_dirty();
            self.reserve_id_block();
            match self.initial_launches_left.checked_sub(self.spec.workers_per_pod) {
                Some(initial_launches_left) => self.initial_launches_left = initial_launches_left,
                None => {
                    self.history.restarts += 1;
                    self.history.counters.restarts += 1;
                }
            }
        }
    }

    /// Whether a launch at this place may be asked for now.
    fn may_launch(&self, now: Time, slot: u32) -> bool {
        let core = self.spec.min_workers;
        let waits = |l: &Launch| l.stays() && l.scheduling == Scheduling::Unschedulable;
        let tight = self.unschedulable_until.is_some_and(|until| now < until)
            || self.workers.launches.values().any(waits);
        slot < core || !tight || self.workers.unscheduled(core).len() < self.capacity_probes()
    }

    /// How many pods beyond the core may wait for room at once.
    fn capacity_probes(&self) -> usize {
        (self.wanted as usize / self.workers.workers_per_pod / WORKERS_PER_PROBE)
            .clamp(PROBES_MIN, PROBES_MAX)
    }

    pub(super) fn on_launch_made(&mut self, launch: LaunchId, class: Option<String>) {
        for launch in self.workers.pod(launch) {
            self.workers
                .launches
                .get_mut(&launch)
                .expect("it is of the pod")
                .class
                .clone_from(&class);
        }
    }

    pub(super) fn on_launch_waits(&mut self, now: Time, launch: LaunchId, wait: Wait) {
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
            // It can't have become a worker.
            was_awaited |= l.disconnected.take().is_some();
            l.scheduling = scheduling;
            l.waits_for.clone_from(&reason);
            self.cancel_timer(Timer::Hello(launch));
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
                self.set_timer(until, Timer::Relaunch);
                self.cancel_excess_probes();
                self.launch_missing(now);
            }
        }
        if was_awaited {
            self.on_awaited_returned(now);
        }
    }

    /// Takes back what was asked for in vain, from the highest place down, but for the probes.
    fn cancel_excess_probes(&mut self) {
        let capacity_probes = self.waiting_capacity_probes();
        capacity_probes
            .into_iter()
            .skip(self.capacity_probes())
            .for_each(|launch| self.cancel_launch(launch));
    }

    /// Probes wait at the lowest places that are free: one at a higher place may be of a lesser
    /// class, and wait while others of its place's class, or a job beside it, get the room.
    fn move_probes_down(&mut self) {
        let free = self.workers.free_slots().skip_while(|&place| place < self.spec.min_workers);
        let higher =
            |&(launch, place): &(LaunchId, u32)| self.workers.launches[&launch].slot > place;
        let high: Vec<_> =
            self.waiting_capacity_probes().into_iter().rev().zip(free).take_while(higher).collect();
        high.into_iter().for_each(|(launch, _)| self.cancel_launch(launch));
    }

    /// The pods beyond the core that are known to wait for room, lowest place first.
    fn waiting_capacity_probes(&self) -> Vec<LaunchId> {
        let mut capacity_probes = self.workers.unscheduled(self.spec.min_workers);
        capacity_probes
            .retain(|id| self.workers.launches[id].scheduling == Scheduling::Unschedulable);
        capacity_probes
    }

    /// Takes back a pod that has no worker, which nobody is to blame for.
    fn cancel_launch(&mut self, launch: LaunchId) {
        for launch in self.workers.pod(launch) {
            let l = self.workers.launches.get_mut(&launch).expect("it is of the pod");
            l.leaving = true;
            l.accounting = ExitAccounting::Expected;
            self.initial_launches_left += 1;
        }
        self.kill(launch);
    }

    pub(super) fn on_launch_runs(&mut self, now: Time, launch: LaunchId) {
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
            if !self.has_timer(Timer::Hello(launch)) && !matches!(self.phase, Phase::Ending(_)) {
                self.set_timer(now + HELLO_WAIT, Timer::Hello(launch));
            }
        }
        if !awaited.is_empty() {
            self.launch_missing(now);
        }
    }

    /// Its program has been told to end, or is about to be, and another may take its place.
    pub(super) fn on_launch_leaves(&mut self, now: Time, launch: LaunchId, reason: &str) {
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
            // They may not have heard of it: a shell that runs them need not pass the signal on.
            return heard.into_iter().for_each(|worker| self.on_leaving(now, worker));
        }
        for launch in self.workers.pod(launch) {
            let l = self.workers.launches.get_mut(&launch).expect("it is of the pod");
            l.leaving = true;
            l.accounting = ExitAccounting::Expected;
        }
        self.mark_dirty();
        self.launch_missing(now);
    }
}

/// Of so many workers one may wait for room.
const WORKERS_PER_PROBE: usize = 10;
const PROBES_MAX: usize = 8;
const PROBES_MIN: usize = 2;
/// For how long it is believed that there is no room.
const UNSCHEDULABLE_FOR: Duration = Duration::from_secs(60);
