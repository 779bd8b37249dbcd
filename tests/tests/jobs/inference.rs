//! `evaluate` gives the same bits for 1, 3 and 7 workers and under kills; `predict` gives one row
//! per record, in order, under kills, with a killed master, and to a bucket whose server fails.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use elasticdl::Reader;
use elasticdl::readers::{CsvRows, ParquetRows, Row};
use elasticdl_tests::{
    Command, Ended, FaultRates, Running, S3, counting_data, each_once, read_summary, send,
};
use rustix::process::Signal;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;
use tempfile::TempDir;

use crate::PROGRAMS;

const RECORDS: u64 = 5000;
const FILES: u64 = 3;
const SHARD: u64 = 70;
const BATCH: u64 = 16;

pub(crate) struct InferenceFixture {
    folder: TempDir,
}

impl InferenceFixture {
    /// Data, and a model with a different value for each record.
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        counting_data(&folder.path().join("data"), RECORDS, FILES).unwrap();
        let bytes: Vec<u8> = (0..RECORDS).flat_map(|i| value(i).to_le_bytes()).collect();
        let tensor = TensorView::new(Dtype::F32, vec![RECORDS as usize], &bytes).unwrap();
        let file = BTreeMap::from([("parameters", tensor)]);
        safetensors::serialize_to_file(file, None, &folder.path().join("model")).unwrap();
        Self { folder }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, verb: &'static str, program_options: &[&str]) -> Command {
        let records = RECORDS.to_string();
        let program = [PROGRAMS.counting, "--records", &records].map(PathBuf::from);
        let program = program.into_iter().chain(program_options.iter().map(PathBuf::from));
        Command::new(PROGRAMS.elasticdl, self.path("job"), program)
            .verb(verb)
            .option("model", self.path("model"))
            .option("data", self.path("data"))
            .option("records-per-shard", SHARD.to_string())
            .option("minibatch-size", BATCH.to_string())
            .option("worker-timeout", "5s")
    }

    pub(crate) fn evaluate(&self, workers: u32) -> Command {
        self.command("evaluate", &["--inference-micros", "300"])
            .option("num-workers", workers.to_string())
    }

    fn predict(&self, format: &str) -> Command {
        self.command("predict", &["--inference-micros", "300"])
            .option("num-workers", "3")
            .option("predictions", self.path("out"))
            .option("format", format)
    }

    /// The prediction files, ordered by name.
    fn files(&self) -> Vec<PathBuf> {
        let mut files: Vec<_> = std::fs::read_dir(self.path("out"))
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        files.sort();
        // No temporary file of a worker that was killed while it wrote.
        assert!(
            files.iter().all(|path| path
                .file_name()
                .unwrap()
                .to_str()
                .unwrap()
                .starts_with("part-")),
            "{files:?}"
        );
        files
    }
}

fn value(record: u64) -> f32 {
    (record as f32).sqrt() + 0.1
}

/// The mean of `harmonic`, summed as the README specifies: batch by batch within a shard, then
/// shard by shard.
fn expected_mean() -> f64 {
    let mut all = None;
    for file in 0..FILES {
        let end = RECORDS * (file + 1) / FILES;
        let mut start = RECORDS * file / FILES;
        while start < end {
            let shard_end = end.min(start + SHARD);
            let mut shard = None;
            while start < shard_end {
                let batch = start..shard_end.min(start + BATCH);
                start = batch.end;
                let of = |record: u64| f64::from(value(record)) / (record as f64 + 3.0);
                let sum = batch.map(of).fold(0.0, |sum, one| sum + one);
                shard = Some(shard.map_or(sum, |shard| shard + sum));
            }
            let shard = shard.unwrap();
            all = Some(all.map_or(shard, |all: f64| all + shard));
        }
    }
    all.unwrap() / RECORDS as f64
}

/// Kills a worker after every few shards, each time another one, until the job has ended.
fn under_kills(mut job: Running) -> Ended {
    let mut killed = 0;
    while job.is_running() {
        let Some(status) = job.try_status() else { continue };
        let done = status.shards.map_or(0, |shards| shards.done);
        let workers = status.workers;
        if done > killed * 6 && workers.len() > 1 {
            send(workers[killed as usize % workers.len()].pid, Signal::KILL);
            killed += 1;
        }
    }
    assert!(killed > 3, "only {killed} were killed");
    job.wait()
}

