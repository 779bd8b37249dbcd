//! The phases of the drill, in their order.

use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::abort_init::abort_init;
use crate::job::job;
use crate::kernels::kernels;
use crate::layer::layer;
use crate::memory::memory;
use crate::processes::Ranks;
use crate::{Drill, Fallible};

/// A phase of the drill.
pub(crate) struct Phase {
    pub(crate) name: &'static str,
    /// What it shows, printed before its figures.
    pub(crate) shows: &'static str,
    pub(crate) run: fn(&mut Drill) -> Fallible<()>,
}

/// In the order of what they are worth on a machine that is lent for minutes.
pub(crate) const ALL: [Phase; 14] = [
    phase(MACHINE, "the machine, and the rates of its copies", machine),
    phase("kernels", "this machine's NVRTC and driver compute what the CPU does", kernels),
    phase("layer", "the GPU's time for the layer's own work in a step", layer),
    phase("job", "records count exactly once over NCCL while workers on GPUs are killed", job),
    phase("staged", "sums over the host's ring, of ranks that share a GPU", staged),
    phase("init", "the time to communicators of NCCL", init),
    phase("abort-init", "a rank that never comes to NCCL's initialization", abort_init),
    phase("kill", "a rank is killed in a sum over NCCL", kill),
    phase("kill-host", "a rank is killed in a sum over the host's ring", kill_on_the_host),
    phase("stop", "a rank is stopped in a sum over NCCL, and evicted after a second", stop),
    phase("abandon", "an abort of NCCL beyond its deadline is reported", abandon),
    phase("memory", "GPU memory after one group with NCCL, and after several", memory),
    phase("nccl", "sums over NCCL, beside NCCL without this layer", nccl),
    phase("exit", "processes that end right after NCCL was finalized end well", exit),
];

/// The phase without which no other makes sense.
pub(crate) const MACHINE: &str = "machine";

const fn phase(
    name: &'static str,
    shows: &'static str,
    run: fn(&mut Drill) -> Fallible<()>,
) -> Phase {
    Phase { name, shows, run }
}

/// Properties of the machine, and its copy rates as upper bounds.
fn machine(drill: &mut Drill) -> Fallible<()> {
    let mut ranks = Ranks::start(drill, 1, false)?;
    let bytes = drill.arguments.bytes_max.min(256 << 20);
    let found = ranks.all(&json!({ "do": "machine", "bytes": bytes }))?.remove(0);
    drill.add(
        "machine",
        format!("GPUs: {}", found["name"].as_str().unwrap_or("")),
        drill.devices as f64,
        "",
    );
    drill.add("machine", "NCCL, as it counts its versions", number(&found["nccl"])?, "");
    for library in found["libraries"].as_array().into_iter().flatten() {
        drill.note("machine", library.as_str().unwrap_or_default());
    }
    drill.copy_rate = number(&found["rates"][2])? * 1e9;
    let names = ["host to device", "device to host", "both at once, each way", "within the device"];
    for (index, name) in names.into_iter().enumerate() {
        drill.add(
            "machine",
            format!("{name}, {}", size(bytes)),
            number(&found["rates"][index])?,
            "GB/s",
        );
    }
    Ok(())
}

/// Time to create NCCL communicators.
fn init(drill: &mut Drill) -> Fallible<()> {
    for world in 1..=3 {
        let mut ranks = Ranks::start(drill, world, false)?;
        // The first communicator of a process loads the library's kernels.
        for (generation, which) in [(1, "first"), (2, "next")] {
            ranks.connect(generation)?;
            let took = slowest(&ranks.all(&begin())?, "s")?;
            drill.add(
                "init",
                format!("{world} ranks, the {which} communicator of a process"),
                took * 1e3,
                "ms",
            );
        }
    }
    Ok(())
}

/// This layer compared with NCCL alone, in one run.
fn nccl(drill: &mut Drill) -> Fallible<()> {
    if drill.devices < 2 {
        let text = "one GPU: two ranks share it in turns and use sockets, so their figures say \
                    nothing about NVLink; those of one rank are a copy within the GPU";
        drill.note("nccl", text);
    }
    for world in worlds(drill) {
        let mut ranks = Ranks::start(drill, world, false)?;
        ranks.connect(1)?;
        ranks.all(&begin())?;
        ranks.all(&json!({ "do": "bare" }))?;
        // Over sockets, more would take minutes.
        let limit = if world > drill.devices { 256 << 20 } else { usize::MAX };
        for bytes in sizes(drill.arguments.bytes_max.min(limit)) {
            drill.check_time()?;
            let command = |n: u64| json!({ "do": "beside", "bytes": bytes, "iterations": n });
            let once = slowest(&ranks.all(&command(2))?, "s")?;
            let answers = ranks.all(&command(drill.iterations(2.0 * once)))?;
            let (ours, bare) = (slowest(&answers, "s")?, slowest(&answers, "bare_s")?);
            drill.add("nccl", format!("{world} ranks, {}", size(bytes)), ours * 1e6, "us");
            drill.add(
                "nccl",
                format!("{world} ranks, {}, of NCCL alone", size(bytes)),
                100.0 * bare / ours,
                "%",
            );
        }
    }
    Ok(())
}

