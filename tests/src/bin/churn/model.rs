//! The model that is trained: it counts records, and writes an event log of its work.

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::PathBuf;
use std::rc::Rc;

use clap::Parser;
use elasticdl::{
    Gradients, Ids, Loss, Model, NamedTensor, RowOptimizer, Table, TableModel, Update, UpdateRule,
    UserError,
};
use elasticdl_tests::churn::{Commit, EventWriter, LogEntry, hang_file};
use elasticdl_tests::counts_summary;

/// Arguments of a worker of the benchmark's jobs.
#[derive(Debug, Parser)]
struct Arguments {
    #[arg(long)]
    params: usize,
    /// Floats of optimizer state per parameter.
    #[arg(long)]
    slots: usize,
    /// Records of an epoch.
    #[arg(long)]
    records: usize,
    /// Rows of the table; 0 for no table.
    #[arg(long)]
    rows: u64,
    /// Folder of the event logs.
    #[arg(long)]
    event_logs: PathBuf,
}

/// Parameter `i` is the number of times that record `i` was absorbed; further parameters only add
/// to the size of the reductions.
#[derive(Debug)]
pub(crate) struct Counting {
    params: usize,
    slots: usize,
    records: usize,
    rows: u64,
    /// If this file exists, the model hangs.
    hangs_when: PathBuf,
    /// Position of the first row of each record of the step.
    positions: HashMap<u64, usize>,
    work: Rc<RefCell<Work>>,
}

/// What this worker has computed.
#[derive(Debug)]
struct Work {
    log: EventWriter,
    /// Records whose gradient was computed here and that are in no update yet.
    pending: Vec<usize>,
    /// Number of records that were discarded since the last update.
    undone: u64,
}

impl Counting {
    /// The model of a worker, from its arguments.
    pub(crate) fn parse() -> Self {
        let arguments = Arguments::parse();
        let log = EventWriter::create(&arguments.event_logs).expect("an event log can be written");
        Self {
            params: arguments.params,
            slots: arguments.slots,
            records: arguments.records,
            rows: arguments.rows,
            hangs_when: arguments.event_logs.join(hang_file(std::process::id())),
            positions: HashMap::new(),
            work: Rc::new(RefCell::new(Work { log, pending: Vec::new(), undone: 0 })),
        }
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
        while self.hangs_when.exists() {
            std::thread::park();
        }
        if self.rows > 0 {
            let (rows, _) = gradients.rows_and_sum();
            let (_, sums) = rows.of(0);
            for first in batch.iter().filter_map(|record| self.positions.remove(record)) {
                let len = ROWS_PER_RECORD as usize * ROW_NUMBERS;
                let sums = &mut sums[first * ROW_NUMBERS..][..len];
                sums.iter_mut().for_each(|sum| *sum += 1.0);
            }
        }
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
        work.log.write(LogEntry::Computed { records: batch.len() as u64 })?;
        Ok(Loss::Sum(batch.len() as f64))
    }

    fn as_table_model(&mut self) -> Option<&mut dyn TableModel<Batch = Vec<u64>>> {
        (self.rows > 0).then_some(self as _)
    }

    fn optimizer(&self) -> impl UpdateRule {
        let (slots, records) = (self.slots, self.records);
        Adding { slots, records, work: Rc::clone(&self.work) }
    }

    fn summary(&mut self, parameters: &[f32]) -> Result<Option<String>, UserError> {
        Ok(Some(counts_summary(&parameters[..self.records])))
    }
}

/// A record has rows of its own.
impl TableModel for Counting {
    type Batch = Vec<u64>;

    fn tables(&self) -> Vec<Table> {
        vec![Table::new("rows", ROW_NUMBERS).optimized(RowOptimizer::adagrad(0.1))]
    }

    fn ids(&mut self, batch: &mut Vec<u64>, ids: &mut Ids) -> Result<(), UserError> {
        for &record in batch.iter() {
            ids.begin_record();
            let rows = record * ROWS_PER_RECORD..(record + 1) * ROWS_PER_RECORD;
            // They are new, so they follow each other.
            let places: Vec<usize> = rows.map(|id| ids.push(0, id)).collect();
            self.positions.insert(record, places[0]);
        }
        Ok(())
    }
}

/// Rows that a record touches.
pub(crate) const ROWS_PER_RECORD: u64 = 64;
/// Numbers of a row.
const ROW_NUMBERS: usize = 16;

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
        Ok(work.log.write(LogEntry::Committed(commit))?)
    }
}
