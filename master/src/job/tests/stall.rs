//! Groups in which everybody waits.

use std::time::Duration;

use elasticdl_proto::{Generation, WorkerId};

use super::super::testing::spec;
use super::super::*;
use super::directed::{actions, address, at, committed, finished, formed, launch_at, say};

/// A started job of four workers, launch n is worker n, ring 1, 2, 3, 4; they may be silent for a
/// second.
fn watched() -> Job {
    let worker_timeout = Some(Duration::from_secs(1));
    super::directed::started(
        JobSpec { worker_timeout, num_workers: 4, max_workers: 5, min_workers: 1, ..spec() },
        &[200],
    )
}

/// Where a worker waits: generation, operation, received, sent.
type Place = (u64, u64, u64, u64);

/// For each of the first workers whether it waits, and where.
type Beats<'a> = &'a [(u64, Option<Place>)];

/// Lets the time pass from `from` until `until`, in looks of 50 ms and beats of 100 ms. Those who
/// wait do so since `from`.
fn pass(job: &mut Job, from: u64, until: u64, beats: Beats<'_>) {
    for ms in (from..=until).step_by(50) {
        for &(worker, place) in beats.iter().filter(|_| ms % 100 == 0) {
            heartbeat(job, ms, worker, place.map(|place| (place, ms - from)));
        }
        job.handle_timeout(at(ms));
    }
}

fn heartbeat(job: &mut Job, ms: u64, worker: u64, waits: Option<(Place, u64)>) {
    let stall = waits.map(|((generation, operation, received, sent), since)| Stall {
        generation: Generation(generation),
        operation,
        received,
        sent,
        waits_for_next: false,
        since: Duration::from_millis(since),
    });
    job.handle(
        at(ms),
        Event::Message { worker: WorkerId(worker), message: FromWorker::Heartbeat(stall) },
    );
}

/// Who was taken out so far, and the members of the newest generation if one was published.
fn outcome(job: &mut Job) -> (Vec<u64>, Option<(Vec<u64>, bool)>) {
    let done = actions(job);
    let out = done.iter().filter_map(|action| match action {
        Action::Disconnect { worker } => Some(worker.0),
        _ => None,
    });
    let published = done.iter().rev().find_map(|action| match action {
        Action::Send { message: ToWorker::Membership(m), .. } => {
            Some((m.members.iter().map(|(id, _)| id.0).collect(), m.abort))
        }
        _ => None,
    });
    (out.collect(), published)
}

fn unreachable(generation: u64, suspect: u64) -> FromWorker {
    FromWorker::Broken {
        generation: Generation(generation),
        suspect: Some(WorkerId(suspect)),
        error: "no answer".into(),
        unreachable: true,
    }
}

const NOBODY: (Vec<u64>, Option<(Vec<u64>, bool)>) = (Vec::new(), None);

#[test]
fn who_is_cut_off_from_both_neighbours_is_taken_out_when_all_have_waited_for_the_timeout() {
    let mut job = watched();
    // Links 2-3 and 3-4 keep what is sent; 4 and 1 can send nothing more before they hear of it.
    let beats =
        [(1, (1, 9, 30, 40)), (2, (1, 9, 40, 50)), (3, (1, 9, 20, 30)), (4, (1, 9, 20, 30))];
    let beats = beats.map(|(worker, place)| (worker, Some(place)));
    pass(&mut job, 100, 1050, &beats);
    assert_eq!(outcome(&mut job), NOBODY, "a second is not too long");
    pass(&mut job, 100, 1100, &beats);
    assert_eq!(outcome(&mut job), (vec![3], Some((vec![1, 2, 4], true))));
    let record = job.summary(at(1100)).memberships.pop().unwrap();
    assert_eq!((record.cause, record.lost), (Cause::Hung, vec![WorkerId(3)]));
    job.handle(at(1200), Event::ProcessEnded { launch: LaunchId(3), exit: Exit::Signal(9) });
    assert!(actions(&mut job).contains(&launch_at(5, 2)), "another takes its place");
}

#[test]
fn nobody_is_taken_out_while_one_member_computes() {
    let waits = Some((1, 9, 20, 30));
    for busy in 1..=4 {
        let mut job = watched();
        let beats = [1, 2, 3, 4].map(|worker| (worker, waits.filter(|_| worker != busy)));
        pass(&mut job, 100, 60_000, &beats);
        assert_eq!(outcome(&mut job), NOBODY, "worker {busy} computes");
    }
}

#[test]
fn a_member_that_moves_bytes_now_and_then_keeps_all_in() {
    let mut job = watched();
    for n in 0..20 {
        let from = 100 + n * 900;
        let place = Some((1, 9, 20 + n, 30));
        pass(&mut job, from, from + 850, &[(1, place), (2, place), (3, place), (4, place)]);
    }
    assert_eq!(outcome(&mut job), NOBODY);
}

