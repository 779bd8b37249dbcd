//! Jobs that must end with the same parameters, bit for bit, whatever happens to their workers.

use std::time::Duration;

use elasticdl_proto::{ThroughputSummary, WorkerId};
use rand::SeedableRng;
use rand::rngs::ChaCha8Rng;
use rustix::process::Signal;

use crate::{
    Command, Ended, FaultRates, JobFixture, Network, Programs, Running, S3, each_once, send,
};

/// A job, and what happens to it.
#[derive(Clone, Copy, Debug)]
pub struct DeterminismCase {
    /// What is different from the other cases.
    pub name: &'static str,
    run: fn(&Setup) -> Ended,
}

/// How the jobs of all cases are alike.
#[derive(Debug)]
struct Setup {
    programs: Programs,
    is_deterministic: bool,
    /// `None`: the model has no tables.
    table_lag: Option<u8>,
    shards_optimizer: bool,
    /// Whether the workers have the parameters in bf16.
    has_half: bool,
}

impl DeterminismCase {
    /// The cases of a number of workers that nothing happens to.
    pub const UNDISTURBED: &[Self] = &[
        Self { name: "1 worker", run: |setup| setup.undisturbed(1, &[]) },
        Self { name: "2 workers", run: |setup| setup.undisturbed(2, &[]) },
        Self { name: "3 workers", run: |setup| setup.undisturbed(3, &[]) },
        Self { name: "7 workers", run: |setup| setup.undisturbed(7, &[]) },
        Self { name: "8 workers", run: |setup| setup.undisturbed(8, &[]) },
    ];

    /// The cases in which workers or the master come, go and fail.
    pub const DISTURBED: &[Self] = &[
        Self { name: "workers killed", run: |setup| setup.kills() },
        Self { name: "1 worker, 4 join", run: |setup| setup.joins() },
        Self { name: "5 workers, 2 leave", run: |setup| setup.leaves() },
        Self { name: "a worker stopped, evicted and replaced", run: |setup| setup.stops() },
        Self { name: "the master killed and replaced", run: |setup| setup.another_master() },
        Self { name: "stopped at 3 workers, resumed at 5", run: |setup| setup.resumed() },
        Self { name: "a slow worker", run: |setup| setup.slow_worker() },
        Self {
            name: "data in a store that is unavailable",
            run: |setup| setup.unavailable_storage(),
        },
        Self { name: "a worker killed in the first step", run: |setup| setup.kill_at_start() },
    ];

    /// The cases of transports; they need root and iproute2.
    pub const TRANSPORTS: &[Self] = &[
        Self { name: "TCP", run: |setup| setup.on_hosts(3, 3, &[]) },
        Self { name: "TCP, 4 channels", run: |setup| setup.on_hosts(3, 3, &[("channels", "4")]) },
        Self { name: "two hosts of two workers", run: |setup| setup.on_hosts(4, 2, &[]) },
    ];

    /// Throughput of a job of two workers whose model has this many parameters and computes next
    /// to nothing. `rate`: the workers are on hosts that send at this rate; otherwise they share
    /// memory.
    pub fn throughput(
        programs: Programs,
        is_deterministic: bool,
        parameters: u64,
        rate: Option<&str>,
    ) -> ThroughputSummary {
        let setup = Setup::new(programs, is_deterministic);
        let fixture = JobFixture {
            parameters,
            records: 2 * COST_STEPS,
            epochs: 1,
            global_batch_size: 2,
            ..setup.fixture(2, 0)
        };
        let ended = match rate {
            None => setup.command(&fixture).option("checkpoint-dir", "none").run(),
            Some(rate) => {
                let network = Network::with_rate(3, rate).expect("root makes networks");
                setup.start_on_hosts(&network, 2, fixture, &[("checkpoint-dir", "none")]).wait()
            }
        };
        ended.assert_outcome(0, "completed");
        ended.summary().throughput
    }

    /// Runs the case.
    pub fn run(&self, programs: Programs, is_deterministic: bool) -> Ended {
        self.run_setup(&Setup::new(programs, is_deterministic))
    }

    /// As [`run`](Self::run) with `--deterministic`, and the optimizer's state divided over the
    /// workers.
    pub fn run_sharded(&self, programs: Programs) -> Ended {
        self.run_setup(&Setup { shards_optimizer: true, ..Setup::new(programs, true) })
    }

