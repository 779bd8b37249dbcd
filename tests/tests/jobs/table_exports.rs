//! Models with tables are exported with all of their rows, and evaluated and applied from there.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use elasticdl::Reader as _;
use elasticdl::readers::{CsvRows, ParquetRows};
use elasticdl_tests::{Command, ExportedRow, FaultRates, JobFixture, S3, exported_rows, send};
use rustix::process::Signal;

use crate::PROGRAMS;

const RECORDS: u64 = 6000;
const BATCH: u64 = 48;

/// A job of this many workers whose model has a table.
fn fixture(workers: u32) -> JobFixture {
    JobFixture { program_options: &["--tables"], ..JobFixture::new(PROGRAMS, workers) }
}

fn rows(path: &Path) -> BTreeMap<u64, ExportedRow> {
    exported_rows(path, "counts")
}

/// Asserts that the rows have the same touches, and nearly the same values: sums are added in
/// another order.
fn assert_same(one: &BTreeMap<u64, ExportedRow>, other: &BTreeMap<u64, ExportedRow>) {
    assert_eq!(one.len(), other.len());
    for ((id, one), (other_id, other)) in one.iter().zip(other) {
        assert_eq!((id, one.touches), (other_id, other.touches));
        let differences = one.values.iter().zip(&other.values).map(|(a, b)| (a - b).abs());
        assert!(differences.fold(0.0, f32::max) < 1e-6, "row {id}: {one:?}, {other:?}");
    }
}

#[test]
fn all_rows_are_exported_whichever_workers_were_killed() {
    let fixture = fixture(4);
    let path = fixture.path("models/m.safetensors");
    let mut job = fixture.command(0).option("export", &path).start();
    job.wait_for_first_steps();
    for _ in 0..3 {
        let step = job.status().step;
        job.wait_for("copies", |status| status.step > step + 10);
        // The lowest rank, which says what is exported.
        send(*job.workers().values().next().unwrap(), Signal::KILL);
    }
    let ended = job.wait();
    ended.assert_exact("three kills");
    let exported = rows(&path);
    assert!(exported.keys().copied().eq(0..RECORDS));
    assert!(exported.values().all(|row| row.touches == 2), "each record is trained twice");
    let left = std::fs::read_dir(path.parent().unwrap()).unwrap().count();
    assert_eq!(left, 2, "nothing else is left there");
    let alone = JobFixture { micros_per_record: 0, ..self::fixture(1) };
    let path = alone.path("alone.safetensors");
    alone.command(0).option("export", &path).run().assert_exact("a worker alone");
    assert_same(&exported, &rows(&path));
}

#[test]
fn the_rows_of_a_candle_model_have_the_gradients_of_their_tensors_whichever_workers_were_killed() {
    let alone = JobFixture { micros_per_record: 0, ..fixture(1) };
    let path = alone.path("alone.safetensors");
    alone.command(0).option("export", &path).run().assert_exact("gradients computed by hand");
    let expected = rows(&path);
    let program_options = &["--tables", "--candle"];
    let with_candle = |workers| JobFixture { program_options, ..fixture(workers) };
    let first = with_candle(3);
    let dir = first.path("checkpoints");
    let command = first.command(0).option("checkpoint-dir", &dir);
    let mut job = command.option("checkpoint-every", "20").start();
    job.wait_for_first_steps();
    for _ in 0..2 {
        let step = job.status().step;
        job.wait_for("copies", |status| status.step > step + 10);
        send(*job.workers().values().next().unwrap(), Signal::KILL);
    }
    job.wait_for_checkpoints(1);
    job.signal(Signal::TERM);
    job.wait().assert_outcome(143, "stopped");
    // The model that computes its gradients by hand goes on from there, too.
    for next in [with_candle(2), fixture(2)] {
        let next = JobFixture { micros_per_record: 0, ..next };
        let path = next.path("m.safetensors");
        let command = next.command(0).option("resume-from", &dir).option("export", &path);
        command.run().assert_exact("resumed");
        assert_same(&rows(&path), &expected);
    }
}

#[test]
fn the_rows_of_the_best_model_are_exported_with_it() {
    let fixture = JobFixture { micros_per_record: 100, ..fixture(3) };
    let path = fixture.path("best.safetensors");
    let command = fixture.command(1).option("validation-data", fixture.data());
    let command = command.option("evaluate-every", "20").option("best-metric", "seen:max");
    let mut job = command.option("export-best", &path).start();
    job.wait_for("an export", |_| path.exists());
    send(*job.workers().values().next().unwrap(), Signal::KILL);
    let ended = job.wait();
    ended.assert_exact("the best of all");
    // The first evaluation after an epoch; no later one is better.
    let best = ended.summary().evaluations.as_ref().unwrap().best.clone().unwrap();
    assert_eq!((best.step, best.export.as_deref()), (140, path.to_str()));
    let touches: u64 = rows(&path).values().map(|row| u64::from(row.touches)).sum();
    assert_eq!(touches, 140 * BATCH);
}

