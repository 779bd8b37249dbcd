//! Exit codes and events with a meaning, deadlines, and reports of the end.

use std::time::Duration;

use elasticdl_proto::WorkerId;

use super::super::*;
use super::directed::{
    actions, at, committed, connect, deliver, finished, formed, launch_at, leaves, membership,
    send, started,
};
use crate::job::testing::spec;

/// A started job of three workers with this rule, which may have a replacement beside them.
fn with_rule(rule: &str, min_workers: u32) -> Job {
    let policies = Policies { on_exit: vec![rule.parse().unwrap()], ..Policies::default() };
    started(JobSpec { min_workers, max_workers: 4, policies, ..spec() }, &[20])
}

fn exit(job: &mut Job, launch: u64, exit: Exit) {
    job.handle(at(10), Event::ProcessEnded { launch: LaunchId(launch), exit });
}

fn last_event(job: &Job) -> String {
    job.status(at(10)).events.iter().rfind(|line| line.contains("--on-exit")).unwrap().clone()
}

#[test]
fn a_worker_whose_code_means_restart_is_replaced_and_not_counted() {
    let mut job = with_rule("42-44=restart", 1);
    exit(&mut job, 2, Exit::Code(43));
    assert!(actions(&mut job).contains(&launch_at(4, 1)));
    assert_eq!(job.lifecycle.failures(), 0);
    assert!(last_event(&job).contains("worker 2 exited with code 43, and is replaced"));
    // Replacements are delayed as after failures.
    exit(&mut job, 4, Exit::Code(42));
    assert_eq!(actions(&mut job), []);
    job.handle_timeout(at(260));
    assert_eq!(actions(&mut job), [launch_at(5, 1)]);
    // Another code is a failure.
    exit(&mut job, 5, Exit::Code(45));
    assert_eq!(job.lifecycle.failures(), 1);
}

#[test]
fn a_worker_whose_code_means_ignore_is_missed_down_to_the_minimum() {
    let mut job = with_rule("42=ignore", 2);
    exit(&mut job, 3, Exit::Code(42));
    let launches = |actions: Vec<Action>| {
        actions.into_iter().filter(|a| matches!(a, Action::Launch { .. })).count()
    };
    assert_eq!((launches(actions(&mut job)), job.status(at(10)).workers_desired), (0, 2));
    assert!(last_event(&job).contains("is not replaced (--on-exit 42=ignore); 2 workers"));
    // The next master wants no more, either.
    let mut next = Job::restore(job.to_persisted(), at(20)).unwrap();
    assert_eq!((launches(actions(&mut next)), next.status(at(20)).workers_desired), (0, 2));
    exit(&mut job, 2, Exit::Code(42));
    assert_eq!((launches(actions(&mut job)), job.status(at(10)).workers_desired), (1, 2));
    assert!(last_event(&job).contains("because --min-workers remain"));
    assert_eq!(job.lifecycle.failures(), 0);
}

#[test]
fn a_worker_whose_code_means_fail_fails_the_job_with_its_last_output() {
    let mut job = with_rule("42=fail", 1);
    let lines = "Error: no more licences".to_owned();
    job.handle(at(10), Event::LaunchPrinted { launch: LaunchId(2), lines });
    exit(&mut job, 2, Exit::Code(42));
    let error = job.summary(at(10)).error.unwrap();
    for part in ["worker 2 exited with code 42", "--on-exit 42=fail", "no more licences"] {
        assert!(error.contains(part), "{part}: {error}");
    }
    assert_eq!(job.outcome(), Some(Outcome::Failed));
}

#[test]
fn a_worker_whose_code_means_stop_stops_the_job_in_order() {
    let mut job = with_rule("42=stop", 1);
    deliver(&mut job, 1, committed(1, 2, &[(0, 8)]));
    exit(&mut job, 3, Exit::Code(42));
    let sent = actions(&mut job);
    for worker in [1, 2] {
        assert!(sent.contains(&send(worker, MasterMessage::Drain)), "{worker}: {sent:?}");
    }
    assert_eq!(&*job.status(at(10)).state, "stopping");
    let reason = job.summary(at(10)).stop_reason.unwrap();
    assert!(reason.contains("worker 3 exited with code 42, which stops the job"), "{reason}");
    // The reason outlives this master.
    let next = Job::restore(job.to_persisted(), at(20)).unwrap();
    assert_eq!(next.summary(at(20)).stop_reason, Some(reason));
}

