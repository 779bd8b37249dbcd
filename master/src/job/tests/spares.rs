//! Spares: workers that have the state, and are members when others are lost.

use std::time::Duration;

use elasticdl_proto::{Generation, Spares, WorkerId, WorkerOptions, WorkerStatus};

use super::super::*;
use super::checkpoints::{asked, kept};
use super::directed::{
    actions, at, committed, connect, deliver, formed, launch_at, lose, memberships,
};
use super::hung::{asked_and_killed, pass};
use super::stall::heartbeat;
use super::takeover::{admit, reconnect, returned};
use crate::job::testing::{dataset, spec};

/// A group of three workers with so many spares, which are the last ones, and table servers.
fn formed_with(spares: u32, table_servers: u32) -> Job {
    formed_of(3, spares, table_servers)
}

fn formed_of(num_workers: u32, spares: u32, table_servers: u32) -> Job {
    let options = WorkerOptions { table_servers, ..spec().options };
    let spec = JobSpec {
        num_workers,
        min_workers: 1,
        max_workers: num_workers,
        spares,
        options,
        ..spec()
    };
    spec.check().unwrap();
    let mut job = Job::new(spec);
    connect(&mut job, 1);
    deliver(&mut job, 1, WorkerMessage::Described(Ok(dataset(&[1000])), None));
    let all = u64::from(num_workers + spares + table_servers);
    (2..=all).for_each(|i| connect(&mut job, i));
    (1..=all).for_each(|i| deliver(&mut job, i, WorkerMessage::Ready { parameters: 10 }));
    job
}

/// The spares have the state of the group that has formed.
fn caught_up(job: &mut Job, spares: std::ops::RangeInclusive<u64>) {
    spares.for_each(|i| deliver(job, i, WorkerMessage::CaughtUp { step: Some(1) }));
    actions(job);
}

/// The members of the last group that was published.
fn members(job: &mut Job) -> Option<(Generation, Vec<u64>)> {
    let (_, last) = memberships(job).pop()?;
    Some((last.generation, last.members.iter().map(|(id, _)| id.0).collect()))
}

fn states(job: &Job) -> Vec<String> {
    job.status(at(1)).workers.iter().map(|w| w.state.to_string()).collect()
}

#[test]
fn a_spare_takes_the_place_of_a_lost_member_at_once_and_another_one_starts() {
    let mut job = formed_with(1, 0);
    assert_eq!(members(&mut job), Some((Generation(1), vec![1, 2, 3])));
    deliver(&mut job, 1, formed(1, 0, &[]));
    // It was there before the group had a state.
    let is_fetch = |action: &Action| {
        matches!(action, Action::Send { worker: WorkerId(4), message: MasterMessage::Fetch(_) })
    };
    assert!(actions(&mut job).iter().any(is_fetch));
    assert_eq!(states(&job), ["training", "training", "training", "fetching"]);
    caught_up(&mut job, 4..=4);
    assert_eq!(states(&job), ["training", "training", "training", "spare"]);
    assert_eq!(job.status(at(1)).workers_desired, 3);
    lose(&mut job, 5, 2);
    let (_, last) = memberships(&mut job).pop().unwrap();
    assert!(last.abort);
    assert_eq!(last.members.iter().map(|(id, _)| id.0).collect::<Vec<_>>(), [1, 3, 4]);
    let exit = Exit::reclaimed(ReclaimCause::Unwanted, "it is not wanted any more");
    job.handle(at(6), Event::ProcessEnded { launch: LaunchId(2), exit });
    assert!(actions(&mut job).contains(&launch_at(5, 1)));
}

#[test]
fn a_job_that_is_scaled_down_keeps_its_spares() {
    let mut job = formed_with(1, 0);
    deliver(&mut job, 1, formed(1, 0, &[]));
    caught_up(&mut job, 4..=4);
    job.handle(at(1), Event::Scale(2.into()));
    assert_eq!(members(&mut job), Some((Generation(2), vec![1, 2])));
    assert_eq!(states(&job)[3], "spare");
}

