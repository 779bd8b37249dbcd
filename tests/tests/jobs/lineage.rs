//! `elasticdl lineage` names the steps in which the workers of a job have trained a record, under
//! kills and after an end within an epoch; `train --replay-step` gives the loss that a job has
//! recorded, bit for bit with `--deterministic`, and leaves the job as it was.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Command;

use elasticdl_proto::WorkerId;
use elasticdl_tests::{JobFixture, Programs, send};
use rustix::process::Signal;
use serde_json::Value;

use crate::PROGRAMS;

/// The steps of a record, and the worker that each is the step of.
type Seen = BTreeMap<u64, BTreeMap<u64, BTreeSet<u64>>>;

fn lineage(job: &Path, record: &str) -> Value {
    let output =
        Command::new(PROGRAMS.elasticdl).args(["lineage", "--json"]).arg(job).arg(record).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// What the workers have noted of the records that they have computed, by record and step.
fn seen(traces: &Path, processes: &Path) -> Seen {
    let mut workers = BTreeMap::new();
    for line in fs::read_to_string(processes).unwrap().lines() {
        let numbers: Vec<u64> = line.split(' ').filter_map(|word| word.parse().ok()).collect();
        workers.insert(numbers[1], numbers[0]);
    }
    let mut seen = Seen::new();
    for trace in fs::read_dir(traces).unwrap().map(Result::unwrap) {
        let pid: u64 = trace.file_name().to_str().unwrap().parse().unwrap();
        for line in fs::read_to_string(trace.path()).unwrap().lines() {
            let mut numbers = line.split(' ').map(|word| word.parse::<u64>().unwrap());
            let step = numbers.next().unwrap();
            for record in numbers {
                seen.entry(record).or_default().entry(step).or_default().insert(workers[&pid]);
            }
        }
    }
    seen
}

#[test]
fn the_steps_of_a_record_are_those_in_which_workers_have_seen_it() {
    let fixture = JobFixture { micros_per_record: 1500, ..JobFixture::new(PROGRAMS, 3) };
    let traces = fixture.path("traces");
    fs::create_dir(&traces).unwrap();
    let script = format!("exec \"$@\" --trace {}", traces.display());
    let fixture = JobFixture { script: Some(script), ..fixture };
    let job_dir = fixture.path("job");
    // Two epochs of 125 steps: it ends within the second one.
    let command = fixture.command(5).option("max-steps", "200").option("checkpoint-every", "30");
    let mut job = command.start();
    job.wait_for_first_steps();
    let kept: WorkerId = loop {
        let (worker, pid) = job.members().into_iter().next().unwrap();
        send(pid, Signal::KILL);
        job.wait_for_members_without(3, &[worker]);
        if job.status().generation.0 > 4 || job.status().step > 120 {
            break worker;
        }
    };
    let ended = job.wait();
    assert_eq!(ended.summary().steps, 200, "{}", ended.output);
    assert!(ended.lost().contains(&kept), "{:?}", ended.memberships());
    let seen = seen(&traces, &job_dir.join("processes"));
    let lost: BTreeSet<u64> = ended.lost().iter().map(|worker| worker.0).collect();
    let none = BTreeMap::new();
    // Some of those whose worker has noted nothing are among them, if there are any.
    let unseen = (0..6000).filter(|record| !seen.contains_key(record)).take(9);
    for record in (0..6000).step_by(199).chain(unseen) {
        let steps = seen.get(&record).unwrap_or(&none);
        let lineage = lineage(&job_dir, &record.to_string());
        let rows = lineage["epochs"].as_array().unwrap();
        let trained: Vec<&Value> = rows.iter().filter(|row| row["state"] == "trained").collect();
        let listed: BTreeMap<u64, BTreeSet<u64>> = trained
            .iter()
            .map(|row| {
                let workers = row["workers"].as_array().unwrap();
                (row["step"].as_u64().unwrap(), workers.iter().flat_map(Value::as_u64).collect())
            })
            .collect();
        assert!(!listed.is_empty(), "record {record}: {lineage}");
        assert!(steps.keys().all(|step| listed.contains_key(step)), "record {record}: {lineage}");
        for (step, listed) in &listed {
            match steps.get(step) {
                Some(seen) => {
                    assert!(seen.is_subset(listed), "record {record}, {seen:?}: {lineage}")
                }
                // One that was killed before it knew of the commit has noted nothing.
                None => assert!(!listed.is_disjoint(&lost), "record {record}: {lineage}"),
            }
        }
    }
    let unseen = 6000 - seen.len();
    assert!(unseen <= 24 * lost.len(), "{unseen} records of {} workers", lost.len());
    let first = lineage(&job_dir, "part-000.bin:7");
    assert_eq!(first["record"], 7);
}

/// The files of a job, with their contents.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let path = entry.path();
        match entry.file_type().unwrap().is_dir() {
            true => files.extend(self::files(&path)),
            false => drop(files.insert(path.display().to_string(), fs::read(&path).unwrap())),
        }
    }
    files
}

