//! What is known of a job's data: its files, the leases on their records, and the group's progress.

use elasticdl_proto::{FileList, RecordRange};

use super::lease_table::{LeaseTable, Share};
use super::results::{ShardResults, Sums};
use super::shards::Shards;
use crate::job::spec::{Batch, JobSpec};

/// The data of a job.
#[derive(Debug, Default)]
pub(crate) struct JobData {
    /// The files and the leases on their records, once a worker has described the data set.
    described: Option<(FileList, LeaseTable)>,
    /// Results of an inference job's shards.
    results: ShardResults,
    /// Number of parameters that the first ready worker's model has.
    parameters: Option<u64>,
    /// Steps committed, as last reported.
    step: u64,
    /// Number of workers to which records may be leased; updated when a worker comes or goes, not
    /// at every lease.
    eligible: u64,
}

impl JobData {
    /// Cuts the data set of `files` for the job `spec`.
    ///
    /// # Errors
    /// Why the job can't run on it, for the user.
    pub(crate) fn describe(&mut self, files: FileList, spec: &JobSpec) -> Result<(), String> {
        let leases = LeaseTable::new(Shards::cut(&files, spec)?, spec.epochs);
        self.described = Some((files, leases));
        Ok(())
    }

    /// Restores what a previous master persisted, on top of the description.
    pub(crate) fn restore(&mut self, parameters: Option<u64>, step: u64) {
        (self.parameters, self.step) = (parameters, step);
    }

    /// Restores the results that a previous master persisted.
    ///
    /// # Errors
    /// The first inconsistency.
    pub(crate) fn restore_results(&mut self, results: ShardResults) -> Result<(), String> {
        let ranges: Vec<RecordRange> = results.ranges().collect();
        if ranges.windows(2).any(|pair| pair[0].end > pair[1].start) {
            return Err("results of shards overlap".into());
        }
        if ranges.is_empty() {
            return Ok(());
        }
        let Some((_, leases)) = &mut self.described else {
            return Err("there are results, but no data set".into());
        };
        leases
            .commit(self.step, &ranges)
            .map_err(|wrong| format!("there are results of {wrong}"))?;
        self.results = results;
        Ok(())
    }

    /// The list of files, once it is known.
    pub(crate) fn files(&self) -> Option<&FileList> {
        self.described.as_ref().map(|(files, _)| files)
    }

    pub(crate) fn leases(&self) -> Option<&LeaseTable> {
        self.described.as_ref().map(|(_, leases)| leases)
    }

    pub(crate) fn leases_mut(&mut self) -> Option<&mut LeaseTable> {
        self.described.as_mut().map(|(_, leases)| leases)
    }

    /// Records absorbed over all epochs, as last reported.
    pub(crate) fn counted(&self) -> u64 {
        self.leases().map_or(0, |leases| leases.ledger().counted())
    }

    /// Steps committed, as last reported.
    pub(crate) fn step(&self) -> u64 {
        self.step
    }

    /// Sets the steps committed. Returns how many there were.
    pub(crate) fn set_step(&mut self, step: u64) -> u64 {
        std::mem::replace(&mut self.step, step)
    }

    /// Number of parameters that the first ready worker's model has.
    pub(crate) fn parameters(&self) -> Option<u64> {
        self.parameters
    }

    /// Sets the number of parameters, if it is not known. Returns the known one.
    pub(crate) fn expect_parameters(&mut self, parameters: u64) -> u64 {
        *self.parameters.get_or_insert(parameters)
    }

    pub(crate) fn set_eligible(&mut self, eligible: u64) {
        self.eligible = eligible;
    }

    /// Limits on one lease.
    pub(crate) fn share(&self, batch: Batch) -> Share {
        let workers = self.eligible.max(1);
        let records = match batch {
            Batch::Global(records) => records.get().div_ceil(workers),
            Batch::PerWorker(records) => records.get(),
        };
        Share { records, workers }
    }

    /// Results of an inference job's shards.
    pub(crate) fn results(&self) -> &ShardResults {
        &self.results
    }

    pub(crate) fn results_mut(&mut self) -> &mut ShardResults {
        &mut self.results
    }

    /// Counts a shard of an inference job as a step, with its sums of metrics.
    ///
    /// # Errors
    /// There are too many metrics.
    pub(crate) fn finish_shard(&mut self, range: RecordRange, sums: Sums) -> Result<(), String> {
        self.results.add(range, sums)?;
        self.step += 1;
        if let Some((_, leases)) = &mut self.described {
            leases.commit(self.step, &[range]).expect("what is leased lies in the data set");
        }
        Ok(())
    }
}
