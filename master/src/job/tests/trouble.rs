//! Trouble of one worker stays its own: fatal reports, kills without progress, programs that never
//! join, and states that are lost at the beginning.

use std::time::Duration;

use elasticdl_proto::{HostReport, Location, WorkerId, WorkerOptions};

use super::super::*;
use super::directed::{actions, at, committed, connect, deliver, formed, launch_at, started};
use crate::job::testing::{dataset, spec};

fn fatal(error: &str) -> WorkerMessage {
    WorkerMessage::Failed { error: error.into(), ranges: Vec::new(), fatal: true, exported: false }
}

fn locate(job: &mut Job, launch: u64, node: &str) {
    let location = Location { node: node.into(), ..Location::default() };
    job.handle(at(0), Event::LaunchLocated { launch: LaunchId(launch), location });
}

fn ended(job: &mut Job, launch: u64, exit: Exit) {
    job.handle(at(0), Event::ProcessEnded { launch: LaunchId(launch), exit });
}

fn error(job: &Job) -> Option<String> {
    job.summary(at(0)).error
}

/// Launch `i` joins, on `node`, and reports a fatal failure before it is a member.
fn fails(job: &mut Job, i: u64, node: &str, why: &str) {
    connect(job, i);
    locate(job, i, node);
    deliver(job, i, fatal(why));
    ended(job, i, Exit::Code(1));
}

#[test]
fn a_fatal_failure_ends_a_job_only_before_its_first_group_has_formed() {
    let mut job = Job::new(spec());
    connect(&mut job, 1);
    deliver(&mut job, 1, fatal("no such method"));
    assert_eq!(error(&job).as_deref(), Some("worker 1: no such method"));

    let mut job = started(spec(), &[20]);
    deliver(&mut job, 3, fatal("no descriptor"));
    ended(&mut job, 3, Exit::Code(1));
    assert_eq!((error(&job), job.lifecycle.failures()), (None, 1));
    assert!(actions(&mut job).contains(&launch_at(4, 2)), "it is replaced");
}

#[test]
fn a_fatal_failure_is_confirmed_by_another_host_and_not_by_the_same_one() {
    for (second, ends) in [("b", false), ("c", true)] {
        let mut job = started(spec(), &[20]);
        [(1, "a"), (2, "a"), (3, "b")].into_iter().for_each(|(i, node)| locate(&mut job, i, node));
        ended(&mut job, 3, Exit::Signal(9));
        fails(&mut job, 4, "b", "no reader");
        fails(&mut job, 5, second, "no reader");
        assert_eq!(error(&job).is_some(), ends, "{second}: {:?}", error(&job));
    }
}

#[test]
fn on_the_only_host_a_second_launch_confirms_unless_the_job_makes_progress() {
    for (progress, why, ends) in
        [(false, "no reader", true), (true, "no reader", false), (false, "no model", false)]
    {
        let mut job = started(spec(), &[20]);
        ended(&mut job, 3, Exit::Signal(9));
        fails(&mut job, 4, "", "no reader");
        deliver(&mut job, 1, formed(2, 0, &[]));
        if progress {
            deliver(&mut job, 1, committed(2, 1, &[(0, 4)]));
        }
        fails(&mut job, 5, "", why);
        assert_eq!(error(&job).is_some(), ends, "{progress} {why}: {:?}", error(&job));
    }
}

#[test]
fn a_group_whose_members_all_fail_alike_ends_the_job() {
    let mut job = started(spec(), &[20]);
    [(1, "a"), (2, "b"), (3, "b")].into_iter().for_each(|(i, node)| locate(&mut job, i, node));
    for worker in [2, 3] {
        deliver(&mut job, worker, fatal("the data has changed"));
        assert_eq!(error(&job), None);
    }
    deliver(&mut job, 1, fatal("the data has changed"));
    let error = error(&job).unwrap();
    assert_eq!(error, "worker 1 on a: the data has changed (as worker 2 before)");
}

