//! The phase `memory`.

use std::collections::BTreeMap;
use std::process::Command;
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use crate::phases::{begin, number};
use crate::ranks::Ranks;
use crate::{Drill, Fallible};

/// Shows whether memory of the GPU stays occupied after the end of a group: two ranks build group
/// after group, each with a communicator of NCCL. Afterwards, what `nvidia-smi` lists for each
/// process, and what the driver reports for the GPU of rank 0 as a whole, are as after the first
/// group, but for what NCCL keeps once. Other programs on that GPU would change the latter.
pub(crate) fn memory(drill: &mut Drill) -> Fallible<()> {
    let bytes = drill.arguments.bytes_max.min(1 << 20);
    let mut ranks = Ranks::start(drill, 2, false)?;
    let sum = json!({ "do": "sum", "bytes": bytes, "iterations": 1, "path": "nccl" });
    for group in 1..=GROUPS {
        drill.check_time()?;
        ranks.connect(group)?;
        ranks.all(&begin())?;
        ranks.all(&sum)?;
        if group == 1 || group == GROUPS {
            // The communicator of the group before is released in the background.
            thread::sleep(RELEASE_TIME);
            measure(drill, &mut ranks, group)?;
        }
    }
    Ok(())
}

fn measure(drill: &mut Drill, ranks: &mut Ranks, group: u64) -> Fallible<()> {
    let answers = ranks.all(&json!({ "do": "memory" }))?;
    let used = number(&answers[0]["used"])? / MIB;
    drill.add("memory", format!("group {group}: used on the GPU of rank 0"), used, "MiB");
    let listed = match listed() {
        Ok(listed) => listed,
        Err(reason) => {
            drill.note("memory", format!("no figures of processes: {reason}"));
            return Ok(());
        }
    };
    let of = |answer: &Value| listed.get(&answer["pid"].as_u64()?).copied();
    let Some(of_ranks) = answers.iter().map(of).collect::<Option<Vec<f64>>>() else {
        let text = "no figures of processes: nvidia-smi does not list the ranks, as in a container \
                    with process ids of its own";
        drill.note("memory", text);
        return Ok(());
    };
    for (rank, used) in of_ranks.into_iter().enumerate() {
        drill.add("memory", format!("group {group}: used by rank {rank}"), used, "MiB");
    }
    Ok(())
}

/// The memory in MiB of each process that `nvidia-smi` lists; otherwise why there is none.
fn listed() -> Result<BTreeMap<u64, f64>, String> {
    let arguments = ["--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"];
    let output = Command::new("nvidia-smi")
        .args(arguments)
        .output()
        .map_err(|error| format!("nvidia-smi: {error}"))?;
    if !output.status.success() {
        return Err(format!("nvidia-smi: {}", String::from_utf8_lossy(&output.stdout).trim()));
    }
    // A process with memory on several GPUs has several lines. Where the driver does not know the
    // memory, a line has a text in its place.
    let mut all = BTreeMap::new();
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let Some((pid, used)) = line.split_once(',') else { continue };
        if let (Ok(pid), Ok(used)) = (pid.trim().parse(), used.trim().parse::<f64>()) {
            *all.entry(pid).or_default() += used;
        }
    }
    Ok(all)
}

const GROUPS: u64 = 6;
const RELEASE_TIME: Duration = Duration::from_secs(1);
const MIB: f64 = (1 << 20) as f64;
