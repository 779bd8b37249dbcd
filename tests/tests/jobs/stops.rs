//! A stopped worker is evicted, fenced when it continues, and replaced; a worker that stops for
//! less, or computes for longer, stays; a master stopped for 40 s and reset streams cost no worker.

use std::sync::Arc;
use std::time::Duration;

use elasticdl_proto::{Cause, MembershipChange};
use elasticdl_tests::{JobFixture, Proxy, assert_end, is_alive, send};
use rustix::process::Signal;

use crate::PROGRAMS;

#[test]
fn a_worker_that_is_stopped_for_less_than_the_timeout_is_not_evicted() {
    for seed in 0..2 {
        let mut job = JobFixture::new(PROGRAMS, 3).start(seed);
        for (_, pid) in job.workers() {
            send(pid, Signal::STOP);
            std::thread::sleep(Duration::from_millis(400));
            send(pid, Signal::CONT);
            job.wait_for_next_step();
        }
        let ended = job.wait();
        ended.assert_exact(&format!("seed {seed}, short stops"));
        assert_eq!(ended.memberships().len(), 1, "{:?}", ended.memberships());
    }
}

#[test]
fn a_stopped_worker_is_evicted_and_replaced() {
    let mut job =
        JobFixture { worker_timeout: Some("2s"), ..JobFixture::new(PROGRAMS, 3) }.start(1);
    // The next test stops one of each rank.
    let (stopped, pid) = job.members()[0];
    send(pid, Signal::STOP);
    job.wait_for_members_without(3, &[stopped]);
    assert!(!is_alive(pid), "it was killed, too");
    let ended = job.wait();
    ended.assert_exact(&format!("worker {stopped} stopped"));
    let memberships = ended.memberships();
    let its_end = |m: &&MembershipChange| m.cause == Cause::Hung && m.lost == [stopped];
    assert_eq!(memberships.iter().filter(its_end).count(), 1, "{memberships:?}");
}

#[test]
fn a_worker_that_wakes_after_its_eviction_is_fenced_and_ends() {
    for rank in 0..3 {
        let fixture = JobFixture {
            worker_timeout: Some("2s"),
            out_of_reach: true,
            ..JobFixture::new(PROGRAMS, 3)
        };
        let mut job = fixture.start(1);
        let (stopped, pid) = job.members()[rank];
        send(pid, Signal::STOP);
        job.wait_for("its end, as the master sees it", |status| {
            status.workers.iter().all(|w| w.worker != stopped)
        });
        assert!(is_alive(pid), "no kill has reached it");
        send(pid, Signal::CONT);
        assert_end(&[pid], Duration::from_secs(60));
        let ended = job.wait();
        ended.assert_exact(&format!("rank {rank}, worker {stopped} woken"));
        assert_eq!(ended.lost()[0], stopped);
    }
}

#[test]
fn a_slow_worker_and_those_that_wait_for_it_beyond_the_timeout_are_not_evicted() {
    // Two records for one rank, one for the other, which waits for 1.5 s at each step.
    let fixture = JobFixture {
        worker_timeout: Some("1s"),
        micros_per_record: 1_500_000,
        ..JobFixture::new(PROGRAMS, 2)
    };
    let fixture = JobFixture { global_batch_size: 3, ..fixture };
    let command = fixture.command(1).option("max-steps", "3");
    let ended = command.run();
    assert_eq!((ended.code, ended.summary().steps), (Some(0), 3), "{}", ended.output);
    assert_eq!((ended.lost(), ended.summary().workers.restarts), (Vec::new(), 0));
}

/// Four workers with the default timeouts, for some seconds.
fn undisturbed() -> JobFixture {
    JobFixture {
        worker_timeout: None,
        // A minute, unless it is hurried.
        epochs: 6,
        micros_per_record: 8000,
        ..JobFixture::new(PROGRAMS, 4)
    }
}

/// Longer than the keep-alive timeout of its workers: they close their streams, and reconnect.
#[test]
fn a_master_that_is_stopped_for_40_s_loses_no_worker() {
    let mut job = undisturbed().start(1);
    let (generation, before) = (job.wait_for_members(4).generation, job.workers());
    job.stop_master();
    std::thread::sleep(Duration::from_secs(40));
    job.continue_master();
    job.wait_for_return_of(4);
    assert_eq!(job.workers(), before);
    job.hurry();
    let ended = job.wait();
    ended.assert_exactly_once("a stopped master", 6000, 6);
    ended.assert_undisturbed(generation);
}

#[test]
fn streams_that_are_reset_one_by_one_and_all_at_once_cost_no_worker() {
    let fixture = undisturbed();
    let proxy = Arc::new(Proxy::start(fixture.folder.path()));
    let mut job = JobFixture { proxy: Some(Arc::clone(&proxy)), ..fixture }.start(1);
    let (generation, before) = (job.wait_for_members(4).generation, job.workers());
    for round in 0..6 {
        match round % 2 {
            0 => assert_eq!(proxy.reset_all(), 4, "{round}"),
            _ => proxy.reset_one(),
        }
        job.wait_for_return_of(4);
    }
    assert_eq!(job.workers(), before);
    job.hurry();
    let ended = job.wait();
    ended.assert_exactly_once("reset streams", 6000, 6);
    ended.assert_undisturbed(generation);
}
