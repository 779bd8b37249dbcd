//! When the group changes, and how the membership is published.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use elasticdl_proto::{Cause, MembershipChange, WorkerId};

use crate::job::action::{MasterMessage, Membership};
use crate::job::group::choose::{Candidate, Candidates, Joiner, Limits};
use crate::job::group::generation::Change;
use crate::job::group::topology::arrange;
use crate::job::job::Job;
use crate::job::outbox::Timer;
use crate::job::text::name_all;
use crate::job::time::Time;
use crate::job::workers::state::{Launch, Stage, Worker};
use crate::job::workers::table::{WorkerTable, launch_of};

impl Candidates for WorkerTable {
    fn get(&self, worker: WorkerId) -> Option<Candidate> {
        let w = self.get(worker)?;
        Some(Candidate {
            is_released: w.is_released(),
            is_leaving: w.is_leaving(),
            holds_state: w.holds_state(),
            serves_tables: self.serves_tables(launch_of(worker)),
        })
    }

    fn joiners(&self, limits: Limits) -> impl Iterator<Item = Joiner> {
        let Limits { now, heartbeat, heard_since, .. } = limits;
        let joiners = self.joiners().filter(move |(_, w)| w.heard() >= heard_since);
        joiners.map(move |(id, w)| Joiner {
            id,
            is_caught_up: w.stage() == Stage::Ready,
            is_heard: w.is_heard(now, heartbeat),
            has_state: w.has_state(),
            step: w.followed_step().unwrap_or_default(),
            lags: w.lags(now),
        })
    }

    fn reserve(&self) -> impl Iterator<Item = WorkerId> {
        self.reserve().map(|(id, _)| id)
    }
}

impl Job {
    /// Publishes the next generation if one is due, or ends the job if its group has finished.
    /// Called after every event that may change either.
    pub(crate) fn reconcile(&mut self, now: Time) {
        if !self.lifecycle.is_active() {
            return;
        }
        self.watch_reconnections(now);
        if self.awaits_members() {
            return;
        }
        if self.lifecycle.is_suspended() && !self.lifecycle.is_stopping() {
            self.advance_suspension(now);
        }
        if !self.spec.options.work.trains() {
            return self.reconcile_inference(now);
        }
        if self.group.is_finished() {
            match self.group.take_suspended() {
                Some(step) => self.release_suspended(now, step),
                None => return self.finish(now),
            }
        }
        if self.ends_without_state(now) {
            return;
        }
        let is_stopping = self.lifecycle.is_stopping();
        let may_go_on = self.workers.has_members() || self.workers.reserve().next().is_some();
        if is_stopping && !may_go_on {
            return self.end_stopped();
        }
        self.watch_window(now);
        let is_ending = is_stopping || self.lifecycle.is_suspended();
        let heartbeat = self.spec.options.heartbeat().unwrap_or_default();
        let silence = self.spec.options.worker_timeout.map(|timeout| timeout + heartbeat);
        let limits = Limits {
            now,
            // A group that only has to finish its step needs no further members.
            min: if is_ending { 0 } else { self.spec.min_workers as usize },
            wanted: [self.lifecycle.wanted(), self.spec.options.table_servers]
                .map(|number| number as usize),
            heartbeat,
            heard_since: Time(
                silence.map_or(Duration::ZERO, |silence| now.0.saturating_sub(silence)),
            ),
            join_window_open: self.lifecycle.is_join_window_open(now),
            admits: !is_ending,
            // A group that is at its end hands nothing over.
            keeps_leavers: (self.spec.options.shard_optimizer || self.reporting.may_have_tables())
                && (self.group.is_broken() || self.is_at_end()),
        };
        if let Some(Change { members, abort }) = self.group.next(&self.workers, limits) {
            let location = |id| self.workers.get_launch(launch_of(id)).map(Launch::location);
            let members = arrange(members, location);
            self.publish(now, Change { members, abort });
        }
    }

