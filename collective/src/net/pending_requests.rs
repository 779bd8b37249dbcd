use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard};

use crate::StateRequest;

/// State requests of joiners that wait for a donor in the middle of a step.
///
/// **Invariant:** at most [`PENDING_REQUESTS_MAX`] requests. A second request of the same joiner
/// replaces its first one; at the limit, the oldest request is dropped.
#[derive(Debug, Default)]
pub(crate) struct PendingRequests {
    requests: Mutex<VecDeque<StateRequest>>,
}

impl PendingRequests {
    pub(crate) fn push(&self, request: StateRequest) {
        let mut requests = self.lock();
        requests.retain(|other| other.member() != request.member());
        if requests.len() == PENDING_REQUESTS_MAX {
            requests.pop_front();
        }
        requests.push_back(request);
    }

    pub(crate) fn pop(&self) -> Option<StateRequest> {
        self.lock().pop_front()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<StateRequest>> {
        self.requests.lock().expect("nothing under this lock panics")
    }
}

const PENDING_REQUESTS_MAX: usize = 64;
