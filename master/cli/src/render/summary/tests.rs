use elasticdl_master::job::{
    Cause, Evaluated, LossSummary, RecordsSummary, RestoredCheckpoint, SavedCheckpoint,
    ThroughputSummary, WorkersSummary,
};
use elasticdl_proto::{Generation, Kept, SkippedRecords, WorkerId};

use super::*;

fn change(generation: u64, cause: Cause, gap_ms: Option<f64>) -> MembershipChange {
    MembershipChange {
        generation: Generation(generation),
        cause,
        world_size: 2,
        at_step: 40,
        gap_ms,
        detect_ms: gap_ms.map(|_| 0.5),
        abort_ms: gap_ms.map(|_| 0.25),
        agree_ms: gap_ms.map(|_| 1.0),
        ..MembershipChange::default()
    }
}

fn summary() -> Summary {
    Summary {
        job: "mnist".into(),
        run_id: String::new(),
        state: "completed".into(),
        steps: 100,
        epochs: 2,
        wall_s: 1.5,
        records: RecordsSummary { expected: 20, counted: 20, ..RecordsSummary::default() },
        workers: WorkersSummary { peak: 2, last: 2, table_servers: 0, restarts: 1, spares: None },
        memberships: vec![change(1, Cause::Start, None), change(2, Cause::Lost, Some(8.25))],
        loss: LossSummary { first: Some(2.0), last: Some(0.5) },
        training_metrics: [("accuracy".into(), 0.75)].into(),
        throughput: ThroughputSummary {
            records_per_s: 250.0,
            steps_per_s: 66.6,
            all_reduce_ms: 2.25,
            storage_wait_s: 0.0,
        },
        allreduce_transport: None,
        evaluations: Some(EvaluationsSummary {
            all: vec![Evaluated {
                step: 90,
                records: 5,
                metrics: [("loss".into(), Some(0.75))].into(),
            }],
            best: Some(BestEvaluation {
                step: 40,
                metric: "loss".into(),
                value: 0.5,
                export: Some("/best.safetensors".into()),
            }),
            stopped_early: true,
            export_error: None,
            kept: Some(Kept { address: "/best.previous".into(), value: Some(0.25) }),
        }),
        checkpoints: Some(CheckpointsSummary {
            dir: Some("/c".into()),
            newest: Some(SavedCheckpoint { step: 100, name: "step-100".into(), bytes: 4 }),
            saved: 3,
            failed: 1,
            restored: vec![RestoredCheckpoint { step: 40, name: "step-40".into(), lost_steps: 2 }],
            ..CheckpointsSummary::default()
        }),
        failed_shards: vec![FailedShard {
            worker: WorkerId(3),
            epoch: 0,
            file: "a.csv".into(),
            start: 5,
            end: 7,
            error: "bad\nlabel".into(),
        }],
        records_skipped: None,
        steps_skipped: 0,
        audit: Some(AuditSummary { steps: 9, disagreements: 1, workers_replaced: 2 }),
        row_touches: None,
        rows_lost: None,
        state_lost: None,
        error: None,
        stop_reason: None,
        model_summary: Some("accuracy 0.9\nfine".into()),
        metrics: Some([("accuracy".into(), Some(0.875)), ("norm".into(), None)].into()),
        output: Some("/out".into()),
        export: Some("/m.safetensors".into()),
        tracking_error: None,
        digest: Some("00ff00ff00ff00ff".into()),
    }
}

#[test]
fn the_table_shows_the_whole_summary() {
    let paths =
        Paths { logs: Some(Path::new("/j/logs")), summary: Some(Path::new("/j/summary.json")) };
    let expected = "\
job mnist: completed after 1.50 s
  steps         100 (2 epochs complete)
  records       20 expected, 20 counted, 0 missing, 0 repeated
  audits        9 steps computed twice, 1 disagreement, 2 workers replaced
  loss          2.0000 -> 0.5000
                accuracy 0.7500
  throughput    250 records/s, 66.6 steps/s, all-reduce 2.2 ms
  workers       peak 2, final 2, 1 restart
  digest        00ff00ff00ff00ff
  evaluations   step 90: loss 0.7500; best at step 40: loss 0.5000; stopped early
  best model    /best.safetensors
  earlier one   /best.previous (0.2500)
  checkpoints   3 written, newest from step 100, 1 failed, resumed from step 40 (2 steps lost)
  memberships   generation  cause  workers     at step     gap ms
                         1  start        2          40          -
                         2  lost         2          40        8.2  \
(detect 0.5, abort 0.2, agree 1.0)
  failed shard  a.csv records 5..7 (epoch 0) on worker 3: bad label
  model
    accuracy 0.9
    fine
  metrics
    accuracy 0.875
    norm not finite
  predictions   /out
  exported to   /m.safetensors
  logs          /j/logs
  summary       /j/summary.json
";
    assert_eq!(to_table(&summary(), paths), expected);
}

