//! The state of a worker's control stream: what is sent to which master, and what every master must
//! learn again.
//!
//! ```text
//!              welcome                    stream ends
//!   Closed ───────────────► Open(current) ───────────► Closed ──┐ welcome of the same or
//!                               ▲                               │ another master
//!                               │ Reconnected     Open(stale) ◄─┘
//!                               └─────────────────────┘
//! ```
//!
//! Messages that the trainer sends before it knows of a new stream are meant for the previous
//! master. They are dropped: after a reconnect the trainer repeats what still matters, and its
//! first message, `Reconnected`, makes the stream current.
//!
//! **Invariants:** a message of the trainer for one master is never sent to the next one. A worker
//! that a newer master has welcomed accepts no older one.

use elasticdl_proto::{MasterMessage, Membership, Resume, Welcome, WorkerMessage};

/// The state of the control stream.
#[derive(Clone, Debug, Default)]
pub struct ControlState {
    stream: Stream,
    identity: Option<Resume>,
    incarnation: u64,
    is_leaving: bool,
    is_over: bool,
    job_is_over: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stream {
    #[default]
    Closed,
    /// Open; whether the trainer's messages are meant for this master.
    Open { is_current: bool },
}

/// Why a welcome is not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WelcomeError {
    /// A newer master has taken the job over, and this one has not noticed yet: search on.
    #[error("the welcome is from an older master of the job")]
    OlderMaster,
    /// The welcome is for another worker: end.
    #[error("the welcome is for another worker")]
    OtherWorker,
}

impl ControlState {
    /// Identity of this worker for a later master; `None` before the first welcome.
    pub fn identity(&self) -> Option<&Resume> {
        self.identity.as_ref()
    }

    /// The newest membership that this worker knows.
    pub fn membership(&self) -> Option<&Membership> {
        self.identity.as_ref()?.membership.as_ref()
    }

    /// Highest incarnation of a master that has welcomed this worker; 0 for none.
    pub fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// Whether a stream is open.
    pub fn is_open(&self) -> bool {
        self.stream != Stream::Closed
    }

    /// Whether the worker was shut down, so that it needs no other master.
    pub fn is_over(&self) -> bool {
        self.is_over
    }

    /// Whether it was shut down as all workers end for good.
    pub fn job_is_over(&self) -> bool {
        self.job_is_over
    }

    /// A master has answered the hello. Returns whether the trainer has to learn of it: it is not
    /// the first stream.
    ///
    /// # Errors
    /// The welcome is not accepted, and the state is unchanged.
    pub fn handle_welcome(&mut self, welcome: &Welcome) -> Result<bool, WelcomeError> {
        let worker = welcome.worker;
        if self.identity.as_ref().is_some_and(|me| me.worker != worker) {
            return Err(WelcomeError::OtherWorker);
        }
        let is_first = self.identity.is_none();
        if !is_first && welcome.incarnation < self.incarnation {
            return Err(WelcomeError::OlderMaster);
        }
        self.incarnation = welcome.incarnation;
        let (membership, parameters, holds_state) = (None, None, false);
        self.identity.get_or_insert(Resume { worker, membership, parameters, holds_state });
        self.stream = Stream::Open { is_current: is_first };
        Ok(!is_first)
    }

    /// A message of the master. Returns the generation before which all operations have to be
    /// aborted at once: a member is lost, or the job is over.
    pub fn handle_message(&mut self, message: &MasterMessage) -> Option<u64> {
        match message {
            MasterMessage::Membership(membership) => {
                if let Some(me) = &mut self.identity
                    && me.generation() < membership.generation
                {
                    me.membership = Some(membership.clone());
                }
                membership.abort.then_some(membership.generation.0)
            }
            MasterMessage::Shutdown { job_is_over, .. } => {
                self.is_over = true;
                self.job_is_over = *job_is_over;
                Some(u64::MAX)
            }
            _ => None,
        }
    }

    /// A message of the trainer. Returns what is sent to the master, in order.
    pub fn forward(&mut self, message: WorkerMessage) -> Vec<WorkerMessage> {
        if let (WorkerMessage::Ready { parameters }, Some(me)) = (&message, &mut self.identity) {
            me.parameters = Some(*parameters);
        }
        let Stream::Open { is_current } = &mut self.stream else { return Vec::new() };
        let is_first = !*is_current && matches!(message, WorkerMessage::Reconnected { .. });
        *is_current |= is_first;
        let mut sent = Vec::new();
        if *is_current {
            sent.push(message);
        }
        if is_first && self.is_leaving {
            sent.push(WorkerMessage::Leaving);
        }
        sent
    }

