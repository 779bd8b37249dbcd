//! When the group changes, and how the membership is published.

use std::net::SocketAddr;

use elasticdl_proto::WorkerId;

use crate::job::action::{Membership, ToWorker};
use crate::job::group::choose::{Change, Limits};
use crate::job::job::{Job, Phase};
use crate::job::outbox::Timer;
use crate::job::reporting::history::name_all;
use crate::job::reporting::summary::{Cause, MembershipChange};
use crate::job::time::Time;
use crate::job::workers::table::Stage;

impl Job {
    /// Publishes the next generation if one is due, or ends the job if its group has finished.
    /// Called after every event that may change either.
    pub(crate) fn reconcile(&mut self, now: Time) {
        if !matches!(self.phase, Phase::Running | Phase::Stopping) {
            return;
        }
        self.watch_reconnections(now);
        if self.awaits_members() {
            return;
        }
        if !self.spec.work.trains() {
            return self.reconcile_inference(now);
        }
        let all_finished = self.group.members.iter().all(|m| self.group.finished.contains_key(m));
        if !self.group.members.is_empty() && all_finished {
            if !self.group.finished.values().all(|(word, _)| word.suspended) {
                return self.finish(now);
            }
            self.release_suspended(now);
        }
        if self.ends_without_state(now) {
            return;
        }
        let stopping = self.phase == Phase::Stopping;
        if stopping && self.workers.members().next().is_none() {
            return self.end_stopped();
        }
        self.watch_window(now);
        let limits = Limits {
            // A group that only has to finish its step needs no further members.
            min: if stopping { 1 } else { self.spec.min_workers as usize },
            wanted: self.wanted as usize,
            join_window_open: self.join_window_until.is_none_or(|until| now < until),
            admits: !stopping,
        };
        if let Some(change) = self.group.next(&self.workers, limits) {
            self.publish(now, change);
        }
    }

    /// Opens the join window: a group without a state waits briefly for further workers.
    fn watch_window(&mut self, now: Time) {
        let from_nothing =
            self.workers.members().next().is_none() && self.workers.joiners().next().is_some();
        if !from_nothing {
            self.join_window_until = None;
        } else if self.join_window_until.is_none() {
            let until = now + START_WINDOW;
            self.join_window_until = Some(until);
            self.out.set_timer(until, Timer::Window);
        }
    }

    fn publish(&mut self, now: Time, change: Change) {
        let Change { members, abort } = change;
        let before = std::mem::replace(&mut self.group.members, members);
        let (survivors, joined): (Vec<WorkerId>, Vec<WorkerId>) =
            self.group.members.iter().partition(|id| before.contains(id));
        self.group.previous_ring = (!abort && !before.is_empty()).then_some(before);
        let generation = self.group.generation.max(self.group.generation_floor).next();
        let (lost, mut left) =
            (std::mem::take(&mut self.group.lost), std::mem::take(&mut self.group.left));
        let excluded: Vec<WorkerId> = self.excluded();
        left.extend(&excluded);
        let hung = std::mem::take(&mut self.group.hung);
        let relink = std::mem::take(&mut self.group.relink);
        let cause = if generation.0 == 1 {
            Cause::Start
        } else if hung {
            Cause::Hung
        } else if relink || !lost.is_empty() {
            Cause::Lost
        } else if !left.is_empty() {
            Cause::Leave
        } else {
            Cause::Join
        };
        self.group.generation = generation;
        self.group.formed = false;
        // The leases of released workers end.
        self.reconnected.retain(|id, _| self.group.members.contains(id));
        self.group.report_is_due = false;
        if let Some(takeover) = &mut self.takeover {
            takeover.was_formed = false;
            takeover.has_published = true;
        }
        self.group.finished.clear();
        self.group.broken = None;
        self.join_window_until = None;

        self.assign_ranks();
        let world_size =
            u32::try_from(self.group.members.len()).expect("members are limited by max_workers");
        let record = MembershipChange {
            generation,
            cause,
            world_size,
            at_step: self.step,
            gap_ms: None,
            detect_ms: None,
            abort_ms: None,
            agree_ms: None,
            connect_ms: None,
            state_ms: None,
            first_step_ms: None,
            lost,
            left,
            joined,
        };
        let from =
            if self.spec.checkpoints.is_some() { "from the newest checkpoint" } else { "again" };
        let keeps_state = self.workers.members().any(|(_, w)| w.holds_state);
        self.group.carries_state = self.workers.members().any(|(_, w)| w.holds_state || w.fetched);
        self.group.restored = false;
        self.log_recovery();
        self.log_event(describe(&record, keeps_state, from));
        self.history.publish(record, survivors.into_iter().collect());
        self.broadcast_membership(abort, &excluded);
        self.send_donors();
        self.release_excluded(now, &excluded);
    }

