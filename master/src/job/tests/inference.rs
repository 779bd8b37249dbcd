//! Inference jobs: workers without a group.

use std::collections::BTreeMap;
use std::num::NonZeroU64;

use elasticdl_proto::WorkerOptions;
use elasticdl_proto::{RecordRange, WorkerId};
use rand::rngs::ChaCha8Rng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};

use super::super::*;
use super::directed::*;
use crate::job::testing::{dataset, spec};

/// Shards of 4 records.
fn evaluate() -> JobSpec {
    let work = Work::Evaluate { model: "m".into() };
    JobSpec {
        records_per_shard: NonZeroU64::new(4),
        options: WorkerOptions { work, epochs: 1, ..spec().options },
        ..spec()
    }
}

/// A job with three ready workers.
fn ready(files: &[u64]) -> Job {
    let mut job = Job::new(evaluate());
    connect(&mut job, 1);
    deliver(&mut job, 1, WorkerMessage::Described(Ok(dataset(files)), None));
    (2..=3).for_each(|i| connect(&mut job, i));
    (1..=3).for_each(|i| deliver(&mut job, i, WorkerMessage::Ready { parameters: 10 }));
    job
}

fn ask(job: &mut Job, worker: u64, shards: u64) {
    deliver(job, worker, WorkerMessage::LeaseRequest { shards });
}

fn range(start: u64, end: u64) -> RecordRange {
    RecordRange { epoch: 0, start, end }
}

fn done(job: &mut Job, worker: u64, shard: RecordRange, loss: f64) {
    let metrics = BTreeMap::from([("loss".into(), loss)]);
    deliver(job, worker, WorkerMessage::ShardDone { range: shard, metrics });
}

/// The leases in these actions.
fn leased(job: &mut Job) -> Vec<(u64, RecordRange)> {
    let mut leased = Vec::new();
    for action in actions(job) {
        if let Action::Send { worker, message: MasterMessage::Lease(ranges) } = action {
            leased.extend(ranges.into_iter().map(|range| (worker.0, range)));
        }
    }
    leased
}

#[test]
fn as_many_whole_shards_are_leased_in_order_as_are_requested() {
    let mut job = ready(&[10, 4]);
    assert!(leased(&mut job).is_empty() && job.status(at(0)).state == "running");
    ask(&mut job, 2, 2);
    ask(&mut job, 1, 1);
    ask(&mut job, 3, 2);
    // The last shard of the third file is short, because no shard spans two files.
    let expected = [(2, range(0, 4)), (2, range(4, 8)), (1, range(8, 10)), (3, range(10, 14))];
    assert_eq!(leased(&mut job), expected);
    let no_group = |action: &Action| {
        matches!(action, Action::Send { message: MasterMessage::Membership(_), .. })
    };
    assert!(!actions(&mut job).iter().any(no_group));
}

#[test]
fn a_lost_workers_shards_go_to_a_pending_request_and_count_once() {
    let mut job = ready(&[12]);
    ask(&mut job, 1, 2);
    ask(&mut job, 2, 1);
    ask(&mut job, 3, 1);
    leased(&mut job);
    done(&mut job, 1, range(0, 4), 1.0);
    job.handle(at(1), Event::Disconnected { worker: WorkerId(1) });
    assert_eq!(leased(&mut job), [(3, range(4, 8))]);
    // Its report arrives too late.
    done(&mut job, 1, range(4, 8), 2.0);
    assert_eq!(job.summary(at(1)).records.counted, 4);
    done(&mut job, 3, range(4, 8), 2.0);
    done(&mut job, 2, range(8, 12), 3.0);
    let summary = job.summary(at(2));
    assert_eq!(
        (&*summary.state, summary.records.counted, summary.records.repeated),
        ("ending", 12, 0)
    );
    assert_eq!(summary.metrics, Some(BTreeMap::from([("loss".into(), Some(0.5))])));
    let ends = actions(&mut job)
        .iter()
        .filter(|a| matches!(a, Action::Send { message: MasterMessage::Shutdown { .. }, .. }))
        .count();
    assert_eq!(ends, 2);
}

#[test]
fn a_leaving_or_surplus_worker_is_released_at_once() {
    let mut job = ready(&[40]);
    ask(&mut job, 1, 1);
    leased(&mut job);
    deliver(&mut job, 1, WorkerMessage::Leaving);
    let bye = |worker| Action::Send {
        worker: WorkerId(worker),
        message: MasterMessage::release("it leaves"),
    };
    assert!(actions(&mut job).contains(&bye(1)));
    job.handle(at(1), Event::Scale(1.into()));
    let reason = MasterMessage::release("the job is scaled down");
    assert_eq!(actions(&mut job), [send(3, reason)]);
}

