//! A store that is unavailable for 6 s and 20 s costs no worker and no record with default options,
//! nor do credentials that expire; a stop during an outage gives up the checkpoint and keeps the
//! model; a line appended to a table ends the job.
//!
//! All with the options that jobs have by default.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use elasticdl_proto::Status;
use elasticdl_tests::{Command, Ended, FaultRates, S3, counting_data, exported_counts, send};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::PROGRAMS;

const RECORDS: u64 = 6000;

/// A store with the data in many objects, so that workers always have some to read, and a job of
/// three workers on it.
fn job(folder: &TempDir, server: &S3) -> Command {
    job_on("s3://bucket/data", folder, server)
}

/// The data in a store and in `folder`, and a job of three workers on `training_data`.
fn job_on(training_data: impl Into<OsString>, folder: &TempDir, server: &S3) -> Command {
    job_of(&[], training_data, folder, server)
}

/// As [`job_on`], with these options of the program.
fn job_of(
    options: &[&str],
    training_data: impl Into<OsString>,
    folder: &TempDir,
    server: &S3,
) -> Command {
    let data = folder.path().join("data");
    counting_data(&data, RECORDS, 300).unwrap();
    for entry in std::fs::read_dir(&data).unwrap().map(Result::unwrap) {
        let name = entry.file_name().into_string().unwrap();
        server.put(&format!("bucket/data/{name}"), std::fs::read(entry.path()).unwrap());
    }
    let program = [PROGRAMS.counting, "--records", "6000", "--micros-per-record", "2500"];
    let program = [&program, options].concat();
    Command::new(PROGRAMS.elasticdl, folder.path().join("job"), program)
        .option("training-data", training_data)
        .option("num-epochs", "1")
        .option("num-workers", "3")
        .option("global-batch-size", "48")
        .started_by([vec!["env".to_owned()], server.environment()].concat())
}

fn become_unavailable(server: &S3, for_how_long: Duration) {
    server.set_fault_rates(FaultRates { unavailable: true, ..FaultRates::default() });
    std::thread::sleep(for_how_long);
    server.set_fault_rates(FaultRates::default());
}

fn times(ended: &Ended, words: &str) -> usize {
    ended.output.matches(words).count()
}

#[test]
fn a_store_that_is_unavailable_for_six_and_for_twenty_seconds_costs_no_worker_and_no_record() {
    let folder = tempfile::tempdir().unwrap();
    let server = S3::start(FaultRates::default(), 1);
    let job = job(&folder, &server)
        .option("checkpoint-dir", "s3://bucket/outage")
        .option("checkpoint-every", "20");
    let mut job = job.start();
    let working = job.wait_for_work_of(3);
    let (generation, before) = (working.generation, working.step);
    become_unavailable(&server, Duration::from_secs(6));
    job.wait_for("steps after six seconds", |status| {
        let no_longer = |event: &String| event.contains("workers no longer wait for storage");
        status.step > before + 20 && status.events.iter().any(no_longer)
    });
    let before = job.status().step;
    become_unavailable(&server, Duration::from_secs(20));
    let status = job.status();
    assert_eq!(status.members().count(), 3, "{status:?}");
    assert!(status.step >= before, "{status:?}");
    let ended = job.wait();
    ended.assert_exactly_once("20 s", RECORDS, 1);
    ended.assert_undisturbed(generation);
    let summary = ended.summary();
    assert_eq!(summary.checkpoints.as_ref().unwrap().failed, 0, "{summary:?}");
    assert!(summary.throughput.storage_wait_s > 10.0, "{summary:?}");
    // One event for each outage, not one per worker and request.
    assert_eq!(times(&ended, "waits for storage: s3://bucket/"), 2, "{}", ended.output);
    assert_eq!(times(&ended, "workers no longer wait for storage"), 2, "{}", ended.output);
}