#[test]
fn rules_do_not_apply_to_ends_that_the_master_has_caused() {
    let mut job = with_rule("137=fail", 1);
    job.handle(at(0), Event::Scale(2.into()));
    exit(&mut job, 3, Exit::Signal(9));
    assert_eq!(job.outcome(), None, "it was released");
    let mut job = Job::new(JobSpec {
        policies: Policies { on_exit: vec!["137=fail".parse().unwrap()], ..Policies::default() },
        ..spec()
    });
    // It says no hello, and is killed.
    job.handle_timeout(at(60_000));
    exit(&mut job, 1, Exit::Signal(9));
    assert_eq!((job.outcome(), job.lifecycle.failures()), (None, 1));
    // The master has not killed this one.
    exit(&mut job, 2, Exit::Signal(9));
    assert_eq!(job.outcome(), Some(Outcome::Failed));
}

fn with_deadline() -> JobSpec {
    let deadline = Some(Duration::from_secs(60));
    JobSpec { policies: Policies { deadline, ..Policies::default() }, ..spec() }
}

#[test]
fn a_job_stops_at_its_deadline_whichever_master_it_has() {
    let mut job = started(with_deadline(), &[20]);
    job.handle_timeout(at(59_999));
    assert_eq!(&*job.status(at(59_999)).state, "running");
    let mut next = Job::restore(job.to_persisted(), at(59_999)).unwrap();
    job.handle_timeout(at(60_000));
    let sent = actions(&mut job);
    for worker in 1..=3 {
        assert!(sent.contains(&send(worker, MasterMessage::Drain)), "{worker}: {sent:?}");
    }
    let reason = Some("the deadline of 60 s has passed".to_owned());
    for worker in 1..=3 {
        let WorkerMessage::Finished(mut word) = finished(1, 2, 9) else { unreachable!() };
        word.ledger = LedgerReport::default();
        deliver(&mut job, worker, WorkerMessage::Finished(word));
    }
    let summary = job.summary(at(60_010));
    assert_eq!((job.outcome(), summary.stop_reason), (Some(Outcome::Stopped), reason.clone()));
    next.handle_timeout(at(60_000));
    assert_eq!(&*next.status(at(60_000)).state, "stopping");
    assert_eq!(next.summary(at(60_000)).stop_reason, reason);
}

#[test]
fn a_deadline_after_the_end_changes_nothing() {
    let mut job = started(with_deadline(), &[20]);
    job.handle(at(10), Event::Stop);
    assert_eq!(job.summary(at(10)).stop_reason, None);
    job.handle_timeout(at(60_000));
    assert_eq!(job.summary(at(60_000)).stop_reason, None);
}

#[test]
fn programs_of_a_complete_job_have_time_to_end_and_what_becomes_of_them_is_told() {
    let end_timeout = Some(Duration::from_secs(60));
    let policies = Policies { end_timeout, ..Policies::default() };
    let complete = |policies: &Policies| {
        let mut job = started(JobSpec { policies: policies.clone(), ..spec() }, &[20]);
        (1..=3).for_each(|worker| deliver(&mut job, worker, finished(1, 10, 7)));
        exit(&mut job, 1, Exit::Code(0));
        job
    };
    let ends = |actions: Vec<Action>| actions.contains(&Action::End(Outcome::Completed));
    let tells = |job: &Job, text: &str| {
        job.status(at(70_000)).events.iter().any(|line| line.contains(text))
    };
    let mut job = complete(&policies);
    job.handle_timeout(at(2000));
    assert!(!ends(actions(&mut job)) && tells(&job, "waits for 2 programs to end"));
    exit(&mut job, 2, Exit::Code(1));
    assert!(tells(&job, "worker 2 exited with code 1 after the job was complete"));
    job.handle_timeout(at(59_999));
    assert!(!ends(actions(&mut job)));
    job.handle_timeout(at(60_000));
    assert!(tells(&job, "killed 60 s after the job was complete (--end-timeout): 1 program"));
    assert!(ends(actions(&mut job)));
    // A replacement that was no member of the group has nothing to do.
    let mut job = started(JobSpec { policies: policies.clone(), ..spec() }, &[20]);
    exit(&mut job, 3, Exit::Signal(9));
    connect(&mut job, 4);
    actions(&mut job);
    deliver(&mut job, 1, formed(2, 5, &[]));
    (1..=2).for_each(|worker| deliver(&mut job, worker, finished(2, 10, 7)));
    let done = actions(&mut job);
    let kills = |launch| done.contains(&Action::Kill { launch: LaunchId(launch) });
    assert_eq!([1, 2, 4].map(kills), [false, false, true], "{done:?}");
    job.handle_timeout(at(2000));
    assert!(tells(&job, "waits for 2 programs to end"));
    (1..=2).for_each(|launch| exit(&mut job, launch, Exit::Code(0)));
    // It does not wait for more than there is, nor without the option, nor when a user ends it.
    let mut job = complete(&policies);
    (2..=3).for_each(|launch| exit(&mut job, launch, Exit::Code(0)));
    assert!(ends(actions(&mut job)));
    let mut job = complete(&Policies::default());
    job.handle_timeout(at(2000));
    assert!(ends(actions(&mut job)) && !tells(&job, "--end-timeout"));
    let mut job = complete(&policies);
    job.handle(at(10), Event::StopNow);
    assert!(ends(actions(&mut job)));
}