#[test]
fn replacements_avoid_the_node_of_a_failure_for_a_while() {
    let mut job = started(spec(), &[20]);
    locate(&mut job, 3, "b");
    ended(&mut job, 3, Exit::Code(1));
    let launches = |job: &mut Job| -> Vec<(u64, Vec<String>)> {
        let launched = actions(job).into_iter().filter_map(|action| match action {
            Action::Launch { launch, avoid, .. } => Some((launch.0, avoid)),
            _ => None,
        });
        launched.collect()
    };
    assert_eq!(launches(&mut job), [(4, vec!["b".into()])]);
    let later = at(300_000);
    job.handle(later, Event::ProcessEnded { launch: LaunchId(4), exit: Exit::Signal(9) });
    assert_eq!(launches(&mut job), [(5, vec![])]);
}

#[test]
fn the_node_of_a_worker_that_is_alone_with_its_state_or_result_is_avoided() {
    for has_majority in [true, false] {
        let mut job = started(spec(), &[20]);
        locate(&mut job, 2, "b");
        let error = "it differs".to_owned();
        deliver(&mut job, 2, WorkerMessage::Diverged { error, has_majority, by_audit: true });
        assert_eq!(job.lifecycle.avoided_node(at(1)), has_majority.then_some("b"));
    }
}

#[test]
fn kills_without_progress_end_the_job_and_say_that_memory_ran_out() {
    let mut job = started(spec(), &[20]);
    let mut ms = 0;
    let mut kill = |job: &mut Job, launch: u64| {
        ms += 31_000;
        let explanation = "killed by the system, as memory ran out".to_owned();
        let launch = LaunchId(launch);
        job.handle(at(ms), Event::LaunchExplained { launch, explanation });
        job.handle(at(ms), Event::ProcessEnded { launch, exit: Exit::Signal(9) });
        job.handle_timeout(at(ms + 30_000));
    };
    (3..23).for_each(|launch| kill(&mut job, launch));
    assert_eq!((error(&job), job.lifecycle.failures()), (None, 0));
    // The successor of the master knows how often that was.
    assert_eq!(job.to_persisted().kills_since_progress, 20);
    kill(&mut job, 23);
    let error = error(&job).unwrap();
    assert!(
        error.contains("workers were killed 21 times") && error.contains("memory ran out"),
        "{error}"
    );
}

#[test]
fn kills_of_workers_that_have_worked_are_replaced_at_once_for_ever_and_others_wait() {
    let mut job = started(spec(), &[400]);
    deliver(&mut job, 1, committed(1, 1, &[(0, 4)]));
    ended(&mut job, 3, Exit::Signal(9));
    deliver(&mut job, 1, formed(2, 1, &[(0, 4)]));
    let kill_at_step = |job: &mut Job, step: u64, ms: u64| {
        deliver(job, 1, committed(2, step, &[(4 * (step - 1), 4 * step)]));
        let (launch, exit) = (LaunchId(step + 2), Exit::Signal(9));
        job.handle(at(ms), Event::ProcessEnded { launch, exit });
        actions(job).contains(&launch_at(step + 3, 2))
    };
    for step in 2..=50 {
        assert!(kill_at_step(&mut job, step, step * 6000), "step {step}");
    }
    assert_eq!((error(&job), job.to_persisted().kills_since_progress), (None, 1));
    assert!(!kill_at_step(&mut job, 51, 300_100), "it was killed right after its start");
    job.handle_timeout(at(300_350));
    assert!(actions(&mut job).contains(&launch_at(54, 2)));
}

/// Fails launches, each in the slot of the one before, until the job ends; at most ten.
fn fail_in_turn(job: &mut Job, first: u64, next: u64) -> Option<String> {
    for (i, launch) in [first].into_iter().chain(next..).take(10).enumerate() {
        let now = i as u64 * 60_000;
        let exit = Exit::Code(1);
        job.handle(at(now), Event::ProcessEnded { launch: LaunchId(launch), exit });
        job.handle_timeout(at(now + 29_999));
        let is_replaced = actions(job).contains(&launch_at(next + i as u64, 2));
        assert!(i < 3 || !is_replaced, "the pauses grow: {launch}");
        job.handle_timeout(at(now + 30_000));
        if let Some(error) = error(job) {
            return Some(error);
        }
    }
    None
}