#[test]
fn a_spare_does_not_take_the_place_of_a_table_server() {
    let mut job = formed_with(1, 2);
    let servers = (1..=6).filter(|&i| job.serves_tables(WorkerId(i))).collect::<Vec<_>>();
    let (_, first) = members(&mut job).unwrap();
    assert_eq!((first.len(), servers.len()), (5, 2));
    deliver(&mut job, 1, formed(1, 0, &[]));
    actions(&mut job);
    lose(&mut job, 5, servers[0]);
    let (_, next) = members(&mut job).unwrap();
    let expected: Vec<u64> = first.into_iter().filter(|&i| i != servers[0]).collect();
    assert_eq!(next, expected);
}

#[test]
fn a_spare_that_has_the_state_of_an_earlier_group_fetches_that_of_the_next_one() {
    let mut job = formed_with(2, 0);
    deliver(&mut job, 1, formed(1, 0, &[]));
    caught_up(&mut job, 4..=5);
    lose(&mut job, 5, 2);
    assert_eq!(members(&mut job), Some((Generation(2), vec![1, 3, 4])));
    deliver(&mut job, 1, formed(2, 7, &[]));
    assert_eq!(states(&job), ["training", "training", "training", "fetching"]);
    // A worker without the state is not one that a lost member is replaced by.
    lose(&mut job, 6, 3);
    assert_eq!(members(&mut job), Some((Generation(3), vec![1, 4])));
}

#[test]
fn a_silent_spare_takes_no_place() {
    let mut job = formed_with(2, 0);
    job.spec.options.worker_timeout = Some(Duration::from_millis(800));
    deliver(&mut job, 1, formed(1, 0, &[]));
    caught_up(&mut job, 4..=5);
    for i in [1, 2, 3, 5] {
        heartbeat(&mut job, 2000, i, None);
    }
    lose(&mut job, 2000, 2);
    assert_eq!(members(&mut job), Some((Generation(2), vec![1, 3, 5])));
}

#[test]
fn of_two_spares_that_which_was_heard_just_now_takes_the_place() {
    let mut job = formed_with(2, 0);
    job.spec.options.worker_timeout = Some(Duration::from_millis(800));
    deliver(&mut job, 1, formed(1, 0, &[]));
    caught_up(&mut job, 4..=5);
    [1, 2, 3, 4, 5].iter().for_each(|&i| heartbeat(&mut job, 1800, i, None));
    [1, 2, 3, 5].iter().for_each(|&i| heartbeat(&mut job, 2000, i, None));
    lose(&mut job, 2000, 2);
    assert_eq!(members(&mut job), Some((Generation(2), vec![1, 3, 5])));
}

/// Heartbeats of these workers from 2 s on, and checks. Returns when others were killed.
fn silence(job: &mut Job, heard: &[u64], until_ms: u64) -> Vec<(u64, LaunchId)> {
    let mut killed = Vec::new();
    for ms in (2000..until_ms).step_by(40) {
        heard.iter().for_each(|&i| heartbeat(job, ms, i, None));
        job.handle_timeout(at(ms));
        let is_kill =
            |action| if let Action::Kill { launch } = action { Some(launch) } else { None };
        killed.extend(actions(job).into_iter().filter_map(is_kill).map(|launch| (ms, launch)));
    }
    killed
}

#[test]
fn a_silent_spare_is_replaced_within_the_time_out_of_members_if_it_is_missed_and_later_if_not() {
    for (is_missed, limits) in [(true, 2840..2960), (false, 12_000..12_200)] {
        let mut job = formed_with(1, 0);
        job.spec.options.worker_timeout = Some(Duration::from_millis(800));
        deliver(&mut job, 1, formed(1, 0, &[]));
        caught_up(&mut job, 4..=4);
        [1, 2, 3, 4].iter().for_each(|&i| heartbeat(&mut job, 2000, i, None));
        job.watch_heartbeats(at(2000));
        let heard: &[u64] = if is_missed { &[1, 3] } else { &[1, 2, 3] };
        if is_missed {
            assert_eq!(silence(&mut job, &[1, 2, 3], 2900), []);
            lose(&mut job, 2900, 2);
            assert_eq!(members(&mut job), Some((Generation(2), vec![1, 3])));
        }
        let killed = silence(&mut job, heard, 13_000);
        let of_spare = killed.iter().find(|(_, launch)| *launch == LaunchId(4)).unwrap();
        assert!(limits.contains(&of_spare.0), "{is_missed}: {killed:?}");
    }
}

