//! `--shard-optimizer`: the optimizer's state is on two workers each, and the bits are those of a
//! job whose workers hold all of it, under faults too.

use std::path::Path;
use std::sync::OnceLock;

use elasticdl_tests::{
    Command, DeterminismCase, Ended, JobFixture, Programs, each_once, exported_counts, send,
};
use rustix::process::Signal;

use crate::PROGRAMS;

/// The model whose jobs end with the same parameters.
const DETERMINISTIC: Programs = Programs {
    elasticdl: env!("CARGO_BIN_EXE_determinism"),
    counting: env!("CARGO_BIN_EXE_determinism"),
};

fn digest(ended: &Ended) -> String {
    ended.summary().digest.clone().expect("a completed job has a digest")
}

/// Asserts that the cases have the bits of one worker that holds all of the state.
fn assert_same_bits(cases: &[DeterminismCase]) {
    static DIGEST: OnceLock<String> = OnceLock::new();
    let expected =
        DIGEST.get_or_init(|| digest(&DeterminismCase::UNDISTURBED[0].run(DETERMINISTIC, true)));
    for case in cases {
        let ended = case.run_sharded(DETERMINISTIC);
        assert_eq!(digest(&ended), *expected, "{}: {}", case.name, ended.output);
        // Workers that differ are replaced, and the others may come to the bits.
        let lost = (ended.summary().rows_lost, ended.summary().state_lost);
        assert_eq!(lost, (None, None), "{}: {}", case.name, ended.output);
    }
}

#[test]
fn any_number_of_workers_trains_the_bits_of_one_that_holds_all_of_the_state() {
    assert_same_bits(&DeterminismCase::UNDISTURBED[..4]);
}

#[test]
fn so_do_workers_that_are_killed_join_and_leave() {
    assert_same_bits(&DeterminismCase::DISTURBED[..3]);
}

#[test]
fn so_do_evicted_workers_another_master_and_a_resumed_job() {
    assert_same_bits(&DeterminismCase::DISTURBED[3..6]);
}

#[test]
#[ignore = "needs root and iproute2"]
fn so_do_workers_on_several_hosts() {
    assert_same_bits(DeterminismCase::TRANSPORTS);
    assert_same_bits_of_half(&DeterminismCase::TRANSPORTS[..1]);
}

/// Asserts that the cases with parameters in bf16 have the bits of one such worker.
fn assert_same_bits_of_half(cases: &[DeterminismCase]) {
    static DIGEST: OnceLock<String> = OnceLock::new();
    let of = |case: &DeterminismCase| digest(&case.run_half(DETERMINISTIC));
    let expected = DIGEST.get_or_init(|| of(&DeterminismCase::UNDISTURBED[0]));
    assert!(cases.iter().all(|case| of(case) == *expected), "{cases:?}");
}

#[test]
fn parameters_in_bf16_have_the_same_bits_with_any_number_of_workers() {
    assert_same_bits_of_half(&DeterminismCase::UNDISTURBED[1..4]);
}

#[test]
fn so_do_those_of_workers_that_are_killed_join_and_leave_and_of_a_resumed_job() {
    assert_same_bits_of_half(&DeterminismCase::DISTURBED[..3]);
    assert_same_bits_of_half(&DeterminismCase::DISTURBED[5..6]);
    // In the first step too.
    assert_same_bits_of_half(&DeterminismCase::DISTURBED[8..]);
}

/// A job of this many workers that counts in the optimizer's state, of three chunks.
fn fixture(workers: u32) -> JobFixture {
    let fixture = JobFixture::new(PROGRAMS, workers);
    JobFixture { program_options: &["--slots"], parameters: 12_000, ..fixture }
}

/// The same on GPUs, or not.
fn fixture_on(is_gpu: bool, workers: u32) -> JobFixture {
    JobFixture { gpu: is_gpu.then(elasticdl_stand_ins::folder), ..fixture(workers) }
}

