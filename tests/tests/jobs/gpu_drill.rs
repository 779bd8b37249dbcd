//! The drill of the GPU path runs all phases on fake GPUs, and says what one GPU does not show.

use std::ffi::OsStr;
use std::fs;
use std::process::Command;
use std::time::Duration;

use elasticdl_tests::ChildOutput;
use serde_json::Value;

/// Runs the drill with further arguments and environment variables.
fn drill(arguments: &[&str], variables: &[(&str, &OsStr)]) -> (bool, String, Value) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("figures.json");
    let mut drill = Command::new(env!("CARGO_BIN_EXE_gpu_drill"));
    drill
        .arg("--stand-in")
        .arg(elasticdl_stand_ins::folder())
        .args(["--bytes-max", "16384", "--bytes-lost", "1048576", "--effort-ms", "1"])
        .arg("--json")
        .arg(&file)
        .args(arguments)
        .envs(variables.iter().copied());
    let (code, output) = ChildOutput::start(drill).wait_within(Duration::from_secs(600));
    let figures = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    (code == Some(0), output, figures)
}

#[test]
fn the_drill_completes_and_reports_its_figures() {
    let (success, table, all) = drill(&[], &[]);
    assert!(success && all["failures"].as_object().unwrap().is_empty(), "{table}");
    assert!(all["left_out"].as_object().unwrap().is_empty(), "{table}");
    let figures = all["figures"].as_array().unwrap();
    let ran = "machine kernels layer job staged init abort-init kill kill-host stop abandon memory \
               nccl exit";
    for phase in ran.split(' ') {
        assert!(
            figures.iter().any(|figure| figure["phase"] == phase),
            "{phase}: no figure\n{table}"
        );
    }
    for figure in figures {
        assert!(figure["value"].as_f64().unwrap() >= 0.0, "{figure}");
        assert!(
            table.contains(figure["what"].as_str().unwrap()),
            "{figure} is not in the table:\n{table}"
        );
    }
    let value = |what: &str| {
        let found = figures.iter().find(|figure| figure["what"].as_str().unwrap().contains(what));
        found.unwrap_or_else(|| panic!("{what}: no figure\n{table}"))["value"].as_f64().unwrap()
    };
    assert_eq!(value("adamw: of 4099 parameters, other bits"), 0.0);
    let operations = figures.iter().filter(|figure| figure["phase"] == "layer");
    let of_4096 = operations.filter(|figure| {
        figure["what"].as_str().unwrap().ends_with(": 4096 parameters") && figure["unit"] == "us"
    });
    assert_eq!(of_4096.count(), 12, "{table}");
    assert!(value("finite check, awaited: until the host goes on") > 0.0, "{table}");
    assert!(value("update by AdamW: rate of its 0.1 MB") > 0.0, "{table}");
    assert_eq!([value("records counted"), value("records repeated")], [40_000.0, 0.0]);
    assert_eq!(value("processes that ended well"), 20.0);
    for text in ["f32 gradients summed over NCCL 2.28.9", "bf16 gradients summed over NCCL 2.28.9"]
    {
        assert!(has_note(&all, "job", text), "{text}: {table}");
    }
    for text in ["driver of CUDA 13.0", "/libcuda.so", "/libnccl.so.2", "NVRTC 13.0", "/libnvrtc"] {
        assert!(has_note(&all, "machine", text), "{text}: {table}");
    }
}

fn has_note(all: &Value, phase: &str, text: &str) -> bool {
    let mut notes = all["notes"].as_array().unwrap().iter();
    notes.any(|note| note["phase"] == phase && note["text"].as_str().unwrap().contains(text))
}

/// Workers that share a GPU train over NCCL there, as they do where each has one.
#[test]
fn on_one_gpu_a_job_trains_over_nccl_too() {
    let only_one = [("STAND_IN_DEVICES", "1".as_ref())];
    let (success, table, all) = drill(&["--only", "job"], &only_one);
    assert!(success, "{table}");
    for text in [
        "workers share a GPU here",
        "f32 gradients summed over NCCL 2.28.9",
        "bf16 gradients summed over NCCL 2.28.9",
    ] {
        assert!(has_note(&all, "job", text), "{text}: {table}");
    }
}

#[test]
fn a_job_that_does_not_train_over_nccl_fails_its_phase() {
    let off = [("ELASTICDL_NCCL", "off".as_ref())];
    let (success, table, all) = drill(&["--only", "job"], &off);
    let error = all["failures"]["job"].as_str().unwrap();
    assert!(!success && error.contains("ELASTICDL_NCCL is off"), "{table}");
    assert!(!error.contains("Summary {"), "{error}");
}

#[test]
fn phases_without_time_are_reported_as_left_out() {
    let (success, table, all) = drill(&["--seconds", "0"], &[]);
    assert!(!success && all["figures"].as_array().unwrap().is_empty(), "{table}");
    assert_eq!(all["failures"]["kill"], "skipped: the time is up");
}

#[test]
fn a_phase_that_fails_does_not_end_the_drill() {
    let no_gpu = [("STAND_IN_DEVICES", "0".as_ref())];
    let (success, table, all) = drill(&["--only", "kernels,memory"], &no_gpu);
    let failures = all["failures"].as_object().unwrap();
    assert!(!success && failures.keys().eq(["kernels", "memory"]), "{table}");
    let error = all["failures"]["memory"].as_str().unwrap();
    assert!(error.contains("there is no GPU 0"), "{error}");
}

#[test]
fn without_a_gpu_only_the_machine_is_looked_at() {
    let no_gpu = [("STAND_IN_DEVICES", "0".as_ref())];
    let (success, table, all) = drill(&["--only", "machine,job,exit"], &no_gpu);
    assert!(!success && all["failures"].as_object().unwrap().keys().eq(["machine"]), "{table}");
    assert!(all["left_out"].as_object().unwrap().keys().eq(["exit", "job"]), "{table}");
}
