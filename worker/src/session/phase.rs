//! Where a session stands, and what it holds there.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::time::Duration;

use elasticdl_proto::{Generation, Membership, RecordRange, WorkerId};

use super::types::{Broadcast, Exit, Task};
use crate::session::audit::Dispute;
use crate::session::halt::Ending;
use crate::session::header::{StateRecord, StepHeader};
use crate::session::origin::Origin;
use crate::session::repair::Repair;
use crate::session::replicas::{Found, StateMismatch, Verdict};

/// Where a worker stands between its start and its end.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Phase {
    Detached,
    Ended(Exit),
    /// Between the end of a round and the decision that its headers lead to.
    Evaluating {
        group: Group,
        headers: Vec<StepHeader>,
        committed: Option<Duration>,
    },
    /// The worker receives the state from a member that trains meanwhile.
    Fetching,
    /// Some ranks leave before the group ends or switches to a newer generation: they hand their
    /// shards over.
    HandingOver {
        group: Group,
        /// Which ranks leave.
        leaves: Vec<bool>,
        headers: Vec<StepHeader>,
        committed: Option<Duration>,
    },
    Joining(Membership),
    Finished {
        group: Group,
        reported: bool,
        ending: Ending,
    },
    /// Ranks have computed different gradients of the same records: all compute them again, and
    /// exchange the digests in an idle round.
    Rechecking {
        group: Group,
        disputes: Vec<Dispute>,
        /// What this rank has computed.
        again: Option<Vec<u64>>,
    },
    Repairing(Group, Repairing),
    Round {
        group: Group,
        /// Records that this rank computes for the step; `None` in an idle round.
        assigned: Option<Vec<RecordRange>>,
        computed: bool,
    },
    Syncing(Group),
    /// The state that is to be exported is compared as a whole, in an idle round.
    Verifying {
        group: Group,
        committed: Option<Duration>,
    },
}

/// The group that this worker is in, and its place there.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Group {
    pub(super) generation: Generation,
    pub(super) members: Vec<WorkerId>,
    pub(super) rank: usize,
    /// Where the ranks run, once they have told.
    pub(super) origins: Vec<Origin>,
}

impl Group {
    /// Which ranks are table servers, and compute no records.
    pub(super) fn serves_tables(&self) -> Vec<bool> {
        let serves =
            |rank: usize| self.origins.get(rank).is_some_and(|origin| origin.serves_tables);
        (0..self.members.len()).map(serves).collect()
    }

    /// What this rank reports if replicas differ after `step` steps.
    pub(super) fn mismatch(&self, step: u64, found: Found, verdict: Verdict) -> StateMismatch {
        let origin = |rank| self.origins.get(rank).cloned().unwrap_or_default();
        let members = self.members.iter().enumerate().map(|(rank, &id)| (id, origin(rank)));
        StateMismatch { step, found, verdict, rank: self.rank, members: members.collect() }
    }
}

/// A gradient of this worker that no known step has absorbed.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Pending {
    pub(super) ranges: Vec<RecordRange>,
    pub(super) loss_sum: f64,
    pub(super) metrics: BTreeMap<String, f64>,
    pub(super) tally: BTreeMap<String, f64>,
    pub(super) compute_us: u64,
    pub(super) input_us: u64,
    pub(super) row_touches: u64,
}

/// The step that this worker is in, or was in last.
#[derive(Clone, Debug, Default)]
pub(super) struct StepPart {
    /// Headers of the last commit, as long as its reduced gradient is retained.
    pub(super) last_headers: Option<Vec<StepHeader>>,
    /// What follows from the sum that this worker has received; `None` between two steps.
    pub(super) outcome: Option<Outcome>,
    /// Whether the headers of all ranks have confirmed that all hold the current step.
    pub(super) is_confirmed: bool,
    /// Step at which the whole states of this group's ranks were last found equal.
    pub(super) verified: Option<u64>,
    /// Whether the last task was an idle round.
    pub(super) is_idle: bool,
    /// The ranks that leave, when the ranks of this group last handed shards over.
    pub(super) handed_over: Vec<bool>,
    /// Whether this rank joins the newest group when it has computed its part of this step.
    pub(super) switches: bool,
}

