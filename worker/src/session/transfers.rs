//! The transfers that bring the ranks of a new group to one state, one task after the other.

use elasticdl_proto::{Ledger, LedgerReport, WorkerMessage};

use super::phase::{Group, Phase, Repairing};
use super::{Broadcast, Exit, GroupMismatch, InvalidData, Session, State, Task};
use crate::session::header::{self, StateRecord, StepHeader, SyncHeader};
use crate::session::origin::{self, without_other_programs};
use crate::session::repair::{Repair, Unequal, without_mismatched_devices};
use crate::session::replicas::Found;

impl Session {
    /// Takes in the headers of all ranks of a new group.
    ///
    /// # Errors
    /// Replicas at the same step differ, or this worker's device or program is not the group's.
    pub fn synced(&mut self, headers: &[SyncHeader]) -> Result<(), GroupMismatch> {
        if let Phase::Syncing(group) = &self.phase {
            let mut group = group.clone();
            group.origins = headers.iter().map(|header| header.origin.clone()).collect();
            self.transport.synced(&headers.iter().map(|h| h.transport).collect::<Vec<_>>())?;
            let mut counted = without_mismatched_devices(headers);
            if !self.job.allows_mixed_builds {
                origin::check(headers, &self.origin)?;
                counted = without_other_programs(&counted);
            }
            let plan = Repair::plan(&counted).map_err(|unequal| {
                let Unequal { step, verdict } = unequal;
                group.mismatch(step, Found::Sync, verdict)
            })?;
            let receives =
                plan.state.as_ref().is_some_and(|(_, receivers)| receivers.contains(&group.rank));
            // Survivors of a failure differ by at most one step, so this rank was cut off. The
            // process ends, and a new worker starts without state.
            let was_with_them = self.memberships.was_in_group && !self.memberships.has_stood_by;
            if receives && self.state.is_some() && was_with_them {
                self.phase = Phase::Ended(Exit::Outdated);
            } else {
                self.begin_repair(group, &plan);
            }
            if receives {
                // The broadcast overwrites the parameters. If it fails midway, this rank has no
                // state.
                self.state = None;
                self.step.last_headers = None;
            }
        }
        Ok(())
    }

    /// This rank has received the state of another rank. `last_headers`: headers of the last step,
    /// if this rank also has that step's reduced gradient. Returns `false` for an inconsistent
    /// record.
    ///
    /// For a state that is fetched or restored; a broadcast one is installed by
    /// [`tensors_broadcast`](Self::tensors_broadcast).
    pub fn install(&mut self, record: StateRecord, last_headers: Option<Vec<StepHeader>>) -> bool {
        let StateRecord {
            step,
            records_trained,
            epochs_complete,
            ranges,
            repeated,
            evaluation,
            steps_skipped,
            row_touches,
            created,
        } = record;
        let Ok(ledger) = Ledger::from_parts(self.job.records, epochs_complete, ranges, repeated)
        else {
            return false;
        };
        self.state = Some(State {
            step,
            ledger,
            records_trained,
            evaluation,
            steps_skipped,
            row_touches,
            created,
        });
        self.step.last_headers = last_headers;
        true
    }

    /// All ranks hold the same state, and this rank is prepared for rounds.
    pub fn repaired(&mut self) {
        let Phase::Repairing(group, repairing) = &self.phase else { return };
        let (group, has_copied) = (group.clone(), repairing.installs);
        if let Some(State { step, created, .. }) = self.state
            && (has_copied || !self.memberships.was_in_group)
        {
            let is_created = created == group.generation.0;
            self.memberships.copied_at = (!is_created).then_some(step);
        }
        (self.memberships.was_in_group, self.memberships.has_stood_by) = (true, false);
        self.step.regrouped();
        self.reports.regrouped();
        self.checkpoints.regrouped(&group.members);
        if let Some(state) = &self.state {
            self.assignment.settle(&state.ledger);
            self.assignment.look_ahead((&self.job, state), &group, &[]);
            if group.rank == 0 {
                self.reports.push(WorkerMessage::Formed {
                    generation: group.generation,
                    step: state.step,
                    ledger: LedgerReport::from(&state.ledger),
                });
            }
        }
        // The ranks learn each other's pending records only after the repair, so the first round is
        // an idle one. The same holds for whether the final state is checkpointed, evaluated and
        // equal.
        self.phase = Phase::Round { group, assigned: None, computed: false };
    }