    /// As [`run_sharded`](Self::run_sharded), with parameters in bf16.
    pub fn run_half(&self, programs: Programs) -> Ended {
        let setup = Setup::new(programs, true);
        self.run_setup(&Setup { shards_optimizer: true, has_half: true, ..setup })
    }

    /// Runs the case with `--deterministic`, and a model that has tables, whose steps read rows as
    /// of so many commits before the last one.
    pub fn run_with_tables(&self, programs: Programs, lag: u8) -> Ended {
        let table_lag = Some(lag);
        let ended = self.run_setup(&Setup { table_lag, ..Setup::new(programs, true) });
        let touches = ended.summary().row_touches.expect("the model has tables");
        assert_eq!((touches.missing, touches.repeated), (0, 0), "{}", self.name);
        assert_eq!(touches.expected, 2 * RECORDS * EPOCHS, "{}", self.name);
        ended
    }

    fn run_setup(&self, setup: &Setup) -> Ended {
        let ended = (self.run)(setup);
        ended.assert_outcome(0, "completed");
        let expected = each_once(RECORDS * EPOCHS);
        assert_eq!(ended.summary().records, expected, "{}: {}", self.name, ended.output);
        ended
    }
}

impl Setup {
    fn new(programs: Programs, is_deterministic: bool) -> Self {
        Self {
            programs,
            is_deterministic,
            table_lag: None,
            shards_optimizer: false,
            has_half: false,
        }
    }

    fn fixture(&self, workers: u32, micros_per_record: u64) -> JobFixture {
        JobFixture {
            records: RECORDS,
            epochs: EPOCHS,
            micros_per_record,
            worker_timeout: Some("30s"),
            program_options: if self.table_lag.is_some() { &["--tables"] } else { &[] },
            ..JobFixture::new(self.programs, workers)
        }
    }

    fn command(&self, fixture: &JobFixture) -> Command {
        let command = fixture.command(SEED);
        let command = if self.is_deterministic { command.flag("deterministic") } else { command };
        let command = match self.table_lag {
            Some(lag) => command.option("table-lag", lag.to_string()),
            None => command,
        };
        let command = if self.has_half { command.option("param-dtype", "bf16") } else { command };
        if self.shards_optimizer { command.flag("shard-optimizer") } else { command }
    }

    /// Starts a job that lasts until it is hurried.
    fn start(&self, fixture: JobFixture) -> Running {
        let mut job = self.command(&fixture).start().keeping(fixture.folder);
        job.wait_for_first_steps();
        job
    }

    fn undisturbed(&self, workers: u32, options: &[(&str, &str)]) -> Ended {
        let fixture = self.fixture(workers, 0);
        let command = self.command(&fixture);
        options.iter().fold(command, |command, (name, value)| command.option(name, *value)).run()
    }

    fn kills(&self) -> Ended {
        let mut job = self.start(self.fixture(3, LONG));
        let mut rng = ChaCha8Rng::seed_from_u64(SEED);
        for _ in 0..3 {
            let (worker, pid) = job.any_worker(&mut rng).expect("workers are there");
            send(pid, Signal::KILL);
            job.wait_for_members_without(3, &[worker]);
            job.wait_for_next_step();
        }
        job.hurry();
        let ended = job.wait();
        assert!(ended.summary().workers.restarts >= 3, "{:?}", ended.summary().workers);
        ended
    }

    /// The state that the group goes on from is the initial one, which another group has created.
    fn kill_at_start(&self) -> Ended {
        let fixture = self.fixture(3, 10 * LONG);
        let mut job = self.command(&fixture).start().keeping(fixture.folder);
        let members = job.wait_for_members(3);
        std::thread::sleep(Duration::from_millis(500));
        let first = members.members().next().expect("there are three");
        assert_eq!(job.status().step, 0, "a step takes seconds");
        send(first.pid, Signal::KILL);
        job.wait_for_members_without(3, &[first.worker]);
        job.hurry();
        let ended = job.wait();
        assert!(ended.summary().workers.restarts > 0, "{:?}", ended.summary().workers);
        ended
    }

