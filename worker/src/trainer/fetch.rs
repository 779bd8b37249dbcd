//! State transfer on a joining worker: its trainer receives the state from a member that trains,
//! and follows it step by step.

use std::net::SocketAddr;
use std::time::Duration;

use elasticdl_collective::device::DeviceError;
use elasticdl_collective::{Member, StateMessageHeader};
use elasticdl_proto::{Generation, WorkerId};

use super::Trainer;
use super::incoming::IncomingSnapshot;
use super::stopped::{Stopped, group_mismatch};
use crate::donor::{
    self, KIND_CAUGHT_UP, KIND_END, KIND_PART, KIND_RESULT, KIND_STATE, PartNote, StateNote,
    TRANSFER_IDLE_TIMEOUT,
};
use crate::failure::causes;
use crate::machine::{Receiver, receive};
use crate::model::Model;
use crate::session::header::{self, StepHeader};

/// Why nothing was received.
enum FetchError {
    /// The link broke or delivered damaged data. The transfer may resume over another link.
    Broken(String),
    /// The donor violates the protocol.
    Donor(String),
    /// This worker cannot continue.
    Stopped(Stopped),
}

impl From<DeviceError> for FetchError {
    fn from(error: DeviceError) -> Self {
        Self::Stopped(error.into())
    }
}

