//! The trainer thread of a worker, seen from the world: its start, its turns, its end.

use std::sync::mpsc::channel;

use elasticdl::session::Exit;
use elasticdl::session::halt::Ending;
use elasticdl::simulated::Placement;
use elasticdl_master::job::WorkerMessage;
use elasticdl_proto::{Generation, WorkerId};
use tokio::sync::mpsc::unbounded_channel;

use super::state::endpoint::Ring;
use super::state::thread::{Doing, ThreadId};
use super::state::trainer::Seen;
use super::trace::trace;
use super::worker::{Changed, Commit, SeenRows, Turned, Worker};
use super::world::World;

impl World {
    /// The worker has joined its job.
    pub(super) fn start_trainer(&mut self, p: usize, id: WorkerId) {
        let origin = self.origin(p);
        let trainer = &mut self.processes[p].trainer;
        let (to_trainer, inbox) = channel();
        let (outbox, from_trainer) = unbounded_channel();
        (trainer.inbox, trainer.outbox) = (Some(to_trainer), Some(from_trainer));
        let worker = Worker {
            setting: self.setting.clone(),
            id,
            origin,
            inbox,
            outbox,
            holds_state: trainer.holds_state.clone(),
            flips: trainer.flips.clone(),
            is_auditing: trainer.is_auditing.clone(),
            requests: trainer.requests.clone(),
            completions: trainer.completions.clone(),
            is_unavailable: self.checkpoint_store.is_unavailable.clone(),
        };
        self.start_thread(p, || worker.run());
    }

    /// The trainer computes a gradient of `records` records.
    pub(super) fn compute(&mut self, thread: ThreadId, records: u64) {
        let mean = self.setting.record_us * records;
        let late = if self.rng.chance(1, 100) { 40 } else { 1 };
        let span = (mean / 2 + self.rng.below(mean + 1)) * late;
        self.busy(thread, Doing::Computing, span);
    }

    /// While the storage does not answer: of `records` records, the number that a worker has read
    /// before.
    pub(super) fn read(&mut self, records: u64) -> u64 {
        let read = self.rng.below(records + 1);
        self.oracle.coverage.unread += u64::from(read < records);
        read
    }

