//! Hung members: the trainer thread of a member does not return, although its control thread sends
//! heartbeats.
//!
//! A member computes for as long as it needs, and the others wait for it. What is too long follows
//! from the job itself: `--step-timeout`, or by default many times the longest usual step. Then
//! the worker reports the stacks of its threads, to its log and to the master's, and is evicted.
//! That is a failure: code that hangs at the same step each time ends the job.
//!
//! ```text
//!  all others wait ──limit──► ReportStacks ──report, STACKS_WAIT──► evicted, counted, replaced
//! ```
//!
//! A group in which no member waits and nothing is committed hangs as well. Its last member goes
//! first, so that the others, if they hold the state, can show that they live. A joiner awaits the
//! end of the previous ring's last step, so the members of that ring go before it.
//!
//! A master that takes the job over knows from heartbeats alone what the members do, until they
//! have reported their steps, which a hung member never does. If all others wait, it is evicted as
//! at any other time. If no member waits, the only one may export its last state: it gets longer.
//!
//! A job that stops loses its state if its group does not finish in time, so it gives a hung member
//! half of that time if others wait for it, and begins to wait anew when the member is gone.
//!
//! Once a member has reported its final state, it and all others wait for those that have not. The
//! lowest rank exports the model before it reports.
//!
//! A group that forms with the state of its spares does without one that hangs, if others have the
//! state as well.
//!
//! A spare hangs if it makes no step while the group makes steps for as long as a member may
//! compute. One that fetches the state anew reports step 0 until it has it.
//!
//! **Invariant:** a group that evaluates, starts from a checkpoint or waits for storage, and a
//! member that exports, are not judged by the length of the job's steps.

use std::time::Duration;

use elasticdl_proto::WorkerId;

use crate::job::action::MasterMessage;
use crate::job::job::Job;
use crate::job::outbox::Timer;
use crate::job::time::Time;
use crate::job::workers::state::Worker;
use crate::job::workers::table::launch_of;

/// A member for which the others have waited for longer than the limit, or a spare that has not
/// followed them.
struct Hung {
    worker: WorkerId,
    limit: Duration,
    /// What it did not do, as the end of a sentence.
    missing: &'static str,
}

impl Job {
    /// Asks hung members for their stacks; they are evicted soon after.
    pub(crate) fn check_for_hung(&mut self, now: Time) {
        for Hung { worker, .. } in self.hung_workers(now) {
            if !self.out.has_timer(Timer::Hung(worker)) {
                self.send(worker, MasterMessage::ReportStacks);
                self.out.set_timer(now + STACKS_WAIT, Timer::Hung(worker));
            }
        }
    }

    /// Evicts a member that was asked for its stacks, if it still hangs.
    pub(crate) fn on_hung_due(&mut self, now: Time, worker: WorkerId) {
        let hung = self.hung_workers(now).find(|hung| hung.worker == worker);
        if let Some(hung) = hung {
            self.evict_hung(now, hung, "the stacks of its threads are in its log");
            self.reconcile(now);
        }
    }

    /// Evicts a member that has reported its stacks, if it was asked for them and still hangs.
    pub(crate) fn on_stacks(&mut self, now: Time, worker: WorkerId) {
        if self.out.has_timer(Timer::Hung(worker)) {
            self.out.cancel_timer(Timer::Hung(worker));
            self.on_hung_due(now, worker);
        }
    }

    /// Evicts the members without a final report, if others have reported theirs. Returns whether
    /// there are any.
    pub(crate) fn evict_unfinished(&mut self, now: Time) -> bool {
        let limit = self.stop_wait();
        let unfinished = self.unfinished();
        let is_any = !unfinished.is_empty();
        for worker in unfinished {
            self.evict_hung(now, Hung { worker, limit, missing: FINAL_REPORT }, "it was stopped");
        }
        is_any
    }

    fn evict_hung(&mut self, now: Time, hung: Hung, note: &str) {
        let Hung { worker, limit, missing } = hung;
        let option = match (self.spec.step_timeout == Some(limit), self.lifecycle.is_stopping()) {
            (true, _) => "--step-timeout",
            (_, true) => "the job stops",
            _ => "see --step-timeout",
        };
        let seconds = (limit.as_secs_f64() * 10.0).round() / 10.0;
        let why = format!("has not {missing} within {seconds} s ({option}; {note})");
        let place = self.place_of(launch_of(worker));
        self.avoid_node_of(now, worker);
        self.count_exit(worker);
        self.evict(now, worker, &why);
        if self.lifecycle.is_running() {
            self.count_failure(now, place, &format!("worker {worker} {why}"), &[]);
        }
        self.restart_stop_wait(now);
    }