    /// Live members of the previous generation that are not in the new one.
    fn excluded(&self) -> Vec<WorkerId> {
        self.workers
            .members()
            .map(|(id, _)| id)
            .filter(|id| !self.group.members.contains(id))
            .collect()
    }

    fn assign_ranks(&mut self) {
        for w in self.workers.connected.values_mut() {
            w.rank = None;
        }
        for (rank, id) in (0..).zip(&self.group.members) {
            let w = self.workers.connected.get_mut(id).expect("only live workers are chosen");
            w.rank = Some(rank);
            w.stage = Stage::Ready;
            w.joined.get_or_insert(self.group.generation);
        }
        self.count_eligible();
    }

    /// Releases workers without which a membership was published: they end by themselves at the
    /// switch.
    pub(crate) fn release_excluded(&mut self, now: Time, workers: &[WorkerId]) {
        for id in workers {
            if let Some(w) = self.workers.connected.get_mut(id) {
                w.released = true;
            }
        }
        for id in workers {
            if let Some(launch) = self.workers.connected.get(id).map(|w| w.launch) {
                self.expect_exit(now, launch);
            }
        }
    }

    /// Sends the joiners that fetch the state its current holders.
    fn send_donors(&mut self) {
        let joiners: Vec<WorkerId> = self.workers.joiners().collect();
        for id in joiners {
            let donors = self.donors(id);
            if !donors.is_empty() {
                self.send(id, ToWorker::Fetch(donors));
            }
        }
    }

    /// The members that have the group's state, in the order in which `joiner` asks them: joiners
    /// are spread over them, and the lowest rank, which reports for the group, comes last.
    pub(crate) fn donors(&self, joiner: WorkerId) -> Vec<(WorkerId, SocketAddr)> {
        let holds_state = |id: &&WorkerId| {
            self.workers.connected.get(id).is_some_and(|w| w.holds_state && !w.released)
        };
        let mut donors: Vec<(WorkerId, SocketAddr)> = self
            .group
            .members
            .iter()
            .rev()
            .filter(holds_state)
            .map(|id| (*id, self.workers.connected[id].address))
            .collect();
        if let Some(others) = donors.len().checked_sub(1).filter(|&n| n > 0) {
            donors[..others].rotate_left((joiner.0 % others as u64) as usize);
        }
        donors.truncate(DONORS_MAX);
        donors
    }

    fn broadcast_membership(&mut self, abort: bool, excluded: &[WorkerId]) {
        let address = |id: &WorkerId| (*id, self.workers.connected[id].address);
        let members = self.group.members.iter().map(address).collect();
        let membership = Membership { generation: self.group.generation, members, abort };
        self.group.published = Some(membership.clone());
        self.out.mark_dirty();
        self.reserve_id_block();
        for id in self.group.members.clone() {
            self.send(id, ToWorker::Membership(membership.clone()));
        }
        for &id in excluded {
            self.send(id, ToWorker::Membership(membership.clone()));
        }
    }
}

/// The log line of a membership change.
fn describe(record: &MembershipChange, keeps_state: bool, from: &str) -> String {
    let MembershipChange { generation, world_size, at_step, lost, left, joined, cause, .. } =
        record;
    let workers = if *world_size == 1 { "1 worker" } else { &format!("{world_size} workers") };
    if *cause == Cause::Start {
        return format!("generation {generation}: {workers} start");
    }
    let mut parts = Vec::new();
    for (ids, what) in [(lost, "lost"), (left, "left"), (joined, "joined")] {
        if !ids.is_empty() {
            parts.push(format!("{} {what}", name_all(ids)));
        }
    }
    if parts.is_empty() {
        parts.push("links broke".into());
    }
    let parts = parts.join(", ");
    match (keeps_state, *world_size) {
        (true, 1) => {
            format!("generation {generation}: {parts}; {workers} continues at step {at_step}")
        }
        (true, _) => {
            format!("generation {generation}: {parts}; {workers} continue at step {at_step}")
        }
        (false, _) => {
            format!(
                "generation {generation}: {parts}; no worker holds the state, {workers} to \
                 start {from}"
            )
        }
    }
}

/// Donors per joiner. A joiner that none of these serves gets others with the next membership. With
/// all members in every joiner's list, a thousand joiners would get a million entries.
const DONORS_MAX: usize = 8;
/// The join window: how long a group without a state waits for further workers.
const START_WINDOW: std::time::Duration = std::time::Duration::from_secs(1);
