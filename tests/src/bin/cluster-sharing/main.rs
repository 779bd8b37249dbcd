//! A shared cluster: the two experiments of PaddlePaddle EDL at their scale.
//!
//! Case 1: 20 jobs with workers of 5 CPUs, elastic from 2 to 60, are submitted in sequence to a
//! cluster of 133 nodes. Case 2: the same beside a service, whose demand falls from 400 pods of
//! 3 CPUs to 100 and returns. `--two-jobs` runs ElasticDL's experiment with two jobs in its place,
//! `--mixed` jobs of different weights and sizes.
//!
//! ```text
//!   kube-apiserver, kube-scheduler, controllers      real: `cluster/up --control-plane-only`
//!      ▲            ▲
//!      │ watch      │ pods, anchors, Leases
//!   nodes           masters                          nodes: this program; masters: real processes
//!      │ start, end ▲
//!      ▼            │ gRPC over TLS
//!   workers ────────┘                                this program: clients of the protocol
//! ```
//!
//! Needs root, `ip`, `kubectl` and the control plane of a cluster without nodes, whose processes
//! run on this machine. `$KUBECONFIG` names it; without it, it is started with the scripts in
//! `$ELASTICDL_CLUSTER_SCRIPTS`, or beside the checkout, and stopped at the end.

mod calls;
mod case;
mod figures;
mod group;
mod job;
mod kubelet;
mod masters;
mod mixed;
mod nodes;
mod observed;
mod service;
mod two_jobs;
mod worker;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use elasticdl_proto::limits::DATASET_RECORDS_MAX;
use elasticdl_tests::cluster::ApiServer;
use elasticdl_tests::{exit_code, print};
use serde_json::{Map, Value};

use crate::case::{Cluster, MIN_WORKERS, WORKER_CPUS};
use crate::masters::{Bridge, Masters};
use crate::nodes::{NODES, Nodes};

/// Why there is no result.
type Fault = Box<dyn std::error::Error + Send + Sync>;

#[derive(Debug, Parser)]
struct Options {
    /// Cases to run
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2],
          value_parser = clap::value_parser!(u8).range(1..=2))]
    cases: Vec<u8>,
    /// Jobs of each case
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=99))]
    jobs: u32,
    /// Nodes of the cluster, with 17 or 18 CPUs each
    #[arg(long, default_value_t = NODES, value_parser = clap::value_parser!(u32).range(1..=133))]
    nodes: u32,
    /// Workers that a job has at most
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(2..=1000))]
    max_workers: u32,
    /// Seconds from one submission to the next
    #[arg(long, default_value = "10", value_parser = parse_seconds)]
    interval: Duration,
    /// Seconds after the last submission, and after each change of the service's demand
    #[arg(long, default_value = "60", value_parser = parse_seconds)]
    settle: Duration,
    /// Milliseconds from a pod's binding to the start of its program
    #[arg(long, default_value_t = 1000)]
    start_ms: u64,
    /// In place of the cases: ElasticDL's experiment, two jobs that take so many seconds alone, in
    /// a cluster with CPUs for one and a half
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds, conflicts_with = "cases")]
    two_jobs: Option<Duration>,
    /// In place of the cases: jobs of different weights and sizes of workers, one of which ends,
    /// and a namespace with a quota
    #[arg(long, conflicts_with_all = ["cases", "two_jobs"])]
    mixed: bool,
    /// Also write the result to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Keep the masters' logs in this folder
    #[arg(long, value_name = "FOLDER")]
    logs: Option<PathBuf>,
}

impl Options {
    fn has_cases(&self) -> bool {
        self.two_jobs.is_none() && !self.mixed
    }

    /// Pods of the service: at first and at last, and in between.
    fn demand(&self) -> (usize, usize) {
        let scaled = |pods: u32| (pods * self.nodes / NODES) as usize;
        (scaled(400), scaled(100))
    }
}

fn main() -> ExitCode {
    const COMMANDS: [&str; 3] = ["master", "stop", "train"];
    if std::env::args().nth(1).is_some_and(|word| COMMANDS.contains(&word.as_str())) {
        return elasticdl_cli::main();
    }
    let options = Options::parse();
    let result = match std::env::var_os("KUBECONFIG") {
        Some(_) => measure(&options),
        None => with_cluster(),
    };
    exit_code(result)
}