    /// Notes that the group has evaluated its model.
    pub(crate) fn note_evaluation(&mut self, now: Time) {
        let took = now.since(self.group.progressed());
        self.lifecycle.longest_evaluation = self.lifecycle.longest_evaluation.max(took);
        self.group.note_progress(now);
    }

    /// The members and spares that hang.
    fn hung_workers(&self, now: Time) -> impl Iterator<Item = Hung> + use<> {
        self.hung_members(now).into_iter().chain(self.hung_spares())
    }

    /// The spares that have not followed the group for longer than the limit.
    fn hung_spares(&self) -> Vec<Hung> {
        if !self.lifecycle.is_running() || self.spec.options.heartbeat().is_none() {
            return Vec::new();
        }
        let (limit, progressed) = (self.step_limit(), self.group.progressed());
        let hangs = |w: &Worker| w.stuck_for(progressed).is_some_and(|stuck| stuck > limit);
        let hung = self.workers.joiners().filter(|(_, w)| hangs(w));
        hung.map(|(worker, _)| Hung { worker, limit, missing: STEP_OF_GROUP }).collect()
    }

    /// The members that compute for longer than the limit while nothing else happens.
    fn hung_members(&self, now: Time) -> Vec<Hung> {
        let is_judged = self.lifecycle.is_active()
            && self.spec.options.work.trains()
            && !self.workers.has_disconnected_members()
            && !(self.group.is_broken() || self.group.awaits_explanation())
            && !self.reporting.waits_for_storage();
        let Some(heartbeat) = self.spec.options.heartbeat().filter(|_| is_judged) else {
            return Vec::new();
        };
        if let Some(since) = self.group.finishing_since() {
            return self.late_final_reports(now, since, heartbeat);
        }
        let may_do_without = self.may_do_without_computing(now);
        let limit = if may_do_without { JOIN_LIMIT } else { Duration::MAX };
        let (mut limit, is_at_end) = (self.step_limit().min(limit), self.is_at_end());
        let (mut others_wait, mut is_behind, mut computing) = (false, false, Vec::new());
        for id in self.taking_part() {
            let Some(w) = self.workers.get(id) else { continue };
            match w.stalled() {
                // Silent members are judged by the heartbeat check.
                _ if !w.is_heard(now, heartbeat) => return Vec::new(),
                None => computing.push(id),
                // It has not come back from the links of an earlier generation.
                Some(stalled) if !self.group.is_stall_of(stalled.stall()) => {
                    is_behind = true;
                    computing.push(id);
                }
                Some(stalled) if stalled.is_long(now, limit, heartbeat) => others_wait = true,
                Some(_) => return Vec::new(),
            }
        }
        // Members of the previous ring finish its last step; until then the others await them.
        if let Some(ring) = self.group.previous_ring()
            && computing.iter().any(|id| ring.contains(id))
        {
            computing.retain(|id| ring.contains(id));
        }
        if !others_wait {
            // At the end of the job it may export the model, unless it stands still at links.
            let may_export = is_at_end && !is_behind;
            limit = self.limit_without_waits(limit, may_export);
            let is_hung = self.lifecycle.is_running() && now.since(self.group.progressed()) > limit;
            computing = computing.pop().filter(|_| is_hung).into_iter().collect();
        }
        let missing = match is_at_end {
            _ if may_do_without => PART_OF_JOIN,
            true => PART_OF_END,
            false => PART_OF_STEP,
        };
        computing.into_iter().map(|worker| Hung { worker, limit, missing }).collect()
    }

    /// Whether a group forms with a state, and those of its members that wait for no other have
    /// only followed that state, which others have as well.
    fn may_do_without_computing(&self, now: Time) -> bool {
        if self.group.is_formed() || !self.group.carries_state() {
            return false;
        }
        let waits = |w: &Worker| w.stalled().is_some_and(|s| self.group.is_stall_of(s.stall()));
        let members = || self.workers.members().map(|(_, w)| w);
        let have_followed =
            members().filter(|w| !waits(w)).all(|w| w.has_state() && !w.holds_state());
        let others = self.workers.joiners().map(|(_, w)| w).filter(|w| !w.lags(now));
        have_followed && members().filter(|w| waits(w)).chain(others).any(Worker::has_state)
    }

