//! The states of launches, and of the workers that they become.
//!
//! ```text
//!  launch   Starting ───hello──► Connected ──stream ended──► Disconnected
//!              │                     │  ▲                      │   │
//!           (found by a new master)  │  └─────reconnected──────┘   │
//!              │                     └──────────┬──────lost────────┘
//!           Unconfirmed ──► Connected       Forgotten
//!
//!  worker   Joining ──► Describing ──► Preparing ──► Fetching ──► Ready ──► Member
//! ```
//!
//! A launch stays in the table until its process has ended. How its slot is used, whether its exit
//! is a failure, and whether it was killed are independent of its state.

use std::net::SocketAddr;

use elasticdl_proto::{Committed, Generation, Location, Usage};

use super::heartbeat::{Follower, Stalled};
use super::scheduling::Scheduling;
use super::slot_use::SlotUse;
use super::straggler::StepPace;
use crate::job::time::Time;

/// A started process that is not known to have ended.
#[derive(Debug, Default)]
pub(crate) struct Launch {
    pub(super) state: LaunchState,
    /// The lowest slot that was free: see [`Action::Launch`](crate::job::Action::Launch).
    pub(super) slot: u32,
    slot_use: SlotUse,
    accounting: ExitAccounting,
    is_killed: bool,
    /// Whether its worker received SIGTERM while nothing was known to end it.
    is_signalled: bool,
    /// Whether it was evicted because it did not respond.
    is_unresponsive: bool,
    /// Whether a rule of the user for its end is applied already.
    is_ruled: bool,
    /// Whether an event has named it as a spare.
    is_known_spare: bool,
    scheduling: Scheduling,
    /// What it waits for, if known.
    waits_for: Option<String>,
    /// Priority class, where the cluster has them.
    class: Option<String>,
    /// Last lines of its output, once it has ended.
    printed: Option<String>,
    /// What removed it, once that is known.
    explanation: Option<String>,
    /// Where it runs.
    location: Location,
}

/// What is known of the worker of a launch.
#[derive(Debug, Default)]
pub(crate) enum LaunchState {
    /// It has sent no hello.
    #[default]
    Starting,
    /// This master found it: it may have become a worker of the previous master, and may connect
    /// either way.
    Unconfirmed(Disconnected),
    /// Its worker's stream is open.
    Connected(Box<Worker>),
    /// Its worker's stream has ended, and it may reconnect.
    Disconnected(Disconnected),
    /// Its worker is lost, or was refused; its process has not ended.
    Forgotten,
}

/// Whether the exit of a process counts as a failure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ExitAccounting {
    /// Its failure is counted already.
    Counted,
    /// It may end.
    Expected,
    /// Its exit code decides.
    #[default]
    Undecided,
}

/// A disconnected worker that may reconnect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Disconnected {
    /// As [`Worker::rank`].
    pub(crate) rank: Option<u32>,
    /// As [`Worker::joined`].
    pub(crate) joined: Option<Generation>,
    /// As [`Worker::holds_state`].
    pub(crate) holds_state: bool,
    /// When its stream ended; for a stream to an earlier master, when this master started.
    pub(crate) since: Time,
    /// What this master knew of the worker; `None` if only an earlier master knew it.
    pub(crate) last_known: Option<LastKnown>,
}

impl Disconnected {
    /// As [`Worker::is_reserve`]; also for a worker that only an earlier master knew.
    pub(crate) fn is_reserve(&self) -> bool {
        self.rank.is_none() && (self.joined.is_some() || self.last_known.is_none())
    }
}

/// What this master knew of a worker when its stream ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LastKnown {
    pub(crate) stage: Stage,
    pub(crate) leaving: bool,
    /// Median compute time of a step.
    pub(crate) usual_us: Option<u64>,
}

/// A worker whose stream is open.
#[derive(Debug)]
pub(crate) struct Worker {
    address: SocketAddr,
    /// Process id.
    pub(crate) pid: u32,
    /// What its process uses, as far as it has told.
    pub(crate) usage: Option<Usage>,
    stage: Stage,
    departure: Departure,
    model_state: ModelState,
    /// The first generation of which it was a member.
    joined: Option<Generation>,
    /// Shards of an inference job that it has requested, and that are not leased yet.
    requested_shards: u64,
    pace: StepPace,
    /// Time of its last message.
    pub(super) heard: Time,
    /// Set if its last heartbeat reported that it waits for its neighbours.
    pub(super) stalled: Option<Stalled>,
    /// Its state's step, while it is no member.
    pub(super) follower: Follower,
}

