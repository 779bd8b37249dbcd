//! A model of the group: its members form a ring, step, commit one after the other, and break.

use elasticdl_proto::{Generation, Ledger, RecordRange};
use rand::RngExt;

use super::super::*;
use super::process::{Process, State, final_report, report};
use super::world::{World, index};

impl World {
    pub(super) fn form(&mut self, generation: Generation) {
        let ids = self.launches_of(generation).to_vec();
        let best = ids
            .iter()
            .filter_map(|id| self.processes[index(*id)].state.clone())
            .max_by_key(|s| s.step);
        let initial_launches_left =
            State { step: 0, ledger: Ledger::new(self.records), added: Vec::new() };
        let state = best.unwrap_or(initial_launches_left);
        for (rank, id) in ids.iter().enumerate() {
            let p = self.at(*id);
            p.ring = Some(generation);
            p.adopt(state.clone());
            if rank == 0 {
                let ledger = report(&state.ledger);
                p.up.push_back(WorkerMessage::Formed { generation, step: state.step, ledger });
            }
        }
    }

    pub(super) fn step(&mut self, ring: Generation) {
        let ids = self.launches_of(ring).to_vec();
        let mut state = self.at(ids[0]).state.clone().unwrap();
        let window = self.window(&state);
        state.step += 1;
        state.added = vec![window];
        assert_eq!(state.ledger.absorb(window), 0, "{window} is counted twice");
        // The step completes on some ranks before the others.
        let lucky = self.rng.random_range(0..ids.len());
        for (rank, id) in ids.into_iter().enumerate() {
            if rank == lucky || self.rng.random() {
                self.commit(id, state.clone());
            } else {
                self.at(id).half_committed = Some(state.clone());
            }
        }
    }

    pub(super) fn commit(&mut self, id: LaunchId, state: State) {
        let ring = self.at(id).ring.unwrap();
        let speaks = self.launches_of(ring)[0] == id;
        let p = self.at(id);
        let (step, ranges) = (state.step, state.added.clone());
        p.adopt(state);
        if speaks {
            let records = ranges.iter().map(RecordRange::len).sum();
            let loss_sum = 0.5 * records as f64;
            let (ranks, times, steps_skipped) = (Vec::new(), StepTimes::default(), 0);
            let report = Committed {
                generation: ring,
                step,
                ranges,
                loss_sum,
                records,
                ranks,
                times,
                steps_skipped,
                ..Committed::default()
            };
            p.up.push_back(WorkerMessage::Committed(report));
        }
        if p.resumed != Some(ring) {
            p.resumed = Some(ring);
            let phases = Phases { detect_us: 1000, ..Phases::default() };
            p.up.push_back(WorkerMessage::Resumed { generation: ring, step, phases });
        }
    }

    pub(super) fn finish(&mut self, ring: Generation) {
        for id in self.launches_of(ring).to_vec() {
            let p = self.at(id);
            if p.newest.as_ref().is_some_and(|m| m.generation > ring) {
                // No rank starts another round, so the newer group need not wait for one.
                p.ring = None;
                p.stand_by_if_excluded();
                continue;
            }
            p.finished = Some(ring);
            let word = final_report(ring, p.state.as_ref().unwrap());
            p.up.push_back(word);
        }
    }

    pub(super) fn see_break(&mut self, id: LaunchId) {
        let p = &self.processes[index(id)];
        let generation = p.ring.or_else(|| p.newest.as_ref().map(|m| m.generation)).unwrap();
        let absent = |q: &&Process| !q.alive || q.frozen;
        let suspect = self.members(generation).find(absent).and_then(|q| q.worker);
        let p = self.at(id);
        p.leave_ring(generation, suspect);
    }
}
