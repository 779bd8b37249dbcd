//! A model with nothing to learn, over any of the readers: for what happens to data that can't be used.

use std::process::ExitCode;

use elasticdl_worker::readers::{CsvRows, IdxImages, TextWindows};
use elasticdl_worker::{Model, Reader, UserError};

struct Reading<R>(fn() -> R);

impl<R: Reader> Model for Reading<R> {
    type Reader = R;
    type Batch = usize;

    fn reader(&self) -> R {
        (self.0)()
    }

    fn parameters(&self) -> usize {
        1
    }

    fn initialize(&mut self, _seed: u64, _parameters: &mut [f32]) -> Result<(), UserError> {
        Ok(())
    }

    fn feed(&mut self, records: Vec<R::Record>) -> Result<usize, UserError> {
        Ok(records.len())
    }

    fn gradients(
        &mut self,
        _parameters: &[f32],
        records: usize,
        _gradients: &mut [f32],
    ) -> Result<f64, UserError> {
        Ok(records as f64)
    }
}

fn main() -> ExitCode {
    match std::env::args().nth(1).as_deref() {
        Some("csv") => elasticdl_worker::run(Reading(|| CsvRows::new().f32("x").f32("y").text("name"))),
        Some("idx") => elasticdl_worker::run(Reading(|| IdxImages::new(2, 2))),
        Some("text") => elasticdl_worker::run(Reading(|| TextWindows::new(4))),
        _ => ExitCode::from(2),
    }
}
