//! Valid and invalid messages of workers, and the reports that the user sees.

use elasticdl_proto::{Generation, WorkerId};

use super::super::*;
use super::directed::{
    actions, at, broken, committed, connect, deliver, finished, formed, lose, membership, send,
    started,
};
use crate::job::testing::spec;

#[test]
fn unknown_launches_and_second_hellos_are_refused() {
    let mut job = started(spec(), &[20]);
    connect(&mut job, 2);
    connect(&mut job, 77);
    let refused = actions(&mut job);
    assert_eq!(refused.len(), 2);
    assert!(refused.iter().all(|a| matches!(a, Action::Refuse { .. })));
}

#[test]
fn messages_that_are_invalid_in_the_current_state_have_no_effect() {
    let mut job = started(spec(), &[20]);
    let before = job.status(at(0));
    for worker in [0, 2, 3, 99] {
        for message in [
            committed(1, 5, &[(0, 4)]),
            formed(1, 5, &[(0, 4)]),
            formed(2, 5, &[]),
            WorkerMessage::Described(Err("no".into()), None),
            WorkerMessage::Ready { parameters: 99 },
            finished(0, 3, 3),
            finished(2, 3, 3),
            broken(2, 1),
            WorkerMessage::LeaseRequest { shards: 1 },
            WorkerMessage::Reconnected { step: u64::MAX },
            WorkerMessage::Resumed {
                generation: Generation(7),
                step: 1,
                phases: Phases::default(),
            },
        ] {
            deliver(&mut job, worker, message);
        }
    }
    job.handle(at(0), Event::Disconnected { worker: WorkerId(99) });
    job.handle(at(0), Event::ProcessEnded { launch: LaunchId(99), exit: Exit::Code(1) });
    job.handle(at(0), Event::Scale(99.into()));
    assert_eq!((actions(&mut job), job.status(at(0))), (vec![], before));
}

#[test]
fn an_impossible_report_fails_its_worker() {
    let mut going_back = started(spec(), &[20]);
    deliver(&mut going_back, 1, committed(1, 5, &[(0, 4)]));
    for (mut job, message) in [
        (going_back, committed(1, 4, &[(4, 8)])),
        (started(spec(), &[20]), committed(1, 1, &[(16, 21)])),
        (started(spec(), &[20]), finished(1, 1, 1)),
    ] {
        let message = match message {
            WorkerMessage::Finished(word) => {
                let ledger = LedgerReport { epochs_complete: 3, ..word.ledger };
                WorkerMessage::Finished(Finished { ledger, ..word })
            }
            other => other,
        };
        deliver(&mut job, 1, message);
        assert_eq!(job.lifecycle.failures(), 1);
        let next = MasterMessage::Membership(membership(2, &[2, 3], true));
        assert!(actions(&mut job).contains(&send(2, next)));
    }
}

#[test]
fn extreme_numbers_neither_panic_nor_count() {
    let mut job = started(spec(), &[20]);
    deliver(&mut job, 1, WorkerMessage::LeaseRequest { shards: u64::MAX });
    let phases = Phases { detect_us: u64::MAX, agree_us: u64::MAX, ..Phases::default() };
    deliver(
        &mut job,
        1,
        WorkerMessage::Resumed { generation: Generation(1), step: u64::MAX, phases },
    );
    let WorkerMessage::Committed(report) = committed(1, 1, &[]) else { unreachable!() };
    let report = Committed { step: u64::MAX, records: u64::MAX, loss_sum: f64::NAN, ..report };
    deliver(&mut job, 1, WorkerMessage::Committed(report.clone()));
    deliver(&mut job, 1, WorkerMessage::Committed(report));
    let status = job.status(at(1));
    assert_eq!(status.workers[0].leased_records, None);
    assert!((0.0..=1.0).contains(&status.progress));
    assert_eq!(job.summary(at(1)).records.counted, 0);
}

#[test]
fn a_gap_is_the_largest_that_a_member_reports_and_the_start_has_none() {
    let mut job = started(spec(), &[20]);
    let resumed = |generation, detect_us| WorkerMessage::Resumed {
        generation: Generation(generation),
        step: 1,
        phases: Phases { detect_us, connect_us: 500, ..Phases::default() },
    };
    deliver(&mut job, 1, resumed(1, 10));
    lose(&mut job, 1, 3);
    deliver(&mut job, 1, resumed(2, 1500));
    deliver(&mut job, 2, resumed(2, 2500));
    deliver(&mut job, 1, resumed(2, 500));
    let memberships = job.summary(at(2)).memberships;
    assert_eq!(memberships[0].gap_ms, None);
    let second = &memberships[1];
    assert_eq!(second.abort_ms, Some(0.0));
    assert_eq!(
        (second.gap_ms, second.detect_ms, second.connect_ms),
        (Some(3.0), Some(2.5), Some(0.5))
    );
    assert_eq!((second.cause, &second.lost), (Cause::Lost, &vec![WorkerId(3)]));
}

