//! Which faults are injected, and when.
//!
//! A fault plan is a short list of faults. Each fault waits for a number of events, then possibly
//! for a critical moment (a group that is being built, a state in transfer, ranks of which some
//! have committed a step), and is then applied. A temporary fault heals by itself. When the last
//! fault has been applied and all have healed, the job must come to its end.

use std::mem;

use elasticdl_master::job::{Event as JobEvent, Exit};

use super::clock::Micros;
use super::state::event::Event;
use super::state::faults::{CONTROL_PLANE_FAULTS, Fault, FaultKind, Moment, Target, Undo};
use super::state::network::{Host, MASTER};
use super::state::operation::Collective;
use super::state::thread::{Doing, TRAINER, Thread};
use super::trace::trace;
use super::world::World;

impl World {
    /// Applies the next fault of the plan if it is due.
    pub(super) fn inject(&mut self) {
        let Some(fault) = self.fault_plan.faults.front_mut() else {
            if self.fault_plan.unhealed == 0 && self.fault_plan.healed_since.is_none() {
                trace!(self, "all faults have healed");
                self.fault_plan.healed_since = Some(self.clock.now());
            }
            return;
        };
        if fault.after > 0 {
            fault.after -= 1;
            return;
        }
        fault.wait_max = fault.wait_max.saturating_sub(1);
        let (moment, may_wait) = (fault.moment, fault.wait_max > 0);
        let at_moment = moment.and_then(|moment| self.at_moment(moment));
        if moment.is_some() && at_moment.is_none() && may_wait {
            return;
        }
        let Some(Fault { kind, target, .. }) = self.fault_plan.faults.pop_front() else { return };
        let Some(p) = self.target(target, at_moment) else { return };
        self.oracle.coverage.faults += 1;
        self.apply(kind, p);
    }

    fn at_moment(&self, moment: Moment) -> Option<usize> {
        let is = |p: usize| {
            let doing = &self.processes[p].threads[TRAINER].doing;
            let operates = |wanted: &dyn Fn(&Collective) -> bool| match doing {
                Doing::Operating(operation) => wanted(&operation.what),
                _ => false,
            };
            match moment {
                Moment::Computing => self.computes(p),
                Moment::Connecting => matches!(doing, Doing::Connecting),
                Moment::Exchanging => operates(&|what| *what == Collective::Exchange),
                Moment::Fetching => self.is_joining(p),
                Moment::Finishing => self.oracle.has_finished(p),
                Moment::HalfCommitted => self.is_ahead(p),
                Moment::Replicated => self.computes(p) && self.may_flip(p),
                Moment::Repairing => operates(&Collective::repairs),
                Moment::Syncing => operates(&|what| *what == Collective::Synchronize),
                Moment::IdleRound => operates(&|what| *what == Collective::IdleRound),
            }
        };
        (0..self.processes.len()).find(|&p| self.processes[p].is_alive() && is(p))
    }

    /// Whether `p` has committed a step that another member of its ring has not.
    fn is_ahead(&self, p: usize) -> bool {
        let place = |q: usize| {
            let trainer = &self.processes[q].trainer;
            let generation = trainer.ring.as_ref()?.generation;
            Some((generation, trainer.state()?.step))
        };
        let Some((generation, step)) = place(p) else { return false };
        (0..self.processes.len()).any(|q| {
            self.processes[q].is_alive()
                && place(q).is_some_and(|(g, s)| g == generation && s < step)
        })
    }

    fn target(&mut self, target: Target, at_moment: Option<usize>) -> Option<usize> {
        let living: Vec<usize> =
            (0..self.processes.len()).filter(|&p| self.processes[p].is_alive()).collect();
        let chosen = match target {
            Target::Any => None,
            Target::Ahead => {
                let step = |p: &usize| self.processes[*p].trainer.state().map(|s| s.step);
                living.iter().copied().filter(|p| step(p).is_some()).max_by_key(step)
            }
            Target::FirstRank => self.oracle.first_member().filter(|p| living.contains(p)),
            Target::Donor => living.iter().copied().find(|&p| self.is_serving(p)),
            Target::AtMoment => at_moment,
            Target::Newest => living.last().copied(),
        };
        chosen.or_else(|| self.rng.pick(&living))
    }