#[test]
fn a_missed_spare_whose_stream_ends_is_awaited_no_longer_than_a_member() {
    let mut job = formed_with(1, 0);
    job.spec.options.worker_timeout = Some(Duration::from_millis(800));
    deliver(&mut job, 1, formed(1, 0, &[]));
    caught_up(&mut job, 4..=4);
    job.handle(at(2000), Event::Disconnected { worker: WorkerId(4) });
    lose(&mut job, 2000, 2);
    assert_eq!(members(&mut job), Some((Generation(2), vec![1, 3])));
    job.handle_timeout(at(4900));
    assert!(!actions(&mut job).contains(&Action::Kill { launch: LaunchId(4) }));
    job.handle_timeout(at(5000));
    assert!(actions(&mut job).contains(&Action::Kill { launch: LaunchId(4) }));
}

#[test]
fn a_spare_that_never_follows_again_is_replaced_and_counts_as_a_failure() {
    // The last one fetches the state anew.
    for (caught_up_at, step, hangs) in [(1, 3, true), (0, 0, true), (1, 0, false)] {
        let mut job = formed_with(1, 0);
        job.spec.options.worker_timeout = Some(Duration::from_secs(1));
        job.spec.step_timeout = Some(Duration::from_secs(60));
        deliver(&mut job, 1, formed(1, 0, &[]));
        deliver(&mut job, 4, WorkerMessage::CaughtUp { step: Some(caught_up_at) });
        actions(&mut job);
        follow(&mut job, 57 + step.max(1), &[(4, step)]);
        job.watch_heartbeats(at(60_000));
        pass(&mut job, (60, 64), &[1, 2, 3, 4], &[]);
        assert_eq!(asked_and_killed(&mut job), (vec![], vec![]), "the group makes no step, either");
        for second in 64..70 {
            follow(&mut job, 1, &[(4, step)]);
            pass(&mut job, (second, second + 1), &[1, 2, 3, 4], &[]);
        }
        assert_eq!(asked_and_killed(&mut job).1, if hangs { vec![4] } else { vec![] });
        assert_eq!(job.lifecycle.failures(), u32::from(hangs));
        let text = "worker 4 has not made a step with its group within 60 s (--step-timeout;";
        let events = job.status(at(73_000)).events;
        assert_eq!(events.iter().any(|event| event.contains(text)), hangs, "{events:?}");
    }
}

#[test]
fn a_new_master_keeps_spares_and_what_they_have() {
    for is_reported in [true, false] {
        let mut job = formed_with(1, 0);
        deliver(&mut job, 1, formed(1, 0, &[]));
        caught_up(&mut job, 4..=4);
        let mut job = Job::restore(job.to_persisted(), at(1000)).unwrap();
        (1..=3).for_each(|i| reconnect(&mut job, 1010, i, 1));
        reconnect(&mut job, 1010, 4, 0);
        assert!(actions(&mut job).contains(&admit(4)));
        (1..=4).for_each(|i| deliver(&mut job, i, returned(0)));
        deliver(&mut job, 1, formed(1, 0, &[]));
        if is_reported {
            deliver(&mut job, 4, WorkerMessage::CaughtUp { step: Some(1) });
        }
        deliver(&mut job, 4, WorkerMessage::Ready { parameters: 10 });
        assert_eq!(states(&job)[3], if is_reported { "spare" } else { "fetching" });
        caught_up(&mut job, 4..=4);
        lose(&mut job, 2000, 2);
        let next = members(&mut job).unwrap().1;
        assert_eq!(next, [1, 3, 4]);
    }
}

#[test]
fn if_all_members_are_lost_a_spare_that_has_the_state_goes_on_before_one_that_lacks_it() {
    let mut job = formed_of(1, 2, 0);
    deliver(&mut job, 1, formed(1, 0, &[]));
    caught_up(&mut job, 3..=3);
    lose(&mut job, 5, 1);
    assert_eq!(members(&mut job), Some((Generation(2), vec![3])));
}

