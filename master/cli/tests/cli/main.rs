//! The `elasticdl` command from the user's side: the input that it refuses, its error messages, and
//! that it starts nothing after a refusal.

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

mod commands;
mod console;
mod manifests;

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use elasticdl_master::jobdir::JobDir;
use rustix::process::{Pid, Signal, kill_process};

/// A separate state folder per test, so that no test sees the jobs of another.
struct Home(tempfile::TempDir);

#[derive(Debug)]
struct CommandOutput {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

impl Home {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_elasticdl"));
        command.args(args).current_dir(self.0.path()).env("XDG_STATE_HOME", self.path("state"));
        command
    }

    fn run(&self, args: &[&str]) -> CommandOutput {
        let Output { status, stdout, stderr } = self.command(args).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        CommandOutput { code: status.code(), stdout: text(stdout), stderr: text(stderr) }
    }

    /// Runs `train` with `options`, and asserts that the program was not started.
    fn train(&self, options: &[&str]) -> CommandOutput {
        let marker = self.path("started");
        let script = format!("touch {}", marker.display());
        let mut args = vec!["train"];
        args.extend(options);
        args.extend(["--", "/bin/sh", "-c", &script]);
        let output = self.run(&args);
        assert!(!marker.exists(), "the program was started: {options:?}");
        output
    }

    fn entries(&self) -> Vec<String> {
        fs::read_dir(self.0.path())
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect()
    }
}

impl CommandOutput {
    /// Asserts a refusal of invalid input whose message contains `parts`.
    fn assert_refused(&self, parts: &[&str]) {
        assert_eq!(self.code, Some(2), "{}{}", self.stdout, self.stderr);
        assert!(self.stderr.starts_with("error: "), "{}", self.stderr);
        for part in parts {
            assert!(self.stderr.contains(part), "no {part:?} in {}", self.stderr);
        }
        assert_eq!(self.stdout, "");
    }
}

const GOOD: [&str; 3] = ["--local", "--training-data", "d"];

#[test]
fn an_invalid_option_is_refused_with_its_name_and_valid_values() {
    let table: &[(&[&str], &[&str])] = &[
        (&["--num-workers", "0"], &["--num-workers", "from 1 to 16384"]),
        (&["--num-workers", "many"], &["--num-workers", "'many'", "from 1 to 16384"]),
        (
            &["--num-workers", "20000", "--max-workers", "20000"],
            &["--num-workers", "from 1 to 16384"],
        ),
        (&["--min-workers", "3"], &["--min-workers 3", "--num-workers 2"]),
        (&["--num-workers", "5", "--max-workers", "4"], &["--num-workers 5", "--max-workers 4"]),
        (&["--num-epochs", "0"], &["--num-epochs", "from 1"]),
        (&["--max-steps", "0"], &["--max-steps", "from 1"]),
        (&["--global-batch-size", "0"], &["--global-batch-size", "from 1"]),
        (&["--minibatch-size", "0"], &["--minibatch-size", "from 1"]),
        (
            &["--minibatch-size", "8", "--global-batch-size", "8"],
            &["--minibatch-size", "cannot be used with"],
        ),
        (
            &["--deterministic", "--minibatch-size", "8"],
            &["--deterministic", "--global-batch-size"],
        ),
        (&["--deterministic", "--wire-dtype", "bf16"], &["--deterministic", "--wire-dtype f32"]),
        (&["--param-dtype", "bf16"], &["--param-dtype", "f32 without --shard-optimizer"]),
        (
            &["--deterministic", "--global-batch-size", "4096", "--micro-batch", "1"],
            &["--deterministic", "--micro-batch 4 or more"],
        ),
        (&["--seed", "-1"], &["--seed", "'-1'", "from 0 to 18446744073709551615"]),
        (&["--metrics-port", "99999"], &["--metrics-port", "from 0 (a free one) to 65535"]),
        (&["--deadline", "1y"], &["--deadline", "for example `30s`", "at most 30days"]),
        (&["--deadline", "soon"], &["--deadline", "it must be a duration, for example `30s`"]),
        (&["--max-worker-restarts", "x"], &["--max-worker-restarts", "'x'"]),
        (&["--master-timeout", "soon"], &["--master-timeout", "30s"]),
        (&["--master-timeout", "1ms"], &["--master-timeout", "at least 1s"]),
        (&["--job-name", "My_Job"], &["--job-name", "lower-case", "mnist-1"]),
        (&["--job-name", "../x"], &["--job-name", "lower-case"]),
        (&["--checkpoint-dir", "ftp://a/b"], &["--checkpoint-dir", "s3://"]),
        (&["--checkpoint-dir", "none", "--checkpoint-every", "200"], &["--checkpoint-dir"]),
        (
            &["--checkpoint-dir", "c", "--checkpoint-every", "0"],
            &["--checkpoint-every", "`200`", "`30s`"],
        ),
        (&["--checkpoint-dir", "c", "--checkpoint-keep", "0"], &["--checkpoint-keep", "0"]),
        (&["--resume-from", ""], &["--resume-from"]),
        (&["--evaluate-every", "10"], &["--validation-data"]),
        (&["--validation-data", "v", "--early-stopping", "2"], &["--evaluate-every"]),
        (&["--validation-data", "v", "--best-metric", "loss:most"], &["--best-metric", "max"]),
        (&["--nonsense"], &["--nonsense"]),
        (&["--job-dir", "/dev/null/job"], &["/dev/null/job", "--job-dir"]),
        (&["--summary", "absent/summary.json"], &["absent/summary.json", "--summary"]),
        (&["--summary", "/"], &["summary", "directory"]),
    ];
    for (options, parts) in table {
        let home = Home::new();
        let options: Vec<&str> = GOOD.iter().chain(*options).copied().collect();
        home.train(&options).assert_refused(parts);
        assert_eq!(home.entries(), [""; 0], "left by {options:?}");
    }
}