    /// Opens the join window: a group without a state waits briefly for further workers.
    fn watch_window(&mut self, now: Time) {
        if self.workers.has_members() || self.workers.joiners().next().is_none() {
            self.lifecycle.close_join_window();
        } else if self.lifecycle.open_join_window(now + START_WINDOW) {
            self.out.set_timer(now + START_WINDOW, Timer::Window);
        }
    }

    fn publish(&mut self, now: Time, change: Change) {
        let abort = change.abort;
        let spares = self.ready_spares(now);
        let ranks: BTreeMap<WorkerId, u32> = change.members.iter().copied().zip(0..).collect();
        let Self { group, workers, reporting, .. } = self;
        let excluded = workers.assign_ranks(|id| ranks.get(&id).copied());
        let begun = group.begin(change, &excluded);
        if abort {
            // Its members repair their state, and begin the step again.
            group.note_progress(now);
        }
        for &id in group.members() {
            let w = workers.get_mut(id).expect("only live workers are chosen");
            w.join(group.generation());
            reporting.lifetimes.join(now, id);
        }
        let world_size =
            u32::try_from(group.members().len()).expect("members are limited by max_workers");
        let mut promoted = begun.joined.clone();
        let leaves = |id: &WorkerId| workers.get(*id).is_some_and(Worker::is_leaving);
        let has_vacancy = !begun.lost.is_empty() || !begun.left.is_empty();
        let replaces = has_vacancy || group.members().iter().any(leaves);
        promoted.retain(|id| replaces && spares.contains(id));
        reporting.totals.spares_promoted += promoted.len() as u64;
        let record = MembershipChange {
            generation: group.generation(),
            cause: begun.cause,
            world_size,
            at_step: self.data.step(),
            lost: begun.lost,
            left: begun.left,
            joined: begun.joined,
            promoted,
            ..MembershipChange::default()
        };
        let members = workers.members().collect::<Vec<_>>();
        let carries_state = members.iter().any(|(_, w)| w.has_state());
        self.lifecycle.note_published();
        let kept = self.reporting.newest_checkpoint().map(|kept| kept.step);
        let start = match (carries_state, &self.spec.options.checkpoints) {
            (true, _) => "",
            // All members have left in order.
            (false, Some(_)) if kept == Some(self.data.step()) => " from the newest checkpoint",
            // The workers of a former master may have written one that this one has not heard of.
            (false, Some(_))
                if self.reporting.has_checkpoint()
                    || self.spec.options.resume_from.is_some()
                    || self.masters() > 1 =>
            {
                " from the newest checkpoint, as the state is lost"
            }
            // There was none yet.
            (false, _) if self.data.step() == 0 => " from step 0",
            (false, _) => " from step 0, as the state is lost",
        };
        self.log_recovery();
        self.log_event(describe(&record, start));
        self.reporting.publish(now, record, begun.survivors.into_iter().collect());
        self.broadcast_membership(abort, carries_state, &excluded);
        self.store_last_copy();
        self.send_donors();
        self.hold_in_reserve(now, &excluded);
    }

    /// Sends the joiners that fetch the state its current holders.
    fn send_donors(&mut self) {
        let joiners: Vec<WorkerId> = self.workers.joiners().map(|(id, _)| id).collect();
        for id in joiners {
            let donors = self.donors(id);
            if !donors.is_empty() {
                self.send_fetch(id, donors);
            }
        }
    }

    /// Lets the workers that a new group has no room for follow it: the state that they have, or
    /// fetch, may be that of another member, who is gone.
    pub(crate) fn send_donors_to_spares(&mut self) {
        for id in self.workers.select(Worker::is_joiner) {
            let donors = self.donors(id);
            if let Some(w) = self.workers.get_mut(id).filter(|_| !donors.is_empty()) {
                w.set_stage(Stage::Fetching);
                self.send_fetch(id, donors);
            }
        }
    }