/// The stages of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Its hello has come; the data set is not known.
    Joining,
    /// As [`Stage::Joining`], and it was asked to describe the data set.
    Describing,
    /// It builds its model.
    Preparing,
    /// It fetches the group's state from a member.
    Fetching,
    /// It can be a member.
    Ready,
    /// It is a member of the newest generation. In an inference job: it processes shards.
    Member {
        /// Its rank; in an inference job its slot.
        rank: u32,
    },
}

/// Whether a worker leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Departure {
    Stays,
    /// It leaves with the next membership.
    Leaving,
    /// It was shut down; its exit is awaited.
    Released,
}

/// Whether a worker has the group's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ModelState {
    Missing,
    /// It has fetched the state, which it may bring into the next generation.
    Fetched,
    /// It was a member when a generation formed.
    Held,
}

impl Launch {
    /// A launch that has just been made.
    pub(super) fn new(slot: u32) -> Self {
        Self { slot, ..Self::default() }
    }

    /// A launch that an earlier master made.
    pub(crate) fn restored(
        slot: u32,
        state: LaunchState,
        slot_use: SlotUse,
        is_ruled: bool,
    ) -> Self {
        Self { slot_use, state, is_ruled, ..Self::new(slot) }
    }

    pub(crate) fn slot(&self) -> u32 {
        self.slot
    }

    /// Its worker, while its stream is open.
    pub(crate) fn worker(&self) -> Option<&Worker> {
        match &self.state {
            LaunchState::Connected(worker) => Some(worker),
            _ => None,
        }
    }

    pub(super) fn worker_mut(&mut self) -> Option<&mut Worker> {
        match &mut self.state {
            LaunchState::Connected(worker) => Some(worker),
            _ => None,
        }
    }

    /// Whether it is known to have become a worker; stays true when the stream ends.
    pub(crate) fn has_registered(&self) -> bool {
        !matches!(self.state, LaunchState::Starting | LaunchState::Unconfirmed(_))
    }

    /// Whether its worker is lost, or was refused.
    pub(crate) fn is_forgotten(&self) -> bool {
        matches!(self.state, LaunchState::Forgotten)
    }

    /// Set while it has no stream to this master and its worker may reconnect.
    pub(crate) fn disconnected(&self) -> Option<&Disconnected> {
        match &self.state {
            LaunchState::Disconnected(d) | LaunchState::Unconfirmed(d) => Some(d),
            _ => None,
        }
    }

    pub(super) fn disconnected_mut(&mut self) -> Option<&mut Disconnected> {
        match &mut self.state {
            LaunchState::Disconnected(d) | LaunchState::Unconfirmed(d) => Some(d),
            _ => None,
        }
    }

    /// Gives up waiting for its worker to reconnect.
    pub(super) fn forget_disconnected(&mut self) -> Option<Disconnected> {
        let after = match self.state {
            LaunchState::Unconfirmed(_) => LaunchState::Starting,
            LaunchState::Disconnected(_) => LaunchState::Forgotten,
            _ => return None,
        };
        match std::mem::replace(&mut self.state, after) {
            LaunchState::Disconnected(d) | LaunchState::Unconfirmed(d) => Some(d),
            _ => None,
        }
    }

    /// Whether it keeps its slot: no replacement starts there.
    pub(crate) fn stays(&self) -> bool {
        self.slot_use == SlotUse::Kept
    }

    pub(crate) fn is_leaving(&self) -> bool {
        self.slot_use.is_leaving()
    }

    pub(crate) fn is_retired(&self) -> bool {
        matches!(self.slot_use, SlotUse::Retired { .. })
    }

    pub(crate) fn is_killed(&self) -> bool {
        self.is_killed
    }

    /// It leaves in order: its replacement may start.
    pub(crate) fn leave(&mut self) {
        self.slot_use = self.slot_use.leave();
    }

    /// Nothing replaces it.
    pub(crate) fn retire(&mut self) {
        self.slot_use = self.slot_use.retire();
    }

    pub(crate) fn kill(&mut self) {
        self.is_killed = true;
    }

    /// Whether its worker received SIGTERM while nothing was known to end it.
    pub(crate) fn is_signalled(&self) -> bool {
        self.is_signalled
    }

    /// It leaves because of a SIGTERM, whose sender is unknown unless it was leaving already.
    pub(crate) fn leave_by_signal(&mut self) {
        self.is_signalled |= self.stays() && !self.is_killed;
        self.leave();
    }