#[test]
fn in_a_cluster_checkpoints_and_models_must_be_on_a_volume_or_in_s3() {
    let home = Home::new();
    let dry = |options: &[&str]| {
        let image = [
            "--image",
            "team/model:1",
            "--namespace",
            "n",
            "--training-data",
            "/data",
            "--dry-run",
        ];
        home.train(&[&image, options].concat())
    };
    let volume = ["--volume", "claim_name=c,mount_path=/data"];
    for path in ["/data/c", "s3://bucket/c"] {
        let output = dry(&[&volume[..], &["--checkpoint-dir", path]].concat());
        assert!(output.code == Some(0) && output.stdout.contains(path), "{}", output.stderr);
    }
    let best = ["--validation-data", "/data/v", "--best-metric", "m", "--export-best"];
    let exports: [&[&str]; 2] = [&["--export"], &best];
    let folders: [&[&str]; 2] = [&["--checkpoint-dir"], &["--resume-from"]];
    for options in folders.into_iter().chain(exports) {
        let option = options.last().unwrap();
        let outside = ["/elsewhere"];
        dry(&[&volume[..], options, &outside].concat()).assert_refused(&[
            option,
            "/elsewhere",
            "--volume",
        ]);
    }
    let read_only = ["--volume", "claim_name=c,mount_path=/kept,read_only=true"];
    for options in exports {
        for path in ["/data/m", "file:///data/m", "s3://bucket/m"] {
            let output = dry(&[&volume[..], options, &[path]].concat());
            assert!(output.code == Some(0) && output.stdout.contains(path), "{}", output.stderr);
        }
        dry(&[&volume[..], options, &["file:///tmp/m"]].concat()).assert_refused(&["/tmp/m"]);
        dry(&[&read_only[..], options, &["/kept/m"]].concat())
            .assert_refused(&["/kept/m: its --volume is read_only"]);
    }
    // Before anything is created in the cluster.
    dry(&["--summary", "missing/s.json"]).assert_refused(&["can't write the summary to missing"]);
}

