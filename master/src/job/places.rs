//! Places to run at: how many launches are asked for, and what becomes of one until its worker says hello.
//!
//! Processes start wherever they are asked for. Pods may find no room. Then a few of them, the probes, wait for it: when one
//! gets a place, another is asked for, so a job grows as room comes, and a cluster is never flooded with pods that can't
//! run. The core, which is as many as the job can't do without, always asks.

use std::time::Duration;

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
            self.timer(now + HELLO_WAIT, Timer::Hello(launch));
            self.push(Action::Launch { launch, index });
            self.touch();
            self.reserve();
            match self.fresh.checked_sub(1) {
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
        let tight =
            self.tight_until.is_some_and(|until| now < until) || self.crew.launches.values().any(waits);
        index < core || !tight || self.crew.roomless(core).len() < self.probes()
    }

    /// How many launches beyond the core may wait for room at once.
    fn probes(&self) -> usize {
        (self.wanted as usize / PROBES_PART).clamp(PROBES_MIN, PROBES_MAX)
    }

    pub(super) fn on_launch_made(&mut self, launch: LaunchId, class: Option<String>) {
        if let Some(l) = self.crew.launches.get_mut(&launch) {
            l.class = class;
        }
    }

    pub(super) fn on_launch_waits(&mut self, now: Time, launch: LaunchId, wait: Wait) {
        let Some(l) = self.crew.launches.get_mut(&launch).filter(|l| l.worker.is_none()) else {
            return;
        };
        // It can't have become a worker.
        let was_awaited = l.away.take().is_some();
        let (room, reason) = match wait {
            Wait::Answer(reason) => (Room::Asked, reason),
            Wait::Room(reason) => (Room::Waits, Some(reason)),
            Wait::Start(reason) => (Room::Has, reason),
        };
        l.room = room;
        l.waits_for.clone_from(&reason);
        self.cancel_timer(Timer::Hello(launch));
        if let Some(reason) = reason {
            self.say(format!("launch {} waits: {}", launch.0, clip(&reason)));
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

    /// Probes wait at the lowest places that are free: one at a higher place may be of a lesser class, and wait while
    /// others of its place's class, or a job beside it, get the room.
    fn lower_probes(&mut self) {
        let free = self.crew.free_places().skip_while(|&place| place < self.spec.min_workers);
        let higher = |&(launch, place): &(LaunchId, u32)| self.crew.launches[&launch].index > place;
        let high: Vec<_> = self.waiting_probes().into_iter().rev().zip(free).take_while(higher).collect();
        high.into_iter().for_each(|(launch, _)| self.withdraw(launch));
    }

    /// The launches beyond the core that are known to wait for room, lowest place first.
    fn waiting_probes(&self) -> Vec<LaunchId> {
        let mut probes = self.crew.roomless(self.spec.min_workers);
        probes.retain(|id| self.crew.launches[id].room == Room::Waits);
        probes
    }

    /// Takes back a launch that has no worker, which nobody is to blame for.
    fn withdraw(&mut self, launch: LaunchId) {
        if let Some(l) = self.crew.launches.get_mut(&launch) {
            l.leaving = true;
            l.fate = Fate::Excused;
            self.fresh += 1;
        }
        self.kill(launch);
    }

    pub(super) fn on_launch_runs(&mut self, now: Time, launch: LaunchId) {
        let Some(l) = self.crew.launches.get_mut(&launch).filter(|l| l.worker.is_none() && !l.killed) else {
            return;
        };
        l.room = Room::Has;
        l.waits_for = None;
        if !self.has_timer(Timer::Hello(launch)) && !matches!(self.phase, Phase::Ending(_)) {
            self.timer(now + HELLO_WAIT, Timer::Hello(launch));
        }
        self.launch_missing(now);
    }

    /// Its program has been told to end, or is about to be, and another may take its place.
    pub(super) fn on_launch_leaves(&mut self, now: Time, launch: LaunchId, reason: &str) {
        let Some(l) = self.crew.launches.get_mut(&launch).filter(|l| !l.killed && l.stays()) else {
            return;
        };
        let worker = l.worker;
        let name = worker.map_or_else(|| format!("launch {}", launch.0), |w| format!("worker {w}"));
        self.say(format!("{name} is taken away: {}", clip(reason)));
        if let Some(worker) = worker.filter(|w| self.crew.workers.contains_key(w)) {
            // It may not have heard of it: a shell that runs it need not pass the signal on.
            return self.on_leaving(now, worker);
        }
        if let Some(l) = self.crew.launches.get_mut(&launch) {
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
