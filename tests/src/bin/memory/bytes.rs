//! The resident memory of the first rank, for each parameter.

use std::error::Error;
use std::path::Path;

use elasticdl_tests::{counting_data, print};
use serde_json::{Map, Value, json};

use crate::Arguments;
use crate::job::{BATCH, Job};
use crate::model::Rule;

pub(crate) fn measure(arguments: &Arguments) -> Result<Value, Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let data = folder.path().join("data");
    counting_data(&data, STEPS * BATCH, 1)?;
    let larger = arguments.parameters.unwrap_or(PARAMETERS);
    let mut result = Map::from_iter([("parameters".to_owned(), json!(larger))]);
    for (rule, (is_sharded, is_half), key) in [
        (Rule::Adamw, (false, false), "bytes_per_param"),
        (Rule::Sgd, (false, false), "bytes_per_param_sgd"),
        (Rule::Adamw, (true, false), "bytes_per_param_sharded"),
        (Rule::Sgd, (true, false), "bytes_per_param_sharded_sgd"),
        (Rule::Adamw, (true, true), "bytes_per_param_sharded_bf16"),
    ] {
        let mut of_rule = Map::new();
        for &workers in &arguments.workers {
            let [small, large] = [larger / 8, larger].map(|parameters| {
                let job = Job { rule, is_half, ..Job::new(parameters, is_sharded, 0) };
                (parameters, train(&job, workers, &data))
            });
            let more = large.1?.saturating_sub(small.1?) as f64;
            let each = more / (large.0 - small.0) as f64;
            let how = match (is_sharded, is_half) {
                (_, true) => ", sharded, bf16",
                (true, false) => ", sharded",
                (false, false) => "",
            };
            print(&format!("{rule:?}{how}, {workers} workers: {each:.2} bytes per parameter"));
            of_rule.insert(format!("w{workers}"), json!(each));
        }
        result.insert(key.to_owned(), Value::Object(of_rule));
    }
    Ok(Value::Object(result))
}

/// Resident bytes of the first rank at the end of a job.
fn train(job: &Job, workers: u32, data: &Path) -> Result<u64, Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let command = job.command(folder.path(), workers, (None, None))?;
    let ended = command.option("training-data", data).run();
    ended.assert_outcome(0, "completed");
    let kib = ended.summary().model_summary.as_ref().ok_or("the model has no summary")?;
    Ok(kib.parse::<u64>()? << 10)
}

/// Parameters of the larger model, by default.
const PARAMETERS: usize = 8 << 20;

/// Steps after which eight workers have their copies.
const STEPS: u64 = 64;