impl StepPart {
    /// A new group holds one state. What follows from it is not known yet.
    pub(super) fn regrouped(&mut self) {
        (self.is_confirmed, self.verified, self.is_idle) = (false, None, false);
        self.switches = false;
        self.handed_over.clear();
    }
}

/// What follows from the reduced gradient that this worker has received.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Outcome {
    /// The step is not finite, and such steps end the job.
    Nonfinite(Vec<StepHeader>),
    /// The step is committed when the worker has applied it.
    Apply(Apply),
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Apply {
    pub(super) headers: Vec<StepHeader>,
    /// Whether the parameters change. If not, the ledger alone absorbs the records.
    pub(super) is_finite: bool,
    /// Generation of the donor that sent the step to this joining worker.
    pub(super) fetched: Option<Generation>,
}

/// What is left of a repair on one rank, and what it has received so far.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Repairing {
    pub(super) left: VecDeque<Task>,
    /// Whether this rank applies the result that is broadcast.
    pub(super) applies: bool,
    /// Whether this rank installs the state that is broadcast.
    pub(super) installs: bool,
    /// Headers of the step whose result is broadcast.
    pub(super) headers: Option<Vec<StepHeader>>,
    /// Record of the state that is broadcast.
    pub(super) record: Option<StateRecord>,
}

impl Repairing {
    /// `builds_nccl`: the group starts to build NCCL when all ranks are at one state.
    pub(super) fn new(plan: &Repair, rank: usize, builds_nccl: bool) -> Self {
        let mut left = VecDeque::new();
        if plan.step.is_none() && rank == 0 {
            left.push_back(Task::CreateState);
        }
        let (mut applies, mut installs) = (false, false);
        if let Some((_, receivers)) = &plan.state {
            installs = receivers.contains(&rank);
        }
        if let Some((root, behind)) = &plan.result {
            applies = behind.contains(&rank);
            // A rank that installs the step's state keeps its result, so that it can repair a rank
            // that is still behind if the donor is lost next.
            let what = Broadcast::Result { is_kept: installs };
            left.push_back(Task::Broadcast { root: *root, what: Broadcast::ResultHeaders });
            left.push_back(Task::Broadcast { root: *root, what });
        }
        if let Some((root, _)) = &plan.state {
            left.push_back(Task::Broadcast { root: *root, what: Broadcast::StateRecord });
            left.push_back(Task::Broadcast { root: *root, what: Broadcast::State });
        }
        if builds_nccl {
            left.push_back(Task::BuildNccl);
        }
        Self { left, applies, installs, headers: None, record: None }
    }

    pub(super) fn task(&self) -> Task {
        self.left.front().cloned().unwrap_or(Task::EndRepair)
    }
}

/// How a joining worker obtains the state.
#[derive(Clone, Debug, Default)]
pub(super) struct Fetch {
    /// Members to fetch from; the current donor is first.
    pub(super) donors: VecDeque<(WorkerId, SocketAddr)>,
    /// The donor's generation when it committed the newest fetched state or result.
    pub(super) generation: Option<Generation>,
    /// The newest of the generations after that one that can't have formed: all of them wait for
    /// this worker, which still fetches.
    pub(super) unformed: Option<Generation>,
    /// The donor ended its stream because it joins this generation.
    pub(super) ended: Option<Generation>,
    /// The stream ended otherwise.
    pub(super) broken: bool,
    /// The link to the donor broke, and nothing has arrived over another one yet.
    pub(super) interrupted: bool,
    /// Number of links to the donor that broke since the last progress.
    pub(super) interruptions: u32,
    /// The master has received the report that this worker has caught up.
    pub(super) reported: bool,
    /// Number of streams that broke after they had delivered the state.
    pub(super) lost: u32,
}

impl Fetch {
    pub(super) fn donor(&self) -> (WorkerId, SocketAddr) {
        *self.donors.front().expect("a fetch has at least one donor")
    }
}
