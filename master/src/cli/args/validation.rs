//! Options for validation data and evaluations.

use clap::Args;

use super::values;
use crate::cli::process::Failure;
use crate::job::ValidationSpec;

/// Evaluation options of `elasticdl train`.
#[derive(Args, Debug)]
#[command(next_help_heading = "Evaluation")]
pub(crate) struct ValidationOptions {
    /// Validation data, read like --training-data by the same reader.
    ///
    /// Training pauses during an evaluation. The data is split over all workers; each record is
    /// evaluated once, and the result is bit-identical for any number of workers.
    #[arg(long, value_name = "URI")]
    pub(crate) validation_data: Option<String>,

    /// Evaluate after every this many steps, and at the end. [default: only at the end]
    #[arg(long, value_name = "STEPS", value_parser = values::parse_steps,
          requires = "validation_data")]
    pub(crate) evaluate_every: Option<u64>,

    /// Metric that selects the best model: the lowest value, or with `:max` the highest. [default:
    /// loss]
    ///
    /// The checkpoint of the best model is retained in addition to --checkpoint-keep others (with
    /// --checkpoint-dir).
    #[arg(long, value_name = "NAME[:max]", value_parser = parse_metric,
          requires = "validation_data")]
    pub(crate) best_metric: Option<Metric>,

    /// Stop the job after this many consecutive evaluations without a new best value.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..),
          requires = "evaluate_every")]
    pub(crate) early_stopping: Option<u32>,
}

/// Metric that selects the best model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Metric {
    name: String,
    highest: bool,
}

impl ValidationOptions {
    pub(crate) fn spec(&self) -> Result<Option<ValidationSpec>, Failure> {
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
        Some(_) => return Err("`:` must be followed by `max` or `min`".into()),
        None => (text, false),
    };
    if name.is_empty() {
        return Err("it must be a metric's name, for example `loss` or `accuracy:max`".into());
    }
    Ok(Metric { name: name.into(), highest })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_metric_is_a_name_with_an_optional_direction() {
        let metric = |name: &str, highest| Ok(Metric { name: name.into(), highest });
        assert_eq!(parse_metric("loss"), metric("loss", false));
        assert_eq!(parse_metric("accuracy:max"), metric("accuracy", true));
        assert_eq!(parse_metric("a:b:min"), metric("a:b", false));
        for bad in ["", ":max", "loss:best"] {
            assert!(parse_metric(bad).is_err(), "{bad}");
        }
    }
}
