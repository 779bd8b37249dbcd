//! Table servers: members that hold rows of tables and compute no records.

use elasticdl_proto::WorkerOptions;
use elasticdl_proto::{Generation, WorkerId};

use super::super::*;
use super::directed::{actions, at, connect, deliver, formed, launch_at, lose, memberships};
use crate::job::testing::{dataset, spec};

/// A job of so many workers, up to 3, and of two table servers; its data set is known.
fn described(num_workers: u32) -> Job {
    let spec = JobSpec {
        num_workers,
        max_workers: 3,
        options: WorkerOptions { table_servers: 2, ..spec().options },
        ..spec()
    };
    spec.check().unwrap();
    let mut job = Job::new(spec);
    assert_eq!(launches(&mut job), [launch_at(1, 0)]);
    connect(&mut job, 1);
    deliver(&mut job, 1, WorkerMessage::Described(Ok(dataset(&[1000])), None));
    job
}

/// A group of so many workers and two table servers, which have the last numbers.
fn formed_with(num_workers: u32) -> Job {
    let mut job = described(num_workers);
    let members = u64::from(num_workers) + 2;
    (2..=members).for_each(|i| connect(&mut job, i));
    (1..=members).for_each(|i| deliver(&mut job, i, WorkerMessage::Ready { parameters: 10 }));
    deliver(&mut job, 1, formed(1, 0, &[]));
    actions(&mut job);
    job
}

fn launches(job: &mut Job) -> Vec<Action> {
    let mut actions = actions(job);
    actions.retain(|action| matches!(action, Action::Launch { .. }));
    actions
}

fn ended(job: &mut Job, launch: u64) {
    let exit = Exit::reclaimed(ReclaimCause::Unwanted, "it is not wanted any more");
    job.handle(at(10), Event::ProcessEnded { launch: LaunchId(launch), exit });
}

/// The members of the last group that was published.
fn members(job: &mut Job) -> Option<(Generation, Vec<u64>)> {
    let (_, last) = memberships(job).pop()?;
    Some((last.generation, last.members.iter().map(|(id, _)| id.0).collect()))
}

#[test]
fn table_servers_have_slots_after_those_of_all_workers_and_are_replaced_there() {
    let mut job = described(2);
    assert_eq!(launches(&mut job), [launch_at(2, 1), launch_at(3, 3), launch_at(4, 4)]);
    assert_eq!([1, 2, 3, 4].map(|i| job.serves_tables(WorkerId(i))), [false, false, true, true]);
    ended(&mut job, 3);
    assert_eq!(launches(&mut job), [launch_at(5, 3)]);
    ended(&mut job, 1);
    assert_eq!(launches(&mut job), [launch_at(6, 0)]);
}

#[test]
fn table_servers_that_are_too_few_for_all_copies_are_told() {
    let told = |table_servers| {
        let mut job = Job::new(JobSpec {
            options: WorkerOptions { table_servers, ..spec().options },
            ..spec()
        });
        matches!(job.poll_action(), Some(Action::Log(text)) if text.contains("copies of each row"))
    };
    assert_eq!([0, 1, 2].map(told), [false, true, false]);
}

#[test]
fn a_job_is_scaled_by_its_workers_alone() {
    let mut job = formed_with(2);
    job.handle(at(1), Event::Scale(1.into()));
    assert_eq!(members(&mut job).unwrap().1, [1, 3, 4]);
    job.handle(at(2), Event::Scale(3.into()));
    let slots: Vec<u32> = job.workers.launches().map(|(_, l)| l.slot()).collect();
    assert!(slots.iter().all(|&slot| slot < 5), "{slots:?}");
    assert_eq!(job.status(at(2)).workers_desired, 3);
}

#[test]
fn table_servers_alone_wait_for_a_worker_unless_the_job_is_ending() {
    let mut job = formed_with(1);
    lose(&mut job, 5, 1);
    assert_eq!(members(&mut job), None);
    ended(&mut job, 1);
    assert_eq!(launches(&mut job), [launch_at(4, 0)]);
    connect(&mut job, 4);
    deliver(&mut job, 4, WorkerMessage::Ready { parameters: 10 });
    assert_eq!(members(&mut job), Some((Generation(2), vec![2, 3, 4])));

    let mut job = formed_with(1);
    lose(&mut job, 5, 1);
    assert_eq!(members(&mut job), None);
    job.handle(at(6), Event::Stop);
    assert_eq!(members(&mut job), Some((Generation(2), vec![2, 3])));
}

#[test]
fn a_table_server_that_is_not_to_be_replaced_is_replaced_nevertheless() {
    let mut job = formed_with(2);
    let rule: ExitRule = "deleted=ignore".parse().unwrap();
    job.spec.policies.on_exit = vec![rule];
    let exit = Exit::reclaimed(ReclaimCause::Deleted, "deleted");
    job.handle(at(1), Event::ProcessEnded { launch: LaunchId(3), exit });
    assert_eq!(launches(&mut job), [launch_at(5, 3)]);
    assert_eq!(job.status(at(1)).workers_desired, 2);
}

#[test]
fn the_status_and_the_summary_name_table_servers() {
    let job = formed_with(2);
    let status = job.status(at(1));
    let roles: Vec<_> = status.workers.iter().map(|w| (&*w.state, w.serves_tables)).collect();
    let [worker, server] = [("training", false), ("serving", true)];
    assert_eq!(roles, [worker, worker, server, server]);
    let workers = job.summary(at(1)).workers;
    assert_eq!((workers.last, workers.table_servers), (4, 2));
}

#[test]
fn a_job_with_more_table_servers_than_it_may_have_workers_is_refused() {
    let refused = |spec: JobSpec| spec.check().unwrap_err().option;
    let work = Work::Evaluate { model: "m".into() };
    assert_eq!(
        refused(JobSpec {
            options: WorkerOptions { table_servers: 1, work, ..spec().options },
            ..spec()
        }),
        "--table-servers"
    );
    assert_eq!(
        refused(JobSpec {
            options: WorkerOptions { table_servers: u32::MAX, ..spec().options },
            ..spec()
        }),
        "--table-servers"
    );
    let odd = JobSpec {
        workers_per_pod: 3,
        min_workers: 3,
        options: WorkerOptions { table_servers: 2, ..spec().options },
        ..spec()
    };
    assert_eq!(refused(odd), "--table-servers");
}
