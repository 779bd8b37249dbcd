//! All short histories, and many long random ones.

use std::num::NonZeroU64;
use std::time::Duration;

use rand::RngExt;

use super::super::*;
use super::ops::Fault;
use super::partitions::WORKER_TIMEOUT;
use super::world::{World, index};
use crate::job::testing::spec;
use elasticdl_proto::WorkerOptions;

/// Applies one letter of the reduced alphabet: an event of the oldest or the youngest worker, or of
fn letter(world: &mut World, letter: usize) {
    let victims = world.victims();
    let (oldest, youngest) = (victims.first().copied(), victims.last().copied());
    let fault = match letter {
        0 => oldest.map(|v| Fault::Exit(v, Exit::Signal(9))),
        1 => youngest.map(|v| Fault::Exit(v, Exit::Code(1))),
        2 => oldest.map(Fault::Leave),
        3 => youngest.map(Fault::Fail),
        4 => oldest.map(Fault::Glitch),
        5 => oldest.map(Fault::Freeze),
        // Some steps, reports, joins.
        6 => {
            return (0..15).for_each(|_| {
                if world.ended.is_none() {
                    world.turn()
                }
            });
        }
        7 => {
            return if world.ended.is_none() {
                world.wait()
            };
        }
        8 => {
            let num_workers = if world.job.lifecycle.wanted() == 2 { 1 } else { 2 };
            Some(Fault::Scale(num_workers.into()))
        }
        9 => Some(Fault::Stop),
        10 => Some(Fault::MasterDies(None)),
        11 => Some(Fault::MasterDies(Some(1))),
        12 => oldest.map(Fault::Partition),
        13 => youngest.map(Fault::Partition),
        14 => oldest.map(Fault::Reset),
        _ => {
            return victims.iter().for_each(|&victim| {
                if world.ended.is_none() {
                    world.fault(Fault::Reset(victim));
                }
            });
        }
    };
    if let Some(fault) = fault.filter(|_| world.ended.is_none()) {
        world.fault(fault);
    }
}

/// All but cuts, which need a spec of their own, and resets.
const LETTERS: usize = 12;

/// Letters for histories of five: exits, leaves, broken links, steps and scaling.
const FREQUENT_LETTERS: [usize; 5] = [0, 2, 4, 6, 8];

#[test]
fn every_history_of_five_frequent_events_ends_with_each_record_counted_once() {
    every_history(&FREQUENT_LETTERS, 5);
}

/// Letters for histories of four with the death of the master.
const WITH_MASTERS: [usize; 8] = [0, 2, 4, 5, 6, 7, 10, 11];

#[test]
fn every_history_of_four_events_and_dying_masters_ends_with_each_record_counted_once() {
    every_history(&WITH_MASTERS, 4);
}

#[test]
fn every_history_of_three_events_ends_with_each_record_counted_once() {
    every_history(&Vec::from_iter(0..LETTERS), 3);
}

/// Letters for histories of four with network partitions.
const WITH_PARTITIONS: [usize; 8] = [0, 2, 4, 5, 6, 8, 12, 13];

#[test]
fn every_history_of_four_events_and_partitions_ends_with_each_record_counted_once() {
    let spec = JobSpec {
        options: WorkerOptions { worker_timeout: Some(WORKER_TIMEOUT), ..small().options },
        ..small()
    };
    every_history_of(&spec, &WITH_PARTITIONS, 4);
}

/// Letters for histories of four with stream resets.
const WITH_RESETS: [usize; 8] = [0, 2, 4, 6, 7, 10, 14, 15];

#[test]
fn every_history_of_four_events_and_resets_ends_with_each_record_counted_once() {
    every_history(&WITH_RESETS, 4);
}

fn every_history(letters: &[usize], len: u32) {
    every_history_of(&small(), letters, len);
}

fn small() -> JobSpec {
    JobSpec {
        num_workers: 2,
        min_workers: 1,
        max_workers: 3,
        master_timeout: MASTER_TIMEOUT,
        options: WorkerOptions { epochs: 1, ..spec().options },
        ..spec()
    }
}

fn every_history_of(spec: &JobSpec, letters: &[usize], len: u32) {
    for history in 0..letters.len().pow(len) {
        let name = NamedHistory(format!("history {history} of {len} in {letters:?}"));
        let mut world = World::new(spec.clone(), 18, history as u64);
        world.run(|w| w.job.step() >= 1);
        let mut rest = history;
        for _ in 0..len {
            letter(&mut world, letters[rest % letters.len()]);
            rest /= letters.len();
        }
        world.dies_after = None;
        world.run(|_| false);
        name.passed();
    }
}

