//! The status of a running job.

use std::time::Duration;

use elasticdl_proto::{Generation, Heartbeat, LinkPace, RankStep, WorkerId};

use super::super::reporting::history;
use super::super::reporting::speed::Speed;
use super::super::*;
use super::directed::{actions, at, committed, connect, deliver, formed, lose, started};
use crate::job::testing::spec;

fn report(step: u64, compute_us: &[u64]) -> WorkerMessage {
    let WorkerMessage::Committed(report) = committed(1, step, &[]) else { unreachable!() };
    let rank =
        |compute_us: &u64| RankStep { records: 8, compute_us: *compute_us, ..RankStep::default() };
    WorkerMessage::Committed(Committed { ranks: compute_us.iter().map(rank).collect(), ..report })
}

const NO_STRAGGLERS: [u64; 0] = [];

fn stragglers(job: &Job, ms: u64) -> Vec<u64> {
    job.status(at(ms)).workers.iter().filter(|w| w.straggler).map(|w| w.worker.0).collect()
}

#[test]
fn a_repeatedly_slow_worker_is_a_straggler_and_stays_a_member() {
    let mut job = started(spec(), &[20]);
    let mut step = 0;
    // A step takes 5 s.
    let mut steps = |job: &mut Job, count: u64, compute_us: &[u64]| {
        for _ in 0..count {
            step += 1;
            let message = report(step, compute_us);
            job.handle(at(5000 * step), Event::Message { worker: WorkerId(1), message });
        }
        stragglers(job, 5000 * step)
    };
    assert_eq!(steps(&mut job, 2, &[20_000, 20_000, 80_000]), NO_STRAGGLERS);
    // It is slow since the third step; after 10 s it is said.
    assert_eq!(steps(&mut job, 2, &[20_000, 20_000, 80_000]), NO_STRAGGLERS);
    assert_eq!(steps(&mut job, 2, &[20_000, 20_000, 80_000]), [3]);
    assert_eq!(steps(&mut job, 7, &[20_000, 20_000, 20_000]), NO_STRAGGLERS);
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
    job.handle(at(0), Event::Scale(4.into()));
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
    let line = "generation 2 (lost): continued at step 0, 3.1 ms after the last step before the \
                change (detect 1.1, abort 0.2, agree 0.3, connect 0.4, state 0.5, first step 0.6)";
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
        lost: (0..1000).map(WorkerId).collect(),
        joined: (1000..2000).map(WorkerId).collect(),
        ..MembershipChange::default()
    };
    let mut history = history::JobHistory::default();
    (1..=200).for_each(|generation| history.publish(at(0), record(generation), Default::default()));
    let kept = |history: &history::JobHistory| {
        let mut all = history.changes.all().map(|change| change.generation.0);
        (all.next().unwrap(), all.count() + 1)
    };
    assert_eq!(kept(&history), (151, 50));
    let huge = MembershipChange { lost: vec![WorkerId(1); 200_000], ..record(201) };
    history.publish(at(0), huge, Default::default());
    assert_eq!(kept(&history), (201, 1));
}

#[test]
fn the_speed_is_measured_over_the_last_seconds_or_the_last_step() {
    let mut speed = Speed::default();
    speed.begin(at(1000));
    assert_eq!(speed.records_per_s(at(2000)), 0.0);
    (1..=100).for_each(|i| speed.count(at(1000 + i * 100), 10));
    assert!(
        (speed.records_per_s(at(11_000)) - 100.0).abs() < 3.0,
        "{}",
        speed.records_per_s(at(11_000))
    );
    (1..=10).for_each(|i| speed.count(at(11_000 + i * 10_000), 500));
    assert_eq!(speed.records_per_s(at(111_000)), 50.0);
    // The speed does not drop to 0 between two such steps, and decays without any.
    let later = speed.records_per_s(at(117_000));
    assert!((25.0..50.0).contains(&later), "{later}");
    assert!(speed.records_per_s(at(700_000)) < 1.0);
}

#[test]
fn a_wait_for_storage_and_the_time_before_a_take_over_are_not_part_of_the_speed() {
    let mut speed = Speed::default();
    speed.begin(at(0));
    (1..=100).for_each(|i| speed.count(at(i * 100), 10));
    speed.note_wait();
    assert!(speed.has_waited());
    // 60 s later; its records took an unknown time.
    speed.count(at(70_000), 500);
    assert_eq!((speed.has_waited(), speed.records_per_s(at(70_000))), (false, 0.0));
    (1..=10).for_each(|i| speed.count(at(70_000 + i * 100), 10));
    assert_eq!(speed.records_per_s(at(71_000)), 100.0);
    // A wait in the background, while steps go on.
    speed.note_wait();
    (11..=20).for_each(|i| speed.count(at(70_000 + i * 100), 10));
    assert_eq!(speed.records_per_s(at(72_000)), 100.0);
    // Another master does not know since when the records of the first report were made.
    let mut speed = Speed::default();
    speed.count(at(500_000), 4000);
    (1..=10).for_each(|i| speed.count(at(500_000 + i * 100), 10));
    assert_eq!(speed.records_per_s(at(501_000)), 100.0);
}

