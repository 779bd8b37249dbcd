//! Click-through prediction on a table of categories: a factorization machine (Rendle, 2010) over
//! hashed features, `sigmoid(bias + Σ weights + Σ products of pairs of vectors)`.
//!
//! A category is any text. It needs no dictionary: its hash names one of `--buckets` features.

use std::process::ExitCode;

use clap::Parser;
use elasticdl::readers::{CsvRows, Row};
use elasticdl::{
    Adam, Gradients, Loss, Metrics, Model, NamedTensor, Predictions, UpdateRule, UserError,
};

use self::machine::{Machine, feature, parse_buckets};

mod machine;

fn main() -> ExitCode {
    elasticdl::run(Tabular::parse())
}

/// Predicts whether a row's label is 1 from its categories.
#[derive(Debug, Parser)]
struct Tabular {
    /// Columns of categories, as a,b,c
    #[arg(long, value_delimiter = ',', required = true)]
    columns: Vec<String>,
    /// Column of the label, 0 or 1
    #[arg(long, default_value = "label")]
    label: String,
    /// Number of features that categories are hashed to
    #[arg(long, default_value_t = 65536, value_parser = parse_buckets)]
    buckets: usize,
}

impl Model for Tabular {
    type Reader = CsvRows;
    // For each row its features and its label.
    type Batch = Vec<(Vec<usize>, f32)>;

    fn reader(&self) -> CsvRows {
        let categories = self.columns.iter().fold(CsvRows::new(), |reader, name| reader.text(name));
        categories.class(&self.label, 2).label()
    }

    fn tensors(&self) -> Vec<NamedTensor> {
        Machine::tensors(self.buckets)
    }

    fn initialize(&mut self, seed: u64, parameters: &mut [f32]) -> Result<(), UserError> {
        Machine::initialize(self.buckets, seed, parameters);
        Ok(())
    }

    fn feed(&mut self, rows: Vec<Row>) -> Result<Self::Batch, UserError> {
        let columns = self.columns.len();
        let features =
            |row: &Row| (0..columns).map(|i| feature(i, row.text(i), self.buckets)).collect();
        Ok(rows.iter().map(|row| (features(row), row.class(columns) as f32)).collect())
    }

    fn gradients(
        &mut self,
        parameters: &[f32],
        batch: Self::Batch,
        gradients: &mut Gradients<'_>,
    ) -> Result<Loss, UserError> {
        let (machine, sum) = (Machine::new(self.buckets, parameters), gradients.sum());
        let losses =
            batch.iter().map(|(features, label)| machine.add_gradient(features, *label, sum));
        Ok(Loss::Sum(losses.sum()))
    }

    fn evaluate(
        &mut self,
        parameters: &[f32],
        batch: Self::Batch,
        metrics: &mut Metrics<'_>,
    ) -> Result<(), UserError> {
        let machine = Machine::new(self.buckets, parameters);
        for (features, label) in &batch {
            metrics.add_sum("loss", machine.loss(features, *label));
            let is_right = (machine.score(features) > 0.0) == (*label > 0.5);
            metrics.add_sum("accuracy", f64::from(u8::from(is_right)));
        }
        Ok(())
    }

    fn predict(
        &mut self,
        parameters: &[f32],
        batch: Self::Batch,
    ) -> Result<Predictions, UserError> {
        let machine = Machine::new(self.buckets, parameters);
        let probability = |features: &[usize]| 1.0 / (1.0 + (-machine.score(features)).exp());
        let all = batch.iter().map(|(features, _)| probability(features)).collect();
        Ok(Predictions::new().f32("probability", all))
    }

    fn optimizer(&self) -> impl UpdateRule {
        Adam::new(0.02)
    }
}

#[cfg(test)]
#[path = "../../../../examples/src/tabular_tests.rs"]
mod tests;
