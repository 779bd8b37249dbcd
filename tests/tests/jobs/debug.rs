//! `elasticdl debug` shows a hung step, a stopped worker, one that has not joined, and says why
//! there is nothing to show.

use elasticdl_proto::{InspectedWorker, Inspection};
use elasticdl_tests::{JobFixture, Running, send};
use rustix::process::Signal;

use crate::PROGRAMS;

/// The error of `elasticdl debug`, and its exit code.
fn refused(job: &Running) -> (Option<i32>, String) {
    let output = job.output_of(&["debug"]);
    assert!(output.stdout.is_empty(), "{output:?}");
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn a_hung_step_a_stopped_worker_and_one_that_has_not_joined_are_shown() {
    // The third launch never joins.
    let script = "test $ELASTICDL_LAUNCH = 3 && exec sleep 1000; exec \"$@\"";
    let fixture = JobFixture {
        script: Some(script.into()),
        program_options: &["--hang-at", "3000"],
        worker_timeout: None,
        ..JobFixture::new(PROGRAMS, 2)
    };
    let mut job = fixture.start(0);
    job.scale(3);
    let hangs = |worker: &InspectedWorker| {
        let threads = worker.report.iter().flat_map(|report| &report.threads);
        let mut frames = threads.flat_map(|thread| &thread.frames);
        frames.any(|frame| frame.contains("hang_if_first"))
    };
    let mut workers: Vec<InspectedWorker> = Vec::new();
    while workers.len() < 3 || !workers.iter().any(hangs) {
        assert!(job.is_running(), "{}", job.wait().output);
        let json = job.command(&["debug", "--json"]);
        workers = serde_json::from_str::<Inspection>(&json).unwrap().workers;
    }
    let pids: Vec<u32> = workers.iter().filter_map(|worker| worker.pid).collect();
    let (hung, waiting): (Vec<_>, Vec<_>) = workers.into_iter().partition(hangs);
    let report = hung[0].report.as_ref().unwrap();
    let activity = report.activity.as_ref().unwrap();
    assert!(activity.what.contains("computes its records of a step"), "{activity:?}");
    let main = &report.threads[0];
    assert!(main.frames[2].contains("hang_if_first"), "{main:?}");
    assert!(report.links.iter().any(|link| link.to_master), "{report:?}");
    assert!(hung[0].messages.iter().any(|m| m.kind == "Membership"), "{:?}", hung[0]);
    let text = job.command(&["debug"]);
    for expected in [
        "Counting::hang_if_first",
        "it waits for the previous member of the ring for",
        "worker 3 (process ",
        "its process is S (sleeping)",
        "it is not connected to the master",
    ] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    assert!(!text.contains("std::thread"), "{text}");
    send(waiting[0].pid.unwrap(), Signal::STOP);
    let text = job.command(&["debug"]);
    assert!(text.contains("its process is T (stopped)"), "{text}");
    assert!(text.contains("it does not answer") && text.contains("hang_if_first"), "{text}");
    send(waiting[0].pid.unwrap(), Signal::CONT);
    job.kill_master();
    let (code, error) = refused(&job);
    assert!(code == Some(1) && error.contains("is gone"), "{error}");
    pids.into_iter().for_each(|pid| send(pid, Signal::KILL));
    let (code, error) = refused(&job);
    assert!(code == Some(1) && error.contains("does not run"), "{error}");
}
