//! Ends of processes: which are failures, and what follows. A pod that the cluster reclaims is
//! replaced while it still runs, so the user's rule for that applies when its termination begins.

use std::time::Duration;

use elasticdl_proto::{RecordRange, WorkerId};

use super::removal::ZOMBIE_GRACE;
use super::restart::{EXIT_MASTER_LOST, TooMany, describe, is_own_fault};
use super::state::Phase;
use crate::job::action::Outcome;
use crate::job::event::{Exit, LaunchId, ReclaimCause};
use crate::job::job::Job;
use crate::job::outbox::Timer;
use crate::job::policies::{ExitAction, ExitEvent, ExitRule};
use crate::job::reporting::counters::End;
use crate::job::reporting::lifetimes::WorkerEnd;
use crate::job::reporting::text::clip;
use crate::job::time::Time;
use crate::job::workers::state::Launch;
use crate::job::workers::table::worker_of;

impl Job {
    pub(crate) fn on_process_ended(&mut self, now: Time, launch: LaunchId, exit: &Exit) {
        let pod = self.workers.pod(launch);
        let Some(&first) = pod.first() else { return };
        let has_worker = self.workers.any_of_pod(first, Launch::has_registered);
        let name = self.workers.name(first, has_worker);
        // Before the launches are dropped: a worker's final report may make its exit an expected
        // one.
        let workers: Vec<WorkerId> = pod.iter().map(|&launch| worker_of(launch)).collect();
        self.forget_all(now, &workers, ZOMBIE_GRACE);
        for &launch in &pod {
            self.forget_disconnected(launch);
        }
        let ended = self.workers.drop_ended(&pod);
        self.out.mark_dirty();
        self.out.cancel_launches(&pod);
        let is_ending = match self.lifecycle.phase {
            Phase::Ended(_) => return,
            Phase::Ending(_) => true,
            Phase::Running | Phase::Stopping => false,
        };
        let (end, is_unresponsive) = match is_ending {
            true => (End::Terminated, false),
            false => self.account_for(now, &name, &ended, exit),
        };
        let text = describe(exit);
        let end = WorkerEnd { end, is_unresponsive, text: &text };
        workers.iter().for_each(|&id| self.reporting.lifetimes.end(now, id, end));
        if !is_ending {
            self.launch_missing(now);
            self.reconcile(now);
        } else if !self.workers.has_launches() {
            self.end_now();
        }
    }

    /// Counts the end of a pod, and whether it is a failure. Returns the reason, and whether the
    /// master has killed the pod because it did not respond.
    fn account_for(&mut self, now: Time, name: &str, ended: &[Launch], exit: &Exit) -> (End, bool) {
        // A worker that never reached its master was not searching for it again. One that a master
        // has refused takes the other workers of its pod along.
        let is_lost = |l: &Launch| !l.has_registered() && !l.is_excused();
        let has_lost_way = *exit == Exit::Code(EXIT_MASTER_LOST) && ended.iter().all(is_lost);
        let is_own_fault = is_own_fault(exit) || has_lost_way;
        // A node that ends a worker for exceeding a limit may send SIGTERM first, upon which the
        // worker leaves in order.
        let is_over_limit = matches!(exit, Exit::OverLimit(_));
        let is_excused = !is_over_limit && ended.iter().all(Launch::is_excused);
        let is_counted = ended.iter().any(Launch::is_counted);
        let reason = if is_excused {
            End::Terminated
        } else if is_counted {
            End::Failed
        } else {
            End::of(exit, is_own_fault)
        };
        self.reporting.count_end(reason);
        let end = describe(exit);
        if let Some(rule) = self.rule_for_end(ended, exit, is_excused) {
            let is_unresponsive = ended.iter().any(Launch::is_unresponsive);
            let end = if is_unresponsive { "did not respond, and has ended" } else { &end };
            self.apply_rule(now, &format!("{name} {end}"), rule);
            self.retire_surplus(now);
            self.reporting.explain_error(ended.iter().find_map(Launch::printed));
        } else if is_excused || is_counted {
            self.log_event(format!("{name} has ended ({end})"));
        } else if is_own_fault {
            self.count_failure(now, &format!("{name} {end}"), &[]);
            self.reporting.explain_error(ended.iter().find_map(Launch::printed));
        } else {
            self.log_event(format!("{name} {end}, which is not counted as its failure"));
        }
        (reason, reason == End::Killed && ended.iter().any(Launch::is_killed))
    }

    /// The user's rule for the end of a pod. Rules are about ends that the master has not caused,
    /// and one of them is applied to a pod.
    fn rule_for_end(&self, ended: &[Launch], exit: &Exit, is_excused: bool) -> Option<ExitRule> {
        let policies = &self.spec.policies;
        let is_own = |l: &Launch| l.is_counted() || l.is_killed() || l.is_retired();
        if self.lifecycle.is_suspended || ended.iter().any(Launch::is_ruled) {
            None
        } else if ended.iter().any(Launch::is_unresponsive) {
            policies.rule_for_event(ExitEvent::Unresponsive)
        } else if ended.iter().any(is_own) {
            None
        } else {
            // A worker whose pod is reclaimed leaves in order.
            let is_reclaimed = matches!(exit, Exit::Reclaimed { .. });
            policies.rule_for(exit).filter(|_| is_reclaimed || !is_excused)
        }
    }

