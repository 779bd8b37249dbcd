//! Reports of a worker to its master after a reconnect, or to a new master.

use elasticdl_proto::{LedgerReport, WorkerMessage};

use super::phase::Phase;
use super::{Session, State};

impl Session {
    /// The control stream is open again, to the same master or to a new one. Messages of the
    /// previous stream may be lost, and a new master has seen none of them. So the worker repeats
    /// what the master may have missed.
    pub fn reconnected(&mut self) {
        self.reports.clear();
        // A state that was only fetched may be dropped, and this worker is in none of its steps.
        let step = if self.memberships.was_in_group { self.step() } else { 0 };
        self.reports.push(WorkerMessage::Reconnected { step });
        match &mut self.phase {
            Phase::Detached => {
                self.report_broken_again();
                self.report_caught_up_again();
                self.report_stand_by();
            }
            Phase::Finished { reported, .. } => *reported = false,
            Phase::Evaluating { group, .. }
            | Phase::HandingOver { group, .. }
            | Phase::Rechecking { group, .. }
            | Phase::Round { group, .. }
            | Phase::Verifying { group, .. } => {
                let (generation, rank) = (group.generation, group.rank);
                if let (0, Some(State { step, ledger, .. })) = (rank, &self.state) {
                    let (step, ledger) = (*step, LedgerReport::from(ledger));
                    // This ledger already contains the progress gathered for the next report; the
                    // master counts each record once.
                    self.reports.push(WorkerMessage::Formed { generation, step, ledger });
                }
            }
            Phase::Fetching => self.report_caught_up_again(),
            // These phases report their outcome when they complete.
            Phase::Ended(_) | Phase::Joining(_) | Phase::Repairing(..) | Phase::Syncing(_) => {}
        }
        if let (Some(parameters), false) = (self.parameters, self.memberships.was_member) {
            // The earlier report may not have reached a master.
            self.reports.push(WorkerMessage::Ready { parameters });
        }
    }

