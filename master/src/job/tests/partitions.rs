//! A model of a network partition between some workers and their peers, while all workers reach the
//! master.

use std::time::Duration;

use elasticdl_proto::Generation;

use super::super::*;
use super::process::Process;
use super::world::World;

/// The position at which a process waits, and since when.
pub(super) type Stuck = (WaitPosition, Time);

/// Generation, operation, bytes received, bytes sent.
type WaitPosition = (Generation, u64, u64, u64);

impl World {
    /// Whether the members of a generation are stuck without a link error.
    pub(super) fn is_severed(&self, generation: Generation) -> bool {
        self.members(generation).count() > 1 && self.members(generation).any(|p| p.partitioned)
    }

    /// Whether the members of the newest generation or of the previous one are stuck.
    pub(super) fn is_any_newest_ring_severed(&self) -> bool {
        self.published.iter().rev().take(2).any(|m| self.is_severed(m.generation))
    }

    /// Whether the network swallows what its previous member sends.
    pub(super) fn is_unreachable_from_previous(&self, p: &Process, generation: Generation) -> bool {
        let (prev, _) = self.neighbours(p, generation);
        self.is_severed(generation) && (p.partitioned || prev.partitioned)
    }

    /// Whether the process must build its links and the next member answers no dial.
    pub(super) fn dials_in_vain(&self, p: &Process) -> bool {
        let Some(generation) = p.newest.as_ref().map(|m| m.generation) else { return false };
        let builds =
            p.ring.is_none() && p.broke != Some(generation) && self.is_member(p, generation);
        builds
            && self.is_severed(generation)
            && (p.partitioned || self.neighbours(p, generation).1.partitioned)
    }

    pub(super) fn report_unanswered_dial(&mut self, launch: LaunchId) {
        let p = &self.processes[super::world::index(launch)];
        let generation = p.newest.as_ref().unwrap().generation;
        let suspect = self.neighbours(p, generation).1.worker;
        let p = self.at(launch);
        p.broke = Some(generation);
        let error = "no answer".into();
        p.up.push_back(WorkerMessage::Broken { generation, suspect, error, unreachable: true });
    }

    /// Delivers a heartbeat of each process that is alive and not frozen.
    pub(super) fn heartbeat(&mut self) {
        if self.spec.options.worker_timeout.is_none() {
            return;
        }
        for at in 0..self.processes.len() {
            let p = &self.processes[at];
            let Some(worker) =
                p.worker.filter(|_| p.alive && !p.frozen && !p.closed && !p.searching_for_master)
            else {
                continue;
            };
            let place = self.wait_position(p);
            let stuck = place.map(|place| {
                (place, p.stuck.filter(|(p, _)| *p == place).map_or(self.now, |(_, t)| t))
            });
            self.processes[at].stuck = stuck;
            let stall = stuck.map(|((generation, operation, received, sent), from)| Stall {
                generation,
                operation,
                received,
                sent,
                waits_for_next: false,
                far: [None; 2],
                since: self.now.since(from),
            });
            self.job.handle(
                self.now,
                Event::Message {
                    worker,
                    message: WorkerMessage::Heartbeat(Heartbeat { stall, ..Heartbeat::default() }),
                },
            );
            self.drain_actions();
        }
    }

    fn wait_position(&self, p: &Process) -> Option<WaitPosition> {
        if let Some(ring) = p.ring {
            let waits = self.is_severed(ring) && p.finished != Some(ring);
            let step = p.state.as_ref().map_or(0, |s| s.step);
            let (prev, _) = self.neighbours(p, ring);
            let is_with_prev =
                prev.ring == Some(ring) && prev.state.as_ref().map_or(0, |s| s.step) == step;
            let received = u64::from(is_with_prev && !self.is_unreachable_from_previous(p, ring));
            return waits.then_some((ring, 2 + step, received, 1));
        }
        // A process that is still in the previous, severed ring keeps the others from forming.
        let newest = p.newest.as_ref()?.generation;
        if !self.is_any_newest_ring_severed() || !self.has_dialled(p, newest) {
            return None;
        }
        let (prev, _) = self.neighbours(p, newest);
        let is_linked = |p: &Process| {
            self.has_dialled(self.neighbours(p, newest).0, newest)
                && !self.is_unreachable_from_previous(p, newest)
        };
        let position = if is_linked(p) {
            (newest, 1, u64::from(is_linked(prev)), 1)
        } else {
            (newest, 0, 0, 0)
        };
        Some(position)
    }

    /// Whether the process builds its links and has dialled the next member.
    fn has_dialled(&self, p: &Process, generation: Generation) -> bool {
        let knows = p.newest.as_ref().is_some_and(|m| m.generation == generation);
        let builds =
            p.ring.is_none() && p.broke != Some(generation) && self.is_member(p, generation);
        knows && builds && p.alive && !p.frozen && !self.dials_in_vain(p)
    }

    fn is_member(&self, p: &Process, generation: Generation) -> bool {
        self.members(generation).any(|q| q.worker == p.worker)
    }

    /// The previous and the next member of `p`.
    fn neighbours(&self, p: &Process, generation: Generation) -> (&Process, &Process) {
        let ring: Vec<&Process> = self.members(generation).collect();
        let rank = ring.iter().position(|q| q.worker == p.worker).expect("it is a member");
        let at = |by: usize| ring[(rank + by) % ring.len()];
        (at(ring.len() - 1), at(1))
    }
}

/// Worker timeout in histories with partitions.
pub(super) const WORKER_TIMEOUT: Duration = Duration::from_secs(1);
