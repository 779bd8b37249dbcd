//! Jobs on fake GPU libraries count each record once under kills, change to NCCL and back, and
//! survive an NCCL that is missing, old, failing or hanging.
//!
//! The model's parameters count records, so the final parameters are the proof, whichever device
//! holds them.

use std::ffi::OsString;

use elasticdl_proto::Status;
use elasticdl_tests::{Command, JobFixture, each_once, exported_counts, send};
use rustix::process::Signal;

use crate::PROGRAMS;

fn fixture(num_workers: u32) -> JobFixture {
    JobFixture {
        gpu: Some(elasticdl_stand_ins::folder()),
        ..JobFixture::new(PROGRAMS, num_workers)
    }
}

fn with(name: &'static str, value: impl Into<OsString>, fixture: JobFixture) -> JobFixture {
    JobFixture { variables: vec![(name, value.into())], ..fixture }
}

/// Prefix of a command that finds the fake libraries.
fn with_libraries() -> [String; 2] {
    let folder = elasticdl_stand_ins::folder();
    ["env".to_owned(), format!("LD_LIBRARY_PATH={}", folder.display())]
}

/// The transports of all-reduce that the summary of an undisturbed job reports.
fn allreduce_transport(fixture: &JobFixture) -> String {
    let ended = fixture.command(0).run();
    ended.assert_exact("undisturbed");
    ended.summary().allreduce_transport.clone().unwrap_or_default()
}

#[test]
fn records_are_counted_exactly_once_on_gpus_under_kills_and_joins() {
    for seed in 0..3 {
        fixture(3).survives_kills(seed, 500..1500);
    }
}

#[test]
fn records_are_counted_exactly_once_in_buckets_that_nccl_sums_early() {
    for (seed, wire_dtype) in [(0, "f32"), (1, "bf16")] {
        let fixture = JobFixture { bucket: Some(1000), micros_per_record: 1500, ..fixture(3) };
        let mut job = fixture.command(seed).option("wire-dtype", wire_dtype).start();
        for _ in 0..2 {
            job.wait_for("NCCL", is_on_nccl);
            let generation = job.status().generation;
            let (_, pid) = job.workers().into_iter().next().unwrap();
            send(pid, Signal::KILL);
            job.wait_for("a group without it", |status| status.generation > generation);
        }
        job.wait_for("NCCL", is_on_nccl);
        job.wait().assert_exact(wire_dtype);
    }
}

fn is_on_nccl(status: &Status) -> bool {
    status.allreduce_transport.as_ref().is_some_and(|what| what.starts_with("NCCL 2.28"))
}

#[test]
fn without_nccl_or_on_a_shared_gpu_a_group_stays_on_the_host_ring_and_reports_why() {
    let what = allreduce_transport(&with("ELASTICDL_NCCL", "off", fixture(2)));
    assert!(
        what.contains("by way of the hosts' memory") && what.contains("ELASTICDL_NCCL is off"),
        "{what}"
    );
    let what = allreduce_transport(&with("ELASTICDL_NCCL", "/nowhere/libnccl.so", fixture(2)));
    assert!(what.contains("/nowhere/libnccl.so can't be loaded"), "{what}");
    let what = allreduce_transport(&with(
        "ELASTICDL_NCCL",
        elasticdl_stand_ins::nccl_with("old"),
        fixture(2),
    ));
    assert!(what.contains("too old"), "{what}");
    let what = allreduce_transport(&with("STAND_IN_DEVICES", "1", fixture(2)));
    assert!(what.contains("ranks 0 and 1 share a GPU"), "{what}");
}

#[test]
fn when_nccl_fails_repeatedly_the_job_continues_without_it() {
    let what = allreduce_transport(&with(
        "ELASTICDL_NCCL",
        elasticdl_stand_ins::nccl_with("init_fails"),
        fixture(2),
    ));
    assert!(what.contains("NCCL failed"), "{what}");
    let what = allreduce_transport(&with(
        "ELASTICDL_NCCL",
        elasticdl_stand_ins::nccl_with("init_hangs"),
        fixture(2),
    ));
    assert!(what.contains("NCCL is being built"), "{what}");
    for fault in ["op_fails", "async_error"] {
        let what = allreduce_transport(&with(
            "ELASTICDL_NCCL",
            elasticdl_stand_ins::nccl_with(fault),
            fixture(2),
        ));
        assert!(what.contains("NCCL is off, it failed in 3 generations"), "{fault}: {what}");
    }
}

