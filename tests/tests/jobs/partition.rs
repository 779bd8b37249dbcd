//! A network partition, between workers or from the master, blocks no worker and repeats nothing; a
//! master cut off from all workers loses none.
//!
//! Workers run on hosts of their own (network namespaces; needs root and iproute2) and out of reach
//! of the master's kills: a worker that is evicted has to end by itself.

use std::time::Duration;

use elasticdl_proto::{Status, WorkerId};
use elasticdl_tests::{Command, Ended, Network, Running, assert_end, counting_data, is_alive};
use tempfile::TempDir;

use crate::PROGRAMS;

const RECORDS: u64 = 4000;
const EPOCHS: u64 = 2;
/// The master's host. The nth launch is on host n.
const MASTER: u8 = 0;
/// Enough for replacements.
const HOSTS: u8 = 13;

/// A job of workers on hosts of their own.
struct PartitionedJob {
    job: Running,
    network: Network,
    folder: TempDir,
}

struct Timeouts {
    worker: Option<&'static str>,
    master: Option<&'static str>,
}

/// The defaults of the command.
const DEFAULTS: Timeouts = Timeouts { worker: None, master: None };

impl Default for Timeouts {
    /// Longer than a busy machine delays any worker; a silent master is tolerated for the whole
    /// test.
    fn default() -> Self {
        Self { worker: Some("2s"), master: Some("10min") }
    }
}

impl PartitionedJob {
    fn start(num_workers: u32, timeouts: Timeouts) -> Self {
        // Half a minute, which no test needs.
        Self::start_with(num_workers, timeouts, "8000", 256 << 10)
    }

    /// As [`Self::start`], with this time per record, until the job is to end, and as many
    /// parameters.
    fn start_with(num_workers: u32, timeouts: Timeouts, micros: &str, parameters: u64) -> Self {
        let network = Network::new(HOSTS);
        let folder = tempfile::tempdir().unwrap();
        counting_data(&folder.path().join("data"), RECORDS, 3).unwrap();
        let script = network.on_the_launchs_host();
        let program = ["/bin/sh", "-c", &script, "sh", PROGRAMS.counting];
        let (records, parameters) = (RECORDS.to_string(), parameters.to_string());
        let hurry = folder.path().join("hurry").display().to_string();
        // Large enough for operations of several segments, so that a cut can hit any of them.
        let options =
            ["--records", &records, "--parameters", &parameters, "--micros-per-record", micros];
        let options = options.into_iter().chain(["--hurry-when", &hurry]);
        let elasticdl = PROGRAMS.elasticdl;
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
        job.wait_for_first_steps();
        Self { job, network, folder }
    }

    /// The process of a worker, and its host.
    fn place_of(&self, worker: u64) -> (u32, u8) {
        let pid = self.job.workers()[&WorkerId(worker)];
        (pid, self.network.host_of(pid).unwrap())
    }

    /// Drops all packets between `host` and the others, in both directions.
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

    /// Waits until none of `without` is a worker, `count` workers are members, and a further step
    /// has been committed.
    fn wait_until_it_goes_on(&mut self, without: &[u64], count: usize) {
        let status = self.job.wait_for("a group without those who were cut off", |status| {
            status.members().count() >= count && !without.iter().any(|&id| is_here(status, id))
        });
        self.job.wait_for("a step of it", |other| other.step > status.step);
    }

    fn end(self, context: &str) -> Ended {
        std::fs::write(self.folder.path().join("hurry"), "").unwrap();
        let ended = self.job.wait();
        ended.assert_exactly_once(context, RECORDS, EPOCHS);
        ended
    }
}

/// Whether this worker is connected to the master.
fn is_here(status: &Status, worker: u64) -> bool {
    status.workers.iter().any(|w| w.worker == WorkerId(worker))
}

#[test]
#[ignore = "needs root and iproute2"]
fn a_cut_between_members_that_only_the_tree_links_is_found_and_one_of_them_is_evicted() {
    // Few parameters, which are summed along the tree.
    let mut fixture = PartitionedJob::start_with(9, Timeouts::default(), "8000", RECORDS);
    let status = fixture.job.wait_for("all members", |status| status.members().count() == 9);
    let of_rank = |rank| {
        let worker = status.workers.iter().find(|worker| worker.rank == Some(rank));
        worker.expect("all nine are members").worker.0
    };
    // The first rank and its right child, which are no neighbours.
    let ends = [0, 5].map(of_rank);
    let [(_, first), (_, other)] = ends.map(|worker| fixture.place_of(worker));
    fixture.cut(first, [other]);
    let status = fixture.job.wait_for("a group without one of them", |status| {
        status.members().count() >= 8 && ends.iter().any(|&id| !is_here(status, id))
    });
    fixture.job.wait_for("a step of it", |other| other.step > status.step);
    let lost = fixture.end("two members cut off from each other").lost();
    assert!(lost.len() == 1 && ends.contains(&lost[0].0), "{lost:?} of {ends:?}");
}