#[test]
fn a_lost_state_comes_first_and_is_a_warning() {
    let lost = Summary {
        state_lost: Some(StateLoss { count: 2, at_step: 70, steps: 90, records: 900 }),
        steps_skipped: 3,
        row_touches: None,
        checkpoints: Some(CheckpointsSummary {
            dir: Some("/c".into()),
            error: Some("disk\nfull".into()),
            ..Default::default()
        }),
        ..summary()
    };
    let out = to_table(&lost, Paths::default());
    let first = "STATE LOST (2 times; the last time) at step 70: all workers were lost, and \
            there was no checkpoint; 90 steps of 900 records in all";
    assert_eq!(out.lines().next(), Some(first));
    assert!(out.contains("\n  skipped       3 steps with"), "{out}");
    assert_eq!(warnings(&lost, true), warnings(&lost, false)[1..]);
    let warnings = warnings(&lost, false);
    assert_eq!((warnings.len(), warnings[0].as_str()), (3, first));
    assert!(warnings[1].contains("disk full; there is none"), "{warnings:?}");
    let stopped = Summary { state: "stopped".into(), ..lost.clone() };
    let text = &super::warnings(&stopped, false)[1];
    assert!(text.ends_with("there is none; the state of steps 1 to 100 is lost"), "{text}");
    assert_eq!(super::warnings(&summary(), false), [""; 0]);
    let killed = Summary { state: "stopped".into(), steps: 103, ..summary() };
    let text = &super::warnings(&killed, true)[0];
    let newest = "the newest one is from step 100: /c/step-100";
    assert_eq!(*text, format!("steps 101 to 103 are in no checkpoint; {newest}"));
    assert!(to_table(&killed, Paths::default()).contains("steps 101 to 103 are in none"));
    let rows = RowsLoss { count: 1, at_step: 80, row_touches: 12, missing: None };
    let lost = Summary { rows_lost: Some(rows), state_lost: None, ..lost };
    let first = "ROWS LOST at step 80: all copies of rows were lost with their workers, and 12 \
            touches of rows that no checkpoint has";
    assert_eq!(to_table(&lost, Paths::default()).lines().next(), Some(first));
    assert_eq!(super::warnings(&lost, false)[0], first);
    // No touches of rows are lost with a part of the optimizer's state.
    let parts = Summary { rows_lost: Some(RowsLoss { row_touches: 0, ..rows }), ..lost.clone() };
    let first = &super::warnings(&parts, false)[0];
    assert!(first.starts_with("PARTS LOST at step 80: all copies of parts"), "{first}");
    let rows = RowsLoss { row_touches: 0, missing: Some(7), ..rows };
    let lost = Summary { rows_lost: Some(rows), ..lost };
    let first = "ROWS LOST at step 80: all copies of rows were lost with their workers; \
            training went on with older ones, in which 7 touches of rows are missing";
    assert_eq!(to_table(&lost, Paths::default()).lines().next(), Some(first));
}

#[test]
fn waits_for_storage_are_shown_if_there_were_any() {
    let throughput = ThroughputSummary { storage_wait_s: 61.25, ..summary().throughput };
    let out = to_table(&Summary { throughput, ..summary() }, Paths::default());
    assert!(out.contains("\n  storage       workers waited for it for 61.2 s in total\n"), "{out}");
}

#[test]
fn each_error_has_a_line_with_the_first_of_its_shards() {
    let shard = |start: u64, error: &str| FailedShard {
        start,
        end: start + 1,
        error: error.into(),
        ..summary().failed_shards[0].clone()
    };
    let of_a_step = (0..9).map(|start| shard(start, "bad label"));
    let others = (1..6).map(|number| shard(9, &format!("error {number}")));
    let failed_shards = of_a_step.chain(others).collect();
    let out = to_table(&Summary { failed_shards, ..summary() }, Paths::default());
    let lines: Vec<&str> = out.lines().filter(|line| line.contains("failed shard")).collect();
    let first = "  failed shard  a.csv records 0..1, 1..2, 2..3, 3..4 and 5 more (epoch 0) on \
                     worker 3: bad label";
    assert_eq!((lines[0], lines.len()), (first, 4), "{out}");
    assert!(out.contains("(2 more are in failed_shards of the summary)"), "{out}");
}

#[test]
fn a_job_that_was_refused_has_no_counts() {
    let paths = Paths { logs: Some(Path::new("/j/logs")), summary: None };
    let out = to_table(&Summary { state: "refused".into(), ..summary() }, paths);
    assert_eq!(out, "job mnist: refused after 1.50 s\n  logs          /j/logs\n");
}

#[test]
fn skipped_records_are_listed() {
    let first = vec!["a.csv line 3: column \"y\" is \"\x1b\"".into()];
    let skipped = SkippedRecords { bad: 7, nulls: 2, first, ..SkippedRecords::default() };
    let out = to_table(&Summary { records_skipped: Some(skipped), ..summary() }, Paths::default());
    assert!(out.contains("\n  skipped       7 bad, 2 with nulls\n    a.csv line 3: "), "{out}");
    assert!(!out.contains('\x1b'), "{out}");
}

#[test]
fn the_newest_of_many_memberships_are_shown() {
    let mut out = String::new();
    let many: Vec<_> = (1..=25).map(|generation| change(generation, Cause::Join, None)).collect();
    write_memberships(&mut out, &many);
    assert_eq!(out.lines().count(), 22);
    assert!(out.contains("(5 earlier ones are in the summary)"), "{out}");
    assert!(out.lines().last().unwrap().trim().starts_with("25  join"), "{out}");
}
