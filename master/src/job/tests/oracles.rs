//! Invariants of the job, checked on each action and after each event.

use std::collections::BTreeSet;
use std::time::Duration;

use elasticdl_proto::{Generation, WorkerId};

use super::super::*;
use super::process::Process;
use super::world::{World, index};

impl World {
    pub(super) fn drain_actions(&mut self) {
        self.write_record();
        self.check_stall();
        let mut uncertain = 0;
        while let Some(action) = self.job.poll_action() {
            assert_eq!(self.ended, None, "after its end the job wants {action:?}");
            if self.dies_after == Some(0) {
                self.discard(action);
                while let Some(action) = self.job.poll_action() {
                    self.discard(action);
                }
                return self.replace_master();
            }
            self.dies_after = self.dies_after.map(|n| n - 1);
            match action {
                Action::Admit { connection, worker } => {
                    let p = self.at(LaunchId(connection.0));
                    assert!(
                        p.worker.is_none_or(|known| known == worker && p.searching_for_master),
                        "a new name for {known:?}",
                        known = p.worker
                    );
                    p.reconnected = p.searching_for_master;
                    p.searching_for_master = false;
                    p.worker = Some(worker);
                    self.gone.remove(&worker);
                }
                Action::Disconnect { worker } => {
                    self.gone.insert(worker);
                }
                Action::End(outcome) => self.ended = Some(outcome),
                Action::Kill { launch } => {
                    let p = &mut self.processes[index(launch)];
                    let silent =
                        !p.sent_hello && self.now.since(p.launched) >= Duration::from_secs(60);
                    p.silent_for_long = silent && !self.stopped;
                    // A successor may kill the launch of a former master for another reason.
                    if p.orphan {
                        uncertain += u32::from(p.silent_for_long);
                    } else {
                        self.counted += u32::from(p.silent_for_long);
                    }
                    if self.at(launch).searching_for_master {
                        // The worker has not reconnected.
                        self.gone.extend(self.processes[index(launch)].worker);
                    }
                    if self.at(launch).alive {
                        self.die(launch, Exit::Signal(9));
                    }
                }
                Action::Launch { launch, .. } => {
                    self.running += 1;
                    assert!(self.running <= self.spec.max_workers as usize, "too many processes");
                    assert_eq!(index(launch), self.processes.len());
                    self.processes.push(Process {
                        alive: true,
                        launched: self.now,
                        ..Process::default()
                    });
                }
                Action::Refuse { connection, .. } => {
                    self.at(LaunchId(connection.0)).die(Exit::Code(70));
                }
                Action::Log(line) => self.log.push(line),
                Action::Send { worker, message } => self.check_send(worker, message),
            }
        }
        let failures = self.job.lifecycle.failures();
        assert!(
            (self.counted..=self.counted + uncertain).contains(&failures),
            "{failures} failures, not {}: {:#?}",
            self.counted,
            self.log
        );
        self.counted = failures;
        if let Some(outcome) = self.ended {
            self.check_end(outcome);
        }
    }

    /// Persists the job before its actions, as the shell does. A change without a new version would
    /// be lost.
    fn write_record(&mut self) {
        let record = self.job.to_persisted();
        if self.job.version() == self.written.0 {
            assert_eq!(
                without_volatile_fields(&record),
                without_volatile_fields(&self.written.1),
                "changed, but not written"
            );
        }
        self.written = (self.job.version(), record);
    }

    /// All members of a group wait for each other only if the network is partitioned.
    fn check_stall(&mut self) {
        let stalls = self.job.reporting.counters().stalls;
        if std::mem::replace(&mut self.stalls, stalls) < stalls {
            let newest = self.published.last().expect("a group waits").generation;
            assert!(self.is_any_newest_ring_severed(), "no member is partitioned: {:#?}", self.log);
            self.broken.insert(newest);
        }
    }

    /// The master dies before it performs `action`.
    fn discard(&mut self, action: Action) {
        match action {
            Action::Admit { connection, .. } => {
                let p = self.at(LaunchId(connection.0));
                if !p.searching_for_master {
                    p.die(Exit::Code(70));
                }
            }
            Action::Disconnect { worker } => {
                self.gone.insert(worker);
            }
            Action::Launch { launch, .. } => {
                self.running += 1;
                assert_eq!(index(launch), self.processes.len());
                let never =
                    Process { exit: Some(Exit::Unknown), end_seen: true, ..Process::default() };
                self.processes.push(never);
            }
            Action::Refuse { connection, .. } => {
                self.at(LaunchId(connection.0)).die(Exit::Code(70))
            }
            // No worker has received the membership, but the successor knows it.
            Action::Send { message: MasterMessage::Membership(membership), .. } => {
                self.check_membership(&membership)
            }
            Action::End(_) | Action::Kill { .. } | Action::Log(_) | Action::Send { .. } => {}
        }
    }