#[test]
fn a_summary_has_the_first_loss_and_the_records_counted() {
    let mut job = started(spec(), &[20]);
    deliver(&mut job, 1, committed(1, 1, &[(0, 4)]));
    let summary = job.summary(at(1000));
    assert_eq!((summary.loss.first, summary.records.counted), (Some(1.0), 4));
    assert_eq!(
        (summary.memberships[0].cause, summary.memberships[0].world_size),
        (Cause::Start, 3)
    );
}

#[test]
fn a_summary_has_the_losses_of_the_first_and_last_step_whatever_the_reports_cover() {
    let mut job = started(spec(), &[20]);
    for (step, first, last) in [(3, 8.0, 6.0), (5, 5.0, 3.0)] {
        let WorkerMessage::Committed(report) = committed(1, step, &[(step, step + 2)]) else {
            panic!()
        };
        let report = Committed { first_loss: Some(first), last_loss: Some(last), ..report };
        deliver(&mut job, 1, WorkerMessage::Committed(report));
    }
    let loss = job.summary(at(1000)).loss;
    assert_eq!((loss.first, loss.last), (Some(8.0), Some(3.0)));
}

#[test]
fn metrics_of_the_program_are_means_that_are_smoothed_like_the_loss() {
    let mut job = started(spec(), &[20]);
    for (step, sum) in [(3, 1.0), (5, f64::NAN), (7, 2.0)] {
        let WorkerMessage::Committed(report) = committed(1, step, &[(step, step + 2)]) else {
            panic!()
        };
        let metrics = [("accuracy".to_owned(), sum)].into();
        deliver(&mut job, 1, WorkerMessage::Committed(Committed { metrics, ..report }));
    }
    let shown = job.status(at(1000)).metrics["accuracy"];
    assert!(0.5 < shown && shown < 1.0, "{shown}");
    assert_eq!(job.status(at(1000)).metrics.len(), 1);
    assert_eq!(job.summary(at(1000)).training_metrics, job.status(at(1000)).metrics);
}

#[test]
fn a_status_shows_every_worker_and_the_last_lines() {
    let mut job = started(spec(), &[20]);
    deliver(&mut job, 1, committed(1, 3, &[(0, 10)]));
    let status = job.status(at(1000));
    assert_eq!(
        (&*status.state, status.step, status.records_counted, status.records_expected),
        ("running", 3, 10, 40)
    );
    assert_eq!((status.progress, status.loss, status.workers_desired), (0.25, Some(1.0), 3));
    assert_eq!(status.workers[2].compute_us, 7);
    assert_eq!((status.workers[1].rank, &*status.workers[1].state), (Some(1), "training"));
    assert!(status.records_per_s > 0.0);
    assert!(status.events.len() <= 20);
    assert!(status.events.iter().any(|line| line.starts_with("generation 1: 3 workers start")));
}

#[test]
fn the_all_reduce_transport_comes_from_the_lowest_rank_and_its_changes_are_logged() {
    let mut job = started(spec(), &[20]);
    let over = |generation, what: &str| WorkerMessage::AllreduceTransport {
        generation: Generation(generation),
        what: what.into(),
    };
    for (worker, message) in
        [(1, over(1, "TCP")), (1, over(1, "TCP")), (2, over(1, "air")), (1, over(7, "air"))]
    {
        deliver(&mut job, worker, message);
    }
    let told = |job: &Job| {
        let status = job.status(at(1));
        (
            status.allreduce_transport,
            status.events.iter().filter(|line| line.contains("all-reduce")).count(),
        )
    };
    assert_eq!(told(&job), (Some("TCP".into()), 1));
    deliver(&mut job, 1, over(1, &"NCCL ".repeat(10_000)));
    let (what, lines) = told(&job);
    assert!(what.is_some_and(|what| what.starts_with("NCCL") && what.len() < 5000) && lines == 2);
    assert!(job.summary(at(1)).allreduce_transport.is_some());
}
