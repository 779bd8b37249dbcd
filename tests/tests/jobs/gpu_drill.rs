//! The drill of the GPU ring, on fake GPUs: all phases run and report their figures.

use std::fs;
use std::process::Command;

use serde_json::Value;

fn drill(arguments: &[&str]) -> (bool, String, Value) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("figures.json");
    let output = Command::new(env!("CARGO_BIN_EXE_gpu_drill"))
        .arg("--stand-in")
        .arg(elasticdl_stand_ins::folder())
        .args(["--bytes-max", "16384", "--bytes-lost", "1048576", "--effort-ms", "1"])
        .arg("--json")
        .arg(&file)
        .args(arguments)
        .output()
        .unwrap();
    let figures = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    (output.status.success(), String::from_utf8(output.stdout).unwrap(), figures)
}

#[test]
fn the_drill_completes_and_reports_its_figures() {
    let (_, table, all) = drill(&[]);
    let failures = all["failures"].as_object().unwrap();
    assert!(failures.keys().eq(["step"]), "{failures:?}\n{table}");
    assert!(
        failures["step"].as_str().unwrap().starts_with("left out: name bytelm"),
        "{failures:?}"
    );
    let figures = all["figures"].as_array().unwrap();
    for phase in
        ["machine", "init", "nccl", "staged", "kill", "kill-host", "stop", "abandon", "exit"]
    {
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
}

#[test]
fn phases_without_time_are_reported_as_left_out() {
    let (success, table, all) = drill(&["--seconds", "0"]);
    assert!(!success && all["figures"].as_array().unwrap().is_empty(), "{table}");
    assert_eq!(all["failures"]["kill"], "left out: the time is up");
}
