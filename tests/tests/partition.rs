//! Networks that are cut, without a word to anybody: the job goes on with those who can go on
//! together, and is exact.
//!
//! Workers run on hosts of their own (network namespaces; needs root and iproute2) and out of reach
//! of the master's kills: one that is taken out has to end by itself.

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

use std::time::{Duration, Instant};

use elasticdl_tests::{Command, Ended, Network, Running, counting_data, is_alive};
use serde_json::Value;
use tempfile::TempDir;

const RECORDS: u64 = 4000;
const EPOCHS: u64 = 2;
/// The master's host. The nth launch is on host n.
const MASTER: u8 = 0;
/// Enough for workers that take the places of others.
const HOSTS: u8 = 9;

/// A job of workers on hosts of their own.
struct Stage {
    job: Running,
    network: Network,
    _folder: TempDir,
}

struct Timeouts {
    worker: Option<&'static str>,
    master: Option<&'static str>,
}

/// Those that a user gets.
const DEFAULTS: Timeouts = Timeouts { worker: None, master: None };

impl Default for Timeouts {
    /// Longer than a busy machine keeps anybody waiting; a master that is silent is borne with for
    /// ever.
    fn default() -> Self {
        Self { worker: Some("2s"), master: Some("10min") }
    }
}

impl Stage {
    /// `None` where there are no namespaces.
    fn start(num_workers: u32, timeouts: Timeouts) -> Option<Self> {
        let network = Network::new(HOSTS)?;
        let folder = tempfile::tempdir().unwrap();
        counting_data(&folder.path().join("data"), RECORDS, 3).unwrap();
        let script = network.on_the_launchs_host();
        let program = ["/bin/sh", "-c", &script, "sh", env!("CARGO_BIN_EXE_counting")];
        let (records, parameters) = (RECORDS.to_string(), (256 << 10).to_string());
        // Large enough for operations of several segments, which are cut anywhere.
        let options =
            ["--records", &records, "--parameters", &parameters, "--micros-per-record", "800"];
        let elasticdl = env!("CARGO_BIN_EXE_elasticdl-under-test");
        let command =
            Command::new(elasticdl, folder.path().join("job"), program.into_iter().chain(options))
                .started_by(network.on(MASTER))
                .option("listen", network.address(MASTER))
                .option("training-data", folder.path().join("data"))
                .option("num-epochs", EPOCHS.to_string())
                .option("num-workers", num_workers.to_string())
                .option("global-batch-size", "48");
        let timeouts = [("worker-timeout", timeouts.worker), ("master-timeout", timeouts.master)];
        let timeouts = timeouts.into_iter().filter_map(|(name, value)| Some((name, value?)));
        let command = timeouts.fold(command, |command, (name, value)| command.option(name, value));
        let mut job = command.start();
        job.wait_for("the first steps", |status| status["step"].as_u64() > Some(3));
        Some(Self { job, network, _folder: folder })
    }

    /// The process of a worker, and its host.
    fn place_of(&self, worker: u64) -> (u32, u8) {
        let pid = self.job.workers()[&worker];
        (pid, self.network.host_of(pid).unwrap())
    }

    /// Nothing passes between `host` and the others any more, in either direction.
    fn cut(&self, host: u8, others: impl IntoIterator<Item = u8>) {
        for other in others.into_iter().filter(|other| *other != host) {
            self.network.cut(host, other);
            self.network.cut(other, host);
        }
    }

    fn heal(&self, host: u8, others: impl IntoIterator<Item = u8>) {
        for other in others.into_iter().filter(|other| *other != host) {
            self.network.heal(host, other);
            self.network.heal(other, host);
        }
    }

    /// Waits until none of these is a worker any more, `count` are members, and more has been
    /// committed since.
    fn wait_until_it_goes_on(&mut self, without: &[u64], count: usize) {
        let is_out = |worker: &Value| without.iter().all(|out| worker["worker"] != *out);
        let status = self.job.wait_for("a group without those who were cut off", |status| {
            let workers = status["workers"].as_array().map(Vec::as_slice).unwrap_or_default();
            let members = workers.iter().filter(|w| w["rank"].is_u64());
            members.count() >= count && workers.iter().all(is_out)
        });
        let step = status["step"].as_u64();
        self.job.wait_for("a step of it", |status| status["step"].as_u64() > step);
    }

    fn end(self, context: &str) -> Ended {
        let ended = self.job.wait();
        ended.assert_exactly_once(context, RECORDS, EPOCHS);
        ended
    }
}

