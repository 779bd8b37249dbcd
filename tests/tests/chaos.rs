//! Real processes under fire: whatever is killed and whenever, every record is counted exactly once.
//!
//! The model's parameters count records, so the final parameters are the proof; the ledger's word is compared with it.

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

use std::path::PathBuf;
use std::time::Duration;

use elasticdl_tests::{Command, Running, counting_data, send};
use rand::rngs::ChaCha8Rng;
use rand::seq::IteratorRandom;
use rand::{RngExt, SeedableRng};
use rustix::process::Signal;
use tempfile::TempDir;

const RECORDS: u64 = 6000;
const EPOCHS: u64 = 2;

struct Stage {
    folder: TempDir,
    micros_per_record: u64,
    num_workers: u32,
    /// Generous, so that a busy machine takes nobody out whom the test did not stop.
    worker_timeout: &'static str,
}

impl Stage {
    fn new(num_workers: u32, micros_per_record: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        counting_data(&folder.path().join("data"), RECORDS, 3).unwrap();
        Self { folder, micros_per_record, num_workers, worker_timeout: "10s" }
    }

    fn command(&self, seed: u64) -> Command {
        let program = [
            PathBuf::from(env!("CARGO_BIN_EXE_counting")),
            "--records".into(),
            RECORDS.to_string().into(),
            "--micros-per-record".into(),
            self.micros_per_record.to_string().into(),
        ];
        Command::new(env!("CARGO_BIN_EXE_elasticdl-under-test"), self.folder.path().join("job"), program)
            .option("training-data", self.folder.path().join("data"))
            .option("num-epochs", EPOCHS.to_string())
            .option("num-workers", self.num_workers.to_string())
            .option("global-batch-size", "48")
            .option("seed", seed.to_string())
            .option("worker-timeout", self.worker_timeout)
    }

    fn start(&self, seed: u64) -> Running {
        let mut job = self.command(seed).start();
        job.wait_for("the first steps", |status| status["step"].as_u64() > Some(3));
        job
    }
}

#[test]
fn records_are_counted_exactly_once_under_random_kills() {
    for seed in 0..20 {
        let stage = Stage::new(4, 400);
        let mut job = stage.start(seed);
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let mut kills = 0;
        while job.is_running() {
            if let Some((_, pid)) = job.workers().into_iter().choose(&mut rng) {
                send(pid, Signal::KILL);
                kills += 1;
            }
            std::thread::sleep(Duration::from_millis(rng.random_range(200..1200)));
        }
        let ended = job.wait();
        ended.assert_exactly_once(&format!("seed {seed}, {kills} kills"), RECORDS, EPOCHS);
        assert!(kills > 1, "seed {seed}: too fast to be disturbed");
    }
}

#[test]
fn survivors_of_two_kills_at_once_go_on_with_what_they_have() {
    let stage = Stage::new(4, 400);
    let mut job = stage.start(1);
    let victims: Vec<(u64, u32)> = job.workers().into_iter().take(2).collect();
    assert_eq!(victims.len(), 2);
    victims.iter().for_each(|(_, pid)| send(*pid, Signal::KILL));
    job.wait_for("replacements", |status| {
        let members = status["workers"].as_array().into_iter().flatten().filter(|w| w["rank"].is_u64());
        members.filter(|w| w["worker"].as_u64() > Some(4)).count() == 2
    });
    let ended = job.wait();
    ended.assert_exactly_once("two kills", RECORDS, EPOCHS);
    let memberships = ended.summary["memberships"].as_array().unwrap();
    let lost: Vec<u64> = memberships
        .iter()
        .flat_map(|m| m["lost"].as_array().unwrap())
        .map(|id| id.as_u64().unwrap())
        .collect();
    let victims: Vec<u64> = victims.into_iter().map(|(id, _)| id).collect();
    assert_eq!(
        {
            let mut lost = lost;
            lost.sort_unstable();
            lost
        },
        victims
    );
    // Nobody went back: each generation stands at the step of the one before, or later.
    let steps: Vec<u64> = memberships.iter().map(|m| m["at_step"].as_u64().unwrap()).collect();
    assert!(steps.is_sorted(), "{steps:?}");
}

#[test]
fn after_the_loss_of_all_workers_training_starts_again_and_is_exact() {
    for seed in 0..3 {
        let stage = Stage::new(3, 200);
        let mut job = stage.start(seed);
        job.workers().values().for_each(|pid| send(*pid, Signal::KILL));
        job.wait_for("new workers", |status| {
            status["workers"].as_array().is_some_and(|w| w.len() == 3 && w.iter().all(|w| w["rank"].is_u64()))
        });
        job.wait().assert_exactly_once(&format!("seed {seed}, all killed"), RECORDS, EPOCHS);
    }
}

#[test]
fn a_stopped_worker_is_taken_out_and_its_records_go_to_others() {
    for seed in 0..3 {
        let stage = Stage { worker_timeout: "800ms", ..Stage::new(3, 400) };
        let job = stage.start(seed);
        let (stopped, pid) = job.workers().into_iter().nth(seed as usize).unwrap();
        send(pid, Signal::STOP);
        let ended = job.wait();
        ended.assert_exactly_once(&format!("seed {seed}, worker {stopped} stopped"), RECORDS, EPOCHS);
        let memberships = ended.summary["memberships"].as_array().unwrap();
        assert!(
            memberships.iter().any(|m| m["cause"] == "hung" && m["lost"][0] == stopped),
            "{memberships:?}"
        );
    }
}

#[test]
fn a_worker_that_is_told_to_end_leaves_and_loses_nothing() {
    let stage = Stage::new(3, 400);
    let mut job = stage.start(1);
    let (leaver, pid) = job.workers().into_iter().next().unwrap();
    send(pid, Signal::TERM);
    job.wait_for("the leave", |status| {
        status["workers"].as_array().is_some_and(|w| w.iter().all(|w| w["worker"] != leaver))
    });
    let ended = job.wait();
    ended.assert_exactly_once("a leave", RECORDS, EPOCHS);
    let memberships = ended.summary["memberships"].as_array().unwrap();
    assert!(memberships.iter().any(|m| m["cause"] == "leave" && m["left"][0] == leaver), "{memberships:?}");
    assert!(memberships.iter().all(|m| m["lost"] == serde_json::json!([])), "{memberships:?}");
}

#[test]
fn a_running_job_is_scaled_up_and_down() {
    let stage = Stage::new(2, 400);
    let mut job = stage.start(1);
    let size = |n: usize| {
        move |status: &serde_json::Value| {
            let members = status["workers"].as_array().into_iter().flatten().filter(|w| w["rank"].is_u64());
            members.count() == n
        }
    };
    job.scale(4);
    job.wait_for("four members", size(4));
    job.scale(1);
    job.wait_for("one member", size(1));
    job.scale(2);
    job.wait_for("two members", size(2));
    let ended = job.wait();
    ended.assert_exactly_once("scaling", RECORDS, EPOCHS);
    assert_eq!(ended.summary["workers"]["peak"], 4);
}
