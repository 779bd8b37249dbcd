//! What follows a round: an evaluation, a checkpoint, the next step, or the end. It is decided from
//! the headers of all ranks.

use std::time::Duration;

use elasticdl_proto::{Batch, Evaluated, WorkerMessage};

use super::outcome::is_withheld;
use super::phase::{Group, Phase};
use super::{Session, Task};
use crate::session::checkpoint::{
    self, CheckpointHeader, Circumstances, FinalCheckpoint, Written, checkpoint_of,
};
use crate::session::evaluation::{Evaluation, Plan, Scores};
use crate::session::halt::{Halt, Reason};
use crate::session::header::{StateRecord, StepHeader};

impl Session {
    /// Takes in the scores of all ranks for an evaluation, which has taken so long. If a rank could
    /// not evaluate, or the scores do not fit together, the job ends with the current state: the
    /// next headers say why.
    pub fn evaluated(&mut self, scores: &[Scores], took: Duration) {
        self.reports.pass_over(took);
        let (Phase::Evaluating { group, headers, committed }, Some(plan), Some(state)) =
            (&self.phase, &self.job.evaluation, &mut self.state)
        else {
            return;
        };
        let (group, headers, committed) = (group.clone(), headers.clone(), *committed);
        let has_failed = scores.iter().any(|rank| rank.failed);
        let combined = if has_failed { Err(None) } else { plan.combine(scores).map_err(Some) };
        let means = match combined {
            Ok(means) => means,
            Err(error) => {
                // All ranks find the same, and one says it.
                if let Some(error) = error.filter(|_| group.rank == 0) {
                    self.halt(Halt { reason: Reason::Error(error), ranges: Vec::new() });
                }
                self.phase = Phase::Round { group, assigned: None, computed: false };
                return;
            }
        };
        plan.note(&mut state.evaluation, state.step, &means);
        if group.rank == 0 {
            // A mean that is not finite shows the user that the model diverges.
            let metrics = means
                .into_iter()
                .map(|(name, mean)| (name, mean.is_finite().then_some(mean)))
                .collect();
            let (step, records) = (state.step, plan.records);
            let report = Evaluated { step, records, metrics };
            self.reports.push(WorkerMessage::Evaluated(report, took));
        }
        self.phase = Phase::Round { group, assigned: None, computed: false };
        self.end_round(&headers, committed);
    }

    /// The ranks that stay hold all shards, with all copies.
    pub fn handed_over(&mut self) {
        let Phase::HandingOver { group, leaves, headers, committed } = &self.phase else { return };
        let (group, headers, committed) = (group.clone(), headers.clone(), *committed);
        self.step.handed_over.clone_from(leaves);
        self.phase = Phase::Round { group, assigned: None, computed: false };
        self.end_round(&headers, committed);
    }

    /// Whether ranks stay that have not taken over the shards of those that leave or, at the end,
    /// where no step brings them, the copies that are missing since a rank was lost.
    fn is_to_be_handed_over(&self, leaves: &[bool]) -> bool {
        let has_shards = self.job.has_tables || self.job.shards_optimizer;
        let moves = leaves.contains(&true) || (has_shards && self.at_end());
        moves && leaves.contains(&false) && self.step.handed_over != leaves
    }

    pub(super) fn at_end(&self) -> bool {
        self.state.as_ref().is_some_and(|s| {
            s.ledger.epoch() >= self.job.epochs
                || self.job.max_steps.is_some_and(|max| s.step >= max)
        }) || self.stops_early()
    }

