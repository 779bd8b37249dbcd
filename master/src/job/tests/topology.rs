//! The order of members that run in several zones.

use elasticdl_proto::{Location, WorkerId};

use super::super::*;
use super::directed::{
    actions, at, connect, deliver, formed, lose, membership, memberships, started,
};
use crate::job::testing::{dataset, spec};

fn locate(job: &mut Job, launch: u64, zone: &str) {
    let location = Location { zone: zone.into(), ..Location::default() };
    job.handle(at(0), Event::LaunchLocated { launch: LaunchId(launch), location });
}

#[test]
fn members_of_a_zone_are_neighbours_and_joiners_come_to_their_zone() {
    let spec = JobSpec { num_workers: 4, max_workers: 5, ..spec() };
    let mut job = Job::new(spec);
    connect(&mut job, 1);
    deliver(&mut job, 1, WorkerMessage::Described(Ok(dataset(&[20])), None));
    (2..=4).for_each(|worker| connect(&mut job, worker));
    for (worker, zone) in [(1, "a"), (2, "b"), (3, "a"), (4, "b")] {
        locate(&mut job, worker, zone);
        deliver(&mut job, worker, WorkerMessage::Ready { parameters: 10 });
    }
    let first = membership(1, &[1, 3, 2, 4], false);
    assert_eq!(memberships(&mut job).pop().unwrap().1, first);
    deliver(&mut job, 1, formed(1, 0, &[]));
    job.handle(at(0), Event::Scale(5.into()));
    connect(&mut job, 5);
    locate(&mut job, 5, "a");
    actions(&mut job);
    deliver(&mut job, 5, WorkerMessage::Ready { parameters: 10 });
    deliver(&mut job, 5, WorkerMessage::CaughtUp { step: Some(1) });
    let second = membership(2, &[1, 3, 5, 2, 4], false);
    assert_eq!(memberships(&mut job).pop().unwrap().1, second);
    // The next master knows where workers are when they return, and changes nothing by itself.
    let persisted = job.to_persisted();
    let mut next = Job::restore(persisted, at(1000)).unwrap();
    assert_eq!(memberships(&mut next), []);
}

#[test]
fn without_places_survivors_keep_their_order_and_joiners_come_last() {
    let mut job = started(spec(), &[20]);
    lose(&mut job, 1, 2);
    let survivors = membership(2, &[1, 3], true);
    assert_eq!(memberships(&mut job).pop().unwrap().1, survivors);
    assert!(job.workers.get(WorkerId(2)).is_none());
}
