//! What the world knows of a worker's trainer.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt;
use std::rc::Rc;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, mpsc};

use elasticdl::machine::Completion;
use elasticdl::session::State;
use elasticdl::session::header::StateRecord;
use elasticdl::session::transport_switch::NcclBuild;
use elasticdl::simulated::ControlEvent;
use elasticdl_proto::{Generation, WorkerMessage};
use tokio::sync::mpsc::UnboundedReceiver;

use super::endpoint::{Ring, WaitPoint};
use super::thread::{Source, StateRequest};

/// What the world has for a trainer.
pub(crate) type Shared<T> = Rc<RefCell<VecDeque<T>>>;

/// The trainer of one process, seen from outside.
#[derive(Default)]
pub(crate) struct Trainer {
    /// Whether the trainer thread never returns from what it does.
    pub(crate) is_hung: bool,
    /// To the trainer; `None` before it starts.
    pub(crate) inbox: Option<mpsc::Sender<ControlEvent>>,
    /// Number of messages that arrived since the trainer looked for them last.
    pub(crate) news: usize,
    /// From the trainer to the control thread.
    pub(crate) outbox: Option<UnboundedReceiver<WorkerMessage>>,
    /// Whether its group has agreed on a state, for the control thread.
    pub(crate) holds_state: Arc<AtomicBool>,
    pub(crate) seen: Seen,
    /// What it was at its last turn, as a number, where a search wants to know it.
    pub(crate) identity: u64,
    /// The messages that it was told before its last turn and since, as numbers.
    pub(crate) told: [u64; 2],
    /// Lineage of the parameters: the number of the initialization that they descend from. Not a
    /// part of the state; only the oracle reads it.
    pub(crate) lineage: u64,
    /// Whether it has created a state, and not reported it yet.
    pub(crate) has_created: bool,
    /// Whether it has installed a state of its group whose parameters have not arrived yet.
    pub(crate) has_installed: bool,
    pub(crate) ring: Option<Ring>,
    /// State of NCCL on all ranks, from the round of its last turn.
    pub(crate) builds: Option<Vec<NcclBuild>>,
    /// Whether the world has ended links of the group since the trainer's last turn.
    pub(crate) has_broken: bool,
    /// The point at which it waits for its neighbours; the control thread reads it.
    pub(crate) waiting: Option<WaitPoint>,
    /// Pending requests of joiners.
    pub(crate) requests: Shared<StateRequest>,
    pub(crate) source: Option<Source>,
    /// Generation and lineage of the snapshot that the last source has sent a part of.
    pub(crate) snapshot: Option<(u64, u64)>,
    /// Generation and state record of the checkpoint that it has written a part of.
    pub(crate) part_written: Option<(Generation, StateRecord)>,
    /// Results of writes of checkpoints.
    pub(crate) completions: Shared<Completion>,
    /// The newest generation that this worker has committed a step in.
    pub(crate) committed_in: Option<Generation>,
    /// Whether it holds shards of the model's tables.
    pub(crate) has_rows: bool,
    /// A parameter of which a bit is to flip.
    pub(crate) flips: Rc<Cell<Option<usize>>>,
    /// Whether its next gradient is audited.
    pub(crate) is_auditing: Rc<Cell<bool>>,
    /// Number of audited gradients that it is to compute wrongly.
    pub(crate) miscounts: u32,
    /// Whether it has computed a wrong gradient.
    pub(crate) has_miscounted: bool,
    /// Whether it changes an audited sum: the second of a step, and that of all ranks or its own.
    pub(crate) changes_sum: Option<(bool, bool)>,
    /// Exit code of the process, once the trainer is done.
    pub(crate) ended: Option<i32>,
}

/// What a run that does not end shows.
impl fmt::Debug for Trainer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { seen, ring, waiting, source, .. } = self;
        write!(f, "{seen:?}, {ring:?}, {waiting:?}, {source:?}")
    }
}

/// The trainer between its last two tasks.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// Whether the data set is known.
    pub(crate) is_ready: bool,
    pub(crate) state: Option<State>,
    /// Parameters, as counts.
    pub(crate) parameters: Vec<u8>,
    /// Digest of the parameters.
    pub(crate) digest: u64,
    /// Whether the work of its group has ended.
    pub(crate) has_ended: bool,
    /// Whether its group has given its state up, as rows that belong to it are lost.
    pub(crate) has_lost_rows: bool,
    /// Generation and rank.
    pub(crate) group: Option<(Generation, usize)>,
}

impl Trainer {
    /// The state that the session has absorbed.
    pub(crate) fn state(&self) -> Option<&State> {
        self.seen.state.as_ref()
    }

    /// Whether a bit has flipped in the parameters.
    pub(crate) fn is_wrong(&self) -> bool {
        crate::simulation::model::is_wrong(&self.seen.parameters)
    }
}
