//! The master's process.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use elasticdl_master::job::{
    Event as JobEvent, Exit, Job, JobSpec, LaunchId, Outcome, PersistedJob,
};
use elasticdl_proto::WorkerId;

use super::network::LinkId;
use crate::simulation::clock::Micros;

/// The master's process.
#[derive(Debug)]
pub(crate) struct Master {
    pub(crate) job: Job,
    /// Its number among the job's masters, from 1: the fencing token.
    pub(crate) incarnation: u64,
    /// Whether another master leads the job, and this one does not know it.
    pub(crate) is_replaced: bool,
    /// Streams that are open on the master's side, each with its worker once that is admitted.
    pub(crate) peers: BTreeMap<LinkId, Option<WorkerId>>,
    pub(crate) workers: BTreeMap<WorkerId, LinkId>,
    /// Links with packets to take, in the order of arrival.
    pub(crate) inputs: VecDeque<LinkId>,
    pub(crate) ended: VecDeque<(LaunchId, Exit)>,
    /// Commands of the user.
    pub(crate) commands: VecDeque<JobEvent>,
    pub(crate) woken: bool,
    pub(crate) due: Option<Micros>,
    pub(crate) paused: bool,
    /// Whether the master's task was due while the master was paused.
    pub(crate) deferred: bool,
    pub(crate) outcome: Option<Outcome>,
    pub(crate) is_alive: bool,
    /// Whether snapshots can be persisted; if not, actions that depend on one are held back.
    pub(crate) persists: bool,
    /// Whether actions have been held back for a snapshot.
    pub(crate) has_waited: bool,
    /// Number of actions after which the master is killed.
    pub(crate) dies_after: Option<u64>,
    /// Snapshots that the next master may find, each with its version, the newest last: all that
    /// were taken since the last one that had to be durable.
    pub(crate) records: VecDeque<(u64, PersistedJob)>,
}

impl Master {
    pub(crate) fn new(spec: JobSpec) -> Self {
        let job = Job::new(spec);
        Self {
            incarnation: 1,
            is_replaced: false,
            records: [(job.version(), job.to_persisted())].into(),
            job,
            is_alive: true,
            persists: true,
            has_waited: false,
            dies_after: None,
            peers: BTreeMap::new(),
            workers: BTreeMap::new(),
            inputs: VecDeque::new(),
            ended: VecDeque::new(),
            commands: VecDeque::new(),
            woken: false,
            due: None,
            paused: false,
            deferred: false,
            outcome: None,
        }
    }
}

/// A master that has been replaced, and acts until it learns that.
#[derive(Debug)]
pub(crate) struct FormerMaster {
    pub(crate) master: Master,
    /// The streams that reach it, not the leader.
    pub(crate) streams: BTreeSet<LinkId>,
}
