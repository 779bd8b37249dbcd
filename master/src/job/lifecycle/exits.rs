//! Ends of processes: which are failures, and what follows. A pod that the cluster reclaims is
//! replaced while it still runs, so the user's rule for that applies when its termination begins.

use elasticdl_proto::{RecordRange, WorkerId};

use super::failed_slots::{FailedSlots, Place};
use super::removal::ZOMBIE_GRACE;
use super::restart::{EXIT_MASTER_LOST, TooMany, describe, is_kill, is_own_fault, is_term};
use super::state::Phase;
use crate::job::action::Outcome;
use crate::job::event::{Exit, LaunchId, ReclaimCause};
use crate::job::job::Job;
use crate::job::outbox::Timer;
use crate::job::policies::{ExitAction, ExitEvent, ExitRule};
use crate::job::reporting::counters::End;
use crate::job::reporting::lifetimes::WorkerEnd;
use crate::job::text::{clip, counted};
use crate::job::time::Time;
use crate::job::workers::state::Launch;
use crate::job::workers::table::worker_of;

impl Job {
    pub(crate) fn on_process_ended(&mut self, now: Time, launch: LaunchId, exit: &Exit) {
        let pod = self.workers.pod(launch);
        let Some(&first) = pod.first() else { return };
        let has_worker = self.workers.any_of_pod(first, Launch::has_registered);
        let name = self.workers.name(first);
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
            false => self.account_for(now, (first, &name), &ended, exit),
        };
        let text = describe(exit);
        let end = WorkerEnd { end, is_unresponsive, text: &text };
        workers.iter().for_each(|&id| self.reporting.lifetimes.end(now, id, end));
        if self.lifecycle.phase == Phase::Ending(Outcome::Completed)
            && has_worker
            && matches!(exit, Exit::Code(code) if *code != 0)
        {
            self.log_event(format!("{name} {text} after the job was complete"));
        }
        if !is_ending {
            self.launch_missing(now);
            self.reconcile(now);
        } else if !self.workers.has_launches() {
            self.end_now();
        }
    }

    /// Counts the end of a pod, and whether it is a failure. Returns the reason, and whether the
    /// master has killed the pod because it did not respond.
    fn account_for(
        &mut self,
        now: Time,
        (launch, name): (LaunchId, &str),
        ended: &[Launch],
        exit: &Exit,
    ) -> (End, bool) {
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
        // The kubelet of newer servers evicts by SIGTERM, and the pod of a worker that then leaves
        // in order shows no reason.
        let is_signalled = is_excused && is_term(exit) && ended.iter().any(Launch::is_signalled);
        let reason = if is_signalled {
            End::Killed
        } else if is_excused {
            End::Terminated
        } else if is_counted {
            End::Failed
        } else {
            End::of(exit, is_own_fault)
        };
        self.reporting.count_end(reason);
        let end = describe(exit);
        let node = ended.first().map(|l| l.location().node.clone()).unwrap_or_default();
        if let Some(rule) = self.rule_for_end(ended, exit, is_excused) {
            let is_unresponsive = ended.iter().any(Launch::is_unresponsive);
            let slots = self.spec.server_slots();
            let serves_tables = ended.iter().any(|l| slots.contains(&l.slot()));
            let end = if is_unresponsive { "did not respond, and has ended" } else { &end };
            self.apply_rule(now, &format!("{name} {end}"), rule, serves_tables);
            self.retire_surplus(now);
            self.reporting.explain_error(ended.iter().find_map(Launch::printed));
        } else if is_signalled {
            let what = format!("{name} has left after a SIGTERM of unknown origin");
            self.count_kill(now, launch, None, &what);
        } else if is_excused || is_counted {
            self.log_event(format!("{name} ended ({end})"));
        } else if is_own_fault {
            self.lifecycle.avoid_node(now, &node);
            let never_joined = !ended.iter().any(Launch::has_registered);
            if !never_joined {
                self.lifecycle.exited_at = Some(self.data.step());
                self.store_last_copy();
            }
            let place = ended.first().map(FailedSlots::place);
            self.account_for_own_fault(now, place, &format!("{name} {end}"), never_joined, exit);
            let printed = ended.iter().find_map(Launch::printed);
            self.reporting.explain_error(printed);
            // A panic ends with a note about its backtrace.
            let is_told = |line: &&str| !line.starts_with("note: ");
            let last = printed.and_then(|lines| lines.lines().rfind(is_told));
            if let Some(last) = last.filter(|_| self.lifecycle.is_running()) {
                self.log_event(format!("the log of {name} ends with: {}", last.trim()));
            }
        } else if is_kill(exit) && !ended.iter().any(Launch::is_killed) {
            let why = ended.iter().find_map(Launch::explanation);
            let why = why.map(|why| format!(" ({why})")).unwrap_or_default();
            let slot = ended.first().map_or(0, Launch::slot);
            self.note_fault_of(now, &node, &format!("{name} {end}{why}"));
            self.count_kill(now, launch, Some(slot), &format!("{name} {end}{why}"));
        } else {
            if is_fault_of_node(exit) && !ended.iter().any(Launch::is_killed) {
                self.note_fault_of(now, &node, &format!("{name} {end}"));
            }
            self.log_event(format!("{name} {end} (not counted as a failure)"));
        }
        (reason, reason == End::Killed && ended.iter().any(Launch::is_killed))
    }

    fn account_for_own_fault(
        &mut self,
        now: Time,
        place: Option<Place>,
        what: &str,
        never_joined: bool,
        exit: &Exit,
    ) {
        // The first workers of a job lack the program, so its image does.
        if let Exit::NotStarted(error) = exit
            && never_joined
            && self.work_done() == 0
            && self.lifecycle.is_running()
            && lacks_program(error)
        {
            self.reporting.note_failure(what);
            let error = format!("{what}; another start would not change that: {NAME_PROGRAM}");
            return self.end(now, Outcome::Failed, Some(error));
        }
        let is_exit = matches!(exit, Exit::Code(code) if *code != EXIT_MASTER_LOST);
        if !never_joined || !is_exit {
            return self.count_failure(now, place, what, &[]);
        }
        // A program that ends in peace without joining does so every time, and so does one that
        // refuses its arguments. A second worker confirms that it is not trouble of one slot.
        let node = place.as_ref().map_or("", |place| &place.node);
        let why = match exit {
            Exit::Code(0) => Some(MUST_JOIN),
            // Another node may have the script that this one lacks.
            Exit::Code(EXIT_USAGE) if node.is_empty() => Some(REFUSES),
            _ => None,
        };
        // A former master may have heard of one that is not known to have joined.
        let is_known = self.data.files().is_none() && self.masters() == 1;
        let why = why.filter(|_| is_known && self.lifecycle.is_running());
        let slot = place.as_ref().map(|place| place.slot);
        if let Some(why) = why.filter(|_| self.speaks_for_all(slot, exit)) {
            let error = format!("{what} and never joined the job: {why}");
            self.reporting.note_failure(&error);
            let outcome = match exit {
                Exit::Code(EXIT_USAGE) => Outcome::InvalidInput,
                _ => Outcome::Failed,
            };
            return self.end(now, outcome, Some(error));
        }
        self.count_failure(now, place, &format!("{what} and never joined the job"), &[]);
    }

    /// Whether a worker that exited before it joined shows what every other worker would do: none
    /// has joined, and there is no other one, or the last one, of another slot, exited alike.
    fn speaks_for_all(&mut self, slot: Option<u32>, exit: &Exit) -> bool {
        let last = self.lifecycle.exited_unjoined.replace((slot, exit.clone()));
        let is_confirmed = last.is_some_and(|(of, alike)| of != slot && alike == *exit);
        let others = || self.workers.launches().map(|(_, l)| l).filter(|l| !l.is_killed());
        let is_alone = || !others().any(|l| l.stays() && Some(l.slot()) != slot);
        !others().any(Launch::has_registered) && (is_confirmed || is_alone())
    }

    /// Counts a kill from outside; fails the job if there are too many without progress. The
    /// replacement waits, unless it was started when the worker began to leave: `slot` is `None`.
    fn count_kill(&mut self, now: Time, launch: LaunchId, slot: Option<u32>, what: &str) {
        if !self.lifecycle.is_running() {
            return self.log_event(format!("{what} (not counted as a failure)"));
        }
        let (progress, newest) = (self.work_done(), LaunchId(self.workers.launches_made()));
        let error = match self.lifecycle.restarts.count_kill(now, progress, launch, newest) {
            Ok(()) => {
                let kills = self.lifecycle.restarts.budget().kills_since_progress;
                let how_often = match kills {
                    0 | 1 => String::new(),
                    kills => {
                        let most = self.lifecycle.restarts.kills_max();
                        format!(" (kill {kills} of at most {most} without progress)")
                    }
                };
                let start =
                    slot.map_or(now, |slot| self.lifecycle.restarts.delay_killed(now, slot));
                let pause = match (start.since(now).as_secs_f64() * 100.0).round() / 100.0 {
                    0.0 => String::new(),
                    pause => format!("; the next one starts after {pause} s"),
                };
                self.log_event(format!("{what} (not counted as a failure){how_often}{pause}"));
                return self.out.set_timer(start, Timer::Relaunch);
            }
            Err(_) => {
                let kills = self.lifecycle.restarts.budget().kills_since_progress;
                format!(
                    "{what}; workers were killed {kills} times, after ever longer pauses, since \
                     the job made progress: something on the machine ends them, or they run out \
                     of memory or of disk space"
                )
            }
        };
        self.reporting.note_failure(&error);
        self.end(now, Outcome::Failed, Some(error));
    }

    /// What the budget of failures is measured by: steps, or records of an inference job.
    pub(crate) fn work_done(&self) -> u64 {
        if self.spec.options.work.trains() { self.data.step() } else { self.data.counted() }
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
        let name = self.workers.name(launch);
        self.apply_rule(
            now,
            &format!("{name} is being removed by the cluster ({})", clip(reason)),
            rule,
            self.workers.serves_tables(launch),
        );
        true
    }

    /// Does what the user wants for the end of a pod, which `what` describes.
    fn apply_rule(&mut self, now: Time, what: &str, rule: ExitRule, serves_tables: bool) {
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
            ExitAction::Ignore if !serves_tables && fewer >= self.spec.min_workers => {
                self.log_event(format!(
                    "{what}, and is not replaced (--on-exit {rule}); {} remain",
                    counted(fewer.into(), "worker")
                ));
                self.lifecycle.wanted = fewer;
                self.lifecycle.limit_autoscale(fewer);
            }
            ExitAction::Ignore | ExitAction::Restart => {
                let why = match rule.action {
                    ExitAction::Ignore if serves_tables => ", as all table servers are",
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

    /// Expects a launch to join the job within the start timeout.
    pub(crate) fn await_hello(&mut self, now: Time, launch: LaunchId) {
        self.out.set_timer(now + self.spec.start_timeout, Timer::Hello(launch));
    }

    /// A launch has used the processor or done I/O: its start may take longer.
    pub(crate) fn on_launch_is_busy(&mut self, now: Time, launch: LaunchId) {
        let joins = self.workers.get_launch(launch).is_some_and(|l| !l.has_registered());
        if joins && self.out.has_timer(Timer::Hello(launch)) {
            self.out.cancel_timer(Timer::Hello(launch));
            self.await_hello(now, launch);
        }
    }

    pub(crate) fn on_hello_due(&mut self, now: Time, launch: LaunchId) {
        let l = self.workers.get_launch_mut(launch);
        let Some(silent) = l.filter(|l| !l.has_registered() && !l.is_killed()) else { return };
        silent.count_exit();
        self.release_rest_of_pod(now, launch);
        self.kill(launch);
        let what = format!(
            "worker {} has not joined the job for {} s (--start-timeout): {MUST_JOIN}",
            launch.0,
            self.spec.start_timeout.as_secs()
        );
        self.avoid_node_of(now, worker_of(launch));
        if self.has_worked() {
            self.note_fault_of_node(now, launch, "did not join");
        }
        self.count_failure(now, self.place_of(launch), &what, &[]);
        self.reconcile(now);
    }

    /// The place of a launch.
    pub(crate) fn place_of(&self, launch: LaunchId) -> Option<Place> {
        self.workers.get_launch(launch).map(FailedSlots::place)
    }

    /// Counts a failure at `place`, with the records that were processed if known; fails the job if
    /// it exceeds the budget, unless the trouble is local.
    pub(crate) fn count_failure(
        &mut self,
        now: Time,
        place: Option<Place>,
        what: &str,
        ranges: &[RecordRange],
    ) {
        match self.lifecycle.phase {
            Phase::Running => {}
            // No replacement is started.
            Phase::Stopping => return self.log_event(what.to_owned()),
            Phase::Ended(_) | Phase::Ending(_) => return,
        }
        self.out.mark_dirty();
        self.reporting.note_failure(what);
        let max = self.spec.max_worker_restarts;
        let result = self.lifecycle.restarts.count(now, self.work_done(), ranges);
        let since_progress = self.lifecycle.restarts.budget().since_progress;
        self.lifecycle.failed_slots.note(place, since_progress);
        let error = match result {
            Ok(start) => {
                self.log_event(format!(
                    "{what} (failure {since_progress} of at most {max} without progress)"
                ));
                let can_wait = self.lifecycle.failed_slots.stubborn().is_some()
                    && self.can_train_without_failed();
                let start = match can_wait {
                    true => self.lifecycle.restarts.delay_longer(now, start),
                    false => start,
                };
                return self.out.set_timer(start, Timer::Relaunch);
            }
            Err(TooMany::Failures(_)) if max > 0 && self.can_train_without_failed() => {
                self.log_event(format!(
                    "{what} (failure {since_progress} without progress, all in one slot, on one \
                     node, or of workers that never joined; the others can train)"
                ));
                let start = self.lifecycle.restarts.wait_long(now);
                return self.out.set_timer(start, Timer::Relaunch);
            }
            Err(TooMany::Failures(failures) | TooMany::Kills(failures)) => format!(
                "{what}; giving up after {} without progress (--max-worker-restarts {max})",
                counted(failures.into(), "failure")
            ),
            Err(TooMany::OnRecord(failures)) => format!(
                "{what}; giving up after {} on the same record (--max-worker-restarts {max})",
                counted(failures.into(), "failure")
            ),
        };
        self.give_up(now, error);
    }

    /// Whether all failures without progress are the trouble of one slot or node, and enough
    /// workers of other slots run or start.
    fn can_train_without_failed(&self) -> bool {
        let failed = &self.lifecycle.failed_slots;
        let is_other = |(launch, l): &(LaunchId, &Launch)| {
            let may_train = l.stays() && !l.is_killed() && !self.workers.serves_tables(*launch);
            may_train && !l.is_counted() && !failed.contains(l.slot())
        };
        let others = self.workers.launches().filter(is_other).count();
        failed.are_local() && others >= self.spec.min_workers as usize
    }
}

/// Whether a node is lost, or could not start a worker that others can.
fn is_fault_of_node(exit: &Exit) -> bool {
    use ReclaimCause::{NodeLost, NotStarted};
    matches!(exit, Exit::Reclaimed { cause: NodeLost | NotStarted, .. })
}

/// Whether a container runtime says that the image does not have the program.
fn lacks_program(error: &str) -> bool {
    let reasons = ["executable file not found", "no such file or directory", "permission denied"];
    error.contains("exec: \"") && reasons.iter().any(|reason| error.contains(reason))
}

/// By convention a program ends with this code if it refuses its arguments. Workers end with it if
/// their environment is not that of a job.
const EXIT_USAGE: i32 = 2;
const REFUSES: &str = "this code says that its arguments are wrong, or its script does not exist, \
                       which another start would not change";
const NAME_PROGRAM: &str = "the program after `--` must be one that the image has";
/// What a program of a worker has to do.
const MUST_JOIN: &str = "it must call elasticdl::run() (Rust) or elasticdl.torch.join() (Python)";