#[test]
fn failures_in_one_slot_end_no_job_that_can_train_without_it() {
    for (min_workers, ends) in [(2, false), (3, true)] {
        let spec = JobSpec { min_workers, ..spec() };
        let mut job = started(spec, &[20]);
        let error = fail_in_turn(&mut job, 3, 4);
        assert_eq!(error.is_some(), ends, "{error:?}");
    }
    // A failure in another slot shows that the trouble is not local.
    let mut job = started(spec(), &[20]);
    assert_eq!(fail_in_turn(&mut job, 3, 4), None);
    ended(&mut job, 2, Exit::Code(1));
    let error = error(&job).unwrap();
    assert!(error.contains("giving up after 11 failures without progress"), "{error}");
}

#[test]
fn a_slot_that_fails_beside_a_job_that_makes_progress_is_tried_less_and_less_often() {
    let mut job = started(spec(), &[400]);
    deliver(&mut job, 1, committed(1, 1, &[(0, 4)]));
    let (mut now, mut pauses) = (1000, Vec::new());
    for i in 0..6 {
        let (launch, exit) = (LaunchId(3 + i), Exit::Code(1));
        job.handle(at(now), Event::ProcessEnded { launch, exit });
        let ended = now;
        while !actions(&mut job).contains(&launch_at(4 + i, 2)) {
            now += 250;
            assert!(now < 200_000, "{pauses:?}");
            job.handle_timeout(at(now));
        }
        pauses.push(now - ended);
        if i == 0 {
            deliver(&mut job, 1, formed(2, 1, &[(0, 4)]));
        }
        deliver(&mut job, 1, committed(2, 2 + i, &[(4 + 4 * i, 8 + 4 * i)]));
    }
    assert_eq!((pauses, error(&job)), (vec![0, 250, 500, 16_000, 30_000, 30_000], None));
}

#[test]
fn failures_before_the_first_group_end_no_job_whose_other_workers_wait() {
    let mut job = Job::new(spec());
    connect(&mut job, 1);
    deliver(&mut job, 1, WorkerMessage::Described(Ok(dataset(&[20])), None));
    connect(&mut job, 2);
    assert_eq!(fail_in_turn(&mut job, 3, 4), None);
    // The only worker so far that fails at each start ends the job.
    let mut job = Job::new(spec());
    let error = fail_in_turn(&mut job, 1, 2).unwrap();
    assert!(error.contains("giving up after 4 failures without progress"), "{error}");
}

#[test]
fn failures_on_one_node_are_local() {
    for (other, ends) in [("b", false), ("c", true)] {
        let mut job = started(JobSpec { min_workers: 1, ..spec() }, &[20]);
        [(1, "a"), (2, other), (3, "b")].into_iter().for_each(|(i, n)| locate(&mut job, i, n));
        ended(&mut job, 2, Exit::Code(1));
        ended(&mut job, 3, Exit::Code(1));
        for launch in 4..6 {
            locate(&mut job, launch, "b");
            ended(&mut job, launch, Exit::Code(1));
            job.handle_timeout(at(300_000));
        }
        assert_eq!(error(&job).is_some(), ends, "{other}: {:?}", error(&job));
    }
}

#[test]
fn workers_that_never_join_end_no_job_whose_group_trains() {
    let mut job = started(JobSpec { min_workers: 1, ..spec() }, &[20]);
    [2, 3].into_iter().for_each(|launch| ended(&mut job, launch, Exit::Signal(9)));
    for launch in 4..12 {
        ended(&mut job, launch, Exit::Code(1));
        job.handle_timeout(at(300_000));
        assert_eq!(error(&job), None, "{launch}");
    }
    ended(&mut job, 1, Exit::Code(1));
    assert!(error(&job).is_some());
}

