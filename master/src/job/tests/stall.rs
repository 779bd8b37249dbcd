//! Groups in which all members wait for each other.

use std::time::Duration;

use elasticdl_proto::WorkerOptions;
use elasticdl_proto::{Generation, WorkerId};

use super::super::*;
use super::directed::{actions, at, committed, connect, deliver, finished, formed, launch_at};
use crate::job::testing::spec;

/// A started job of four workers with a worker timeout of one second; launch n is worker n, and the
/// ring is 1, 2, 3, 4.
fn watched() -> Job {
    let worker_timeout = Some(Duration::from_secs(1));
    super::directed::started(
        JobSpec {
            num_workers: 4,
            max_workers: 5,
            min_workers: 1,
            options: WorkerOptions { worker_timeout, ..spec().options },
            ..spec()
        },
        &[200],
    )
}

/// Position at which a worker waits: generation, operation, bytes received, bytes sent.
type WaitPosition = (u64, u64, u64, u64);

/// The positions at which the first workers wait; `None` for one that does not wait.
type Beats<'a> = &'a [(u64, Option<WaitPosition>)];

/// Advances the time from `from` to `until`, with checks every 50 ms and heartbeats every 100 ms.
/// Workers that wait have waited since `from`.
fn pass(job: &mut Job, from: u64, until: u64, beats: Beats<'_>) {
    for ms in (from..=until).step_by(50) {
        for &(worker, place) in beats.iter().filter(|_| ms % 100 == 0) {
            heartbeat(job, ms, worker, place.map(|place| (place, ms - from)));
        }
        job.handle_timeout(at(ms));
    }
}

pub(super) fn heartbeat(job: &mut Job, ms: u64, worker: u64, waits: Option<(WaitPosition, u64)>) {
    let stall = waits.map(|((generation, operation, received, sent), since)| Stall {
        generation: Generation(generation),
        operation,
        received,
        sent,
        waits_for_next: false,
        far: [None; 2],
        since: Duration::from_millis(since),
    });
    beat(job, ms, worker, stall);
}

fn beat(job: &mut Job, ms: u64, worker: u64, stall: Option<Stall>) {
    job.handle(
        at(ms),
        Event::Message {
            worker: WorkerId(worker),
            message: WorkerMessage::Heartbeat(Heartbeat { stall, ..Heartbeat::default() }),
        },
    );
}

/// The workers evicted so far, and the members of the newest generation if one was published.
fn outcome(job: &mut Job) -> (Vec<u64>, Option<(Vec<u64>, bool)>) {
    let done = actions(job);
    let out = done.iter().filter_map(|action| match action {
        Action::Disconnect { worker } => Some(worker.0),
        _ => None,
    });
    let published = done.iter().rev().find_map(|action| match action {
        Action::Send { message: MasterMessage::Membership(m), .. } => {
            Some((m.members.iter().map(|(id, _)| id.0).collect(), m.abort))
        }
        _ => None,
    });
    (out.collect(), published)
}

fn unreachable(generation: u64, suspect: u64) -> WorkerMessage {
    WorkerMessage::Broken {
        generation: Generation(generation),
        suspect: Some(WorkerId(suspect)),
        error: "no answer".into(),
        unreachable: true,
    }
}

const NO_EVICTION: (Vec<u64>, Option<(Vec<u64>, bool)>) = (Vec::new(), None);

#[test]
fn a_member_partitioned_from_both_neighbours_is_evicted_when_all_have_waited_for_the_timeout() {
    let mut job = watched();
    // Links 2-3 and 3-4 swallow what is sent; 4 and 1 can send no more before they learn of it.
    let beats =
        [(1, (1, 9, 30, 40)), (2, (1, 9, 40, 50)), (3, (1, 9, 20, 30)), (4, (1, 9, 20, 30))];
    let beats = beats.map(|(worker, place)| (worker, Some(place)));
    pass(&mut job, 100, 1050, &beats);
    assert_eq!(outcome(&mut job), NO_EVICTION, "a second is not too long");
    pass(&mut job, 100, 1100, &beats);
    assert_eq!(outcome(&mut job), (vec![3], Some((vec![1, 2, 4], true))));
    let record = job.summary(at(1100)).memberships.pop().unwrap();
    assert_eq!((record.cause, record.lost), (Cause::Hung, vec![WorkerId(3)]));
    job.handle(at(1200), Event::ProcessEnded { launch: LaunchId(3), exit: Exit::Signal(9) });
    assert!(actions(&mut job).contains(&launch_at(5, 2)), "another takes its place");
}