#[test]
fn the_rows_of_the_best_model_are_kept_until_they_are_written() {
    let fixture = JobFixture { micros_per_record: 1000, ..fixture(3) };
    let out = fixture.path("out");
    let path = out.join("best.safetensors");
    let command = fixture.command(4).option("validation-data", fixture.data());
    let command = command.option("evaluate-every", "20").option("best-metric", "seen:max");
    let mut job = command.option("export-best", &path).start();
    job.wait_for_first_steps();
    std::fs::remove_dir_all(&out).unwrap();
    std::fs::write(&out, "no folder").unwrap();
    // The model of step 140 is the best one.
    job.wait_for("a later step", |status| status.step > 141);
    std::fs::remove_file(&out).unwrap();
    let ended = job.wait();
    ended.assert_exact("the best of all");
    let touches: u64 = rows(&path).values().map(|row| u64::from(row.touches)).sum();
    assert_eq!(touches, 140 * BATCH);
}

#[test]
fn a_suspended_job_exports_no_rows_before_its_end() {
    let fixture = fixture(3);
    let path = fixture.path("m.safetensors");
    let command = fixture.command(5).option("export", &path);
    let mut job = command.option("checkpoint-dir", fixture.path("kept")).start();
    job.wait_for_first_steps();
    job.command(&["suspend"]);
    job.wait_for("the suspension", |status| status.state == "suspended");
    assert!(!path.exists());
    job.command(&["resume"]);
    let ended = job.wait();
    ended.assert_exact("suspended");
    assert_eq!(ended.lost(), [], "{}", ended.output);
    assert!(rows(&path).values().all(|row| row.touches == 2));
}

#[test]
fn rows_that_their_place_does_not_take_are_in_the_directory_of_the_job() {
    let fixture = fixture(2);
    let (out, job_dir) = (fixture.path("out"), fixture.path("job"));
    let path = out.join("m.safetensors");
    let mut job = fixture.command(2).option("export", &path).start();
    job.wait_for_first_steps();
    std::fs::remove_dir_all(&out).unwrap();
    std::fs::write(&out, "no folder").unwrap();
    job.signal(Signal::TERM);
    let ended = job.wait();
    let error = ended.summary().error.clone().unwrap();
    let kept = job_dir.join("model.safetensors");
    assert!(error.contains(&format!("it is in {}", kept.display())), "{error}");
    let touches: u64 = rows(&kept).values().map(|row| u64::from(row.touches)).sum();
    assert_eq!(touches, ended.summary().records.counted);
}

