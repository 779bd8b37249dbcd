//! What a worker says to its master after it was disconnected, or to a new master.

use super::{Phase, Report, Session, State};

impl Session {
    /// The control stream is open again, to the same master or to another one. Messages of the
    /// stream before may be lost, and another master knows none of them. The master is told first
    /// which records are this worker's, then what it may not have heard, and is asked again for
    /// what it did not give.
    pub fn reconnected(&mut self) {
        self.reports.clear();
        self.leases.forget_requests();
        let ranges = self.pending.ranges.iter().copied().chain(self.leases.all()).collect();
        self.reports.push_back(Report::HeldLeases { step: self.step(), ranges });
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
                    let (step, ledger) = (*step, ledger.clone());
                    // What is gathered for the next report is in this ledger, too; the master takes
                    // it in once.
                    self.reports.push_back(Report::Formed { generation, step, ledger });
                }
                self.request_leases(world_size);
            }
            Phase::Fetching => self.report_caught_up_again(),
            // What comes of these is said when it is done.
            Phase::Ended(_) | Phase::Joining(_) | Phase::Repairing(..) | Phase::Syncing(_) => {}
        }
    }

    /// A member without links waits for a new generation, and the master may not know.
    fn report_broken_again(&mut self) {
        let latest = self
            .latest
            .as_ref()
            .filter(|latest| self.was_member && latest.rank_of(self.me).is_some());
        if let Some(generation) = latest.map(|latest| latest.generation) {
            let error = "links broke before this master came".into();
            self.reports.push_back(Report::Broken {
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
    use std::time::Duration;

    use elasticdl_proto::{Generation, Ledger, RecordRange, WorkerId};

    use super::super::{JobPlan, Membership, Progress, Task};
    use super::*;
    use crate::core::header::SyncHeader;
    use crate::core::plan::Batch;

    fn records(start: u64, end: u64) -> RecordRange {
        RecordRange { epoch: 0, start, end }
    }

    fn reports(session: &mut Session) -> Vec<Report> {
        std::iter::from_fn(|| session.poll_report()).collect()
    }

    /// Detached in generation 1, at step 0, with a lease on records 0 to 6.
    fn alone() -> Session {
        let me = WorkerId(1);
        let plan = JobPlan {
            records: 10,
            epochs: 1,
            max_steps: None,
            batch: Batch::Global(2),
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

    fn formed(step: u64, absorbed: RecordRange) -> Report {
        let mut ledger = Ledger::new(10);
        ledger.absorb(absorbed);
        Report::Formed { generation: Generation(1), step, ledger }
    }

    #[test]
    fn another_master_hears_of_leases_of_the_ledger_and_of_what_is_wanted() {
        let mut session = alone();
        session.headers_exchanged(&[session.header(0)]).unwrap();
        assert_eq!(session.poll(), Task::Compute(vec![records(0, 2)]));
        session.computed(0.0, 0);
        session.commit(vec![session.header(0)], Duration::ZERO);
        assert_eq!(session.poll(), Task::Compute(vec![records(2, 4)]));
        session.reconnected();
        // What is being computed is held; what is committed is in the ledger, and not said a second
        // time.
        let holding = Report::HeldLeases { step: 1, ranges: vec![records(2, 4), records(4, 6)] };
        let wanted = Report::LeaseRequest { epoch: 0, records: 14 };
        assert_eq!(
            reports(&mut session),
            [holding.clone(), formed(1, records(0, 2)), wanted.clone()]
        );
        session.reconnected();
        assert_eq!(reports(&mut session), [holding, formed(1, records(0, 2)), wanted]);
        session.computed(0.0, 0);
        session.commit(vec![session.header(0)], Duration::from_secs(9));
        let Some(Report::Committed(progress)) = session.poll_report() else {
            panic!("no progress")
        };
        assert_eq!((progress.step, progress.ranges), (2, vec![records(2, 4)]));
    }

    #[test]
    fn steps_are_timed_from_a_groups_second_one_on() {
        let mut session = alone();
        session.headers_exchanged(&[session.header(0)]).unwrap();
        for at in [10, 17, 30] {
            session.poll();
            session.computed(0.0, 0);
            session.reduced(Duration::from_millis(2));
            session.commit(vec![session.header(0)], Duration::from_millis(at));
        }
        let times = |report| match report {
            Report::Committed(Progress { times, .. }) => {
                Some((times.steps, times.step_us, times.reduce_us))
            }
            _ => None,
        };
        let told: Vec<_> = reports(&mut session).into_iter().filter_map(times).collect();
        assert_eq!(told, [(0, 0, 0), (1, 7_000, 2_000), (1, 13_000, 2_000)]);
    }

    #[test]
    fn a_member_without_links_says_again_that_they_broke() {
        let mut session = alone();
        session.broken(None, "reset".into());
        reports(&mut session);
        session.reconnected();
        let said = reports(&mut session);
        let broken = |r: &Report| {
            matches!(r, Report::Broken { generation: Generation(1), suspect: None, .. })
        };
        assert_eq!(said[0], Report::HeldLeases { step: 0, ranges: vec![records(0, 6)] });
        assert!(broken(&said[1]) && said.len() == 2, "{said:?}");
    }

    #[test]
    fn a_final_state_is_told_to_another_master_too() {
        let mut session = alone();
        session.handle_drain();
        session.headers_exchanged(&[session.header(0)]).unwrap();
        assert_eq!(session.poll(), Task::Finish);
        session.finish_reported();
        assert_eq!(session.poll(), Task::Wait);
        session.reconnected();
        assert_eq!(session.poll(), Task::Finish);
    }

    #[test]
    fn a_worker_that_was_no_member_has_nothing_to_say() {
        let mut session = Session::new(
            WorkerId(1),
            JobPlan {
                records: 10,
                epochs: 1,
                max_steps: None,
                batch: Batch::Global(2),
                checkpoints: None,
                evaluation: None,
            },
        );
        session.reconnected();
        assert_eq!(reports(&mut session), [Report::HeldLeases { step: 0, ranges: Vec::new() }]);
    }
}