#[test]
fn a_stop_gives_up_a_checkpoint_whose_write_hangs_and_exports_the_model() {
    let folder = tempfile::tempdir().unwrap();
    let export = folder.path().join("model.safetensors");
    let server = S3::start(FaultRates::default(), 1);
    let mut job = job_on(folder.path().join("data"), &folder, &server)
        .option("checkpoint-dir", "s3://bucket/wait")
        .option("checkpoint-every", "20")
        .option("export", &export)
        .start();
    job.wait_for_work_of(3);
    server.set_fault_rates(FaultRates { unavailable: true, ..FaultRates::default() });
    job.signal(Signal::INT);
    let ended = job.wait();
    // A model is there, but nothing to resume from.
    ended.assert_outcome(1, "stopped");
    assert!(ended.output.contains("the state of steps 1 to "), "{}", ended.output);
    assert_eq!(times(&ended, "can't write the checkpoint"), 1, "{}", ended.output);
    // The error that the store answers, not that a write has not ended.
    assert!(!ended.output.contains("the storage of checkpoints hangs"), "{}", ended.output);
    let summary = ended.summary();
    let error = summary.checkpoints.as_ref().and_then(|known| known.error.clone());
    assert!(error.is_some_and(|error| error.contains("bucket")), "{summary:?}");
    assert!(summary.state_lost.is_none(), "{summary:?}");
    let counted: f32 = exported_counts(&export).iter().sum();
    assert_eq!(counted, summary.records.counted as f32);
}

#[test]
fn a_store_that_returns_while_a_stopped_job_ends_gets_the_last_checkpoint() {
    for options in [&[][..], &["--tables"], &["--slots"]] {
        let folder = tempfile::tempdir().unwrap();
        let server = S3::start(FaultRates::default(), 1);
        let job = job_of(options, folder.path().join("data"), &folder, &server)
            .option("checkpoint-dir", "s3://bucket/back")
            .option("checkpoint-every", "20");
        let is_sharded = options == ["--slots"];
        let mut job = if is_sharded { job.flag("shard-optimizer") } else { job }.start();
        job.wait_for_work_of(3);
        server.set_fault_rates(FaultRates { unavailable: true, ..FaultRates::default() });
        job.signal(Signal::INT);
        job.wait_for("the end of the wait for the checkpoint", |status| {
            status.events.iter().any(|event| event.contains("unless the write ends soon"))
        });
        server.set_fault_rates(FaultRates::default());
        let ended = job.wait();
        ended.assert_outcome(130, "stopped");
        let summary = ended.summary();
        let newest = summary.checkpoints.as_ref().and_then(|kept| kept.newest.as_ref());
        assert_eq!(newest.map(|newest| newest.step), Some(summary.steps), "{}", ended.output);
    }
}

#[test]
fn users_are_told_of_checkpoints_to_a_silent_store_and_where_the_model_of_an_ended_job_is() {
    let silent = FaultRates { silent: true, ..FaultRates::default() };
    let folder = tempfile::tempdir().unwrap();
    let server = S3::start(FaultRates::default(), 1);
    let is_told = |status: &Status, of: &str| status.events.iter().any(|told| told.contains(of));
    let mut job = job_on(folder.path().join("data"), &folder, &server)
        .option("checkpoint-dir", "s3://bucket/silent")
        .start();
    job.wait_for_work_of(3);
    server.set_fault_rates(silent);
    job.signal(Signal::INT);
    job.wait_for("the wait for the checkpoint", |status| {
        is_told(status, "s3://bucket/silent: the last checkpoint is not written after 5 s")
            && is_told(status, "the stop waits for up to 60 s for storage")
    });
    job.signal(Signal::INT);
    let ended = job.wait();
    assert!(ended.output.contains("in no checkpoint; there is none"), "{}", ended.output);
    // Likewise for an export.
    server.set_fault_rates(FaultRates::default());
    let folder = tempfile::tempdir().unwrap();
    let mut job = job_on(folder.path().join("data"), &folder, &server)
        .option("export", "s3://bucket/model.safetensors")
        .start();
    job.wait_for_work_of(3);
    server.set_fault_rates(silent);
    job.signal(Signal::INT);
    job.wait_for("the wait for the export", |status| is_told(status, "the stop waits for up to"));
    job.signal(Signal::INT);
    let ended = job.wait();
    let kept = folder.path().join("job/model.safetensors");
    let text = format!("a model was not exported to its place: it is in {}", kept.display());
    assert!(ended.output.contains(&text) && kept.is_file(), "{}", ended.output);
    assert!(
        ended.output.contains("is not written by this job: the job has ended"),
        "{}",
        ended.output
    );
}