fn wait_for_end_of(pid: u32) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while is_alive(pid) {
        assert!(Instant::now() < deadline, "process {pid} does not end by itself");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_worker_that_reaches_the_master_but_no_other_worker_is_taken_out() {
    for victim in [1, 3] {
        let Some(mut stage) = Stage::start(4, Timeouts::default()) else { return };
        let (pid, host) = stage.place_of(victim);
        stage.cut(host, 1..HOSTS);
        stage.wait_until_it_goes_on(&[victim], 4);
        wait_for_end_of(pid);
        let ended = stage.end(&format!("worker {victim} cut off from the others"));
        // Where one link alone showed it, the fault could have been either end's.
        let lost = ended.lost();
        assert!(lost.contains(&victim) && lost.len() <= 2, "{lost:?}");
    }
}

#[test]
fn of_a_group_in_two_halves_one_goes_on() {
    let Some(mut stage) = Stage::start(4, Timeouts::default()) else { return };
    let [one, two, three, four] = [1, 2, 3, 4].map(|worker| stage.place_of(worker).1);
    [one, two].into_iter().for_each(|host| stage.cut(host, [three, four]));
    stage.job.wait_for("a hung group to be cut", |status| {
        let workers = status["workers"].as_array().map(Vec::as_slice).unwrap_or_default();
        let here = |id: u64| workers.iter().any(|w| w["worker"] == id);
        (!here(1) && !here(2)) || (!here(3) && !here(4))
    });
    stage.wait_until_it_goes_on(&[], 4);
    stage.end("two halves");
}

#[test]
fn a_link_that_swallows_what_goes_one_way_is_found() {
    let Some(mut stage) = Stage::start(3, Timeouts::default()) else { return };
    // In the ring 1, 2, 3 that is the way of the data; the other way go acknowledgements.
    stage.network.cut(stage.place_of(2).1, stage.place_of(3).1);
    stage.job.wait_for("one of its ends to be out", |status| {
        let workers = status["workers"].as_array().map(Vec::as_slice).unwrap_or_default();
        let here = |id: u64| workers.iter().any(|w| w["worker"] == id);
        !here(2) || !here(3)
    });
    stage.wait_until_it_goes_on(&[], 3);
    stage.end("one way from worker 2 to worker 3");
}

#[test]
fn a_cut_that_heals_within_the_timeout_takes_nobody_out() {
    let Some(mut stage) = Stage::start(3, Timeouts { worker: Some("10s"), ..Timeouts::default() })
    else {
        return;
    };
    let (_, host) = stage.place_of(2);
    for _ in 0..3 {
        stage.cut(host, 0..HOSTS);
        std::thread::sleep(Duration::from_millis(300));
        stage.heal(host, 0..HOSTS);
        let step = stage.job.status()["step"].as_u64();
        stage.job.wait_for("the next step", |status| status["step"].as_u64() > step);
    }
    let ended = stage.end("short cuts");
    assert_eq!(ended.lost(), [0; 0]);
}

#[test]
fn a_worker_that_is_cut_off_from_the_master_alone_is_replaced_and_ends_by_itself() {
    let Some(mut stage) = Stage::start(3, Timeouts { master: Some("4s"), ..Timeouts::default() })
    else {
        return;
    };
    let (pid, host) = stage.place_of(2);
    stage.cut(host, [MASTER]);
    stage.wait_until_it_goes_on(&[2], 3);
    wait_for_end_of(pid);
    let ended = stage.end("worker 2 cut off from the master");
    assert_eq!(ended.lost(), [2]);
}

#[test]
fn a_worker_that_comes_back_after_it_was_given_up_is_fenced_and_ends() {
    let Some(mut stage) = Stage::start(3, Timeouts::default()) else { return };
    let (pid, host) = stage.place_of(1);
    stage.cut(host, 0..HOSTS);
    stage.wait_until_it_goes_on(&[1], 3);
    assert!(is_alive(pid), "nobody could tell it");
    stage.heal(host, 0..HOSTS);
    wait_for_end_of(pid);
    let ended = stage.end("worker 1 cut off from everybody");
    assert_eq!(ended.lost(), [1]);
}

/// The ring is well, so nobody is lost: for less and more than `--worker-timeout`, than the
/// keepalive of streams, and than half of `--master-timeout`.
#[test]
fn a_master_that_is_cut_off_from_all_workers_for_a_while_loses_none_of_them() {
    let Some(mut stage) = Stage::start(4, DEFAULTS) else { return };
    let (generation, before) = (stage.job.wait_for_group_of(4), stage.job.workers());
    for ms in [1000, 2000, 10_000, 16_000] {
        stage.cut(MASTER, 1..HOSTS);
        std::thread::sleep(Duration::from_millis(ms));
        stage.heal(MASTER, 1..HOSTS);
        let step = stage.job.status()["step"].as_u64();
        stage.job.wait_for("all to be back, and another step", |status| {
            let here = status["workers"].as_array().map_or(0, Vec::len);
            here == 4 && status["step"].as_u64() > step
        });
        assert_eq!(stage.job.workers(), before, "{ms} ms");
    }
    let ended = stage.end("a master that is cut off");
    ended.assert_undisturbed(generation);
}