#[test]
fn a_step_that_is_made_once_more_has_the_loss_that_the_job_has_recorded() {
    let programs = Programs { counting: env!("CARGO_BIN_EXE_determinism"), ..PROGRAMS };
    let mut fixture =
        JobFixture { records: 1000, micros_per_record: 0, ..JobFixture::new(programs, 3) };
    let command = |fixture: &JobFixture| {
        let command = fixture.command(5).flag("deterministic").option("max-steps", "30");
        let command = command.option("checkpoint-every", "8").option("checkpoint-keep", "4");
        command.option("log-format", "json")
    };
    let job_dir = fixture.path("job");
    let ended = command(&fixture).run();
    ended.assert_outcome(0, "completed");
    let losses = ended.summary().loss;
    assert_ne!(losses.first, losses.last);
    let before = files(&job_dir);
    let replayed = |fixture: &JobFixture, step: u64| -> Value {
        let ended = command(fixture).option("replay-step", step.to_string()).run();
        assert_eq!(ended.code, Some(0), "{}", ended.output);
        let found = ended.output.lines().find(|line| line.contains("\"loss_recorded\""));
        let found = serde_json::from_str(found.unwrap_or_else(|| panic!("{}", ended.output)));
        assert!(before == files(&job_dir), "a file of the job has changed");
        found.unwrap()
    };
    let changes = |made: &Value| -> Vec<String> {
        let changes = made["changes"].as_array().unwrap();
        changes.iter().map(|change| change.as_str().unwrap().to_owned()).collect()
    };
    let steps_of = |name: &str| name.split('-').nth(1).and_then(|step| step.parse::<u64>().ok());
    // Which of them were written depends on the disk.
    let checkpoints = before.keys().filter_map(|path| {
        let folder = Path::new(path).parent()?.file_name()?.to_str()?;
        folder.starts_with("step-").then(|| steps_of(folder))?
    });
    let checkpoints: Vec<u64> = checkpoints.collect();
    for (step, recorded) in [(30, losses.last), (1, losses.first), (27, None)] {
        let made = replayed(&fixture, step);
        assert_eq!(made["loss_recorded"].as_f64(), recorded, "{made}");
        assert_eq!(made["is_equal"].as_bool(), recorded.map(|_| true), "{made}");
        assert_eq!(changes(&made), [""; 0]);
        let name = made["checkpoint"].as_str();
        let newest = checkpoints.iter().copied().filter(|&of| of < step).max();
        assert_eq!(name.and_then(steps_of), newest, "{made}");
        assert_eq!(newest.is_some(), step > 1, "{checkpoints:?}");
        let records = made["records"].as_array().unwrap();
        assert_eq!(records.len(), 48, "{made}");
        let row = &lineage(&job_dir, &records[5].to_string())["epochs"]
            [made["epoch"].as_u64().unwrap() as usize];
        assert_eq!((&row["step"], &row["step_positions"]), (&step.into(), &made["positions"]));
    }
    // What the job has never made is not made.
    let refused = |command: elasticdl_tests::Command, why: &str| {
        let ended = command.option("replay-step", "1").run();
        assert_eq!(ended.code, Some(2), "{}", ended.output);
        assert!(ended.output.contains(why), "{why:?} is not in: {}", ended.output);
    };
    refused(fixture.command(6), "started with --seed 5, not with --seed 6");
    let file = fs::read_dir(fixture.data()).unwrap().next().unwrap().unwrap().path();
    let added = fixture.data().join("added.bin");
    fs::copy(file, &added).unwrap();
    refused(command(&fixture), "the job's data set has");
    fs::remove_file(added).unwrap();
    // Another program, and data with other contents.
    let file = fs::read_dir(fixture.data()).unwrap().next().unwrap().unwrap().path();
    fs::write(&file, fs::read(&file).unwrap()).unwrap();
    fixture.micros_per_record = 1;
    let ended = command(&fixture).option("replay-step", "1").run();
    for change in ["the job was started with `", &format!("job began: {}", file.display())] {
        assert!(ended.output.contains(change), "{change:?} is not in: {}", ended.output);
    }
    fixture.micros_per_record = 0;
    // A damaged checkpoint is passed over.
    let mut before: Vec<u64> = checkpoints.into_iter().filter(|&of| of < 30).collect();
    before.sort_unstable();
    before.dedup();
    let Some((newest, older)) = before.split_last().filter(|(_, older)| !older.is_empty()) else {
        return;
    };
    for path in files(&job_dir.join("checkpoints")).into_keys() {
        if path.contains(&format!("step-{newest:012}")) && path.ends_with(".safetensors") {
            fs::write(&path, "").unwrap();
        }
    }
    let ended = command(&fixture).option("replay-step", "30").run();
    assert_eq!(ended.code, Some(0), "{}", ended.output);
    let passed_over = format!("\"checkpoint\":\"step-{:012}-", older[older.len() - 1]);
    assert!(ended.output.contains(&passed_over), "{passed_over}: {}", ended.output);
}