    fn apply(&mut self, kind: FaultKind, p: usize) {
        trace!(self, "FAULT: {kind:?}, {}", self.name(p));
        let is_order = matches!(
            kind,
            FaultKind::BreakFetches
                | FaultKind::Scale
                | FaultKind::Slow
                | FaultKind::Stop
                | FaultKind::Suspend
                | FaultKind::Terminate
        );
        let is_control_only =
            CONTROL_PLANE_FAULTS.iter().any(|f| mem::discriminant(f) == mem::discriminant(&kind));
        self.fault_plan.links_may_break |=
            !is_order && !is_control_only && !matches!(kind, FaultKind::Pause);
        match kind {
            FaultKind::BreakFetches => self.break_fetches(),
            FaultKind::Crash => self.crash(p),
            FaultKind::CrashAll => (0..self.processes.len()).for_each(|q| self.crash(q)),
            FaultKind::CrashAllButOne => {
                (0..self.processes.len()).filter(|&q| q != p).for_each(|q| self.crash(q));
            }
            // The master dies between two events, or between two actions that follow from one
            // event.
            FaultKind::CrashMaster => {
                if self.rng.chance(1, 2) {
                    self.crash_master()
                } else {
                    self.master.dies_after = Some(self.rng.below(12))
                }
            }
            FaultKind::CrashTwo => {
                self.crash(p);
                if let Some(q) = self.target(Target::Any, None) {
                    self.crash(q);
                }
            }
            FaultKind::CutFromAll => {
                let others = (0..=self.processes.len()).filter(|&host| host != p + 1);
                let cuts = others.map(|host| (host, p + 1)).collect();
                self.cut(cuts);
            }
            FaultKind::CutFromMaster => self.cut_master_from(vec![p]),
            FaultKind::CutMasterFromAll => {
                self.cut_master_from((0..self.processes.len()).collect())
            }
            FaultKind::CutFromPeer => {
                let peers: Vec<usize> = (0..self.processes.len())
                    .filter(|&q| q != p && self.processes[q].is_alive())
                    .collect();
                if let Some(q) = self.rng.pick(&peers) {
                    self.cut(vec![(q + 1, p + 1)]);
                }
            }
            FaultKind::Fail => {
                let exit = if self.rng.chance(1, 2) { Exit::Code(1) } else { Exit::Signal(11) };
                self.die(p, exit, false);
            }
            FaultKind::FailPersisting => {
                self.master.persists = false;
                self.heal_later(Undo::Persist);
                // The successor of a local master finds an older record, and no list of pods.
                if !self.setting.may_restore_stale && self.rng.chance(1, 2) {
                    self.master.dies_after = Some(self.rng.below(24));
                }
            }
            FaultKind::Flip => self.flip(p),
            FaultKind::Hang => self.hang(p),
            FaultKind::Miscount => self.begin_miscounts(p),
            FaultKind::LeaveAndCrash => self.leave_and_crash(p),
            FaultKind::LoseAllStreams => {
                (0..self.processes.len()).for_each(|q| self.lose_one_of(q, true))
            }
            FaultKind::LoseLink => self.lose_one_of(p, false),
            FaultKind::LoseStream => self.lose_one_of(p, true),
            FaultKind::Pause => {
                self.processes[p].paused = true;
                self.processes[p].is_degraded = true;
                self.heal_later(Undo::Continue(p));
            }
            FaultKind::PauseMaster if !self.master.is_alive => {}
            FaultKind::PauseMaster => {
                self.master.paused = true;
                (0..self.processes.len()).for_each(|q| self.lose_contact(q));
                self.heal_much_later(Undo::ContinueMaster);
            }
            FaultKind::ReplaceMaster => self.replace_master(p),
            FaultKind::Scale => {
                let (min, max) = (self.setting.spec.min_workers, self.setting.spec.max_workers);
                let per_pod = self.setting.spec.workers_per_pod;
                let pods = self.rng.between((min / per_pod).into(), (max / per_pod).into());
                let num_workers = pods as u32 * per_pod;
                trace!(self, "the user wants {num_workers} workers");
                self.command(JobEvent::Scale(num_workers.into()));
            }
            FaultKind::Slow => {
                let factor = self.rng.between(5, 60);
                self.net.slow_down(p + 1, factor);
                self.processes[p].is_degraded = true;
                self.heal_later(Undo::SpeedUp(p + 1));
            }
            FaultKind::Stop => {
                self.fault_plan.stopped = true;
                self.command(JobEvent::Stop);
            }
            FaultKind::StoreUnavailable => {
                self.checkpoint_store.is_unavailable.set(true);
                self.heal_later(Undo::StoreAvailable);
            }
            FaultKind::Storm if self.oracle.coverage.storms > 0 => {}
            FaultKind::Storm => {
                self.oracle.coverage.storms += 1;
                self.fault_plan.storms = true;
                (0..self.processes.len()).for_each(|q| self.crash(q));
                self.fault_plan.unhealed += 1;
                let span = self.rng.between(STORM_US / 4, STORM_US);
                self.clock.after(span, Event::Heal(Undo::EndStorm));
            }
            FaultKind::Suspend => {
                self.oracle.coverage.suspensions += 1;
                self.command(JobEvent::Suspend);
                self.heal_much_later(Undo::Resume);
            }
            FaultKind::Terminate => {
                for q in self.processes_hit_with(p) {
                    self.dispatch(Event::Terminate { p: q });
                }
            }
        }
    }