#[test]
fn only_an_unfinished_job_without_a_master_is_resumed_and_with_its_original_options() {
    let home = Home::new();
    for (option, value) in
        [("--num-workers", "3"), ("--training-data", "d"), ("--summary", "s"), ("--seed", "1")]
    {
        let output = home.run(&["train", "--resume", "./job", option, value]);
        output.assert_refused(&["--resume", option, "cannot be used with"]);
    }
    home.train(&["--resume", "./job"]).assert_refused(&[
        "--resume",
        "PROGRAM",
        "cannot be used with",
    ]);
    home.run(&["train", "--resume", "./job"]).assert_refused(&["no such job", "./job"]);
    assert_eq!(home.entries(), [""; 0]);
    let dir = JobDir::create(&home.path("job")).unwrap();
    let running = home.run(&["train", "--resume", "./job", "--local"]);
    running.assert_refused(&["/job", "still running", "nothing to resume"]);
    fs::write(dir.summary_path(), "{}").unwrap();
    drop(dir);
    home.run(&["train", "--resume", "./job", "--quiet"]).assert_refused(&[
        "/job",
        "has ended",
        "summary.json",
    ]);
    fs::remove_file(home.path("job/summary.json")).unwrap();
    home.run(&["train", "--resume", "./job"]).assert_refused(&["/job", "start it again"]);
    let other = "{\"version\": 9, \"release\": \"7.0.0\"}";
    fs::write(home.path("job/job.json"), other).unwrap();
    home.run(&["train", "--resume", "./job"]).assert_refused(&[
        "job.json",
        "format 9 (elasticdl 7.0.0)",
        "continues jobs of format",
    ]);
    fs::write(home.path("job/job.json"), "null").unwrap();
    home.run(&["train", "--resume", "./job"]).assert_refused(&["job.json", "can't use"]);
}

#[test]
fn a_missing_option_is_named() {
    let home = Home::new();
    home.train(&["--training-data", "d"]).assert_refused(&["--local", "cluster"]);
    home.train(&["--local"]).assert_refused(&["--training-data"]);
    home.run(&["train", "--local", "--training-data", "d"]).assert_refused(&["PROGRAM"]);
    assert_eq!(home.run(&[]).code, Some(2));
}

#[test]
fn a_program_that_cannot_run_is_refused() {
    let home = Home::new();
    let train =
        |program: &str| home.run(&["train", "--local", "--training-data", "d", "--", program]);
    train("no-such-program").assert_refused(&[
        "`no-such-program`",
        "$PATH",
        "./target/release/no-such-program",
    ]);
    train("./absent").assert_refused(&["./absent", "No such file"]);
    train("/").assert_refused(&["not a file"]);
    train("").assert_refused(&["empty"]);
    fs::write(home.path("my-script"), "#!/bin/sh\n").unwrap();
    fs::set_permissions(home.path("my-script"), fs::Permissions::from_mode(0o644)).unwrap();
    train("./my-script").assert_refused(&["./my-script", "not executable", "chmod +x"]);
    train("my-script").assert_refused(&["`my-script`", "prefix its name with ./"]);
    assert_eq!(home.entries(), ["my-script"]);
}

#[test]
fn a_directory_in_which_a_job_runs_is_refused() {
    let home = Home::new();
    let running = JobDir::create(&home.path("state/elasticdl/mnist")).unwrap();
    running.publish("127.0.0.1:9".parse().unwrap(), None).unwrap();
    let token = fs::read(running.token_path()).unwrap();
    let pid = format!("process {}", std::process::id());
    let options: Vec<&str> = GOOD.into_iter().chain(["--job-name", "mnist"]).collect();
    home.train(&options).assert_refused(&["already running", &pid, "--job-name"]);
    assert_eq!(fs::read(running.token_path()).unwrap(), token);
}

#[test]
fn commands_for_an_absent_job_report_that() {
    let home = Home::new();
    home.run(&["status", "absent"]).assert_refused(&["no such job", "elasticdl/absent"]);
    home.run(&["scale", "absent", "--num-workers", "3"]).assert_refused(&["no such job"]);
    home.run(&["scale", "absent", "--num-workers", "0"])
        .assert_refused(&["--num-workers", "from 1"]);
    home.run(&["scale", "absent"]).assert_refused(&["--num-workers", "--max-workers", "--weight"]);
    home.run(&["scale", "absent", "--weight", "0.01"]).assert_refused(&["from 0.1 to 10"]);
    let ended = JobDir::create(&home.path("state/elasticdl/mnist")).unwrap();
    fs::write(ended.summary_path(), "{}").unwrap();
    drop(ended);
    for job in ["mnist", "./state/elasticdl/mnist"] {
        let output = home.run(&["status", job]);
        assert_eq!(output.code, Some(1), "{}", output.stderr);
        assert!(
            output.stderr.contains("has ended") && output.stderr.contains("summary.json"),
            "{}",
            output.stderr
        );
    }
}

