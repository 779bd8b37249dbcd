//! Reports of broken links between members: the wait for a loss that explains them, and the
//! eviction of the member at fault if there is none.

use std::time::Duration;

use elasticdl_proto::{Generation, WorkerId};

use crate::job::group::broken::{Broken, Suspicion};
use crate::job::group::stall::Suspect;
use crate::job::job::Job;
use crate::job::outbox::Timer;
use crate::job::text::clip;
use crate::job::time::Time;

impl Job {
    pub(crate) fn on_broken(
        &mut self,
        now: Time,
        worker: WorkerId,
        generation: Generation,
        suspicion: Option<Suspicion>,
        error: &str,
    ) {
        let is_of_group = self.workers.is_member(worker) && generation == self.group.generation();
        if !is_of_group || self.group.is_broken() {
            return;
        }
        let mut wait = BROKEN_WAIT;
        if suspicion.is_some_and(|s| s.is_unreachable) {
            // All dials began, and so end, at about the same time: further reports show which
            // member is at fault.
            wait = wait.max(self.spec.options.heartbeat().unwrap_or_default());
        }
        if self.group.begin_break(now + wait) {
            self.out.set_timer(now + wait, Timer::Broken(generation));
            self.log_event(format!(
                "generation {generation}: a link of worker {worker} broke: {}",
                clip(error)
            ));
        }
        if let Some(suspect) = self.group.report_break(worker, suspicion) {
            self.evict_suspect(now, suspect);
            self.reconcile(now);
        }
    }

    /// The wait for a loss that explains a broken link is over.
    pub(crate) fn on_broken_due(&mut self, now: Time, generation: Generation) {
        let due = self.group.take_broken(now, generation);
        let Some(broken) = due.filter(|_| self.lifecycle.is_active()) else { return };
        if !broken.unanswered().is_empty() {
            return self.on_unanswered(now, broken);
        }
        let suspect = self.group.judge(&broken);
        if let Some(suspect) = suspect.filter(|&s| self.workers.is_connected(s)) {
            self.evict(now, suspect, "does not answer its neighbours");
        }
        self.reconcile(now);
    }

    /// Handles dials that members have not answered.
    fn on_unanswered(&mut self, now: Time, broken: Broken) {
        let heartbeat = self.spec.options.heartbeat().unwrap_or_default();
        let is_silent = |id| self.workers.get(id).is_some_and(|w| !w.is_heard(now, heartbeat));
        if heartbeat > Duration::ZERO && self.taking_part().any(is_silent) {
            // A silent member may be at fault; the heartbeat check decides first.
            let until = now + heartbeat;
            self.out.set_timer(until, Timer::Broken(self.group.generation()));
            return self.group.put_back(broken, until);
        }
        self.evict_for(now, broken.unanswered().to_vec());
        self.reconcile(now);
    }

    /// Evicts the members chosen for these links. If none may be evicted, the next generation gets
    /// new links.
    pub(crate) fn evict_for(&mut self, now: Time, links: Vec<Suspect>) {
        self.group.renew_links();
        let workers = &self.workers;
        for worker in self.group.choose_evictions(links, |id| workers.is_connected(id)) {
            self.evict(now, worker, "can't be reached by its neighbours");
        }
    }

    /// Connected workers that are in the newest group's ring, or still in the previous one's.
    pub(crate) fn taking_part(&self) -> impl Iterator<Item = WorkerId> + '_ {
        self.group.taking_part(|id| self.workers.is_connected(id))
    }
}

/// How long a broken link waits for a loss that explains it.
const BROKEN_WAIT: Duration = Duration::from_millis(20);
