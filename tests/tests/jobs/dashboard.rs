//! The page of a job shows a killed worker, its pause and where time went, in headless Chromium;
//! requests without the key, of another host or page are refused; the report says the same after
//! the end.

use std::path::{Path, PathBuf};
use std::process::Command as Process;

use elasticdl_proto::{Cause, WorkerId};
use elasticdl_tests::{Browser, JobFixture, Page, Running, send};
use rustix::process::Signal;
use serde_json::Value;

use crate::PROGRAMS;
use crate::inference::InferenceFixture;

const RECORDS: u64 = 3000;

/// The page of the job in this directory, as `elasticdl dashboard` prints it.
fn page_of(job_dir: &Path) -> Page {
    let output = Process::new(PROGRAMS.elasticdl).arg("dashboard").arg(job_dir).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Page::at(String::from_utf8(output.stdout).unwrap().trim())
}

/// A job of three workers that trains until it is stopped, and its directory.
fn start() -> (JobFixture, Running, PathBuf) {
    let fixture = JobFixture {
        records: RECORDS,
        epochs: 100_000,
        micros_per_record: 100,
        global_batch_size: 30,
        ..JobFixture::new(PROGRAMS, 3)
    };
    let mut job = fixture.command(0).option("job-name", "counted").start();
    job.wait_for_work_of(3);
    let job_dir = fixture.path("job");
    (fixture, job, job_dir)
}

/// Kills a worker, and waits until another one has taken its place and the pause is known.
fn kill_a_worker(job: &mut Running) -> WorkerId {
    let (victim, pid) = job.workers().into_iter().next_back().unwrap();
    send(pid, Signal::KILL);
    job.wait_for_members_without(3, &[victim]);
    job.wait_for("the pause", |status| {
        status.memberships.iter().any(|m| m.cause == Cause::Lost && m.gap_ms.is_some())
    });
    victim
}

