//! Of replicas that differ the minority is replaced, and no differing state is in a checkpoint or
//! exported.

use std::fs;

use elasticdl_tests::{JobFixture, exported_counts, send};
use rustix::process::Signal;

use crate::PROGRAMS;

/// The program drifts in launch 2 alone, as if a bit of its memory had flipped. Only the window of
/// step 64 would show it.
const ONE_DRIFTS: &str =
    "if [ \"$ELASTICDL_LAUNCH\" = 2 ]; then set -- \"$@\" --drift-at 5; fi; exec \"$@\"";

#[test]
fn a_replica_that_differs_is_replaced_before_its_state_is_in_a_checkpoint() {
    let script = Some(ONE_DRIFTS.into());
    let fixture = JobFixture { epochs: 10, script, ..JobFixture::new(PROGRAMS, 3) };
    let checkpoints = fixture.path("checkpoints");
    let command = fixture.command(0).option("checkpoint-dir", checkpoints);
    let ended = command.option("checkpoint-every", "10").run();
    ended.assert_exactly_once("one of three replicas differs", fixture.records, 10);
    let summary = ended.summary();
    assert_eq!(summary.workers.restarts, 1, "{}", ended.output);
    assert!(summary.state_lost.is_none(), "{}", ended.output);
    let cause = "the whole state at step 10: worker 2 on ";
    assert!(ended.output.contains(cause), "{}", ended.output);
    assert!(ended.output.contains("one replica alone differs"), "{}", ended.output);
}

/// No checkpoint, no window and no evaluation shows the difference: only the end does.
#[test]
fn a_replica_that_differs_at_the_very_end_is_replaced_before_the_model_is_exported() {
    let script = Some(ONE_DRIFTS.into());
    let fixture = JobFixture { records: 1440, epochs: 1, script, ..JobFixture::new(PROGRAMS, 3) };
    let export = fixture.path("model.safetensors");
    let command = fixture.command(0).option("checkpoint-dir", "none");
    let ended = command.option("export", &export).run();
    ended.assert_exactly_once("one of three replicas differs at the end", fixture.records, 1);
    let cause = "the whole state at step 30: worker 2 on ";
    assert!(ended.output.contains(cause), "{}", ended.output);
    assert!(exported_counts(&export).iter().all(|&count| count == 1.0));
}

/// Launch 3 runs another executable, once the group goes on without its predecessor.
const ANOTHER_BUILD: &str = "if [ \"$ELASTICDL_LAUNCH\" = 3 ]; then
    while [ ! -e \"$TMPDIR/go\" ]; do sleep 0.1; done
    other=\"$TMPDIR/other-build\"; cp \"$1\" \"$other\"; echo >> \"$other\"; shift
    exec \"$other\" \"$@\"
fi
exec \"$@\"";

#[test]
fn a_replacement_of_another_build_is_never_a_member_and_the_job_completes() {
    let fixture = JobFixture::new(PROGRAMS, 2);
    let variables = vec![("TMPDIR", fixture.folder.path().into())];
    let fixture =
        JobFixture { epochs: 10, script: Some(ANOTHER_BUILD.into()), variables, ..fixture };
    let (records, go) = (fixture.records, fixture.path("go"));
    let mut job = fixture.start(0);
    job.wait_for_first_steps();
    let (lost, pid) = job.members()[1];
    send(pid, Signal::KILL);
    job.wait_for_members_without(1, &[lost]);
    fs::write(go, "").unwrap();
    let ended = job.wait();
    ended.assert_exactly_once("one replacement is of another build", records, 10);
    assert!(ended.output.contains("worker 3 failed: this worker on "), "{}", ended.output);
    assert!(ended.output.contains("it differs in its executable;"), "{}", ended.output);
    assert!(!ended.output.contains("worker 3 joined"), "{}", ended.output);
    assert_eq!(ended.summary().workers.restarts, 2, "{}", ended.output);
}