#[test]
fn a_program_that_the_image_lacks_ends_the_job_at_the_first_worker() {
    let missing = "StartError: failed to create task: exec: \"cuonting\": executable file not \
                   found in $PATH: unknown";
    let mut job = Job::new(spec());
    locate(&mut job, 1, "a");
    ended(&mut job, 1, Exit::NotStarted(missing.into()));
    let error_of_missing = error(&job).unwrap();
    assert!(
        error_of_missing.contains("worker 1 on a could not be started: StartError: failed to")
            && error_of_missing.contains("the program after `--`"),
        "{error_of_missing}"
    );
    // Another node, or a later time, may do better.
    for other in ["StartError: cannot allocate memory", "StartError: exec: \"x\": text file busy"] {
        let mut job = Job::new(spec());
        locate(&mut job, 1, "a");
        ended(&mut job, 1, Exit::NotStarted(other.into()));
        assert_eq!((error(&job), job.lifecycle.failures()), (None, 1), "{other}");
    }
    let mut job = started(spec(), &[20]);
    ended(&mut job, 1, Exit::NotStarted(missing.into()));
    assert_eq!(error(&job), None, "a worker of the job has joined with this program");
}

#[test]
fn a_program_that_ends_without_joining_is_told_what_to_do_and_started_once() {
    let mut job = Job::new(spec());
    ended(&mut job, 1, Exit::Code(0));
    let error_of_0 = error(&job).unwrap();
    assert!(
        error_of_0.contains("worker 1 exited with code 0 and never joined the job")
            && error_of_0.contains("elasticdl.torch.join()"),
        "{error_of_0}"
    );
    // A former master may have heard of it.
    let mut job = Job::restore(Job::new(spec()).to_persisted(), at(0)).unwrap();
    ended(&mut job, 1, Exit::Code(0));
    assert_eq!((error(&job), job.lifecycle.failures()), (None, 1));
    // Python's for a script that does not exist, and that of parsers of arguments.
    let mut job = Job::new(spec());
    ended(&mut job, 1, Exit::Code(2));
    let error_of_2 = error(&job).unwrap();
    assert!(error_of_2.contains("never joined the job: this code says that its"), "{error_of_2}");
    assert_eq!(job.outcome(), Some(Outcome::InvalidInput));
    let said = job.status(at(0)).events.join("\n");
    assert!(said.contains("the job is refused: worker 1 exited with code 2"), "{said}");
    // The script may be there on another node.
    let mut job = Job::new(spec());
    locate(&mut job, 1, "a");
    ended(&mut job, 1, Exit::Code(2));
    assert_eq!((error(&job), job.lifecycle.failures()), (None, 1));
    // Another code may be an error that a retry avoids.
    let mut job = Job::new(spec());
    let lines = "one\n  two".into();
    job.handle(at(0), Event::LaunchPrinted { launch: LaunchId(1), lines });
    ended(&mut job, 1, Exit::Code(1));
    assert_eq!((error(&job), job.lifecycle.failures()), (None, 1));
    assert!(job.reporting.events().contains(&"the log of worker 1 ends with: two".to_owned()));
    // So is a panic of one that has joined.
    let mut job = started(spec(), &[20]);
    let lines = "thread 'main' panicked at a.rs:5:1:\nno words\nnote: run with `RUST_BACKTRACE=1`";
    job.handle(at(0), Event::LaunchPrinted { launch: LaunchId(2), lines: lines.into() });
    ended(&mut job, 2, Exit::Code(101));
    let told = "the log of worker 2 ends with: no words".to_owned();
    assert!(job.reporting.events().contains(&told), "{:?}", job.reporting.events());
    // Once the program has joined, a launch that does not is trouble of its own.
    let mut job = started(spec(), &[20]);
    ended(&mut job, 3, Exit::Signal(9));
    ended(&mut job, 4, Exit::Code(0));
    assert_eq!((error(&job), job.lifecycle.failures()), (None, 1));
}

