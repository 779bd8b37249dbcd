//! Figures of a job in a real cluster: the timeline of its start, the cost of a killed worker, the
//! master's memory, and what a service gets that starts beside workers which use all CPUs of the
//! node and request few of them.
//!
//! For the cluster that `$KUBECONFIG` names, whose node is this machine, with the test image
//! (`.ci/test-image release`).

use std::time::{Duration, Instant, SystemTime};

use clap::Parser;
use elasticdl_proto::Cause;
use elasticdl_tests::cluster::{
    FIRST_GRADIENT, FIRST_UPDATE, Job, Namespace, PodWatch, must, name, since_midnight,
    time_of_line, uid,
};
use serde_json::Value;

#[derive(Parser)]
struct Options {
    /// Workers.
    #[arg(long, default_value_t = 4)]
    workers: usize,
    /// Workers to kill, one after another.
    #[arg(long, default_value_t = 5)]
    kills: usize,
}

#[expect(clippy::print_stdout, reason = "it is what the command is for")]
fn main() {
    let options = Options::parse();
    let elasticdl = std::env::current_exe()
        .expect("a program has a path")
        .with_file_name("elasticdl-under-test");
    must(std::process::Command::new(&elasticdl).arg("--version"));
    let namespace = Namespace::new("figures", elasticdl);
    namespace.apply_rbac();
    let pod_watch = PodWatch::watch(&namespace);
    let workers = options.workers.to_string();
    let begin = since_midnight(SystemTime::now());
    // Steps of 16 ms for four workers.
    let job =
        Job::start(&namespace, "count", &["--num-workers", &workers, "--num-epochs", "200"], 1000);
    let pods = job.wait_for_group(options.workers);
    let master = master(&namespace);
    println!("seconds from submission, {workers} workers:");
    let show = |what: &str, times: &[Duration]| {
        let seconds = |t: &Duration| format!("{:.2}", t.saturating_sub(begin).as_secs_f64());
        let [first, .., last] = times else {
            return println!(
                "  {what:<16} {}",
                times.first().map_or_else(|| "not seen".into(), seconds)
            );
        };
        println!("  {what:<16} {} to {}", seconds(first), seconds(last));
    };
    show("master running", &pod_watch.times("count-master", "Running"));
    show("workers created", &pod_watch.times("count-w-", "Pending"));
    show("workers running", &pod_watch.times("count-w-", "Running"));
    let times = |pods: &[Value], words: &str| {
        let mut times: Vec<_> =
            pods.iter().filter_map(|pod| time_of_line(&namespace, name(pod), words)).collect();
        times.sort_unstable();
        times
    };
    show("workers joined", &times(&pods, "welcomed"));
    show("first step", &times(&pods, FIRST_UPDATE)[..1]);
    let mut pods = pods;
    println!(
        "killed workers: survivors' gap (ms), until the replacement's pod is created, runs, \
         contributes (s):"
    );
    for _ in 0..options.kills {
        let (killed, at) = (pods[0].clone(), since_midnight(SystemTime::now()));
        namespace.kill_inside(&killed);
        let others = job.wait_for_others(options.workers, &pods[..1]);
        let new = others.iter().find(|pod| pods.iter().all(|before| uid(before) != uid(pod)));
        let new = new.expect("another took its place");
        let contributes =
            job.wait_for("it contributes", || time_of_line(&namespace, name(new), FIRST_GRADIENT));
        let times = [
            pod_watch.times(name(new), "Pending").first().copied(),
            pod_watch.times(name(new), "Running").first().copied(),
            Some(contributes),
        ];
        let seconds = times.map(|t| t.map_or(f64::NAN, |t| t.saturating_sub(at).as_secs_f64()));
        let memberships = job.status().memberships;
        let lost = memberships.iter().rfind(|change| change.cause == Cause::Lost);
        let gap = lost.and_then(|change| change.gap_ms).unwrap_or(f64::NAN);
        println!("  {gap:>7.1}   {:.2}  {:.2}  {:.2}", seconds[0], seconds[1], seconds[2]);
        pods = others;
    }
    println!("the master's memory at most: {} MiB", peak_kib(master) / 1024);
    job.assert_completes(200);
    println!("CPUs of two workers that request 0.01, and of a service that requests 1:");
    for (when, workers, service) in shares(&namespace) {
        println!("  {when:<28} {workers:.2}  {service:.2}");
    }
}

/// CPUs of two busy workers, and of a service, which is a job of one, before, beside and after it.
fn shares(namespace: &Namespace) -> [(String, f64, f64); 3] {
    let start = |name, workers: &str, cpu: &str| {
        let resources = format!("cpu={cpu},memory=64Mi");
        let options =
            ["--num-workers", workers, "--worker-resources", &resources, "--num-epochs", "1000"];
        Job::start_program(namespace, name, &options, &["--micros-per-record", "1000", "--busy"])
    };
    let job = start("workers", "2", "0.01");
    let pods = job.wait_for_group(2);
    let [before, _] = cpus([&pods, &[]]);
    let begun = Instant::now();
    let service = start("service", "1", "1");
    let of_service = service.wait_for("its worker", || {
        let pods = namespace.running_workers("service");
        let first = pods.first().and_then(|pod| time_of_line(namespace, name(pod), FIRST_UPDATE));
        first.map(|_| pods)
    });
    let started = begun.elapsed().as_secs_f64();
    let [beside, of_service] = cpus([&pods, &of_service]);
    service.assert_deletes();
    let [after, _] = cpus([&pods, &[]]);
    let uids = |pods: &[Value]| -> Vec<String> { pods.iter().map(|p| uid(p).into()).collect() };
    assert_eq!(uids(&job.wait_for_group(2)), uids(&pods), "a worker was lost");
    job.assert_deletes();
    [
        ("before".into(), before, 0.0),
        (format!("beside it, from {started:.1} s on"), beside, of_service),
        ("after".into(), after, 0.0),
    ]
}

/// CPUs that the programs of these pods use, over 5 s.
fn cpus(pods: [&[Value]; 2]) -> [f64; 2] {
    let pids = pods.map(|pods| {
        pods.iter().flat_map(|pod| Namespace::processes_inside(pod, "counting")).collect::<Vec<_>>()
    });
    let used = || pids.each_ref().map(|pids| pids.iter().map(|&pid| ticks(pid)).sum::<u64>());
    let (before, begun) = (used(), Instant::now());
    std::thread::sleep(Duration::from_secs(5));
    let (after, passed) = (used(), begun.elapsed().as_secs_f64());
    let rate = |at: usize| {
        (after[at] - before[at]) as f64 / rustix::param::clock_ticks_per_second() as f64 / passed
    };
    [rate(0), rate(1)]
}

/// CPU time of a process, in clock ticks.
fn ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name, in parentheses, may have spaces.
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace().skip(11).take(2);
    fields.map(|field| field.parse::<u64>().expect("the system gives numbers")).sum()
}

fn master(namespace: &Namespace) -> u32 {
    let pods = namespace.get("pods", "elasticdl/role=master");
    let pid = pods.first().and_then(|pod| Namespace::process_inside(pod, "elasticdl"));
    pid.expect("the master runs on this machine")
}

fn peak_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or("0 kB");
    peak.trim().trim_end_matches(" kB").parse().expect("the system gives a number")
}
