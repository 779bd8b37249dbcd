//! What a kill and a join cost the other three or four workers of a large model.

use std::error::Error;

use elasticdl_tests::churn::{Kind, Measured, disturb};
use elasticdl_tests::{print, quantile};
use serde_json::{Map, Value, json};

use crate::Arguments;
use crate::job::Job;

/// Kills of a job with a sharded optimizer.
pub(crate) fn measure_kills(arguments: &Arguments) -> Result<Value, Box<dyn Error>> {
    let parameters = arguments.parameters.unwrap_or(KILL_PARAMETERS);
    let Some(measured) = run(arguments, Kind::Kill, parameters, true)? else {
        return Ok(json!({ "kill_p50_ms": null }));
    };
    let step = measured.median_step;
    let mut over: Vec<f64> =
        measured.recoveries.iter().map(|recovery| (recovery - step).max(0.0)).collect();
    Ok(json!({
        "kill_p50_ms": quantile(&mut over, 0.5),
        "kill_max_ms": quantile(&mut over, 1.0),
        "kill": measured.json(),
        "kill_parameters": parameters,
    }))
}

/// Joins, at each size of the state and in both modes.
pub(crate) fn measure_joins(arguments: &Arguments) -> Result<Value, Box<dyn Error>> {
    let mut result = Map::new();
    for (is_sharded, suffix) in [(false, ""), (true, "_sharded")] {
        let mut of_sizes = [Map::new(), Map::new(), Map::new()];
        for mib in &arguments.state_mib {
            let measured = run(arguments, Kind::Join, (mib << 20) / BYTES_OF_STATE, is_sharded)?;
            let pause = measured
                .as_ref()
                .map(|measured| quantile(&mut measured.gaps.clone(), 0.5) + measured.median_step);
            let values = [
                json!(pause),
                json!(measured.as_ref().map(|measured| measured.median_step)),
                json!(measured.as_ref().map(Measured::json)),
            ];
            for (of_sizes, value) in of_sizes.iter_mut().zip(values) {
                of_sizes.insert(format!("mib{mib}"), value);
            }
        }
        for (name, of_sizes) in ["join_pause_ms", "step_ms", "join"].into_iter().zip(of_sizes) {
            result.insert(format!("{name}{suffix}"), Value::Object(of_sizes));
        }
    }
    Ok(Value::Object(result))
}

/// `None` if the machine lacks the memory, which it says.
fn run(
    arguments: &Arguments,
    kind: Kind,
    parameters: usize,
    is_sharded: bool,
) -> Result<Option<Measured>, Box<dyn Error>> {
    let how = if is_sharded { "sharded" } else { "replicated" };
    let name = format!("{}, {parameters} parameters, {how}", kind.name());
    let job = Job::new(parameters, is_sharded, arguments.compute_ms).disturbed();
    let each = if is_sharded { BYTES_SHARDED } else { BYTES_REPLICATED };
    let needed = (job.workers as usize + 1) * parameters * each;
    let available = available_bytes()?;
    if available < needed {
        let [needed, available] = [needed, available].map(|bytes| bytes >> 20);
        print(&format!("{name}: needs {needed} MiB, and the system has {available} MiB"));
        return Ok(None);
    }
    let folder = tempfile::tempdir()?;
    let measured = disturb(&job, (kind, arguments.events), folder.path())?;
    let [pause, step] = [quantile(&mut measured.gaps.clone(), 0.5), measured.median_step];
    print(&format!("{name}: paused for {pause:.1} ms more than a step of {step:.1} ms"));
    if measured.records_lost + measured.records_repeated > 0 {
        return Err(format!("{name}: records are lost or repeated").into());
    }
    Ok(Some(measured))
}

/// Memory that processes can have.
fn available_bytes() -> Result<usize, Box<dyn Error>> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
    Ok(kib.ok_or("the system does not say how much memory it has")?.parse::<usize>()? << 10)
}

/// Parameters of the job whose workers are killed, by default.
const KILL_PARAMETERS: usize = 100 << 20;

/// Bytes of state for each parameter: the parameter, and the two moments of AdamW.
const BYTES_OF_STATE: usize = 12;

/// Bytes that a worker needs for each parameter, with those of a join and of its links.
const BYTES_REPLICATED: usize = 28;
const BYTES_SHARDED: usize = 18;
