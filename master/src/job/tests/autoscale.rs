//! `--autoscale` in a job: what it starts, releases and says.

use elasticdl_proto::{Generation, WorkerId};

use super::super::*;
use super::directed::{actions, at, connect, deliver, formed, launch_at, started};
use crate::job::testing::{dataset, spec};

/// A job of two workers, of at least `min_workers`.
fn autoscaled(min_workers: u32) -> Job {
    let spec = JobSpec { num_workers: 2, min_workers, max_workers: 6, autoscale: true, ..spec() };
    spec.check().unwrap();
    started(spec, &[1000])
}

/// The group trains at `rate` records/s for as long as a measurement takes. Returns the actions.
fn train(job: &mut Job, rate: u64) -> Vec<Action> {
    let generation = job.group.generation();
    for _ in 0..6 {
        let step = job.status(at(0)).step + 4;
        let times = StepTimes { steps: 4, step_us: 1_000_000, reduce_us: 0 };
        let report = Committed { generation, step, records: rate, times, ..Committed::default() };
        deliver(job, 1, WorkerMessage::Committed(report));
    }
    actions(job)
}

/// Launch `i` becomes a member.
fn join(job: &mut Job, i: u64) {
    connect(job, i);
    deliver(job, i, WorkerMessage::Ready { parameters: 10 });
    deliver(job, i, WorkerMessage::CaughtUp { step: Some(1) });
    let (generation, step) = (job.group.generation().0, job.status(at(0)).step);
    deliver(job, 1, formed(generation, step, &[]));
    actions(job);
}

fn wanted(job: &Job) -> u32 {
    job.status(at(0)).workers_desired
}

fn last_event(job: &Job) -> String {
    job.status(at(0)).events.last().unwrap().clone()
}

#[test]
fn a_worker_is_started_kept_if_it_pays_and_released_if_not() {
    let mut job = autoscaled(1);
    assert_eq!(job.status(at(0)).autoscale, None);
    assert_eq!(train(&mut job, 1000), [launch_at(3, 2)]);
    assert_eq!(last_event(&job), "autoscale: 2 workers make 1000 records/s; trying 3");
    assert_eq!(train(&mut job, 1000), [], "the third one has not joined yet");
    join(&mut job, 3);
    assert_eq!(train(&mut job, 1450), [launch_at(4, 3)]);
    let found = "3 workers make 1450 records/s, 45 % more than 2, so they pay; trying 4";
    assert_eq!(job.status(at(0)).autoscale.as_deref(), Some(found));
    join(&mut job, 4);
    assert_eq!(job.group.members().len(), 4);
    train(&mut job, 1460);
    let found = "autoscale: 4 workers make 1460 records/s, 1 % more than 3, so the further ones \
                 don't pay; 3 stay, to be measured again in 10 min";
    let events = job.status(at(0)).events;
    assert!(events.iter().any(|event| event == found), "{events:?}");
    assert_eq!((wanted(&job), job.group.members().len()), (3, 3));
    assert_eq!(job.group.generation(), Generation(4));
}

#[test]
fn an_unmeasured_job_is_left_as_it_is() {
    let spec = JobSpec { num_workers: 2, max_workers: 6, ..spec() };
    let mut job = started(spec, &[1000]);
    assert_eq!(train(&mut job, 1000), []);
    assert_eq!(job.status(at(0)).autoscale, None);

    // Not all of the wanted workers train.
    let mut job = autoscaled(1);
    job.handle(at(1), Event::ProcessEnded { launch: LaunchId(2), exit: Exit::Signal(9) });
    deliver(&mut job, 1, formed(2, 0, &[]));
    actions(&mut job);
    assert_eq!(train(&mut job, 1000), []);
    join(&mut job, 3);
    assert_eq!(train(&mut job, 1000), [launch_at(4, 2)]);
}

#[test]
fn the_number_that_the_user_scales_to_is_never_exceeded_also_by_the_next_master() {
    let mut job = autoscaled(2);
    job.handle(at(1), Event::Scale(3.into()));
    assert_eq!(last_event(&job), "scaling from 2 workers to 3, which --autoscale does not exceed");
    actions(&mut job);
    join(&mut job, 3);
    // The user has not measured whether they pay.
    train(&mut job, 1500);
    assert_eq!(wanted(&job), 2);

    let mut job = autoscaled(2);
    job.handle(at(1), Event::Scale(2.into()));
    assert_eq!(train(&mut job, 1000), []);
    let found = "2 workers make 1000 records/s; 2 stay, to be measured again in 10 min";
    assert_eq!(job.status(at(0)).autoscale.as_deref(), Some(found));
    let next = Job::restore(job.to_persisted(), at(10)).unwrap();
    assert_eq!(next.to_persisted().wanted_max, Some(2));
    let json = serde_json::to_value(job.to_persisted()).unwrap();
    assert_eq!(json["wanted_max"], 2);
}

