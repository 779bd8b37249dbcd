//! The phase `layer`.

use elasticdl::device::layer_times::{COPY, OF_A_STEP, TO_HOST};
use serde_json::{Value, json};

use crate::phases::number;
use crate::processes::Ranks;
use crate::{Drill, Fallible};

/// Shows what the layer does on the GPU in each step of a model with 100 million parameters, timed
/// by events on the trainer's stream, and beside each operation the time that a copy of as many
/// bytes takes: over the bus for the copy to the host, within the device for all others.
pub(crate) fn layer(drill: &mut Drill) -> Fallible<()> {
    let bytes = drill.arguments.bytes_max.min(4 * PARAMETERS_MAX);
    let mut ranks = Ranks::start(drill, 1, false)?;
    let command = json!({ "do": "layer", "bytes": bytes, "iterations": REPETITIONS });
    let answer = ranks.all(&command)?.remove(0);
    let operations = answer["operations"].as_array().ok_or("a rank answered no operations")?;
    let name = |operation: &Value| operation["name"].as_str().unwrap_or("").to_owned();
    let copied = operations.iter().find(|operation| name(operation) == COPY);
    let copied = copied.ok_or("a rank measured no copy")?;
    let within = number(&copied["bytes"])? / number(&copied["s"])?;
    let to_host = number(&answer["to_host"])?;
    let parameters = bytes / 4;
    let mut step = [0.0; 2];
    for operation in operations {
        let (name, moved) = (name(operation), number(&operation["bytes"])?);
        let took = number(&operation["s"])?;
        let floor = moved / if name == TO_HOST { to_host } else { within };
        let mut add = |what: &str, value, unit| {
            drill.add("layer", format!("{name}: {what}"), value, unit);
        };
        add(&format!("{parameters} parameters"), took * 1e6, "us");
        add("a copy of as many bytes", floor * 1e6, "us");
        add(&format!("rate of its {:.1} MB", moved / 1e6), moved / took / 1e9, "GB/s");
        if let Some(waited) = operation["host_s"].as_f64() {
            add("until the host goes on", waited * 1e6, "us");
        }
        if OF_A_STEP.contains(&&*name) {
            step[0] += took;
            step[1] += floor;
        }
    }
    let of = OF_A_STEP.join(", ");
    drill.add("layer", format!("{of}: together"), step[0] * 1e6, "us");
    drill.add("layer", format!("{of}: copies of as many bytes"), step[1] * 1e6, "us");
    Ok(())
}

const PARAMETERS_MAX: usize = 100_000_000;

/// Repetitions of each operation, whose median counts.
const REPETITIONS: u64 = 30;