fn check_evaluated(ended: &Ended, what: &str) {
    assert_eq!(ended.code, Some(0), "{what}: {}", ended.output);
    let metrics = ended.summary().metrics.as_ref().unwrap();
    let mean = metrics["harmonic"].unwrap();
    assert_eq!(
        mean.to_bits(),
        expected_mean().to_bits(),
        "{what}: {mean} is not {}",
        expected_mean()
    );
    assert_eq!(metrics["loss"], Some(1.0), "{what}");
    assert_eq!(ended.summary().records, each_once(RECORDS));
}

fn check_rows(rows: impl Iterator<Item = (i64, f32, String)>) {
    let expected = |i: u64| (i as i64, value(i), format!("record {i}"));
    let mut count = 0;
    for (i, row) in (0..).zip(rows) {
        assert_eq!(row, expected(i));
        count += 1;
    }
    assert_eq!(count, RECORDS);
}

fn rows<R: Reader<Record = Row>>(
    files: &[PathBuf],
    reader: impl Fn() -> R,
) -> Vec<(i64, f32, String)> {
    let mut rows = Vec::new();
    for path in files {
        let mut reader = reader();
        for file in reader.describe(path.to_str().unwrap()).unwrap().files {
            rows.extend(reader.read(&file, 0..file.records).unwrap());
        }
    }
    rows.iter().map(|row| (row.i64(0), row.f32(1), row.text(2).to_owned())).collect()
}

#[test]
fn metrics_are_the_same_to_the_bit_for_any_number_of_workers_and_under_kills() {
    let fixture = InferenceFixture::new();
    for workers in [1, 3, 7] {
        check_evaluated(&fixture.evaluate(workers).run(), &format!("{workers} workers"));
    }
    let ended = under_kills(fixture.evaluate(3).start());
    check_evaluated(&ended, "under kills");
    assert!(ended.summary().workers.restarts > 3, "{:?}", ended.summary());
}

#[test]
fn a_quiet_evaluation_prints_its_metrics_and_nothing_else() {
    let ended = InferenceFixture::new().evaluate(2).flag("quiet").run();
    assert_eq!(ended.code, Some(0), "{}", ended.output);
    assert_eq!(ended.output, format!("harmonic {}\nloss 1\nseen 1\n", expected_mean()));
}

#[test]
fn each_record_has_one_row_in_order_under_kills() {
    let fixture = InferenceFixture::new();
    let ended = under_kills(fixture.predict("parquet").start());
    assert_eq!(ended.code, Some(0), "{}", ended.output);
    assert_eq!(ended.summary().records, each_once(RECORDS));
    assert_eq!(ended.summary().output.as_deref(), fixture.path("out").to_str());
    let reader = || ParquetRows::new().i64("record").f32("value").text("name");
    check_rows(rows(&fixture.files(), reader).into_iter());
}

#[test]
fn rows_are_written_as_comma_separated_values_and_as_lines_of_json() {
    let fixture = InferenceFixture::new();
    assert_eq!(fixture.predict("csv").run().code, Some(0));
    let reader = || CsvRows::new().i64("record").f32("value").text("name");
    check_rows(rows(&fixture.files(), reader).into_iter());
    std::fs::remove_dir_all(fixture.path("out")).unwrap();
    assert_eq!(fixture.predict("jsonl").run().code, Some(0));
    let texts: Vec<String> =
        fixture.files().iter().map(|path| std::fs::read_to_string(path).unwrap()).collect();
    let row = |line: &str| {
        let row: Value = serde_json::from_str(line).unwrap();
        let value: f32 = row["value"].to_string().parse().unwrap();
        (row["record"].as_i64().unwrap(), value, row["name"].as_str().unwrap().to_owned())
    };
    check_rows(texts.iter().flat_map(|text| text.lines()).map(row));
}