#[test]
fn a_status_shows_the_shards_and_the_records_that_each_worker_holds() {
    assert_eq!(Job::new(evaluate()).status(at(0)).shards, None);
    let mut job = ready(&[10, 4]);
    ask(&mut job, 1, 3);
    ask(&mut job, 2, 1);
    done(&mut job, 1, range(0, 4), 1.0);
    let status = job.status(at(0));
    assert_eq!(status.shards, Some(ShardCounts { todo: 0, leased: 3, done: 1 }));
    let held: Vec<_> = status.workers.iter().map(|worker| worker.leased_records).collect();
    assert_eq!(held, [Some(6), Some(4), Some(0)]);
    assert_eq!((status.records_counted, status.records_expected), (4, 14));
}

/// However often a worker asks, it holds no more than a few shards that it has not begun.
#[test]
fn a_request_is_limited_to_a_few_shards() {
    let mut job = ready(&[400]);
    ask(&mut job, 1, u64::MAX);
    assert_eq!(leased(&mut job).len(), 4);
}

#[test]
fn a_report_of_a_shard_that_the_worker_does_not_hold_is_refused() {
    for wrong in [range(0, 3), range(0, 8), range(4, 8), range(100, 104)] {
        let mut job = ready(&[40]);
        ask(&mut job, 1, 1);
        ask(&mut job, 2, 1);
        leased(&mut job);
        done(&mut job, 1, wrong, 1.0);
        assert_eq!(
            (job.lifecycle.failures(), job.summary(at(0)).records.counted),
            (1, 0),
            "{wrong}"
        );
        assert!(!job.workers.is_connected(WorkerId(1)));
    }
}

#[test]
fn a_metric_missing_in_a_shard_counts_as_0_and_too_many_metrics_fail_the_job() {
    let mut job = ready(&[12]);
    ask(&mut job, 1, 3);
    leased(&mut job);
    let mut say_done = |start, metrics: Vec<(String, f64)>| {
        let metrics = BTreeMap::from_iter(metrics);
        deliver(&mut job, 1, WorkerMessage::ShardDone { range: range(start, start + 4), metrics });
    };
    say_done(0, vec![]);
    say_done(4, vec![("rare".into(), 6.0)]);
    say_done(8, vec![("loss".into(), 3.0)]);
    let means = BTreeMap::from([("loss".into(), Some(0.25)), ("rare".into(), Some(0.5))]);
    assert_eq!(job.summary(at(0)).metrics, Some(means));
    let mut job = ready(&[40]);
    ask(&mut job, 1, 4);
    leased(&mut job);
    for start in 0..3 {
        let metrics = (0..40).map(|i| (format!("{start}-{i}"), 1.0)).collect();
        deliver(
            &mut job,
            1,
            WorkerMessage::ShardDone { range: range(4 * start, 4 * start + 4), metrics },
        );
    }
    let error = job.summary(at(0)).error.unwrap();
    assert_eq!(error, "worker 1: with epoch 0 records 8..12 there are more than 100 metrics");
}

#[test]
fn a_successor_resumes_after_the_persisted_results() {
    let mut job = ready(&[20]);
    ask(&mut job, 1, 2);
    ask(&mut job, 2, 1);
    leased(&mut job);
    done(&mut job, 1, range(0, 4), 1.0);
    done(&mut job, 2, range(8, 12), 4.0);
    let mut next = Job::restore(super::persisted::read_back(&job.to_persisted()), at(0)).unwrap();
    assert_eq!(next.summary(at(0)).records.counted, 8);
    // No worker reconnects, so replacements are started.
    next.handle_timeout(at(60_000));
    let launched = |action: &Action| match action {
        Action::Launch { launch, .. } => Some(launch.0),
        _ => None,
    };
    for launch in 1..=3 {
        next.handle(
            at(60_000),
            Event::ProcessEnded { launch: LaunchId(launch), exit: Exit::Unknown },
        );
    }
    let new: Vec<u64> = actions(&mut next).iter().filter_map(launched).collect();
    assert_eq!(new, [4, 5, 6]);
    connect(&mut next, 4);
    deliver(&mut next, 4, WorkerMessage::Ready { parameters: 10 });
    ask(&mut next, 4, 4);
    let expected = [(4, range(4, 8)), (4, range(12, 16)), (4, range(16, 20))];
    assert_eq!(leased(&mut next), expected);
    for (shard, loss) in [(range(16, 20), 16.0), (range(4, 8), 2.0), (range(12, 16), 8.0)] {
        done(&mut next, 4, shard, loss);
    }
    assert_eq!(
        next.summary(at(0)).metrics,
        Some(BTreeMap::from([("loss".into(), Some(31.0 / 20.0))]))
    );
}