    /// `p` gets SIGTERM, and another member is killed soon: before `p` is released, while it hands
    /// its rows over, or when the next group forms.
    fn leave_and_crash(&mut self, p: usize) {
        for q in self.processes_hit_with(p) {
            self.dispatch(Event::Terminate { p: q });
        }
        let is_other = |q: &usize| *q != p && self.processes[*q].is_alive();
        let others: Vec<usize> = (0..self.processes.len()).filter(is_other).collect();
        if let Some(q) = self.rng.pick(&others) {
            let most = 1 << self.rng.between(4, 16);
            let delay = 1 + self.rng.below(most);
            self.clock.after(delay, Event::Die { p: q, signal: 9 });
        }
    }

    fn computes(&self, p: usize) -> bool {
        let is_computing = matches!(self.processes[p].threads[TRAINER].doing, Doing::Computing);
        is_computing && !self.processes[p].trainer.is_hung
    }

    /// Whether `p` serves a joiner.
    fn is_serving(&self, p: usize) -> bool {
        let runs = |thread: &Thread| !matches!(thread.doing, Doing::Nothing);
        self.processes[p].threads[TRAINER + 1..].iter().any(runs)
    }

    /// The trainer thread of `p` hangs, if it computes or waits for its neighbours. A master that
    /// awaits its final report takes it for an export.
    fn hang(&mut self, p: usize) {
        let trainer = &self.processes[p].trainer;
        let has_ended = !trainer.seen.is_ready || trainer.seen.has_ended;
        let waits = trainer.waiting.is_some() && !trainer.is_hung && !has_ended;
        let may_hang = self.computes(p) || waits;
        if !may_hang || !self.master.is_alive {
            return;
        }
        trace!(self, "{}: hangs", self.name(p));
        self.processes[p].trainer.is_hung = true;
        self.processes[p].is_degraded = true;
        self.oracle.failures_max += 1;
        self.oracle.coverage.hung += 1;
    }

    pub(super) fn crash(&mut self, p: usize) {
        let lossy = self.rng.chance(1, 3);
        for q in self.processes_hit_with(p) {
            self.die(q, Exit::Signal(9), lossy);
        }
    }

    pub(super) fn cut(&mut self, cuts: Vec<(Host, Host)>) {
        for &(a, b) in &cuts {
            self.net.cut(a, b);
            for p in [a, b].into_iter().filter_map(|host| host.checked_sub(1)) {
                if let Some(process) = self.processes.get_mut(p) {
                    process.is_degraded = true;
                }
            }
        }
        self.heal_later(Undo::Mend(cuts));
    }

    /// Cuts the network between the master and these processes.
    pub(super) fn cut_master_from(&mut self, processes: Vec<usize>) {
        let cuts: Vec<(Host, Host)> = processes.iter().map(|p| (MASTER, p + 1)).collect();
        for &(a, b) in &cuts {
            self.net.cut(a, b);
        }
        processes.into_iter().for_each(|p| self.lose_contact(p));
        self.heal_much_later(Undo::Mend(cuts));
    }

    /// Messages between `p` and the master are late or lost from now on; a keep-alive ping detects
    /// it.
    pub(super) fn lose_contact(&mut self, p: usize) {
        self.processes[p].lost_contact = true;
        if let Some(link) = self.processes[p].stream {
            self.clock.after(KEEP_ALIVE_US, Event::KeepAlive { p, link });
        }
    }

