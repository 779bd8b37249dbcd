//! The user's program of the simulation: it trains the counting [`model`](super::model).

use std::cell::Cell;
use std::ops::Range;
use std::rc::Rc;

use elasticdl::{
    DataError, Dataset, File, Gradients, Loss, Model, NamedTensor, Reader, Update, UpdateRule,
    UserError,
};

use super::coroutine::act_and_wait;

/// The model as the user's program of a worker.
pub(super) struct Counting {
    pub(super) parameters: usize,
    /// The sum of the last update, if there was one since the last look.
    pub(super) updated: Rc<Cell<Option<Vec<f32>>>>,
}

/// The update adds the sum.
struct Adding(Rc<Cell<Option<Vec<f32>>>>);

impl UpdateRule for Adding {
    fn slots(&self) -> usize {
        0
    }

    fn apply(&mut self, update: Update<'_>) -> Result<(), UserError> {
        update.parameters.iter_mut().zip(update.sum).for_each(|(count, sum)| *count += sum);
        self.0.set(Some(update.sum.to_vec()));
        Ok(())
    }
}

impl Model for Counting {
    type Reader = NoReader;
    /// The parameters that belong to the records.
    type Batch = Vec<usize>;

    fn reader(&self) -> NoReader {
        NoReader
    }

    fn tensors(&self) -> Vec<NamedTensor> {
        vec![NamedTensor::new("parameters", [self.parameters])]
    }

    fn initialize(&mut self, _seed: u64, parameters: &mut [f32]) -> Result<(), UserError> {
        parameters.fill(0.0);
        Ok(())
    }

    fn feed(&mut self, records: Vec<usize>) -> Result<Vec<usize>, UserError> {
        Ok(records)
    }

    fn gradients(
        &mut self,
        _parameters: &[f32],
        batch: Vec<usize>,
        gradients: &mut Gradients<'_>,
    ) -> Result<Loss, UserError> {
        let records = batch.len() as u64;
        act_and_wait(move |world, thread| world.compute(thread, records));
        let sum = gradients.sum();
        batch.into_iter().for_each(|record| sum[record] += 1.0);
        Ok(Loss::Sum(0.0))
    }

    fn optimizer(&self) -> impl UpdateRule {
        Adding(Rc::clone(&self.updated))
    }

    fn summary(&mut self, _parameters: &[f32]) -> Result<Option<String>, UserError> {
        Ok(Some("counted".into()))
    }
}

/// The records come from the world.
#[derive(Debug)]
pub(super) struct NoReader;

impl Reader for NoReader {
    type Record = usize;

    fn describe(&mut self, _source: &str) -> Result<Dataset, DataError> {
        unreachable!("the world describes the data")
    }

    fn read(&mut self, _file: &File, _range: Range<u64>) -> Result<Vec<usize>, DataError> {
        unreachable!("the world has the records")
    }
}