#[test]
fn a_silent_worker_is_the_one_to_go_whatever_its_neighbours_wait_for() {
    let mut job = watched();
    // Worker 4 computes until 1000. By the numbers it would be the one, once it has waited for as
    // long as the others; but 2, which did so first, has stopped before that.
    for ms in (100..=2700).step_by(50) {
        let stops = |worker| worker == 2 && ms > 1500;
        for worker in [1, 2, 3].into_iter().filter(|worker| ms % 100 == 0 && !stops(*worker)) {
            heartbeat(&mut job, ms, worker, Some(((1, 9, 30, 40), ms - 100)));
        }
        if ms % 100 == 0 {
            heartbeat(&mut job, ms, 4, (ms > 1000).then(|| ((1, 9, 20, 30), ms - 1000)));
        }
        job.handle_timeout(at(ms));
    }
    assert_eq!(outcome(&mut job), (vec![2], Some((vec![1, 3, 4], true))));
}

#[test]
fn of_two_halves_the_later_ranks_go() {
    let mut job = watched();
    // Links 2-3 and 4-1 keep what is sent.
    let beats =
        [(1, (1, 9, 20, 30)), (2, (1, 9, 30, 40)), (3, (1, 9, 20, 30)), (4, (1, 9, 30, 40))];
    pass(&mut job, 100, 1100, &beats.map(|(worker, place)| (worker, Some(place))));
    assert_eq!(outcome(&mut job), (vec![4, 3], Some((vec![1, 2], true))));
}

#[test]
fn who_was_let_off_at_anothers_cost_goes_at_once_the_next_time() {
    let mut job = watched();
    // Worker 1 is cut off, but only what 4 sends it shows.
    let beats =
        [(1, (1, 9, 20, 30)), (2, (1, 9, 30, 30)), (3, (1, 9, 30, 30)), (4, (1, 9, 30, 30))];
    pass(&mut job, 100, 1100, &beats.map(|(worker, place)| (worker, Some(place))));
    assert_eq!(outcome(&mut job), (vec![4], Some((vec![1, 2, 3], true))));
    // The next generation can't even be linked; 1 is busy and has not dialled yet.
    job.handle(at(1200), Event::Message { worker: WorkerId(3), message: unreachable(2, 1) });
    pass(&mut job, 1250, 1400, &[(1, None), (2, None), (3, None)]);
    assert_eq!(outcome(&mut job), (vec![1], Some((vec![2, 3], true))));
}

#[test]
fn a_commit_forgives() {
    let mut job = watched();
    let beats =
        [(1, (1, 9, 20, 30)), (2, (1, 9, 30, 30)), (3, (1, 9, 30, 30)), (4, (1, 9, 30, 30))];
    pass(&mut job, 100, 1100, &beats.map(|(worker, place)| (worker, Some(place))));
    assert_eq!(outcome(&mut job).0, [4]);
    say(&mut job, 1, formed(2, 0, &[]));
    say(&mut job, 1, committed(2, 1, &[]));
    pass(&mut job, 1200, 1200, &[(1, None), (2, None), (3, None)]);
    job.handle(at(1200), Event::Message { worker: WorkerId(3), message: unreachable(2, 1) });
    pass(&mut job, 1250, 1400, &[(1, None), (2, None), (3, None)]);
    assert_eq!(outcome(&mut job).0, [3], "a link of its own, and the higher rank");
}

#[test]
fn dials_that_nobody_answers_take_out_the_one_that_they_have_in_common() {
    let mut job = watched();
    let calm = [1, 2, 3, 4].map(|worker| (worker, None));
    pass(&mut job, 100, 1000, &calm);
    job.handle(at(1000), Event::Message { worker: WorkerId(4), message: unreachable(1, 1) });
    pass(&mut job, 1050, 1050, &calm);
    job.handle(at(1050), Event::Message { worker: WorkerId(1), message: unreachable(1, 2) });
    // Who hears of it ends its links: that is nobody's fault.
    job.handle(
        at(1050),
        Event::Message { worker: WorkerId(3), message: super::directed::broken(1, 4) },
    );
    pass(&mut job, 1100, 1200, &calm);
    assert_eq!(outcome(&mut job), (vec![1], Some((vec![2, 3, 4], true))));
}

#[test]
fn a_dial_of_one_that_has_fallen_silent_takes_out_that_one() {
    let mut job = watched();
    let calm = [1, 2, 3, 4].map(|worker| (worker, None));
    pass(&mut job, 100, 300, &calm);
    pass(&mut job, 350, 550, &calm[1..]);
    // By the ranks it would be worker 4.
    job.handle(at(600), Event::Message { worker: WorkerId(4), message: unreachable(1, 1) });
    pass(&mut job, 600, 1400, &calm[1..]);
    assert_eq!(outcome(&mut job), NOBODY);
    pass(&mut job, 1450, 1500, &calm[1..]);
    assert_eq!(outcome(&mut job), (vec![1], Some((vec![2, 3, 4], true))));
}

