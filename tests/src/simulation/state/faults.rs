//! The plan of faults: which are injected, at which moments, and what undoes them.

use std::collections::VecDeque;

use elasticdl_master::job::JobSpec;

use super::network::Host;
use super::setting::Setting;
use crate::simulation::clock::{Micros, SimRng};

/// All faults of a run.
#[derive(Debug, Default)]
pub(crate) struct FaultPlan {
    pub(crate) faults: VecDeque<Fault>,
    /// Number of temporary faults that have not healed yet.
    pub(crate) unhealed: u32,
    /// Time since which no fault is active; no other one follows.
    pub(crate) healed_since: Option<Micros>,
    /// Whether the user has stopped the job.
    pub(crate) stopped: bool,
    /// Whether each process that is started is killed.
    pub(crate) storms: bool,
    /// Whether a process or a link has failed unasked: other links may break from now on.
    pub(crate) links_may_break: bool,
    /// Whether all faults of the run hit the control plane only: the master, its streams, its
    /// persisted snapshots, the storage.
    pub(crate) is_control_only: bool,
    /// The time after which temporary faults heal, where it is not drawn.
    pub(crate) heals_after: Option<Micros>,
    /// Whether the user has asked for one worker more, where that is not drawn.
    pub(crate) has_scaled: bool,
}

#[derive(Debug)]
pub(crate) struct Fault {
    /// Number of events to skip.
    pub(crate) after: u64,
    pub(crate) moment: Option<Moment>,
    /// Number of events to wait for the moment.
    pub(crate) wait_max: u64,
    pub(crate) kind: FaultKind,
    pub(crate) target: Target,
}

/// Critical moments.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Moment {
    /// A rank computes.
    Computing,
    /// A rank builds its links.
    Connecting,
    /// Ranks exchange rows, or their gradients.
    Exchanging,
    /// A joiner fetches the state.
    Fetching,
    /// A rank holds the final state.
    Finishing,
    /// Some members have committed a step that others have not.
    HalfCommitted,
    /// A rank computes whose state others have as well, and no other fault is active.
    Replicated,
    /// A result or a state is being broadcast.
    Repairing,
    /// A rank waits for the other ranks' headers in a new group.
    Syncing,
    /// A group waits for records.
    IdleRound,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum FaultKind {
    /// Links over which joiners fetch the state break, some of them again and again. No links of a
    /// member break, and no worker may be lost.
    BreakFetches,
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
    FailPersisting,
    /// A bit of a worker's parameters flips.
    Flip,
    /// A worker computes wrong gradients.
    Miscount,
    /// A trainer thread hangs in a step; the worker's heartbeats go on.
    Hang,
    /// A worker gets SIGTERM, and another one is killed at about the time at which it leaves.
    LeaveAndCrash,
    LoseAllStreams,
    LoseLink,
    LoseStream,
    Pause,
    PauseMaster,
    /// Another master takes the job over, and the former one does not know it for a while.
    ReplaceMaster,
    Scale,
    Slow,
    Stop,
    StoreUnavailable,
    /// All processes are killed, and for a while each one that is started.
    Storm,
    /// The user suspends the job, and resumes it later.
    Suspend,
    Terminate,
}

/// The process that a fault hits.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Target {
    Any,
    /// A member with the highest step.
    Ahead,
    /// The lowest rank of the newest generation.
    FirstRank,
    /// A member that serves the state to a joiner.
    Donor,
    /// The process that the moment was found at.
    AtMoment,
    /// The process that was started last.
    Newest,
}

/// The end of a temporary fault.
#[derive(Clone, Debug)]
pub(crate) enum Undo {
    Continue(usize),
    ContinueMaster,
    /// The former master learns that another one leads.
    EndFormerMaster,
    EndStorm,
    Persist,
    Mend(Vec<(Host, Host)>),
    RestartMaster,
    /// The user resumes the suspended job.
    Resume,
    SpeedUp(Host),
    StoreAvailable,
}

