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
use super::crew::{Fate, Launch, Room};
use super::event::{LaunchId, Wait};
use super::job::{HELLO_WAIT, Job, Phase, Timer};
use super::story::clip;
use super::time::Time;

impl Job {
    /// Starts as many workers as are missing and may be started now.
    pub(super) fn launch_missing(&mut self, now: Time) {
        if self.phase != Phase::Running {
            return;
        }
        self.lower_probes();
        // Until the data is known to be usable, one worker is enough to look at it.
        let wanted = if self.dataset.is_some() { self.wanted } else { 1 };
        let vacancies = self.crew.vacancies(wanted as usize, self.spec.max_workers as usize);
        for _ in self.restarts.waiting(now)..vacancies {
            let index = self.crew.free_index();
            if !self.may_ask(now, index) {
                return;
            }
            let launch = self.crew.launch(index);
            for launch in self.crew.pod(launch) {
                self.timer(now + HELLO_WAIT, Timer::Hello(launch));
            }
            self.push(Action::Launch { launch, index });
            self.touch();
            self.reserve();
            match self.fresh.checked_sub(self.spec.workers_per_pod) {
                Some(fresh) => self.fresh = fresh,
                None => {
                    self.story.restarts += 1;
                    self.story.tally.restarts += 1;
                }
            }
        }
    }

    /// Whether a launch at this place may be asked for now.
    fn may_ask(&self, now: Time, index: u32) -> bool {
        let core = self.spec.min_workers;
        let waits = |l: &Launch| l.stays() && l.room == Room::Waits;
        let tight = self.tight_until.is_some_and(|until| now < until)
            || self.crew.launches.values().any(waits);
        index < core || !tight || self.crew.roomless(core).len() < self.probes()
    }

    /// How many pods beyond the core may wait for room at once.
    fn probes(&self) -> usize {
        (self.wanted as usize / self.crew.workers_per_pod / PROBES_PART)
            .clamp(PROBES_MIN, PROBES_MAX)
    }

    pub(super) fn on_launch_made(&mut self, launch: LaunchId, class: Option<String>) {
        for launch in self.crew.pod(launch) {
            self.crew.launches.get_mut(&launch).expect("it is of the pod").class.clone_from(&class);
        }
    }

    pub(super) fn on_launch_waits(&mut self, now: Time, launch: LaunchId, wait: Wait) {
        let pod = self.crew.pod(launch);
        if pod.is_empty() || self.crew.any_of_pod(launch, |l| l.worker.is_some()) {
            return;
        }
        let (room, reason) = match wait {
            Wait::Answer(reason) => (Room::Asked, reason),
            Wait::Room(reason) => (Room::Waits, Some(reason)),
            Wait::Start(reason) => (Room::Has, reason),
        };
        let mut was_awaited = false;
        let is_news = pod.iter().any(|launch| self.crew.launches[launch].waits_for != reason);
        for launch in pod {
            let l = self.crew.launches.get_mut(&launch).expect("it is of the pod");
            // It can't have become a worker.
            was_awaited |= l.away.take().is_some();
            l.room = room;
            l.waits_for.clone_from(&reason);
            self.cancel_timer(Timer::Hello(launch));
        }
        if let Some(reason) = reason.filter(|_| is_news) {
            self.say(format!("{} waits: {}", self.crew.name(launch, false), clip(&reason)));
        }
        match room {
            Room::Asked => {}
            Room::Has => self.launch_missing(now),
            Room::Waits => {
                let until = now + TIGHT;
                self.tight_until = Some(until);
                self.timer(until, Timer::Relaunch);
                self.withdraw_probes();
                self.launch_missing(now);
            }
        }
        if was_awaited {
            self.stop_awaiting(now);
        }
    }

    /// Takes back what was asked for in vain, from the highest place down, but for the probes.
    fn withdraw_probes(&mut self) {
        let probes = self.waiting_probes();
        probes.into_iter().skip(self.probes()).for_each(|launch| self.withdraw(launch));
    }

    /// Probes wait at the lowest places that are free: one at a higher place may be of a lesser
    /// class, and wait while others of its place's class, or a job beside it, get the room.
    fn lower_probes(&mut self) {
        let free = self.crew.free_places().skip_while(|&place| place < self.spec.min_workers);
        let higher = |&(launch, place): &(LaunchId, u32)| self.crew.launches[&launch].index > place;
        let high: Vec<_> =
            self.waiting_probes().into_iter().rev().zip(free).take_while(higher).collect();
        high.into_iter().for_each(|(launch, _)| self.withdraw(launch));
    }

    /// The pods beyond the core that are known to wait for room, lowest place first.
    fn waiting_probes(&self) -> Vec<LaunchId> {
        let mut probes = self.crew.roomless(self.spec.min_workers);
        probes.retain(|id| self.crew.launches[id].room == Room::Waits);
        probes
    }

    /// Takes back a pod that has no worker, which nobody is to blame for.
    fn withdraw(&mut self, launch: LaunchId) {
        for launch in self.crew.pod(launch) {
            let l = self.crew.launches.get_mut(&launch).expect("it is of the pod");
            l.leaving = true;
            l.fate = Fate::Excused;
            self.fresh += 1;
        }
        self.kill(launch);
    }

    pub(super) fn on_launch_runs(&mut self, now: Time, launch: LaunchId) {
        let is_awaited = |id: &LaunchId| {
            let l = &self.crew.launches[id];
            l.worker.is_none() && !l.killed
        };
        let awaited: Vec<LaunchId> = self.crew.pod(launch).into_iter().filter(is_awaited).collect();
        for &launch in &awaited {
            let l = self.crew.launches.get_mut(&launch).expect("it is of the pod");
            l.room = Room::Has;
            l.waits_for = None;
            if !self.has_timer(Timer::Hello(launch)) && !matches!(self.phase, Phase::Ending(_)) {
                self.timer(now + HELLO_WAIT, Timer::Hello(launch));
            }
        }
        if !awaited.is_empty() {
            self.launch_missing(now);
        }
    }

    /// Its program has been told to end, or is about to be, and another may take its place.
    pub(super) fn on_launch_leaves(&mut self, now: Time, launch: LaunchId, reason: &str) {
        if !self.crew.any_of_pod(launch, |l| !l.killed && l.stays()) {
            return;
        }
        let name = self.crew.name(launch, self.crew.any_of_pod(launch, |l| l.worker.is_some()));
        self.say(format!("{name} is taken away: {}", clip(reason)));
        let heard =
            self.crew.pod(launch).into_iter().filter_map(|id| self.crew.launches[&id].worker);
        let heard: Vec<WorkerId> = heard.filter(|id| self.crew.workers.contains_key(id)).collect();
        if !heard.is_empty() {
            // They may not have heard of it: a shell that runs them need not pass the signal on.
            return heard.into_iter().for_each(|worker| self.on_leaving(now, worker));
        }
        for launch in self.crew.pod(launch) {
            let l = self.crew.launches.get_mut(&launch).expect("it is of the pod");
            l.leaving = true;
            l.fate = Fate::Excused;
        }
        self.touch();
        self.launch_missing(now);
    }
}

/// Of so many workers one may wait for room.
const PROBES_PART: usize = 10;
const PROBES_MAX: usize = 8;
const PROBES_MIN: usize = 2;
/// For how long it is believed that there is no room.
const TIGHT: Duration = Duration::from_secs(60);
