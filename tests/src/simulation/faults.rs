//! What goes wrong, and when.
//!
//! A storm is a handful of gusts. Each waits for a number of events, then, perhaps, for a moment
//! that is worth hitting (a group that is being built, a state on its way, ranks of which some have
//! committed a step), and then does its worst. What it breaks for a while heals by itself. When the
//! last gust is over and all has healed, the job must come to its end.

use std::collections::VecDeque;
use std::mem;

use elasticdl_master::job::{Event as JobEvent, Exit, JobSpec};

use super::clock::{Dice, Micros};
use super::network::{Host, MASTER};
use super::operation::What;
use super::story::tell;
use super::trainer::Doing;
use super::world::{Event, World};

/// All faults of a run.
#[derive(Debug)]
pub(super) struct Storm {
    gusts: VecDeque<Gust>,
    /// What is broken and will heal.
    unhealed: u32,
    /// Since when everything is as it should be, and stays so.
    pub(super) calm_since: Option<Micros>,
    /// The user has stopped the job.
    pub(super) stopped: bool,
    /// Something has broken or ended that was not told to: links may break from now on.
    pub(super) has_harmed: bool,
    /// Nothing but the master, its streams, its records and the storage suffers.
    pub(super) is_of_control: bool,
}

#[derive(Debug)]
struct Gust {
    /// Events to let pass.
    after: u64,
    moment: Option<Moment>,
    /// Events to wait for the moment.
    patience: u64,
    fault: Fault,
    who: Who,
}

/// Moments that are worth hitting.
#[derive(Clone, Copy, Debug)]
enum Moment {
    /// Somebody builds its links.
    Connecting,
    /// A newcomer fetches the state.
    Fetching,
    /// Somebody holds the final state.
    Finishing,
    /// Some members have committed a step that others have not.
    HalfCommitted,
    /// A result or a state is on its way.
    Repairing,
    /// Somebody waits for the others' words in a new group.
    Syncing,
    /// A group waits for records.
    Talking,
}

#[derive(Clone, Copy, Debug)]
enum Fault {
    Crash,
    CrashAll,
    CrashAllButOne,
    CrashMaster,
    CrashTwo,
    CutFromAll,
    CutFromMaster,
    CutFromPeer,
    CutMasterFromAll,
    Fail,
    KeepNoRecords,
    LoseAllStreams,
    LoseLink,
    LoseStream,
    Pause,
    PauseMaster,
    Scale,
    Slow,
    Stop,
    StoreAway,
    Terminate,
}

/// Whom it hits.
#[derive(Clone, Copy, Debug)]
enum Who {
    Anybody,
    /// A member with the highest step.
    Ahead,
    /// The lowest rank of the newest generation.
    First,
    /// The member that gives it the state.
    Giver,
    /// Who makes the moment.
    Matching,
    /// The process that was started last.
    Youngest,
}

/// What ends a fault.
#[derive(Clone, Debug)]
pub(super) enum Undo {
    Continue(usize),
    ContinueMaster,
    KeepRecords,
    Mend(Vec<(Host, Host)>),
    RestartMaster,
    SpeedUp(Host),
    StoreBack,
}

impl Storm {
    pub(super) fn draw(dice: &mut Dice, spec: &JobSpec) -> Self {
        let most = [0, 1, 2, 3, 4, 6, 8, 12][dice.below(8) as usize];
        let mut gusts: VecDeque<Gust> = (0..most).map(|_| Gust::draw(dice, spec)).collect();
        // From dice of their own: other runs stay as they are.
        let mut dice = Dice::new(spec.seed.rotate_left(48));
        let is_of_control = dice.chance(1, 6);
        for gust in gusts.iter_mut().filter(|_| is_of_control) {
            gust.fault = dice.pick(&CONTROL_FAULTS).unwrap_or(gust.fault);
        }
        Self {
            is_of_control: is_of_control && !gusts.is_empty(),
            gusts,
            unhealed: 0,
            calm_since: None,
            stopped: false,
            has_harmed: false,
        }
    }
}

