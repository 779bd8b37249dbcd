//! With `--log-format json` each line of a job's logs is a JSON object that names the job, its run,
//! the worker and the generation, also of workers that are killed, of those on other hosts, and of
//! another master; and each line on the console is an object.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command as Process;

use elasticdl_tests::{JobFixture, Running, send};
use rustix::process::Signal;
use serde_json::{Map, Value};

use crate::PROGRAMS;

/// What the program of the tests prints.
const PRINTED: [&str; 2] = ["the first gradient", "the first update"];

type Object = Map<String, Value>;

/// All lines but those that the program prints.
fn objects(text: &str) -> Vec<Object> {
    let read = |line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    let is_logged = |line: &&str| !PRINTED.iter().any(|printed| line.ends_with(printed));
    text.lines().filter(is_logged).map(read).collect()
}

/// The lines of the logs, by the number of the worker; `None`: those of the masters.
fn logs(job: &std::path::Path) -> BTreeMap<Option<u64>, Vec<Object>> {
    let files = fs::read_dir(job.join("logs")).unwrap().map(|entry| entry.unwrap().path());
    let read = |path: std::path::PathBuf| {
        let number = path.file_stem().unwrap().to_str().unwrap().strip_prefix("worker-");
        let number = number.map(|number| number.parse().unwrap());
        (number, objects(&fs::read_to_string(path).unwrap()))
    };
    files.map(read).collect()
}

/// Kills a worker, waits until another has taken its place, and returns both.
fn replace_one(job: &mut Running) -> [u64; 2] {
    job.wait_for_work_of(3);
    let (killed, pid) = job.members()[0];
    send(pid, Signal::KILL);
    let status = job.wait_for_members_without(3, &[killed]);
    [killed, status.workers.iter().map(|worker| worker.worker).max().unwrap()].map(|id| id.0)
}

/// Checks each line of the logs of a job that has ended, and returns them.
fn check(fixture: &JobFixture, name: &str, run_id: &str) -> BTreeMap<Option<u64>, Vec<Object>> {
    let logs = logs(&fixture.path("job"));
    for (worker, lines) in &logs {
        let mut newest = 0;
        for line in lines {
            let text = |key: &str| line[key].as_str().unwrap_or_else(|| panic!("{key}: {line:?}"));
            let time = text("timestamp");
            assert!(time.starts_with("20") && time.ends_with('Z'), "RFC 3339: {line:?}");
            assert!(["ERROR", "INFO", "WARN"].contains(&text("level")), "{line:?}");
            assert!(text("target").starts_with("elasticdl"), "{line:?}");
            assert!(!text("message").is_empty(), "{line:?}");
            assert_eq!((text("job"), text("run_id")), (name, run_id), "{line:?}");
            assert_eq!(line.get("worker").map(|id| id.as_u64().unwrap()), *worker, "{line:?}");
            let generation = line.get("generation").map_or(0, |number| number.as_u64().unwrap());
            assert!(generation >= newest || worker.is_none(), "{worker:?}: {line:?}");
            newest = generation;
            if text("message") == "ring built" {
                assert_eq!(line["fields"]["generation"], generation, "{line:?}");
            }
        }
    }
    logs
}