/// A job that learns from sums that are exact.
fn learning_on(is_gpu: bool, workers: u32) -> JobFixture {
    JobFixture { program_options: &["--learn"], ..fixture_on(is_gpu, workers) }
}

/// Asserts that a job has the bits of a worker that holds all of the state, on a CPU.
fn assert_learned_on_cpu(ended: &Ended) {
    static DIGEST: OnceLock<String> = OnceLock::new();
    let expected = DIGEST.get_or_init(|| {
        let on_cpu = JobFixture { micros_per_record: 0, ..learning_on(false, 1) };
        digest(&on_cpu.command(1).run())
    });
    ended.assert_outcome(0, "completed");
    assert_eq!(digest(ended), *expected, "{}", ended.output);
    let summary = ended.summary();
    assert_eq!((summary.rows_lost, summary.state_lost), (None, None), "{}", ended.output);
}

#[test]
fn workers_on_gpus_train_the_bits_of_a_worker_on_a_cpu_with_and_without_the_option() {
    for (workers, shards) in [(2, false), (1, true), (2, true), (3, true)] {
        let fixture = JobFixture { micros_per_record: 0, ..learning_on(true, workers) };
        let command = fixture.command(1);
        let ended = if shards { command.flag("shard-optimizer") } else { command }.run();
        assert_learned_on_cpu(&ended);
        let transport = ended.summary().allreduce_transport.clone().unwrap_or_default();
        let says = transport.contains("where --shard-optimizer has the optimizer's state");
        assert_eq!(says, shards && workers > 1, "{transport}");
    }
}

#[test]
fn so_do_workers_on_gpus_that_are_killed_join_and_leave() {
    let fixture = learning_on(true, 3).lasting();
    let command = fixture.command(1).flag("shard-optimizer");
    let mut job = command.start().keeping(fixture.folder);
    job.wait_for_work_of(3);
    for _ in 0..2 {
        let (worker, pid) = job.members()[0];
        send(pid, Signal::KILL);
        job.wait_for_members_without(3, &[worker]);
        job.wait_for_next_step();
    }
    for workers in [5, 2] {
        job.scale(workers);
        job.wait_for_work_of(workers as usize);
        job.wait_for_next_step();
    }
    job.hurry();
    assert_learned_on_cpu(&job.wait());
}

#[test]
fn so_do_jobs_that_go_on_from_checkpoints_of_either_mode_on_either_device() {
    let with = |command: Command, shards| match shards {
        true => command.flag("shard-optimizer"),
        false => command,
    };
    for (is_gpu, shards) in [(true, true), (false, false)] {
        let first = learning_on(is_gpu, 3).lasting();
        let dir = first.folder.path().join("checkpoints");
        let command = with(first.command(1), shards).option("checkpoint-dir", &dir);
        let mut job = command.option("checkpoint-every", "15").start();
        if shards {
            // The group goes back to one that it has written, if it has lost both copies.
            let step = job.wait_for_checkpoints(1).step;
            job.workers().into_values().take(2).for_each(|pid| send(pid, Signal::KILL));
            job.wait_for("steps after the loss", |status| status.step > step + 20);
        }
        job.wait_for_checkpoints(1);
        job.signal(Signal::TERM);
        job.wait().assert_outcome(143, "stopped");
        for (workers, is_gpu, shards) in [(2, true, true), (1, false, true), (2, true, false)] {
            let next = JobFixture { micros_per_record: 0, ..learning_on(is_gpu, workers) };
            let command = with(next.command(1), shards).option("resume-from", &dir);
            assert_learned_on_cpu(&command.run());
        }
    }
}

fn command(fixture: &JobFixture, dir: &Path) -> Command {
    let command = fixture.command(1).option("checkpoint-dir", dir);
    command.option("checkpoint-every", "15").flag("shard-optimizer")
}