/// As [`pass`], with each worker's operation and the far member for which it waits.
fn pass_far(job: &mut Job, beats: [(u64, u64, Option<u64>); 4]) {
    let (from, until) = (100, 1100);
    for ms in (from..=until).step_by(50) {
        for (worker, operation, far) in beats.into_iter().filter(|_| ms % 100 == 0) {
            let since = Duration::from_millis(ms - from);
            let (generation, far) = (Generation(1), [far.map(WorkerId), None]);
            let (received, sent, waits_for_next) = (100, 100, false);
            let stall = Stall { generation, operation, received, sent, waits_for_next, far, since };
            beat(job, ms, worker, Some(stall));
        }
        job.handle_timeout(at(ms));
    }
}

#[test]
fn a_link_beside_the_ring_that_loses_data_is_one_whose_ends_wait_for_each_other() {
    // The sum of 3 does not reach 1, for which 2 and 4 wait.
    let mut job = watched();
    pass_far(&mut job, [(1, 9, Some(3)), (2, 9, None), (3, 9, Some(1)), (4, 9, None)]);
    assert_eq!(outcome(&mut job), (vec![3], Some((vec![1, 2, 4], true))));
    // The total of 4 does not reach 2: the others wait in the next operation.
    let mut job = watched();
    pass_far(&mut job, [(1, 10, None), (2, 9, Some(4)), (3, 10, None), (4, 10, None)]);
    assert_eq!(outcome(&mut job).0, vec![4]);
}

#[test]
fn no_worker_is_evicted_while_one_member_computes() {
    let waits = Some((1, 9, 20, 30));
    for busy in 1..=4 {
        let mut job = watched();
        let beats = [1, 2, 3, 4].map(|worker| (worker, waits.filter(|_| worker != busy)));
        pass(&mut job, 100, 60_000, &beats);
        assert_eq!(outcome(&mut job), NO_EVICTION, "worker {busy} computes");
    }
}

#[test]
fn a_member_that_moves_bytes_occasionally_prevents_evictions() {
    let mut job = watched();
    for n in 0..20 {
        let from = 100 + n * 900;
        let place = Some((1, 9, 20 + n, 30));
        pass(&mut job, from, from + 850, &[(1, place), (2, place), (3, place), (4, place)]);
    }
    assert_eq!(outcome(&mut job), NO_EVICTION);
}

