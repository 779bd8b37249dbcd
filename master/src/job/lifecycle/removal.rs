//! How workers and their processes are removed: four verbs, each with one meaning.
//!
//! | verb | |
//! |---|---|
//! | release | asks a worker to end; its process is killed if it does not in time |
//! | evict | removes a worker against its will: closes its stream, forgets it, kills its process |
//! | forget | drops a worker whose stream or process has ended; its launch stays until its process has ended |
//! | kill | ends the processes of a pod at once |
//!
//! A member that leaves is not released at once. The membership without it puts it in **reserve**:
//! it switches with the others, or loses its links, and keeps its state. If the new group loses a
//! member before it has formed, the next one may take the reserve back. When a group has formed,
//! the reserve is released.
//!
//! When one worker of a pod goes, the others are released.

use std::time::Duration;

use elasticdl_proto::WorkerId;

use crate::job::action::{Action, MasterMessage};
use crate::job::event::LaunchId;
use crate::job::job::Job;
use crate::job::outbox::Timer;
use crate::job::time::Time;
use crate::job::workers::state::{Launch, Worker};
use crate::job::workers::table::{launch_of, worker_of};

impl Job {
    // ---- release ----

    /// Asks a worker to leave.
    pub(crate) fn release(&mut self, now: Time, worker: WorkerId, reason: &str) {
        let Some(w) = self.workers.get_mut(worker) else { return };
        w.release();
        self.expect_exit(now, launch_of(worker));
        self.send(worker, MasterMessage::release(reason));
    }

    /// Releases the workers of this launch's pod: members leave with the next membership; workers
    /// that are not members leave when no member of the pod remains.
    pub(crate) fn release_pod(&mut self, now: Time, launch: LaunchId, reason: &str) {
        let workers = self.workers.workers_of_pod(launch);
        if self.spec.options.work.trains() && workers.iter().any(|&id| self.workers.is_member(id)) {
            for id in workers {
                self.workers.get_mut(id).expect("it was just found").leave();
            }
            return;
        }
        for id in workers {
            // The previous release may have released it too. The reserve waits for the new group.
            if self.workers.get(id).is_some_and(|w| !w.is_released() && !w.is_reserve()) {
                self.release(now, id, reason);
            }
        }
    }

    /// Releases the other workers of a worker's pod.
    pub(crate) fn release_rest_of_pod(&mut self, now: Time, launch: LaunchId) {
        // A group that is finishing its step needs all of its members.
        if self.spec.workers_per_pod > 1 && self.lifecycle.is_running() {
            self.release_pod(now, launch, "another worker of its pod goes");
        }
    }

    /// Keeps workers in reserve without which a membership was published.
    pub(crate) fn hold_in_reserve(&mut self, now: Time, workers: &[WorkerId]) {
        for &id in workers {
            if let Some(w) = self.workers.get_mut(id) {
                w.leave();
            }
            // Its step is no concern of the new group.
            self.lifecycle.forget_worker(id);
        }
        for &id in workers {
            if self.workers.is_connected(id) {
                self.excuse_exit(launch_of(id));
                self.release_rest_of_pod(now, launch_of(id));
            }
        }
    }

    /// Releases the reserve: the newest group has formed.
    pub(crate) fn release_reserve(&mut self, now: Time) {
        for id in self.workers.select(Worker::is_reserve) {
            self.release(now, id, "the group goes on without it");
        }
    }

    /// Handles a worker that has received SIGTERM.
    pub(crate) fn on_leaving(&mut self, now: Time, worker: WorkerId) {
        let Some(w) = self.workers.get_mut(worker).filter(|w| w.stays()) else { return };
        w.leave();
        let (launch, is_member) = (launch_of(worker), w.is_member());
        self.workers.pod_mut(launch).for_each(Launch::leave_by_signal);
        self.out.mark_dirty();
        self.log_event(format!("worker {worker} has received SIGTERM and leaves"));
        if is_member && self.spec.options.work.trains() {
            self.out.set_timer(now + self.spec.options.leave_wait(), Timer::Leave(worker));
        } else {
            self.release(now, worker, "it leaves");
        }
        self.release_rest_of_pod(now, launch);
        self.launch_missing(now);
        self.watch_leavers(now);
        self.reconcile(now);
    }