    /// A member without links waits for a new generation, and the master may not know that.
    fn report_broken_again(&mut self) {
        let latest = self
            .memberships
            .latest
            .as_ref()
            .filter(|latest| self.memberships.was_member && latest.rank_of(self.me).is_some());
        if let Some(generation) = latest.map(|latest| latest.generation) {
            let error = "links broke before this master took over".into();
            self.reports.push(WorkerMessage::Broken {
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

    use elasticdl_proto::{
        Committed, Generation, Ledger, MasterMessage, Membership, RecordRange, WorkerId,
    };

    use super::super::{Broadcast, Computed, FinalState, JobPlan, Task};
    use super::*;
    use crate::session::header::{StateRecord, SyncHeader};

    fn records(start: u64, end: u64) -> RecordRange {
        RecordRange { epoch: 0, start, end }
    }

    fn reports(session: &mut Session) -> Vec<WorkerMessage> {
        std::iter::from_fn(|| session.reports.poll()).collect()
    }

    /// The only member of generation 1, at step 0.
    fn single_member() -> Session {
        let me = WorkerId(1);
        let mut session = Session::new(me, JobPlan::of_one_epoch(10, 2));
        let members = vec![(me, "127.0.0.1:1".parse().unwrap())].into();
        let membership = Membership { generation: Generation(1), members, abort: false };
        session.handle(MasterMessage::Membership(membership));
        session.connected();
        session.synced(&[SyncHeader::default()]).unwrap();
        session.begin();
        session.bytes_broadcast(&session.broadcast_bytes(Broadcast::StateRecord)).unwrap();
        session.tensors_broadcast(true).unwrap();
        session.repaired();
        reports(&mut session);
        session
    }

    fn compute(session: &mut Session, range: RecordRange) {
        assert_eq!(session.poll(), Task::Compute { ranges: vec![range], is_first: true });
        session.assignment.computed(Computed::default());
    }

    fn commit(session: &mut Session, now: Duration) {
        session.summed(vec![session.header(0)], true).unwrap();
        assert!(matches!(session.poll(), Task::Update { is_applied: true, .. }));
        session.updated(now);
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
    fn a_new_master_learns_the_ledger() {
        let mut session = single_member();
        session.headers_exchanged(&[session.header(0)]).unwrap();
        compute(&mut session, records(0, 2));
        commit(&mut session, Duration::from_secs(1));
        compute(&mut session, records(2, 4));
        session.reconnected();
        // Committed records are in the ledger and are not reported a second time.
        let returned = WorkerMessage::Reconnected { step: 1 };
        assert_eq!(reports(&mut session), [returned.clone(), formed(1, records(0, 2))]);
        session.reconnected();
        assert_eq!(reports(&mut session), [returned, formed(1, records(0, 2))]);
        commit(&mut session, Duration::from_secs(9));
        let Some(WorkerMessage::Committed(progress)) = session.reports.poll() else {
            panic!("no progress")
        };
        assert_eq!((progress.step, progress.ranges), (2, vec![records(2, 4)]));
    }

    #[test]
    fn steps_are_timed_from_the_second_step_of_a_group() {
        let mut session = single_member();
        session.headers_exchanged(&[session.header(0)]).unwrap();
        for at in [1000, 1700, 3000] {
            session.poll();
            session.assignment.computed(Computed::default());
            session.reports.reduced(Duration::from_millis(2));
            commit(&mut session, Duration::from_millis(at));
        }
        let times = |report| match report {
            WorkerMessage::Committed(Committed { times, .. }) => {
                Some((times.steps, times.step_us, times.reduce_us))
            }
            _ => None,
        };
        let reported: Vec<_> = reports(&mut session).into_iter().filter_map(times).collect();
        assert_eq!(reported, [(0, 0, 0), (1, 700_000, 2_000), (1, 1_300_000, 2_000)]);
    }

    #[test]
    fn a_report_of_several_steps_names_the_losses_of_the_first_and_last_and_the_epochs_end() {
        let mut session = single_member();
        session.headers_exchanged(&[session.header(0)]).unwrap();
        for (at, loss_sum) in [(1000, 9.0), (1010, 8.0), (1020, 6.0), (1030, 4.0), (1040, 2.0)] {
            session.poll();
            let metrics = [("norm".to_owned(), 10.0 * loss_sum)].into();
            session.assignment.computed(Computed { loss_sum, metrics, ..Computed::default() });
            commit(&mut session, Duration::from_millis(at));
        }
        session.reports.flush();
        let exact = |report| match report {
            WorkerMessage::Committed(report) => {
                let norm = report.metrics["norm"];
                Some((report.step, report.first_loss, report.last_loss, report.epoch_step, norm))
            }
            _ => None,
        };
        let reported: Vec<_> = reports(&mut session).into_iter().filter_map(exact).collect();
        let rest = (5, Some(4.0), Some(1.0), Some(5), 200.0);
        assert_eq!(reported, [(1, Some(4.5), Some(4.5), None, 90.0), rest]);
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
        assert_eq!(repeated[0], WorkerMessage::Reconnected { step: 0 });
        assert!(broken(&repeated[1]) && repeated.len() == 2, "{repeated:?}");
    }

    #[test]
    fn a_final_state_is_reported_to_a_new_master_too() {
        let mut session = single_member();
        session.handle(MasterMessage::Drain);
        session.headers_exchanged(&[session.header(0)]).unwrap();
        let publish = Task::Finish { is_published: true };
        assert_eq!(session.poll(), publish);
        session.finish(FinalState {
            digest: 0,
            parameters_are_finite: true,
            summary: None,
            is_exported: false,
            export_error: None,
            row_touches: None,
        });
        assert_eq!(session.poll(), Task::Wait);
        session.reconnected();
        assert_eq!(session.poll(), publish);
    }

    #[test]
    fn a_worker_that_was_no_member_reports_no_step() {
        let mut session = Session::new(WorkerId(1), JobPlan::of_one_epoch(10, 2));
        let no_step = [WorkerMessage::Reconnected { step: 0 }];
        session.reconnected();
        assert_eq!(reports(&mut session), no_step);
        // The next group may begin before the state that it has fetched.
        session.handle_fetch(vec![(WorkerId(2), "127.0.0.1:2".parse().unwrap())]);
        let state = single_member().state().unwrap().record();
        assert!(session.install(StateRecord { step: 3, ..state }, None));
        session.reconnected();
        assert_eq!((session.step(), reports(&mut session)), (3, no_step.to_vec()));
    }
}