#[test]
fn a_group_that_has_lost_both_copies_goes_back_to_the_newest_checkpoint() {
    let fixture = fixture(3);
    let dir = fixture.folder.path().join("checkpoints");
    let mut job = command(&fixture, &dir).start();
    job.wait_for_checkpoints(1);
    // All chunks are on one worker, or two: of three workers, each pair holds both copies of some.
    job.workers().into_values().take(2).for_each(|pid| send(pid, Signal::KILL));
    let ended = job.wait();
    ended.assert_exact("after the loss of both copies");
    let restored = &ended.summary().checkpoints.as_ref().unwrap().restored;
    let lost = ended.summary().rows_lost;
    assert_eq!(restored.len() as u64, lost.map_or(0, |lost| lost.count), "{}", ended.output);
    assert!(ended.summary().state_lost.is_none(), "{}", ended.output);
    if lost.is_some() {
        for said in ["PARTS LOST at step", "parts of the optimizer's state are lost"] {
            assert!(ended.output.contains(said), "{}", ended.output);
        }
    }
}

#[test]
fn a_job_goes_on_from_the_checkpoints_of_either_mode_with_another_number_of_workers() {
    for shards in [true, false] {
        let first = JobFixture { micros_per_record: 1000, ..fixture(3) };
        let dir = first.folder.path().join("checkpoints");
        let of_first = first.command(1).option("checkpoint-dir", &dir);
        let of_first = of_first.option("checkpoint-every", "15");
        let of_first = if shards { of_first.flag("shard-optimizer") } else { of_first };
        let mut job = of_first.start();
        job.wait_for_checkpoints(1);
        job.signal(Signal::TERM);
        job.wait().assert_outcome(143, "stopped");
        for (workers, shards_next) in [(1, true), (5, true), (2, false)] {
            let next = JobFixture { micros_per_record: 20, ..fixture(workers) };
            let next_command = next.command(1).option("resume-from", &dir);
            let next_command = match shards_next {
                true => next_command.flag("shard-optimizer"),
                false => next_command,
            };
            let context = format!("{shards}, then {shards_next} with {workers} workers");
            next_command.run().assert_exact(&context);
        }
    }
}

#[test]
fn a_step_that_is_not_finite_is_skipped_by_workers_without_its_chunk_too() {
    let program_options = &["--slots", "--nan-at", "100"];
    for is_gpu in [false, true] {
        let fixture = JobFixture { program_options, micros_per_record: 0, ..fixture_on(is_gpu, 3) };
        let export = fixture.path("model.safetensors");
        let command = fixture.command(1).option("checkpoint-dir", "none").option("export", &export);
        let ended = command.flag("shard-optimizer").option("on-nonfinite", "skip").run();
        ended.assert_outcome(0, "completed");
        let total = fixture.records * fixture.epochs;
        let summary = ended.summary();
        assert_eq!((summary.steps_skipped, summary.records), (fixture.epochs, each_once(total)));
        let counted: f32 = exported_counts(&export).iter().sum();
        assert_eq!(counted as u64, total - fixture.epochs * fixture.global_batch_size);
    }
}

#[test]
fn a_model_whose_state_can_not_be_divided_is_refused_with_the_reason() {
    let refused = |program_options, reason: &str| {
        let fixture = JobFixture { program_options, ..fixture(2) };
        let ended = fixture.command(1).flag("shard-optimizer").run();
        let output = &ended.output;
        ended.assert_outcome(2, "refused");
        assert!(output.contains("--shard-optimizer can't be"), "{output}");
        assert!(output.contains(reason), "{output}");
    };
    refused(&[], "does not say that it is element-wise");
    refused(&["--slots", "--tables"], "the model has tables");
}

#[test]
fn a_model_that_can_not_compute_with_bf16_is_refused_with_the_reason() {
    let fixture = JobFixture { program_options: &["--slots"], ..fixture(2) };
    let ended = fixture.command(1).flag("shard-optimizer").option("param-dtype", "bf16").run();
    let reason = "--param-dtype bf16 can't be used for this job: only candle models";
    ended.assert_outcome(2, "refused");
    assert!(ended.output.contains(reason), "{}", ended.output);
}
