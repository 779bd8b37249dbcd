//! The model that is trained: it counts records, and writes an event log of its work.

use std::cell::RefCell;
use std::rc::Rc;

use clap::Parser;
use elasticdl::{Gradients, Loss, Model, NamedTensor, Update, UpdateRule, UserError};
use elasticdl_tests::counts_summary;

use crate::event_log::{Commit, Entry, Writer};

/// Arguments of a worker of the benchmark's jobs.
#[derive(Debug, Parser)]
pub(crate) struct Arguments {
    #[arg(long)]
    params: usize,
    /// Floats of optimizer state per parameter.
    #[arg(long)]
    slots: usize,
    /// Records of an epoch.
    #[arg(long)]
    records: usize,
    /// Folder of the event logs.
    #[arg(long)]
    event_logs: std::path::PathBuf,
}

/// Parameter `i` is the number of times that record `i` was absorbed; further parameters only add
/// to the size of the reductions.
#[derive(Debug)]
pub(crate) struct Counting {
    params: usize,
    slots: usize,
    records: usize,
    work: Rc<RefCell<Work>>,
}

/// What this worker has computed.
#[derive(Debug)]
struct Work {
    log: Writer,
    /// Records whose gradient was computed here and that are in no update yet.
    pending: Vec<usize>,
    /// Number of records that were discarded since the last update.
    undone: u64,
}

impl Counting {
    pub(crate) fn new(arguments: &Arguments) -> std::io::Result<Self> {
        Ok(Self {
            params: arguments.params,
            slots: arguments.slots,
            records: arguments.records,
            work: Rc::new(RefCell::new(Work {
                log: Writer::create(&arguments.event_logs)?,
                pending: Vec::new(),
                undone: 0,
            })),
        })
    }
}

impl Model for Counting {
    elasticdl_tests::read_counting_data!();

    fn tensors(&self) -> Vec<NamedTensor> {
        vec![NamedTensor::new("parameters", [self.params])]
    }

    fn gradients(
        &mut self,
        _: &[f32],
        batch: Vec<u64>,
        gradients: &mut Gradients<'_>,
    ) -> Result<Loss, UserError> {
        let (gradients, mut work) = (gradients.sum(), self.work.borrow_mut());
        // Records that were computed before and are in no update must still be in the buffer;
        // otherwise their work is lost.
        let pending = work.pending.len();
        work.pending.retain(|&record| gradients[record] > 0.0);
        work.undone += (pending - work.pending.len()) as u64;
        for record in &batch {
            gradients[*record as usize] += 1.0;
            work.pending.push(*record as usize);
        }
        work.log.write(Entry::Computed { records: batch.len() as u64 })?;
        Ok(Loss::Sum(batch.len() as f64))
    }

    fn optimizer(&self) -> impl UpdateRule {
        let (slots, records) = (self.slots, self.records);
        Adding { slots, records, work: Rc::clone(&self.work) }
    }

    fn summary(&mut self, parameters: &[f32]) -> Result<Option<String>, UserError> {
        Ok(Some(counts_summary(&parameters[..self.records])))
    }
}

/// Adds the sums to the parameters.
struct Adding {
    slots: usize,
    records: usize,
    work: Rc<RefCell<Work>>,
}

impl UpdateRule for Adding {
    fn slots(&self) -> usize {
        self.slots
    }

    fn apply(&mut self, update: Update<'_>) -> Result<(), UserError> {
        let (sum, counts) = (&update.sum[..self.records], &update.parameters[..self.records]);
        // Epochs follow one another, so it is a record's turn if no other record has been counted
        // less often.
        let turn = counts.iter().copied().fold(f32::INFINITY, f32::min);
        let out_of_turn =
            |(sum, count): (&f32, &f32)| if *count == turn { (*sum - 1.0).max(0.0) } else { *sum };
        let repeated: f32 = sum.iter().zip(counts).map(out_of_turn).sum();
        let mut work = self.work.borrow_mut();
        let pending = work.pending.len();
        work.pending.retain(|&record| sum[record] < 1.0);
        let own = (pending - work.pending.len()) as u64;
        update.parameters.iter_mut().zip(update.sum).for_each(|(parameter, sum)| *parameter += sum);
        let undone = std::mem::take(&mut work.undone);
        let commit = Commit {
            step: update.step,
            records: update.records,
            own,
            undone,
            repeated: repeated as u64,
        };
        Ok(work.log.write(Entry::Committed(commit))?)
    }
}