    fn check_send(&mut self, worker: WorkerId, message: MasterMessage) {
        assert!(!self.gone.contains(&worker), "{message:?} to worker {worker}, which is gone");
        match &message {
            MasterMessage::Membership(membership) => {
                self.check_membership(membership);
                if !membership.members.iter().any(|(w, _)| *w == worker) {
                    self.excused.insert(worker);
                }
            }
            MasterMessage::Lease(ranges) => {
                panic!("{ranges:?} are leased to worker {worker}, which trains")
            }
            MasterMessage::Shutdown { .. } => {
                self.excused.insert(worker);
            }
            _ => {}
        }
        let p = self.processes.iter_mut().find(|p| p.worker == Some(worker)).unwrap();
        if p.alive && !p.searching_for_master {
            p.down.push_back(message);
        }
    }

    fn check_membership(&mut self, membership: &Membership) {
        let last = self.published.last();
        if last == Some(membership) {
            return;
        }
        let ids: Vec<WorkerId> = membership.members.iter().map(|(w, _)| *w).collect();
        let distinct: BTreeSet<_> = ids.iter().collect();
        assert_eq!(distinct.len(), ids.len(), "{ids:?} repeats a member");
        assert!(ids.iter().all(|w| !self.gone.contains(w)), "{ids:?} holds one that is gone");
        assert!(self.stopped || ids.len() >= self.spec.min_workers as usize, "{ids:?} are too few");
        assert!(ids.len() <= self.max_workers_before.max(self.spec.max_workers) as usize);
        let Some(last) = last else {
            assert_eq!((membership.generation, membership.abort), (Generation(1), false));
            return self.publish(membership);
        };
        assert_eq!(membership.generation, last.generation.next(), "generations grow by one");
        let done = |w: &WorkerId| self.finished.contains(&(*w, last.generation));
        let dead = last.members.iter().any(|(w, _)| self.gone.contains(w) && !done(w));
        let broken = self.broken.contains(&last.generation);
        if membership.abort {
            assert!(dead || broken, "generation {} aborts without a loss", membership.generation);
        } else {
            assert!(
                !dead,
                "generation {} does not abort, but a member is lost",
                membership.generation
            );
            assert!(self.formed.contains(&last.generation), "two switches in flight");
        }
        let survivors: Vec<WorkerId> =
            last.members.iter().map(|(w, _)| *w).filter(|w| ids.contains(w)).collect();
        assert!(ids.starts_with(&survivors), "survivors keep their order, joiners come behind");
        self.publish(membership);
    }

    fn publish(&mut self, membership: &Membership) {
        let launch =
            |w| self.numbered().find(|(_, p)| p.worker == Some(w)).expect("it was admitted").0;
        self.rings.push(membership.members.iter().map(|(w, _)| launch(*w)).collect());
        self.published.push(membership.clone());
    }

    fn check_end(&self, outcome: Outcome) {
        let summary = self.job.summary(self.now);
        assert_eq!((summary.records.repeated, self.job.poll_timeout()), (0, None));
        match outcome {
            Outcome::Completed => {
                assert_eq!((summary.records.missing, &*summary.state), (0, "completed"));
                assert_eq!(summary.records.expected, summary.records.counted);
                if self.spec.options.max_steps.is_none() {
                    assert_eq!(
                        summary.records.counted,
                        self.records * u64::from(self.spec.options.epochs)
                    );
                }
                assert!(self.spec.options.max_steps.is_none_or(|max| summary.steps <= max));
            }
            Outcome::Failed => {
                assert!(self.counted > self.spec.max_worker_restarts, "{:?}", summary.error);
            }
            Outcome::InvalidInput => panic!("the data set is good"),
            Outcome::Stopped => assert!(self.stopped),
        }
    }
}

/// The persisted job without the fields that change without a new version.
fn without_volatile_fields(record: &PersistedJob) -> PersistedJob {
    let mut copy = record.clone();
    (copy.step, copy.history.totals.loss, copy.history.totals.reported_last) = Default::default();
    if copy.ending.is_none() {
        copy.ledger = Default::default();
    }
    copy
}
