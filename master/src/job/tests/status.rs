//! The status of a running job.

use std::num::NonZeroU64;

use elasticdl_proto::{Generation, Ledger, RecordRange, WorkerId};
use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};

use super::super::reporting::history;
use super::super::*;
use super::directed::{actions, ask, at, committed, connect, deliver, formed, lose, started};
use crate::job::data::lease_table::{LeaseTable, Share};
use crate::job::data::shards::Shards;
use crate::job::testing::{dataset, spec};

/// Counts the shards by state, record by record.
pub(super) fn count_shards(records: &LeaseTable, epochs: u32) -> ShardCounts {
    let shards = records.shards();
    let epoch = records.ledger().epoch().min(epochs - 1);
    let leases: Vec<RecordRange> = records.leases().map(|(_, range)| range).collect();
    let mut counts = ShardCounts::default();
    for shard in 0..shards.len() {
        let one = |record| RecordRange { epoch, start: record, end: record + 1 };
        let is_absorbed = |record| records.ledger().absorbed_of(one(record)) == 1;
        let is_leased = |r| leases.iter().any(|l| l.epoch == epoch && l.records().contains(&r));
        let counted = if shards.range(shard).all(is_absorbed) {
            &mut counts.done
        } else if shards.range(shard).any(is_leased) {
            &mut counts.leased
        } else {
            &mut counts.todo
        };
        *counted += 1;
    }
    counts
}

#[test]
fn every_shard_is_counted_where_its_records_are() {
    let mut seen = ShardCounts::default();
    for seed in 0..300 {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let per_shard = NonZeroU64::new(rng.random_range(1..=9));
        let spec = JobSpec { seed, records_per_shard: per_shard, shuffle: rng.random(), ..spec() };
        let mut records =
            LeaseTable::new(Shards::cut(&dataset(&[13, 0, 29, 1, 8]), &spec).unwrap(), 2);
        let mut held: Vec<(WorkerId, RecordRange)> = Vec::new();
        for step in 1..150 {
            let worker = WorkerId(rng.random_range(1..=3));
            match rng.random_range(0..10) {
                0 => {
                    records.forget(worker);
                    held.retain(|(w, _)| *w != worker);
                    // Unaccounted records return.
                    let ledger = records.ledger().clone();
                    records.rebuild(step, ledger, |_| true);
                }
                1..5 if !held.is_empty() => {
                    // A step consumes a part of a lease, and leases of several workers.
                    let committed: Vec<RecordRange> = (0..rng.random_range(1..=3).min(held.len()))
                        .map(|_| {
                            let at = rng.random_range(0..held.len());
                            let (worker, range) = held.swap_remove(at);
                            let middle = rng.random_range(range.start + 1..=range.end);
                            if middle < range.end {
                                held.push((worker, RecordRange { start: middle, ..range }));
                            }
                            RecordRange { end: middle, ..range }
                        })
                        .collect();
                    records.commit(step, &committed).unwrap();
                }
                _ => {
                    let epoch = records.ledger().epoch() + rng.random_range(0..2);
                    if records.is_open(epoch) {
                        let share = Share { records: rng.random_range(1..9), workers: 3 };
                        let leases = records.lease(worker, epoch, rng.random_range(1..20), share);
                        held.extend(leases.into_iter().map(|range| (worker, range)));
                    }
                }
            }
            let counts = records.shard_counts();
            assert_eq!(counts, count_shards(&records, 2), "seed {seed} step {step}");
            seen.todo = seen.todo.max(counts.todo);
            seen.leased = seen.leased.max(counts.leased);
            seen.done = seen.done.max(counts.done);
        }
    }
    assert!(seen.todo > 20 && seen.leased > 5 && seen.done > 20, "{seen:?}");
}

#[test]
fn a_group_that_goes_back_a_step_reopens_its_shards() {
    let spec = JobSpec { records_per_shard: NonZeroU64::new(4), shuffle: false, ..spec() };
    let mut records = LeaseTable::new(Shards::cut(&dataset(&[10]), &spec).unwrap(), 1);
    let leases = records.lease(WorkerId(1), 0, 10, Share { records: 10, workers: 1 });
    assert_eq!(records.shard_counts(), ShardCounts { todo: 0, leased: 3, done: 0 });
    records.commit(1, &leases[..1]).unwrap();
    records.commit(2, &leases[1..]).unwrap();
    assert_eq!(records.shard_counts(), ShardCounts { todo: 0, leased: 0, done: 3 });
    let mut ledger = Ledger::new(10);
    ledger.absorb(leases[0]);
    records.rebuild(1, ledger, |_| false);
    assert_eq!(records.shard_counts(), ShardCounts { todo: 2, leased: 0, done: 1 });
}

