//! The data of a program, of which the trainer knows the numbers of the records alone.

use std::ops::Range;

use elasticdl_data::worker::refuse_bad_records;
use elasticdl_data::{Access, DataError, Dataset, File, Purpose, ReadOptions, Reader};

/// A record of the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Epoch.
    pub epoch: u32,
    /// Number, from 0.
    pub number: u64,
}

/// A record, and the data that it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Numbered {
    pub(super) purpose: Purpose,
    pub(super) record: Record,
}

/// A reader whose records are their own numbers. The program loads their data, any of them as well
/// as the next one.
#[derive(Debug)]
pub(super) struct Numbers {
    /// Numbers of records for training, evaluation and prediction, where the program has them.
    pub(super) data: [Option<u64>; 3],
    pub(super) purpose: Purpose,
    pub(super) epoch: u32,
}

impl Numbers {
    fn records(&self) -> Result<u64, DataError> {
        let [training, evaluation, prediction] = self.data;
        let (records, owner, missing) = match self.purpose {
            Purpose::Evaluate => (evaluation, "evaluator", NO_EVALUATOR),
            Purpose::Predict => (prediction, "predictor", NO_PREDICTOR),
            _ => (training, "sampler", "this program has no sampler"),
        };
        match records {
            None => Err(DataError::Other(missing.into())),
            Some(0) => {
                let error = format!("the {owner}'s length is 0; it must be positive");
                Err(DataError::Other(error.into()))
            }
            Some(records) => Ok(records),
        }
    }
}

impl Reader for Numbers {
    type Record = Numbered;

    fn configure(&mut self, options: ReadOptions) -> Result<(), DataError> {
        self.purpose = options.purpose;
        refuse_bad_records(options)
    }

    fn describe(&mut self, _source: &str) -> Result<Dataset, DataError> {
        Ok(Dataset::new(vec![File::new(NAME, self.records()?)]))
    }

    fn access(&self, _dataset: &Dataset) -> Access {
        Access::Record
    }

    fn begin_epoch(&mut self, epoch: u32) {
        self.epoch = epoch;
    }

    fn read(&mut self, file: &File, range: Range<u64>) -> Result<Vec<Numbered>, DataError> {
        let (expected, found) = (file.records, self.records()?);
        if found != expected {
            let error = format!(
                "this program's data has {found} records, and that of the worker that described \
                 the data has {expected}; all programs of a job must have the same data"
            );
            return Err(DataError::Other(error.into()));
        }
        let Self { purpose, epoch, .. } = *self;
        let record = |number| Record { epoch, number };
        Ok(range.map(|number| Numbered { purpose, record: record(number) }).collect())
    }
}

const NO_EVALUATOR: &str = "this program does not say how its model is evaluated: declare it with \
                            job.evaluator(data, function), also where job.work is \"evaluate\" \
                            and the data is job.data";
const NO_PREDICTOR: &str = "this program does not say how its model predicts: declare it with \
                            job.predictor(data, function)";
/// Name of the only file of a program's data set.
const NAME: &str = "the program's data";