#[test]
fn a_spare_that_goes_on_alone_from_an_earlier_step_is_no_secret() {
    for (step, said) in [(2, 0), (1, 1)] {
        let mut job = formed_of(1, 1, 0);
        deliver(&mut job, 1, formed(1, 0, &[]));
        deliver(&mut job, 1, committed(1, 1, &[(0, 10)]));
        deliver(&mut job, 1, committed(1, 2, &[(10, 20)]));
        caught_up(&mut job, 2..=2);
        lose(&mut job, 5, 1);
        assert_eq!(members(&mut job), Some((Generation(2), vec![2])));
        deliver(&mut job, 2, formed(2, step, &[(0, 10 * step)]));
        let events = job.status(at(6)).events;
        let text =
            "goes on from step 1; 1 step after it, which only workers that are lost have made";
        let found = events.iter().filter(|event| event.contains(text)).count();
        assert_eq!(found, said, "{events:?}");
    }
}

/// Heartbeats of spares whose states contain so many steps at most, each second while the group
/// makes `steps` more steps.
fn follow(job: &mut Job, steps: u64, spares: &[(u64, u64)]) {
    let (generation, before) = (job.group.generation().0, job.status(at(0)).step);
    let reporter = job.group.members()[0];
    for step in before + 1..=before + steps {
        let message = committed(generation, step, &[]);
        job.handle(at(step * 1000), Event::Message { worker: reporter, message });
        for &(spare, step_of_spare) in spares {
            let step_of_spare = Some(step_of_spare.min(step));
            let heartbeat = Heartbeat { step: step_of_spare, ..Heartbeat::default() };
            let message = WorkerMessage::Heartbeat(heartbeat);
            job.handle(at(step * 1000), Event::Message { worker: WorkerId(spare), message });
        }
    }
    actions(job);
}

#[test]
fn a_spare_that_does_not_follow_takes_no_place_until_it_does() {
    let mut job = formed_with(2, 0);
    deliver(&mut job, 1, formed(1, 0, &[]));
    caught_up(&mut job, 4..=5);
    follow(&mut job, 20, &[(4, 3), (5, NEWEST)]);
    lose(&mut job, 20_000, 2);
    assert_eq!(members(&mut job), Some((Generation(2), vec![1, 3, 5])));
    let mut job = formed_with(1, 0);
    deliver(&mut job, 1, formed(1, 0, &[]));
    caught_up(&mut job, 4..=4);
    follow(&mut job, 20, &[(4, 3)]);
    lose(&mut job, 20_000, 2);
    assert_eq!(members(&mut job), Some((Generation(2), vec![1, 3])));
    deliver(&mut job, 1, formed(2, 20, &[]));
    deliver(&mut job, 4, WorkerMessage::CaughtUp { step: Some(20) });
    assert_eq!(members(&mut job), Some((Generation(3), vec![1, 3, 4])));
}

#[test]
fn the_status_tells_of_each_spare_whether_it_follows_and_how_often_one_was_promoted() {
    let mut job = formed_with(2, 0);
    let spares = |job: &Job, s: u64| {
        let status = job.status(at(s * 1000));
        let of_worker =
            |w: &WorkerStatus| (w.rank.is_none()).then(|| (w.state.to_string(), w.step));
        (status.spares, status.workers.iter().filter_map(of_worker).collect::<Vec<_>>())
    };
    deliver(&mut job, 1, formed(1, 0, &[]));
    caught_up(&mut job, 4..=5);
    follow(&mut job, 20, &[(4, 3), (5, NEWEST)]);
    let workers = vec![("lagging".to_owned(), Some(3)), ("spare".to_owned(), Some(20))];
    let known = Spares { desired: 2, caught_up: 1, promoted: 0 };
    assert_eq!(spares(&job, 20), (Some(known), workers));
    lose(&mut job, 20_000, 2);
    let known = Spares { desired: 2, caught_up: 0, promoted: 1 };
    assert_eq!(spares(&job, 20).0, Some(known));
    let next = Job::restore(job.to_persisted(), at(21_000)).unwrap();
    assert_eq!(next.summary(at(21_000)).workers.spares, Some(known));
}