    /// Decides what follows a round. `committed`: time of the commit, if this round made a step.
    pub(super) fn end_round(&mut self, headers: &[StepHeader], committed: Option<Duration>) {
        let Phase::Round { group, .. } = &self.phase else { return };
        let group = group.clone();
        let of_checkpoint = checkpoint_headers(headers);
        let [checkpoint, last] =
            [false, true].map(|is_last| match self.checkpoints.are_enabled() {
                true => checkpoint_of(&of_checkpoint, (self.step(), is_last)),
                false => FinalCheckpoint::Nothing,
            });
        // An evaluation of the final state can end the processes: the state is stored before.
        let is_safe = !self.at_end() || last == FinalCheckpoint::Nothing;
        if is_safe && self.is_to_be_evaluated() && !is_withheld(headers) {
            // An evaluation may take long, and the next report would follow it.
            self.reports.flush();
            self.phase = Phase::Evaluating { group, headers: headers.to_vec(), committed };
            return;
        }
        if self.is_suspended_in_vain(headers) {
            self.requests.suspend = false;
        }
        let seen = headers.iter().map(|h| h.newest_generation).min().unwrap_or(0);
        let ending = self.ending(&group, headers);
        let ends = ending.is_some();
        let leaves: Vec<bool> = headers.iter().map(|header| header.leaves).collect();
        let switches = seen > group.generation.0 || is_withheld(headers);
        if (ends || switches || self.at_end()) && self.is_to_be_handed_over(&leaves) {
            self.reports.flush();
            let headers = headers.to_vec();
            self.phase = Phase::HandingOver { group, leaves, headers, committed };
            return;
        }
        let last = if ends { last } else { FinalCheckpoint::Nothing };
        if self.is_to_be_verified(ending.as_ref().filter(|_| last == FinalCheckpoint::Nothing)) {
            self.reports.flush();
            self.phase = Phase::Verifying { group, committed };
            return;
        }
        let best = self.is_best() && checkpoint != FinalCheckpoint::Nothing;
        let is_free = checkpoint == FinalCheckpoint::Begin;
        // The only rank may be about to end as the others did, with the last copy of the state.
        let comes_first = group.members.len() == 1
            && committed.is_none()
            && self.checkpoints.precedes_step()
            && checkpoint != FinalCheckpoint::Nothing;
        if last == FinalCheckpoint::Begin
            || (is_free && (best || comes_first))
            || (committed.is_some() && checkpoint::begins(&of_checkpoint))
        {
            let step = (self.step(), last == FinalCheckpoint::Begin);
            let (generation, now) = (group.generation, committed.unwrap_or_default());
            self.checkpoints.begin(step, generation, &group.members, now);
            if comes_first {
                self.checkpoints.await_current();
            }
        }
        if let (Some(ending), FinalCheckpoint::Nothing) = (ending, last) {
            self.reports.flush();
            self.end(group, ending);
        } else {
            let switches = seen > group.generation.0;
            let (computes, committed) = (self.computes_before(&group), committed.is_some());
            if switches {
                self.reports.flush();
            }
            if switches && !(committed && computes) {
                return self.join_latest();
            }
            // Saving the best model is worth the wait: no later step would have it.
            let waits = ends || (best && !is_free) || comes_first;
            let state = self.state.as_ref().filter(|_| !waits);
            let assigned =
                state.and_then(|state| self.assignment.plan((&self.job, state), &group, headers));
            if switches && assigned.as_ref().is_none_or(Vec::is_empty) {
                return self.join_latest();
            }
            self.step.switches = switches;
            self.phase = Phase::Round { group, assigned, computed: false };
        }
    }

    /// Whether the ranks of `group` compute the next step before they join the newest group: they
    /// all stay, and others join them, which receive the result of the last step meanwhile. The
    /// computed gradients are the whole step, unless it grows with the group. With tables, a rank
    /// that computes nothing and joins at once would be missing where the others look up rows.
    fn computes_before(&self, group: &Group) -> bool {
        let latest = self.memberships.latest.as_ref();
        let adds_only = latest.is_some_and(|latest| {
            latest.members.len() > group.members.len()
                && group.members.iter().all(|id| latest.rank_of(*id).is_some())
        });
        adds_only && !self.job.has_tables && matches!(self.job.size.batch, Batch::Global(_))
    }

    /// Next task of a checkpoint. To be polled before the state changes: a checkpoint holds the
    /// state as it is now.
    pub fn poll_checkpoint(&mut self) -> Option<checkpoint::Task> {
        self.checkpoints.poll()
    }

    /// This rank has loaded the state of a checkpoint. Returns `false` for an inconsistent record.
    /// `ours`: whether the checkpoint belongs to this job.
    pub fn restore(&mut self, mut record: StateRecord, ours: bool) -> bool {
        if !ours {
            // The last state of another job is stored before it is evaluated. If that is its best
            // model, no worse one of this job may take its place.
            let known = &mut record.evaluation;
            known.is_due = self.job.exports_best && known.at < record.step;
            known.stale = 0;
        }
        self.checkpoints.restored(record.step, ours);
        self.assignment.audit.begin(&self.job);
        self.end_task(&Task::CreateState);
        record.created = self.generation();
        self.install(record, None)
    }