#[test]
fn a_worker_that_ends_without_joining_ends_the_job_alone_or_if_a_second_one_confirms_it() {
    let policies = Policies { starts_together: true, ..Policies::default() };
    let together = || Job::new(JobSpec { policies: policies.clone(), ..spec() });
    for code in [0, 2] {
        // The other slots may do better, and the second try of this one did not.
        let mut job = together();
        ended(&mut job, 1, Exit::Code(code));
        ended(&mut job, 4, Exit::Code(code));
        assert_eq!((error(&job), job.lifecycle.failures()), (None, 2), "{code}");
        ended(&mut job, 2, Exit::Code(code));
        let error_of_2 = error(&job).unwrap();
        assert!(error_of_2.contains("worker 2 exited with code"), "{error_of_2}");
        // Another end does not confirm it, nor is it trouble of the program when one has joined.
        let mut job = together();
        ended(&mut job, 1, Exit::Code(code));
        ended(&mut job, 2, Exit::Code(2 - code));
        assert_eq!((error(&job), job.lifecycle.failures()), (None, 2), "{code}");
        let mut job = together();
        connect(&mut job, 3);
        (1..=2).for_each(|launch| ended(&mut job, launch, Exit::Code(code)));
        assert_eq!((error(&job), job.lifecycle.failures()), (None, 2), "{code}");
    }
}

#[test]
fn a_note_about_a_slow_start_does_not_explain_a_kill() {
    let mut job = started(spec(), &[20]);
    let note = "started 15 s ago and has not joined the job yet".to_owned();
    job.handle(at(0), Event::LaunchNoted { launch: LaunchId(3), note });
    ended(&mut job, 3, Exit::Signal(9));
    let events = job.status(at(0)).events.join("\n");
    assert!(events.contains("worker 3 was started 15 s ago"), "{events}");
    assert!(events.contains("worker 3 killed by SIGKILL (not counted"), "{events}");
}

#[test]
fn a_busy_launch_may_take_longer_to_join() {
    let mut job = Job::new(spec());
    actions(&mut job);
    for second in (0..3600).step_by(50) {
        job.handle_timeout(at(second * 1000));
        job.handle(at(second * 1000), Event::LaunchIsBusy { launch: LaunchId(1) });
    }
    assert_eq!(actions(&mut job), []);
    // Silence counts from the last activity.
    job.handle_timeout(at(3_609_999));
    assert_eq!(actions(&mut job), []);
    job.handle_timeout(at(3_610_000));
    assert_eq!(actions(&mut job), [Action::Kill { launch: LaunchId(1) }]);
}

/// A job of one worker that has trained `step` steps by `ms`, all of whose workers are lost then.
fn lost(every: Option<CheckpointEvery>, step: u64, ms: u64) -> Job {
    let kept = |every| CheckpointSpec { dir: "/c".into(), every, keep: 3, exclusive: false };
    let mut job = started(
        JobSpec {
            num_workers: 1,
            max_workers: 1,
            restart_without_checkpoint: false,
            options: WorkerOptions { checkpoints: every.map(kept), ..spec().options },
            ..spec()
        },
        &[40],
    );
    let message = committed(1, step, &[(0, 4)]);
    job.handle(at(ms), Event::Message { worker: WorkerId(1), message });
    ended(&mut job, 1, Exit::Signal(9));
    connect(&mut job, 2);
    deliver(&mut job, 2, WorkerMessage::Ready { parameters: 10 });
    deliver(&mut job, 2, formed(2, 0, &[]));
    job
}

