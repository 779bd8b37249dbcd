//! Which group this worker joins, and the links between its members.

use elasticdl_proto::{Membership, WorkerId, WorkerMessage};

use super::phase::{Group, Phase};
use super::{Exit, Session};
use crate::session::transport_switch::{NcclBuild, NcclObstacle, Transport, TransportSwitch};

impl Session {
    pub(super) fn handle_membership(&mut self, membership: Membership) {
        let abort = membership.abort;
        if !self.memberships.receive(membership) {
            return;
        }
        if self.step.outcome.is_some() {
            self.memberships.deferred = Some(self.memberships.deferred.unwrap_or(false) || abort);
        } else {
            self.enter_latest(abort);
        }
    }

    /// Handles the memberships that have arrived during the outcome of a step.
    pub(super) fn handle_deferred(&mut self) {
        if let Some(abort) = self.memberships.deferred.take() {
            self.enter_latest(abort);
        }
    }

    pub(super) fn enter_latest(&mut self, abort: bool) {
        if self.phase == Phase::Fetching {
            return self.leave_fetch();
        }
        // A switch without a loss waits for the end of the round, where all ranks switch together.
        let in_round = !matches!(self.phase, Phase::Detached | Phase::Finished { .. });
        if abort || !in_round {
            self.join_latest();
        }
    }

    /// The links of the membership are up.
    pub fn connected(&mut self) {
        if let Phase::Joining(membership) = &self.phase {
            let rank =
                membership.rank_of(self.me).expect("only memberships with this worker are joined");
            let members: Vec<WorkerId> = membership.members.iter().map(|(id, _)| *id).collect();
            self.transport.regrouped(&members);
            let group =
                Group { generation: membership.generation, members, rank, origins: Vec::new() };
            self.phase = Phase::Syncing(group);
        }
    }

    /// The links of the current generation broke, at the link to `suspect`.
    pub fn broken(&mut self, suspect: Option<WorkerId>, error: String) {
        self.leave_links(suspect, error, false);
    }

    /// The links of the current generation could not be built: `suspect` answered no dial.
    pub fn unreachable_peer(&mut self, suspect: WorkerId, error: String) {
        self.leave_links(Some(suspect), error, true);
    }

    fn leave_links(&mut self, suspect: Option<WorkerId>, error: String, unreachable: bool) {
        let generation = match (&self.phase, self.group()) {
            (Phase::Joining(membership), _) => membership.generation,
            (_, Some(group)) => group.generation,
            (_, None) => return,
        };
        self.phase = Phase::Detached;
        self.step.outcome = None;
        self.memberships.deferred = None;
        if self.memberships.latest.as_ref().is_some_and(|latest| latest.generation > generation) {
            self.join_latest();
        } else {
            self.reports.push(WorkerMessage::Broken { generation, suspect, error, unreachable });
        }
    }

    pub(super) fn join_latest(&mut self) {
        if matches!(self.phase, Phase::Ended(_)) {
            return;
        }
        let Some(latest) = &self.memberships.latest else { return };
        let is_member = latest.rank_of(self.me).is_some();
        self.phase = match is_member {
            true => Phase::Joining(latest.clone()),
            false => Phase::Detached,
        };
        self.memberships.follows_loss = latest.abort;
        self.memberships.was_member |= is_member;
        self.memberships.has_stood_by |= self.is_leaving();
        self.report_stand_by();
    }

    /// A worker that its group goes on without keeps its state until the next group has formed.
    pub(super) fn report_stand_by(&mut self) {
        if self.phase == Phase::Detached && self.is_leaving() {
            self.reports.push(WorkerMessage::CaughtUp { step: self.own_step() });
        }
    }

    /// No master has taken this worker back or released it in time.
    pub fn leave(&mut self) {
        if self.phase == Phase::Detached {
            self.phase = Phase::Ended(Exit::Left);
        }
    }

    // ---- the host ring or NCCL ----

    /// Sets whether this worker computes on a GPU.
    pub fn on_gpu(self, gpu: bool) -> Self {
        Self { transport: TransportSwitch::new(gpu), ..self }
    }

    /// State of this worker's NCCL communicator in its generation.
    pub fn set_nccl_build(&mut self, build: NcclBuild) {
        self.transport.set_build(build);
    }

    /// NCCL failed during a step. The links are broken, too.
    pub fn nccl_broke(&mut self) {
        if let Phase::Round { group, .. } = &self.phase {
            self.transport.broke(&group.members);
        }
    }

    /// Transport of the next [`Task::Step`](super::Task::Step).
    pub fn transport(&self) -> Transport {
        self.transport.transport()
    }

    /// Why this group does not use NCCL. `None`: the ranks start to build it when they are at one
    /// state.
    pub fn nccl_obstacle(&self) -> Option<NcclObstacle> {
        self.transport.obstacle()
    }
}

#[cfg(test)]
mod tests {
    use elasticdl_proto::{Generation, MasterMessage};

    use super::*;
    use crate::session::tests::pair::Pair;
    use crate::session::{JobPlan, Task};

    fn membership(generation: u64, members: &[u64], abort: bool) -> MasterMessage {
        let address = |id: u64| (WorkerId(id), ([127, 0, 0, 1], id as u16).into());
        let members: Vec<_> = members.iter().map(|id| address(*id)).collect();
        let generation = Generation(generation);
        MasterMessage::Membership(Membership { generation, members: members.into(), abort })
    }

    /// Worker 2 of a group that goes on without it, at the switch or because its links broke.
    fn left(links_broke: bool) -> Session {
        let mut pair = Pair::new(JobPlan::of_one_epoch(10, 2));
        for session in &mut pair.0 {
            session.handle(membership(2, &[1], false));
        }
        if links_broke {
            pair.0[1].broken(Some(WorkerId(1)), "reset".into());
        } else {
            pair.exchange_headers();
            assert!(matches!(pair.0[0].poll(), Task::Connect(_)));
        }
        let [_, mut session] = pair.0;
        let reports: Vec<_> = std::iter::from_fn(|| session.reports.poll()).collect();
        assert_eq!(reports.last(), Some(&WorkerMessage::CaughtUp { step: Some(0) }), "{reports:?}");
        assert_eq!(session.poll(), Task::StandBy);
        session
    }

    #[test]
    fn a_worker_that_its_group_goes_on_without_keeps_its_state_until_it_is_released() {
        for links_broke in [false, true] {
            let mut session = left(links_broke);
            assert!(session.state().is_some());
            session.handle(MasterMessage::release("it leaves"));
            assert_eq!(session.poll(), Task::Exit(Exit::Shutdown("it leaves".into())));
            let mut session = left(links_broke);
            session.leave();
            assert_eq!(session.poll(), Task::Exit(Exit::Left));
        }
    }

    #[test]
    fn a_worker_in_reserve_may_be_taken_back_and_tells_each_master_where_it_is() {
        let mut session = left(true);
        session.reconnected();
        let reports: Vec<_> = std::iter::from_fn(|| session.reports.poll()).collect();
        let step = 0;
        let repeated =
            [WorkerMessage::Reconnected { step }, WorkerMessage::CaughtUp { step: Some(step) }];
        assert_eq!(reports, repeated);
        session.handle(membership(3, &[2], true));
        assert!(matches!(session.poll(), Task::Connect(_)));
        // The time in which it could have left in order is over.
        session.leave();
        assert!(matches!(session.poll(), Task::Connect(_)));
    }
}