/// Applies the model at `model` to the fixture's data.
fn applied(
    fixture: &JobFixture,
    (verb, program_option): (&'static str, &str),
    model: &Path,
    workers: u32,
) -> Command {
    let records = RECORDS.to_string();
    let program = [PROGRAMS.counting, "--records", &records, program_option].map(PathBuf::from);
    Command::new(PROGRAMS.elasticdl, fixture.path(&format!("{verb}-{workers}")), program)
        .verb(verb)
        .option("model", model)
        .option("data", fixture.data())
        .option("num-workers", workers.to_string())
        .option("records-per-shard", "500")
}

#[test]
fn rows_in_a_bucket_are_evaluated_as_those_in_a_folder() {
    let server = S3::start(FaultRates { errors: 8, cuts: 4, ..FaultRates::default() }, 1);
    let metrics = [("m.safetensors", None), ("s3://bucket/m.safetensors", Some(server.clone()))]
        .map(|(model, store)| {
            let variables = server.environment().into_iter();
            let fixture = JobFixture { micros_per_record: 0, store, ..fixture(3) };
            let path = if model.contains(':') { model.into() } else { fixture.path(model) };
            let job = fixture.command(3).option("max-steps", "60").option("export", &path);
            job.run().assert_outcome(0, "completed");
            let apply = applied(&fixture, ("evaluate", "--tables"), &path, 2);
            let apply = apply.started_by(["env".to_owned()].into_iter().chain(variables));
            let ended = apply.run();
            ended.assert_outcome(0, "completed");
            ended.summary().metrics.clone().unwrap()["row"].unwrap()
        });
    assert!((metrics[0] - metrics[1]).abs() < 1e-6, "{metrics:?}");
    let is_part = |name: &&String| name.starts_with("bucket/m.safetensors.tables/");
    assert_eq!(server.names().iter().filter(is_part).count(), 2, "two parts of 2880 rows");
    assert!(server.requests_hit() > 0, "no fault was injected");
}

#[test]
fn an_exported_model_is_evaluated_and_applied_with_its_rows() {
    let fixture = JobFixture { micros_per_record: 0, ..fixture(3) };
    let path = fixture.path("m.safetensors");
    let job = fixture.command(3).option("max-steps", "60").option("evaluate-every", "60");
    let job = job.option("validation-data", fixture.data()).option("export", &path);
    let ended = job.run();
    ended.assert_outcome(0, "completed");
    let exported = rows(&path);
    assert_eq!(exported.len() as u64, 60 * BATCH, "the other records have no rows yet");
    let trained = ended.summary().evaluations.as_ref().unwrap().all.last().unwrap().metrics.clone();
    let mut found = Vec::new();
    for workers in [1, 3] {
        let ended = applied(&fixture, ("evaluate", "--tables"), &path, workers).run();
        ended.assert_outcome(0, "completed");
        let metrics = ended.summary().metrics.clone().unwrap();
        let difference = metrics["row"].unwrap() - trained["row"].unwrap();
        assert!(difference.abs() < 1e-9 && metrics["seen"] == trained["seen"], "{metrics:?}");
        let out = fixture.path(&format!("out-{workers}"));
        let predict =
            applied(&fixture, ("predict", "--tables"), &path, workers).option("predictions", &out);
        predict.option("format", "csv").run().assert_outcome(0, "completed");
        let mut reader = CsvRows::new().i64("record").f32("row");
        let data = reader.describe(out.to_str().unwrap()).unwrap();
        let read = |file: &elasticdl::File| reader.read(file, 0..file.records).unwrap();
        let predicted: Vec<(u64, f32)> =
            data.files.iter().flat_map(read).map(|row| (row.i64(0) as u64, row.f32(1))).collect();
        assert!(predicted.iter().map(|(record, _)| *record).eq(0..RECORDS));
        for (record, row) in &predicted {
            match exported.get(record) {
                Some(exported) => assert_eq!(exported.values, [*row], "record {record}"),
                None => assert!(row.abs() <= 0.05 && *row != 0.0, "record {record}: {row}"),
            }
        }
        found.push((metrics, predicted));
    }
    assert_eq!(found[0], found[1], "the number of workers does not matter");
    let without = applied(&fixture, ("evaluate", "--parameters=0"), &path, 2).run();
    without.assert_outcome(2, "refused");
    assert!(without.output.contains("it has 1 tables, and this model has 0"), "{}", without.output);
}

#[test]
fn the_rows_of_an_exported_model_are_converted_to_parquet() {
    let fixture = JobFixture { micros_per_record: 0, ..fixture(2) };
    let path = fixture.path("m.safetensors");
    let job = fixture.command(3).option("max-steps", "60").option("export", &path);
    let job = job.option("checkpoint-dir", fixture.path("kept"));
    job.run().assert_outcome(0, "completed");
    let convert = |from: &Path, program_option: &str| {
        let mut command = std::process::Command::new(PROGRAMS.elasticdl);
        command.arg("convert").arg(from).arg(fixture.path("rows.parquet"));
        command.args(["--", PROGRAMS.counting, "--records", &RECORDS.to_string(), program_option]);
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
    };
    let (code, output) = convert(&path, "--tables");
    assert!(code == Some(0) && output.contains("rows.parquet has the rows of"), "{output}");
    let data = fixture.path("rows.parquet/counts.parquet");
    let mut reader = ParquetRows::new().i64("key").i64("touches").f32_list("embedding", 1);
    let data = reader.describe(data.to_str().unwrap()).unwrap();
    let read = |file: &elasticdl::File| reader.read(file, 0..file.records).unwrap();
    let row = |row: elasticdl::readers::Row| {
        let (touches, values) = (row.i64(1) as u32, row.f32s(2).to_vec());
        (row.i64(0) as u64, ExportedRow { touches, values })
    };
    let found: BTreeMap<u64, ExportedRow> = data.files.iter().flat_map(read).map(row).collect();
    assert_eq!(found.len() as u64, 60 * BATCH);
    assert_eq!(found, rows(&path));

    let checkpoint = std::fs::read_dir(fixture.path("kept")).unwrap().next().unwrap().unwrap();
    for (from, program_option, expected) in [
        (&path, "--tables", "has \"counts.parquet\" already, and a conversion"),
        (&path, "--parameters=0", "it has 1 tables, and this model has 0"),
        (&checkpoint.path(), "--tables", "the rows of tables in a checkpoint can't be read here"),
        (&checkpoint.path(), "--parameters=0", "has no tables"),
    ] {
        let (code, output) = convert(from, program_option);
        assert!(code == Some(1) && output.contains(expected), "{output}");
    }
}
