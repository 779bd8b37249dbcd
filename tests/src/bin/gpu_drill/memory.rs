//! The phase `memory`.

use std::thread;
use std::time::Duration;

use serde_json::json;

use crate::phases::{begin, number};
use crate::processes::Ranks;
use crate::{Drill, Fallible};

/// Shows whether memory of the GPU stays occupied after the end of a group: two ranks build group
/// after group, each with a communicator of NCCL. Afterwards, what the driver reports for the GPU
/// of rank 0 is as after the first group, but for what NCCL keeps once. Other programs on that GPU
/// would change it.
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
            let used = number(&ranks.all(&json!({ "do": "memory" }))?[0]["used"])? / MIB;
            let what = format!("group {group}: used on the GPU of rank 0");
            drill.add("memory", what, used, "MiB");
        }
    }
    Ok(())
}

const GROUPS: u64 = 6;
const RELEASE_TIME: Duration = Duration::from_secs(1);
const MIB: f64 = (1 << 20) as f64;
