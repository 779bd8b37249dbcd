//! Two living masters: another master takes the job over, and the former one, which was stopped or
//! cut off from its Lease, continues to act until it learns that.
//!
//! The former master is the worst that a cluster can have. The shipped one disconnects its workers
//! before its Lease expires; this one keeps some of its streams, admits workers that dial it,
//! publishes memberships, and kills pods. What protects the job are the incarnations and the
//! reserved ids: the former master's writes change nothing, so it can neither end the job nor use
//! an id that its successor may use.
//!
//! **Oracle:** no two masters publish one generation with different members; a worker that a newer
//! master has welcomed accepts no older one; a former master ends no job. Its groups, and those of
//! its successor, follow the rules of steps and records as all others.

use std::collections::BTreeSet;
use std::mem;

use elasticdl_master::job::{MasterMessage, Membership};
use elasticdl_proto::WorkerId;

use super::state::event::Event;
use super::state::faults::Undo;
use super::state::master::{FormerMaster, Master};
use super::state::network::{LinkId, MASTER};
use super::trace::trace;
use super::world::World;

impl World {
    /// Another master takes the job over from one that lives, in a cluster.
    /// Possibly with the loss of `p`, to which both respond.
    pub(super) fn replace_master(&mut self, p: usize) {
        let is_led = self.master.is_alive && self.master.outcome.is_none();
        if !self.setting.may_restore_stale || !is_led || self.former_master.is_some() {
            return;
        }
        self.oracle.coverage.masters_replaced += 1;
        self.oracle.on_master_crash();
        self.fault_plan.links_may_break = true;
        let streams: BTreeSet<LinkId> = self.net.links_of(MASTER).into_iter().collect();
        let next = Master::new(self.setting.spec.clone());
        let mut former = mem::replace(&mut self.master, next);
        self.master.incarnation = former.incarnation;
        self.master.records = former.records.clone();
        self.master.commands = mem::take(&mut former.commands);
        former.is_replaced = true;
        former.persists = false;
        former.woken = false;
        former.due = None;
        former.dies_after = None;
        former.ended.clear();
        former.paused |= self.rng.chance(1, 2);
        let is_paused = former.paused;
        self.former_master = Some(Box::new(FormerMaster { master: former, streams }));
        for p in 0..self.processes.len() {
            self.processes[p].is_degraded = true;
            self.lose_contact(p);
        }
        self.lose_some_streams();
        if is_paused {
            self.heal_much_later(Undo::ContinueMaster);
        }
        self.heal_much_later(Undo::EndFormerMaster);
        self.restart_master();
        if self.rng.chance(1, 2) {
            self.crash(p);
        }
        self.as_former_master(Self::wake_master);
    }

    /// Does something as the former master, if there is one.
    pub(super) fn as_former_master(&mut self, act: impl FnOnce(&mut Self)) {
        let Some(mut former) = self.former_master.take() else { return };
        mem::swap(&mut self.master, &mut former.master);
        act(self);
        mem::swap(&mut self.master, &mut former.master);
        let is_alive = former.master.is_alive;
        self.former_master = Some(former);
        if !is_alive {
            self.end_former_master();
        }
    }

    pub(super) fn on_former_master(&mut self) {
        if self.former_master.as_ref().is_some_and(|former| !former.master.paused) {
            self.as_former_master(Self::on_master);
        }
    }

    /// The former master was stopped, and runs again. Some workers search for a master just then.
    pub(super) fn wake_former_master(&mut self) {
        self.as_former_master(|world| {
            world.master.paused = false;
            world.wake_master();
            world.lose_some_streams();
        });
    }

    fn lose_some_streams(&mut self) {
        let streams = self.processes.iter().filter(|p| p.is_alive()).filter_map(|p| p.stream);
        for stream in streams.collect::<Vec<_>>() {
            if self.rng.chance(1, 2) {
                self.lose(stream);
            }
        }
    }

    /// The former master has learned that another one leads.
    pub(super) fn end_former_master(&mut self) {
        let Some(former) = self.former_master.take() else { return };
        trace!(self, "former master: ends");
        former.streams.into_iter().for_each(|link| self.shut(link, MASTER));
    }

    /// Opens a stream from `p` to a master. A worker can't tell which one answers at the job's
    /// address.
    pub(super) fn dial_master(&mut self, p: usize) -> LinkId {
        let link = self.net.open(p + 1, MASTER, true);
        if let Some(former) = &mut self.former_master
            && self.rng.chance(1, 2)
        {
            former.streams.insert(link);
        }
        link
    }

    /// The streams that the leader has not closed.
    pub(super) fn streams_of_leader(&self) -> Vec<LinkId> {
        let former = self.former_master.as_ref();
        let is_of_former =
            |link: &LinkId| former.is_some_and(|former| former.streams.contains(link));
        self.net.links_of(MASTER).into_iter().filter(|link| !is_of_former(link)).collect()
    }

    /// Whether the master at the other end of `stream` is stopped.
    pub(super) fn hangs(&self, stream: LinkId) -> bool {
        match &self.former_master {
            Some(former) if former.streams.contains(&stream) => former.master.paused,
            _ => self.master.paused,
        }
    }

    /// A worker that has been welcomed by a newer master dials this one.
    pub(super) fn on_newer_incarnation(&mut self, link: LinkId) {
        if !self.master.is_replaced {
            return self.violate("a worker knows a newer master than the leader".into());
        }
        self.shut(link, MASTER);
        self.master.is_alive = false;
    }

    /// The former master admits `worker`. The leader does without it.
    pub(super) fn follow_former_master(&mut self, p: usize, worker: WorkerId) {
        self.oracle.processes.insert(worker, p);
        self.processes[p].is_degraded = true;
        self.processes[p].lost_contact = true;
    }

    /// Whether the leader has a worker, or waits for it.
    pub(super) fn is_known_to_leader(&self, worker: WorkerId) -> bool {
        let status = self.master.job.status(self.time());
        let mut awaited = status.workers_disconnected.iter().map(|it| it.worker);
        awaited.any(|id| id == worker) || status.workers.iter().any(|it| it.worker == worker)
    }

    // ---- checks ----

    /// Checks that no other membership has this generation.
    pub(super) fn check_unique(&mut self, membership: &Membership) {
        let generation = membership.generation;
        let mut published = self.oracle.published.iter();
        if published.any(|other| other.generation == generation && other != membership) {
            self.violate(format!("two memberships have generation {generation}: {membership:?}"));
        }
    }

    pub(super) fn check_message_of_replaced(&mut self, message: &MasterMessage) {
        let MasterMessage::Membership(membership) = message else { return };
        self.check_unique(membership);
        if !self.oracle.published.contains(membership) {
            self.oracle.coverage.published_by_replaced += 1;
            self.oracle.published.push(membership.clone());
        }
    }

    /// Checks that the acting master leads the job.
    pub(super) fn check_leads(&mut self, does: &str) {
        if self.master.is_replaced {
            self.violate(format!("a master that was replaced {does}"));
        }
    }
}

impl Master {
    /// The event of its wake-up.
    pub(super) fn event(&self) -> Event {
        if self.is_replaced { Event::FormerMaster } else { Event::Master }
    }

    /// Name in the trace.
    pub(super) fn name(&self) -> &'static str {
        if self.is_replaced { "former master" } else { "master" }
    }
}