/// Ranks that share a GPU, over the host's ring.
fn staged(drill: &mut Drill) -> Fallible<()> {
    for world in 1..=4 {
        let mut ranks = Ranks::start(drill, world, true)?;
        ranks.connect(1)?;
        for bytes in sizes(drill.arguments.bytes_max.min(256 << 20)) {
            drill.check_time()?;
            let both = [("sum", "staged"), ("host", "host's ring alone")];
            let mut medians = Vec::new();
            for (what, name) in both {
                let command = |n: u64| json!({ "do": what, "bytes": bytes, "iterations": n });
                let once = slowest(&ranks.all(&command(2))?, "s")?;
                medians.push(slowest(&ranks.all(&command(drill.iterations(once)))?, "s")?);
                let median = medians.last().copied().unwrap_or_default();
                drill.add(
                    "staged",
                    format!("{world} ranks, {}, {name}", size(bytes)),
                    median * 1e3,
                    "ms",
                );
            }
            // All ranks share the bus of one GPU.
            let copies = (world * bytes) as f64 / drill.copy_rate;
            let share = 100.0 * medians[1].max(copies) / medians[0];
            let what =
                format!("{world} ranks, {}, of the slower of host's ring and copies", size(bytes));
            drill.add("staged", what, share, "%");
        }
    }
    Ok(())
}

/// A rank is killed during an operation over NCCL.
fn kill(drill: &mut Drill) -> Fallible<()> {
    lose(drill, "kill", "nccl", Signal::KILL)
}

/// A rank is killed during an operation over the host's ring.
fn kill_on_the_host(drill: &mut Drill) -> Fallible<()> {
    lose(drill, "kill-host", "host", Signal::KILL)
}

/// A rank is stopped: no connection ends, and the generation is aborted after a second, as a master
/// would do.
fn stop(drill: &mut Drill) -> Fallible<()> {
    lose(drill, "stop", "nccl", Signal::STOP)
}

fn lose(drill: &mut Drill, phase: &'static str, path: &str, signal: Signal) -> Fallible<()> {
    if path == "nccl" && drill.devices < 3 {
        let text = "ranks share a GPU and use sockets: aborts over NVLink and InfiniBand are not \
                    shown here";
        drill.note(phase, text);
    }
    let bytes = drill.arguments.bytes_lost;
    let mut ranks = Ranks::start(drill, 3, false)?;
    ranks.connect(1)?;
    let host_step = json!({ "do": "sum", "bytes": bytes, "iterations": 1, "path": "host" });
    ranks.all(&host_step)?;
    if path == "nccl" {
        ranks.all(&begin())?;
    }
    let victim = ranks.len() - 1;
    let until_lost = json!({ "do": "until_lost", "bytes": bytes, "path": path });
    (0..ranks.len()).try_for_each(|index| ranks.send(index, &until_lost))?;
    // The duration of the third operation is estimated from the second.
    let turns = (0..3).map(|_| ranks.answer(0)).collect::<Fallible<Vec<_>>>()?;
    let length = number(&turns[2]["turn"])? - number(&turns[1]["turn"])?;
    thread::sleep(Duration::from_secs_f64(length / 2e9));
    let lost = ranks.signal(victim, signal)?;
    if signal == Signal::STOP {
        thread::sleep(SILENCE);
        (0..victim).try_for_each(|index| ranks.send(index, &json!({ "over": 1 })))?;
    }
    let mut ends = Vec::new();
    let until = Instant::now() + ranks.timeout();
    for index in 0..victim {
        ends.push(loop {
            let answer = ranks.answer(index)?;
            if answer["lost"].is_string() {
                break answer;
            }
            if Instant::now() > until {
                return Err(format!("rank {index} does not notice the loss").into());
            }
        });
    }
    ranks.remove(victim);
    let since = |answers: &[Value]| {
        Ok::<_, Box<dyn std::error::Error>>((slowest(answers, "at")? - lost as f64) / 1e6)
    };
    drill.add(phase, format!("{}: to the error on all", size(bytes)), since(&ends)?, "ms");
    ranks.connect(2)?;
    let stepped = ranks.all(&host_step)?;
    drill.add(phase, "to the next step, over the host's ring", since(&stepped)?, "ms");
    drill.add(phase, "of which that step", slowest(&stepped, "s")? * 1e3, "ms");
    ranks.all(&json!({ "do": "intact" }))?;
    if path == "nccl" {
        // A job would not wait for it.
        let released = since(&ranks.all(&json!({ "do": "released" }))?)?;
        drill.add(phase, "to NCCL's release of the communicator, meanwhile", released, "ms");
        let ready = ranks.all(&begin())?;
        drill.add(phase, "to NCCL's return", since(&ready)?, "ms");
        ranks.all(&json!({ "do": "sum", "bytes": bytes, "iterations": 1, "path": "nccl" }))?;
    }
    Ok(())
}

