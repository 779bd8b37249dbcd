use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard};

use crate::Visitor;

/// Where newcomers wait for a donor that is in the middle of a step.
///
/// **Invariant:** at most [`VISITORS_MAX`]; a newcomer that dials again has given up its former
/// link, and when all places are taken, the oldest goes.
#[derive(Debug, Default)]
pub(crate) struct Lobby {
    visitors: Mutex<VecDeque<Visitor>>,
}

impl Lobby {
    pub(crate) fn enter(&self, visitor: Visitor) {
        let mut visitors = self.lock();
        visitors.retain(|other| other.member() != visitor.member());
        if visitors.len() == VISITORS_MAX {
            visitors.pop_front();
        }
        visitors.push_back(visitor);
    }

    pub(crate) fn next(&self) -> Option<Visitor> {
        self.lock().pop_front()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Visitor>> {
        self.visitors.lock().expect("nothing under this lock panics")
    }
}

const VISITORS_MAX: usize = 64;