#[test]
#[ignore = "needs root and iproute2"]
fn a_worker_that_reaches_the_master_but_no_other_worker_is_evicted() {
    for victim in [1, 3] {
        let mut fixture = PartitionedJob::start(4, Timeouts::default());
        let (pid, host) = fixture.place_of(victim);
        fixture.cut(host, 1..HOSTS);
        fixture.wait_until_it_goes_on(&[victim], 4);
        assert_end(&[pid], Duration::from_secs(60));
        let ended = fixture.end(&format!("worker {victim} cut off from the others"));
        // Where only one link has failed, the fault could be at either end.
        let lost = ended.lost();
        assert!(lost.contains(&WorkerId(victim)) && lost.len() <= 2, "{lost:?}");
    }
}

#[test]
#[ignore = "needs root and iproute2"]
fn one_half_of_a_partitioned_group_continues() {
    let mut fixture = PartitionedJob::start(4, Timeouts::default());
    let [one, two, three, four] = [1, 2, 3, 4].map(|worker| fixture.place_of(worker).1);
    [one, two].into_iter().for_each(|host| fixture.cut(host, [three, four]));
    fixture.job.wait_for("a hung group to be cut", |status| {
        [[1, 2], [3, 4]].iter().any(|half| !half.iter().any(|&id| is_here(status, id)))
    });
    fixture.wait_until_it_goes_on(&[], 4);
    fixture.end("two halves");
}

#[test]
#[ignore = "needs root and iproute2"]
fn a_link_that_drops_packets_in_one_direction_is_detected() {
    let mut fixture = PartitionedJob::start(3, Timeouts::default());
    // In the ring 1, 2, 3 data travel in that direction; in the other one only acknowledgements do.
    fixture.network.cut(fixture.place_of(2).1, fixture.place_of(3).1);
    fixture
        .job
        .wait_for("one of its ends to be out", |status| !is_here(status, 2) || !is_here(status, 3));
    fixture.wait_until_it_goes_on(&[], 3);
    fixture.end("one way from worker 2 to worker 3");
}

#[test]
#[ignore = "needs root and iproute2"]
fn a_cut_that_heals_within_the_timeout_evicts_no_worker() {
    let mut fixture =
        PartitionedJob::start(3, Timeouts { worker: Some("10s"), ..Timeouts::default() });
    let (_, host) = fixture.place_of(2);
    for _ in 0..3 {
        fixture.cut(host, 0..HOSTS);
        std::thread::sleep(Duration::from_millis(300));
        fixture.heal(host, 0..HOSTS);
        fixture.job.wait_for_next_step();
    }
    let ended = fixture.end("short cuts");
    assert_eq!(ended.lost(), []);
}

#[test]
#[ignore = "needs root and iproute2"]
fn a_worker_that_is_cut_off_from_the_master_alone_is_replaced_and_ends_by_itself() {
    let mut fixture =
        PartitionedJob::start(3, Timeouts { master: Some("4s"), ..Timeouts::default() });
    let (pid, host) = fixture.place_of(2);
    fixture.cut(host, [MASTER]);
    fixture.wait_until_it_goes_on(&[2], 3);
    assert_end(&[pid], Duration::from_secs(60));
    let ended = fixture.end("worker 2 cut off from the master");
    assert_eq!(ended.lost(), [WorkerId(2)]);
}

#[test]
#[ignore = "needs root and iproute2"]
fn a_worker_that_comes_back_after_its_eviction_is_fenced_and_ends() {
    let mut fixture = PartitionedJob::start(3, Timeouts::default());
    let (pid, host) = fixture.place_of(1);
    fixture.cut(host, 0..HOSTS);
    fixture.wait_until_it_goes_on(&[1], 3);
    assert!(is_alive(pid), "no process could notify it");
    fixture.heal(host, 0..HOSTS);
    assert_end(&[pid], Duration::from_secs(60));
    let ended = fixture.end("worker 1 cut off from everybody");
    assert_eq!(ended.lost(), [WorkerId(1)]);
}

/// The ring is intact, so no worker is lost: for cuts shorter and longer than `--worker-timeout`,
/// than the keep-alive timeout of streams, and than half of `--master-timeout`.
#[test]
#[ignore = "needs root and iproute2"]
fn a_master_that_is_cut_off_from_all_workers_for_a_while_loses_none_of_them() {
    // A minute, so that the group trains throughout.
    let mut fixture = PartitionedJob::start_with(4, DEFAULTS, "30000", 256 << 10);
    let generation = fixture.job.wait_for_members(4).generation;
    let before = fixture.job.workers();
    for ms in [1000, 2000, 10_000, 16_000] {
        fixture.cut(MASTER, 1..HOSTS);
        std::thread::sleep(Duration::from_millis(ms));
        fixture.heal(MASTER, 1..HOSTS);
        fixture.job.wait_for_return_of(4);
        assert_eq!(fixture.job.workers(), before, "{ms} ms");
    }
    let ended = fixture.end("a master that is cut off");
    ended.assert_undisturbed(generation);
}
