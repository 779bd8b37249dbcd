//! A model for elasticdl. Run `cargo test`, then see README.md for how to train it.

use std::process::ExitCode;

use clap::Parser;
use elasticdl::readers::{CsvRows, Row};
use elasticdl::{
    Gradients, Loss, Model, NamedTensor, Predictions, Sgd, UpdateRule, UserError,
};

fn main() -> ExitCode {
    elasticdl::run(Line::parse())
}

/// Fits `y ≈ weight · x + bias` to the rows of a CSV file.
#[derive(Debug, Parser)]
struct Line {
    /// Learning rate of the optimizer
    #[arg(long, default_value_t = 0.1)]
    learning_rate: f64,
}

impl Model for Line {
    /// Reader of the records. Others are TextWindows, FixedRecords, IdxImages, or a `Reader` of
    /// your own.
    type Reader = CsvRows;
    /// Input of `gradients`.
    type Batch = Vec<Row>;

    fn reader(&self) -> CsvRows {
        CsvRows::new().f32("x").f32("y").label()
    }

    /// Names and shapes of the parameters, which are one flat slice: here two numbers.
    fn tensors(&self) -> Vec<NamedTensor> {
        vec![NamedTensor::new("weight", []), NamedTensor::new("bias", [])]
    }

    fn initialize(&mut self, _seed: u64, parameters: &mut [f32]) -> Result<(), UserError> {
        parameters.fill(0.0);
        Ok(())
    }

    fn feed(&mut self, rows: Vec<Row>) -> Result<Vec<Row>, UserError> {
        Ok(rows)
    }

    /// Adds the gradient of each row to the sum and returns the summed loss. The optimizer gets the
    /// mean over the rows of all workers.
    fn gradients(
        &mut self,
        parameters: &[f32],
        rows: Vec<Row>,
        gradients: &mut Gradients<'_>,
    ) -> Result<Loss, UserError> {
        let (sum, mut loss) = (gradients.sum(), 0.0);
        for row in rows {
            let (x, y) = (row.f32(0), row.f32(1));
            let error = parameters[0] * x + parameters[1] - y;
            loss += f64::from(error * error);
            sum[0] += 2.0 * error * x;
            sum[1] += 2.0 * error;
        }
        Ok(Loss::Sum(loss))
    }

    /// One value for each row, which `elasticdl predict` writes.
    fn predict(&mut self, parameters: &[f32], rows: Vec<Row>) -> Result<Predictions, UserError> {
        let y = rows.iter().map(|row| parameters[0] * row.f32(0) + parameters[1]).collect();
        Ok(Predictions::new().f32("y", y))
    }

    fn optimizer(&self) -> impl UpdateRule {
        Sgd::new(self.learning_rate).momentum(0.9)
    }

    fn summary(&mut self, parameters: &[f32]) -> Result<Option<String>, UserError> {
        let (slope, intercept) = (parameters[0], parameters[1]);
        let sign = if intercept < 0.0 { '-' } else { '+' };
        Ok(Some(format!("y = {slope:.2}·x {sign} {:.2}", intercept.abs())))
    }
}

#[cfg(test)]
mod tests {
    use elasticdl::Reader as _;

    use super::*;

    fn sample_rows(model: &Line) -> Vec<Row> {
        let mut reader = model.reader();
        let data = reader.describe("data").expect("the sample data fits the reader");
        let file = &data.files[0];
        reader.read(file, 0..file.records).expect("the sample data can be read")
    }

    /// The loss and its gradient, summed over the sample data.
    fn loss_and_gradient(model: &mut Line, parameters: &[f32]) -> (f64, [f32; 2]) {
        let (rows, mut sum) = (sample_rows(model), [0.0; 2]);
        let count = rows.len();
        let mut gradients = Gradients::new(&mut sum, count);
        let loss = model.gradients(parameters, rows, &mut gradients).expect("rows are numbers");
        (loss.sum_over(count), sum)
    }

    fn loss(model: &mut Line, parameters: &[f32]) -> f64 {
        loss_and_gradient(model, parameters).0
    }

    #[test]
    fn the_gradient_is_the_slope_of_the_loss() {
        let mut model = Line { learning_rate: 0.1 };
        let (at, step) = ([0.5, -0.25], 1.0 / 64.0);
        let (_, sum) = loss_and_gradient(&mut model, &at);
        for i in 0..2 {
            let (mut before, mut after) = (at, at);
            before[i] -= step;
            after[i] += step;
            let rise = loss(&mut model, &after) - loss(&mut model, &before);
            let slope = rise / f64::from(2.0 * step);
            let error = (slope - f64::from(sum[i])).abs();
            assert!(error < 0.01 * slope.abs(), "{i}: {slope}, {}", sum[i]);
        }
    }

    #[test]
    fn the_line_behind_the_sample_data_fits_it() {
        let mut model = Line { learning_rate: 0.1 };
        assert!(loss(&mut model, &[2.0, -0.5]) < 0.01 * loss(&mut model, &[0.0, 0.0]));
    }
}