    pub(crate) fn is_unresponsive(&self) -> bool {
        self.is_unresponsive
    }

    /// It is evicted because it did not respond.
    pub(crate) fn note_unresponsive(&mut self) {
        self.is_unresponsive = true;
    }

    pub(crate) fn is_ruled(&self) -> bool {
        self.is_ruled
    }

    /// A rule of the user for its end is applied: no other one is.
    pub(crate) fn note_ruled(&mut self) {
        self.is_ruled = true;
    }

    /// Marks that an event has named it as a spare. Returns whether none had.
    pub(crate) fn note_spare(&mut self) -> bool {
        !std::mem::replace(&mut self.is_known_spare, true)
    }

    /// Its exit is no failure.
    pub(crate) fn expect_exit(&mut self) {
        self.accounting = ExitAccounting::Expected;
    }

    /// Its exit is no failure, unless one is counted already.
    pub(crate) fn expect_exit_unless_counted(&mut self) {
        if self.accounting == ExitAccounting::Undecided {
            self.expect_exit();
        }
    }

    /// Its failure is counted: its exit is no further one.
    pub(crate) fn count_exit(&mut self) {
        self.accounting = ExitAccounting::Counted;
    }

    /// Whether its failure is counted already.
    pub(crate) fn is_counted(&self) -> bool {
        self.accounting == ExitAccounting::Counted
    }

    /// Whether it may end.
    pub(crate) fn is_excused(&self) -> bool {
        self.accounting == ExitAccounting::Expected || !self.stays()
    }

    pub(crate) fn scheduling(&self) -> Scheduling {
        self.scheduling
    }

    /// What it waits for, if known.
    pub(crate) fn waits_for(&self) -> Option<&str> {
        self.waits_for.as_deref()
    }

    pub(crate) fn schedule(&mut self, scheduling: Scheduling, waits_for: Option<&str>) {
        self.scheduling = scheduling;
        self.waits_for = waits_for.map(str::to_owned);
    }

    /// Its priority class, where the cluster has them.
    pub(crate) fn class(&self) -> Option<&str> {
        self.class.as_deref()
    }

    pub(crate) fn set_class(&mut self, class: Option<&str>) {
        self.class = class.map(str::to_owned);
    }

    /// Where it runs, as far as it is known.
    pub(crate) fn location(&self) -> &Location {
        &self.location
    }

    /// Notes where it runs; what is empty stays as it is known.
    pub(crate) fn locate(&mut self, location: &Location) {
        let Location { zone, rack, node } = &mut self.location;
        let news = [(zone, &location.zone), (rack, &location.rack), (node, &location.node)];
        for (known, new) in news.into_iter().filter(|(_, new)| !new.is_empty()) {
            known.clone_from(new);
        }
    }

    /// Last lines of its output, once it has ended.
    pub(crate) fn printed(&self) -> Option<&str> {
        self.printed.as_deref()
    }

    /// What removed it, once that is known.
    pub(crate) fn explanation(&self) -> Option<&str> {
        self.explanation.as_deref()
    }

    pub(crate) fn set_explanation(&mut self, explanation: &str) {
        self.explanation = Some(explanation.to_owned());
    }

    pub(crate) fn set_printed(&mut self, lines: String) {
        self.printed = Some(lines);
    }
}

impl Worker {
    /// A worker whose hello came at `now`.
    pub(super) fn new(now: Time, address: SocketAddr, pid: u32) -> Self {
        Self {
            address,
            pid,
            usage: None,
            stage: Stage::Joining,
            departure: Departure::Stays,
            model_state: ModelState::Missing,
            joined: None,
            requested_shards: 0,
            pace: StepPace::default(),
            heard: now,
            stalled: None,
            follower: Follower::default(),
        }
    }

    /// A worker that has reconnected at `now`.
    pub(super) fn reconnected(
        now: Time,
        address: SocketAddr,
        pid: u32,
        d: &Disconnected,
        is_retired: bool,
    ) -> Self {
        let stage = match (d.rank, d.last_known.map(|known| known.stage)) {
            (Some(rank), _) => Stage::Member { rank },
            (None, None | Some(Stage::Member { .. })) => Stage::Ready,
            (None, Some(stage)) => stage,
        };
        // A worker that received SIGTERM reports it again.
        let leaves = is_retired || d.last_known.is_some_and(|known| known.leaving);
        let departure =
            if leaves || d.is_reserve() { Departure::Leaving } else { Departure::Stays };
        let model_state = if d.holds_state { ModelState::Held } else { ModelState::Missing };
        let fresh = Self::new(now, address, pid);
        Self { stage, departure, model_state, joined: d.joined, ..fresh }
    }

