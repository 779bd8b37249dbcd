//! Jobs of different weights and sizes of workers, one of which ends, beside a namespace with a
//! quota: who gets what, and how fast the others grow.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use elasticdl_tests::cluster::{Namespace, must};
use elasticdl_tests::print;
use serde_json::{Value, json};

use crate::Fault;
use crate::case::{Cluster, Shape};

/// Workers of a job of the run.
#[derive(Clone, Copy)]
struct Entry {
    name: &'static str,
    shape: Shape,
    weight: f64,
}

impl Entry {
    /// CPUs that so many of its workers take.
    fn cpus(&self, workers: usize) -> usize {
        workers * self.shape.cpus as usize
    }
}

/// Runs the jobs until their sizes are stable, stops one, and waits until the others have its CPUs.
pub(crate) fn run(cluster: &Cluster) -> Result<Value, Fault> {
    let (open, limited) = (cluster.namespace("open")?, cluster.namespace("limited")?);
    // The master, and five workers.
    limited.set_pod_quota(LIMITED_WORKERS as u32 + 1);
    let home = |entry: &Entry| if entry.name == "limited" { &limited } else { &open };
    for entry in &ENTRIES {
        let mut command = entry.shape.submission(home(entry), entry.name, Some(entry.weight));
        must(&mut command);
    }
    let is_over = AtomicBool::new(false);
    let result = std::thread::scope(|scope| {
        let starved = scope.spawn(|| starvations(cluster, &is_over));
        let measured = measure(cluster, home(&ENTRIES[ENDING]));
        is_over.store(true, Ordering::Relaxed);
        let starved = starved.join().map_err(|_| "the sampler failed")?;
        measured.map(|measured| (measured, starved))
    });
    cluster.delete(open);
    cluster.delete(limited);
    let (Measured { shared, grown, growth_s }, starved) = result?;
    print("four jobs beside each other, then three");
    for (i, entry) in ENTRIES.iter().enumerate() {
        let Entry { name, shape, weight } = entry;
        print(&format!(
            "  {name:<8} {:>2} CPUs per worker, weight {weight:<4} {:>3} workers, {:>3} CPUs; \
             then {:>3} workers",
            shape.cpus,
            shared[i],
            entry.cpus(shared[i]),
            grown[i],
        ));
    }
    print(&format!(
        "  the others have {:.0} % of the CPUs {growth_s:.1} s after `{}` was stopped",
        GROWN * 100.0,
        ENTRIES[ENDING].name
    ));
    print(&format!(
        "  seconds in which a job had less than its minimum, once it had it: {starved}"
    ));
    Ok(json!({
        "workers": names(&shared),
        "workers_after_one_ended": names(&grown),
        "growth_s": growth_s,
        "seconds_below_minimum": starved,
    }))
}

fn names(workers: &[usize]) -> Value {
    ENTRIES.iter().zip(workers).map(|(entry, &workers)| (entry.name, workers)).collect()
}

struct Measured {
    /// Workers of each job beside all others.
    shared: Vec<usize>,
    /// Workers of each job after one has ended.
    grown: Vec<usize>,
    growth_s: f64,
}

fn measure(cluster: &Cluster, home: &Namespace) -> Result<Measured, Fault> {
    let shared = stable(cluster)?;
    let cpus = |workers: &[usize]| -> usize {
        ENTRIES.iter().zip(workers).map(|(entry, &workers)| entry.cpus(workers)).sum()
    };
    let before = cpus(&shared);
    let stopped = Instant::now();
    must(&mut home.elasticdl("stop", [ENTRIES[ENDING].name]));
    let deadline = stopped + TIMEOUT;
    let growth_s = loop {
        let workers = workers(cluster);
        if workers[ENDING] == 0 && cpus(&workers) as f64 >= GROWN * before as f64 {
            break stopped.elapsed().as_secs_f64();
        }
        if Instant::now() >= deadline {
            return Err(format!("the jobs do not grow: {workers:?} after {shared:?}").into());
        }
        std::thread::sleep(POLL);
    };
    Ok(Measured { shared, grown: stable(cluster)?, growth_s })
}

/// The workers of each job, once they have been the same for a while.
fn stable(cluster: &Cluster) -> Result<Vec<usize>, Fault> {
    let deadline = Instant::now() + TIMEOUT;
    let (mut last, mut since) = (workers(cluster), Instant::now());
    while since.elapsed() < STABLE || last.iter().sum::<usize>() == 0 {
        if Instant::now() >= deadline {
            return Err(format!("the jobs' sizes keep changing: {last:?}").into());
        }
        std::thread::sleep(POLL);
        let now = workers(cluster);
        if now != last {
            (last, since) = (now, Instant::now());
        }
    }
    Ok(last)
}

/// Seconds in which a job that had its minimum had less, over all jobs but the one that ends.
fn starvations(cluster: &Cluster, is_over: &AtomicBool) -> usize {
    let mut had = [false; ENTRIES.len()];
    let mut seconds = 0;
    while !is_over.load(Ordering::Relaxed) {
        for (i, running) in workers(cluster).into_iter().enumerate().filter(|(i, _)| *i != ENDING) {
            let has = running >= ENTRIES[i].shape.least as usize;
            seconds += usize::from(had[i] && !has);
            had[i] |= has;
        }
        std::thread::sleep(Duration::from_secs(1));
    }
    seconds
}

fn workers(cluster: &Cluster) -> Vec<usize> {
    let observed = cluster.nodes.observed();
    ENTRIES.iter().map(|entry| observed.workers(entry.name).running).collect()
}

const fn entry(name: &'static str, cpus: u32, weight: f64) -> Entry {
    Entry { name, shape: Shape { cpus, least: 2, most: 200 }, weight }
}

const ENTRIES: [Entry; 4] = [
    entry("light", 5, 1.0),
    entry("heavy", 5, 2.0),
    // Tiers count workers: with half the weight, its share of CPUs is that of `light`.
    entry("large", 10, 0.5),
    entry("limited", 5, 1.0),
];
/// The job that is stopped: `heavy`.
const ENDING: usize = 1;
const LIMITED_WORKERS: usize = 5;
/// Part of the CPUs that the others have when they count as grown.
const GROWN: f64 = 0.95;
const STABLE: Duration = Duration::from_secs(25);
const POLL: Duration = Duration::from_millis(100);
const TIMEOUT: Duration = Duration::from_secs(300);