    /// Whether the worker got SIGTERM.
    pub fn is_leaving(&self) -> bool {
        self.is_leaving
    }

    /// The worker got SIGTERM. Returns the message to the master; every later master receives it
    /// after the worker's `Reconnected`.
    pub fn terminate(&mut self) -> Option<WorkerMessage> {
        self.is_leaving = true;
        (self.stream == Stream::Open { is_current: true }).then_some(WorkerMessage::Leaving)
    }

    /// This worker's group has agreed on a state.
    pub fn note_state(&mut self) {
        self.identity.iter_mut().for_each(|me| me.holds_state = true);
    }

    /// The stream has ended.
    pub fn handle_stream_end(&mut self) {
        self.stream = Stream::Closed;
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::num::NonZeroU64;

    use elasticdl_proto::{Batch, Generation, Members, WorkerId, WorkerOptions};

    use super::*;

    pub(crate) fn welcome(worker: u64, incarnation: u64) -> Welcome {
        let options = WorkerOptions::new("", Batch::Global(NonZeroU64::MIN));
        Welcome { worker: WorkerId(worker), incarnation, serves_tables: false, options }
    }

    fn returned() -> WorkerMessage {
        WorkerMessage::Reconnected { step: 0 }
    }

    fn request() -> WorkerMessage {
        WorkerMessage::LeaseRequest { shards: 1 }
    }

    fn membership(generation: u64, abort: bool) -> MasterMessage {
        let generation = Generation(generation);
        MasterMessage::Membership(Membership { generation, members: Members::default(), abort })
    }

    #[test]
    fn messages_for_one_master_are_not_sent_to_the_next_one() {
        let mut state = ControlState::default();
        assert_eq!(state.handle_welcome(&welcome(7, 1)), Ok(false));
        assert_eq!(state.forward(request()), [request()]);
        state.handle_stream_end();
        assert_eq!(state.forward(WorkerMessage::Ready { parameters: 5 }), []);
        assert_eq!(state.handle_welcome(&welcome(7, 2)), Ok(true));
        assert_eq!(state.forward(request()), []);
        assert_eq!(state.forward(returned()), [returned()]);
        assert_eq!(state.forward(request()), [request()]);
        assert_eq!(state.identity().unwrap().parameters, Some(5));
    }

    #[test]
    fn an_older_master_and_a_welcome_for_another_worker_are_not_accepted() {
        let mut state = ControlState::default();
        state.handle_welcome(&welcome(7, 3)).unwrap();
        state.handle_stream_end();
        assert_eq!(state.handle_welcome(&welcome(7, 2)), Err(WelcomeError::OlderMaster));
        assert_eq!(state.handle_welcome(&welcome(8, 3)), Err(WelcomeError::OtherWorker));
        assert!(!state.is_open());
        assert_eq!(state.handle_welcome(&welcome(7, 3)), Ok(true));
    }

    #[test]
    fn every_master_learns_that_the_worker_leaves() {
        let mut state = ControlState::default();
        state.handle_welcome(&welcome(7, 1)).unwrap();
        assert_eq!(state.terminate(), Some(WorkerMessage::Leaving));
        assert!(state.is_leaving());
        state.handle_stream_end();
        assert_eq!(state.terminate(), None);
        state.handle_welcome(&welcome(7, 1)).unwrap();
        assert_eq!(state.terminate(), None);
        assert_eq!(state.forward(returned()), [returned(), WorkerMessage::Leaving]);
    }

    #[test]
    fn the_newest_membership_is_kept_and_losses_abort_operations() {
        let mut state = ControlState::default();
        state.handle_welcome(&welcome(7, 1)).unwrap();
        assert_eq!(state.handle_message(&membership(3, true)), Some(3));
        assert_eq!(state.handle_message(&membership(2, false)), None);
        assert_eq!(state.identity().unwrap().generation(), Generation(3));
        assert!(!state.is_over());
        assert_eq!(state.handle_message(&MasterMessage::release("end")), Some(u64::MAX));
        assert!(state.is_over());
    }
}