    /// Does what the user wants for a pod that is being reclaimed. Returns whether there is a rule
    /// for that.
    pub(crate) fn apply_rule_for_leaving(
        &mut self,
        now: Time,
        launch: LaunchId,
        cause: ReclaimCause,
        reason: &str,
    ) -> bool {
        let is_own = |l: &Launch| l.is_killed() || l.is_retired() || l.is_ruled();
        let applies = self.lifecycle.is_active() && !self.lifecycle.is_suspended;
        if !applies || self.workers.any_of_pod(launch, is_own) {
            return false;
        }
        // The scheduler may explain a deletion before the pod has ended.
        let event = ExitEvent::of(cause).filter(|&event| event != ExitEvent::Deleted);
        let rule = event.and_then(|event| self.spec.policies.rule_for_event(event));
        let Some(rule) = rule else { return false };
        self.workers.pod_mut(launch).for_each(Launch::note_ruled);
        self.out.mark_dirty();
        let has_worker = self.workers.any_of_pod(launch, Launch::has_registered);
        let name = self.workers.name(launch, has_worker);
        self.apply_rule(now, &format!("{name} is taken away ({})", clip(reason)), rule);
        true
    }

    /// Does what the user wants for the end of a pod, which `what` describes.
    fn apply_rule(&mut self, now: Time, what: &str, rule: ExitRule) {
        let per_pod = self.spec.workers_per_pod;
        let fewer = self.lifecycle.wanted.saturating_sub(per_pod);
        match rule.action {
            ExitAction::Fail => {
                let error = format!("{what}, which fails the job (--on-exit {rule})");
                self.reporting.note_failure(&error);
                self.end(now, Outcome::Failed, Some(error));
            }
            ExitAction::Stop => {
                self.stop_because(now, format!("{what}, which stops the job (--on-exit {rule})"));
            }
            ExitAction::Ignore if fewer >= self.spec.min_workers => {
                self.log_event(format!(
                    "{what}, and is not replaced (--on-exit {rule}): {fewer} workers are wanted"
                ));
                self.lifecycle.wanted = fewer;
            }
            ExitAction::Ignore | ExitAction::Restart => {
                let why = match rule.action {
                    ExitAction::Ignore => ", because --min-workers remain",
                    _ => "",
                };
                self.log_event(format!("{what}, and is replaced (--on-exit {rule}){why}"));
                if rule.condition.is_own_fault() {
                    let start = self.lifecycle.restarts.back_off(now);
                    self.out.set_timer(start, Timer::Relaunch);
                }
            }
        }
    }

    pub(crate) fn on_hello_due(&mut self, now: Time, launch: LaunchId) {
        let l = self.workers.get_launch_mut(launch);
        let Some(silent) = l.filter(|l| !l.has_registered() && !l.is_killed()) else { return };
        silent.count_exit();
        self.release_rest_of_pod(now, launch);
        self.kill(launch);
        let what = format!("launch {} sent no message for {} s", launch.0, HELLO_WAIT.as_secs());
        self.count_failure(now, &what, &[]);
        self.reconcile(now);
    }

    /// Counts a failure, with the records that were processed if known; fails the job if it exceeds
    /// the budget.
    pub(crate) fn count_failure(&mut self, now: Time, what: &str, ranges: &[RecordRange]) {
        match self.lifecycle.phase {
            Phase::Running => {}
            // No replacement is started.
            Phase::Stopping => return self.log_event(what.to_owned()),
            Phase::Ended(_) | Phase::Ending(_) => return,
        }
        self.out.mark_dirty();
        self.reporting.note_failure(what);
        let max = self.spec.max_worker_restarts;
        let progress = if self.spec.work.trains() { self.data.step() } else { self.data.counted() };
        let error = match self.lifecycle.restarts.count(now, progress, ranges) {
            Ok(start) => {
                let counted = self.lifecycle.restarts.budget().since_progress;
                self.log_event(format!(
                    "{what} (failure {counted} of at most {max} without progress)"
                ));
                return self.out.set_timer(start, Timer::Relaunch);
            }
            Err(TooMany::Failures(counted)) => format!(
                "{what}; this is failure {counted} of workers since the job made progress, and \
                 at most {max} are allowed (--max-worker-restarts)"
            ),
            Err(TooMany::OnRecord(counted)) => format!(
                "{what}; {counted} workers have failed on the same record, and at most {max} may \
                 (--max-worker-restarts)"
            ),
        };
        self.end(now, Outcome::Failed, Some(error));
    }
}

/// How long a launch may take from its start to its hello.
pub(crate) const HELLO_WAIT: Duration = Duration::from_secs(60);