    /// The members whose final report the others have awaited for too long since `since`.
    fn late_final_reports(&self, now: Time, since: Time, heartbeat: Duration) -> Vec<Hung> {
        let waited = now.since(since.max(self.group.progressed()));
        let is_heard =
            |&id: &WorkerId| self.workers.get(id).is_some_and(|w| w.is_heard(now, heartbeat));
        let unfinished = self.unfinished().into_iter().filter(is_heard);
        let hung = unfinished.map(|worker| {
            let exports = self.group.reporter() == Some(worker);
            let limit = match (exports, self.lifecycle.is_stopping()) {
                (false, _) => self.step_limit(),
                (true, true) => self.stop_wait() / 2,
                (true, false) => self.step_limit().max(LIMIT_UNKNOWN),
            };
            Hung { worker, limit, missing: FINAL_REPORT }
        });
        hung.filter(|hung| waited > hung.limit).collect()
    }

    /// The live members without a final report, if others have reported theirs.
    fn unfinished(&self) -> Vec<WorkerId> {
        let is_late =
            |&id: &WorkerId| !self.group.has_finished(id) && self.workers.is_connected(id);
        let members = self.group.members().iter().copied();
        members.filter(|_| self.group.finishing_since().is_some()).filter(is_late).collect()
    }

    /// How long a member may compute while the others wait.
    fn step_limit(&self) -> Duration {
        let longest = self.longest_step();
        let learned =
            if longest.is_zero() { LIMIT_UNKNOWN } else { (longest * USUAL_TIMES).max(LIMIT_MIN) };
        let limit = self.spec.step_timeout.unwrap_or(learned);
        if self.lifecycle.is_stopping() {
            // The state is lost at the end of the stop's wait.
            return limit.min((self.stop_wait() / 2).max(longest * 2));
        }
        let holds_state = self.workers.members().any(|(_, w)| w.holds_state());
        // A member that creates the state waits at no links.
        let computes = self.workers.members().any(|(_, w)| w.stalled().is_none());
        let holds_state = holds_state || self.group.is_formed() || self.group.carries_state();
        // A group that has lost rows gives its state up.
        let creates_state = computes && (!holds_state || self.reporting.has_lost_rows());
        if creates_state || self.is_evaluating() {
            limit.max(LIMIT_UNKNOWN).max(self.lifecycle.longest_evaluation * USUAL_TIMES)
        } else {
            limit
        }
    }

    /// How long nothing may be committed although no member waits.
    fn limit_without_waits(&self, limit: Duration, may_export: bool) -> Duration {
        match self.lifecycle.is_taking_over() {
            _ if may_export => limit.max(LIMIT_UNKNOWN),
            true => limit.max(LIMIT_UNKNOWN.min(limit.saturating_mul(USUAL_TIMES))),
            false => limit,
        }
    }

    /// Whether an evaluation is due at this step, or may be: at the end of the job, or because the
    /// group is further than a master that takes over knows.
    fn is_evaluating(&self) -> bool {
        let Some(validation) = &self.spec.options.validation else { return false };
        let (step, last) = (self.data.step(), self.reporting.last_evaluated());
        let is_due = |every| every > 0 && step / every > last / every;
        let is_last_due = self.is_at_end() && step > last;
        self.lifecycle.is_taking_over() || is_last_due || validation.every.is_some_and(is_due)
    }

    /// Whether the group has made its last step: it evaluates, exports and writes a checkpoint.
    pub(crate) fn is_at_end(&self) -> bool {
        self.spec.options.max_steps.is_some_and(|max| self.data.step() >= max)
            || self.data.counted() >= self.data.expected()
    }
}

/// How long a hung member may take to report the stacks of its threads.
const STACKS_WAIT: Duration = Duration::from_secs(2);
/// The least limit that is learned: users' code compiles, loads and prints in a step.
const LIMIT_MIN: Duration = Duration::from_secs(600);
/// How long a member that has followed the state may take to join its group, if others have the
/// state.
const JOIN_LIMIT: Duration = Duration::from_secs(60);
/// The limit while no step, or no evaluation, has shown how long it takes.
const LIMIT_UNKNOWN: Duration = Duration::from_secs(3600);
/// A step this many times as long as usual hangs.
const USUAL_TIMES: u32 = 20;
/// What a hung member did not do.
const PART_OF_STEP: &str = "finished its part of a step";
const STEP_OF_GROUP: &str = "made a step with its group";
const PART_OF_JOIN: &str = "joined its group";
const PART_OF_END: &str =
    "done its part of the last evaluation, checkpoint or comparison of states";
const FINAL_REPORT: &str = "reported its final state, nor exported the model,";