impl<M: Model> Trainer<'_, M> {
    /// Receives the next message from the donor. A donor that violates the protocol is not a
    /// failure of this worker: there are other donors.
    pub(super) fn fetch(&mut self, donor: WorkerId, address: SocketAddr) -> Result<(), Stopped> {
        let error = match self.fetch_next(donor, address) {
            Ok(()) => return Ok(()),
            Err(FetchError::Stopped(stopped)) => return Err(stopped),
            Err(FetchError::Broken(error)) => {
                if self.incoming.is_some() && self.session.fetch_interrupted() {
                    tracing::info!(%donor, error, "the link to the donor broke; dialing it again");
                    // A spare that follows is soon behind, and may be needed at any time.
                    match self.session.is_interrupted_again() {
                        true => self.pause_fetch(),
                        false => self.source = None,
                    }
                    return Ok(());
                }
                error
            }
            Err(FetchError::Donor(error)) => error,
        };
        tracing::info!(%donor, error, "no state from this member");
        self.incoming = None;
        self.session.fetch_broke();
        self.pause_fetch();
        Ok(())
    }

    /// Waits before the next attempt. A message of the master ends the wait, since the next attempt
    /// may depend on it.
    fn pause_fetch(&mut self) {
        self.source = None;
        if let Ok(message) = receive(&*self.machine, self.inbox, FETCH_PAUSE) {
            self.handle(message);
        }
    }

    fn fetch_next(&mut self, donor: WorkerId, address: SocketAddr) -> Result<(), FetchError> {
        let Self { links, source, incoming, session, .. } = self;
        let is_lost = |i: &mut IncomingSnapshot| {
            i.donor != donor || (i.is_complete() && session.state().is_none())
        };
        drop(incoming.take_if(is_lost));
        let source = match source.take_if(|source| source.donor() == donor.0) {
            Some(link) => source.insert(link),
            None => {
                let member = Member { id: donor.0, address };
                let position = incoming.as_ref().map(|incoming| incoming.position(session.step()));
                let link = links.fetch(member, self.dial_limit, TRANSFER_IDLE_TIMEOUT, position);
                source.insert(link.map_err(|error| FetchError::Broken(causes(&error)))?)
            }
        };
        let Some(head) = source.next(FETCH_WAIT).map_err(broke)? else { return Ok(()) };
        let generation = Generation(head.generation);
        match (head.kind, head.floats) {
            (KIND_STATE, 0) => return self.begin_state(donor, &head),
            (KIND_PART, _) => return self.take_part(&head),
            (KIND_RESULT, _) => return self.take_result(&head),
            (KIND_CAUGHT_UP, 0) => {
                session.fetch_resumed();
                session.caught_up();
            }
            (KIND_END, 0) => session.fetch_ended(generation),
            (kind, floats) => {
                return Err(nonsense(&format!("a message of kind {kind} with {floats} floats")));
            }
        }
        Ok(())
    }

    /// Takes in the start of a snapshot, or of the rest of one.
    fn begin_state(
        &mut self,
        donor: WorkerId,
        head: &StateMessageHeader,
    ) -> Result<(), FetchError> {
        let note: StateNote =
            header::decode(&head.note).ok_or_else(|| nonsense("a state that can't be read"))?;
        if self.incoming.as_ref().is_some_and(|incoming| incoming.is_continued_by(&note)) {
            self.session.fetch_resumed();
            return Ok(());
        }
        let fits = self.session.check_program(&note.program);
        fits.map_err(|mismatch| FetchError::Stopped(group_mismatch(&mismatch.into())))?;
        let incoming =
            IncomingSnapshot::begin(donor, Generation(head.generation), note, self.tensors.size());
        self.incoming =
            Some(incoming.ok_or_else(|| nonsense("the middle of a snapshot without its start"))?);
        self.session.fetch_begins();
        Ok(())
    }

    fn take_part(&mut self, head: &StateMessageHeader) -> Result<(), FetchError> {
        let Self { source, incoming, tensors, session, tables, is_used, .. } = self;
        let note: PartNote =
            header::decode(&head.note).ok_or_else(|| nonsense("a part that can't be read"))?;
        let (source, incoming) = expect(source, incoming)?;
        incoming.check(note, head.floats).map_err(|error| nonsense(&error))?;
        *is_used = true;
        tensors.fill_part(note.from as usize, head.floats as usize, |part| {
            source.take(part).map_err(broke)?;
            if note.digest == donor::digest(part) {
                Ok(())
            } else {
                Err(FetchError::Broken("a part of the state does not match its digest".into()))
            }
        })?;
        incoming.received(head.floats);
        session.fetch_advanced();
        if incoming.is_complete() {
            if !session.install(incoming.record.clone(), None) {
                return Err(nonsense("an inconsistent ledger"));
            }
            session.fetched(incoming.generation);
            if let Some(tables) = tables {
                tables.fetched(session.step(), incoming.generation);
            }
        }
        source.report(incoming.position(session.step()));
        if incoming.is_complete() {
            // Results of later steps follow.
            self.observe_state();
        }
        Ok(())
    }

    fn take_result(&mut self, head: &StateMessageHeader) -> Result<(), FetchError> {
        let Self { source, incoming, tensors, session, tables, .. } = self;
        let (source, _) = expect(source, incoming)?;
        let headers: Vec<StepHeader> =
            header::decode(&head.note).ok_or_else(|| nonsense("headers that can't be read"))?;
        if head.floats != tensors.size().parameters as u64 {
            return Err(nonsense("a result of another size"));
        }
        tensors.fill_reduced(|sum| source.take(sum).map_err(broke))?;
        let is_finite = tensors.sum_is_finite()?;
        let generation = Generation(head.generation);
        if session.result_fetched(generation, headers, is_finite) {
            // The commit follows.
            if let Some(tables) = tables {
                tables.fetched(session.step() + 1, generation);
            }
            Ok(())
        } else {
            Err(nonsense("another step's result"))
        }
    }
}

fn expect<'a>(
    source: &'a mut Option<Box<dyn Receiver>>,
    incoming: &'a mut Option<IncomingSnapshot>,
) -> Result<(&'a mut Box<dyn Receiver>, &'a mut IncomingSnapshot), FetchError> {
    source
        .as_mut()
        .zip(incoming.as_mut())
        .ok_or_else(|| nonsense("a message without a state before it"))
}

fn broke(error: std::io::Error) -> FetchError {
    FetchError::Broken(error.to_string())
}

fn nonsense(what: &str) -> FetchError {
    FetchError::Donor(format!("it sent {what}"))
}

/// Time that a joining worker waits for the donor before it checks its inbox.
const FETCH_WAIT: Duration = Duration::from_millis(5);

/// Pause before the next attempt.
const FETCH_PAUSE: Duration = Duration::from_millis(50);