    fn lose_one_of(&mut self, p: usize, is_control: bool) {
        let mut links = self.net.links_of(p + 1);
        // A member that waits for a dial that was lost on the network is only detected by the
        // worker timeout, if there is one.
        let is_limited = self.setting.spec.options.worker_timeout.is_some();
        links.retain(|&link| {
            let link = self.net.link(link);
            link.is_control == is_control && (link.is_established || is_limited)
        });
        let Some(link) = self.rng.pick(&links) else { return };
        for host in self.net.link(link).ends {
            if let Some(q) = host.checked_sub(1) {
                self.processes[q].is_degraded |= !is_control;
                self.processes[q].lost_contact |= is_control;
            }
        }
        self.lose(link);
    }

    /// The links over which joiners fetch the state break at a random place of the transfer, and
    /// some of those that follow.
    fn break_fetches(&mut self) {
        let fetching = (0..self.processes.len()).filter(|&p| self.is_joining(p));
        for p in fetching.collect::<Vec<_>>() {
            for again in 0..self.rng.between(1, 3) {
                let delay = again * FETCH_PAUSE_US + self.rng.below(TRANSFER_US);
                self.clock.after(delay, Event::BreakFetch { p });
            }
        }
    }

    /// The link over which `p` fetches the state breaks, if it still does.
    pub(super) fn break_fetch(&mut self, p: usize) {
        if let Some(source) = self.processes[p].trainer.source.as_ref() {
            let link = source.link;
            trace!(self, "FAULT: {}: its link to its donor breaks", self.name(p));
            self.lose(link);
        }
    }

    /// The user resumes the job, and looks later whether a master has got the request.
    fn resume_job(&mut self) {
        let master = &self.master;
        if !master.is_alive || !master.commands.is_empty() {
            return self.heal_later(Undo::Resume);
        }
        if master.job.is_suspended() && master.job.outcome().is_none() {
            self.command(JobEvent::Resume);
            self.heal_later(Undo::Resume);
        }
    }

    /// Heals the fault after a span around the worker timeout, on both sides of it.
    pub(super) fn heal_later(&mut self, undo: Undo) {
        let timeout =
            self.setting.spec.options.worker_timeout.map_or(400_000, |t| t.as_micros() as Micros);
        let most = [timeout / 20, timeout / 2, timeout, timeout * 2, timeout * 4]
            [self.rng.below(5) as usize];
        let span = self.rng.between(1, most);
        let span = self.fault_plan.heals_after.unwrap_or(span);
        trace!(self, "this heals in {span} us");
        self.fault_plan.unhealed += 1;
        self.clock.after(span, Event::Heal(undo));
    }

    /// As [`Self::heal_later`], or long after: when streams have ended, but before workers give up
    /// on the master.
    pub(super) fn heal_much_later(&mut self, undo: Undo) {
        if self.rng.chance(2, 3) {
            return self.heal_later(undo);
        }
        let span = self.rng.between(KEEP_ALIVE_US / 2, 2 * KEEP_ALIVE_US);
        trace!(self, "this heals in {span} us");
        self.fault_plan.unhealed += 1;
        self.clock.after(span, Event::Heal(undo));
    }

    pub(super) fn restart_later(&mut self) {
        self.heal_later(Undo::RestartMaster);
    }

    pub(super) fn undo(&mut self, undo: Undo) {
        self.fault_plan.unhealed -= 1;
        trace!(self, "HEALED: {undo:?}");
        match undo {
            Undo::Continue(p) => self.resume(p),
            Undo::ContinueMaster => self.on_master_continued(),
            Undo::EndFormerMaster => self.end_former_master(),
            Undo::EndStorm => self.fault_plan.storms = false,
            Undo::Persist => {
                self.master.persists = true;
                self.master_acts();
            }
            Undo::Mend(cuts) => cuts.into_iter().for_each(|(a, b)| self.heal(a, b)),
            Undo::RestartMaster => self.restart_master(),
            Undo::Resume => self.resume_job(),
            Undo::SpeedUp(host) => self.net.speed_up(host),
            Undo::StoreAvailable => self.checkpoint_store.is_unavailable.set(false),
        }
    }
}

/// Pause of a joiner before it dials again.
const FETCH_PAUSE_US: Micros = 50_000;

/// Duration of most transfers to joiners.
const TRANSFER_US: Micros = 4000;

const STORM_US: Micros = 60_000_000;

/// Time without an answer to its pings after which a worker closes its stream.
const KEEP_ALIVE_US: Micros = 10_000_000;
