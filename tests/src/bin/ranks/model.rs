//! A model that sleeps instead of computing, and writes an event log of its steps.

use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use elasticdl::{Gradients, Loss, Model, NamedTensor, Sgd, UpdateRule, UserError};
use elasticdl_tests::churn::StepLog;

/// Arguments of a worker of the benchmark's jobs.
#[derive(Debug, Parser)]
struct Arguments {
    #[arg(long)]
    compute_ms: u64,
    #[arg(long)]
    parameters: usize,
    /// Folder of the event logs.
    #[arg(long)]
    event_logs: PathBuf,
}

/// Sleeps for each gradient that it computes.
#[derive(Debug)]
pub(crate) struct Sleeping {
    compute: Duration,
    parameters: usize,
    log: StepLog,
}

impl Sleeping {
    /// The model of a worker, from its arguments.
    pub(crate) fn parse() -> Self {
        let Arguments { compute_ms, parameters, event_logs } = Arguments::parse();
        let log = StepLog::new(Some(&event_logs));
        Self { compute: Duration::from_millis(compute_ms), parameters, log }
    }
}

impl Model for Sleeping {
    elasticdl_tests::read_counting_data!();

    fn tensors(&self) -> Vec<NamedTensor> {
        vec![NamedTensor::new("parameters", [self.parameters])]
    }

    fn gradients(
        &mut self,
        _: &[f32],
        batch: Vec<u64>,
        gradients: &mut Gradients<'_>,
    ) -> Result<Loss, UserError> {
        std::thread::sleep(self.compute);
        gradients.sum()[0] += batch.len() as f32;
        self.log.computed(batch.len() as u64)?;
        Ok(Loss::Sum(batch.len() as f64))
    }

    fn optimizer(&self) -> impl UpdateRule {
        self.log.rule(Sgd::new(1e-3))
    }
}