#[test]
fn the_events_tell_once_of_each_spare_and_of_each_promotion() {
    let mut job = formed_with(2, 0);
    let mut seen = 0;
    let mut news = |job: &Job| {
        let events = job.status(at(30)).events;
        let new = events[std::mem::replace(&mut seen, events.len())..].to_vec();
        new.into_iter().filter(|line| line.contains("spare") || line.contains("continue"))
    };
    deliver(&mut job, 1, formed(1, 0, &[]));
    caught_up(&mut job, 4..=4);
    caught_up(&mut job, 4..=5);
    let is_spare = |id| format!("worker {id} is a spare, and has caught up with step 1");
    assert_eq!(news(&job).collect::<Vec<_>>(), [is_spare(4), is_spare(5)]);
    lose(&mut job, 5, 2);
    let line = "generation 2: worker 2 lost, worker 4 promoted; 3 workers continue";
    assert_eq!(news(&job).collect::<Vec<_>>(), [line]);
    let change = job.summary(at(30)).memberships.pop().unwrap();
    assert_eq!((change.joined, change.promoted), (vec![WorkerId(4)], vec![WorkerId(4)]));
    // The other one follows the new group.
    deliver(&mut job, 1, formed(2, 1, &[]));
    caught_up(&mut job, 5..=5);
    assert_eq!(news(&job).count(), 0);
}

#[test]
fn a_spare_that_catches_up_before_the_first_step_has_the_state() {
    let mut job = formed_of(1, 1, 0);
    deliver(&mut job, 1, formed(1, 0, &[]));
    deliver(&mut job, 2, WorkerMessage::CaughtUp { step: Some(0) });
    assert_eq!(job.status(at(1)).spares.unwrap().caught_up, 1);
    follow(&mut job, 20, &[(2, NEWEST)]);
    assert_eq!(job.status(at(20_000)).spares.unwrap().caught_up, 1);
    lose(&mut job, 20_000, 1);
    let line = "generation 2: worker 1 lost, worker 2 promoted; 1 worker continues";
    assert_eq!(job.status(at(20_000)).events.last().unwrap(), line);
}

#[test]
fn a_spare_that_takes_over_from_the_last_member_while_it_leaves_is_promoted() {
    let mut job = formed_of(1, 1, 0);
    deliver(&mut job, 1, formed(1, 0, &[]));
    caught_up(&mut job, 2..=2);
    follow(&mut job, 20, &[(2, NEWEST)]);
    deliver(&mut job, 1, WorkerMessage::Leaving);
    let line = "generation 2: worker 2 promoted; 2 workers continue";
    assert_eq!(job.status(at(20_000)).events.last().unwrap(), line);
}

#[test]
fn a_group_that_is_lost_before_its_first_step_loses_no_state() {
    let mut job = formed_of(1, 1, 0);
    deliver(&mut job, 1, formed(1, 0, &[]));
    lose(&mut job, 5, 1);
    let line = "generation 2: worker 1 lost, worker 2 joined; 1 worker restarts from step 0";
    assert_eq!(job.status(at(5)).events.last().unwrap(), line);
}

#[test]
fn spares_of_a_sharded_optimizer_need_no_state() {
    let mut job = formed_with(2, 0);
    job.spec.options.shard_optimizer = true;
    deliver(&mut job, 1, formed(1, 0, &[]));
    (4..=5).for_each(|i| deliver(&mut job, i, WorkerMessage::CaughtUp { step: None }));
    deliver(&mut job, 1, committed(1, 1, &[(0, 10)]));
    let spares = |caught_up, promoted| Some(Spares { desired: 2, caught_up, promoted });
    assert_eq!(job.status(at(1)).spares, spares(2, 0));
    lose(&mut job, 5, 2);
    let events = job.status(at(5)).events;
    let line = "generation 2: worker 2 lost, worker 4 promoted; 3 workers continue";
    assert_eq!(events.last().unwrap(), line);
    let is_spare = "worker 5 is a spare, and gets the state when it joins";
    assert!(events.iter().any(|event| event == is_spare), "{events:?}");
    assert_eq!(job.status(at(5)).spares, spares(1, 1));
    // If all members are lost, the spares have no part of the state.
    let gone = [1, 3, 4].map(WorkerId);
    gone.iter().for_each(|worker| lose(&mut job, 6, worker.0));
    let events = job.status(at(6)).events;
    assert!(events.last().unwrap().ends_with("from step 0, as the state is lost"), "{events:?}");
}

