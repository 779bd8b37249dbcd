//! Limits of the number of workers that change while the job runs.

use std::collections::BTreeSet;

use elasticdl_proto::WorkerOptions;

use super::super::*;
use super::directed::{
    actions, at, connect, deliver, formed, launch_at, lose, membership, memberships, published,
    started,
};
use crate::job::testing::spec;

/// A change of the limits alone.
fn limits(min_workers: impl Into<Option<u32>>, max_workers: impl Into<Option<u32>>) -> Scaling {
    let (min_workers, max_workers) = (min_workers.into(), max_workers.into());
    Scaling { num_workers: None, min_workers, max_workers }
}

fn desired(job: &Job) -> [u32; 3] {
    let status = job.status(at(0));
    [status.workers_min, status.workers_desired, status.workers_max]
}

fn events(job: &Job) -> Vec<String> {
    job.status(at(0)).events
}

/// The numbers that a job of 3 workers, of 2 to 6, has after this change.
fn scaled(spec: &JobSpec, change: Scaling) -> Result<[u32; 3], String> {
    let spec = JobSpec { min_workers: 2, max_workers: 6, ..spec.clone() };
    spec.scaled(3, change).map(|job| [job.min_workers, job.num_workers, job.max_workers])
}

#[test]
fn a_change_is_possible_as_a_whole_or_refused_with_what_would_be_right() {
    let of = |change| scaled(&spec(), change);
    assert_eq!(of(5.into()), Ok([2, 5, 6]));
    assert_eq!(of(limits(None, 9)), Ok([2, 3, 9]));
    assert_eq!(of(limits(1, 2)), Ok([1, 2, 2]), "the number follows the maximum");
    assert_eq!(of(limits(4, None)), Ok([4, 4, 6]), "and the minimum");
    assert_eq!(of(limits(7, 9).or(8.into())), Ok([7, 8, 9]));
    let refused = |change, text: &str| {
        let why = of(change).unwrap_err();
        assert!(why.contains(text), "{why}");
    };
    refused(9.into(), "takes 2 to 6 workers, not 9: raise max-workers to 9, too");
    refused(limits(7, None), "min-workers 7 is more than max-workers 6; lower the first");
    refused(limits(None, 16_385), "--max-workers is \"16385\"; it must be at most 16384");
    refused(limits(0, None), "--min-workers is \"0\"; it must be at least 1");
    let spares = JobSpec { spares: 5, ..spec() };
    let why = scaled(&spares, limits(None, 2)).unwrap_err();
    assert_eq!(why, "--spares is \"5\"; it must be at most 4 with --max-workers 2");
    let options = WorkerOptions { table_servers: 2, ..spec().options };
    let tables = JobSpec { options, ..spec() };
    assert_eq!(scaled(&tables, limits(1, 6)), Ok([1, 3, 6]));
    let why = scaled(&tables, limits(None, 7)).unwrap_err();
    assert!(why.starts_with("a job with table servers keeps its max-workers 6"), "{why}");
    let policies = Policies { starts_core_together: true, ..Policies::default() };
    let gang = JobSpec { policies, ..spec() };
    assert_eq!(scaled(&gang, limits(2, 7)), Ok([2, 3, 7]));
    let why = scaled(&gang, limits(1, None)).unwrap_err();
    assert!(why.starts_with("this job keeps its min-workers 2: its scheduler"), "{why}");
}

#[test]
fn a_raised_maximum_admits_workers_also_of_the_next_master() {
    let mut job = started(JobSpec { num_workers: 2, max_workers: 2, ..spec() }, &[20]);
    job.handle(at(1), Event::Scale(3.into()));
    assert_eq!((actions(&mut job), desired(&job)), (vec![], [1, 2, 2]));
    job.handle(at(1), Event::Scale(limits(None, 4).or(3.into())));
    assert_eq!((actions(&mut job), desired(&job)), (vec![launch_at(3, 2)], [1, 3, 4]));
    let said = ["the job takes 1 to 4 workers from now on", "scaling from 2 workers to 3"];
    assert!(events(&job).ends_with(&said.map(String::from)), "{:?}", events(&job));
    // Requested again.
    job.handle(at(2), Event::Scale(limits(None, 4).or(3.into())));
    assert!(actions(&mut job).is_empty() && events(&job).ends_with(&said.map(String::from)));
    let mut next = Job::restore(job.to_persisted(), at(10)).unwrap();
    assert_eq!((desired(&next), next.requested()), ([1, 3, 4], limits(None, 4).or(3.into())));
    actions(&mut next);
    next.handle(at(11), Event::Scale(4.into()));
    assert_eq!((actions(&mut next), desired(&next)), (vec![launch_at(4, 3)], [1, 4, 4]));
}

