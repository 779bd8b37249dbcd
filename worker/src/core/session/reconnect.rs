//! Reports of a worker to its master after a reconnect, or to a new master.

use elasticdl_proto::{LedgerReport, WorkerMessage};

use super::{Phase, Session, State};

impl Session {
    /// The control stream is open again, to the same master or to a new one. Messages of the
    /// previous stream may be lost, and a new master has seen none of them. So the worker first
    /// reports the records that it holds, then repeats what the master may have missed, and
    /// requests again the leases that have not arrived.
    pub fn reconnected(&mut self) {
        self.reports.clear();
        self.leases.forget_requests();
        let ranges = self.pending.ranges.iter().copied().chain(self.leases.all()).collect();
        // A state that was only fetched may be dropped, and this worker is in none of its steps.
        let step = if self.was_in_group { self.step() } else { 0 };
        self.reports.push_back(WorkerMessage::HeldLeases { step, ranges });
        match &mut self.phase {
            Phase::Detached => {
                self.report_broken_again();
                self.report_caught_up_again();
            }
            Phase::Finished { reported, .. } => *reported = false,
            Phase::Evaluating { group, .. } | Phase::Round { group, .. } => {
                let (generation, rank, world_size) =
                    (group.generation, group.rank, group.members.len());
                if let (0, Some(State { step, ledger, .. })) = (rank, &self.state) {
                    let (step, ledger) = (*step, LedgerReport::from(ledger));
                    // This ledger already contains the progress gathered for the next report; the
                    // master counts each record once.
                    self.reports.push_back(WorkerMessage::Formed { generation, step, ledger });
                }
                self.request_leases(world_size);
            }
            Phase::Fetching => self.report_caught_up_again(),
            // These phases report their outcome when they complete.
            Phase::Ended(_) | Phase::Joining(_) | Phase::Repairing(..) | Phase::Syncing(_) => {}
        }
    }

