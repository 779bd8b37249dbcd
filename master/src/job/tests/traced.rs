//! The intervals that traces are made of.

use std::time::Duration;

use elasticdl_proto::{CheckpointTimes, Generation, WorkerId};

use super::super::*;
use super::directed::*;
use crate::job::testing::spec;

fn hear(job: &mut Job, ms: u64, worker: u64, message: WorkerMessage) {
    job.handle(at(ms), Event::Message { worker: WorkerId(worker), message });
}

fn resumed(generation: u64, detect_us: u64) -> WorkerMessage {
    let phases = Phases { detect_us, ..Phases::default() };
    WorkerMessage::Resumed { generation: Generation(generation), step: 1, phases }
}

/// A report whose last step took 3 ms, unless it is the first of its group.
fn step(step: u64, is_first: bool) -> WorkerMessage {
    let WorkerMessage::Committed(report) = committed(1, step, &[]) else { unreachable!() };
    let last = (!is_first).then(|| Box::new(report.times));
    WorkerMessage::Committed(Committed { last, ..report })
}

/// End and duration of each change, in milliseconds.
fn changes(job: &Job) -> Vec<(Cause, u128, u128)> {
    let change = |interval: &Interval| match &interval.what {
        Traced::Membership(change) => {
            Some((change.cause, interval.end.0.as_millis(), interval.took.as_millis()))
        }
        _ => None,
    };
    job.snapshot(at(0)).traced.iter().filter_map(change).collect()
}

#[test]
fn a_change_takes_the_largest_gap_and_ends_with_the_first_report_of_it() {
    let mut job = published(spec(), &[20]);
    hear(&mut job, 40, 1, formed(1, 0, &[]));
    assert_eq!(changes(&job), [(Cause::Start, 40, 40)]);
    lose(&mut job, 100, 3);
    hear(&mut job, 150, 1, resumed(2, 15_000));
    assert_eq!(changes(&job).len(), 1, "not all members have reported");
    hear(&mut job, 160, 2, resumed(2, 70_000));
    hear(&mut job, 170, 2, resumed(2, 90_000));
    assert_eq!(changes(&job), [(Cause::Start, 40, 40), (Cause::Lost, 150, 70)]);
}

#[test]
fn a_change_that_is_overtaken_is_told_if_any_member_has_reported() {
    let mut job = started(spec(), &[20]);
    lose(&mut job, 100, 3);
    hear(&mut job, 120, 1, formed(2, 0, &[]));
    hear(&mut job, 150, 1, resumed(2, 15_000));
    lose(&mut job, 200, 2);
    assert_eq!(changes(&job)[1..], [(Cause::Lost, 150, 15)]);
    hear(&mut job, 210, 1, formed(3, 0, &[]));
    lose(&mut job, 300, 1);
    assert_eq!(changes(&job).len(), 2, "no member has reported the third");
}

#[test]
fn of_the_steps_one_is_told_in_ten_seconds_with_the_slowest_ranks_first() {
    let mut job = started(spec(), &[20]);
    for (ms, number) in [(100, 1), (200, 2), (9_000, 3), (10_200, 4), (20_100, 5)] {
        hear(&mut job, ms, 1, step(number, number == 1));
    }
    let told = job.snapshot(at(0)).traced;
    let steps = told.iter().filter_map(|interval| match &interval.what {
        Traced::Step { step, reduce, ranks } => {
            let workers: Vec<_> = ranks.iter().map(|(worker, _)| worker.0).collect();
            Some((*step, interval.took.as_millis(), reduce.as_millis(), workers))
        }
        _ => None,
    });
    let slowest_first = vec![3, 2, 1];
    let expected = [(2, 3, 1, slowest_first.clone()), (4, 3, 1, slowest_first)];
    assert_eq!(steps.collect::<Vec<_>>(), expected);
}

#[test]
fn the_newest_intervals_are_kept() {
    let mut job = started(spec(), &[20]);
    let times = CheckpointTimes { copy_us: 1000, write_us: 2000, publish_us: 3000 };
    for step in 1..=400 {
        let news = CheckpointNews::Saved { step, name: format!("step-{step}"), bytes: 1, times };
        hear(&mut job, step, 1, WorkerMessage::Checkpoint(news));
    }
    // Of a build that does not say how long it took.
    let times = CheckpointTimes::default();
    let news = CheckpointNews::Saved { step: 500, name: "step-500".into(), bytes: 1, times };
    hear(&mut job, 500, 1, WorkerMessage::Checkpoint(news));
    let told = job.snapshot(at(0)).traced;
    let last = told.back().unwrap();
    // The first is of the group's start.
    assert_eq!((told.len(), told[0].number, last.number), (256, 146, 401));
    assert_eq!((last.end, last.took), (at(400), Duration::from_millis(6)));
}