#[test]
fn a_lowered_maximum_releases_workers_also_if_the_master_dies_before_they_have_left() {
    let mut job = started(spec(), &[20]);
    job.handle(at(1), Event::Scale(limits(None, 1)));
    assert_eq!(memberships(&mut job)[0].1, membership(2, &[1], false));
    assert_eq!(desired(&job), [1, 1, 1]);
    // The first group has not formed yet, so no other one follows.
    let mut job = published(spec(), &[20]);
    job.handle(at(1), Event::Scale(limits(None, 1)));
    assert_eq!((memberships(&mut job), desired(&job)), (vec![], [1, 1, 1]));
    let record = job.to_persisted();
    assert_eq!(record.membership.as_ref().map(|m| m.members.len()), Some(3));
    assert_eq!(desired(&Job::restore(record, at(10)).unwrap()), [1, 1, 1]);
}

#[test]
fn a_group_trains_on_below_a_raised_minimum_until_its_members_change() {
    let mut job = started(JobSpec { num_workers: 2, max_workers: 4, ..spec() }, &[20]);
    job.handle(at(1), Event::Scale(limits(4, None)));
    assert_eq!(actions(&mut job), [launch_at(3, 2), launch_at(4, 3)]);
    assert_eq!((&*job.status(at(1)).state, desired(&job)), ("running", [4, 4, 4]));
    for i in [3, 4] {
        assert_eq!(memberships(&mut job), [], "three are too few");
        connect(&mut job, i);
        deliver(&mut job, i, WorkerMessage::Ready { parameters: 10 });
        deliver(&mut job, i, WorkerMessage::CaughtUp { step: Some(1) });
    }
    assert_eq!(memberships(&mut job)[0].1, membership(2, &[1, 2, 3, 4], false));
    deliver(&mut job, 1, formed(2, 1, &[]));
    lose(&mut job, 2, 4);
    assert_eq!((memberships(&mut job), &*job.status(at(2)).state), (vec![], "waiting"));
    // Those that are there may go on.
    job.handle(at(3), Event::Scale(limits(3, None)));
    assert_eq!(memberships(&mut job)[0].1, membership(3, &[1, 2, 3], true));
}

#[test]
fn a_raised_minimum_makes_pods_that_wait_for_capacity_those_of_the_core() {
    let mut job = started(JobSpec { num_workers: 2, max_workers: 19, ..spec() }, &[20]);
    job.handle(at(1), Event::Scale(19.into()));
    let full = Wait::Capacity("no node has a free CPU".into());
    for launch in (3..=19).map(LaunchId) {
        job.handle(at(2), Event::LaunchWaits { launch, wait: full.clone() });
    }
    for action in actions(&mut job) {
        if let Action::Kill { launch } = action {
            let exit = Exit::reclaimed(ReclaimCause::Unwanted, "it is not wanted any more");
            job.handle(at(2), Event::ProcessEnded { launch, exit });
        }
    }
    let pending = |job: &Job| {
        let pending = job.status(at(2)).workers_pending;
        pending.iter().map(|launch| launch.slot).collect::<BTreeSet<_>>()
    };
    assert_eq!((actions(&mut job), pending(&job)), (vec![], [2, 3].into()), "the probes");
    job.handle(at(3), Event::Scale(limits(7, None)));
    assert_eq!(pending(&job), (2..9).collect(), "the core, and two probes");
}

#[test]
fn the_policy_of_autoscale_follows_the_limits() {
    let of = |max_workers| {
        started(JobSpec { num_workers: 2, max_workers, autoscale: true, ..spec() }, &[1000])
    };
    let most = |job: &Job| job.to_persisted().wanted_max;
    let mut job = of(4);
    let version = job.version();
    job.handle(at(1), Event::Scale(limits(None, 8)));
    assert_eq!((most(&job), desired(&job)), (Some(8), [1, 2, 8]));
    assert!(job.version() > version, "it is written for the next master, too");
    // What the user has scaled to stays the most.
    job.handle(at(1), Event::Scale(3.into()));
    job.handle(at(1), Event::Scale(limits(None, 9)));
    assert_eq!((most(&job), desired(&job)), (Some(3), [1, 3, 9]));
    job.handle(at(1), Event::Scale(limits(5, None)));
    assert_eq!((most(&job), desired(&job)), (Some(5), [5, 5, 9]));
    let next = Job::restore(job.to_persisted(), at(10)).unwrap();
    assert_eq!((most(&next), desired(&next)), (Some(5), [5, 5, 9]));
}
