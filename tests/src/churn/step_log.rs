//! The event log of a model that only counts what each worker computes.

use std::cell::RefCell;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use elasticdl::{Optimizer, Update, UpdateRule, UserError};

use super::event_log::{Commit, EventWriter, LogEntry};

/// Shared by a model and its [rule](LoggedRule), of which each step is logged with the number of
/// its records that this worker has computed.
#[derive(Clone, Debug, Default)]
pub struct StepLog(Rc<RefCell<Steps>>);

#[derive(Debug, Default)]
struct Steps {
    /// `None`: nothing is logged.
    folder: Option<PathBuf>,
    writer: Option<EventWriter>,
    /// Records that this worker has computed since the last step.
    computed: u64,
    /// The step of the last update, of which there is one for each chunk of a sharded optimizer.
    last: Option<u64>,
}

impl StepLog {
    /// The event log in this folder is created with the first records.
    pub fn new(folder: Option<&Path>) -> Self {
        let folder = folder.map(Path::to_owned);
        Self(Rc::new(RefCell::new(Steps { folder, ..Steps::default() })))
    }

    /// Notes the gradients of this many records.
    ///
    /// # Errors
    /// The log can't be written.
    pub fn computed(&self, records: u64) -> io::Result<()> {
        let mut steps = self.0.borrow_mut();
        if let (None, Some(folder)) = (&steps.writer, &steps.folder) {
            steps.writer = Some(EventWriter::create(folder)?);
        }
        steps.computed += records;
        steps.writer.as_mut().map_or(Ok(()), |log| log.write(LogEntry::Computed { records }))
    }

    /// Number of steps that this worker has applied or received.
    pub fn steps(&self) -> u64 {
        self.0.borrow().last.map_or(0, |last| last + 1)
    }

    /// The optimizer, whose steps are logged when their update begins.
    pub fn rule(&self, optimizer: impl Into<Optimizer>) -> LoggedRule {
        LoggedRule { optimizer: optimizer.into(), log: self.clone() }
    }
}

/// See [`StepLog::rule`].
#[derive(Debug)]
pub struct LoggedRule {
    optimizer: Optimizer,
    log: StepLog,
}

impl UpdateRule for LoggedRule {
    fn slots(&self) -> usize {
        self.optimizer.slots()
    }

    fn is_elementwise(&self) -> bool {
        true
    }

    fn apply(&mut self, update: Update<'_>) -> Result<(), UserError> {
        let Update { step, records, .. } = update;
        let mut steps = self.log.0.borrow_mut();
        if steps.last.replace(step) != Some(step) {
            let own = std::mem::take(&mut steps.computed);
            let commit = Commit { step, records, own, ..Commit::default() };
            if let Some(writer) = &mut steps.writer {
                writer.write(LogEntry::Committed(commit))?;
            }
        }
        self.optimizer.apply(update);
        Ok(())
    }
}