#[test]
fn each_line_of_a_jobs_logs_in_json_names_its_run_its_worker_and_its_generation() {
    let fixture = JobFixture { micros_per_record: 800, ..JobFixture::new(PROGRAMS, 3) };
    let command = fixture.command(1).option("log-format", "json").option("job-name", "logged");
    let mut job = command.start();
    let [killed, joined] = replace_one(&mut job);
    let before = job.status();
    job.kill_master();
    job.resume();
    job.wait_for("another master at work", |status| status.step > before.step);
    let all = job.command(&["logs", "--all"]);
    assert!(objects(&all).iter().any(|line| line["worker"] == joined), "{all}");
    let ended = job.wait();
    ended.assert_exact("a killed worker and a killed master");
    let summary = ended.summary();
    let logs = check(&fixture, "logged", &summary.run_id);
    for worker in [killed, joined] {
        let lines = &logs[&Some(worker)];
        assert!(lines.iter().any(|line| line["message"] == "ring built"), "{lines:?}");
    }
    let of_masters = &logs[&None];
    let runs = of_masters.iter().filter(|line| line["message"] == "run of the job");
    assert_eq!(runs.count(), 2, "one of each master");
    let newest = summary.memberships.last().unwrap().generation.0;
    let last = of_masters.last().unwrap();
    assert_eq!((&last["message"], &last["generation"]), (&"job ended".into(), &newest.into()));
    assert!(of_masters.iter().any(|line| {
        let message = line["message"].as_str().unwrap();
        message.starts_with(&format!("worker {killed} killed by SIGKILL"))
    }));
}

#[test]
fn workers_on_other_hosts_log_in_json_and_the_console_has_their_lines_as_objects() {
    let fixture = JobFixture { micros_per_record: 800, ..JobFixture::new(PROGRAMS, 3) };
    let list = fixture.path("hosts");
    fs::write(&list, "first\nsecond slots=2").unwrap();
    let command = fixture.command(1).option("log-format", "json").option("job-name", "far");
    let command = command.option("hosts", list).option("host-command", "env HOST={host}");
    let mut job =
        command.option("listen", "127.0.0.1").option("checkpoint-dir", "none").flag("tee").start();
    let [_, joined] = replace_one(&mut job);
    let ended = job.wait();
    ended.assert_exact("a killed worker");
    let logs = check(&fixture, "far", &ended.summary().run_id);
    let console = objects(&ended.output);
    let printed: Vec<&Object> = console
        .iter()
        .filter(|line| line.get("kind") == Some(&"output".into()) && line["worker"] == joined)
        .filter(|line| !PRINTED.iter().any(|printed| line.get("text") == Some(&(*printed).into())))
        .map(|line| line["object"].as_object().unwrap())
        .collect();
    assert_eq!(printed, logs[&Some(joined)].iter().collect::<Vec<_>>());
}

#[test]
fn a_worker_that_is_started_by_hand_logs_in_the_format_of_its_environment() {
    let folder = tempfile::tempdir().unwrap();
    let token = folder.path().join("token");
    fs::write(&token, "07".repeat(32)).unwrap();
    let started = |format: &str, more: &[(&str, &str)]| {
        let output = Process::new(PROGRAMS.counting)
            .args(["--records", "1"])
            .env("ELASTICDL_LOG_FORMAT", format)
            .env("ELASTICDL_TOKEN_FILE", &token)
            .envs([("ELASTICDL_JOB", "j"), ("ELASTICDL_LAUNCH", "4")])
            .envs([("ELASTICDL_MASTER", "127.0.0.1:9"), ("ELASTICDL_MASTER_TIMEOUT_MS", "1")])
            .envs(more.iter().copied())
            .output()
            .unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let (code, text) = started("json", &[]);
    assert_eq!(code, Some(70), "{text}");
    for line in objects(&text) {
        assert_eq!((&line["job"], &line["worker"]), (&"j".into(), &4.into()), "{line:?}");
        assert!(line["run_id"].is_string() && !line.contains_key("generation"), "{line:?}");
    }
    // The first process of a pod of several workers is none of them.
    let (code, text) = started("json", &[("ELASTICDL_WORKERS", "2")]);
    assert_eq!(code, Some(70), "{text}");
    let failures: Vec<Object> = objects(&text)
        .into_iter()
        .filter(|line| line["target"] == "elasticdl::supervisor")
        .collect();
    assert!(!failures.is_empty(), "{text}");
    assert!(failures.iter().all(|line| !line.contains_key("worker")), "{text}");
    let (code, text) = started("jsn", &[]);
    let wanted = "ELASTICDL_LOG_FORMAT: `jsn` is no format of logs; it must be json or text";
    assert!(code == Some(2) && text.contains(wanted), "{text}");
}