    /// Sends a joiner the members that it may ask for the state, and names it to them first: a
    /// member serves no other worker.
    pub(crate) fn send_fetch(&mut self, joiner: WorkerId, donors: Vec<(WorkerId, SocketAddr)>) {
        for &(donor, _) in &donors {
            self.send_joiners(donor);
        }
        self.send(joiner, MasterMessage::Fetch(donors));
    }

    /// Names all joiners to a member. Without a joiner, those that a former master has named stay:
    /// they may not have returned yet.
    pub(crate) fn send_joiners(&mut self, donor: WorkerId) {
        let joiners: Vec<WorkerId> = self.workers.joiners().map(|(id, _)| id).collect();
        if !joiners.is_empty() {
            self.send(donor, MasterMessage::Joiners(joiners));
        }
    }

    /// The members that have the group's state, in the order in which `joiner` asks them: joiners
    /// are spread over them, and the lowest rank, which reports for the group, comes last.
    pub(crate) fn donors(&self, joiner: WorkerId) -> Vec<(WorkerId, SocketAddr)> {
        let donor = |&id: &WorkerId| {
            let w = self.workers.get(id).filter(|w| w.holds_state() && !w.is_released())?;
            Some((id, w.address()))
        };
        let mut donors: Vec<(WorkerId, SocketAddr)> =
            self.group.members().iter().rev().filter_map(donor).collect();
        if let Some(others) = donors.len().checked_sub(1).filter(|&n| n > 0) {
            donors[..others].rotate_left((joiner.0 % others as u64) as usize);
        }
        donors.truncate(DONORS_MAX);
        donors
    }

    fn broadcast_membership(&mut self, abort: bool, carries_state: bool, excluded: &[WorkerId]) {
        let ids = self.group.members().to_vec();
        let address = |&id: &WorkerId| Some((id, self.workers.get(id)?.address()));
        let members = ids.iter().filter_map(address).collect();
        let membership = Membership { generation: self.group.generation(), members, abort };
        self.group.note_published(membership.clone(), carries_state);
        self.out.mark_dirty();
        self.reserve_id_block();
        for &id in ids.iter().chain(excluded) {
            self.send(id, MasterMessage::Membership(membership.clone()));
        }
    }
}

/// The log line of a membership change. `start`: where the group starts again; empty if it goes on.
fn describe(record: &MembershipChange, start: &str) -> String {
    let MembershipChange { generation, world_size, cause, .. } = record;
    let workers = if *world_size == 1 { "1 worker" } else { &format!("{world_size} workers") };
    if *cause == Cause::Start {
        let verb = if *world_size == 1 { "starts" } else { "start" };
        return format!("generation {generation}: {workers} {verb}");
    }
    let mut parts = Vec::new();
    let is_other = |id: &&WorkerId| !record.promoted.contains(id);
    let others = record.joined.iter().filter(is_other).copied().collect::<Vec<_>>();
    for (ids, what) in [
        (&record.lost, "lost"),
        (&record.left, "left"),
        (&record.promoted, "promoted"),
        (&others, "joined"),
    ] {
        if !ids.is_empty() {
            parts.push(format!("{} {what}", name_all(ids)));
        }
    }
    if parts.is_empty() {
        parts.push("links broke".into());
    }
    let parts = parts.join(", ");
    let verb = match (start, *world_size) {
        ("", 1) => "continues",
        ("", _) => "continue",
        (_, 1) => "restarts",
        (_, _) => "restart",
    };
    format!("generation {generation}: {parts}; {workers} {verb}{start}")
}

/// Donors per joiner. A joiner that none of these serves gets others with the next membership. With
/// all members in every joiner's list, a thousand joiners would get a million entries.
const DONORS_MAX: usize = 8;
/// The join window: how long a group without a state waits for further workers.
const START_WINDOW: Duration = Duration::from_secs(1);
