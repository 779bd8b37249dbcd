//! Options about validation data, and what is made of it.

use clap::Args;

use super::{Failure, job_options};
use crate::job::ValidationSpec;

/// What `elasticdl train` is told about evaluations.
#[derive(Args, Debug)]
#[command(next_help_heading = HEADING)]
pub struct ValidationOptions {
    /// Evaluate the model on this data: as --training-data, read by the same reader.
    ///
    /// Training pauses meanwhile. The data is split over all workers; each record is evaluated
    /// once, and the result is the same to the bit for any number of workers.
    #[arg(long, value_name = "URI")]
    pub validation_data: Option<String>,

    /// Evaluate after every so many steps, and at the end. [default: at the end alone]
    #[arg(long, value_name = "STEPS", value_parser = job_options::parse_steps, requires = "validation_data")]
    pub evaluate_every: Option<u64>,

    /// The metric that tells which model is the best; with `:max` the highest is, else the lowest.
    /// [default: loss]
    ///
    /// The best model's checkpoint stays (with --checkpoint-dir), whatever --checkpoint-keep is.
    #[arg(long, value_name = "NAME[:max]", value_parser = parse_metric, requires = "validation_data")]
    pub best_metric: Option<Metric>,

    /// End the job when so many evaluations in a row were not better than the best.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), requires = "evaluate_every")]
    pub early_stopping: Option<u32>,
}

/// A metric to be the best in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Metric {
    name: String,
    highest: bool,
}

impl ValidationOptions {
    pub(super) fn spec(&self) -> Result<Option<ValidationSpec>, Failure> {
        let Some(data) = self.validation_data.clone() else { return Ok(None) };
        if data.is_empty() {
            return Err(Failure::usage(
                "--validation-data is empty; it must be a file or a folder",
            ));
        }
        let lowest_loss = Metric { name: "loss".into(), highest: false };
        let Metric { name: metric, highest } = self.best_metric.clone().unwrap_or(lowest_loss);
        let (every, patience) = (self.evaluate_every, self.early_stopping);
        Ok(Some(ValidationSpec { data, every, metric, highest, patience }))
    }
}

fn parse_metric(text: &str) -> Result<Metric, String> {
    let (name, highest) = match text.rsplit_once(':') {
        Some((name, "max")) => (name, true),
        Some((name, "min")) => (name, false),
        Some(_) => return Err("behind the `:` must be `max` or `min`".into()),
        None => (text, false),
    };
    match name.is_empty() {
        true => Err("it must be a metric's name, for example `loss` or `accuracy:max`".into()),
        false => Ok(Metric { name: name.into(), highest }),
    }
}

const HEADING: &str = "Evaluation";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_metric_is_a_name_and_perhaps_a_direction() {
        let metric = |name: &str, highest| Ok(Metric { name: name.into(), highest });
        assert_eq!(parse_metric("loss"), metric("loss", false));
        assert_eq!(parse_metric("accuracy:max"), metric("accuracy", true));
        assert_eq!(parse_metric("a:b:min"), metric("a:b", false));
        for bad in ["", ":max", "loss:best"] {
            assert!(parse_metric(bad).is_err(), "{bad}");
        }
    }
}
