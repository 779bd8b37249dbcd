//! Two sessions whose operations a test carries out by hand.

use std::time::Duration;

use elasticdl_proto::{Generation, MasterMessage, Membership, WorkerId};

use crate::session::halt::Ending;
use crate::session::header::StepHeader;
use crate::session::{Broadcast, Computed, JobPlan, Session, Task};

/// A group of workers 1 and 2.
pub(crate) struct Pair(pub(crate) [Session; 2]);

impl Pair {
    pub(crate) fn new(plan: JobPlan) -> Self {
        let mut pair = Self([1, 2].map(|id| Session::new(WorkerId(id), plan.clone())));
        pair.regroup(1);
        pair
    }

    /// Both workers form a group of a new generation, and hold the same state.
    pub(crate) fn regroup(&mut self, generation: u64) {
        let members = [1, 2].map(|id| (WorkerId(id), ([127, 0, 0, 1], id as u16).into())).to_vec();
        let generation = Generation(generation);
        for session in &mut self.0 {
            let membership =
                Membership { generation, members: members.clone().into(), abort: true };
            session.handle(MasterMessage::Membership(membership));
            session.connected();
        }
        let headers = self.0.each_ref().map(|session| session.sync_header(0));
        self.0.iter_mut().for_each(|session| session.synced(&headers).unwrap());
        if self.0[0].poll() == Task::CreateState {
            self.0[0].begin();
            let record = self.0[0].broadcast_bytes(Broadcast::StateRecord);
            for session in &mut self.0 {
                let what = Broadcast::StateRecord;
                assert_eq!(session.poll(), Task::Broadcast { root: 0, what });
                session.bytes_broadcast(&record).unwrap();
                let what = Broadcast::State;
                assert_eq!(session.poll(), Task::Broadcast { root: 0, what });
                session.tensors_broadcast(true).unwrap();
            }
        }
        for session in &mut self.0 {
            assert_eq!(session.poll(), Task::EndRepair);
            session.repaired();
        }
    }

    pub(crate) fn headers(&self) -> Vec<StepHeader> {
        self.0.iter().map(|session| session.header(0)).collect()
    }

    pub(crate) fn exchange_headers(&mut self) {
        let headers = self.headers();
        for session in &mut self.0 {
            assert!(matches!(session.poll(), Task::ExchangeHeaders { .. }), "{session:?}");
            session.headers_exchanged(&headers).unwrap();
        }
    }

    /// Both workers compare their whole states, which are equal.
    pub(crate) fn verify(&mut self) {
        assert!(self.0.iter().all(Session::is_verifying), "{:?}", self.0);
        self.exchange_headers();
    }

    /// Both workers compute. Returns the headers of their step.
    pub(crate) fn compute(&mut self) -> Vec<StepHeader> {
        for session in &mut self.0 {
            assert!(matches!(session.poll(), Task::Compute { is_first: true, .. }), "{session:?}");
            session.assignment.computed(Computed {
                loss_sum: 1.0,
                compute_us: 1,
                ..Computed::default()
            });
            assert_eq!(session.poll(), Task::Step { is_empty: false });
        }
        self.headers()
    }

    /// Both workers compute a step, and commit it.
    pub(crate) fn commit(&mut self) {
        let headers = self.compute();
        for session in &mut self.0 {
            session.summed(headers.clone(), true).unwrap();
            session.updated(Duration::ZERO);
        }
    }

    pub(crate) fn endings(&self) -> [Option<Ending>; 2] {
        self.0.each_ref().map(|session| session.ended().cloned())
    }
}
