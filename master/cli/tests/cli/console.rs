//! What commands print of jobs: JSON lines, and the list.

use std::fs;
use std::time::{Duration, SystemTime};

use elasticdl_master::jobdir::JobDir;
use serde_json::{Value, json};

use crate::{Home, job};

fn read(line: &str) -> Value {
    serde_json::from_str(line).unwrap_or_else(|error| panic!("{error} in {line}"))
}

#[test]
fn every_line_of_a_json_log_is_an_object() {
    let home = Home::new();
    let options = ["--max-worker-restarts", "0", "--log-format", "json"];
    let output = home.run(&job(&options, r"printf '\033[31moh no\n' >&2; exit 3"));
    assert_eq!(output.code, Some(1), "{}{}", output.stdout, output.stderr);
    let lines: Vec<Value> = output.stderr.lines().map(read).collect();
    let (last, before) = lines.split_last().unwrap();
    let of_master = fs::read_to_string(home.path("job/logs/master.log")).unwrap();
    let named = |line: &Value| line["job"].is_string() && line["run_id"].is_string();
    assert!(of_master.lines().map(read).all(|line| named(&line)), "{of_master}");
    assert!(before.iter().all(|line| line["kind"] == "event" && line["text"].is_string()));
    assert_eq!(last["kind"], "error");
    assert!(last["text"].as_str().unwrap().ends_with("its log ends with:\n    oh no"), "{last}");
    assert_eq!(output.stdout.lines().count(), 1, "{}", output.stdout);
    let summary = read(&output.stdout);
    assert_eq!((&summary["state"], &summary["error"]), (&json!("failed"), &last["text"]));
}

/// What a job quotes is for people.
#[test]
fn a_log_in_json_is_quoted_as_text() {
    let home = Home::new();
    let line = json!({
        "timestamp": "2026-01-02T03:04:05.000006Z", "level": "ERROR", "target": "elasticdl::run",
        "message": "this worker failed", "job": "j", "run_id": "r", "worker": 1,
        "fields": {"error": "no disk"},
    });
    let output = home.run(&job(&["--max-worker-restarts", "0"], &format!("echo '{line}'; exit 3")));
    let quoted = "    2026-01-02T03:04:05.000006Z ERROR elasticdl::run: this worker failed \
                  error=\"no disk\"\n";
    assert!(output.stderr.contains(quoted), "{}", output.stderr);
    // Such a line says whose it is.
    let logs = home.run(&["logs", "./job", "--all"]);
    let line = line.to_string();
    assert!(logs.stdout.lines().any(|printed| printed == line), "{}", logs.stdout);
}

#[test]
fn refusals_and_warnings_of_a_json_console_are_objects() {
    let home = Home::new();
    for refused in [["--listen", "192.0.2.1"], ["--spares", "9999"]] {
        let options = [refused, ["--log-format", "json"]].concat();
        let output = home.run(&job(&options, "exit 3"));
        assert_eq!(output.code, Some(2), "{}{}", output.stdout, output.stderr);
        let lines: Vec<Value> = output.stderr.lines().map(read).collect();
        let [line] = &*lines else { panic!("{lines:?}") };
        assert!(line["kind"] == "error" && line["time"].is_string(), "{line}");
    }
    let file = home.path("job.toml");
    fs::write(&file, "log-format = \"json\"\nnum-workers = 0\n").unwrap();
    let file = file.to_str().unwrap();
    for (arguments, words) in [
        (&["--local", "--log-format", "json", "--num-workers", "0"][..], "from 1 to"),
        (&["--log-format=json", "--local", "--num-workrs", "1"], "--num-workrs"),
        (&["--local", "--log-format", "json", "--config", "none.toml"], "none.toml"),
        (&["--local", "--config", file], "from 1 to"),
    ] {
        let output = home.run(&[&["train"], arguments, &["--", "sh"]].concat());
        assert_eq!((output.code, &*output.stdout), (Some(2), ""), "{}", output.stderr);
        let lines: Vec<Value> = output.stderr.lines().map(read).collect();
        let says = |line: &Value| line["text"].as_str().is_some_and(|text| text.contains(words));
        assert!(lines.iter().any(says), "{words}: {lines:?}");
    }
    // What follows `--` are words of the program.
    let output = home.run(&["train", "--locl", "--", "sh", "--log-format", "json"]);
    assert!(output.stderr.starts_with("error: "), "{}", output.stderr);
}