#[test]
fn a_spare_that_fetches_from_a_group_that_is_lost_gets_the_donors_of_the_next_one() {
    let mut job = formed_of(1, 2, 0);
    deliver(&mut job, 1, formed(1, 0, &[]));
    assert_eq!(states(&job), ["training", "fetching", "fetching"]);
    lose(&mut job, 5, 1);
    let (_, next) = members(&mut job).unwrap();
    let (member, spare) = if next == [2] { (2, 3) } else { (3, 2) };
    deliver(&mut job, member, formed(2, 0, &[]));
    let donors = |action| match action {
        Action::Send { worker, message: MasterMessage::Fetch(donors) } if worker.0 == spare => {
            Some(donors.iter().map(|(id, _)| id.0).collect::<Vec<_>>())
        }
        _ => None,
    };
    assert_eq!(actions(&mut job).into_iter().find_map(donors), Some(vec![member]));
}

#[test]
fn more_spares_than_can_be_needed_are_refused() {
    let of = |spares| JobSpec { num_workers: 2, max_workers: 3, spares, ..spec() };
    assert!(of(6).check().is_ok());
    let error = of(7).check().unwrap_err().to_string();
    assert_eq!(error, "--spares is \"7\"; it must be at most 6 with --max-workers 3");
}

#[test]
fn if_all_members_are_lost_the_spare_with_the_newest_state_goes_on() {
    for (spares, taken) in [
        (vec![(2, 3), (3, NEWEST)], 3),
        (vec![(2, 19), (3, NEWEST)], 3),
        (vec![(2, 3), (3, 4)], 3),
        // It has the only state.
        (vec![(2, 3)], 2),
    ] {
        let mut job = formed_of(1, 2, 0);
        deliver(&mut job, 1, formed(1, 0, &[]));
        spares.iter().for_each(|&(spare, _)| caught_up(&mut job, spare..=spare));
        follow(&mut job, 20, &spares);
        lose(&mut job, 20_000, 1);
        assert_eq!(members(&mut job), Some((Generation(2), vec![taken])), "{spares:?}");
    }
}

#[test]
fn a_spare_that_hangs_as_it_is_to_go_on_is_replaced_by_another_one() {
    let mut job = formed_of(1, 2, 0);
    job.spec.options.worker_timeout = Some(Duration::from_secs(1));
    deliver(&mut job, 1, formed(1, 0, &[]));
    caught_up(&mut job, 2..=3);
    lose(&mut job, 5, 1);
    assert_eq!(members(&mut job), Some((Generation(2), vec![2])));
    job.watch_heartbeats(at(1000));
    pass(&mut job, (1, 60), &[2, 3], &[]);
    assert_eq!(asked_and_killed(&mut job).0, [0; 0]);
    pass(&mut job, (60, 62), &[2, 3], &[]);
    assert_eq!(asked_and_killed(&mut job).0, [2]);
    pass(&mut job, (62, 65), &[2, 3], &[]);
    assert_eq!(members(&mut job), Some((Generation(3), vec![3])));
    let events = job.status(at(65_000)).events;
    let text = "worker 2 has not joined its group within 60 s";
    assert!(events.iter().any(|event| event.contains(text)), "{events:?}");
    // The last one has the only state.
    pass(&mut job, (65, 130), &[3], &[]);
    assert_eq!(asked_and_killed(&mut job).0, [0; 0]);
}

#[test]
fn losses_of_all_members_do_not_put_off_a_checkpoint() {
    let mut job = formed_of(1, 2, 0);
    job.spec.options.checkpoints = kept().options.checkpoints;
    deliver(&mut job, 1, formed(1, 0, &[]));
    // The first one is due after 30 s.
    for (step, worker, s, wants) in [(1, 2, 20, false), (2, 3, 40, true)] {
        let message = committed(worker - 1, step, &[(step - 1, step)]);
        deliver(&mut job, worker - 1, message);
        (worker..=3)
            .for_each(|i| deliver(&mut job, i, WorkerMessage::CaughtUp { step: Some(step) }));
        lose(&mut job, s * 1000, worker - 1);
        assert_eq!(members(&mut job), Some((Generation(worker), vec![worker])));
        let message = formed(worker, step, &[(0, step)]);
        job.handle(at(s * 1000), Event::Message { worker: WorkerId(worker), message });
        assert_eq!(asked(&mut job), if wants { vec![worker] } else { vec![] });
    }
}

/// A spare that follows its group has made the same steps.
const NEWEST: u64 = u64::MAX;