    /// What the root of a [`Broadcast`] of bytes sends.
    pub fn broadcast_bytes(&self, what: Broadcast) -> Vec<u8> {
        match (what, &self.step.last_headers, &self.state) {
            (Broadcast::ResultHeaders, Some(headers), _) => header::encode(headers),
            (Broadcast::StateRecord, _, Some(state)) => header::encode(&state.record()),
            _ => Vec::new(),
        }
    }

    /// The bytes of the current [`Broadcast`] have arrived at this rank, or left it.
    ///
    /// # Errors
    /// The root sent bytes that are no headers or no record.
    pub fn bytes_broadcast(&mut self, bytes: &[u8]) -> Result<(), InvalidData> {
        let Phase::Repairing(_, repairing) = &mut self.phase else { return Ok(()) };
        match repairing.left.pop_front() {
            Some(Task::Broadcast { what: Broadcast::ResultHeaders, .. }) => {
                let headers = header::decode(bytes).ok_or(InvalidData("a step's headers"))?;
                repairing.headers = Some(headers);
            }
            Some(Task::Broadcast { what: Broadcast::StateRecord, .. }) => {
                let record = header::decode(bytes).ok_or(InvalidData("a state"))?;
                repairing.record = Some(record);
            }
            task => unreachable!("{task:?} is not a broadcast of bytes"),
        }
        Ok(())
    }

    /// The tensors of the current [`Broadcast`] have arrived at this rank, or left it.
    /// `sum_is_finite`: whether the received result is.
    ///
    /// # Errors
    /// The state's ledger is inconsistent.
    pub fn tensors_broadcast(&mut self, sum_is_finite: bool) -> Result<(), InvalidData> {
        let Phase::Repairing(_, repairing) = &mut self.phase else { return Ok(()) };
        let Repairing { left, applies, installs, headers, record } = repairing;
        match left.pop_front() {
            Some(Task::Broadcast { what: Broadcast::Result { .. }, .. }) => {
                if *applies && let Some(headers) = headers.take() {
                    self.apply(headers, sum_is_finite, None);
                }
            }
            Some(Task::Broadcast { what: Broadcast::State, .. }) => {
                if *installs && let Some(record) = record.take() {
                    let headers = headers.take();
                    if !self.install(record, headers) {
                        return Err(InvalidData("a ledger"));
                    }
                }
            }
            task => unreachable!("{task:?} is not a broadcast of tensors"),
        }
        Ok(())
    }

    /// Whether the state that is broadcast was just created, by the root alone.
    pub fn receives_created(&self) -> bool {
        let Phase::Repairing(group, repairing) = &self.phase else { return false };
        repairing.record.as_ref().is_some_and(|record| record.created == group.generation.0)
    }

    /// This rank has started to build its NCCL communicator.
    pub fn nccl_started(&mut self) {
        self.end_task(&Task::BuildNccl);
    }

    /// This rank has created the initial state.
    pub fn begin(&mut self) {
        self.begin_after(0);
    }

    /// This rank has created an initial state that has absorbed the first `records` records.
    pub fn begin_after(&mut self, records: u64) {
        let record = StateRecord::after(records, self.job.records);
        let is_installed = self.install(StateRecord { created: self.generation(), ..record }, None);
        debug_assert!(is_installed, "the initial ledger is a prefix of the order");
        self.assignment.audit.begin(&self.job);
        self.end_task(&Task::CreateState);
    }

    /// Generation of this worker's group; 0 without one.
    pub(super) fn generation(&self) -> u64 {
        self.group_rank().map_or(0, |(generation, _)| generation.0)
    }

    /// The group can't go on from its state: rows of tables that belong to it are lost. All ranks
    /// give it up, and the first one creates a state, as in a group in which no rank has one.
    pub fn go_back(&mut self) {
        let Phase::Repairing(group, _) = &self.phase else { return };
        let group = group.clone();
        self.forget_state();
        self.assignment.forget();
        self.checkpoints.forget();
        let receivers = (1..group.members.len()).collect();
        self.begin_repair(group, &Repair { step: None, result: None, state: Some((0, receivers)) });
    }