impl Gust {
    fn draw(dice: &mut Dice, spec: &JobSpec) -> Self {
        use Fault::{
            Crash, CrashAll, CrashAllButOne, CrashMaster, CrashTwo, CutFromAll, CutFromMaster,
            CutFromPeer, CutMasterFromAll, Fail, LoseAllStreams, LoseLink, LoseStream, Pause,
            PauseMaster, Scale, Slow, Stop, Terminate,
        };
        let fault = match dice.below(100) {
            0..20 => Crash,
            20..28 => CrashMaster,
            28..33 => CrashTwo,
            33..36 => CrashAllButOne,
            36..38 => CrashAll,
            38..42 => Fail,
            42..52 => Terminate,
            52..62 => Pause,
            62..65 => PauseMaster,
            65..70 => LoseLink,
            70..72 => LoseAllStreams,
            72..74 => LoseStream,
            74..78 => CutFromMaster,
            78..80 => CutMasterFromAll,
            80..85 => CutFromPeer,
            85..88 => CutFromAll,
            88..93 => Slow,
            93..99 => Scale,
            _ => Stop,
        };
        let moments = [
            Moment::Connecting,
            Moment::Fetching,
            Moment::Fetching,
            Moment::Finishing,
            Moment::HalfCommitted,
            Moment::HalfCommitted,
            Moment::Repairing,
            Moment::Syncing,
            Moment::Talking,
        ];
        let whose = [
            Who::Anybody,
            Who::Anybody,
            Who::Ahead,
            Who::First,
            Who::Giver,
            Who::Matching,
            Who::Matching,
            Who::Youngest,
        ];
        // Short spans are as likely as long ones; larger groups make more events of a step.
        let scale = 1 << dice.below(8);
        Self {
            after: 1 + dice.below(scale * u64::from(spec.num_workers)),
            moment: if dice.chance(3, 5) { dice.pick(&moments) } else { None },
            patience: 400,
            fault,
            who: dice.pick(&whose).unwrap_or(Who::Anybody),
        }
    }
}

impl World {
    /// Looks whether it is time for the next gust.
    pub(super) fn blow(&mut self) {
        let Some(gust) = self.storm.gusts.front_mut() else {
            if self.storm.unhealed == 0 && self.storm.calm_since.is_none() {
                tell!(self, "the storm is over");
                self.storm.calm_since = Some(self.clock.now());
            }
            return;
        };
        if gust.after > 0 {
            gust.after -= 1;
            return;
        }
        gust.patience = gust.patience.saturating_sub(1);
        let (moment, is_patient) = (gust.moment, gust.patience > 0);
        let matching = moment.and_then(|moment| self.matching(moment));
        if moment.is_some() && matching.is_none() && is_patient {
            return;
        }
        let Some(Gust { fault, who, .. }) = self.storm.gusts.pop_front() else { return };
        let Some(p) = self.victim(who, matching) else { return };
        self.books.tally.faults += 1;
        self.hit(fault, p);
    }

    fn matching(&self, moment: Moment) -> Option<usize> {
        let is = |p: usize| {
            let trainer = &self.processes[p].trainer;
            let operates = |wanted: &dyn Fn(&What) -> bool| match &trainer.doing {
                Doing::Operating(operation) => wanted(operation.what()),
                _ => false,
            };
            match moment {
                Moment::Connecting => matches!(trainer.doing, Doing::Connecting),
                Moment::Fetching => self.is_newcomer(p),
                Moment::Finishing => self.books.has_finished(p),
                Moment::HalfCommitted => self.is_ahead(p),
                Moment::Repairing => {
                    operates(&|what| !matches!(what, What::Step | What::Synchronize | What::Talk))
                }
                Moment::Syncing => operates(&|what| *what == What::Synchronize),
                Moment::Talking => operates(&|what| *what == What::Talk),
            }
        };
        (0..self.processes.len()).find(|&p| self.processes[p].is_alive() && is(p))
    }

    /// Whether `p` has committed a step that another member of its ring has not.
    fn is_ahead(&self, p: usize) -> bool {
        let place = |q: usize| {
            let trainer = &self.processes[q].trainer;
            let generation = trainer.ring.as_ref().map(super::ring::Ring::generation)?;
            Some((generation, trainer.state()?.step))
        };
        let Some((generation, step)) = place(p) else { return false };
        (0..self.processes.len()).any(|q| {
            self.processes[q].is_alive()
                && place(q).is_some_and(|(g, s)| g == generation && s < step)
        })
    }