#[test]
fn a_stop_gives_up_an_export_to_a_store_that_does_not_answer_and_keeps_the_model() {
    let away = FaultRates { unavailable: true, ..FaultRates::default() };
    let silent = FaultRates { silent: true, ..FaultRates::default() };
    for (faults, is_trained) in [(away, false), (away, true), (silent, false)] {
        let folder = tempfile::tempdir().unwrap();
        let server = S3::start(FaultRates::default(), 1);
        let mut job = job_on(folder.path().join("data"), &folder, &server)
            .option("export", "s3://bucket/model.safetensors")
            .option("max-steps", "60")
            .start();
        job.wait_for_work_of(3);
        server.set_fault_rates(faults);
        let kept = folder.path().join("job/model.safetensors");
        if is_trained {
            job.wait_for("the wait for the store", |status| {
                status.events.iter().any(|event| event.contains("waits for storage: s3://bucket"))
            });
            assert!(kept.exists(), "whatever ends the job now, the model is there");
        }
        job.signal(Signal::INT);
        let ended = job.wait();
        let context = format!("{faults:?}, {is_trained}: {}", ended.output);
        ended.assert_outcome(1, "failed");
        let why = ended.summary().error.as_deref().unwrap_or_default();
        assert!(why.ends_with(&format!("; it is in {}", kept.display())), "{context}");
        // No worker is given up for its request.
        assert_eq!(ended.lost(), [], "{context}");
        let counted: f32 = exported_counts(&kept).iter().sum();
        assert_eq!(counted, ended.summary().records.counted as f32, "{context}");
    }
}

#[test]
fn credentials_that_expire_after_the_first_step_cost_no_worker_and_no_record() {
    let folder = tempfile::tempdir().unwrap();
    let server = S3::start(FaultRates::default(), 1);
    let mut job = job(&folder, &server).option("max-worker-restarts", "0").start();
    let generation = job.wait_for_work_of(3).generation;
    server.set_fault_rates(FaultRates { expired: true, ..FaultRates::default() });
    // Longer than the prefetched data lasts.
    std::thread::sleep(Duration::from_secs(8));
    server.set_fault_rates(FaultRates::default());
    let ended = job.wait();
    ended.assert_exactly_once("expired credentials", RECORDS, 1);
    assert!(ended.output.contains("the credentials have expired"), "{}", ended.output);
    ended.assert_undisturbed(generation);
}

#[test]
fn a_group_that_waits_for_storage_from_its_start_on_still_changes() {
    let folder = tempfile::tempdir().unwrap();
    let server = S3::start(FaultRates { unavailable: true, ..FaultRates::default() }, 1);
    let mut job = job(&folder, &server).start();
    std::thread::sleep(Duration::from_secs(2));
    server.set_fault_rates(FaultRates::default());
    job.wait_for_first_steps();
    server.set_fault_rates(FaultRates { unavailable: true, ..FaultRates::default() });
    // Until the prefetched data is used up.
    std::thread::sleep(Duration::from_secs(3));
    let (worker, pid) = job.members()[1];
    send(pid, Signal::KILL);
    let killed = Instant::now();
    job.wait_for_members_without(3, &[worker]);
    assert!(killed.elapsed() < Duration::from_secs(30), "{:?}", killed.elapsed());
    server.set_fault_rates(FaultRates::default());
    let ended = job.wait();
    ended.assert_exactly_once("a kill amid an outage", RECORDS, 1);
    assert_eq!(ended.summary().workers.restarts, 1, "{:?}", ended.summary());
    assert!(ended.summary().throughput.storage_wait_s > 0.0, "{:?}", ended.summary());
}

#[test]
fn workers_that_wait_for_validation_data_are_neither_lost_nor_counted_as_failed() {
    let folder = tempfile::tempdir().unwrap();
    let server = S3::start(FaultRates::default(), 1);
    let mut job = job_on(folder.path().join("data"), &folder, &server)
        .option("validation-data", "s3://bucket/data")
        .option("evaluate-every", "60")
        .option("max-worker-restarts", "0")
        .start();
    let generation = job.wait_for_work_of(3).generation;
    server.set_fault_rates(FaultRates { unavailable: true, ..FaultRates::default() });
    job.wait_for("the first evaluation", |status| status.step == 60);
    std::thread::sleep(Duration::from_secs(20));
    let status = job.status();
    let disconnected = status.workers_disconnected.len();
    assert_eq!((status.step, status.generation, disconnected), (60, generation, 0), "{status:?}");
    assert_eq!(status.members().count(), 3, "{status:?}");
    // A member that is lost meanwhile takes no other one with it.
    let (worker, pid) = job.members()[1];
    send(pid, Signal::KILL);
    std::thread::sleep(Duration::from_secs(5));
    server.set_fault_rates(FaultRates::default());
    job.wait_for_members_without(3, &[worker]);
    let ended = job.wait();
    ended.assert_exactly_once("an outage in an evaluation", RECORDS, 1);
    assert_eq!(ended.summary().workers.restarts, 1, "{:?}", ended.summary());
    assert!(ended.summary().throughput.storage_wait_s > 0.0, "{:?}", ended.summary());
}