#[test]
fn a_silent_worker_is_evicted_whatever_its_neighbours_wait_for() {
    let mut job = watched();
    // Worker 4 computes until 1000. By its position it would be evicted once it had waited as long
    // as the others, but worker 2, which did so first, has stopped before that.
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
fn of_two_partitioned_halves_the_later_ranks_are_evicted() {
    let mut job = watched();
    // Links 2-3 and 4-1 swallow what is sent.
    let beats =
        [(1, (1, 9, 20, 30)), (2, (1, 9, 30, 40)), (3, (1, 9, 20, 30)), (4, (1, 9, 30, 40))];
    pass(&mut job, 100, 1100, &beats.map(|(worker, place)| (worker, Some(place))));
    assert_eq!(outcome(&mut job), (vec![4, 3], Some((vec![1, 2], true))));
}

#[test]
fn a_suspect_that_was_spared_is_evicted_at_once_the_next_time() {
    let mut job = watched();
    // Worker 1 is partitioned, but only the data from worker 4 shows that.
    let beats =
        [(1, (1, 9, 20, 30)), (2, (1, 9, 30, 30)), (3, (1, 9, 30, 30)), (4, (1, 9, 30, 30))];
    pass(&mut job, 100, 1100, &beats.map(|(worker, place)| (worker, Some(place))));
    assert_eq!(outcome(&mut job), (vec![4], Some((vec![1, 2, 3], true))));
    // The next generation can't even connect; worker 1 is busy and has not dialled yet.
    job.handle(at(1200), Event::Message { worker: WorkerId(3), message: unreachable(2, 1) });
    pass(&mut job, 1250, 1400, &[(1, None), (2, None), (3, None)]);
    assert_eq!(outcome(&mut job), (vec![1], Some((vec![2, 3], true))));
}

#[test]
fn a_commit_clears_the_suspicion() {
    let mut job = watched();
    let beats =
        [(1, (1, 9, 20, 30)), (2, (1, 9, 30, 30)), (3, (1, 9, 30, 30)), (4, (1, 9, 30, 30))];
    pass(&mut job, 100, 1100, &beats.map(|(worker, place)| (worker, Some(place))));
    assert_eq!(outcome(&mut job).0, [4]);
    deliver(&mut job, 1, formed(2, 0, &[]));
    deliver(&mut job, 1, committed(2, 1, &[]));
    pass(&mut job, 1200, 1200, &[(1, None), (2, None), (3, None)]);
    job.handle(at(1200), Event::Message { worker: WorkerId(3), message: unreachable(2, 1) });
    pass(&mut job, 1250, 1400, &[(1, None), (2, None), (3, None)]);
    assert_eq!(outcome(&mut job).0, [3], "a link of its own, and the higher rank");
}

#[test]
fn unanswered_dials_evict_the_worker_that_they_have_in_common() {
    let mut job = watched();
    let calm = [1, 2, 3, 4].map(|worker| (worker, None));
    pass(&mut job, 100, 1000, &calm);
    job.handle(at(1000), Event::Message { worker: WorkerId(4), message: unreachable(1, 1) });
    pass(&mut job, 1050, 1050, &calm);
    job.handle(at(1050), Event::Message { worker: WorkerId(1), message: unreachable(1, 2) });
    // Workers that learn of it close their links; no worker is to blame for that.
    job.handle(
        at(1050),
        Event::Message { worker: WorkerId(3), message: super::directed::broken(1, 4) },
    );
    pass(&mut job, 1100, 1200, &calm);
    assert_eq!(outcome(&mut job), (vec![1], Some((vec![2, 3, 4], true))));
}

#[test]
fn an_unanswered_dial_of_a_silent_worker_evicts_that_worker() {
    let mut job = watched();
    let calm = [1, 2, 3, 4].map(|worker| (worker, None));
    pass(&mut job, 100, 300, &calm);
    pass(&mut job, 350, 550, &calm[1..]);
    // By rank it would be worker 4.
    job.handle(at(600), Event::Message { worker: WorkerId(4), message: unreachable(1, 1) });
    pass(&mut job, 600, 1400, &calm[1..]);
    assert_eq!(outcome(&mut job), NO_EVICTION);
    pass(&mut job, 1450, 1500, &calm[1..]);
    assert_eq!(outcome(&mut job), (vec![1], Some((vec![2, 3, 4], true))));
}

#[test]
fn a_lost_handshake_is_detected_when_all_wait() {
    let mut job = watched();
    // Worker 3 has dialled worker 4, which still waits for that; all others wait in the first
    // operation.
    let beats = [(1, (1, 1, 0, 20)), (2, (1, 1, 20, 20)), (3, (1, 1, 20, 20)), (4, (1, 0, 0, 0))];
    pass(&mut job, 100, 1100, &beats.map(|(worker, place)| (worker, Some(place))));
    assert_eq!(outcome(&mut job), (vec![4], Some((vec![1, 2, 3], true))));
}

#[test]
fn with_all_handshakes_lost_every_link_is_suspect() {
    let mut job = watched();
    let place = Some((1, 0, 0, 0));
    pass(&mut job, 100, 1100, &[(1, place), (2, place), (3, place), (4, place)]);
    assert_eq!(outcome(&mut job), (vec![4, 2], Some((vec![1, 3], true))));
}

#[test]
fn a_switch_that_one_member_cannot_complete_does_not_block_for_ever() {
    let mut job = watched();
    job.handle(at(0), Event::Scale(5.into()));
    connect(&mut job, 5);
    deliver(&mut job, 5, WorkerMessage::Ready { parameters: 10 });
    deliver(&mut job, 5, WorkerMessage::CaughtUp { step: None });
    assert_eq!(outcome(&mut job), (vec![], Some((vec![1, 2, 3, 4, 5], false))));
    // The end of the step has not arrived from 1 at 2: worker 2 is still in generation 1, and
    // worker 3 waits for its dial in vain.
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
fn without_a_suspect_link_all_members_get_new_links() {
    let mut job = watched();
    let place = Some((1, 9, 20, 20));
    pass(&mut job, 100, 1100, &[(1, place), (2, place), (3, place), (4, place)]);
    assert_eq!(outcome(&mut job), (vec![], Some((vec![1, 2, 3, 4], true))));
}

#[test]
fn a_worker_with_the_final_state_is_not_evicted() {
    let mut job = watched();
    for worker in [2, 3, 4] {
        deliver(&mut job, worker, finished(1, 9, 5));
    }
    // By rank it would be worker 4.
    let beats = [(1, Some((1, 9, 20, 30))), (2, None), (3, None), (4, None)];
    pass(&mut job, 100, 1100, &beats);
    assert_eq!(outcome(&mut job), (vec![1], Some((vec![2, 3, 4], true))));
}

#[test]
fn a_worker_is_not_judged_by_a_heartbeat_older_than_the_others_exits() {
    let mut job = watched();
    pass(&mut job, 100, 1300, &[(1, Some((1, 9, 20, 30))), (2, None), (3, None), (4, None)]);
    for worker in [2, 3, 4] {
        let message = finished(1, 9, 5);
        job.handle(at(1310), Event::Message { worker: WorkerId(worker), message });
    }
    job.handle_timeout(at(1350));
    assert_eq!(outcome(&mut job), NO_EVICTION);
}

#[test]
fn workers_that_were_all_suspended_do_not_count_as_waiting() {
    let mut job = watched();
    let beats =
        [(1, (1, 9, 20, 30)), (2, (1, 9, 30, 40)), (3, (1, 9, 20, 30)), (4, (1, 9, 30, 40))];
    pass(&mut job, 100, 300, &beats.map(|(worker, place)| (worker, Some(place))));
    // All workers are stopped for 700 ms, then continue: the first heartbeats report that no byte
    // has moved for that long.
    for ms in (350..=950).step_by(50) {
        job.handle_timeout(at(ms));
    }
    for ms in (1000..=1400).step_by(50) {
        for (worker, place) in beats.into_iter().filter(|_| ms % 100 == 0) {
            heartbeat(&mut job, ms, worker, Some((place, ms - 100)));
        }
        job.handle_timeout(at(ms));
    }
    assert_eq!(outcome(&mut job), NO_EVICTION);
}

#[test]
fn a_stall_of_a_former_generation_is_ignored() {
    let mut job = watched();
    deliver(&mut job, 1, super::directed::broken(1, 2));
    job.handle_timeout(at(20));
    assert_eq!(outcome(&mut job), (vec![], Some((vec![1, 2, 3, 4], true))));
    let place = Some((1, 9, 20, 30));
    pass(&mut job, 100, 2000, &[(1, place), (2, place), (3, place), (4, place)]);
    assert_eq!(outcome(&mut job), NO_EVICTION);
}

#[test]
fn a_member_that_stays_at_links_which_the_others_have_left_is_evicted() {
    let mut job = watched();
    // The links of all members are renewed, because no end of them is at fault.
    pass(&mut job, 0, 1500, &[1, 2, 3, 4].map(|id| (id, Some((1, 5, 8, 8)))));
    assert_eq!(outcome(&mut job), (vec![], Some((vec![1, 2, 3, 4], true))));
    // Worker 3 goes on reporting the old wait. It has computed nothing since.
    let beats = [1, 2, 3, 4].map(|id| (id, Some((if id == 3 { 1 } else { 2 }, 0, 0, 0))));
    pass(&mut job, 1600, 2500, &beats);
    assert_eq!(outcome(&mut job), NO_EVICTION);
    pass(&mut job, 2500, 4000, &beats);
    assert_eq!(outcome(&mut job).0, [3]);
}

#[test]
fn a_member_that_has_just_entered_a_group_is_not_judged_by_its_wait_before() {
    let mut job = watched();
    deliver(&mut job, 4, WorkerMessage::Leaving);
    assert_eq!(outcome(&mut job), (vec![], Some((vec![1, 2, 3], false))));
    // Worker 4 computes in generation 1 for long, and worker 1 waits for it there.
    let beats = [1, 2, 3].map(|id| (id, Some((if id == 1 { 1 } else { 2 }, 0, 0, 0))));
    pass(&mut job, 100, 1300, &[&beats[..], &[(4, None)]].concat());
    assert_eq!(outcome(&mut job), NO_EVICTION);
    let message = formed(2, 0, &[]);
    job.handle(at(1310), Event::Message { worker: WorkerId(1), message });
    job.handle_timeout(at(1350));
    assert_eq!(outcome(&mut job), NO_EVICTION);
}