#[test]
fn a_hello_that_is_lost_on_its_way_shows_when_all_wait() {
    let mut job = watched();
    // 3 has dialled 4, but 4 waits for the dial: all others stand in the first operation.
    let beats = [(1, (1, 1, 0, 20)), (2, (1, 1, 20, 20)), (3, (1, 1, 20, 20)), (4, (1, 0, 0, 0))];
    pass(&mut job, 100, 1100, &beats.map(|(worker, place)| (worker, Some(place))));
    assert_eq!(outcome(&mut job), (vec![4], Some((vec![1, 2, 3], true))));
}

#[test]
fn where_all_hellos_are_lost_every_link_is_one_to_doubt() {
    let mut job = watched();
    let place = Some((1, 0, 0, 0));
    pass(&mut job, 100, 1100, &[(1, place), (2, place), (3, place), (4, place)]);
    assert_eq!(outcome(&mut job), (vec![4, 2], Some((vec![1, 3], true))));
}

#[test]
fn a_switch_that_some_have_made_and_one_can_not_is_no_way_to_wait_for_ever() {
    let mut job = watched();
    let connection = ConnectionId(5);
    job.handle(at(0), Event::Scale { num_workers: 5 });
    let (launch, address) = (LaunchId(5), address(5));
    job.handle(at(0), Event::Connected { connection, launch, address, pid: 105, resume: None });
    say(&mut job, 5, FromWorker::Ready { parameters: 10 });
    say(&mut job, 5, FromWorker::CaughtUp { step: 0 });
    assert_eq!(outcome(&mut job), (vec![], Some((vec![1, 2, 3, 4, 5], false))));
    // The end of the step has not come from 1 to 2: 2 is still in generation 1, and 3 waits for its
    // dial in vain.
    let beats = [
        (1, (2, 1, 0, 9)),
        (2, (1, 9, 20, 30)),
        (3, (2, 0, 0, 0)),
        (4, (2, 1, 0, 9)),
        (5, (2, 1, 0, 9)),
    ];
    let beats = beats.map(|(worker, place)| (worker, Some(place)));
    pass(&mut job, 100, 1100, &beats);
    let (out, published) = outcome(&mut job);
    assert!(out.contains(&2), "{out:?}");
    assert!(published.is_some_and(|(members, abort)| abort && !members.contains(&2)), "{out:?}");
}

#[test]
fn where_no_link_keeps_anything_all_get_new_links() {
    let mut job = watched();
    let place = Some((1, 9, 20, 20));
    pass(&mut job, 100, 1100, &[(1, place), (2, place), (3, place), (4, place)]);
    assert_eq!(outcome(&mut job), (vec![], Some((vec![1, 2, 3, 4], true))));
}

#[test]
fn who_holds_the_jobs_end_is_not_the_one_to_go() {
    let mut job = watched();
    for worker in [2, 3, 4] {
        say(&mut job, worker, finished(1, 9, 5));
    }
    // By the ranks it would be worker 4.
    let beats = [(1, Some((1, 9, 20, 30))), (2, None), (3, None), (4, None)];
    pass(&mut job, 100, 1100, &beats);
    assert_eq!(outcome(&mut job), (vec![1], Some((vec![2, 3, 4], true))));
}

#[test]
fn whose_last_beat_came_before_the_others_ends_is_not_judged_by_it() {
    let mut job = watched();
    pass(&mut job, 100, 1300, &[(1, Some((1, 9, 20, 30))), (2, None), (3, None), (4, None)]);
    for worker in [2, 3, 4] {
        let message = finished(1, 9, 5);
        job.handle(at(1310), Event::Message { worker: WorkerId(worker), message });
    }
    job.handle_timeout(at(1350));
    assert_eq!(outcome(&mut job), NOBODY);
}

#[test]
fn workers_that_were_all_kept_from_running_are_not_taken_for_waiting() {
    let mut job = watched();
    let beats =
        [(1, (1, 9, 20, 30)), (2, (1, 9, 30, 40)), (3, (1, 9, 20, 30)), (4, (1, 9, 30, 40))];
    pass(&mut job, 100, 300, &beats.map(|(worker, place)| (worker, Some(place))));
    // All are stopped for 700 ms, then go on: the first beats say how long no byte has moved.
    for ms in (350..=950).step_by(50) {
        job.handle_timeout(at(ms));
    }
    for ms in (1000..=1400).step_by(50) {
        for (worker, place) in beats.into_iter().filter(|_| ms % 100 == 0) {
            heartbeat(&mut job, ms, worker, Some((place, ms - 100)));
        }
        job.handle_timeout(at(ms));
    }
    assert_eq!(outcome(&mut job), NOBODY);
}

#[test]
fn a_stall_of_a_generation_that_is_over_says_nothing() {
    let mut job = watched();
    say(&mut job, 1, super::directed::broken(1, 2));
    job.handle_timeout(at(20));
    assert_eq!(outcome(&mut job), (vec![], Some((vec![1, 2, 3, 4], true))));
    let place = Some((1, 9, 20, 30));
    pass(&mut job, 100, 2000, &[(1, place), (2, place), (3, place), (4, place)]);
    assert_eq!(outcome(&mut job), NOBODY);
}