#[test]
fn data_model_and_predictions_may_be_in_a_bucket_whose_server_fails_and_delays() {
    let fixture = InferenceFixture::new();
    let server =
        S3::start(FaultRates { errors: 8, cuts: 4, delay_ms: 10, ..FaultRates::default() }, 1);
    for entry in std::fs::read_dir(fixture.path("data")).unwrap().map(Result::unwrap) {
        let name = format!("bucket/data/{}", entry.file_name().to_str().unwrap());
        server.put(&name, std::fs::read(entry.path()).unwrap());
    }
    server.put("bucket/models/m", std::fs::read(fixture.path("model")).unwrap());
    let program =
        [PROGRAMS.counting, "--records", &RECORDS.to_string(), "--inference-micros", "300"];
    let job = Command::new(PROGRAMS.elasticdl, fixture.path("job"), program)
        .verb("predict")
        .option("model", "s3://bucket/models/m")
        .option("data", "s3://bucket/data")
        .option("predictions", "s3://bucket/out")
        .option("format", "csv")
        .option("num-workers", "3")
        .option("records-per-shard", SHARD.to_string())
        .option("worker-timeout", "5s")
        .started_by([vec!["env".to_owned()], server.environment()].concat());
    let ended = under_kills(job.start());
    assert_eq!(ended.code, Some(0), "{}", ended.output);
    assert!(server.requests_hit() > 0, "no fault was injected");
    assert_eq!(ended.summary().records, each_once(RECORDS));
    std::fs::create_dir(fixture.path("out")).unwrap();
    for name in server.names().iter().filter(|name| name.starts_with("bucket/out/")) {
        std::fs::write(
            fixture.path("out").join(name.rsplit_once('/').unwrap().1),
            server.bytes(name),
        )
        .unwrap();
    }
    let reader = || CsvRows::new().i64("record").f32("value").text("name");
    check_rows(rows(&fixture.files(), reader).into_iter());
}

#[test]
fn a_killed_master_is_replaced_and_no_row_is_missing_or_repeated() {
    let fixture = InferenceFixture::new();
    let mut job = fixture.predict("csv").start();
    job.wait_for("some shards are done", |status| {
        status.shards.is_some_and(|shards| shards.done > 10)
    });
    send(job.pid(), Signal::KILL);
    assert_eq!(job.wait().code, None);
    let resumed = std::process::Command::new(PROGRAMS.elasticdl)
        .args(["train", "--resume"])
        .arg(format!("{}/", fixture.path("job").display()))
        .output()
        .unwrap();
    assert!(resumed.status.success(), "{}", String::from_utf8_lossy(&resumed.stderr));
    let summary = read_summary(&fixture.path("job")).unwrap();
    assert_eq!(summary.records, each_once(RECORDS));
    let reader = || CsvRows::new().i64("record").f32("value").text("name");
    check_rows(rows(&fixture.files(), reader).into_iter());
}

#[test]
fn an_unusable_record_is_named() {
    let fixture = InferenceFixture::new();
    let ended = fixture
        .command("evaluate", &["--inference-micros", "0", "--fail-at", "1700"])
        .option("max-worker-restarts", "1")
        .run();
    assert_eq!(ended.code, Some(1), "{}", ended.output);
    let failed = &ended.summary().failed_shards[0];
    let range = failed.start..failed.end;
    assert!(
        failed.file.ends_with("part-001.bin") && range.contains(&(1700 - RECORDS / FILES)),
        "{failed:?}"
    );
    assert!(failed.error.contains("record 1700"), "{failed:?}");
    assert_eq!(ended.summary().metrics, None);
}

#[test]
fn unusable_input_is_refused_before_any_work() {
    let fixture = InferenceFixture::new();
    let refusal = |command: Command, code: i32, expected: &str| {
        let ended = command.run();
        assert_eq!(ended.code, Some(code), "{}", ended.output);
        assert!(ended.output.contains(expected), "{expected}: {}", ended.output);
    };
    let evaluate = || fixture.command("evaluate", &[]);
    refusal(evaluate().option("model", "/nowhere/m"), 2, "cannot be used multiple times");
    refusal(evaluate().option("num-epochs", "2"), 2, "unexpected argument '--num-epochs'");
    refusal(evaluate().option("export", "m"), 2, "unexpected argument '--export'");
    refusal(
        fixture.command("evaluate", &["--parameters", "9000"]),
        2,
        "of shape [5000] where the model has F32 of shape [9000]",
    );
    write_out(&fixture.path("out"));
    refusal(fixture.predict("csv"), 2, "--predictions: ");
    std::fs::remove_file(fixture.path("model")).unwrap();
    refusal(evaluate(), 2, "--model: ");
}

fn write_out(folder: &Path) {
    std::fs::create_dir_all(folder).unwrap();
    std::fs::write(folder.join("other"), "").unwrap();
}