    fn victim(&mut self, who: Who, matching: Option<usize>) -> Option<usize> {
        let living: Vec<usize> =
            (0..self.processes.len()).filter(|&p| self.processes[p].is_alive()).collect();
        let chosen = match who {
            Who::Anybody => None,
            Who::Ahead => {
                let step = |p: &usize| self.processes[*p].trainer.state().map(|s| s.step);
                living.iter().copied().filter(|p| step(p).is_some()).max_by_key(step)
            }
            Who::First => self.books.first_member().filter(|p| living.contains(p)),
            Who::Giver => {
                living.iter().copied().find(|&p| self.processes[p].trainer.donor.is_giving())
            }
            Who::Matching => matching,
            Who::Youngest => living.last().copied(),
        };
        chosen.or_else(|| self.dice.pick(&living))
    }

    fn hit(&mut self, fault: Fault, p: usize) {
        tell!(self, "FAULT: {fault:?}, {}", self.name(p));
        let is_order = matches!(fault, Fault::Scale | Fault::Slow | Fault::Stop | Fault::Terminate);
        let is_of_control =
            CONTROL_FAULTS.iter().any(|f| mem::discriminant(f) == mem::discriminant(&fault));
        self.storm.has_harmed |= !is_order && !is_of_control && !matches!(fault, Fault::Pause);
        match fault {
            Fault::Crash => self.crash(p),
            Fault::CrashAll => (0..self.processes.len()).for_each(|q| self.crash(q)),
            Fault::CrashAllButOne => {
                (0..self.processes.len()).filter(|&q| q != p).for_each(|q| self.crash(q));
            }
            // Between two events, or amid what follows from one.
            Fault::CrashMaster => match self.dice.chance(1, 2) {
                true => self.crash_master(),
                false => self.master.dies_after = Some(self.dice.below(12)),
            },
            Fault::CrashTwo => {
                self.crash(p);
                if let Some(q) = self.victim(Who::Anybody, None) {
                    self.crash(q);
                }
            }
            Fault::CutFromAll => {
                let others = (0..=self.processes.len()).filter(|&host| host != p + 1);
                let cuts = others.map(|host| (host, p + 1)).collect();
                self.cut(cuts);
            }
            Fault::CutFromMaster => self.cut_master_from(vec![p]),
            Fault::CutMasterFromAll => self.cut_master_from((0..self.processes.len()).collect()),
            Fault::CutFromPeer => {
                let peers: Vec<usize> = (0..self.processes.len())
                    .filter(|&q| q != p && self.processes[q].is_alive())
                    .collect();
                if let Some(q) = self.dice.pick(&peers) {
                    self.cut(vec![(q + 1, p + 1)]);
                }
            }
            Fault::Fail => {
                let exit = if self.dice.chance(1, 2) { Exit::Code(1) } else { Exit::Signal(11) };
                self.die(p, exit, false);
            }
            Fault::KeepNoRecords => {
                self.master.keeps_records = false;
                self.heal_later(Undo::KeepRecords);
            }
            Fault::LoseAllStreams => {
                (0..self.processes.len()).for_each(|q| self.lose_one_of(q, true))
            }
            Fault::LoseLink => self.lose_one_of(p, false),
            Fault::LoseStream => self.lose_one_of(p, true),
            Fault::Pause => {
                self.processes[p].paused = true;
                self.processes[p].is_blemished = true;
                self.heal_later(Undo::Continue(p));
            }
            Fault::PauseMaster if !self.master.is_alive => {}
            Fault::PauseMaster => {
                self.master.paused = true;
                (0..self.processes.len()).for_each(|q| self.lose_contact(q));
                self.heal_much_later(Undo::ContinueMaster);
            }
            Fault::Scale => {
                let (min, max) = (self.setting.spec.min_workers, self.setting.spec.max_workers);
                let per_pod = self.setting.spec.workers_per_pod;
                let pods = self.dice.between((min / per_pod).into(), (max / per_pod).into());
                let num_workers = pods as u32 * per_pod;
                tell!(self, "the user wants {num_workers} workers");
                self.order(JobEvent::Scale { num_workers });
            }
            Fault::Slow => {
                let factor = self.dice.between(5, 60);
                self.net.slow_down(p + 1, factor);
                self.processes[p].is_blemished = true;
                self.heal_later(Undo::SpeedUp(p + 1));
            }
            Fault::Stop => {
                self.storm.stopped = true;
                self.order(JobEvent::Stop);
            }
            Fault::StoreAway => {
                self.vault.is_away = true;
                self.heal_later(Undo::StoreBack);
            }
            Fault::Terminate => {
                for q in self.hit_with(p) {
                    self.dispatch(Event::Terminate { p: q });
                }
            }
        }
    }

