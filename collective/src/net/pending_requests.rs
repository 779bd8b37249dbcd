//! Joiners that have dialled this worker for its state, until the trainer serves them.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use super::link::Link;

/// Links of joiners that request the state, by member, and wait for a donor in the middle of a
/// step, or to be named: a joiner may dial before this worker has heard of it.
///
/// **Invariant:** only requests of named joiners are taken, and at most one per joiner. Others wait
/// for at most [`UNNAMED_TIME_MAX`], and cost a connection.
///
/// **Invariant:** at most [`PENDING_REQUESTS_MAX`] requests. A second request of the same joiner
/// replaces its first one; at the limit, the oldest request of an unnamed joiner is dropped, or the
/// oldest one.
#[derive(Debug, Default)]
pub(crate) struct PendingRequests(Mutex<State>);

/// Handle to name the joiners that may fetch a worker's state. Clones show the same worker.
#[derive(Clone, Debug)]
pub struct Joiners(pub(crate) Arc<PendingRequests>);

impl Joiners {
    /// Names the joiners that may fetch the state, instead of those named before. A request of a
    /// joiner that is not named waits for a few seconds, and is then refused.
    pub fn name(&self, joiners: impl IntoIterator<Item = u64>) {
        self.0.name(joiners);
    }
}

#[derive(Debug, Default)]
struct State {
    named: BTreeSet<u64>,
    requests: VecDeque<Request>,
}

#[derive(Debug)]
struct Request {
    member: u64,
    link: Link,
    received_at: Duration,
}

impl PendingRequests {
    /// Adds an authenticated request.
    pub(crate) fn push(&self, member: u64, link: Link, now: Duration) {
        let mut state = self.lock();
        let State { named, requests } = &mut *state;
        requests.retain(|request| request.member != member);
        if requests.len() == PENDING_REQUESTS_MAX {
            let unnamed = requests.iter().position(|request| !named.contains(&request.member));
            drop(requests.remove(unnamed.unwrap_or(0)));
        }
        requests.push_back(Request { member, link, received_at: now });
    }

    /// Takes the oldest request of a named joiner.
    pub(crate) fn pop(&self) -> Option<(u64, Link)> {
        let mut state = self.lock();
        let State { named, requests } = &mut *state;
        let at = requests.iter().position(|request| named.contains(&request.member))?;
        requests.remove(at).map(|Request { member, link, .. }| (member, link))
    }

    /// Names the joiners that may fetch the state, instead of those named before.
    fn name(&self, joiners: impl IntoIterator<Item = u64>) {
        self.lock().named = joiners.into_iter().collect();
    }

    /// Drops requests that have waited too long for their joiner to be named. Returns when the next
    /// one has.
    pub(crate) fn expire(&self, now: Duration) -> Option<Duration> {
        let mut state = self.lock();
        let State { named, requests } = &mut *state;
        let is_unnamed = |request: &Request| !named.contains(&request.member);
        requests.retain(|request| {
            let expires = is_unnamed(request) && request.received_at + UNNAMED_TIME_MAX <= now;
            if expires {
                let member = request.member;
                tracing::warn!(member, "the state was requested by a worker that is no joiner");
            }
            !expires
        });
        let oldest = requests.iter().filter(|request| is_unnamed(request)).map(|r| r.received_at);
        oldest.min().map(|received_at| received_at + UNNAMED_TIME_MAX)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("nothing under this lock panics")
    }
}

const PENDING_REQUESTS_MAX: usize = 64;

/// Longer than the master's message with the joiner's name takes, unless this worker is without a
/// master; then the joiner dials again.
const UNNAMED_TIME_MAX: Duration = Duration::from_secs(10);