#[test]
fn a_worker_without_a_gpu_is_refused_by_a_group_on_gpus() {
    let fixture = fixture(2);
    let program = format!(
        "[ $ELASTICDL_INDEX = 1 ] || gpu=--gpu; \
         exec {} --records 6000 --micros-per-record 400 $gpu",
        PROGRAMS.counting
    );
    let ended = Command::new(PROGRAMS.elasticdl, fixture.path("job"), ["/bin/sh", "-c", &program])
        .option("training-data", fixture.data())
        .option("num-workers", "2")
        .option("max-worker-restarts", "0")
        .started_by(with_libraries())
        .run();
    let error = ended.summary().error.as_ref().unwrap();
    assert!(
        error.contains("all must compute on the same kind of device"),
        "{error}\n{}",
        ended.output
    );
}

#[test]
fn a_state_on_gpus_is_evaluated_checkpointed_restored_and_exported() {
    let fixture = fixture(3);
    let model = fixture.path("model.safetensors");
    let mut job = fixture
        .command(5)
        .option("validation-data", fixture.data())
        .option("evaluate-every", "50")
        .option("checkpoint-dir", fixture.path("checkpoints"))
        .option("checkpoint-every", "20")
        .option("export", &model)
        .start();
    job.wait_for_checkpoints(2);
    job.signal_workers(Signal::KILL);
    let ended = job.wait();
    ended.assert_exact("after the loss of all");
    let checkpoints = ended.summary().checkpoints.as_ref().unwrap();
    assert!(!checkpoints.restored.is_empty() && checkpoints.damaged == 0, "{checkpoints:?}");
    let evaluations = &ended.summary().evaluations.as_ref().unwrap().all;
    let at_50 = evaluations.iter().find(|one| one.step == 50).unwrap();
    // 50 steps of 48 of 6000 records.
    assert_eq!(at_50.metrics["seen"], Some(0.4), "{at_50:?}");
    assert_eq!(exported_counts(&model), [2.0; 6000]);
}

#[test]
fn a_model_with_kernels_of_its_own_learns_on_two_gpus() {
    let folder = tempfile::tempdir().unwrap();
    let data = |part| format!("{}/../examples/data/digits/{part}", env!("CARGO_MANIFEST_DIR"));
    let program = [env!("CARGO_BIN_EXE_gpu_mlp-under-test")];
    let ended = Command::new(PROGRAMS.elasticdl, folder.path().join("job"), program)
        .option("training-data", data("train"))
        .option("validation-data", data("test"))
        .option("num-epochs", "6")
        .option("num-workers", "2")
        .option("global-batch-size", "50")
        .started_by(with_libraries())
        .run();
    ended.assert_outcome(0, "completed");
    let summary = ended.summary();
    assert_eq!(summary.records, each_once(6 * 1500), "{}", ended.output);
    let (first, last) = (summary.loss.first.unwrap(), summary.loss.last.unwrap());
    assert!(last < first / 3.0, "the loss was {first}, and is {last}");
    let evaluations = &summary.evaluations.as_ref().unwrap().all;
    let accuracy = evaluations.last().unwrap().metrics["accuracy"].unwrap();
    assert!(accuracy > 0.85, "{evaluations:?}");
}

#[test]
fn a_model_that_needs_a_gpu_says_so_where_there_is_none() {
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_gpu_mlp-under-test"))
        .env("LD_LIBRARY_PATH", elasticdl_stand_ins::folder())
        .env("STAND_IN_DEVICES", "0")
        .output()
        .unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.starts_with("gpu_mlp trains on a GPU: there is no GPU 0"), "{error}");
}
