//! The smallest model: linear regression on the rows of a CSV file, `target ≈ columns · weights +
//! bias`.
//!
//! A model defines its data source, the shapes and initial values of its parameters, and the
//! gradient of its loss. The rest is done for you: records are distributed, gradients are summed
//! over the current workers, and each record is counted exactly once.

use std::process::ExitCode;

use clap::Parser;
use elasticdl::readers::{CsvRows, Row};
use elasticdl::{Gradients, Loss, Model, NamedTensor, Predictions, Sgd, UpdateRule, UserError};

fn main() -> ExitCode {
    elasticdl::run(Linear::parse())
}

/// Fits a line to the rows of a CSV file.
#[derive(Debug, Parser)]
struct Linear {
    /// Columns to predict from, as a,b,c
    #[arg(long, default_value = "x", value_delimiter = ',')]
    columns: Vec<String>,
    /// Column to predict
    #[arg(long, default_value = "y")]
    target: String,
}

impl Model for Linear {
    type Reader = CsvRows;
    // The result of `feed`: any type that the gradient can be computed from. Here, the rows
    // themselves.
    type Batch = Vec<Row>;

    fn reader(&self) -> CsvRows {
        let reader = self.columns.iter().fold(CsvRows::new(), |reader, column| reader.f32(column));
        reader.f32(&self.target).label()
    }

    // Parameters are one flat slice, in an order that you choose: here the weights, then the bias.
    fn tensors(&self) -> Vec<NamedTensor> {
        vec![NamedTensor::new("weights", [self.columns.len()]), NamedTensor::new("bias", [])]
    }

    fn initialize(&mut self, _seed: u64, parameters: &mut [f32]) -> Result<(), UserError> {
        parameters.fill(0.0);
        Ok(())
    }

    fn feed(&mut self, rows: Vec<Row>) -> Result<Vec<Row>, UserError> {
        Ok(rows)
    }

    // Summed over the rows. The update divides by the number of records of all workers.
    fn gradients(
        &mut self,
        parameters: &[f32],
        rows: Vec<Row>,
        gradients: &mut Gradients<'_>,
    ) -> Result<Loss, UserError> {
        let bias = self.columns.len();
        let (sum, mut loss) = (gradients.sum(), 0.0);
        for row in rows {
            let predicted =
                (0..bias).map(|i| parameters[i] * row.f32(i)).sum::<f32>() + parameters[bias];
            let error = predicted - row.f32(bias);
            loss += f64::from(error * error);
            (0..bias).for_each(|i| sum[i] += 2.0 * error * row.f32(i));
            sum[bias] += 2.0 * error;
        }
        Ok(Loss::Sum(loss))
    }

    // One value for each row, which `elasticdl predict` writes.
    fn predict(&mut self, parameters: &[f32], rows: Vec<Row>) -> Result<Predictions, UserError> {
        let bias = self.columns.len();
        let predict = |row: &Row| {
            (0..bias).map(|i| parameters[i] * row.f32(i)).sum::<f32>() + parameters[bias]
        };
        Ok(Predictions::new().f32(&self.target, rows.iter().map(predict).collect()))
    }

    fn optimizer(&self) -> impl UpdateRule {
        Sgd::new(0.05).momentum(0.9)
    }

    fn summary(&mut self, parameters: &[f32]) -> Result<Option<String>, UserError> {
        let term = |(column, weight)| format!("{weight:.4}·{column} + ");
        let terms: String = self.columns.iter().zip(parameters).map(term).collect();
        Ok(Some(format!("{} = {terms}{:.4}", self.target, parameters[self.columns.len()])))
    }
}

#[cfg(test)]
#[path = "../linear_tests.rs"]
mod tests;