#[test]
fn a_master_that_was_killed_is_reported_as_not_running() {
    let home = Home::new();
    let killed = JobDir::create(&home.path("killed")).unwrap();
    // A port that was free a moment ago, without a listener.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    killed.publish(port, None).unwrap();
    let output = home.run(&["status", "./killed"]);
    assert_eq!(output.code, Some(1), "{}", output.stderr);
    assert!(output.stderr.contains("does not answer"), "{}", output.stderr);
}

/// A job whose program is a shell script.
fn job<'a>(options: &[&'a str], script: &'a str) -> Vec<&'a str> {
    let mut args = vec!["train", "--local", "--training-data", "d", "--job-dir", "job"];
    args.extend(options);
    args.extend(["--", "/bin/sh", "-c", script]);
    args
}

#[test]
fn a_job_whose_program_fails_reports_why_and_writes_its_summary() {
    let home = Home::new();
    let script = "echo oh no >&2; exit 3";
    let output = home.run(&job(&["--max-worker-restarts", "0", "--summary", "mine.json"], script));
    assert_eq!(output.code, Some(1), "{}{}", output.stdout, output.stderr);
    assert!(
        output.stdout.contains("failed after") && output.stdout.contains("mine.json"),
        "{}",
        output.stdout
    );
    // The error contains the last output of the program.
    let expected = "exited with code 3 and never joined the job; giving up after 1 \
                    failure without progress (--max-worker-restarts 0); its log ends with:\n    \
                    oh no\n";
    assert!(
        output.stderr.contains("\nerror: worker ") && output.stderr.ends_with(expected),
        "{}",
        output.stderr
    );
    let summary = fs::read(home.path("mine.json")).unwrap();
    assert_eq!(fs::read(home.path("job/summary.json")).unwrap(), summary);
    let json: serde_json::Value = serde_json::from_slice(&summary).unwrap();
    assert_eq!(json["state"], "failed");
    assert!(json["error"].as_str().unwrap().ends_with("\n    oh no"), "{}", json["error"]);
    let log = |name: &str| fs::read_to_string(home.path("job/logs").join(name)).unwrap();
    assert!(!log("master.log").is_empty());
    let workers: Vec<_> = fs::read_dir(home.path("job/logs"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with("worker-"))
        .collect();
    assert!(workers.iter().any(|name| log(name) == "oh no\n"), "{workers:?}");
    assert!(!home.path("job/master.json").exists());
}

#[test]
fn a_quiet_job_prints_only_its_error() {
    let home = Home::new();
    let output = home.run(&job(&["--max-worker-restarts", "0", "--quiet"], "exit 3"));
    assert_eq!((output.code, output.stdout.as_str()), (Some(1), ""));
    assert_eq!(output.stderr.lines().count(), 1, "{}", output.stderr);
    assert!(output.stderr.starts_with("error: "), "{}", output.stderr);
    let logs = home.path("job/logs").canonicalize().unwrap();
    assert!(output.stderr.contains(&format!("(logs: {})", logs.display())), "{}", output.stderr);
}

#[test]
fn the_last_output_of_a_program_is_shown_without_escape_sequences() {
    let home = Home::new();
    let script = r"printf '\033[31merror:\033[0m no option --hiden\n' >&2; exit 2";
    let output = home.run(&job(&["--max-worker-restarts", "0", "--quiet"], script));
    assert!(
        output.stderr.contains("its log ends with:\n    error: no option --hiden\n(logs: /"),
        "{}",
        output.stderr
    );
}

#[test]
fn a_folder_that_belongs_to_no_job_is_neither_written_to_nor_deleted() {
    let home = Home::new();
    fs::write(home.path("main.rs"), "mine").unwrap();
    let here = [&GOOD[..], &["--job-dir", "."]].concat();
    home.train(&here).assert_refused(&["it contains", "--job-dir", "empty folder"]);
    home.train(&[&here[..], &["--dry-run"]].concat()).assert_refused(&["it contains"]);
    home.train(&[&here[..], &["--detach"]].concat()).assert_refused(&["it contains"]);
    home.run(&["delete", "./"]).assert_refused(&["no such job"]);
    assert_eq!(home.entries(), ["main.rs"]);
}

#[test]
fn deleting_a_job_keeps_files_that_it_has_not_written() {
    let home = Home::new();
    home.run(&job(&["--max-worker-restarts", "0", "--quiet"], "exit 3"));
    fs::write(home.path("job/notes.txt"), "mine").unwrap();
    // The next job in the folder leaves the file alone.
    home.run(&job(&["--max-worker-restarts", "0", "--quiet"], "exit 3"));
    let output = home.run(&["delete", "./job"]);
    assert_eq!((output.code, output.stderr.as_str()), (Some(0), ""));
    assert!(
        output.stdout.contains("./job is deleted") && output.stdout.contains("job/notes.txt"),
        "{}",
        output.stdout
    );
    let left: Vec<_> =
        fs::read_dir(home.path("job")).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left, ["notes.txt"]);
    home.run(&["delete", "./job"]).assert_refused(&["no such job"]);
    home.run(&job(&["--job-name", "j", "--max-worker-restarts", "0"], "exit 3"));
    assert!(home.path("job/notes.txt").exists());
}

