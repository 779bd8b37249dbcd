//! What the trainer of a newcomer does: takes the state from a member that trains, and follows it step by step.

use std::net::SocketAddr;
use std::time::Duration;

use elasticdl_collective::Member;
use elasticdl_collective::device::DeviceError;
use elasticdl_proto::{Generation, WorkerId};

use super::{Stopped, Trainer};
use crate::core::header::{self, StepHeader};
use crate::donor::{self, KIND_END, KIND_RESULT, KIND_STATE, KIND_TIP, StateNote};
use crate::model::Model;

/// Why nothing was fetched.
enum FetchError {
    /// The donor is gone, or does not do what it should.
    Donor(String),
    /// This worker can't go on.
    Stopped(Stopped),
}

impl From<DeviceError> for FetchError {
    fn from(error: DeviceError) -> Self {
        Self::Stopped(error.into())
    }
}

impl<M: Model> Trainer<'_, M> {
    /// Takes the next parcel from the member that gives this newcomer the state. A donor that does not do what it should
    /// is no failure: there are others.
    pub(super) fn fetch(&mut self, donor: WorkerId, address: SocketAddr) -> Result<(), Stopped> {
        match self.fetch_next(donor, address) {
            Ok(()) => Ok(()),
            Err(FetchError::Donor(error)) => {
                tracing::info!(%donor, error, "no state from this member");
                self.source = None;
                self.session.fetch_broke();
                // What the master says meanwhile may be what the next attempt needs.
                if let Ok(message) = self.inbox.recv_timeout(FETCH_PAUSE) {
                    self.handle(message);
                }
                Ok(())
            }
            Err(FetchError::Stopped(stopped)) => Err(stopped),
        }
    }

    fn fetch_next(&mut self, donor: WorkerId, address: SocketAddr) -> Result<(), FetchError> {
        let Self { endpoint, source, tensors, session, .. } = self;
        let source = match source.take_if(|source| source.donor() == donor.0) {
            Some(link) => source.insert(link),
            None => {
                let member = Member { id: donor.0, address };
                let link = endpoint.fetch(member, self.patience, self.patience);
                source.insert(link.map_err(|error| FetchError::Donor(error.to_string()))?)
            }
        };
        let broke = |error: std::io::Error| FetchError::Donor(error.to_string());
        let nonsense = |what: &str| FetchError::Donor(format!("it sent {what}"));
        let Some(head) = source.next(FETCH_WAIT).map_err(broke)? else { return Ok(()) };
        let generation = Generation(head.generation);
        let (parameters, slots) = tensors.sizes();
        let (parameters, slots) = (parameters as u64, slots as u64);
        match (head.kind, head.floats) {
            (KIND_STATE, floats) if floats == parameters + slots => {
                let StateNote { record, digest } =
                    header::decode(&head.note).ok_or_else(|| nonsense("a state that can't be read"))?;
                tensors.fill_state(|parameters, slots| {
                    source.take(parameters).map_err(broke)?;
                    source.take(slots).map_err(broke)?;
                    match digest == donor::digest(parameters, slots) {
                        true => Ok(()),
                        false => Err(nonsense("a state that came out different")),
                    }
                })?;
                if !session.install(record, None) {
                    return Err(nonsense("a ledger that can't be true"));
                }
                session.fetched(generation);
            }
            (KIND_RESULT, floats) if floats == parameters && session.state().is_some() => {
                let headers: Vec<StepHeader> =
                    header::decode(&head.note).ok_or_else(|| nonsense("headers that can't be read"))?;
                if headers.iter().any(|header| header.step != session.step()) {
                    return Err(nonsense("another step's result"));
                }
                tensors.fill_reduced(|sum| source.take(sum).map_err(broke))?;
                self.update(headers).map_err(FetchError::Stopped)?;
                self.session.fetched(generation);
            }
            (KIND_TIP, 0) => session.caught_up(),
            (KIND_END, 0) => session.fetch_ended(generation),
            (kind, floats) => {
                return Err(nonsense(&format!("a parcel of kind {kind} with {floats} floats")));
            }
        }
        Ok(())
    }
}

/// How long a newcomer waits for the donor before it looks into its inbox.
const FETCH_WAIT: Duration = Duration::from_millis(5);

/// How long it waits before it asks the next one.
const FETCH_PAUSE: Duration = Duration::from_millis(50);