fn report(step: u64, compute_us: &[u64]) -> WorkerMessage {
    let WorkerMessage::Committed(report) = committed(1, step, &[]) else { unreachable!() };
    WorkerMessage::Committed(Committed { compute_us: compute_us.to_vec(), ..report })
}

const NO_STRAGGLERS: [u64; 0] = [];

fn stragglers(job: &Job) -> Vec<u64> {
    job.status(at(0)).workers.iter().filter(|w| w.straggler).map(|w| w.worker.0).collect()
}

#[test]
fn a_repeatedly_slow_worker_is_a_straggler_and_stays_a_member() {
    let mut job = started(spec(), &[20]);
    let mut step = 0;
    let mut steps = |job: &mut Job, count: u64, compute_us: &[u64]| {
        for _ in 0..count {
            step += 1;
            deliver(job, 1, report(step, compute_us));
        }
        stragglers(job)
    };
    assert_eq!(steps(&mut job, 2, &[20_000, 20_000, 80_000]), NO_STRAGGLERS);
    assert_eq!(steps(&mut job, 2, &[20_000, 20_000, 80_000]), [3]);
    assert_eq!(steps(&mut job, 4, &[20_000, 20_000, 20_000]), NO_STRAGGLERS);
    // A single slow step has no effect.
    for _ in 0..5 {
        assert_eq!(steps(&mut job, 1, &[20_000, 90_000, 20_000]), NO_STRAGGLERS);
        assert_eq!(steps(&mut job, 3, &[20_000, 20_000, 20_000]), NO_STRAGGLERS);
    }
    assert_eq!(steps(&mut job, 7, &[20_000, 20_000, 29_000]), NO_STRAGGLERS);
    assert_eq!(steps(&mut job, 7, &[2000, 6000, 2000]), NO_STRAGGLERS);
    assert_eq!(steps(&mut job, 7, &[20_000, 0, 31_000]), [3]);
    let status = job.status(at(0));
    assert_eq!(status.workers[2].rank, Some(2));
    assert_eq!((status.workers[2].compute_us, status.workers[1].compute_us), (31_000, 0));
}

#[test]
fn a_worker_shows_the_groups_step_once_it_has_its_state() {
    let mut job = started(JobSpec { max_workers: 4, ..spec() }, &[20]);
    deliver(&mut job, 1, committed(1, 3, &[(0, 4)]));
    job.handle(at(0), Event::Scale { num_workers: 4 });
    connect(&mut job, 4);
    let steps: Vec<_> = job.status(at(0)).workers.iter().map(|w| w.step).collect();
    assert_eq!(steps, [Some(3), Some(3), Some(3), None]);
}

fn resumed(generation: u64, step: u64, detect_us: u64) -> WorkerMessage {
    let phases = Phases {
        detect_us,
        abort_us: 200,
        agree_us: 300,
        connect_us: 400,
        state_us: 500,
        first_step_us: 600,
    };
    WorkerMessage::Resumed { generation: Generation(generation), step, phases }
}

/// The log events about the pauses of membership changes.
fn recoveries(job: &mut Job) -> Vec<String> {
    let log = std::iter::from_fn(|| job.poll_action()).filter_map(|action| match action {
        Action::Log(line) => Some(line),
        _ => None,
    });
    log.filter(|line| line.contains(" ms after ")).collect()
}

#[test]
fn the_pause_of_a_change_is_logged_in_one_line_when_all_survivors_have_resumed() {
    let mut job = started(spec(), &[20]);
    lose(&mut job, 0, 3);
    deliver(&mut job, 1, formed(2, 0, &[]));
    deliver(&mut job, 1, resumed(2, 1, 100));
    assert_eq!(recoveries(&mut job), [""; 0]);
    deliver(&mut job, 2, resumed(2, 1, 1100));
    let line = "generation 2 (lost): step 1 committed, 3.1 ms after the last one before the change \
                (detect 1.1, abort 0.2, agree 0.3, connect 0.4, state 0.5, first step 0.6)";
    assert_eq!(recoveries(&mut job), [line]);
    deliver(&mut job, 2, resumed(2, 1, 1100));
    deliver(&mut job, 1, committed(2, 2, &[]));
    assert_eq!(recoveries(&mut job), [""; 0]);
    let memberships = job.status(at(0)).memberships;
    let second = &memberships[1];
    assert_eq!(
        (second.gap_ms, second.abort_ms, &second.lost),
        (Some(3.1), Some(0.2), &vec![WorkerId(3)])
    );
    assert_eq!(memberships, job.summary(at(0)).memberships);
}