#[test]
fn a_worker_that_the_user_s_rule_does_not_replace_is_not_added_again() {
    let on_exit = vec!["42=ignore".parse().unwrap()];
    let spec = JobSpec {
        num_workers: 3,
        min_workers: 2,
        max_workers: 6,
        autoscale: true,
        policies: Policies { on_exit, ..Policies::default() },
        ..spec()
    };
    let mut job = started(spec, &[1000]);
    job.handle(at(1), Event::ProcessEnded { launch: LaunchId(3), exit: Exit::Code(42) });
    deliver(&mut job, 1, formed(2, 0, &[]));
    actions(&mut job);
    assert_eq!((wanted(&job), train(&mut job, 1000)), (2, vec![]));
}

#[test]
fn a_pod_without_capacity_is_withdrawn_and_preempted_ones_are_not_added_to() {
    let waits = |job: &mut Job, launch| {
        let wait = Wait::Capacity("0/3 nodes are available".into());
        job.handle(at(1), Event::LaunchWaits { launch: LaunchId(launch), wait });
        actions(job);
    };
    let mut job = autoscaled(1);
    assert_eq!(train(&mut job, 1000), [launch_at(3, 2)]);
    waits(&mut job, 3);
    assert_eq!(train(&mut job, 1000), [Action::Kill { launch: LaunchId(3) }]);
    assert_eq!(wanted(&job), 2);
    let found = "there is no capacity for 3 workers; 2 stay, to be measured again in 10 min";
    assert_eq!(job.status(at(0)).autoscale.as_deref(), Some(found));

    // A job of higher priority takes the capacity of a worker.
    let mut job = autoscaled(1);
    let exit = Exit::reclaimed(ReclaimCause::Preempted, "preempted");
    job.handle(at(1), Event::ProcessEnded { launch: LaunchId(2), exit });
    deliver(&mut job, 1, formed(2, 0, &[]));
    waits(&mut job, 3);
    assert_eq!((train(&mut job, 1000), wanted(&job)), (vec![], 2));
}

#[test]
fn a_suspended_job_measures_anew_when_it_is_resumed() {
    let checkpoints = CheckpointSpec {
        dir: "/c".into(),
        every: CheckpointEvery::Time(std::time::Duration::from_secs(60)),
        keep: 3,
        exclusive: false,
    };
    let mut job = autoscaled(1);
    job.spec.options.checkpoints = Some(checkpoints);
    assert_eq!(train(&mut job, 1000), [launch_at(3, 2)]);
    job.handle(at(1), Event::Suspend);
    actions(&mut job);
    let found = job.status(at(0)).autoscale;
    train(&mut job, 5000);
    assert_eq!((job.status(at(0)).autoscale, wanted(&job)), (found, 3));
    job.handle(at(2), Event::Resume);
    assert_eq!(job.status(at(0)).autoscale, None);
}

#[test]
fn table_servers_and_spares_are_no_workers_that_are_measured() {
    let mut options = spec().options;
    options.table_servers = 1;
    let spec =
        JobSpec { num_workers: 2, max_workers: 6, spares: 1, autoscale: true, options, ..spec() };
    let mut job = Job::new(spec);
    connect(&mut job, 1);
    let data = dataset(&[1000]);
    deliver(&mut job, 1, WorkerMessage::Described(Ok(data), None));
    (2..=4).for_each(|i| connect(&mut job, i));
    (1..=4).for_each(|i| deliver(&mut job, i, WorkerMessage::Ready { parameters: 10 }));
    deliver(&mut job, 1, formed(1, 0, &[]));
    assert_eq!(job.group.members().len(), 3);
    actions(&mut job);
    let launched = train(&mut job, 1000);
    assert!(matches!(&launched[..], [Action::Launch { launch: LaunchId(5), .. }]), "{launched:?}");
    assert!(job.group.members().contains(&WorkerId(1)));
}
