//! The final model of a real job, as a file for other programs.

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

use std::path::{Path, PathBuf};

use elasticdl_tests::{Command, counting_data, send};
use rustix::process::Signal;
use safetensors::SafeTensors;
use tempfile::TempDir;

const RECORDS: u64 = 600;

fn job(folder: &TempDir, export: &Path) -> Command {
    counting_data(&folder.path().join("data"), RECORDS, 2).unwrap();
    let program =
        ["--records", &RECORDS.to_string(), "--micros-per-record", "200"].map(PathBuf::from);
    let program = std::iter::once(PathBuf::from(env!("CARGO_BIN_EXE_counting"))).chain(program);
    Command::new(env!("CARGO_BIN_EXE_elasticdl-under-test"), folder.path().join("job"), program)
        .option("training-data", folder.path().join("data/../data"))
        .option("global-batch-size", "30")
        .option("num-workers", "3")
        .option("export", export)
}

/// Count of each record in the exported model.
fn counts(path: &Path) -> Vec<f32> {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(file.names(), ["parameters"]);
    let tensor = file.tensor("parameters").unwrap();
    assert_eq!(tensor.shape(), [RECORDS as usize]);
    tensor
        .data()
        .chunks_exact(4)
        .map(|value| f32::from_le_bytes(value.try_into().unwrap()))
        .collect()
}

#[test]
fn the_final_model_is_exported_whichever_worker_was_killed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("models/final.safetensors");
    let mut job = job(&folder, &path).option("num-epochs", "4").start();
    job.wait_for("a group at work", |status| status["step"].as_u64() > Some(3));
    assert!(!path.exists());
    // The lowest rank, which exports the model.
    send(*job.workers().values().next().unwrap(), Signal::KILL);
    let ended = job.wait();
    assert_eq!(ended.code, Some(0), "{}", ended.output);
    assert_eq!(counts(&path), [4.0; RECORDS as usize]);
    assert_eq!(ended.summary["export"], path.to_str().unwrap());
    assert!(ended.output.contains("exported to"), "{}", ended.output);
    let left = std::fs::read_dir(path.parent().unwrap()).unwrap().count();
    assert_eq!(left, 1, "nothing else is left there");
}

#[test]
fn a_stopped_job_exports_what_it_has_trained() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.safetensors");
    let mut job = job(&folder, &path).option("num-epochs", "100000").start();
    job.wait_for("a group at work", |status| status["step"].as_u64() > Some(3));
    send(job.pid(), Signal::INT);
    let ended = job.wait();
    assert_eq!(ended.code, Some(130), "{}", ended.output);
    let counted: f32 = counts(&path).iter().sum();
    assert_eq!(Some(counted as u64), ended.summary["records"]["counted"].as_u64());
}

#[test]
fn an_export_path_that_cannot_be_written_to_is_refused_before_training() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("file"), "").unwrap();
    let ended = job(&folder, &folder.path().join("file/model")).run();
    assert_eq!(ended.code, Some(2), "{}", ended.output);
    assert_eq!(ended.summary["steps"], 0);
    let error = ended.summary["error"].as_str().unwrap();
    assert!(error.starts_with("--export: ") && error.contains("file/model"), "{error}");
}

#[test]
fn an_export_path_that_is_a_folder_is_refused_before_training() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("models")).unwrap();
    let ended = job(&folder, &folder.path().join("models")).run();
    assert_eq!(ended.code, Some(2), "{}", ended.output);
    assert_eq!(ended.summary["steps"], 0);
    let error = ended.summary["error"].as_str().unwrap();
    assert!(
        error.starts_with("--export: ") && error.contains("models/model.safetensors"),
        "{error}"
    );
    assert_eq!(std::fs::read_dir(folder.path().join("models")).unwrap().count(), 0);
}

#[test]
fn export_paths_may_contain_parent_folders() {
    let folder = tempfile::tempdir().unwrap();
    let up = folder.path().join("absent/../models/../m.safetensors");
    let ended = job(&folder, &up).option("checkpoint-dir", folder.path().join("job/../kept")).run();
    assert_eq!(ended.code, Some(0), "{}", ended.output);
    assert_eq!(counts(&folder.path().join("m.safetensors")), [1.0; RECORDS as usize]);
    assert_eq!(std::fs::read_dir(folder.path().join("kept")).unwrap().count(), 1);
    let again = job(&folder, &folder.path().join("n.safetensors"))
        .option("resume-from", folder.path().join("data/../kept"))
        .option("num-epochs", "2")
        .run();
    assert_eq!(again.code, Some(0), "{}", again.output);
    assert_eq!(counts(&folder.path().join("n.safetensors")), [2.0; RECORDS as usize]);
}