#[test]
fn long_seeded_histories_end_with_each_record_counted_once() {
    let mut outcomes = [0; 4];
    for seed in 0..1500 {
        let name = NamedHistory(format!("seed {seed}"));
        let outcome = seeded(seed);
        outcomes[outcome as usize] += 1;
        name.passed();
    }
    let [completed, failed, refused, stopped] = outcomes;
    assert!(completed > 500 && failed > 25 && stopped > 25 && refused == 0, "{outcomes:?}");
}

fn seeded(seed: u64) -> Outcome {
    let mut world = World::new(spec(), 1, seed);
    let rng = &mut world.rng;
    let max_workers = rng.random_range(1..=5);
    let num_workers = rng.random_range(1..=max_workers);
    let records = rng.random_range(8..=60);
    let spec = JobSpec {
        num_workers,
        min_workers: rng.random_range(1..=num_workers),
        max_workers,
        records_per_shard: NonZeroU64::new(rng.random_range(0..=9)),
        max_worker_restarts: rng.random_range(0..=8),
        master_timeout: MASTER_TIMEOUT,
        options: WorkerOptions {
            epochs: rng.random_range(1..=3),
            max_steps: rng.random_ratio(1, 4).then(|| rng.random_range(1..=8)),
            batch: Batch::Global(NonZeroU64::new(rng.random_range(1..=8)).unwrap()),
            seed,
            worker_timeout: rng.random_ratio(1, 2).then_some(WORKER_TIMEOUT),
            ..spec().options
        },
        ..spec()
    };
    let mut world = World::new(spec, records, seed);
    for _ in 0..400 {
        if world.ended.is_some() {
            break;
        }
        if world.rng.random_ratio(1, 25) {
            random_fault(&mut world, max_workers);
        } else {
            world.turn();
        }
    }
    world.dies_after = None;
    world.run(|_| false);
    world.ended.expect("run returns when the job has ended")
}

fn random_fault(world: &mut World, max_workers: u32) {
    let victims = world.victims();
    if victims.is_empty() {
        return;
    }
    let victim = victims[world.rng.random_range(0..victims.len())];
    let signals = [1, 2, 9, 9, 9, 9, 15, 6, 11];
    let partitions = if world.spec.options.worker_timeout.is_some() { 4 } else { 0 };
    let fault = match world.rng.random_range(0..52 + partitions) {
        0..12 => {
            Fault::Exit(victim, Exit::Signal(signals[world.rng.random_range(0..signals.len())]))
        }
        12..15 => {
            let code: i32 = world.rng.random_range(0..2);
            // A program that exits with 0 and has never joined ends the job.
            let has_joined = world.processes[index(victim)].worker.is_some();
            Fault::Exit(victim, Exit::Code(if has_joined { code } else { 1 }))
        }
        15..21 => Fault::Leave(victim),
        21..23 => Fault::Fail(victim),
        23..27 => Fault::Freeze(victim),
        27..33 => Fault::Glitch(victim),
        33..36 => Fault::Scale(world.rng.random_range(1..=max_workers).into()),
        36..39 => {
            let mut limit = |max| {
                let number = world.rng.random_range(1..=max);
                world.rng.random_ratio(1, 2).then_some(number)
            };
            let (min_workers, max_workers) = (limit(max_workers), limit(max_workers + 2));
            Fault::Scale(Scaling { num_workers: None, min_workers, max_workers })
        }
        39 => Fault::Stop,
        40..43 => Fault::MasterDies(None),
        43..46 => Fault::MasterDies(Some(world.rng.random_range(0..6))),
        46..52 => Fault::Reset(victim),
        _ => Fault::Partition(victim),
    };
    world.fault(fault);
}

/// Master timeout in histories.
const MASTER_TIMEOUT: Duration = Duration::from_secs(4);

/// Prints the failed history when it is dropped during a panic.
struct NamedHistory(String);

impl NamedHistory {
    fn passed(self) {
        std::mem::forget(self);
    }
}

impl Drop for NamedHistory {
    fn drop(&mut self) {
        eprintln!("FAILED: {}", self.0);
    }
}
