//! Ends of processes: which are failures, and what follows.

use std::time::Duration;

use elasticdl_proto::RecordRange;

use super::removal::ZOMBIE_GRACE;
use super::restart::{EXIT_MASTER_LOST, TooMany, describe, is_own_fault};
use super::state::Phase;
use crate::job::action::Outcome;
use crate::job::event::{Exit, LaunchId};
use crate::job::job::Job;
use crate::job::outbox::Timer;
use crate::job::reporting::counters::End;
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
        for &launch in &pod {
            self.forget(now, worker_of(launch), ZOMBIE_GRACE);
            self.forget_disconnected(launch);
        }
        let ended = self.workers.drop_ended(&pod);
        self.out.mark_dirty();
        self.out.cancel_launches(&pod);
        match self.lifecycle.phase {
            Phase::Ended(_) => {}
            Phase::Ending(_) if !self.workers.has_launches() => self.end_now(),
            Phase::Ending(_) => {}
            Phase::Running | Phase::Stopping => {
                self.account_for(now, &name, &ended, exit);
                self.launch_missing(now);
                self.reconcile(now);
            }
        }
    }

    /// Counts the end of a pod, and whether it is a failure.
    fn account_for(&mut self, now: Time, name: &str, ended: &[Launch], exit: &Exit) {
        // A worker that never reached its master was not searching for it again.
        let has_lost_way =
            *exit == Exit::Code(EXIT_MASTER_LOST) && ended.iter().all(|l| !l.has_registered());
        let is_own_fault = is_own_fault(exit) || has_lost_way;
        let is_excused = ended.iter().all(Launch::is_excused);
        let is_counted = ended.iter().any(Launch::is_counted);
        self.reporting.count_end(if is_excused {
            End::Terminated
        } else if is_counted {
            End::Failed
        } else {
            End::of(exit, is_own_fault)
        });
        let end = describe(exit);
        if is_excused || is_counted {
            self.log_event(format!("{name} has ended ({end})"));
        } else if is_own_fault {
            self.count_failure(now, &format!("{name} {end}"), &[]);
            self.reporting.explain_error(ended.iter().find_map(Launch::printed));
        } else {
            self.log_event(format!("{name} {end}, which is not counted as its failure"));
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
