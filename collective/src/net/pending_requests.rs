use std::collections::VecDeque;
use std::net::TcpStream;
use std::sync::{Mutex, MutexGuard};

/// Links of joiners that request the state, by member, and wait for a donor in the middle of a
/// step.
///
/// **Invariant:** at most [`PENDING_REQUESTS_MAX`] requests. A second request of the same joiner
/// replaces its first one; at the limit, the oldest request is dropped.
#[derive(Debug, Default)]
pub(crate) struct PendingRequests {
    requests: Mutex<VecDeque<(u64, TcpStream)>>,
}

impl PendingRequests {
    pub(crate) fn push(&self, member: u64, link: TcpStream) {
        let mut requests = self.lock();
        requests.retain(|(other, _)| *other != member);
        if requests.len() == PENDING_REQUESTS_MAX {
            requests.pop_front();
        }
        requests.push_back((member, link));
    }

    pub(crate) fn pop(&self) -> Option<(u64, TcpStream)> {
        self.lock().pop_front()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<(u64, TcpStream)>> {
        self.requests.lock().expect("nothing under this lock panics")
    }
}

const PENDING_REQUESTS_MAX: usize = 64;