    /// A member without links waits for a new generation, and the master may not know that.
    fn report_broken_again(&mut self) {
        let latest = self
            .latest
            .as_ref()
            .filter(|latest| self.was_member && latest.rank_of(self.me).is_some());
        if let Some(generation) = latest.map(|latest| latest.generation) {
            let error = "links broke before this master took over".into();
            self.reports.push_back(WorkerMessage::Broken {
                generation,
                suspect: None,
                error,
                unreachable: false,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;
    use std::time::Duration;

    use elasticdl_proto::{
        Batch, Committed, Generation, Ledger, Membership, RecordRange, WorkerId,
    };

    use super::super::{JobPlan, Task};
    use super::*;
    use crate::core::header::{StateRecord, SyncHeader};

    const TWO: NonZeroU64 = NonZeroU64::new(2).unwrap();

    fn records(start: u64, end: u64) -> RecordRange {
        RecordRange { epoch: 0, start, end }
    }

    fn reports(session: &mut Session) -> Vec<WorkerMessage> {
        std::iter::from_fn(|| session.poll_report()).collect()
    }

    /// The only member of generation 1, at step 0, with a lease on records 0 to 6.
    fn single_member() -> Session {
        let me = WorkerId(1);
        let plan = JobPlan {
            records: 10,
            epochs: 1,
            max_steps: None,
            batch: Batch::Global(TWO),
            checkpoints: None,
            evaluation: None,
        };
        let mut session = Session::new(me, plan);
        let members = vec![(me, "127.0.0.1:1".parse().unwrap())];
        session.handle_membership(Membership { generation: Generation(1), members, abort: false });
        session.connected();
        session.synced(&[SyncHeader { state: None, transport: Default::default() }]).unwrap();
        session.begin();
        session.repaired();
        session.handle_lease(vec![records(0, 6)]);
        reports(&mut session);
        session
    }

    fn formed(step: u64, absorbed: RecordRange) -> WorkerMessage {
        let mut ledger = Ledger::new(10);
        ledger.absorb(absorbed);
        WorkerMessage::Formed {
            generation: Generation(1),
            step,
            ledger: LedgerReport::from(&ledger),
        }
    }

    #[test]
    fn a_new_master_learns_the_held_leases_the_ledger_and_the_requested_records() {
        let mut session = single_member();
        session.headers_exchanged(&[session.header(0)]).unwrap();
        assert_eq!(session.poll(), Task::Compute(vec![records(0, 2)]));
        session.computed(0.0, 0);
        session.commit(vec![session.header(0)], Duration::ZERO);
        assert_eq!(session.poll(), Task::Compute(vec![records(2, 4)]));
        session.reconnected();
        // Records being computed are held. Committed records are in the ledger and are not reported
        // a second time.
        let holding =
            WorkerMessage::HeldLeases { step: 1, ranges: vec![records(2, 4), records(4, 6)] };
        let request = WorkerMessage::LeaseRequest { epoch: 0, records: 14 };
        assert_eq!(
            reports(&mut session),
            [holding.clone(), formed(1, records(0, 2)), request.clone()]
        );
        session.reconnected();
        assert_eq!(reports(&mut session), [holding, formed(1, records(0, 2)), request]);
        session.computed(0.0, 0);
        session.commit(vec![session.header(0)], Duration::from_secs(9));
        let Some(WorkerMessage::Committed(progress)) = session.poll_report() else {
            panic!("no progress")
        };
        assert_eq!((progress.step, progress.ranges), (2, vec![records(2, 4)]));
    }

    #[test]
    fn steps_are_timed_from_the_second_step_of_a_group() {
        let mut session = single_member();
        session.headers_exchanged(&[session.header(0)]).unwrap();
        for at in [10, 17, 30] {
            session.poll();
            session.computed(0.0, 0);
            session.reduced(Duration::from_millis(2));
            session.commit(vec![session.header(0)], Duration::from_millis(at));
        }
        let times = |report| match report {
            WorkerMessage::Committed(Committed { times, .. }) => {
                Some((times.steps, times.step_us, times.reduce_us))
            }
            _ => None,
        };
        let reported: Vec<_> = reports(&mut session).into_iter().filter_map(times).collect();
        assert_eq!(reported, [(0, 0, 0), (1, 7_000, 2_000), (1, 13_000, 2_000)]);
    }

    #[test]
    fn a_member_without_links_reports_again_that_they_broke() {
        let mut session = single_member();
        session.broken(None, "reset".into());
        reports(&mut session);
        session.reconnected();
        let repeated = reports(&mut session);
        let broken = |r: &WorkerMessage| {
            matches!(r, WorkerMessage::Broken { generation: Generation(1), suspect: None, .. })
        };
        assert_eq!(repeated[0], WorkerMessage::HeldLeases { step: 0, ranges: vec![records(0, 6)] });
        assert!(broken(&repeated[1]) && repeated.len() == 2, "{repeated:?}");
    }

    #[test]
    fn a_final_state_is_reported_to_a_new_master_too() {
        let mut session = single_member();
        session.handle_drain();
        session.headers_exchanged(&[session.header(0)]).unwrap();
        assert_eq!(session.poll(), Task::Finish);
        session.finish_reported();
        assert_eq!(session.poll(), Task::Wait);
        session.reconnected();
        assert_eq!(session.poll(), Task::Finish);
    }

    #[test]
    fn a_worker_that_was_no_member_reports_no_leases() {
        let mut session = Session::new(
            WorkerId(1),
            JobPlan {
                records: 10,
                epochs: 1,
                max_steps: None,
                batch: Batch::Global(TWO),
                checkpoints: None,
                evaluation: None,
            },
        );
        let nothing = [WorkerMessage::HeldLeases { step: 0, ranges: Vec::new() }];
        session.reconnected();
        assert_eq!(reports(&mut session), nothing);
        // Nor a step: the next group may begin before the state that it has fetched.
        session.handle_fetch(vec![(WorkerId(2), "127.0.0.1:2".parse().unwrap())]);
        let state = single_member().state().unwrap().record();
        assert!(session.install(StateRecord { step: 3, ..state }, None));
        session.reconnected();
        assert_eq!((session.step(), reports(&mut session)), (3, nothing.to_vec()));
    }
}
