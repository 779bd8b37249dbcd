//! ElasticDL's experiment: two jobs of four workers in a cluster with CPUs for six, first rigid,
//! then elastic from one worker on.

use std::time::{Duration, Instant};

use elasticdl_tests::cluster::must;
use elasticdl_tests::print;
use serde_json::{Value, json};

use crate::Fault;
use crate::case::{Cluster, Shape};
use crate::group::{RECORDS_PER_RANK, STEP_US};

/// Times of a pair of jobs, in seconds from the first submission.
#[derive(Clone, Copy, Debug)]
struct Times {
    /// From the second submission until the second job trains.
    second_waits: f64,
    total: f64,
}

/// Records with which a job of four workers trains for so long.
pub(crate) fn records(time: Duration) -> u64 {
    let steps = time.as_micros() as u64 / STEP_US;
    steps * u64::from(WORKERS) * RECORDS_PER_RANK
}

/// Runs both pairs, whose jobs take `alone` with four workers.
pub(crate) fn run(cluster: &Cluster, alone: Duration) -> Result<Value, Fault> {
    let rigid = pair(cluster, "rigid", WORKERS)?;
    let elastic = pair(cluster, "elastic", 1)?;
    print(&format!(
        "two jobs of {WORKERS} workers, each {:.0} s alone (ElasticDL: the second trains at once \
         instead of after 395 s, total 580 s instead of 795 s)",
        alone.as_secs_f64()
    ));
    for (name, Times { second_waits, total }) in [("rigid", rigid), ("elastic", elastic)] {
        print(&format!(
            "  {name:<8} the second trains after {second_waits:.1} s, total {total:.1} s"
        ));
    }
    let part = rigid.total / elastic.total;
    print(&format!("  the rigid pair takes {part:.2} times as long (ElasticDL: 1.37)"));
    let times =
        |Times { second_waits, total }| json!({"second_waits_s": second_waits, "total_s": total});
    Ok(json!({"alone_s": alone.as_secs_f64(), "rigid": times(rigid), "elastic": times(elastic)}))
}

fn pair(cluster: &Cluster, name: &str, least: u32) -> Result<Times, Fault> {
    let namespace = cluster.namespace(name)?;
    let shape = Shape { cpus: WORKER_CPUS, least, most: WORKERS };
    let names = ["first", "second"].map(|which| format!("{name}-{which}"));
    let jobs = names.clone().map(|job| cluster.nodes.job(&job));
    let begin = Instant::now();
    must(&mut shape.submission(&namespace, &names[0], None));
    let committed = |job: usize| jobs[job].totals().committed;
    wait_until(|| committed(0) > 0)?;
    let second = Instant::now();
    must(&mut shape.submission(&namespace, &names[1], None));
    wait_until(|| committed(1) > 0)?;
    let second_waits = second.elapsed().as_secs_f64();
    wait_until(|| (0..2).all(|job| committed(job) == jobs[job].records))?;
    let total = begin.elapsed().as_secs_f64();
    cluster.delete(namespace);
    Ok(Times { second_waits, total })
}

fn wait_until(is_met: impl Fn() -> bool) -> Result<(), Fault> {
    let deadline = Instant::now() + TIMEOUT;
    while !is_met() {
        if Instant::now() >= deadline {
            return Err("the jobs do not train".into());
        }
        std::thread::sleep(POLL);
    }
    Ok(())
}

const WORKERS: u32 = 4;
/// With four workers per job, one job and a half fit.
const WORKER_CPUS: u32 = 4;
const POLL: Duration = Duration::from_millis(50);
const TIMEOUT: Duration = Duration::from_secs(1800);