#[test]
fn a_survivor_without_a_report_does_not_delay_the_line() {
    let mut job = started(spec(), &[20]);
    lose(&mut job, 0, 3);
    deliver(&mut job, 1, formed(2, 0, &[]));
    deliver(&mut job, 1, resumed(2, 1, 100));
    let report = |step| Event::Message { worker: WorkerId(1), message: committed(2, step, &[]) };
    job.handle(at(900), report(2));
    assert_eq!(recoveries(&mut job), [""; 0]);
    job.handle(at(1000), report(3));
    assert_eq!(recoveries(&mut job).len(), 1);
    // If the next membership change comes first, the line precedes it.
    lose(&mut job, 1100, 2);
    deliver(&mut job, 1, formed(3, 3, &[]));
    actions(&mut job);
    assert_eq!(recoveries(&mut job), [""; 0]);
    deliver(&mut job, 1, resumed(3, 4, 100));
    assert_eq!(recoveries(&mut job).len(), 1);
}

#[test]
fn a_status_has_the_last_20_changes_and_the_summary_stays_bounded() {
    let mut job = started(spec(), &[20]);
    for generation in 2..=10_100 {
        // A link breaks, and the same three workers continue.
        let broken = WorkerMessage::Broken {
            generation: Generation(generation - 1),
            suspect: None,
            error: "".into(),
            unreachable: false,
        };
        deliver(&mut job, 1, broken);
        let due = job.poll_timeout().unwrap();
        job.handle_timeout(due.max(at(generation * 100)));
        deliver(&mut job, 1, formed(generation, 0, &[]));
        while job.poll_action().is_some() {}
    }
    let generations = |records: Vec<MembershipChange>| -> Vec<u64> {
        records.iter().map(|record| record.generation.0).collect()
    };
    assert_eq!(generations(job.status(at(0)).memberships), Vec::from_iter(10_081..=10_100));
    assert_eq!(generations(job.summary(at(0)).memberships), Vec::from_iter(101..=10_100));
}

#[test]
fn fewer_membership_changes_are_kept_if_they_name_many_workers() {
    let record = |generation| MembershipChange {
        generation: Generation(generation),
        cause: Cause::Join,
        world_size: 1000,
        at_step: 0,
        gap_ms: None,
        detect_ms: None,
        abort_ms: None,
        agree_ms: None,
        connect_ms: None,
        state_ms: None,
        first_step_ms: None,
        lost: (0..1000).map(WorkerId).collect(),
        left: Vec::new(),
        joined: (1000..2000).map(WorkerId).collect(),
    };
    let mut history = history::JobHistory::default();
    (1..=200).for_each(|generation| history.publish(record(generation), Default::default()));
    assert_eq!((history.memberships().len(), history.memberships()[0].generation.0), (50, 151));
    let huge = MembershipChange { lost: vec![WorkerId(1); 200_000], ..record(201) };
    history.publish(huge, Default::default());
    assert_eq!(history.memberships().len(), 1);
}

#[test]
fn the_speed_is_measured_over_the_last_seconds_or_the_last_step() {
    let mut history = history::JobHistory::default();
    history.form(at(1000), 0, 0);
    assert_eq!(history.records_per_s(at(2000)), 0.0);
    (1..=100).for_each(|i| history.finish_shard(at(1000 + i * 100), 10, None));
    assert!(
        (history.records_per_s(at(11_000)) - 100.0).abs() < 3.0,
        "{}",
        history.records_per_s(at(11_000))
    );
    (1..=10).for_each(|i| history.finish_shard(at(11_000 + i * 10_000), 500, None));
    assert_eq!(history.records_per_s(at(111_000)), 50.0);
    // The speed does not drop to 0 between two such steps, and decays without any.
    let later = history.records_per_s(at(117_000));
    assert!((25.0..50.0).contains(&later), "{later}");
    assert!(history.records_per_s(at(700_000)) < 1.0);
}

#[test]
fn shards_are_shown_from_the_first_lease_to_the_last_epochs_end() {
    let spec = JobSpec { records_per_shard: NonZeroU64::new(4), shuffle: false, ..spec() };
    assert_eq!(Job::new(spec.clone()).status(at(0)).shards, None);
    let mut job = started(spec, &[20]);
    let shown = |job: &Job| job.status(at(0)).shards.map(|s| (s.todo, s.leased, s.done));
    assert_eq!(shown(&job), Some((5, 0, 0)));
    deliver(&mut job, 2, ask(3));
    assert_eq!(shown(&job), Some((4, 1, 0)));
    deliver(&mut job, 1, committed(1, 1, &[(0, 12)]));
    assert_eq!(shown(&job), Some((2, 0, 3)));
    deliver(&mut job, 1, committed(1, 2, &[(12, 20)]));
    assert_eq!(shown(&job), Some((5, 0, 0)), "of the next epoch");
    let WorkerMessage::Committed(all) = committed(1, 3, &[(0, 20)]) else { unreachable!() };
    let ranges = vec![RecordRange { epoch: 1, start: 0, end: 20 }];
    deliver(&mut job, 1, WorkerMessage::Committed(Committed { ranges, ..all }));
    assert_eq!(shown(&job), Some((0, 0, 5)));
}
