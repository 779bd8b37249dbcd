//! The time of a step with `--shard-optimizer`, beside the same job without it, in turns.

use std::error::Error;

use elasticdl_tests::churn::EventLogs;
use elasticdl_tests::{Network, counting_data, print, quantile};
use serde_json::{Value, json};

use crate::Arguments;
use crate::job::{BATCH, Job};

pub(crate) fn measure(arguments: &Arguments) -> Result<Value, Box<dyn Error>> {
    let shm = Compared::measure(arguments, None)?;
    // A host for the master, and one for each worker.
    let gbit = match Network::with_rate(WORKERS as u8 + 1, "1gbit") {
        Ok(network) => Ok(Compared::measure(arguments, Some(&network))?),
        Err(reason) => Err(reason),
    };
    let reason = gbit.as_ref().err();
    Ok(json!({
        "step_ratio": { "shm": shm.ratio, "gbit": gbit.as_ref().ok().map(|gbit| gbit.ratio) },
        "step_ratio_gbit_missing": reason,
        "step_ratio_ms": {
            "shm": shm.medians_ms,
            "gbit": gbit.as_ref().ok().map(|gbit| gbit.medians_ms),
        },
    }))
}

/// Steps of both modes.
struct Compared {
    /// Median over the rounds of the sharded mode's time over that of the replicated one.
    ratio: f64,
    /// Replicated, sharded.
    medians_ms: [f64; 2],
}

impl Compared {
    fn measure(arguments: &Arguments, network: Option<&Network>) -> Result<Self, Box<dyn Error>> {
        let (mut ratios, mut of_modes) = (Vec::new(), [Vec::new(), Vec::new()]);
        for round in 1..=arguments.rounds {
            // One directly after the other, so that other load affects both.
            let replicated = step_ms(arguments, false, network)?;
            let sharded = step_ms(arguments, true, network)?;
            let where_ = if network.is_some() { "1 Gbit/s" } else { "shared memory" };
            print(&format!("{where_}, round {round}: {replicated:.1} ms, sharded {sharded:.1} ms"));
            ratios.push(sharded / replicated);
            of_modes[0].push(replicated);
            of_modes[1].push(sharded);
        }
        let ratio = quantile(&mut ratios, 0.5);
        Ok(Self { ratio, medians_ms: of_modes.map(|mut steps| quantile(&mut steps, 0.5)) })
    }
}

/// Median time of a step, in milliseconds.
fn step_ms(
    arguments: &Arguments,
    is_sharded: bool,
    network: Option<&Network>,
) -> Result<f64, Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let data = folder.path().join("data");
    counting_data(&data, (arguments.steps + FIRST_STEPS) * BATCH, 1)?;
    let mut logs = EventLogs::create(folder.path().join("event-logs"))?;
    let parameters = arguments.parameters.unwrap_or(PARAMETERS);
    let job = Job::new(parameters, is_sharded, arguments.compute_ms);
    let command = job.command(folder.path(), WORKERS, (network, Some(&logs.folder)))?;
    command.option("training-data", data).run().assert_outcome(0, "completed");
    logs.refresh()?;
    let begun: Vec<_> = logs.steps().into_values().map(|(at, _)| at).collect();
    let pairs = begun.windows(2).skip(FIRST_STEPS as usize);
    let mut steps: Vec<f64> = pairs.map(|pair| (pair[1] - pair[0]).as_secs_f64() * 1e3).collect();
    Ok(quantile(&mut steps, 0.5))
}

/// Parameters of the model, by default.
const PARAMETERS: usize = 8 << 20;

const WORKERS: u32 = 4;

/// Steps that do not count: buffers get their memory, links their speed.
const FIRST_STEPS: u64 = 3;
