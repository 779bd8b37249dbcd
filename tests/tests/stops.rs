//! Workers that stop without ending: by a signal, or because they are slow.

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use elasticdl_tests::{JobFixture, Programs, Proxy, is_alive, send};
use rustix::process::Signal;

const PROGRAMS: Programs = Programs {
    elasticdl: env!("CARGO_BIN_EXE_elasticdl-under-test"),
    counting: env!("CARGO_BIN_EXE_counting"),
};

#[test]
fn a_worker_that_is_stopped_for_less_than_the_timeout_is_not_evicted() {
    for seed in 0..2 {
        let mut job = JobFixture::new(PROGRAMS, 3).start(seed);
        for (_, pid) in job.workers() {
            send(pid, Signal::STOP);
            std::thread::sleep(Duration::from_millis(400));
            send(pid, Signal::CONT);
            let step = job.status()["step"].as_u64();
            job.wait_for("the next step", |status| status["step"].as_u64() > step);
        }
        let ended = job.wait();
        ended.assert_exact(&format!("seed {seed}, short stops"));
        assert_eq!(ended.memberships().len(), 1, "{:?}", ended.memberships());
    }
}

#[test]
fn a_stopped_worker_is_evicted_and_replaced() {
    for rank in 0..3 {
        let mut job =
            JobFixture { worker_timeout: Some("800ms"), ..JobFixture::new(PROGRAMS, 3) }.start(1);
        let (stopped, pid) = job.members()[rank];
        send(pid, Signal::STOP);
        job.wait_for("another in its place", |status| {
            status["workers"].as_array().is_some_and(|workers| {
                let members = workers.iter().filter(|w| w["rank"].is_u64());
                members.count() == 3 && workers.iter().all(|w| w["worker"] != stopped)
            })
        });
        assert!(!is_alive(pid), "it was killed, too");
        let ended = job.wait();
        ended.assert_exact(&format!("rank {rank}, worker {stopped} stopped"));
        let memberships = ended.memberships();
        let its_end = |m: &&serde_json::Value| m["cause"] == "hung" && m["lost"][0] == stopped;
        assert_eq!(memberships.iter().filter(its_end).count(), 1, "{memberships:?}");
    }
}

#[test]
fn a_worker_that_wakes_after_its_eviction_is_fenced_and_ends() {
    for rank in 0..3 {
        let fixture = JobFixture {
            worker_timeout: Some("800ms"),
            out_of_reach: true,
            ..JobFixture::new(PROGRAMS, 3)
        };
        let mut job = fixture.start(1);
        let (stopped, pid) = job.members()[rank];
        send(pid, Signal::STOP);
        job.wait_for("its end, as the master sees it", |status| {
            status["workers"].as_array().is_some_and(|w| w.iter().all(|w| w["worker"] != stopped))
        });
        assert!(is_alive(pid), "no kill has reached it");
        send(pid, Signal::CONT);
        let deadline = Instant::now() + Duration::from_secs(60);
        while is_alive(pid) {
            assert!(Instant::now() < deadline, "rank {rank}: the woken worker does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
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
    assert_eq!(
        (ended.code, ended.summary["steps"].as_u64()),
        (Some(0), Some(3)),
        "{}",
        ended.output
    );
    assert_eq!(ended.memberships().len(), 1, "{}", ended.output);
}

/// Four workers with the default timeouts, for some seconds.
fn undisturbed() -> JobFixture {
    JobFixture { worker_timeout: None, micros_per_record: 2000, ..JobFixture::new(PROGRAMS, 4) }
}

/// Longer than the keep-alive timeout of its workers: they close their streams, and reconnect.
#[test]
fn a_master_that_is_stopped_for_40_s_loses_no_worker() {
    let mut job = undisturbed().start(1);
    let (generation, before) = (job.wait_for_group_of(4), job.workers());
    job.stop_master();
    std::thread::sleep(Duration::from_secs(40));
    job.continue_master();
    let step = job.status()["step"].as_u64();
    job.wait_for("all to be back, and another step", |status| {
        let here = status["workers"].as_array().map_or(0, Vec::len);
        here == 4 && status["step"].as_u64() > step
    });
    assert_eq!(job.workers(), before);
    let ended = job.wait();
    ended.assert_exact("a stopped master");
    ended.assert_undisturbed(generation);
}

#[test]
fn streams_that_are_reset_one_by_one_and_all_at_once_cost_no_worker() {
    let fixture = undisturbed();
    let proxy = Arc::new(Proxy::start(fixture.folder.path()));
    let mut job = JobFixture { proxy: Some(Arc::clone(&proxy)), ..fixture }.start(1);
    let (generation, before) = (job.wait_for_group_of(4), job.workers());
    for round in 0..6 {
        let step = job.status()["step"].as_u64();
        match round % 2 {
            0 => assert_eq!(proxy.reset_all(), 4, "{round}"),
            _ => proxy.reset_one(),
        }
        job.wait_for("all to be back, and another step", |status| {
            let here = status["workers"].as_array().map_or(0, Vec::len);
            here == 4 && status["step"].as_u64() > step
        });
    }
    assert_eq!(job.workers(), before);
    let ended = job.wait();
    ended.assert_exact("reset streams");
    ended.assert_undisturbed(generation);
}