    /// What has to be remembered of it when its stream ends at `now`.
    pub(super) fn disconnected(&self, now: Time) -> Disconnected {
        Disconnected {
            rank: self.rank(),
            joined: self.joined,
            holds_state: self.holds_state(),
            since: now,
            last_known: Some(LastKnown {
                stage: self.stage,
                leaving: self.is_leaving(),
                usual_us: self.pace.usual_us(),
            }),
        }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(crate) fn stage(&self) -> Stage {
        self.stage
    }

    pub(crate) fn set_stage(&mut self, stage: Stage) {
        self.stage = stage;
        if stage == Stage::Fetching {
            self.model_state = ModelState::Missing;
        }
    }

    /// Its rank in the newest generation; in an inference job its slot.
    pub(crate) fn rank(&self) -> Option<u32> {
        match self.stage {
            Stage::Member { rank } => Some(rank),
            _ => None,
        }
    }

    pub(crate) fn is_member(&self) -> bool {
        self.rank().is_some()
    }

    /// Makes it a member with this rank, or, with `None`, no member.
    pub(crate) fn set_rank(&mut self, rank: Option<u32>) {
        match rank {
            Some(rank) => self.stage = Stage::Member { rank },
            None if self.is_member() => self.stage = Stage::Ready,
            None => {}
        }
    }

    /// The first generation of which it was a member.
    pub(crate) fn joined(&self) -> Option<Generation> {
        self.joined
    }

    /// Notes that it is a member of `generation`.
    pub(crate) fn join(&mut self, generation: Generation) {
        self.joined.get_or_insert(generation);
    }

    /// Whether it holds the group's state: it was a member when a generation formed.
    pub(crate) fn holds_state(&self) -> bool {
        self.model_state == ModelState::Held
    }

    /// Whether it holds the group's state, or has fetched it.
    pub(crate) fn has_state(&self) -> bool {
        self.model_state != ModelState::Missing
    }

    /// Notes that its generation has formed.
    pub(crate) fn hold_state(&mut self) {
        self.model_state = ModelState::Held;
    }

    /// Ends its fetch; `has_fetched` if it has the group's state now.
    pub(crate) fn catch_up(&mut self, has_fetched: bool) {
        self.stage = Stage::Ready;
        if has_fetched && !self.holds_state() {
            self.model_state = ModelState::Fetched;
        }
    }

    /// Whether it was asked to leave, or leaves by itself, and is not released yet.
    pub(crate) fn is_leaving(&self) -> bool {
        self.departure == Departure::Leaving
    }

    /// Whether its exit is awaited.
    pub(crate) fn is_released(&self) -> bool {
        self.departure == Departure::Released
    }

    /// Whether a membership without it was published, and its state may still be needed.
    pub(crate) fn is_reserve(&self) -> bool {
        self.is_leaving() && !self.is_member() && self.joined.is_some()
    }

    /// Whether it neither leaves nor is released.
    pub(crate) fn stays(&self) -> bool {
        self.departure == Departure::Stays
    }

    pub(crate) fn leave(&mut self) {
        self.departure = self.departure.max(Departure::Leaving);
    }

    pub(crate) fn release(&mut self) {
        self.departure = Departure::Released;
    }

    /// Whether it can be a member and is not.
    pub(crate) fn is_joiner(&self) -> bool {
        matches!(self.stage, Stage::Fetching | Stage::Ready) && self.stays()
    }

    /// Whether it is a member that holds the group's state and was not released.
    pub(crate) fn is_holder(&self) -> bool {
        self.is_member() && self.holds_state() && !self.is_released()
    }

    /// Shards of an inference job that it has requested, and that are not leased yet.
    pub(crate) fn requested_shards(&self) -> u64 {
        self.requested_shards
    }

    pub(crate) fn set_requested_shards(&mut self, shards: u64) {
        self.requested_shards = shards;
    }

    pub(crate) fn pace(&self) -> &StepPace {
        &self.pace
    }

    /// Notes what it did, as `rank`, in committed steps.
    pub(crate) fn note_steps(&mut self, report: &Committed, rank: usize) {
        self.pace.note(report, rank);
    }

    /// Compares its pace with the members' limit.
    pub(crate) fn compare_pace(&mut self, now: Time, limit_us: u64) {
        self.pace.compare(now, limit_us);
    }
}
