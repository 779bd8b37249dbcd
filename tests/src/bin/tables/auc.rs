//! How well the example `ctr` predicts the clicks that it was not trained on, beside the
//! probabilities that these clicks were drawn from. No model predicts better than those.

use std::error::Error;
use std::time::Duration;

use elasticdl_tests::{Command, auc, built};
use serde_json::{Value, json};

use crate::Arguments;
use crate::speed::ctr;

pub(crate) fn measure(arguments: &Arguments) -> Result<Value, Box<dyn Error>> {
    let (elasticdl, ctr) = (built("elasticdl-tests", "elasticdl-under-test")?, ctr()?);
    let folder = tempfile::tempdir()?;
    let path = |name: &str| folder.path().join(name);
    let program = || {
        let ids = arguments.auc_ids.to_string();
        let words = ["--model", "deepfm", "--ids"].map(Into::into).into_iter().chain([ids.into()]);
        [ctr.clone().into_os_string()].into_iter().chain(words)
    };
    let trained = Command::new(&elasticdl, path("train"), program())
        .option("checkpoint-dir", "none")
        .option("num-workers", "2")
        .option("training-data", format!("clicks:0..{}", arguments.auc_records))
        .option("global-batch-size", "1024")
        .option("export", path("m.safetensors"))
        .start()
        .wait_within(TRAINING_LIMIT);
    trained.assert_outcome(0, "completed");
    let first = arguments.auc_records;
    let predicted = Command::new(&elasticdl, path("predict"), program())
        .verb("predict")
        .option("num-workers", "2")
        .option("model", path("m.safetensors"))
        .option("data", format!("clicks:{first}..{}", first + TEST_RECORDS))
        .option("predictions", path("predictions"))
        .option("format", "csv")
        .run();
    predicted.assert_outcome(0, "completed");
    let [mut predicted, mut best] = [Vec::new(), Vec::new()];
    for file in std::fs::read_dir(path("predictions"))? {
        let text = std::fs::read_to_string(file?.path())?;
        for line in text.lines().skip(1) {
            let [label, probability, of_best] = line.split(',').collect::<Vec<_>>()[..] else {
                return Err(format!("{line}: not a label and two probabilities").into());
            };
            predicted.push((probability.parse()?, label == "1"));
            best.push((of_best.parse()?, label == "1"));
        }
    }
    let (auc, ceiling) = (auc(&mut predicted), auc(&mut best));
    Ok(json!({
        "auc": auc, "auc_ceiling": ceiling, "auc_ratio": auc / ceiling,
        "auc_records": { "trained": arguments.auc_records, "tested": predicted.len() },
    }))
}

/// The most records are trained in minutes on a quiet machine.
const TRAINING_LIMIT: Duration = Duration::from_secs(2 * 3600);
/// Records after those of the training.
const TEST_RECORDS: u64 = 200_000;
