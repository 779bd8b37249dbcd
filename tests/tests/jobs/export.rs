//! The final model is exported whatever worker was killed.

use std::process::Command;

use elasticdl_tests::{JobFixture, exported_counts, send};
use rustix::process::Signal;

use crate::PROGRAMS;

const RECORDS: u64 = 600;

fn fixture(epochs: u64) -> JobFixture {
    JobFixture {
        records: RECORDS,
        files: 2,
        epochs,
        micros_per_record: 200,
        global_batch_size: 30,
        ..JobFixture::new(PROGRAMS, 3)
    }
}

#[test]
fn the_final_model_is_exported_whichever_worker_was_killed() {
    let fixture = fixture(4);
    let path = fixture.path("models/final.safetensors");
    let mut job = fixture.command(0).option("export", &path).start();
    job.wait_for_first_steps();
    assert!(!path.exists());
    // The lowest rank, which exports the model.
    send(*job.workers().values().next().unwrap(), Signal::KILL);
    let ended = job.wait();
    assert_eq!(ended.code, Some(0), "{}", ended.output);
    assert_eq!(exported_counts(&path), [4.0; RECORDS as usize]);
    assert_eq!(ended.summary().export.as_deref(), path.to_str());
    let left = std::fs::read_dir(path.parent().unwrap()).unwrap().count();
    assert_eq!(left, 1, "nothing else is left there");
}

#[test]
fn an_export_path_that_cannot_be_written_to_is_refused_before_training() {
    let fixture = fixture(1);
    std::fs::write(fixture.path("file"), "").unwrap();
    assert_refused(&fixture, "file/model", "file/model");
}

#[test]
fn an_export_path_that_is_a_folder_is_refused_before_training() {
    let fixture = fixture(1);
    std::fs::create_dir(fixture.path("models")).unwrap();
    assert_refused(&fixture, "models", "models/model.safetensors");
    assert_eq!(std::fs::read_dir(fixture.path("models")).unwrap().count(), 0);
}

#[test]
fn a_checkpoint_is_converted_to_the_model_that_is_exported() {
    let fixture = fixture(2);
    let ended = fixture
        .command(0)
        .option("export", fixture.path("m.safetensors"))
        .option("checkpoint-dir", fixture.path("kept"))
        .run();
    assert_eq!(ended.code, Some(0), "{}", ended.output);
    let checkpoint = std::fs::read_dir(fixture.path("kept")).unwrap().next().unwrap().unwrap();
    let convert = |from: &std::path::Path, to: &str| {
        let mut command = Command::new(PROGRAMS.elasticdl);
        command.arg("convert").arg(from).arg(fixture.path(to));
        command.args(["--", PROGRAMS.counting, "--records", &RECORDS.to_string()]);
        command.output().unwrap()
    };
    let output = convert(&checkpoint.path(), "new/n.safetensors");
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let read = |name: &str| std::fs::read(fixture.path(name)).unwrap();
    assert_eq!(read("new/n.safetensors"), read("m.safetensors"));
    let output = convert(&fixture.path("kept/absent"), "o.safetensors");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && error.contains("kept/absent"), "{error}");
    assert_eq!(error.lines().count(), 2, "{error}");
    assert!(!fixture.path("o.safetensors").exists());
}

/// Asserts that an export to a path in the fixture's folder is refused with an error that names
/// `shown`.
fn assert_refused(fixture: &JobFixture, export: &str, shown: &str) {
    let ended = fixture.command(0).option("export", fixture.path(export)).run();
    ended.assert_outcome(2, "refused");
    assert_eq!(ended.summary().steps, 0);
    let error = ended.summary().error.as_ref().unwrap();
    assert!(error.starts_with("--export: ") && error.contains(shown), "{error}");
}

#[test]
fn export_paths_may_contain_parent_folders() {
    let fixture = fixture(1);
    let ended = fixture
        .command(0)
        .option("export", fixture.path("absent/../models/../m.safetensors"))
        .option("checkpoint-dir", fixture.path("job/../kept"))
        .run();
    assert_eq!(ended.code, Some(0), "{}", ended.output);
    assert_eq!(exported_counts(&fixture.path("m.safetensors")), [1.0; RECORDS as usize]);
    assert_eq!(std::fs::read_dir(fixture.path("kept")).unwrap().count(), 1);
    let fixture = JobFixture { epochs: 2, ..fixture };
    let again = fixture
        .command(0)
        .option("export", fixture.path("n.safetensors"))
        .option("resume-from", fixture.path("data/../kept"))
        .run();
    assert_eq!(again.code, Some(0), "{}", again.output);
    assert_eq!(exported_counts(&fixture.path("n.safetensors")), [2.0; RECORDS as usize]);
}