#[test]
fn the_page_is_for_those_with_the_key_on_this_machine() {
    let (_fixture, mut job, job_dir) = start();
    let victim = kill_a_worker(&mut job);
    let page = page_of(&job_dir);
    let (own, key) = (page.address.as_str(), page.key.as_str());
    let scale =
        |host: &str, key: &str, body: &str| page.ask("POST /api/scale", (host, key), body).0;
    let two = r#"{"num_workers":2}"#;
    let refused = [
        scale(own, "", two),
        scale(own, &"0".repeat(32), two),
        scale("rebound.example", key, two),
        page.ask("GET /api/job", (own, ""), "").0,
        page.ask("GET /", ("rebound.example", key), "").0,
        scale(own, key, r#"{"num_workers":1000}"#),
    ];
    assert_eq!(refused, [401, 403, 403, 401, 403, 400]);
    assert_eq!(job.status().workers_desired, 3);
    let seen = page.job();
    let life = &seen["history"]["workers"][victim.0.to_string()];
    assert_eq!((&life["end"], &life["end_text"]), (&"killed".into(), &"killed by SIGKILL".into()));
    assert!(life["joined_s"].as_f64() < life["ended_s"].as_f64(), "{life}");
    assert!(life["times"]["compute_us"].as_u64() > Some(0), "{life}");
    assert!(seen["history"]["goodput"]["value"].as_f64() > Some(0.0), "{seen}");
    let survivor = job.workers().into_keys().next().unwrap().0.to_string();
    // Each survivor reports its own pause.
    job.wait_for("the survivor's pause", |_| {
        page.job()["history"]["workers"][&survivor]["times"]["recovery_us"].as_u64() > Some(0)
    });
    assert_eq!(page.ask("POST /api/inspect", (own, ""), "{}").0, 401);
    let (code, text) = page.ask("POST /api/inspect", (own, key), "{}");
    assert!(code == 200 && text.contains(&format!("worker {survivor}, rank ")), "{text}");
    assert_eq!(scale(own, key, two), 200);
    job.wait_for_members(2);
    let log = std::fs::read_to_string(job_dir.join("logs/master.log")).unwrap();
    assert!(log.contains(&format!("dashboard at http://{own}/")) && !log.contains(key), "{log}");
    assert_eq!(page.ask("POST /api/stop", (own, key), "{}").0, 200);
    let ended = job.wait();
    ended.assert_outcome(143, "stopped");
    assert!(!ended.output.contains(key), "{}", ended.output);
}

#[test]
fn the_next_master_continues_page_history_and_limits() {
    let (_fixture, mut job, job_dir) = start();
    let page = page_of(&job_dir);
    let scaled = job.command(&["scale", "--min-workers", "2", "--max-workers", "4"]);
    assert_eq!(scaled, "workers: 3 -> 3 (limits: 2 to 4)\n");
    let limits = serde_json::json!({"min": 2, "max": 4, "step": 1});
    job.wait_for("limits on the page", |_| page.job()["scale"] == limits);
    let five = || page.ask("POST /api/scale", (&page.address, &page.key), r#"{"num_workers":5}"#);
    assert!(five().0 == 400 && five().1.contains("2 to 4 workers"), "{:?}", five());
    job.wait_for("a stored history", |_| job_dir.join("history.json").is_file());
    let before = page.job();
    job.kill_master();
    job.resume();
    job.wait_for_return_of(3);
    assert_eq!(page_of(&job_dir).link, page.link);
    assert_eq!((five().0, &page.job()["scale"]), (400, &limits));
    let after = page.job();
    for pointer in ["/history/workers/1/launched_s", "/history/curves/points/0/step"] {
        assert_eq!(after.pointer(pointer), before.pointer(pointer), "{pointer}");
    }
    let restart = &after["history"]["workers"]["1"];
    assert_eq!(restart["ended_s"], Value::Null, "{restart}");
    job.signal(Signal::TERM);
    assert_eq!(job.wait().code, Some(143));
}

#[test]
fn a_job_without_a_dashboard_has_a_report() {
    let fixture = JobFixture { micros_per_record: 0, ..JobFixture::new(PROGRAMS, 2) };
    let job = fixture.command(0).option("dashboard-port", "none").start();
    job.wait().assert_outcome(0, "completed");
    let (job_dir, html) = (fixture.path("job"), fixture.path("report.html"));
    let run = |command: &str, arguments: &[&Path]| {
        let output = Process::new(PROGRAMS.elasticdl)
            .arg(command)
            .arg(&job_dir)
            .args(arguments)
            .output()
            .unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let (code, error) = run("dashboard", &[]);
    assert!(code == Some(1) && error.contains("elasticdl report"), "{error}");
    assert_eq!(run("report", &["--html".as_ref(), &html]), (Some(0), String::new()));
    let report = std::fs::read_to_string(&html).unwrap();
    let data = report.split("id=\"report\">").nth(1).unwrap().split("</script>").next().unwrap();
    let data: Value = serde_json::from_str(data).unwrap();
    assert_eq!(data["summary"]["records"]["missing"], 0);
    assert!(!data["history"]["curves"]["points"].as_array().unwrap().is_empty(), "{data}");
    // Of a job of an earlier release.
    std::fs::remove_file(job_dir.join("history.json")).unwrap();
    assert_eq!(run("report", &["--html".as_ref(), &html]), (Some(0), String::new()));
    std::fs::write(job_dir.join("history.json"), "{\"format\":9}").unwrap();
    let (code, error) = run("report", &["--html".as_ref(), &html]);
    assert!(code == Some(1) && error.contains("format 9"), "{error}");
}

/// The tags of a document that have this attribute.
fn tags<'a>(document: &'a str, attribute: &str) -> Vec<&'a str> {
    let tags = document.split('<').skip(1).filter_map(|rest| rest.split('>').next());
    tags.filter(|tag| tag.contains(attribute)).collect()
}

/// The text of the element that has this attribute.
fn text_of<'a>(document: &'a str, attribute: &str) -> &'a str {
    let rest = document.split_once(attribute).unwrap_or_else(|| panic!("no {attribute}")).1;
    rest.split_once('>').unwrap().1.split('<').next().unwrap()
}

