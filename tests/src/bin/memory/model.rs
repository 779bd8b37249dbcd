//! The model of the jobs: as many parameters as are asked for, and next to no computing.

use std::cell::OnceCell;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use elasticdl::{
    AdamW, Gradients, HalfModel, Loss, Model, NamedTensor, Optimizer, Sgd, UpdateRule, UserError,
};
use elasticdl_tests::HalfParameters;
use elasticdl_tests::churn::StepLog;

/// A model whose gradient has no zero, so that each page of each buffer is in use.
#[derive(Debug, Parser)]
pub(crate) struct Sized {
    #[arg(long)]
    parameters: usize,
    #[arg(long, value_enum, default_value = "adamw")]
    optimizer: Rule,
    /// Milliseconds that a gradient takes at least.
    #[arg(long, default_value_t = 0)]
    compute_ms: u64,
    /// Folder of the event logs.
    #[arg(long)]
    event_logs: Option<PathBuf>,
    #[arg(skip)]
    log: OnceCell<StepLog>,
    #[arg(skip)]
    half: HalfParameters,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Rule {
    Adamw,
    Sgd,
}

impl Model for Sized {
    elasticdl_tests::read_counting_data!();

    fn tensors(&self) -> Vec<NamedTensor> {
        vec![NamedTensor::new("parameters", [self.parameters])]
    }

    fn as_half_model(&mut self) -> Option<&mut dyn HalfModel> {
        Some(self.half.of(self.parameters))
    }

    fn gradients(
        &mut self,
        _: &[f32],
        batch: Vec<u64>,
        gradients: &mut Gradients<'_>,
    ) -> Result<Loss, UserError> {
        std::thread::sleep(Duration::from_millis(self.compute_ms));
        gradients.sum().iter_mut().for_each(|sum| *sum += 1.0);
        self.log().computed(batch.len() as u64)?;
        Ok(Loss::Sum(batch.len() as f64))
    }

    fn optimizer(&self) -> impl UpdateRule {
        self.log().rule(match self.optimizer {
            Rule::Adamw => Optimizer::from(AdamW::new(1e-3)),
            Rule::Sgd => Sgd::new(1e-3).into(),
        })
    }

    /// The resident memory of this process that is not shared, in KiB; nothing if it writes an
    /// event log.
    fn summary(&mut self, _: &[f32]) -> Result<Option<String>, UserError> {
        if self.event_logs.is_some() {
            return Ok(None);
        }
        let status = fs::read_to_string("/proc/self/status")?;
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
        Ok(line.map(|line| line.trim().trim_end_matches(" kB").to_owned()))
    }
}

impl Sized {
    fn log(&self) -> &StepLog {
        self.log.get_or_init(|| StepLog::new(self.event_logs.as_deref()))
    }
}