    fn joins(&self) -> Ended {
        let mut job = self.start(self.fixture(1, LONG));
        job.scale(5);
        job.wait_for_work_of(5);
        job.wait_for_next_step();
        job.hurry();
        job.wait()
    }

    fn leaves(&self) -> Ended {
        let mut job = self.start(self.fixture(5, LONG));
        job.wait_for_work_of(5);
        // Those that stay have all parameters, and share memory from their first sum on.
        job.scale(3);
        job.wait_for_work_of(3);
        job.wait_for_next_step();
        job.hurry();
        job.wait()
    }

    fn stops(&self) -> Ended {
        let fixture = JobFixture { worker_timeout: Some("1s"), ..self.fixture(3, LONG) };
        let mut job = self.start(fixture);
        let members = job.wait_for_members(3);
        let members: Vec<(WorkerId, u32)> = members.members().map(|m| (m.worker, m.pid)).collect();
        let (worker, pid) = members[1];
        send(pid, Signal::STOP);
        job.wait_for_members_without(3, &[worker]);
        job.hurry();
        job.wait()
    }

    fn another_master(&self) -> Ended {
        let mut job = self.start(self.fixture(3, LONG));
        job.wait_for_work_of(3);
        job.kill_master();
        std::thread::sleep(Duration::from_millis(500));
        job.resume();
        job.wait_for_return_of(3);
        job.hurry();
        job.wait()
    }

    fn resumed(&self) -> Ended {
        let fixture = self.fixture(3, LONG);
        let dir = fixture.folder.path().join("checkpoints");
        let mut job = self.command(&fixture).option("checkpoint-dir", &dir).start();
        job.wait_for_first_steps();
        job.signal(Signal::TERM);
        let stopped = job.wait();
        stopped.assert_outcome(143, "stopped");
        let other = self.fixture(5, 0);
        self.command(&other).option("resume-from", dir).run()
    }

    /// The shares of a worker that needs four times as long get smaller.
    fn slow_worker(&self) -> Ended {
        let fixture = self.fixture(3, 300);
        self.command(&fixture).started_by(["env", "DETERMINISM_SLOW=4"]).run()
    }

    /// Workers give back micro-batches that they cannot read, and read them later.
    fn unavailable_storage(&self) -> Ended {
        let store = S3::start(FaultRates::default(), SEED);
        let data = JobFixture { store: Some(store.clone()), files: 100, ..self.fixture(3, 1000) };
        let command = self.command(&data).option("shuffle", "record");
        let mut job = command.option("checkpoint-dir", "none").start().keeping(data.folder);
        job.wait_for_first_steps();
        while job.is_running() {
            store.set_fault_rates(FaultRates { unavailable: true, ..FaultRates::default() });
            std::thread::sleep(Duration::from_millis(400));
            store.set_fault_rates(FaultRates::default());
            std::thread::sleep(Duration::from_millis(100));
        }
        let ended = job.wait();
        // Short waits have no line of their own.
        assert!(ended.summary().throughput.storage_wait_s > 0.0, "{}", ended.output);
        ended
    }

    /// The nth launch is on host `n % hosts`.
    fn on_hosts(&self, workers: u32, hosts: u8, options: &[(&str, &str)]) -> Ended {
        let network = Network::new(hosts + 1);
        let fixture = self.fixture(workers, 0);
        self.start_on_hosts(&network, hosts, fixture, options).wait()
    }

    fn start_on_hosts(
        &self,
        network: &Network,
        hosts: u8,
        fixture: JobFixture,
        options: &[(&str, &str)],
    ) -> Running {
        const MASTER: u8 = 0;
        let fixture = JobFixture { script: Some(network.on_host_of_launch(hosts)), ..fixture };
        let command = self.command(&fixture).started_by(network.on(MASTER));
        let command = command.option("listen", network.address(MASTER));
        let command =
            options.iter().fold(command, |command, (name, value)| command.option(name, *value));
        command.start().keeping(fixture.folder)
    }
}

/// Steps of a job whose speed is measured.
const COST_STEPS: u64 = 300;
/// Records of the data.
const RECORDS: u64 = 1200;
/// Passes over it.
const EPOCHS: u64 = 2;
/// Seed of the jobs.
const SEED: u64 = 7;
/// Time per record, in microseconds, of a job that outlives what happens to it.
const LONG: u64 = 20_000;