#[test]
fn options_of_a_cluster_are_refused_without_one() {
    let home = Home::new();
    let table: [&[&str]; 6] = [
        &["--master-pod-template", "f.yaml"],
        &["--env", "A=b"],
        &["--namespace", "n"],
        &["--service-account", "s"],
        &["--ttl-after-finished", "1h"],
        &["--volume", "claim_name=c,mount_path=/data"],
    ];
    for option in table {
        home.train(&[&GOOD[..], option].concat()).assert_refused(&[
            "--local",
            option[0],
            "cannot be used with",
        ]);
        let resume = [&["train", "--resume", "./job"], option].concat();
        home.run(&resume).assert_refused(&["--resume", option[0], "cannot be used with"]);
    }
    home.run(&["train", "--resume", "./job", "--dry-run"])
        .assert_refused(&["--resume", "--dry-run"]);
    assert_eq!(home.entries(), [""; 0]);
}

#[test]
fn a_local_dry_run_describes_what_would_be_started() {
    let home = Home::new();
    let options = [
        "--job-name",
        "mnist",
        "--max-steps",
        "7",
        "--checkpoint-dir",
        "/c",
        "--export",
        "m",
        "--dry-run",
    ];
    let output = home.train(&[&GOOD[..], &options].concat());
    assert_eq!((output.code, output.stderr.as_str()), (Some(0), ""));
    let directory = home.path("state/elasticdl/mnist");
    for part in [
        "job mnist",
        "/bin/sh -c 'touch",
        "(dry run)",
        "at most 7 steps",
        "/c, every",
        directory.to_str().unwrap(),
    ] {
        assert!(output.stdout.contains(part), "no {part:?} in {}", output.stdout);
    }
    assert_eq!(home.entries(), [""; 0]);
}