    /// This rank's part of the checkpoint of `step` is written, or could not be.
    pub fn wrote_part(&mut self, step: u64, part: Result<Written, ()>) {
        self.checkpoints.wrote(step, part);
    }

    /// Training has stopped for this time, to copy the state for a checkpoint. `digest`: of the
    /// whole state, which all ranks must agree on.
    pub fn copied_for_checkpoint(&mut self, took: Duration, digest: u64) {
        self.reports.pass_over(took);
        self.checkpoints.copied(took, digest);
    }

    /// The manifest of the checkpoint of `step` is written, or could not be.
    pub fn committed_checkpoint(&mut self, step: u64, is_written: bool) {
        self.checkpoints.committed(step, is_written);
    }

    /// Step of a checkpoint whose write turns out to hang. It counts as failed from `now` on or, in
    /// a job that stops, soon.
    pub fn poll_hung_checkpoint(&mut self, now: Duration) -> Option<u64> {
        let waits = matches!(self.phase, Phase::Round { assigned: None, .. });
        let (stops, at_end) = (self.requests.stop, self.at_end());
        self.checkpoints.poll_hung(now, Circumstances { stops, at_end, waits })
    }

    /// How long this rank's group has been waiting for a checkpoint and how long it waits at most;
    /// `None`: it does not wait.
    pub fn waits_for_checkpoint(&self) -> Option<(Duration, Duration)> {
        self.checkpoints.waits_for()
    }

    /// Whether a write of this rank's checkpoint takes too long, and users have been told.
    pub fn has_hung_checkpoint(&self) -> bool {
        self.checkpoints.is_told()
    }

    /// Whether the job ends before its data does, because evaluations no longer improve.
    pub fn stops_early(&self) -> bool {
        self.job.evaluation.as_ref().is_some_and(|plan| plan.stops_early(&self.evaluation()))
    }

    pub(super) fn evaluation(&self) -> Evaluation {
        self.state.as_ref().map_or_else(Evaluation::default, |s| s.evaluation)
    }

    pub(super) fn is_to_be_evaluated(&self) -> bool {
        let due = |plan: &Plan| plan.is_due(&self.evaluation(), self.step(), self.at_end());
        self.job.evaluation.as_ref().is_some_and(due)
    }

    /// Step and value of the current model, if it is the best so far.
    pub fn best_now(&self) -> Option<(u64, f64)> {
        self.best().filter(|(step, _)| *step == self.step())
    }

    /// Step and value of the best model so far.
    pub fn best(&self) -> Option<(u64, f64)> {
        self.evaluation().best
    }

    /// Whether the current model is the best so far.
    pub(super) fn is_best(&self) -> bool {
        self.best_now().is_some()
    }

    /// Takes in the results of evaluations that other ranks know: of a group that this rank has not
    /// been in, if it has only received its steps' results.
    pub(super) fn note_evaluations(&mut self, headers: &[StepHeader]) {
        if let Some(state) = &mut self.state {
            // A rank that has evaluated a later step than others did so with the same parameters.
            let newest = headers.iter().map(|h| h.evaluation).max_by_key(|e| e.at);
            state.evaluation =
                newest.filter(|e| e.at > state.evaluation.at).unwrap_or(state.evaluation);
        }
    }

    pub(super) fn handle_checkpoint_headers(&mut self, headers: &[StepHeader]) {
        self.note_evaluations(headers);
        if let Phase::Round { group, .. } = &self.phase {
            self.checkpoints.handle_headers(&group.members, &checkpoint_headers(headers));
        }
    }
}