    /// Releases a leaving worker that no group has gone on without in time: its grace period is
    /// limited.
    pub(crate) fn on_leave_due(&mut self, now: Time, worker: WorkerId) {
        let may_hold = |w: &Worker| w.is_reserve() || (w.is_member() && !w.is_released());
        let waits = self.workers.get(worker).is_some_and(may_hold);
        if waits && self.lifecycle.is_running() {
            self.release(now, worker, "no worker took over its state in time");
        }
    }

    /// Marks the exit of a process as expected; the process is killed if it does not end in time.
    pub(crate) fn expect_exit(&mut self, now: Time, launch: LaunchId) {
        if self.excuse_exit(launch) {
            self.out.set_timer(now + RELEASE_WAIT, Timer::Kill(launch));
            self.release_rest_of_pod(now, launch);
        }
    }

    /// Marks the exit of a process as expected. Returns whether it runs.
    fn excuse_exit(&mut self, launch: LaunchId) -> bool {
        let Some(l) = self.workers.get_launch_mut(launch) else { return false };
        l.leave();
        l.expect_exit_unless_counted();
        self.out.mark_dirty();
        true
    }

    // ---- evict ----

    /// Evicts a worker that can't be reached, although its process may run.
    pub(crate) fn evict(&mut self, now: Time, worker: WorkerId, why: &str) {
        let Some(w) = self.workers.get(worker) else { return };
        let is_member = w.is_member();
        self.log_event(format!("{} {why} and is evicted", self.workers.name_of(worker)));
        self.out.push(Action::Disconnect { worker });
        self.forget_with_pod(now, worker, ZOMBIE_GRACE);
        if is_member {
            self.group.note_hung();
        }
        self.group.clear_suspicion();
        self.kill_unresponsive(now, launch_of(worker));
    }

    /// Evicts a worker that sent an invalid message. This is a failure.
    pub(crate) fn fail_worker(&mut self, now: Time, worker: WorkerId, reason: &str) {
        if !self.workers.is_connected(worker) {
            return;
        }
        self.count_exit(worker);
        self.send(worker, MasterMessage::release(reason));
        self.out.push(Action::Disconnect { worker });
        self.forget_with_pod(now, worker, ZOMBIE_GRACE);
        let what = format!("worker {worker} is evicted: {reason}");
        self.count_failure(now, self.place_of(launch_of(worker)), &what, &[]);
        self.reconcile(now);
    }

    /// Evicts a disconnected worker whose links broke too.
    pub(crate) fn evict_disconnected(&mut self, now: Time, launch: LaunchId) {
        self.log_event(format!("worker {} is lost: its stream and its links ended", launch.0));
        self.forget_disconnected(launch);
        self.release_rest_of_pod(now, launch);
        // A process that dies takes its stream and links down before its exit is known.
        self.out.set_timer(now + self.exit_wait(ZOMBIE_GRACE), Timer::Kill(launch));
    }

    // ---- forget ----

    /// Forgets a worker whose stream ended or that is not trusted, and releases the rest of its
    /// pod. If its process still runs after `grace`, it is killed. The kill is delayed because the
    /// stream of a dying process ends before its exit is known, and a kill would replace its exit
    /// code.
    pub(crate) fn forget_with_pod(&mut self, now: Time, worker: WorkerId, grace: Duration) {
        if !self.workers.is_connected(worker) {
            return;
        }
        let has_finished = self.group.has_finished(worker);
        self.forget(now, worker, self.exit_wait(grace));
        if !has_finished {
            self.release_rest_of_pod(now, launch_of(worker));
        }
    }

    pub(crate) fn forget(&mut self, now: Time, worker: WorkerId, grace: Duration) {
        self.forget_all(now, &[worker], grace);
    }