#[test]
fn workers_that_wait_for_their_checkpoint_are_neither_lost_nor_counted_as_failed() {
    let folder = tempfile::tempdir().unwrap();
    let server = S3::start(FaultRates::default(), 1);
    let mut job = job_on(folder.path().join("data"), &folder, &server)
        .option("checkpoint-dir", "s3://bucket/stop")
        .option("checkpoint-every", "10")
        .option("max-worker-restarts", "0")
        .start();
    job.wait_for_checkpoints(1);
    let former = job.status().generation;
    server.set_fault_rates(FaultRates { unavailable: true, ..FaultRates::default() });
    job.members().into_iter().for_each(|(_, pid)| send(pid, Signal::KILL));
    let three = |status: &Status| status.generation > former && status.members().count() == 3;
    job.wait_for("the next group", three);
    let generation = job.status().generation;
    std::thread::sleep(Duration::from_secs(20));
    let status = job.status();
    let disconnected = status.workers_disconnected.len();
    assert_eq!((status.generation, disconnected), (generation, 0), "{status:?}");
    server.set_fault_rates(FaultRates::default());
    let ended = job.wait();
    ended.assert_exactly_once("an outage at the start", RECORDS, 1);
    let summary = ended.summary();
    assert_eq!((summary.workers.restarts, summary.state_lost), (3, None), "{summary:?}");
    assert!(ended.summary().throughput.storage_wait_s > 0.0, "{:?}", ended.summary());
}

fn table(rows: usize) -> String {
    let mut text = "x,y,name\n".to_owned();
    for row in 0..rows {
        writeln!(text, "{row},0.5,row {row} and some more").unwrap();
    }
    text
}

#[test]
fn a_table_in_a_store_is_read_with_few_requests() {
    let folder = tempfile::tempdir().unwrap();
    let server = S3::start(FaultRates::default(), 1);
    let bytes = table(60_000).into_bytes();
    let blocks = bytes.len() as u64 / (256 << 10) + 1;
    server.put("bucket/table.csv", bytes);
    let program = [env!("CARGO_BIN_EXE_reading"), "csv"];
    let ended = Command::new(PROGRAMS.elasticdl, folder.path().join("job"), program)
        .option("training-data", "s3://bucket")
        .option("num-workers", "2")
        .option("global-batch-size", "256")
        .started_by([vec!["env".to_owned()], server.environment()].concat())
        .run();
    assert_eq!(ended.code, Some(0), "{}", ended.output);
    let requests = server.requests();
    let of = |method: &str| requests.get(method).copied().unwrap_or(0);
    // The worker that lists the table knows its version.
    assert!(of("HEAD") <= 1, "{requests:?}");
    assert!(of("GET") <= 2 * blocks.div_ceil(4) + 4, "{requests:?} for {blocks} blocks");
}

#[test]
fn one_line_appended_to_a_table_ends_the_job_which_names_it() {
    use std::io::Write as _;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("table.csv");
    std::fs::write(&path, table(40_000)).unwrap();
    let program = [env!("CARGO_BIN_EXE_reading"), "csv", "300"];
    let mut job = Command::new(PROGRAMS.elasticdl, folder.path().join("job"), program)
        .option("training-data", &path)
        .option("num-epochs", "1")
        .option("num-workers", "2")
        .option("global-batch-size", "64")
        .start();
    job.wait_for_first_steps();
    let mut file = std::fs::OpenOptions::new().append(true).open(&path).unwrap();
    file.write_all(b"1,2,appended\n").unwrap();
    let ended = job.wait();
    ended.assert_outcome(1, "failed");
    let summary = ended.summary();
    let (path, error) = (path.to_str().unwrap(), summary.error.as_ref().unwrap());
    assert!(
        error.contains(path) && error.contains("data must not change while a job trains"),
        "{error}"
    );
    assert!(summary.workers.restarts == 0 && summary.steps > 3, "{summary:?}");
}