#[test]
fn every_member_has_to_report_the_end() {
    let mut job = started(spec(), &[20]);
    for worker in [2, 1, 3] {
        assert_eq!(job.outcome(), None);
        deliver(&mut job, worker, finished(1, 10, 9));
    }
    assert_eq!(job.outcome(), Some(Outcome::Completed));
}

fn launched(job: &mut Job) -> usize {
    actions(job).iter().filter(|a| matches!(a, Action::Launch { .. })).count()
}

#[test]
fn a_preempted_worker_is_replaced_at_once_with_a_rule_or_without() {
    for rule in ["preempted=restart", "evicted=fail", "42=fail"] {
        let mut job = with_rule(rule, 1);
        for worker in [1, 2] {
            leaves(&mut job, worker, ReclaimCause::Preempted);
            assert_eq!(launched(&mut job), 1, "{rule}");
            exit(&mut job, worker, Exit::reclaimed(ReclaimCause::Preempted, "preempted"));
            assert_eq!(launched(&mut job), 0, "{rule}");
        }
        assert_eq!((launched(&mut job), job.lifecycle.failures()), (0, 0), "{rule}");
        assert_eq!(&*job.status(at(10)).state, "running", "{rule}");
    }
}

#[test]
fn a_preempted_worker_that_is_ignored_leaves_in_order_and_is_missed_down_to_the_minimum() {
    let mut job = with_rule("preempted=ignore", 1);
    leaves(&mut job, 3, ReclaimCause::Preempted);
    let sent = actions(&mut job);
    let next = MasterMessage::Membership(membership(2, &[1, 2], false));
    assert!(sent.contains(&send(1, next)), "{sent:?}");
    assert!(!sent.iter().any(|a| matches!(a, Action::Launch { .. })), "{sent:?}");
    assert!(
        last_event(&job).contains(
            "worker 3 is being removed by the cluster (Preempted by the cluster), and is"
        )
    );
    // The rule is applied once, whichever master sees the end.
    let mut next = Job::restore(job.to_persisted(), at(10)).unwrap();
    for job in [&mut job, &mut next] {
        leaves(job, 3, ReclaimCause::Preempted);
        exit(job, 3, Exit::reclaimed(ReclaimCause::Preempted, "preempted"));
        assert_eq!((launched(job), job.status(at(10)).workers_desired), (0, 2));
        leaves(job, 2, ReclaimCause::Preempted);
        assert_eq!((launched(job), job.status(at(10)).workers_desired), (0, 1));
        leaves(job, 1, ReclaimCause::Preempted);
        assert_eq!((launched(job), job.status(at(10)).workers_desired), (1, 1));
        assert!(last_event(job).contains("because --min-workers remain"));
    }
}

/// The worker's SIGTERM may be known before the reason for it.
#[test]
fn the_replacement_of_a_worker_that_is_to_be_ignored_is_withdrawn() {
    for by_end in [false, true] {
        let mut job = with_rule("preempted=ignore", 1);
        deliver(&mut job, 3, WorkerMessage::Leaving);
        assert!(actions(&mut job).contains(&launch_at(4, 2)));
        match by_end {
            false => leaves(&mut job, 3, ReclaimCause::Preempted),
            true => exit(&mut job, 3, Exit::reclaimed(ReclaimCause::Preempted, "preempted")),
        }
        assert!(actions(&mut job).contains(&Action::Kill { launch: LaunchId(4) }), "{by_end}");
        assert_eq!(job.status(at(10)).workers_desired, 2);
    }
}