#[test]
fn a_master_whose_log_is_json_reports_its_failure_there() {
    let home = Home::new();
    let master = |format| {
        let args = ["master", "--job-name", "j", "--pod", "p/u", "--log-format", format];
        let output = home.command(&args).env_remove("KUBECONFIG").env("HOME", "/none").output();
        let output = output.unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let (_, stderr) = master("json");
    let lines: Vec<Value> = stderr.lines().map(read).collect();
    let [line] = &*lines else { panic!("{lines:?}") };
    assert_eq!((&line["level"], &line["job"]), (&json!("ERROR"), &json!("j")));
    assert!(line["message"].as_str().unwrap().contains("cluster"), "{line}");
    let (code, stderr) = master("jsn");
    let wanted = "`jsn` is no format of logs; it must be json or text";
    assert!(code == Some(2) && stderr.contains(wanted), "{stderr}");
}

#[test]
fn the_error_of_a_job_is_printed_once_below_its_summary() {
    let home = Home::new();
    let output = home.run(&job(&["--max-worker-restarts", "0"], "exit 3"));
    assert!(!output.stdout.contains("exited with code 3"), "{}", output.stdout);
    let errors = output.stderr.lines().filter(|line| line.starts_with("error: "));
    assert_eq!(errors.count(), 1, "{}", output.stderr);
}

/// What a command prints on a terminal.
fn on_terminal(home: &Home, no_color: Option<&str>) -> String {
    let program = home.command(&[]).get_program().to_str().unwrap().to_owned();
    let mut command = std::process::Command::new("script");
    // A terminal for the refusal of an unknown option.
    command.args(["-qec", &format!("{program} train --unknown"), "/dev/null"]);
    command.env("TERM", "xterm").env_remove("NO_COLOR").env_remove("CLICOLOR_FORCE");
    if let Some(value) = no_color {
        command.env("NO_COLOR", value);
    }
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// By the rules of no-color.org, an empty value has no effect.
#[test]
fn no_color_removes_all_colours_of_a_terminal() {
    let home = Home::new();
    let escape = '\u{1b}';
    for (no_color, is_coloured) in [(None, true), (Some(""), true), (Some("1"), false)] {
        let printed = on_terminal(&home, no_color);
        assert!(printed.contains("--unknown"), "{printed}");
        assert_eq!(printed.contains(escape), is_coloured, "NO_COLOR={no_color:?}: {printed:?}");
    }
}

#[test]
fn what_programs_print_is_on_the_console_and_in_the_logs_with_their_workers() {
    let home = Home::new();
    let options = ["--tee", "--num-workers", "1", "--max-worker-restarts", "0"];
    let output = home.run(&job(&options, "echo from the program; exit 3"));
    let printed = |text: &str| text.lines().any(|line| line == "[worker 1] from the program");
    assert!(printed(&output.stderr), "{}", output.stderr);
    let logs = home.run(&["logs", "./job", "--all"]);
    assert!(logs.code == Some(0) && printed(&logs.stdout), "{}{}", logs.stdout, logs.stderr);
    // The state of the job is still there for a program.
    let status = home.run(&["status", "./job", "--json"]);
    let json = read(&status.stdout);
    assert_eq!((status.code, &json["has_ended"]), (Some(0), &json!(true)));
    assert_eq!((&json["state"], &json["summary"]["state"]), (&json!("failed"), &json!("failed")));
}

#[test]
fn a_terminal_that_only_shows_text_gets_lines() {
    let home = Home::new();
    let program = home.command(&[]).get_program().to_str().unwrap().to_owned();
    let options = "--local --training-data d --job-dir job --num-workers 1 --max-worker-restarts 0";
    let mut command = std::process::Command::new("script");
    let line = format!("{program} train {options} -- /bin/sh -c 'exit 3'");
    command.args(["-qec", &line, "/dev/null"]).env("TERM", "dumb");
    command.current_dir(home.path("."));
    let output = command.output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(printed.contains(" s  the job failed: worker 1 exited with code 3"), "{printed}");
    assert!(!printed.contains('\u{1b}'), "{printed:?}");
}

#[test]
fn the_list_has_running_jobs_and_the_newest_ended_ones() {
    let home = Home::new();
    let create = |name: &str| JobDir::create(&home.path("state/elasticdl").join(name)).unwrap();
    for number in 0..12_u64 {
        let ended = create(&format!("ended-{number:02}"));
        let summary = json!({"state": "completed", "records": {"expected": 8, "counted": 6}});
        fs::write(ended.summary_path(), summary.to_string()).unwrap();
        // Files that are written within one tick of the clock would be equally old.
        let token = fs::File::options().append(true).open(ended.token_path()).unwrap();
        token.set_modified(SystemTime::now() - Duration::from_secs(60 - number)).unwrap();
    }
    // The master of this job has published an address and does not answer there.
    let running = create("running");
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    running.publish(closed, None).unwrap();
    let list = |options: &[&str]| {
        let output = home.run(&[&["list", "--local"], options].concat());
        assert_eq!(output.code, Some(0), "{}", output.stderr);
        output.stdout
    };
    let table = list(&[]);
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines.len(), 1 + 11 + 1, "{table}");
    assert!(lines[0].ends_with("PROGRESS  WORKERS  AGE"), "{table}");
    assert!(lines[1].starts_with("(this machine)  running   running "), "{table}");
    let newest = "(this machine)  ended-11  completed  75.0 %    -        ";
    assert!(lines[2].starts_with(newest) && lines[2].ends_with(" s"), "{table}");
    assert_eq!(lines[12], "2 older jobs that have ended are not shown: elasticdl list --all");
    assert_eq!(list(&["--all"]).lines().count(), 1 + 13);
    let json = read(&list(&["--json"]));
    assert_eq!(json.as_array().unwrap().len(), 11);
    assert_eq!((&json[1]["job"], &json[1]["has_ended"]), (&json!("ended-11"), &json!(true)));
}