    fn crash(&mut self, p: usize) {
        let lossy = self.dice.chance(1, 3);
        for q in self.hit_with(p) {
            self.die(q, Exit::Signal(9), lossy);
        }
    }

    fn cut(&mut self, cuts: Vec<(Host, Host)>) {
        for &(a, b) in &cuts {
            self.net.cut(a, b);
            for p in [a, b].into_iter().filter_map(|host| host.checked_sub(1)) {
                if let Some(process) = self.processes.get_mut(p) {
                    process.is_blemished = true;
                }
            }
        }
        self.heal_later(Undo::Mend(cuts));
    }

    /// Nothing passes between the master and these processes.
    fn cut_master_from(&mut self, processes: Vec<usize>) {
        let cuts: Vec<(Host, Host)> = processes.iter().map(|p| (MASTER, p + 1)).collect();
        for &(a, b) in &cuts {
            self.net.cut(a, b);
        }
        processes.into_iter().for_each(|p| self.lose_contact(p));
        self.heal_much_later(Undo::Mend(cuts));
    }

    /// What `p` and the master send each other is late or lost; a ping will find out.
    fn lose_contact(&mut self, p: usize) {
        self.processes[p].lost_contact = true;
        if let Some(link) = self.processes[p].stream {
            self.clock.after(KEEP_ALIVE_US, Event::KeepAlive { p, link });
        }
    }

    fn lose_one_of(&mut self, p: usize, is_control: bool) {
        let mut links = self.net.links_of(p + 1);
        // Whoever waits for a dial that was lost on its way is found by the silence that is
        // tolerated, if it is limited.
        let is_limited = self.setting.spec.worker_timeout.is_some();
        links.retain(|&link| {
            let link = self.net.link(link);
            link.is_control == is_control && (link.is_settled || is_limited)
        });
        let Some(link) = self.dice.pick(&links) else { return };
        for host in self.net.link(link).ends {
            if let Some(q) = host.checked_sub(1) {
                self.processes[q].is_blemished |= !is_control;
                self.processes[q].lost_contact |= is_control;
            }
        }
        self.lose(link);
    }

    /// Around the time after which a worker is taken out, on both sides of it.
    fn heal_later(&mut self, undo: Undo) {
        let timeout = self.setting.spec.worker_timeout.map_or(400_000, |t| t.as_micros() as Micros);
        let most = [timeout / 20, timeout / 2, timeout, timeout * 2, timeout * 4]
            [self.dice.below(5) as usize];
        let span = self.dice.between(1, most);
        tell!(self, "this heals in {span} us");
        self.storm.unhealed += 1;
        self.clock.after(span, Event::Heal(undo));
    }

    /// As [`Self::heal_later`], or long after: when streams have ended, but before workers end
    /// without a master.
    fn heal_much_later(&mut self, undo: Undo) {
        if self.dice.chance(2, 3) {
            return self.heal_later(undo);
        }
        let span = self.dice.between(KEEP_ALIVE_US / 2, 2 * KEEP_ALIVE_US);
        tell!(self, "this heals in {span} us");
        self.storm.unhealed += 1;
        self.clock.after(span, Event::Heal(undo));
    }

    pub(super) fn restart_later(&mut self) {
        self.heal_later(Undo::RestartMaster);
    }

    pub(super) fn undo(&mut self, undo: Undo) {
        self.storm.unhealed -= 1;
        tell!(self, "HEALED: {undo:?}");
        match undo {
            Undo::Continue(p) => self.resume(p),
            Undo::ContinueMaster => self.on_master_continued(),
            Undo::KeepRecords => {
                self.master.keeps_records = true;
                self.master_acts();
            }
            Undo::Mend(cuts) => cuts.into_iter().for_each(|(a, b)| self.heal(a, b)),
            Undo::RestartMaster => self.restart_master(),
            Undo::SpeedUp(host) => self.net.speed_up(host),
            Undo::StoreBack => self.vault.is_away = false,
        }
    }
}

/// Faults of the master, of what is between it and the workers, and of storage: nobody may be lost
/// by them.
const CONTROL_FAULTS: [Fault; 8] = [
    Fault::CrashMaster,
    Fault::CutFromMaster,
    Fault::CutMasterFromAll,
    Fault::KeepNoRecords,
    Fault::LoseAllStreams,
    Fault::LoseStream,
    Fault::PauseMaster,
    Fault::StoreAway,
];

/// After so long without an answer to its pings a worker takes its stream for dead.
const KEEP_ALIVE_US: Micros = 10_000_000;
