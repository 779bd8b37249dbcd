//! What the processes of a job use while nothing happens, as the kernel counts it.

use std::collections::BTreeSet;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use elasticdl_tests::churn::Bench;
use serde_json::{Map, Value, json};

type Fallible<T> = Result<T, Box<dyn Error>>;

/// Measures the job during this many steps. All that is of a rank is the mean over the ranks.
pub(crate) fn measure_quiet(bench: &mut Bench, steps: u64) -> Fallible<Map<String, Value>> {
    let (master, workers) = (bench.master(), bench.pids());
    let (began, step, before) = (Instant::now(), bench.step(), Counted::of(master, &workers)?);
    bench.run_steps(steps)?;
    let after = Counted::of(master, &workers)?;
    let (seconds, steps) = (began.elapsed().as_secs_f64(), bench.step() - step);
    let rank_steps = (steps * workers.len() as u64) as f64;
    let more = |of: fn(&Counted) -> u64| of(&after).saturating_sub(of(&before)) as f64;
    let mut resident = Resident::default();
    for &pid in &workers {
        resident.add(pid)?;
    }
    let mean = |total: u64| total as f64 / workers.len() as f64;
    let mib = |kib: f64| kib / 1024.0;
    let measured = [
        ("steps", json!(steps)),
        ("trainer_cpu_us", json!(more(|c| c.trainers_ns) / 1e3 / rank_steps)),
        ("rank_cpu_us", json!(more(|c| c.workers_ns) / 1e3 / rank_steps)),
        ("link_bytes", json!(more(|c| c.sockets.received) / rank_steps)),
        ("link_segments", json!(more(|c| c.sockets.segments) / rank_steps)),
        ("links", json!(mean(after.sockets.links))),
        (
            "stream_bytes_per_s",
            json!(more(|c| c.sockets.streamed) / workers.len() as f64 / seconds),
        ),
        ("private_mib", json!(mib(mean(resident.private_kib)))),
        ("resident_mib", json!(mib(mean(resident.resident_kib)))),
        ("descriptors", json!(mean(resident.descriptors))),
        ("threads", json!(mean(resident.threads))),
        ("master_cpu_percent", json!(100.0 * more(|c| c.master_ns) / 1e9 / seconds)),
        ("master_mib", json!(mib(kib(&status(master)?, "VmRSS:") as f64))),
        ("load", json!(load()?)),
    ];
    Ok(measured.map(|(name, value)| (name.to_owned(), value)).into_iter().collect())
}

/// Counters of all processes at one time.
struct Counted {
    master_ns: u64,
    workers_ns: u64,
    trainers_ns: u64,
    sockets: Sockets,
}

impl Counted {
    fn of(master: u32, workers: &[u32]) -> Fallible<Self> {
        let mut counted = Self {
            master_ns: process_ns(master)?,
            workers_ns: 0,
            trainers_ns: 0,
            sockets: Sockets::of(master, workers)?,
        };
        for &pid in workers {
            counted.workers_ns += process_ns(pid)?;
            // That of the main thread.
            counted.trainers_ns += run_ns(&proc(pid).join("schedstat"))?;
        }
        Ok(counted)
    }
}

/// Bytes on the sockets of the workers.
#[derive(Default)]
struct Sockets {
    /// Number of links between ranks, where each of its two ends counts.
    links: u64,
    /// Bytes received on links.
    received: u64,
    /// Segments with data sent on links.
    segments: u64,
    /// Bytes sent and received on the streams to the master.
    streamed: u64,
}

impl Sockets {
    fn of(master: u32, workers: &[u32]) -> Fallible<Self> {
        let listed = Command::new("ss").args(["-tniHpO", "state", "established"]).output()?;
        let listed = String::from_utf8(listed.stdout)?;
        let sockets: Vec<Socket<'_>> = listed.lines().filter_map(Socket::parse).collect();
        let of_master = sockets.iter().filter(|socket| socket.pid == master);
        let of_master: BTreeSet<&str> = of_master.map(|socket| socket.local).collect();
        let workers: BTreeSet<u32> = workers.iter().copied().collect();
        let mut sum = Self::default();
        for socket in sockets.iter().filter(|socket| workers.contains(&socket.pid)) {
            let (sent, received) = (socket.count("bytes_sent:"), socket.count("bytes_received:"));
            if of_master.contains(socket.peer) {
                sum.streamed += sent + received;
            } else {
                sum.links += 1;
                sum.received += received;
                sum.segments += socket.count("data_segs_out:");
            }
        }
        Ok(sum)
    }
}

/// A line of `ss`.
struct Socket<'a> {
    pid: u32,
    local: &'a str,
    peer: &'a str,
    line: &'a str,
}

impl<'a> Socket<'a> {
    /// `None` for a socket of no process.
    fn parse(line: &'a str) -> Option<Self> {
        let mut words = line.split_whitespace().skip(2);
        let (local, peer) = (words.next()?, words.next()?);
        let pid = line.split_once("pid=")?.1.split(',').next()?.parse().ok()?;
        Some(Self { pid, local, peer, line })
    }

    /// The counter of this name; 0 if it is not there, as for one that has counted nothing.
    fn count(&self, name: &str) -> u64 {
        let mut words = self.line.split_whitespace();
        words.find_map(|word| word.strip_prefix(name)?.parse().ok()).unwrap_or(0)
    }
}

/// Sums over the workers.
#[derive(Default)]
struct Resident {
    private_kib: u64,
    resident_kib: u64,
    descriptors: u64,
    threads: u64,
}

impl Resident {
    fn add(&mut self, pid: u32) -> Fallible<()> {
        let status = status(pid)?;
        self.resident_kib += kib(&status, "VmRSS:");
        self.threads += kib(&status, "Threads:");
        let maps = std::fs::read_to_string(proc(pid).join("smaps_rollup"))?;
        self.private_kib += kib(&maps, "Private_Clean:") + kib(&maps, "Private_Dirty:");
        self.descriptors += std::fs::read_dir(proc(pid).join("fd"))?.count() as u64;
        Ok(())
    }
}

fn proc(pid: u32) -> PathBuf {
    Path::new("/proc").join(pid.to_string())
}

fn status(pid: u32) -> std::io::Result<String> {
    std::fs::read_to_string(proc(pid).join("status"))
}

/// The number after `name`, in KiB where it is memory.
fn kib(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

/// CPU time of all threads of a process, in nanoseconds.
fn process_ns(pid: u32) -> Fallible<u64> {
    let threads = std::fs::read_dir(proc(pid).join("task"))?;
    // A thread may end meanwhile.
    let ns = |thread: std::fs::DirEntry| run_ns(&thread.path().join("schedstat")).unwrap_or(0);
    Ok(threads.filter_map(Result::ok).map(ns).sum())
}

fn run_ns(schedstat: &Path) -> Fallible<u64> {
    let text = std::fs::read_to_string(schedstat)?;
    Ok(text.split_whitespace().next().ok_or("no time in schedstat")?.parse()?)
}

fn load() -> Fallible<f64> {
    let text = std::fs::read_to_string("/proc/loadavg")?;
    Ok(text.split_whitespace().next().ok_or("no load")?.parse()?)
}