    /// The trainer has made a turn; the next one follows.
    pub(super) fn turned(&mut self, thread: ThreadId, turned: Turned) {
        let p = thread.p;
        let Turned { changed, group, has_ended, commit, repaired, ended, wrong, .. } = turned;
        let Turned {
            flipped,
            records,
            rows,
            chunks,
            evaluated,
            has_lost_rows,
            is_not_gathered,
            replaced,
            ..
        } = turned;
        self.processes[p].threads[thread.number].answers = 0;
        let trainer = &mut self.processes[p].trainer;
        (trainer.identity, trainer.told) = (turned.identity, [trainer.told[1], 0]);
        trainer.news = 0;
        (trainer.seen.has_ended, trainer.seen.has_lost_rows) = (has_ended, has_lost_rows);
        let has_broken = trainer.has_broken;
        // Rows of the next step may be in vain. The group is left when the step is computed.
        let generation = |group: Option<(Generation, usize)>| group.map(|(of, _)| of);
        let stays = group.is_some() && generation(group) == generation(trainer.seen.group);
        trainer.has_broken = has_broken && stays;
        let builds = trainer.builds.take();
        let Seen { is_ready, group: before, .. } = &mut trainer.seen;
        let was_ready = std::mem::replace(is_ready, true);
        let was_in = std::mem::replace(before, group);
        if !was_ready {
            trace!(self, "{}: is ready", self.name(p));
        }
        // A round of unequal replicas, which the trainer has left, says nothing about NCCL.
        if let Some(builds) = builds {
            self.note_nccl_round(p, &builds);
        }
        if let Some(wrong) = wrong {
            self.violate(format!("{}: {wrong}", self.name(p)));
        }
        let digest = self.processes[p].trainer.seen.digest;
        if turned.is_installed {
            let trainer = &mut self.processes[p].trainer;
            if let (false, Some(ring)) = (std::mem::take(&mut trainer.has_created), &trainer.ring) {
                trainer.lineage = ring.lineage;
            }
            trainer.has_installed = true;
        }
        // Before a step that was committed in this turn, or after it.
        replaced.iter().for_each(|replaced| self.note_replaced(p, replaced));
        if let Some(changed) = changed {
            self.changed(p, changed, commit.is_some(), flipped.is_some());
        }
        if let Some(parameter) = flipped {
            self.note_flip(p, parameter);
        }
        if let Some(evaluated) = evaluated {
            self.check_evaluation(p, evaluated);
        }
        if commit.is_some() {
            self.note_rows(p, digest, &records);
        }
        replaced.iter().for_each(|replaced| self.note_replaced(p, replaced));
        let is_round = commit.is_some_and(|commit| commit.is_round);
        // Links may have broken just after the commit, while parameters were gathered.
        let committed_by = commit.filter(|_| is_round).and_then(|commit| commit.generation);
        let repaired_in = group.filter(|_| repaired.is_some()).map(|(generation, _)| generation);
        let by = committed_by.or(repaired_in);
        self.see_rows(p, rows, repaired.is_some(), (is_round, by));
        let is_foreseen = commit.is_some_and(|commit| commit.is_round && commit.is_foreseen);
        self.oracle.coverage.foreseen += u64::from(is_foreseen);
        self.oracle.coverage.not_gathered += u64::from(is_not_gathered);
        if let Some((step, placement)) = chunks {
            self.see_chunks(p, (step, &placement), by);
        }
        match commit {
            None => {}
            Some(Commit { generation: None, .. }) => self.oracle.coverage.followed += 1,
            Some(Commit { generation: Some(generation), is_round, .. }) => {
                self.oracle.coverage.repaired_by_result += u64::from(!is_round);
                if is_round {
                    self.processes[p].trainer.committed_in = Some(generation);
                }
                self.check_commit(p, generation, digest);
            }
        }
        if let Some(obstacle) = repaired {
            self.check_obstacle(p, obstacle);
            if let Some((generation, _)) = group {
                self.check_repaired(p, generation);
            }
        }
        if let (Some(ending), Some((generation, _))) = (ended, group) {
            trace!(self, "{}: holds the final state", self.name(p));
            match ending {
                Ending::Suspended => self.oracle.suspended = Some(generation),
                _ => self.record_final_state(p, generation),
            }
        }
        self.check_copy(p);
        // A group without some of its rows does not form.
        let has_formed = was_in.is_some_and(|(of, _)| self.oracle.histories.contains_key(&of.0));
        let may_lack_rows = self.setting.shards() > 0 && !has_formed;
        // A worker that a newer group goes on without, or not, has left in order.
        let newest = self.oracle.published.iter().map(|group| group.generation).max();
        let is_newest = was_in.is_some_and(|(of, _)| Some(of) >= newest);
        let has_left = is_newest && group.is_none() && !has_broken;
        if has_left && !may_lack_rows && self.processes[p].trainer.ring.is_none() {
            self.check_difference(p);
        }
        let span = self.thread_delay();
        self.busy(thread, Doing::Busy, span);
    }

    /// `p` has committed a step, in a round or not, or its group has agreed on a state. `by`: the
    /// generation that has, unless it was a part of a repair.
    fn see_rows(
        &mut self,
        p: usize,
        rows: Option<SeenRows>,
        is_repaired: bool,
        (is_round, by): (bool, Option<Generation>),
    ) {
        let Some(rows) = rows else {
            if is_repaired && self.setting.tables.is_some() {
                self.violate(format!("{} is repaired, and has no part in the rows", self.name(p)));
            }
            return;
        };
        self.processes[p].trainer.has_rows = true;
        let group = self.processes[p].trainer.seen.group;
        self.oracle.coverage.row_commits += u64::from(is_round);
        self.check_rows(p, group.map(|(generation, _)| generation), &rows);
        if let Some(generation) = by {
            self.note_whole((generation.0, rows.step), &rows.placement);
        }
    }

    /// `p` has committed a step, or its group has agreed on a state: who holds which chunks. `by`:
    /// as above.
    fn see_chunks(
        &mut self,
        p: usize,
        (step, placement): (u64, &Placement),
        by: Option<Generation>,
    ) {
        self.processes[p].trainer.has_rows = true;
        self.oracle.coverage.chunk_commits += 1;
        if let Some(generation) = by {
            self.check_placement(p, (generation.0, step), placement);
            self.note_whole((generation.0, step), placement);
        }
    }