    pub(super) fn end_task(&mut self, task: &Task) {
        if let Phase::Repairing(_, repairing) = &mut self.phase
            && repairing.left.front() == Some(task)
        {
            repairing.left.pop_front();
        }
    }

    pub(super) fn begin_repair(&mut self, group: Group, plan: &Repair) {
        let repairing = Repairing::new(plan, group.rank, self.nccl_obstacle().is_none());
        self.phase = Phase::Repairing(group, repairing);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use elasticdl_proto::{Generation, MasterMessage, Membership, WorkerId, WorkerMessage};

    use super::super::{Exit, JobPlan};
    use super::*;
    use crate::session::header::{StateHeader, SyncHeader};
    use crate::session::tests::pair::Pair;
    use crate::tensor::WINDOWS;

    #[test]
    fn the_lowest_rank_reports_each_group_that_has_formed() {
        let mut pair = Pair::new(JobPlan::of_one_epoch(100, 4));
        pair.0.iter_mut().for_each(|session| session.broken(None, "reset".into()));
        pair.regroup(2);
        let formed = pair.0.each_mut().map(|session| {
            std::iter::from_fn(|| session.reports.poll())
                .filter_map(|report| match report {
                    WorkerMessage::Formed { generation, .. } => Some(generation),
                    _ => None,
                })
                .collect::<Vec<_>>()
        });
        assert_eq!(formed, [vec![Generation(1), Generation(2)], vec![]]);
    }

    #[test]
    fn a_copy_is_one_until_all_windows_of_it_were_compared() {
        let job = JobPlan::of_one_epoch(1000, 4);
        let mut pair = Pair::new(job.clone());
        let copies = |pair: &Pair| pair.0.each_ref().map(|session| session.header(0).is_copy);
        assert_eq!(copies(&pair), [false; 2], "the group has created the state");
        let mut joiner = Session::new(WorkerId(2), job);
        joiner.install(pair.0[0].state().unwrap().record(), None);
        pair.0[0].broken(None, "reset".into());
        pair.0[1] = joiner;
        pair.regroup(2);
        pair.exchange_headers();
        for _ in 0..WINDOWS {
            assert_eq!(copies(&pair), [false, true], "{:?}", pair.0);
            pair.commit();
        }
        assert_eq!(copies(&pair), [false; 2]);
    }

    /// The second worker of a pair that has committed one step and meets, in the next group, a rank
    /// at `step` with the reduced gradient of its last step.
    fn meets(step: u64) -> Session {
        let mut pair = Pair::new(JobPlan::of_one_epoch(100, 4));
        pair.exchange_headers();
        let headers = pair.compute();
        let [_, mut session] = pair.0;
        session.summed(headers, true).unwrap();
        assert!(matches!(session.poll(), Task::Update { is_applied: true, .. }));
        session.updated(Duration::ZERO);
        session.broken(None, "reset".into());
        let members = [1, 2].map(|id| (WorkerId(id), ([127, 0, 0, 1], id as u16).into()));
        let membership =
            Membership { generation: Generation(2), members: members.to_vec().into(), abort: true };
        session.handle(MasterMessage::Membership(membership));
        session.connected();
        let state = StateHeader { step, digest: 1, has_result: true, was_in_group: true };
        let other = SyncHeader { state: Some(state), created: 1, ..SyncHeader::default() };
        session.synced(&[other, session.sync_header(0)]).unwrap();
        session
    }

    #[test]
    fn a_rank_that_is_more_than_one_step_behind_was_cut_off_and_ends() {
        let mut one_behind = meets(2);
        let what = Broadcast::ResultHeaders;
        assert_eq!(one_behind.poll(), Task::Broadcast { root: 0, what });
        let mut cut_off = meets(3);
        assert_eq!(cut_off.poll(), Task::Exit(Exit::Outdated));
        assert_eq!(cut_off.step(), 0, "its state is dropped: others have gone on without it");
    }
}