impl FaultPlan {
    pub(crate) fn draw(rng: &mut SimRng, setting: &Setting) -> Self {
        let spec = &setting.spec;
        let most = [0, 1, 2, 3, 4, 6, 8, 12][rng.below(8) as usize];
        let mut faults: VecDeque<Fault> = (0..most).map(|_| Fault::draw(rng, spec)).collect();
        // From a generator of their own, so that the other draws of a seed stay as they are.
        let mut rng = SimRng::new(spec.options.seed.rotate_left(48));
        let is_control_only = rng.chance(1, 6) && setting.bad_host.is_none();
        for fault in faults.iter_mut().filter(|_| is_control_only) {
            fault.kind = rng.pick(&CONTROL_PLANE_FAULTS).unwrap_or(fault.kind);
        }
        for fault in &mut faults {
            if rng.chance(1, 10) {
                (fault.kind, fault.moment) = (FaultKind::BreakFetches, Some(Moment::Fetching));
            }
        }
        let may_suspend = spec.options.checkpoints.is_some() && !is_control_only;
        for fault in faults.iter_mut().filter(|_| may_suspend) {
            if rng.chance(1, 12) {
                fault.kind = FaultKind::Suspend;
            }
        }
        let may_hang = spec.step_timeout.is_some() && spec.options.worker_timeout.is_some();
        for fault in faults.iter_mut().filter(|_| !is_control_only) {
            if rng.chance(1, 15) {
                fault.kind = FaultKind::ReplaceMaster;
            }
            if may_hang && rng.chance(1, 6) {
                let moments = [Moment::Computing, Moment::Computing, Moment::Connecting];
                let rare = [Moment::Syncing, Moment::Repairing, Moment::IdleRound];
                let is_rare = rng.chance(1, 4);
                let moment = rng.pick(if is_rare { &rare } else { &moments });
                (fault.kind, fault.moment) = (FaultKind::Hang, moment);
                fault.target = Target::AtMoment;
            }
            // No failures but those of the bad host.
            if setting.bad_host.is_some() {
                let kinds = [FaultKind::Crash, FaultKind::Scale, FaultKind::Terminate];
                fault.kind = rng.pick(&kinds).unwrap_or(fault.kind);
            }
        }
        let may_leave = !is_control_only && setting.bad_host.is_none();
        let mut of_leaves = SimRng::new(spec.options.seed.rotate_left(36));
        for fault in faults.iter_mut().filter(|_| may_leave) {
            if of_leaves.chance(1, if setting.shards() > 0 { 3 } else { 12 }) {
                fault.kind = FaultKind::LeaveAndCrash;
            }
        }
        let mut of_rows = SimRng::new(spec.options.seed.rotate_left(44));
        for fault in faults.iter_mut().filter(|_| setting.shards() > 0) {
            if of_rows.chance(1, 3) {
                fault.moment = Some(Moment::Exchanging);
            }
        }
        draw_rare(&mut faults, setting, &mut SimRng::new(spec.options.seed.rotate_left(52)));
        Self { is_control_only: is_control_only && !faults.is_empty(), faults, ..Self::default() }
    }
}

/// Draws the faults of rare worlds.
fn draw_rare(faults: &mut VecDeque<Fault>, setting: &Setting, rng: &mut SimRng) {
    for fault in faults.iter_mut() {
        if setting.other_build.is_some() {
            // The other workers must be able to outvote the one of another build.
            fault.kind = rng.pick(&CONTROL_PLANE_FAULTS).unwrap_or(fault.kind);
        } else if setting.has_storm {
            // No failures.
            let kinds = [FaultKind::Crash, FaultKind::Scale, FaultKind::Storm];
            fault.kind = rng.pick(&kinds).unwrap_or(fault.kind);
        }
    }
    // A bit flips where no other fault leaves the worker alone with its state.
    // With chunks, the owner of a parameter overwrites it on all ranks.
    let may_flip = !setting.has_storm && setting.bad_host.is_none() && setting.chunks.is_none();
    if may_flip && rng.chance(1, 20) {
        let kind = FaultKind::Flip;
        let (moment, target) = (Some(Moment::Replicated), Target::AtMoment);
        faults.push_back(Fault { after: 1, moment, wait_max: 20_000, kind, target });
    }
    if setting.spec.options.audit > 0 && may_flip {
        // Records that an auditor can't read are not audited.
        let kept = |fault: &Fault| !matches!(fault.kind, FaultKind::StoreUnavailable);
        faults.retain(kept);
        let (moment, target) = (Some(Moment::Replicated), Target::AtMoment);
        let fault = Fault { after: 1, moment, wait_max: 20_000, kind: FaultKind::Miscount, target };
        let place = rng.below(faults.len() as u64 + 1) as usize;
        faults.insert(place, fault);
    }
}

impl Fault {
    pub(crate) fn draw(rng: &mut SimRng, spec: &JobSpec) -> Self {
        use FaultKind::{
            Crash, CrashAll, CrashAllButOne, CrashMaster, CrashTwo, CutFromAll, CutFromMaster,
            CutFromPeer, CutMasterFromAll, Fail, LoseAllStreams, LoseLink, LoseStream, Pause,
            PauseMaster, Scale, Slow, Stop, Terminate,
        };
        let kind = match rng.below(100) {
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
            Moment::IdleRound,
        ];
        let targets = [
            Target::Any,
            Target::Any,
            Target::Ahead,
            Target::FirstRank,
            Target::Donor,
            Target::AtMoment,
            Target::AtMoment,
            Target::Newest,
        ];
        // Short spans are as likely as long ones; a larger group has more events per step.
        let scale = 1 << rng.below(8);
        Self {
            after: 1 + rng.below(scale * u64::from(spec.num_workers)),
            moment: if rng.chance(3, 5) { rng.pick(&moments) } else { None },
            wait_max: 400,
            kind,
            target: rng.pick(&targets).unwrap_or(Target::Any),
        }
    }
}

/// Faults of the control plane: the master, its connections to the workers, and storage. No worker
/// may be lost by them.
pub(crate) const CONTROL_PLANE_FAULTS: [FaultKind; 8] = [
    FaultKind::CrashMaster,
    FaultKind::CutFromMaster,
    FaultKind::CutMasterFromAll,
    FaultKind::FailPersisting,
    FaultKind::LoseAllStreams,
    FaultKind::LoseStream,
    FaultKind::PauseMaster,
    FaultKind::StoreUnavailable,
];
