//! A model that sleeps instead of computing, and writes an event log of its steps.

use std::cell::RefCell;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use clap::Parser;
use elasticdl::{Gradients, Loss, Model, NamedTensor, Update, UpdateRule, UserError};
use elasticdl_tests::churn::{Commit, EventWriter, LogEntry};

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
    work: Rc<RefCell<Work>>,
}

/// What this worker has computed.
#[derive(Debug)]
struct Work {
    log: EventWriter,
    /// Records whose gradient was computed here since the last step.
    computed: u64,
}

impl Sleeping {
    /// The model of a worker, from its arguments.
    pub(crate) fn parse() -> Self {
        let Arguments { compute_ms, parameters, event_logs } = Arguments::parse();
        let log = EventWriter::create(&event_logs).expect("an event log can be written");
        let work = Rc::new(RefCell::new(Work { log, computed: 0 }));
        Self { compute: Duration::from_millis(compute_ms), parameters, work }
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
        let (mut work, records) = (self.work.borrow_mut(), batch.len() as u64);
        work.computed += records;
        work.log.write(LogEntry::Computed { records })?;
        Ok(Loss::Sum(batch.len() as f64))
    }

    fn optimizer(&self) -> impl UpdateRule {
        Counting { work: Rc::clone(&self.work) }
    }
}

/// Adds the sums to the parameters.
struct Counting {
    work: Rc<RefCell<Work>>,
}

impl UpdateRule for Counting {
    fn slots(&self) -> usize {
        0
    }

    fn apply(&mut self, update: Update<'_>) -> Result<(), UserError> {
        update.parameters.iter_mut().zip(update.sum).for_each(|(parameter, sum)| *parameter += sum);
        let mut work = self.work.borrow_mut();
        let own = std::mem::take(&mut work.computed);
        let (step, records) = (update.step, update.records);
        let commit = Commit { step, records, own, ..Commit::default() };
        Ok(work.log.write(LogEntry::Committed(commit))?)
    }
}