/// An abort with a deadline of zero is given up: the rank reports that its process has to end, so
/// that it can be replaced. An abort that completes before the deadline is looked at is repeated.
fn abandon(drill: &mut Drill) -> Fallible<()> {
    for _ in 0..ABANDON_ATTEMPTS {
        drill.check_time()?;
        let mut ranks = Ranks::start(drill, 2, false)?;
        ranks.connect(1)?;
        ranks.all(&json!({ "do": "nccl", "init_ms": INIT_MS, "abort_ms": 0 }))?;
        // Rank 1 does not take part, so that the operation of rank 0 stays on the stream.
        let bytes = drill.arguments.bytes_lost;
        ranks.send(0, &json!({ "do": "until_lost", "bytes": bytes, "path": "nccl" }))?;
        thread::sleep(SILENCE);
        ranks.send(0, &json!({ "over": 1 }))?;
        let answer = ranks.answer(0)?;
        let lost = answer["lost"].as_str().unwrap_or("");
        if lost.contains("this process can't use its GPU any more") {
            drill.add("abandon", "an abort beyond its deadline is reported", 1.0, "");
            return Ok(());
        }
        if !lost.contains("aborted") {
            return Err(format!("unexpected error: {lost}").into());
        }
    }
    Err(format!("{ABANDON_ATTEMPTS} aborts with a deadline of zero were all in time").into())
}

/// Processes that end right after an operation over NCCL, as a worker does: the communicator is
/// finalized, and `main` returns. None fails in the destructors of CUDA or NCCL.
fn exit(drill: &mut Drill) -> Fallible<()> {
    const PROCESSES: usize = 2;
    let bytes = drill.arguments.bytes_max.min(1 << 20);
    for _ in 0..EXITS {
        drill.check_time()?;
        let mut ranks = Ranks::start(drill, PROCESSES, false)?;
        ranks.connect(1)?;
        ranks.all(&begin())?;
        ranks.all(&json!({ "do": "sum", "bytes": bytes, "iterations": 1, "path": "nccl" }))?;
        ranks.all(&json!({ "do": "exit" }))?;
        ranks.wait_for_ends()?;
    }
    let processes = (EXITS * PROCESSES) as f64;
    drill.add("exit", "processes that ended well after an operation over NCCL", processes, "");
    Ok(())
}

/// The command to build a communicator and wait for it.
pub(crate) fn begin() -> Value {
    json!({ "do": "nccl", "init_ms": INIT_MS, "abort_ms": 5000 })
}

/// World sizes: one rank, and as many as there are GPUs; two ranks on one GPU.
fn worlds(drill: &Drill) -> [usize; 2] {
    [1, drill.devices.clamp(2, 8)]
}

/// Buffer sizes from 4 KiB to `most`, each four times the one before.
fn sizes(most: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(4096), |bytes| Some(bytes * 4))
        .take_while(move |bytes| *bytes <= most)
}

pub(crate) fn slowest(answers: &[Value], name: &str) -> Fallible<f64> {
    answers.iter().try_fold(0.0_f64, |most, answer| Ok(most.max(number(&answer[name])?)))
}

pub(crate) fn number(value: &Value) -> Fallible<f64> {
    value.as_f64().ok_or_else(|| format!("a rank answered {value} instead of a number").into())
}

fn size(bytes: usize) -> String {
    match bytes {
        0..0x10_0000 => format!("{} KiB", bytes >> 10),
        0x10_0000..0x4000_0000 => format!("{} MiB", bytes >> 20),
        _ => format!("{} GiB", bytes >> 30),
    }
}

/// Groups of processes that end.
const EXITS: usize = 10;

/// Aborts with a deadline of zero, until one is reported as abandoned.
const ABANDON_ATTEMPTS: usize = 10;

/// Limit of an initialization of NCCL that is expected to succeed.
pub(crate) const INIT_MS: u64 = 60_000;

/// Time after which a silent worker is detected.
const SILENCE: Duration = Duration::from_secs(1);