#[test]
fn a_persisted_job_with_impossible_results_is_refused() {
    let job = ready(&[20]);
    let record = serde_json::to_value(job.to_persisted()).unwrap();
    let with = |results: serde_json::Value| {
        let mut record = record.clone();
        record["results"] = results;
        let mut record: PersistedJob = serde_json::from_value(record).unwrap();
        record.attach_file_list(job.to_persisted().file_list().unwrap().clone()).unwrap();
        Job::restore(record, at(0)).map(drop)
    };
    let sums = serde_json::json!({"loss": 1.0});
    assert_eq!(
        with(serde_json::json!({"before": 8, "sums": sums, "later": {"12": [16, sums]}})),
        Ok(())
    );
    for wrong in [
        serde_json::json!({"before": 24, "sums": sums, "later": {}}),
        serde_json::json!({"before": 6, "sums": sums, "later": {}}),
        serde_json::json!({"before": 8, "sums": sums, "later": {"4": [16, sums]}}),
        serde_json::json!({"before": 0, "sums": {}, "later": {"8": [4, sums]}}),
    ] {
        assert!(with(wrong.clone()).is_err(), "{wrong}");
    }
}

/// The sum of a shard, chosen so that the order of additions shows in the last bits of the total.
fn loss(start: u64) -> f64 {
    1e15 / (start as f64 + 3.0)
}

#[test]
fn under_any_faults_each_shard_counts_once_and_the_mean_is_bit_identical() {
    let mut means = Vec::new();
    for seed in 0..200 {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut job = Job::new(JobSpec { max_workers: 6, max_worker_restarts: 1000, ..evaluate() });
        // Leases by worker. Each message is handled while time advances.
        let mut held: BTreeMap<u64, Vec<RecordRange>> = BTreeMap::new();
        let mut now = 0;
        while !matches!(job.state(), "ending" | "completed") {
            now += rng.random_range(0..200);
            job.handle_timeout(at(now));
            for action in actions(&mut job) {
                match action {
                    Action::Launch { launch, .. } => {
                        held.insert(launch.0, Vec::new());
                        connect(&mut job, launch.0);
                    }
                    Action::Send { worker, message: MasterMessage::Describe } => {
                        deliver(
                            &mut job,
                            worker.0,
                            WorkerMessage::Described(Ok(dataset(&[37, 5, 61])), None),
                        );
                    }
                    Action::Send { worker, message: MasterMessage::Prepare(_) } => {
                        deliver(&mut job, worker.0, WorkerMessage::Ready { parameters: 10 });
                        ask(&mut job, worker.0, 2);
                    }
                    Action::Send { worker, message: MasterMessage::Lease(ranges) } => {
                        held.entry(worker.0).or_default().extend(ranges);
                    }
                    Action::Send { worker, message: MasterMessage::Shutdown { .. } } => {
                        held.remove(&worker.0);
                        let exit = Exit::Code(0);
                        job.handle(
                            at(now),
                            Event::ProcessEnded { launch: LaunchId(worker.0), exit },
                        );
                    }
                    _ => {}
                }
            }
            let names: Vec<u64> = held.keys().copied().collect();
            let Some(&worker) = names.choose(&mut rng) else { continue };
            match rng.random_range(0..12) {
                0 => {
                    held.remove(&worker);
                    job.handle(at(now), Event::Disconnected { worker: WorkerId(worker) });
                    let exit = Exit::Signal(9);
                    job.handle(at(now), Event::ProcessEnded { launch: LaunchId(worker), exit });
                }
                1 => job.handle(at(now), Event::Scale((rng.random_range(1..=6)).into())),
                2 => deliver(&mut job, worker, WorkerMessage::Leaving),
                _ => {
                    let shards = held.get_mut(&worker).unwrap();
                    if !shards.is_empty() {
                        let shard = shards.remove(0);
                        done(&mut job, worker, shard, loss(shard.start));
                        ask(&mut job, worker, 1);
                    }
                }
            }
            assert!(now < 1_000_000, "seed {seed}: it does not end");
        }
        let summary = job.summary(at(now));
        let RecordsSummary { expected, counted, repeated, .. } = summary.records;
        assert_eq!((expected, counted, repeated), (103, 103, 0), "seed {seed}");
        assert_eq!(summary.steps, 28, "seed {seed}: shards");
        means.push(summary.metrics.unwrap()["loss"].unwrap().to_bits());
    }
    assert!(means.iter().all(|mean| *mean == means[0]));
    let starts = (0..37).step_by(4).chain((37..42).step_by(4)).chain((42..103).step_by(4));
    let all = starts.map(loss).reduce(|all, one| all + one).unwrap();
    assert_eq!(means[0], (all / 103.0).to_bits());
}
