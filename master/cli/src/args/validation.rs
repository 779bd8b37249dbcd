//! Options for validation data and evaluations.

use std::num::NonZeroU16;

use clap::{ArgGroup, Args};
use elasticdl_master::job::ValidationSpec;

use super::values;
use crate::process::Failure;

/// Evaluation options of `elasticdl train`.
#[derive(Args, Debug)]
#[command(next_help_heading = "Evaluation")]
#[command(group(ArgGroup::new("validation").args(["validation_data", "validation_split"])))]
pub(crate) struct ValidationOptions {
    /// Validation data, read like --training-data by the same reader; can be repeated.
    ///
    /// Training pauses during an evaluation. The data is split over all workers; each record is
    /// evaluated once, and the result is bit-identical for any number of workers.
    #[arg(long, value_name = "URI")]
    pub(crate) validation_data: Vec<String>,

    /// Use this fraction of the training data, for example 0.1, as validation data, and train the
    /// rest.
    ///
    /// Records are chosen individually with --seed, evenly over each file.
    #[arg(long, value_name = "FRACTION", value_parser = parse_split,
          conflicts_with = "validation_data")]
    pub(crate) validation_split: Option<NonZeroU16>,

    /// Evaluate every this many steps, and at the end. [default: only at the end]
    #[arg(long, value_name = "STEPS", value_parser = values::parse_steps,
          requires = "validation")]
    pub(crate) evaluate_every: Option<u64>,

    /// Metric that selects the best model: the lowest value, or with `:max` the highest. [default:
    /// loss]
    ///
    /// With --checkpoint-dir, the checkpoint of the best model is retained in addition to
    /// --checkpoint-keep others.
    #[arg(long, value_name = "NAME[:max]", value_parser = parse_metric,
          requires = "validation")]
    pub(crate) best_metric: Option<Metric>,

    /// Stop the job after this many consecutive evaluations without a new best value.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..),
          requires = "evaluate_every")]
    pub(crate) early_stopping: Option<u32>,

    /// Write the best model so far to this safetensors file: a path or s3://, gs://, az://.
    ///
    /// The lowest rank writes it after each evaluation with a new best value; training waits
    /// meanwhile. As with --export, the file is written atomically. If it can't be written,
    /// training continues, and each evaluation tries again.
    #[arg(long, value_name = "URI", value_parser = values::parse_uri,
          requires = "validation")]
    pub(crate) export_best: Option<String>,
}

/// Metric that selects the best model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Metric {
    name: String,
    highest: bool,
}

impl ValidationOptions {
    /// What is evaluated, in a job that trains `training_data`.
    pub(crate) fn spec(&self, training_data: &str) -> Result<Option<ValidationSpec>, Failure> {
        let split = self.validation_split;
        let data = match (&self.validation_data[..], split) {
            ([], None) => return Ok(None),
            ([], Some(_)) => training_data.to_owned(),
            (given, _) => sources("--validation-data", given)?,
        };
        let lowest_loss = Metric { name: "loss".into(), highest: false };
        let Metric { name: metric, highest } = self.best_metric.clone().unwrap_or(lowest_loss);
        let (every, patience) = (self.evaluate_every, self.early_stopping);
        let export_best = self.export_best.clone();
        Ok(Some(ValidationSpec { data, every, metric, highest, patience, split, export_best }))
    }
}

/// One text for the values of `option`, an option for data that may be given several times.
pub(crate) fn sources(option: &str, given: &[String]) -> Result<String, Failure> {
    if given.iter().any(String::is_empty) {
        return Err(Failure::usage(format!("{option} is empty; it must be a file or a folder")));
    }
    Ok(elasticdl_proto::join_sources(given))
}

/// Parses a fraction, as thousandths.
fn parse_split(text: &str) -> Result<NonZeroU16, String> {
    let thousandths = text.parse::<f64>().ok().map(|fraction| fraction * 1000.0);
    let whole = thousandths.filter(|t| (1.0..=999.0).contains(t) && (t - t.round()).abs() < 1e-6);
    whole.and_then(|thousandths| NonZeroU16::new(thousandths.round() as u16)).ok_or_else(|| {
        "it must be a fraction from 0.001 to 0.999 with at most three decimals".to_owned()
    })
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
    fn a_split_is_a_fraction_of_thousandths() {
        for (text, thousandths) in [("0.1", 100), ("0.001", 1), ("0.999", 999), ("0.125", 125)] {
            assert_eq!(parse_split(text).map(NonZeroU16::get), Ok(thousandths), "{text}");
        }
        for bad in ["", "0", "1", "0.0001", "-0.1", "0.1234", "NaN", "10%", "0.9999"] {
            assert!(parse_split(bad).unwrap_err().contains("0.001 to 0.999"), "{bad}");
        }
    }

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