pub(super) fn checkpoint_headers(headers: &[StepHeader]) -> Vec<&CheckpointHeader> {
    headers.iter().map(|header| &header.checkpoint).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::num::NonZeroU64;

    use elasticdl_proto::{CheckpointEvery, Generation, MasterMessage, Membership, WorkerId};

    use super::super::{Computed, JobPlan};
    use super::*;
    use crate::session::checkpoint::Task as Checkpoint;
    use crate::session::halt::Ending;
    use crate::session::tests::pair::Pair;

    /// A pair that has committed the only step of its job, which is to be evaluated.
    fn pair(checkpoints: Option<CheckpointEvery>) -> Pair {
        let evaluation = Plan { records: 300, metric: "loss".into(), ..Plan::default() };
        let plan =
            JobPlan { checkpoints, evaluation: Some(evaluation), ..JobPlan::of_one_epoch(4, 4) };
        let mut pair = Pair::new(plan);
        pair.exchange_headers();
        pair.commit();
        pair
    }

    fn scores(first_block: u64, metric: &str) -> Scores {
        let blocks = vec![BTreeMap::from([(metric.to_owned(), 1.0)])];
        Scores { records: 300, first_block, blocks, failed: false }
    }

    fn evaluate(pair: &mut Pair, scores: &[Scores]) {
        for session in &mut pair.0 {
            assert!(matches!(session.poll(), Task::Evaluate(_)), "{session:?}");
            session.evaluated(scores, Duration::ZERO);
        }
    }

    /// A pair that commits a step at which both know a generation of `members`.
    fn switching(plan: JobPlan, members: &[u64]) -> Pair {
        let mut pair = Pair::new(plan);
        pair.exchange_headers();
        let at = |id: &u64| (WorkerId(*id), ([127, 0, 0, 1], *id as u16).into());
        let members: Vec<_> = members.iter().map(at).collect();
        for session in &mut pair.0 {
            let (generation, members) = (Generation(2), members.clone().into());
            let membership = Membership { generation, members, abort: false };
            session.handle(MasterMessage::Membership(membership));
        }
        pair.commit();
        pair
    }

    #[test]
    fn ranks_compute_a_step_while_those_that_join_receive_the_last_one() {
        let mut pair = switching(JobPlan::of_one_epoch(100, 4), &[1, 2, 3]);
        for session in &mut pair.0 {
            let Task::Compute { ranges, .. } = session.poll() else { panic!("{session:?}") };
            assert!(session.is_switching());
            let computed = Computed { loss_sum: 1.0, compute_us: 1, ..Computed::default() };
            session.assignment.computed(computed);
            let Task::Connect(joins) = session.poll() else { panic!("{session:?}") };
            assert_eq!(joins.generation, Generation(2));
            // The gradient is part of the next step, in the group that follows.
            assert_eq!(session.header(0).ranges, ranges);
        }
    }

    #[test]
    fn ranks_switch_at_once_if_one_leaves_or_others_add_records_or_with_tables() {
        let plan = JobPlan::of_one_epoch(100, 4);
        let mut grows = plan.clone();
        grows.size.batch = Batch::PerWorker(NonZeroU64::new(4).unwrap());
        let has_tables = JobPlan { has_tables: true, ..plan.clone() };
        let joins = &[1, 2, 3][..];
        for (plan, members) in [(grows, joins), (has_tables, joins), (plan, &[1, 3, 4])] {
            let mut pair = switching(plan, members);
            assert!(matches!(pair.0[0].poll(), Task::Connect(_)), "{members:?}");
        }
    }

    /// Exchanges headers in a group of one rank.
    fn exchange_alone(session: &mut Session) {
        assert!(matches!(session.poll(), Task::ExchangeHeaders { .. }), "{session:?}");
        let headers = [session.header(0)];
        session.headers_exchanged(&headers).unwrap();
    }

    #[test]
    fn the_last_rank_stores_its_state_before_it_computes_a_step_at_which_the_others_have_ended() {
        for is_asked in [true, false] {
            let every = Some(CheckpointEvery::Steps(NonZeroU64::new(1000).unwrap()));
            let plan = JobPlan { checkpoints: every, ..JobPlan::of_one_epoch(100, 4) };
            let mut pair = Pair::new(plan);
            pair.exchange_headers();
            let headers = pair.compute();
            let session = &mut pair.0[0];
            session.summed(headers, true).unwrap();
            session.updated(Duration::ZERO);
            session.broken(None, "reset".into());
            let members = vec![(WorkerId(1), ([127, 0, 0, 1], 1).into())].into();
            let membership = Membership { generation: Generation(2), members, abort: true };
            session.handle(MasterMessage::Membership(membership));
            if is_asked {
                session.handle(MasterMessage::KeepCheckpoint);
            }
            session.connected();
            session.synced(&[session.sync_header(0)]).unwrap();
            assert_eq!(session.poll(), Task::EndRepair);
            session.repaired();
            exchange_alone(session);
            if is_asked {
                let written = Written { bytes: 1, digest: 1, rows: None };
                let task = session.poll_checkpoint();
                assert!(matches!(task, Some(Checkpoint::Write { step: 1, .. })), "{task:?}");
                session.copied_for_checkpoint(Duration::ZERO, 0);
                exchange_alone(session);
                session.wrote_part(1, Ok(written));
                exchange_alone(session);
                let task = session.poll_checkpoint();
                assert!(matches!(task, Some(Checkpoint::Commit { step: 1, .. })), "{task:?}");
                session.committed_checkpoint(1, true);
                exchange_alone(session);
            }
            assert!(matches!(session.poll(), Task::Compute { .. }), "{is_asked}: {session:?}");
            assert_eq!(session.poll_checkpoint(), None);
        }
    }

    #[test]
    fn an_evaluation_that_fails_ends_all_ranks_with_their_state() {
        let mut pair = pair(None);
        pair.0[1].halt(Halt { reason: Reason::Error("it is wrong".into()), ranges: Vec::new() });
        let failed = Scores { failed: true, ..Scores::default() };
        evaluate(&mut pair, &[scores(0, "loss"), failed]);
        pair.exchange_headers();
        pair.verify();
        let expected = Some(Ending::Failed("rank 1 (worker 2): it is wrong".into()));
        assert_eq!(pair.endings(), [expected.clone(), expected]);
        for session in &mut pair.0 {
            assert!(matches!(session.poll(), Task::Finish { .. }), "{session:?}");
            assert_eq!(session.step(), 1);
        }
    }

    #[test]
    fn scores_without_the_metric_end_all_ranks_with_one_text() {
        let mut pair = pair(None);
        evaluate(&mut pair, &[scores(0, "mae"), scores(1, "mae")]);
        pair.exchange_headers();
        pair.verify();
        let [Some(Ending::Failed(text)), Some(Ending::Failed(same))] = pair.endings() else {
            panic!("{:?}", pair.endings())
        };
        let expected = "rank 0 (worker 1): there is no metric `loss`; the model's evaluate() \
                        gives: mae; --best-metric names one of them";
        assert_eq!((text.as_str(), same), (expected, text.clone()));
    }

    #[test]
    fn the_last_evaluation_begins_when_its_checkpoint_is_complete() {
        let mut pair = pair(Some(CheckpointEvery::Steps(NonZeroU64::new(1000).unwrap())));
        for session in &mut pair.0 {
            let Some(Checkpoint::Write { step: 1, .. }) = session.poll_checkpoint() else {
                panic!("no part is to be written")
            };
            session.copied_for_checkpoint(Duration::ZERO, 0);
            session.wrote_part(1, Ok(Written { bytes: 1, digest: 1, rows: None }));
        }
        pair.exchange_headers();
        assert!(matches!(pair.0[0].poll_checkpoint(), Some(Checkpoint::Commit { step: 1, .. })));
        assert!(matches!(pair.0[0].poll(), Task::ExchangeHeaders { .. }), "{:?}", pair.0[0]);
        pair.0[0].committed_checkpoint(1, true);
        pair.exchange_headers();
        evaluate(&mut pair, &[scores(0, "loss"), scores(1, "loss")]);
        pair.verify();
        assert_eq!(pair.endings(), [Some(Ending::Done), Some(Ending::Done)]);
        assert!(pair.0.iter_mut().all(|session| session.poll_checkpoint().is_none()));
    }

    #[test]
    fn a_state_that_another_job_has_not_evaluated_is_evaluated_if_the_best_model_is_exported() {
        let evaluation =
            Plan { records: 300, metric: "loss".into(), patience: Some(2), ..Plan::default() };
        let best = Some((4, 0.5));
        let is_due = |exports_best, at, ours| {
            let plan = JobPlan {
                evaluation: Some(evaluation.clone()),
                exports_best,
                ..JobPlan::of_one_epoch(100, 4)
            };
            let mut session = Session::new(WorkerId(1), plan);
            let evaluation = Evaluation { at, best, stale: 2, is_due: false };
            let record = StateRecord { step: 8, evaluation, ..StateRecord::after(32, 100) };
            assert!(session.restore(record, ours));
            assert_eq!(session.evaluation().best, best);
            // Its patience begins anew.
            assert_eq!(session.stops_early(), ours);
            !ours && session.is_to_be_evaluated()
        };
        assert!(is_due(true, 4, false));
        assert!(!is_due(true, 8, false) && !is_due(false, 4, false) && !is_due(true, 4, true));
    }
}