#[test]
fn no_time_left_is_told_while_workers_wait_for_storage() {
    let mut job = started(spec(), &[20]);
    deliver(&mut job, 1, committed(1, 1, &[(0, 4)]));
    assert!(job.status(at(1000)).eta_s.is_some());
    let waits = |storage: Option<&str>| WorkerMessage::StorageWait {
        storage: storage.map(str::to_owned),
        waited: Duration::from_secs(1),
    };
    deliver(&mut job, 2, waits(Some("s3://b")));
    assert_eq!(job.status(at(60_000)).eta_s, None);
    deliver(&mut job, 2, waits(None));
    assert_eq!(job.status(at(61_000)).eta_s, None, "nothing has been done since");
    deliver(&mut job, 1, committed(1, 2, &[(4, 8)]));
    assert!(job.status(at(62_000)).eta_s.is_some());
}

/// The workers of a group divide the records among themselves.
#[test]
fn a_training_job_shows_no_shards_and_no_leases() {
    let mut job = started(spec(), &[20]);
    deliver(&mut job, 1, committed(1, 1, &[(0, 4)]));
    let status = job.status(at(0));
    assert_eq!((status.shards, status.records_counted), (None, 4));
    assert!(status.workers.iter().all(|worker| worker.leased_records.is_none()), "{status:?}");
}

/// All members of a ring report their links; that of worker 2 is limited for this percentage.
fn report_links(job: &mut Job, seconds: std::ops::Range<u64>, percent: u64) {
    for second in seconds.step_by(2) {
        for from in 1..=3 {
            let limited = Duration::from_millis(if from == 2 { 20 * percent } else { 100 });
            let (to, measured) = (WorkerId(from % 3 + 1), Duration::from_secs(2));
            let pace = LinkPace { to, measured, limited, bytes: 24_000_000 };
            let heartbeat = Heartbeat { link_pace: Some(pace), ..Heartbeat::default() };
            let message = WorkerMessage::Heartbeat(heartbeat);
            job.handle(at(1000 * second), Event::Message { worker: WorkerId(from), message });
        }
    }
}

#[test]
fn a_link_that_limits_the_steps_is_shown_until_it_does_not_and_told_once() {
    let mut job = started(spec(), &[20]);
    let limiting = |job: &Job, seconds: u64| {
        job.status(at(1000 * seconds)).limiting_link.map(|link| (link.from.0, link.to.0))
    };
    let told = |job: &Job| {
        let events = job.status(at(0)).events;
        events.into_iter().filter(|line| line.contains("limits the steps")).collect::<Vec<_>>()
    };
    report_links(&mut job, 0..40, 90);
    assert_eq!((limiting(&job, 40), told(&job)), (None, vec![]), "no step is known to wait");
    // A step of 3 ms, of which 7 µs are computed.
    deliver(&mut job, 1, committed(1, 3, &[(0, 4)]));
    report_links(&mut job, 40..80, 90);
    assert_eq!(limiting(&job, 80), Some((2, 3)));
    let line =
        "the link from worker 2 to worker 3 limits the steps: the network delivers 13.3 MB/s";
    assert_eq!(told(&job), [line]);
    report_links(&mut job, 80..140, 5);
    let line = "the link from worker 2 to worker 3 limits the steps no longer: the network \
                delivered 13.3 MB/s and was the limit for 90 % of the time, now for 5 %";
    assert_eq!((limiting(&job, 140), &told(&job)[1..]), (None, &[line.to_owned()][..]));
    report_links(&mut job, 140..180, 90);
    assert_eq!((limiting(&job, 180), told(&job).len()), (Some((2, 3)), 3));
    // Nothing is known of the links of the next generation, and none leads to a lost worker.
    lose(&mut job, 180_000, 1);
    assert_eq!(limiting(&job, 180), None);
    report_links(&mut job, 180..220, 90);
    assert_eq!((limiting(&job, 220), told(&job).len()), (None, 3));
    report_links(&mut job, 220..230, 90);
    assert_eq!(told(&job).len(), 4);
}
