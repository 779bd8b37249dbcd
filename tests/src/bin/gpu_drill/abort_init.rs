//! The phase `abort-init`.

use std::time::Duration;

use serde_json::{Value, json};

use crate::phases::{INIT_MS, begin, slowest};
use crate::processes::Ranks;
use crate::{Drill, Fallible};

/// Shows that an initialization of NCCL to which one rank never comes holds up no rank: steps
/// continue over the host's ring while the others wait in NCCL, while NCCL is aborted, and after.
/// NCCL is aborted when its time is up, then once more because the generation ends; both times,
/// the figure is the time until NCCL has released the communicator. Then NCCL comes back without
/// the rank.
pub(crate) fn abort_init(drill: &mut Drill) -> Fallible<()> {
    let bytes = drill.arguments.bytes_max.min(1 << 20);
    let sum = json!({ "do": "sum", "bytes": bytes, "iterations": 9, "path": "host" });
    let mut ranks = Ranks::start_without_nccl_of_last(drill, 3)?;
    let step = |drill: &mut Drill, ranks: &mut Ranks, when: &str| {
        let median = slowest(&ranks.all(&sum)?, "s")?;
        drill.add("abort-init", format!("a sum over the host's ring, {when}"), median * 1e3, "ms");
        Fallible::Ok(())
    };
    ranks.connect(1)?;
    step(drill, &mut ranks, "without NCCL")?;
    ranks.all(&begin_only(HANG_TIME))?;
    step(drill, &mut ranks, "while ranks wait in NCCL")?;
    let ends = ranks.all(&json!({ "do": "settle" }))?;
    for end in &ends[..2] {
        let reason = end["state"].as_str().unwrap_or("");
        if !reason.contains("did not complete within") {
            return Err(format!("the initialization did not hang: {reason}").into());
        }
    }
    let aborts = slowest(&ends[..2], "abort_ms")?;
    drill.add("abort-init", "its time is up: to NCCL's release", aborts, "ms");
    step(drill, &mut ranks, "after the abort")?;

    ranks.all(&begin_only(Duration::from_millis(INIT_MS)))?;
    ranks.connect(2)?;
    step(drill, &mut ranks, "in the next generation")?;
    let released = slowest(&ranks.all(&json!({ "do": "released" }))?, "s")?;
    let what = "its generation ends: to NCCL's release";
    drill.add("abort-init", what, released * 1e3, "ms");

    ranks.remove(2);
    ranks.connect(3)?;
    let took = slowest(&ranks.all(&begin())?, "s")?;
    drill.add("abort-init", "then without that rank: time to a communicator", took * 1e3, "ms");
    ranks.all(&json!({ "do": "sum", "bytes": bytes, "iterations": 1, "path": "nccl" })).map(drop)
}

/// The command to begin to build a communicator, without waiting for it.
fn begin_only(init: Duration) -> Value {
    json!({ "do": "begin", "init_ms": init.as_millis() as u64, "abort_ms": 30_000 })
}

/// How long ranks wait in NCCL's initialization.
const HANG_TIME: Duration = Duration::from_secs(2);
