//! Wrong arithmetic in a step that is audited is noticed: its worker is replaced, and nothing wrong
//! is applied, in a checkpoint or exported.

use elasticdl_tests::{Ended, JobFixture, exported_counts};

use crate::PROGRAMS;

/// Launch 2 has these options alone.
fn of_one(options: &str) -> Option<String> {
    let set = format!("set -- \"$@\" {options}");
    Some(format!("if [ \"$ELASTICDL_LAUNCH\" = 2 ]; then {set}; fi; exec \"$@\""))
}

fn fixture(num_workers: u32, script: Option<String>) -> JobFixture {
    let fixture = JobFixture::new(PROGRAMS, num_workers);
    JobFixture { records: 1440, epochs: 2, micros_per_record: 0, script, ..fixture }
}

fn run(fixture: &JobFixture, share: &str, flags: &[&str]) -> Ended {
    let checkpoints = fixture.path("checkpoints");
    let command = fixture.command(0).option("checkpoint-dir", checkpoints);
    let command = command.option("checkpoint-every", "10").option("audit", share);
    let command = command.option("export", fixture.path("model.safetensors"));
    flags.iter().fold(command, |command, flag| command.flag(flag)).run()
}

/// The digest of a job of three workers to which nothing happens, and which audits nothing.
fn digest() -> Option<String> {
    let fixture = fixture(3, None);
    let ended = fixture.command(0).run();
    ended.assert_exactly_once("nothing happens", fixture.records, 2);
    ended.summary().digest.clone()
}

#[test]
fn a_worker_that_computes_wrongly_is_replaced_before_the_step_is_applied() {
    let expected = digest();
    let always = "--miscount-at 20 --keeps-miscounting";
    let cases: [(&str, &[&str]); 3] =
        [("--miscount-at 20", &[]), (always, &[]), (always, &["deterministic"])];
    for (fault, flags) in cases {
        let fixture = fixture(3, of_one(fault));
        let ended = run(&fixture, "100%", flags);
        ended.assert_exactly_once(fault, fixture.records, 2);
        let summary = ended.summary();
        assert_eq!(summary.workers.restarts, 1, "{fault}: {}", ended.output);
        let audit = summary.audit.unwrap();
        assert_eq!((audit.disagreements, audit.workers_replaced), (1, 1), "{fault}: {audit:?}");
        assert!(audit.steps <= summary.steps, "{fault}: {audit:?}");
        assert!(summary.state_lost.is_none(), "{fault}: {}", ended.output);
        assert_eq!(summary.digest, expected, "{fault}: {}", ended.output);
        for part in ["wrong arithmetic: worker 2 on ", "one worker alone differs"] {
            assert!(ended.output.contains(part), "{fault}: {part}: {}", ended.output);
        }
        let counts = exported_counts(&fixture.path("model.safetensors"));
        assert!(counts.iter().all(|&count| count == 2.0), "{fault}");
    }
}

/// No rank can tell which of two is right.
#[test]
fn two_workers_that_stand_by_their_results_are_replaced_and_the_newest_checkpoint_counts() {
    let fixture = fixture(2, of_one("--miscount-at 30 --keeps-miscounting"));
    let ended = run(&fixture, "100%", &[]);
    ended.assert_exactly_once("one of two computes wrongly", fixture.records, 2);
    assert!(ended.output.contains("none can tell which is right"), "{}", ended.output);
    let summary = ended.summary();
    assert_eq!(summary.digest, digest(), "{}", ended.output);
    let audit = summary.audit.unwrap();
    assert_eq!((audit.disagreements, audit.workers_replaced), (1, 2), "{}", ended.output);
}

#[test]
fn an_undisturbed_job_is_audited_without_an_alarm() {
    let cases: [(_, _, &[&str]); 4] =
        [(1, "100%", &[]), (2, "100%", &[]), (3, "20%", &[]), (3, "100%", &["shard-optimizer"])];
    for (workers, share, flags) in cases {
        let fixture = JobFixture { program_options: &["--slots"], ..fixture(workers, None) };
        let ended = run(&fixture, share, flags);
        ended.assert_exactly_once(share, fixture.records, 2);
        let summary = ended.summary();
        assert_eq!(summary.workers.restarts, 0, "{}", ended.output);
        let audit = summary.audit.unwrap();
        assert_eq!((audit.disagreements, audit.workers_replaced), (0, 0));
        let (steps, all) = (audit.steps, summary.steps);
        let is_share = if share == "100%" { steps == all } else { (1..all).contains(&steps) };
        assert!(is_share, "{share}: {steps} of {all}: {}", ended.output);
    }
}

#[test]
fn a_model_that_is_not_deterministic_or_can_not_be_computed_twice_is_refused_at_the_start() {
    for (option, text) in [
        ("--counts-calls", "--audit: the model is not deterministic"),
        ("--tables", "--audit can't be used for this job: the model has tables"),
    ] {
        let fixture = fixture(2, Some(format!("exec \"$@\" {option}")));
        let ended = run(&fixture, "1%", &[]);
        ended.assert_outcome(2, "refused");
        assert!(ended.output.contains(text), "{option}: {}", ended.output);
    }
}