#[test]
fn a_job_in_the_background_is_followed_and_stopped_by_its_name() {
    let home = Home::new();
    let mut args =
        vec!["train", "--training-data", "d", "--local", "--detach", "--job-name", "mnist"];
    args.extend(["--", "/bin/sh", "-c", "exec sleep 100000"]);
    let output = home.run(&args);
    assert_eq!((output.code, output.stderr.as_str()), (Some(0), ""), "{}", output.stdout);
    assert!(
        output.stdout.contains("elasticdl status mnist")
            && output.stdout.contains("elasticdl stop mnist")
    );
    let status = home.run(&["status", "mnist", "--json"]);
    assert!(status.stdout.contains(r#""job": "mnist""#), "{}{}", status.stdout, status.stderr);
    let pid = output.stdout.split("process ").nth(1).unwrap().lines().next().unwrap().to_owned();
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    // State, parent, process group, session.
    assert_eq!(
        (fields[2], fields[3]),
        (pid.as_str(), pid.as_str()),
        "the master leads its own session"
    );
    // The name is in use, so the command itself refuses another job.
    home.run(&args).assert_refused(&["already running", &pid]);
    assert_eq!(home.run(&["stop", "mnist"]).code, Some(0));
    let watched = home.run(&["status", "mnist", "--watch"]);
    assert!(watched.stdout.contains("stopped after"), "{}{}", watched.stdout, watched.stderr);
    assert_eq!(home.run(&["delete", "mnist"]).code, Some(0));
    assert!(!home.path("state/elasticdl/mnist").exists());
}

#[test]
fn a_signal_stops_the_job_and_its_processes_and_sets_the_exit_code() {
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let home = Home::new();
        let pipe = home.path("pipe");
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let script = "exec 3>pipe; echo started >&3; exec sleep 100000";
        let mut command = home.command(&job(&[], script));
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(fs::File::open(&pipe).unwrap()).lines();
        assert_eq!(lines.next().unwrap().unwrap(), "started");
        let status = home.run(&["status", "./job", "--json"]);
        let json: serde_json::Value = serde_json::from_str(&status.stdout).expect(&status.stderr);
        assert_eq!(json["workers_desired"], 2);
        let scaled = home.run(&["scale", "./job", "--num-workers", "4"]);
        assert_eq!(scaled.stdout, "workers: 2 -> 4\n", "{}", scaled.stderr);
        home.run(&["scale", "./job", "--weight", "2"]).assert_refused(&["in no cluster"]);
        home.run(&["scale", "./job", "--num-workers", "9"]).assert_refused(&["1 to 8 workers"]);
        let scaled = home.run(&["scale", "./job", "--max-workers", "3", "--min-workers", "2"]);
        assert_eq!(scaled.stdout, "workers: 4 -> 3 (limits: 2 to 3)\n", "{}", scaled.stderr);
        let status = home.run(&["status", "./job"]);
        assert!(status.stdout.contains("3 desired (2 to 3)"), "{}", status.stdout);
        let pid = Pid::from_raw(child.id().cast_signed()).unwrap();
        kill_process(pid, signal).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{}", String::from_utf8_lossy(&output.stderr));
        // The last process that had the pipe open is gone.
        assert!(lines.all(|line| line.unwrap() == "started"));
        let summary = fs::read_to_string(home.path("job/summary.json")).unwrap();
        assert!(summary.contains(r#""state": "stopped""#), "{summary}");
    }
}

#[test]
fn the_help_names_each_option_within_100_columns() {
    let home = Home::new();
    let help = home.run(&["train", "--help-all"]);
    assert_eq!((help.code, help.stderr.as_str()), (Some(0), ""));
    let options = [
        "--local",
        "--job-name",
        "--job-dir",
        "--num-workers",
        "--min-workers",
        "--max-workers",
        "--max-worker-restarts",
        "--master-timeout",
        "--wire-dtype",
        "--channels",
        "--link-encryption",
        "--shard-optimizer",
        "--param-dtype",
        "--table-replicas",
        "--table-lag",
        "--table-servers",
        "--on-rows-lost",
        "--table-memory",
        "--export-changes-since",
        "--training-data",
        "--num-epochs",
        "--max-steps",
        "--global-batch-size",
        "--minibatch-size",
        "--shuffle",
        "--seed",
        "--summary",
        "--quiet",
        "Examples:",
        "Exit codes:",
        "Workers:",
        "Data and steps:",
        "[default: 30s; with --image 15min",
        "[default: 2]",
        "--workers-per-pod",
        "-- <PROGRAM> [ARGS]...",
        "PROGRAM is your training program",
    ];
    for part in options {
        assert!(help.stdout.contains(part), "no {part:?} in {}", help.stdout);
    }
    let short = home.run(&["train", "--help"]).stdout;
    assert!(!short.contains("--channels") && short.ends_with("train --help-all\n"), "{short}");
    let widest = help.stdout.lines().map(|line| line.chars().count()).max();
    assert!(widest <= Some(100), "{widest:?} columns");
    for command in ["train", "status", "scale"] {
        assert!(home.run(&["--help"]).stdout.contains(command));
        assert_eq!(home.run(&[command, "-h"]).code, Some(0));
    }
    assert!(home.run(&["--version"]).stdout.starts_with("elasticdl "));
    assert!(!Path::new(&home.path("state")).exists());
}
