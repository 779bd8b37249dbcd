//! Launches that do not become workers, and their replacements.

use elasticdl_proto::WorkerId;

use super::super::*;
use super::directed::{
    actions, at, connect, deliver, finished, formed, launch, launch_at, send, started,
};
use super::takeover::admit;
use crate::job::testing::spec;

#[test]
fn a_launch_without_a_hello_for_a_minute_is_killed_and_counted() {
    let mut job = Job::new(spec());
    job.handle_timeout(at(60_000));
    assert_eq!(actions(&mut job), [launch(1), Action::Kill { launch: LaunchId(1) }]);
    job.handle(at(60_001), Event::ProcessEnded { launch: LaunchId(1), exit: Exit::Signal(9) });
    assert_eq!((actions(&mut job), job.lifecycle.failures()), (vec![launch_at(2, 0)], 1));
}

#[test]
fn the_second_failures_replacement_waits_250_ms() {
    let mut job = started(spec(), &[20]);
    job.handle(at(10), Event::ProcessEnded { launch: LaunchId(2), exit: Exit::Code(1) });
    assert!(actions(&mut job).contains(&launch_at(4, 1)));
    job.handle(at(20), Event::ProcessEnded { launch: LaunchId(4), exit: Exit::Signal(11) });
    assert_eq!(actions(&mut job), []);
    job.handle_timeout(at(270));
    assert_eq!(actions(&mut job), [launch_at(5, 1)]);
}

#[test]
fn a_model_of_another_size_is_refused() {
    let mut job = started(spec(), &[20]);
    job.handle(at(1), Event::ProcessEnded { launch: LaunchId(3), exit: Exit::Signal(9) });
    connect(&mut job, 4);
    actions(&mut job);
    deliver(&mut job, 4, WorkerMessage::Ready { parameters: 11 });
    let sent = actions(&mut job);
    assert!(matches!(
        &sent[0],
        Action::Send { message: MasterMessage::Shutdown { reason, .. }, .. }
            if reason.contains("11 parameters")
    ));
    assert_eq!(
        (&sent[1], job.lifecycle.failures()),
        (&Action::Disconnect { worker: WorkerId(4) }, 1)
    );
}

#[test]
fn an_unscheduled_launch_is_not_silent() {
    let mut job = Job::new(spec());
    assert_eq!(actions(&mut job), [launch(1)]);
    job.handle(
        at(0),
        Event::LaunchWaits { launch: LaunchId(1), wait: Wait::Capacity("no room".into()) },
    );
    assert_eq!(job.status(at(0)).events, ["worker 1 waits: no room"]);
    job.handle_timeout(at(3_600_000));
    assert_eq!(actions(&mut job), []);
    // From the moment that it runs, the usual time limit applies.
    job.handle(at(3_600_000), Event::LaunchRuns { launch: LaunchId(1) });
    job.handle(at(3_630_000), Event::LaunchRuns { launch: LaunchId(1) });
    job.handle_timeout(at(3_659_999));
    assert_eq!(actions(&mut job), []);
    job.handle_timeout(at(3_660_000));
    assert!(actions(&mut job).contains(&Action::Kill { launch: LaunchId(1) }));
}

#[test]
fn a_reclaimed_launch_is_replaced_and_not_counted() {
    let mut job = started(spec(), &[20]);
    for round in 0..10 {
        let launch = LaunchId(if round == 0 { 1 } else { 3 + round });
        let exit = Exit::reclaimed(ReclaimCause::Preempted, "preempted");
        job.handle(at(100), Event::ProcessEnded { launch, exit });
        let next = launch_at(4 + round, 0);
        assert!(actions(&mut job).contains(&next), "round {round}");
    }
    assert_eq!(&*job.status(at(100)).state, "running");
}

#[test]
fn a_worker_that_arrives_after_the_end_of_the_job_ends_in_order() {
    let mut job = started(spec(), &[20]);
    job.handle(at(0), Event::ProcessEnded { launch: LaunchId(3), exit: Exit::Signal(9) });
    deliver(&mut job, 1, formed(2, 5, &[]));
    [1, 2].into_iter().for_each(|worker| deliver(&mut job, worker, finished(2, 10, 7)));
    assert!(actions(&mut job).contains(&Action::Kill { launch: LaunchId(4) }));
    connect(&mut job, 4);
    let reason = "the job is over".into();
    let over = MasterMessage::Shutdown { reason, job_is_over: true };
    assert_eq!(actions(&mut job), [admit(4), send(4, over)]);
    (1..=2).for_each(|i| {
        job.handle(at(1), Event::ProcessEnded { launch: LaunchId(i), exit: Exit::Code(0) });
    });
    assert_eq!(actions(&mut job), []);
    job.handle(at(1), Event::ProcessEnded { launch: LaunchId(4), exit: Exit::Code(0) });
    assert_eq!(actions(&mut job), [Action::End(Outcome::Completed)]);
}

#[test]
fn workers_that_a_sigterm_of_unknown_origin_ends_count_as_killed() {
    for (is_explained, exit) in
        [(false, Exit::Code(0)), (false, Exit::Code(143)), (true, Exit::Code(0))]
    {
        let mut job = started(spec(), &[20]);
        let end = |job: &mut Job, worker: u64| {
            let (ms, launch) = (31_000 * worker, LaunchId(worker));
            let now = at(ms);
            if is_explained {
                let (cause, reason) = (ReclaimCause::Deleted, "deleted".into());
                job.handle(now, Event::LaunchLeaves { launch, cause, reason });
            }
            deliver(job, worker, WorkerMessage::Leaving);
            job.handle(now, Event::ProcessEnded { launch, exit: exit.clone() });
            job.handle_timeout(at(ms + 30_000));
            connect(job, worker + 1);
        };
        (3..23).for_each(|worker| end(&mut job, worker));
        assert_eq!((job.summary(at(0)).error, job.lifecycle.failures()), (None, 0));
        end(&mut job, 23);
        let killed = job.snapshot(at(0)).counters.ends.get(&End::Killed).copied();
        assert_eq!(killed, (!is_explained).then_some(21));
        let why = job.summary(at(0)).error;
        let is_told = |why: &String| why.contains("killed 21 times") && why.contains("disk space");
        let said = job.status(at(0)).events.join("\n");
        assert!(!said.contains("the next one starts"), "it has started already: {said}");
        assert_eq!(why.as_ref().is_some_and(is_told), !is_explained, "{exit:?}: {why:?}");
    }
}