/// Starts a cluster, runs this program again for it, and stops it.
fn with_cluster() -> Result<(), Fault> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("a crate has a workspace")?;
    let scripts = std::env::var_os("ELASTICDL_CLUSTER_SCRIPTS");
    let scripts = scripts.map_or_else(|| root.join("../shared/cluster"), PathBuf::from);
    if !scripts.join("up").exists() {
        return Err("no cluster: set KUBECONFIG, or ELASTICDL_CLUSTER_SCRIPTS to the folder of \
                    the scripts `up` and `down`"
            .into());
    }
    let up = Command::new(scripts.join("up"))
        .arg("--control-plane-only")
        .stderr(Stdio::inherit())
        .output()?;
    let printed = String::from_utf8_lossy(&up.stdout).into_owned();
    let kubeconfig = printed.lines().last().filter(|_| up.status.success());
    let kubeconfig = kubeconfig.ok_or("the cluster can't be started")?;
    let measured = Command::new(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .env("KUBECONFIG", kubeconfig)
        .status();
    Command::new(scripts.join("down")).status()?;
    if measured?.success() { Ok(()) } else { Err("no result".into()) }
}

fn measure(options: &Options) -> Result<(), Fault> {
    let machines =
        if options.two_jobs.is_some() { Nodes::Small } else { Nodes::Edl(options.nodes) };
    let records = options.two_jobs.map_or(DATASET_RECORDS_MAX, two_jobs::records);
    introduce(options, machines);
    let server = ApiServer::new();
    // The masters' calls are counted in the log.
    let _ = server.audit();
    let temporary = tempfile::tempdir()?;
    let folder = options.logs.as_deref().unwrap_or_else(|| temporary.path());
    let _bridge = Bridge::new()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let client = runtime.block_on(async { kube::Client::try_default().await })?;
    runtime.block_on(machines.create(&client))?;
    let start = Duration::from_millis(options.start_ms);
    let (masters, handle) = (Masters::new(folder)?, runtime.handle().clone());
    let nodes = kubelet::Nodes::new(client.clone(), masters, start, records, handle.clone());
    let cluster =
        Cluster { client: client.clone(), nodes: Arc::clone(&nodes), machines, runtime: handle };
    let heartbeat = server.node_grace() / 2;
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let thread = std::thread::spawn(move || {
        runtime.block_on(async {
            tokio::select! {
                () = machines.keep_alive(client, heartbeat) => {}
                () = nodes.run() => {}
                _ = stopped => {}
            }
        });
    });
    let result = run(options, &cluster);
    let client = cluster.client.clone();
    let deleted = cluster.block_on(async move { Nodes::delete(&client).await });
    drop(stop);
    thread.join().map_err(|_| "the nodes' thread failed")?;
    result.and(deleted)
}

fn run(options: &Options, cluster: &Cluster) -> Result<(), Fault> {
    let mut result = Map::new();
    if let Some(alone) = options.two_jobs {
        result.insert("two_jobs".into(), two_jobs::run(cluster, alone)?);
    }
    if options.mixed {
        result.insert("mixed".into(), mixed::run(cluster)?);
    }
    for &number in options.cases.iter().filter(|_| options.has_cases()) {
        let figures = cluster.run(options, number)?;
        figures.print(number);
        result.insert(format!("case{number}"), figures.to_json());
    }
    let result = Value::Object(result);
    print(&result.to_string());
    if let Some(file) = &options.json {
        std::fs::write(file, serde_json::to_vec_pretty(&result)?)?;
    }
    Ok(())
}

/// Prints what is real and what is simulated.
fn introduce(options: &Options, machines: Nodes) {
    let Options { jobs, max_workers, interval, start_ms, .. } = options;
    let build = if cfg!(debug_assertions) { "unoptimized" } else { "optimized" };
    print(INTRODUCTION);
    print(&format!(
        "{} nodes, {} CPUs, {} of them taken; pods start {start_ms} ms after they are bound; \
         {build} build",
        machines.count(),
        machines.cpus(),
        machines.cpus_taken(),
    ));
    if options.has_cases() {
        print(&format!(
            "{jobs} jobs of {MIN_WORKERS} to {max_workers} workers of {WORKER_CPUS} CPUs, one \
             every {} s; {} workers fit",
            interval.as_secs_f64(),
            machines.capacity(WORKER_CPUS),
        ));
    }
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("{text} is no number of seconds"))?;
    Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
}

const INTRODUCTION: &str = "\
real: API server, scheduler and controllers; the master of each job is a process (TLS, Lease,
  anchor, pods, the rights of its service account); jobs are submitted with `elasticdl train`
simulated: nodes (objects, Leases and the state of pods, without machines); workers (clients of
  the masters' protocol that train nothing, with steps of 0.5 s and heartbeats every 6 s); the
  ring between them; a worker finds its master by the address of its pod, not of its Service";