#[test]
fn a_state_that_is_lost_before_its_first_checkpoint_was_due_is_made_again() {
    let time = Some(CheckpointEvery::Time(Duration::from_secs(60)));
    let steps = Some(CheckpointEvery::Steps(10.try_into().unwrap()));
    for (every, step, ms, is_made_again) in [
        (time, 900, 3000, true),
        // The first checkpoint may still be being written.
        (time, 900, 90_000, true),
        (time, 900, 90_001, false),
        (steps, 20, 900_000, true),
        (steps, 21, 1, false),
        (None, 900, 300_000, true),
        (None, 900, 300_001, false),
    ] {
        let job = lost(every, step, ms);
        let error = error(&job);
        assert_eq!(error.is_none(), is_made_again, "{every:?} {step} {ms}: {error:?}");
        // Either way it is said.
        let lost = job.summary(at(0)).state_lost;
        let of_step = lost.map(|lost| (lost.count, lost.at_step, lost.steps));
        assert_eq!(of_step, Some((1, step, step)));
        let told = job.status(at(0)).events.iter().any(|line| line.contains("only just begun"));
        assert_eq!(told, is_made_again);
    }
}

#[test]
fn a_job_that_has_a_checkpoint_does_not_begin_again() {
    let every = CheckpointEvery::Time(Duration::from_secs(60));
    let kept = CheckpointSpec { dir: "/c".into(), every, keep: 3, exclusive: false };
    let alone = JobSpec {
        num_workers: 1,
        max_workers: 1,
        options: WorkerOptions { checkpoints: Some(kept), ..spec().options },
        ..spec()
    };
    let spec = JobSpec { restart_without_checkpoint: false, ..alone };
    let mut job = started(spec, &[40]);
    deliver(&mut job, 1, committed(1, 3, &[(0, 12)]));
    let saved =
        CheckpointNews::Saved { step: 2, name: "step".into(), bytes: 1, times: Default::default() };
    deliver(&mut job, 1, WorkerMessage::Checkpoint(saved));
    ended(&mut job, 1, Exit::Signal(9));
    connect(&mut job, 2);
    deliver(&mut job, 2, WorkerMessage::Ready { parameters: 10 });
    deliver(&mut job, 2, formed(2, 0, &[]));
    assert!(error(&job).is_some(), "its checkpoint has gone");
}

/// The nodes that the next launch avoids.
fn avoided(job: &mut Job) -> Vec<String> {
    let launched = actions(job).into_iter().find_map(|action| match action {
        Action::Launch { avoid, .. } => Some(avoid),
        _ => None,
    });
    launched.unwrap()
}

#[test]
fn a_node_with_three_faults_is_avoided_for_hours_also_by_the_next_master() {
    let mut job = started(spec(), &[20]);
    let minutes = |minutes: u64| at(60_000 * minutes);
    for (launch, minute) in [(3, 0), (4, 30), (5, 60)] {
        locate(&mut job, launch, "b");
        let exit = Exit::Signal(9);
        job.handle(minutes(minute), Event::ProcessEnded { launch: LaunchId(launch), exit });
        job.handle_timeout(at(60_000 * minute + 1000));
        let expected = if launch == 5 { vec!["b"] } else { vec![] };
        assert_eq!(avoided(&mut job), expected, "{launch}");
    }
    let event = "new workers avoid the host b, for up to 6 h: 3 faults, the last one: worker 5 \
                 on b killed by SIGKILL";
    assert!(job.status(minutes(60)).events.contains(&event.to_owned()));
    let listed = job.status(minutes(60)).hosts_avoided;
    assert_eq!((&*listed[0].host, listed[0].for_s), ("b", Some(5.0 * 3600.0)));
    let next = Job::restore(job.to_persisted(), minutes(61)).unwrap();
    assert_eq!(next.status(minutes(60)).hosts_avoided, listed);
    assert_eq!(next.status(minutes(360)).hosts_avoided, []);
}

#[test]
fn faults_of_a_program_are_none_of_its_node() {
    let mut job = started(JobSpec { max_worker_restarts: 9, ..spec() }, &[20]);
    for launch in 3..9 {
        locate(&mut job, launch, "b");
        let exit = match launch {
            3 | 4 => Exit::Code(1),
            5 | 6 => Exit::reclaimed(ReclaimCause::Preempted, "preempted"),
            _ => Exit::Signal(11),
        };
        ended(&mut job, launch, exit);
        job.handle_timeout(at(600_000));
    }
    assert_eq!(job.status(at(0)).hosts_avoided, []);
}