    /// Forgets workers that end together. None of them takes over a task of another one.
    pub(crate) fn forget_all(&mut self, now: Time, workers: &[WorkerId], grace: Duration) {
        for &worker in workers {
            self.forget_one(now, worker, grace);
        }
        self.reassign_describer();
    }

    fn forget_one(&mut self, now: Time, worker: WorkerId, grace: Duration) {
        let Some(gone) = self.workers.forget(worker) else { return };
        self.out.mark_dirty();
        self.lifecycle.forget_worker(worker);
        self.data.forget_worker(worker);
        let has_finished = self.group.has_finished(worker);
        if gone.is_member() && !has_finished {
            self.group.note_gone(worker, !gone.stays());
        }
        let launch = launch_of(worker);
        if has_finished && let Some(launch) = self.workers.get_launch_mut(launch) {
            launch.expect_exit();
        }
        if !self.lifecycle.is_active() {
            return;
        }
        if has_finished || !gone.stays() {
            self.out.set_timer(now + RELEASE_WAIT, Timer::Kill(launch));
        } else {
            self.out.set_timer(now + grace, Timer::Kill(launch));
            self.log_event(format!("worker {worker} is gone"));
        }
    }

    /// Forgets a disconnected worker that does not reconnect.
    pub(crate) fn forget_disconnected(&mut self, launch: LaunchId) {
        let Some(disconnected) = self.workers.forget_disconnected(launch) else { return };
        let worker = worker_of(launch);
        self.out.mark_dirty();
        if disconnected.rank.is_some() {
            let in_order = disconnected.last_known.is_some_and(|known| known.leaving)
                || self.workers.get_launch(launch).is_some_and(|l| !l.stays());
            self.group.note_gone(worker, in_order);
        }
    }

    // ---- kill ----

    /// Kills a pod.
    pub(crate) fn kill(&mut self, launch: LaunchId) {
        let pod = self.workers.pod(launch);
        let is_killed = |l: LaunchId| self.workers.get_launch(l).is_none_or(|l| l.is_killed());
        let Some(&first) = pod.first().filter(|first| !is_killed(**first)) else { return };
        self.workers.pod_mut(launch).for_each(|l| l.kill());
        self.out.mark_dirty();
        self.out.push(Action::Kill { launch: first });
    }

    /// Kills a pod of which a worker does not respond.
    pub(crate) fn kill_unresponsive(&mut self, now: Time, launch: LaunchId) {
        if let Some(l) = self.workers.get_launch_mut(launch).filter(|l| !l.is_killed()) {
            l.note_unresponsive();
            self.note_fault_of_node(now, launch, "did not respond");
        }
        self.kill(launch);
    }

    /// Kills a released launch that has not ended in time.
    pub(crate) fn on_kill_due(&mut self, launch: LaunchId) {
        let is_other = |id: WorkerId| launch_of(id) != launch;
        let others = self.workers.workers_of_pod(launch).into_iter().any(is_other);
        // The others finish, and write the last checkpoint.
        if !(others && self.lifecycle.is_stopping()) {
            self.kill(launch);
        }
    }

    /// How long a process may outlive its worker. The other workers of its pod get time to end by
    /// themselves.
    pub(crate) fn exit_wait(&self, grace: Duration) -> Duration {
        if self.spec.workers_per_pod > 1 { grace.max(POD_GRACE) } else { grace }
    }

    /// The failure of this worker is counted: its exit is no further one.
    pub(crate) fn count_exit(&mut self, worker: WorkerId) {
        if let Some(launch) = self.workers.get_launch_mut(launch_of(worker)) {
            launch.count_exit();
        }
    }
}

/// How long a process may outlive its stream before it is killed.
pub(crate) const ZOMBIE_GRACE: Duration = Duration::from_millis(250);
/// How long a pod's supervisor gives its processes, and a margin.
const POD_GRACE: Duration = Duration::from_secs(3);
/// How long a released worker may take to end.
pub(crate) const RELEASE_WAIT: Duration = Duration::from_secs(10);
/// How long a worker that failed may take to end.
pub(crate) const FAILED_GRACE: Duration = Duration::from_secs(2);