    /// The state of `p` has changed, possibly by a commit or because a bit of it has flipped.
    fn changed(&mut self, p: usize, changed: Changed, has_committed: bool, has_flipped: bool) {
        let Changed { state, parameters, digest } = changed;
        let trainer = &mut self.processes[p].trainer;
        let is_new = trainer.seen.state.is_none() && state.is_some();
        let is_given_up =
            trainer.seen.has_lost_rows && trainer.seen.state.is_some() && state.is_none();
        let step_before = trainer.seen.state.as_ref().map_or(0, |state| state.step);
        let is_other = trainer.seen.digest != digest;
        let same_step =
            trainer.seen.state.as_ref().map(|s| s.step) == state.as_ref().map(|s| s.step);
        trainer.seen.state = state;
        trainer.seen.parameters = parameters;
        trainer.seen.digest = digest;
        if is_given_up {
            // The run ends with it.
            self.oracle.coverage.rows_lost += 1;
            return self.check_lost_rows(p, step_before);
        }
        // A repair gives all members the same state: it may replace one with a flipped bit.
        let may_be_mended = has_flipped || self.oracle.coverage.flipped > 0;
        if same_step && is_other && !has_committed && !may_be_mended {
            return self.violate(format!("the state of {} has changed at one step", self.name(p)));
        }
        if !is_new {
            return;
        }
        let has_installed = std::mem::take(&mut trainer.has_installed);
        if std::mem::take(&mut trainer.has_created) || has_installed {
            return;
        }
        match &trainer.ring {
            Some(ring) => {
                trainer.lineage = ring.lineage;
                self.oracle.coverage.repaired_by_state += 1;
            }
            None => self.check_fetched(p),
        }
    }

    /// `p` has fetched a state.
    fn check_fetched(&mut self, p: usize) {
        let trainer = &mut self.processes[p].trainer;
        let source = trainer.source.as_ref().and_then(|source| source.snapshot);
        let (Some((generation, lineage)), Some(step)) = (source, trainer.state().map(|s| s.step))
        else {
            return self.violate(format!("{} has a state from nowhere", self.name(p)));
        };
        trainer.lineage = lineage;
        let (is_wrong, digest) = (trainer.is_wrong(), trainer.seen.digest);
        self.oracle.is_void |= is_wrong;
        self.oracle.coverage.fetched += 1;
        if !is_wrong && !self.oracle.has_committed(generation, step, digest) {
            let what = format!("has fetched a state of step {step}");
            self.violate(format!("{}: {what} that no rank has", self.name(p)));
        }
    }

    /// The trainer has ended, and with it its process.
    pub(super) fn end_trainer(&mut self, p: usize, exit: &Result<Exit, Box<WorkerMessage>>) {
        trace!(self, "{}: is done, {exit:?}", self.name(p));
        let code = match exit {
            Ok(exit) => {
                self.check_exit(p, exit);
                let newest = self.oracle.newest.as_ref();
                let is_left = |worker| newest.is_some_and(|m| m.rank_of(worker).is_none());
                if self.processes[p].worker.is_some_and(is_left) {
                    self.note_left_rows(p);
                }
                if *exit == Exit::Outdated { 70 } else { 0 }
            }
            Err(failure) => {
                self.check_failure(p, failure);
                1
            }
        };
        self.close_endpoint(p);
        self.processes[p].trainer.ended = Some(code);
        self.wake_control(p);
    }

    /// The group's links are dropped: the peers see the end after everything that was sent.
    pub(super) fn leave_ring(&mut self, p: usize) {
        self.shut_ring(p);
        let trainer = &mut self.processes[p].trainer;
        (trainer.ring, trainer.waiting) = (None, None);
    }

    pub(super) fn shut_ring(&mut self, p: usize) {
        let links = |ring: &Ring| [ring.next, ring.prev];
        let links = self.processes[p].trainer.ring.as_ref().map(links);
        for link in links.into_iter().flatten().flatten() {
            self.shut(link, p + 1);
        }
    }

    /// Generation of the ring of `p`, if it has one.
    pub(super) fn generation_of(&self, p: usize) -> Option<Generation> {
        self.processes[p].trainer.ring.as_ref().map(|ring| Generation(ring.generation))
    }
}