#[test]
fn unresponsive_wrong_and_lost_workers_are_faults_of_their_node() {
    let mut job = started(spec(), &[20]);
    (1..=3).for_each(|launch| locate(&mut job, launch, "b"));
    let error = "it differs".to_owned();
    deliver(&mut job, 2, WorkerMessage::Diverged { error, has_majority: true, by_audit: true });
    ended(&mut job, 3, Exit::reclaimed(ReclaimCause::NodeLost, "lost"));
    assert_eq!(job.status(at(0)).hosts_avoided, []);
    job.evict(at(1), WorkerId(1), "does not answer");
    let why = &job.status(at(1)).hosts_avoided[0].why;
    assert_eq!(why, "3 faults, the last one: worker 1 did not respond");
}

#[test]
fn the_nodes_that_the_user_names_are_always_avoided() {
    let mut job = started(JobSpec { avoid_hosts: vec!["c".into()], ..spec() }, &[20]);
    locate(&mut job, 3, "b");
    ended(&mut job, 3, Exit::Code(1));
    assert_eq!(avoided(&mut job), ["c", "b"]);
    let listed = job.status(at(u64::MAX / 2)).hosts_avoided;
    assert_eq!((listed.len(), &*listed[0].why, listed[0].for_s), (1, "--avoid-hosts", None));
}

#[test]
fn a_host_is_checked_once_and_a_slow_one_has_a_fault() {
    let mut job = Job::new(JobSpec { num_workers: 6, max_workers: 6, ..spec() });
    let report =
        |megabytes: u64| HostReport { copied_per_s: megabytes << 20, ..Default::default() };
    let mut asked = Vec::new();
    for (launch, node) in (1..).zip(["a", "b", "b", "c", "", "d"]) {
        locate(&mut job, launch, node);
        connect(&mut job, launch);
        if launch == 1 {
            deliver(&mut job, 1, WorkerMessage::Described(Ok(dataset(&[20])), None));
        }
        asked.extend(actions(&mut job).into_iter().filter_map(|action| match action {
            Action::Send { worker, message: MasterMessage::CheckHost } => Some(worker.0),
            _ => None,
        }));
    }
    assert_eq!(asked, [1, 2, 4, 6]);
    for (worker, megabytes) in [(1, 9000), (2, 2000), (4, 8500), (1, 1), (6, 9000)] {
        deliver(&mut job, worker, WorkerMessage::HostChecked(Box::new(report(megabytes))));
    }
    let status = job.status(at(0));
    let expected = [("a", 9000), ("b", 2000), ("c", 8500), ("d", 9000)];
    assert_eq!(status.hosts, expected.map(|(host, speed)| (host.into(), report(speed))).into());
    let fault = "host b counts as faulty: it copies 2.1 GB/s in memory, and most others 9.4 GB/s";
    let faults = status.events.iter().filter(|event| event.contains(" counts as faulty"));
    assert_eq!(faults.collect::<Vec<_>>(), [fault]);
    // With two more faults it is avoided.
    for launch in [2, 3] {
        ended(&mut job, launch, Exit::Signal(9));
    }
    let avoided = &job.status(at(0)).hosts_avoided;
    assert_eq!((avoided.len(), &*avoided[0].host), (1, "b"));
}

#[test]
fn another_worker_checks_a_host_whose_check_was_cut_short() {
    let mut job = Job::new(spec());
    locate(&mut job, 1, "a");
    connect(&mut job, 1);
    deliver(&mut job, 1, WorkerMessage::Described(Ok(dataset(&[20])), None));
    locate(&mut job, 2, "a");
    let is_asked = |job: &mut Job| {
        let sent = actions(job);
        sent.iter()
            .any(|action| matches!(action, Action::Send { message: MasterMessage::CheckHost, .. }))
    };
    assert!(is_asked(&mut job));
    ended(&mut job, 1, Exit::Signal(9));
    connect(&mut job, 2);
    assert!(is_asked(&mut job));
}
