//! A worker's trainer thread.

use elasticdl::session::header::StateRecord;
use elasticdl::session::{Session, State};
use elasticdl_proto::{FileList, Generation};

use super::donor::Donor;
use super::fetch::{Incoming, Source};
use super::operation::Operation;
use super::ring::{Ring, WaitPoint};
use super::setting::Setting;
use crate::simulation::clock::Micros;
use crate::simulation::model::Model;

/// The trainer thread of one process.
#[derive(Debug)]
pub(crate) struct Trainer {
    pub(crate) doing: Doing,
    /// Whether the trainer thread never returns from what it does.
    pub(crate) is_hung: bool,
    /// Ticket of the wake-up that counts; wake-ups with older tickets are ignored.
    pub(crate) ticket: u32,
    pub(crate) woken: bool,
    /// `None` until the data set is known.
    pub(crate) session: Option<Session>,
    pub(crate) model: Model,
    pub(crate) ring: Option<Ring>,
    /// The point at which it waits for its neighbours; the control thread reads it.
    pub(crate) waiting: Option<WaitPoint>,
    pub(crate) donor: Donor,
    pub(crate) source: Option<Source>,
    /// The snapshot that it receives or has received while it is joining.
    pub(crate) incoming: Option<Incoming>,
    /// Generation and state record of the checkpoint that it has written a part of.
    pub(crate) part_written: Option<(u64, StateRecord)>,
    /// The newest generation that this worker has committed a step in.
    pub(crate) committed_in: Option<Generation>,
    /// Exit code of the process, once the trainer is done.
    pub(crate) ended: Option<i32>,
}

/// What the thread does, or waits for.
#[derive(Debug)]
pub(crate) enum Doing {
    /// Computing or preparing, until the wake-up that is scheduled.
    Busy(Busy),
    /// Waits for links, or for their end.
    Connecting,
    /// Waits for messages of a donor or of the master.
    Fetching,
    /// Not started, or done.
    Nothing,
    /// Waits for the pieces of an operation.
    Operating(Box<Operation>),
    /// Pauses before the next idle header round; messages of the master end the pause.
    Pausing,
    /// Waits for messages of the master.
    Receiving,
    /// Pauses before the next donor is asked; messages of the master end the pause.
    Resting,
}

#[derive(Debug)]
pub(crate) enum Busy {
    Building(FileList),
    /// Computing a gradient, for this long.
    Computing {
        compute_us: Micros,
    },
    Describing,
    /// Between two tasks.
    Turning,
}

impl Trainer {
    pub(crate) fn new(setting: &Setting) -> Self {
        Self {
            doing: Doing::Nothing,
            is_hung: false,
            ticket: 0,
            woken: false,
            session: None,
            model: Model::new(setting.parameters()),
            ring: None,
            waiting: None,
            donor: Donor::default(),
            source: None,
            incoming: None,
            part_written: None,
            committed_in: None,
            ended: None,
        }
    }

    /// Ticket of the next wake-up that counts.
    pub(crate) fn ticket(&self) -> u32 {
        self.ticket
    }

    /// The state that the session has absorbed.
    pub(crate) fn state(&self) -> Option<&State> {
        self.session.as_ref().and_then(Session::state)
    }

    /// Whether a group of this worker has agreed on its state.
    pub(crate) fn holds_state(&self) -> bool {
        let state = self.session.as_ref().and_then(|session| session.sync_header(0).state);
        state.is_some_and(|state| state.was_in_group)
    }
}