#[test]
fn a_rule_for_an_event_fails_or_stops_the_job() {
    for cause in [ReclaimCause::Evicted, ReclaimCause::NodeLost, ReclaimCause::Preempted] {
        let event = serde_json::to_value(ExitEvent::of(cause).unwrap()).unwrap();
        let event = event.as_str().unwrap();
        let mut job = with_rule(&format!("{event}=fail"), 1);
        leaves(&mut job, 2, cause);
        let error = job.summary(at(10)).error.unwrap();
        assert!(error.contains(&format!("--on-exit {event}=fail")), "{error}");
        let mut job = with_rule(&format!("{event}=stop"), 1);
        leaves(&mut job, 2, cause);
        let sent = actions(&mut job);
        assert!(sent.contains(&send(1, MasterMessage::Drain)), "{sent:?}");
        let reason = job.summary(at(10)).stop_reason.unwrap();
        assert!(reason.contains(&format!("--on-exit {event}=stop")), "{reason}");
        // Without notice.
        let mut job = with_rule(&format!("{event}=fail"), 1);
        exit(&mut job, 2, Exit::reclaimed(cause, "gone"));
        assert_eq!(job.outcome(), Some(Outcome::Failed));
    }
}

/// A scheduler may explain a deletion after it.
#[test]
fn a_rule_for_deletions_waits_for_the_end_of_the_pod() {
    let both = |exit_cause| {
        let rules = ["deleted=fail", "preempted=stop"].map(|rule| rule.parse().unwrap());
        let policies = Policies { on_exit: rules.into(), ..Policies::default() };
        let mut job = started(JobSpec { policies, ..spec() }, &[20]);
        leaves(&mut job, 2, ReclaimCause::Deleted);
        assert_eq!(&*job.status(at(10)).state, "running");
        exit(&mut job, 2, Exit::reclaimed(exit_cause, "deleted"));
        job.status(at(10)).state.to_string()
    };
    assert_eq!(both(ReclaimCause::Deleted), "ending");
    assert_eq!(both(ReclaimCause::Preempted), "stopping");
}

#[test]
fn a_worker_over_its_limit_or_without_an_image_follows_its_rule_and_is_not_counted() {
    for (rule, end) in [
        ("over-limit=restart", Exit::OverLimit("memory".into())),
        ("not-started=restart", Exit::NotStarted("no such image".into())),
        ("not-started=restart", Exit::reclaimed(ReclaimCause::NotStarted, "OutOfcpu")),
    ] {
        let mut job = with_rule(rule, 1);
        exit(&mut job, 2, end.clone());
        assert_eq!((launched(&mut job), job.lifecycle.failures()), (1, 0), "{end:?}");
        assert!(last_event(&job).contains(rule), "{end:?}");
        let mut job = with_rule(&rule.replace("restart", "fail"), 1);
        exit(&mut job, 2, end);
        assert_eq!(job.outcome(), Some(Outcome::Failed));
    }
}

#[test]
fn an_evicted_worker_that_did_not_respond_follows_its_rule() {
    let mut job = with_rule("unresponsive=stop", 1);
    job.evict(at(10), WorkerId(2), "was silent for 1000 ms");
    assert_eq!(job.summary(at(10)).stop_reason, None);
    exit(&mut job, 2, Exit::reclaimed(ReclaimCause::Unwanted, "it is not wanted any more"));
    let reason = job.summary(at(10)).stop_reason.expect("the rule is applied");
    assert!(reason.contains("worker 2 did not respond"), "{reason}");
}

#[test]
fn rules_for_events_do_not_apply_to_workers_that_the_master_releases() {
    for rule in ["preempted=fail", "deleted=fail", "node-lost=fail"] {
        let mut job = with_rule(rule, 1);
        job.handle(at(0), Event::Scale(2.into()));
        for cause in [ReclaimCause::Preempted, ReclaimCause::NodeLost] {
            leaves(&mut job, 3, cause);
        }
        exit(&mut job, 3, Exit::reclaimed(ReclaimCause::Deleted, "deleted"));
        assert_eq!(job.outcome(), None, "{rule}");
        // The master has withdrawn its pod.
        exit(&mut job, 2, Exit::reclaimed(ReclaimCause::Unwanted, "it is not wanted any more"));
        assert_eq!(job.outcome(), None, "{rule}");
    }
}