#[test]
#[ignore = "needs Chromium"]
fn a_browser_shows_a_job_whose_worker_was_killed_and_its_report() {
    let browser = Browser::find();
    let (fixture, mut job, job_dir) = start();
    let victim = kill_a_worker(&mut job);
    let page = browser.dump(&page_of(&job_dir).link);
    assert_eq!(text_of(&page, "id=\"connection\""), "Live", "{page}");
    assert_eq!(text_of(&page, "id=\"job\""), "counted");
    let state = &tags(&page, "id=\"state\"")[..];
    assert!(state[0].contains("data-state=\"running\""), "{state:?}");
    assert_shows_the_loss(&page, victim);
    assert_eq!(tags(&page, "data-end=\"\"").len(), 3, "three workers live");
    let controls = tags(&page, "id=\"controls\"");
    assert!(!controls[0].contains("hidden"), "{controls:?}");
    assert_eq!(text_of(&page, "data-name=\"Workers\""), "3 of 3");
    let expected = (RECORDS * 100_000).to_string();
    let ledger = tags(&page, "id=\"ledger\"")[0];
    assert!(ledger.contains(&format!("data-expected=\"{expected}\"")), "{ledger}");
    assert!(ledger.contains("data-repeated=\"0\""), "{ledger}");
    assert!(!ledger.contains("data-counted=\"0\""), "{ledger}");
    let wrong = browser.dump(&page_of(&job_dir).link.replace('#', "#0"));
    assert!(text_of(&wrong, "id=\"connection\"").contains("does not open this job"), "{wrong}");
    assert!(!wrong.contains("counted"), "{wrong}");

    job.signal(Signal::TERM);
    let ended = job.wait();
    let html = fixture.path("report.html");
    let written = Process::new(PROGRAMS.elasticdl)
        .arg("report")
        .arg(&job_dir)
        .arg("--html")
        .arg(&html)
        .status()
        .unwrap();
    assert!(written.success());
    let report = browser.dump(&format!("file://{}", html.display()));
    assert!(tags(&report, "id=\"state\"")[0].contains("data-state=\"stopped\""), "{report}");
    assert_shows_the_loss(&report, victim);
    let ledger = tags(&report, "id=\"ledger\"")[0];
    let counted = format!("data-counted=\"{}\"", ended.summary().records.counted);
    assert!(ledger.contains(&counted) && ledger.contains("data-missing=\"0\""), "{ledger}");
    assert!(tags(&report, "id=\"controls\"")[0].contains("hidden"));
}

#[test]
#[ignore = "needs Chromium"]
fn the_page_of_an_evaluation_has_its_metrics_and_nothing_of_a_training_job() {
    let (browser, fixture) = (Browser::find(), InferenceFixture::new());
    assert_eq!(fixture.evaluate(2).run().code, Some(0));
    let html = fixture.path("report.html");
    let mut command = Process::new(PROGRAMS.elasticdl);
    command.arg("report").arg(fixture.path("job")).arg("--html").arg(&html);
    assert!(command.status().unwrap().success());
    let page = browser.dump(&format!("file://{}", html.display()));
    for name in ["harmonic", "loss", "Shards done", "Done", "Time", "Records/s", "Workers"] {
        assert!(page.contains(&format!("data-name=\"{name}\"")), "{name}: {page}");
    }
    for name in ["Loss", "Goodput", "Step", "Epoch", "Generation"] {
        assert!(!page.contains(&format!("data-name=\"{name}\"")), "{name}: {page}");
    }
}

/// Asserts what every page of a job shows that has lost `victim`.
fn assert_shows_the_loss(page: &str, victim: WorkerId) {
    let bars = tags(page, &format!("data-worker=\"{victim}\""));
    assert!(bars.len() == 1 && bars[0].contains("data-end=\"killed\""), "{bars:?}");
    let lines = tags(page, "data-cause=\"lost\"");
    assert!(lines.len() == 1 && lines[0].contains(" first step "), "{lines:?}");
    assert!(lines[0].contains(&format!("worker {victim} lost")), "{lines:?}");
    assert!(text_of(page, "data-name=\"Goodput\"").ends_with(" %"));
    assert!(page.contains(&format!("worker {victim} killed by SIGKILL")), "the event is listed");
    let charts = tags(page, "aria-label=\"Loss: first ");
    assert!(charts.len() == 1, "{charts:?}");
    assert!(tags(page, "aria-label=\"compute ").len() >= 4, "where time went, by worker");
}
