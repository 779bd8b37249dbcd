//! The phase `baseline`.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::phases::{number, size, sizes};
use crate::{Drill, Fallible, LeftOut};

/// Measures the all-reduce of `torch.distributed` on the same GPUs, as a baseline for the phase
/// `nccl`: what users of PyTorch have. It needs a Python with PyTorch and two GPUs or more.
pub(crate) fn baseline(drill: &mut Drill) -> Fallible<()> {
    let (version, gpus) = probe(&drill.arguments.python)?;
    let is_on_cpu = drill.arguments.baseline_on_cpu;
    let world = if is_on_cpu { 2 } else { gpus.min(8) };
    if world < 2 {
        let reason = format!("PyTorch {version} sees {gpus} GPUs, and its all-reduce needs two");
        return Err(LeftOut(reason).into());
    }
    let output = run(drill, world, if is_on_cpu { "cpu" } else { "cuda" })?;
    // A library may write there, too.
    for line in output.lines().filter(|line| line.starts_with('{')) {
        let answer: Value = serde_json::from_str(line)?;
        let (bytes, theirs) = (number(&answer["bytes"])? as usize, number(&answer["s"])? * 1e6);
        let case = format!("{world} ranks, {}", size(bytes));
        drill.add("baseline", format!("{case}, PyTorch {version}"), theirs, "us");
        let ours = drill.figures.iter().find(|one| one.phase == "nccl" && one.what == case);
        if let Some(ours) = ours.map(|figure| figure.value) {
            let what = format!("{case}, of PyTorch's speed");
            drill.add("baseline", what, 100.0 * theirs / ours, "%");
        }
    }
    Ok(())
}

/// The version of PyTorch, and the number of GPUs that it sees.
fn probe(python: &Path) -> Fallible<(String, usize)> {
    let output = Command::new(python).args(["-c", PROBE]).output();
    let output = output.map_err(|error| LeftOut(format!("{}: {error}", python.display())))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        let last = text.trim().lines().last().unwrap_or_default().to_owned();
        return Err(LeftOut(format!("{} has no PyTorch: {last}", python.display())).into());
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let mut words = text.split_whitespace();
    let (version, gpus) = words.next().zip(words.next()).ok_or("PyTorch has no version")?;
    Ok((version.to_owned(), gpus.parse()?))
}

/// A process that is killed if it is still running when this is dropped.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // A process that has ended already is only reaped.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs the script on all ranks, and returns what rank 0 printed.
fn run(drill: &Drill, world: usize, device: &str) -> Fallible<String> {
    let folder = tempfile::tempdir()?;
    let script = folder.path().join("baseline.py");
    fs::write(&script, SCRIPT)?;
    let file = |name: String| File::create(folder.path().join(name));
    let mut processes = Vec::new();
    for rank in 0..world {
        let child = Command::new(&drill.arguments.python)
            .arg(&script)
            .args([rank.to_string(), world.to_string()])
            .arg(folder.path().join("ranks"))
            .args([device.to_owned(), (drill.arguments.effort_ms as f64 / 1e3).to_string()])
            .args(sizes(drill.arguments.bytes_max).map(|bytes| bytes.to_string()))
            .stdin(Stdio::null())
            .stdout(file(format!("output-{rank}"))?)
            .stderr(file(format!("errors-{rank}"))?)
            .spawn()?;
        processes.push(Process(child));
    }
    let until = Instant::now() + drill.left().min(TIMEOUT);
    for (rank, process) in processes.iter_mut().enumerate() {
        let status = loop {
            match process.0.try_wait()? {
                Some(status) => break status,
                None if Instant::now() > until => return Err("PyTorch does not end".into()),
                None => thread::sleep(Duration::from_millis(20)),
            }
        };
        if !status.success() {
            let errors = fs::read_to_string(folder.path().join(format!("errors-{rank}")))?;
            return Err(format!("PyTorch's rank {rank}: {status}: {}", errors.trim()).into());
        }
    }
    Ok(fs::read_to_string(folder.path().join("output-0"))?)
}

const SCRIPT: &str = include_str!("baseline.py");
const PROBE: &str = "import torch
print(torch.__version__, torch.cuda.device_count() if torch.cuda.is_available() else 0)";
const TIMEOUT: Duration = Duration::from_secs(120);
