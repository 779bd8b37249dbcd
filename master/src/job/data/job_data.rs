//! What is known of a job's data: its files, what is absorbed of them, and the shards of inference.

use elasticdl_proto::{FileList, Ledger, OrderName, RecordRange, WorkerId};

use super::dataset::Dataset;
use super::ledger_cache::LedgerCache;
use super::results::{ShardResults, Sums};
use super::shard_leases::ShardLeases;
use super::shards::Shards;
use crate::job::event::LedgerReport;
use crate::job::spec::JobSpec;

/// The data of a job.
#[derive(Debug, Default)]
pub(crate) struct JobData {
    /// Set once a worker has described the data set.
    described: Option<Described>,
    /// Results of an inference job's shards.
    results: ShardResults,
    /// Number of parameters that the first ready worker's model has.
    parameters: Option<u64>,
    /// Steps committed, as last reported.
    step: u64,
}

/// A data set, and how far the job is.
#[derive(Debug)]
struct Described {
    dataset: Dataset,
    /// The order of the records, as the worker that has described them told it.
    order: Option<OrderName>,
    cache: LedgerCache,
    /// `None` in a training job, whose workers divide the records among themselves.
    shards: Option<ShardLeases>,
}

impl JobData {
    /// Takes the data set of `files` for the job `spec`, whose records have this order.
    ///
    /// # Errors
    /// Why the job can't run on it, for the user.
    pub(crate) fn describe(
        &mut self,
        files: FileList,
        order: Option<OrderName>,
        spec: &JobSpec,
    ) -> Result<(), String> {
        let dataset = Dataset::new(files, spec)?;
        let shards = match spec.options.work.trains() {
            true => None,
            false => Some(ShardLeases::new(Shards::cut(&dataset, spec.records_per_shard)?)),
        };
        let cache = LedgerCache::new(dataset.records(), spec.options.epochs);
        self.described = Some(Described { dataset, order, cache, shards });
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
        if ranges.is_empty() {
            return Ok(());
        }
        let Some(Described { cache, shards: Some(shards), .. }) = &mut self.described else {
            return Err("there are results of shards, but no shards".into());
        };
        for done in ranges {
            shards
                .restore_done(done)
                .and_then(|()| cache.absorb(&[done]))
                .map_err(|wrong| format!("there are results of {wrong}"))?;
        }
        self.results = results;
        Ok(())
    }

    /// Restores the totals of the ledger that a previous master persisted.
    ///
    /// # Errors
    /// The first inconsistency.
    pub(crate) fn restore_ledger(&mut self, totals: &LedgerReport) -> Result<(), String> {
        if let Some(cache) = self.cache_mut() {
            cache.replace(cache.check(totals)?);
        }
        Ok(())
    }

    /// The data set, once it is known.
    pub(crate) fn dataset(&self) -> Option<&Dataset> {
        self.described.as_ref().map(|described| &described.dataset)
    }

    /// The list of files, once it is known.
    pub(crate) fn files(&self) -> Option<&FileList> {
        self.dataset().map(Dataset::files)
    }

    /// The order of the records, if it is known.
    pub(crate) fn order(&self) -> Option<OrderName> {
        self.described.as_ref()?.order
    }

    /// The group's ledger as last reported, once the data set is known.
    pub(crate) fn cache(&self) -> Option<&LedgerCache> {
        self.described.as_ref().map(|described| &described.cache)
    }

    pub(crate) fn cache_mut(&mut self) -> Option<&mut LedgerCache> {
        self.described.as_mut().map(|described| &mut described.cache)
    }

    /// The shards of an inference job, once the data set is known.
    pub(crate) fn shards(&self) -> Option<&ShardLeases> {
        self.described.as_ref()?.shards.as_ref()
    }

    pub(crate) fn shards_mut(&mut self) -> Option<&mut ShardLeases> {
        self.described.as_mut()?.shards.as_mut()
    }

    /// Records absorbed over all epochs, as last reported.
    pub(crate) fn counted(&self) -> u64 {
        self.cache().map_or(0, |cache| cache.ledger().counted())
    }

    /// Records of all epochs; 0 until the data set is known.
    pub(crate) fn expected(&self) -> u64 {
        self.cache().map_or(0, LedgerCache::expected)
    }

    /// Replaces the cached ledger with the group's.
    pub(crate) fn replace_ledger(&mut self, ledger: Ledger) {
        if let Some(cache) = self.cache_mut() {
            cache.replace(ledger);
        }
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

    /// Results of an inference job's shards.
    pub(crate) fn results(&self) -> &ShardResults {
        &self.results
    }

    pub(crate) fn results_mut(&mut self) -> &mut ShardResults {
        &mut self.results
    }

    /// Returns the shards of a lost worker, which others process again.
    pub(crate) fn forget_worker(&mut self, worker: WorkerId) {
        if let Some(shards) = self.shards_mut() {
            shards.forget(worker);
        }
    }

    /// Counts a shard that is leased to `worker` as a step, with its sums of metrics. Returns
    /// whether it is leased to it.
    ///
    /// # Errors
    /// There are too many metrics.
    pub(crate) fn finish_shard(
        &mut self,
        worker: WorkerId,
        range: RecordRange,
        sums: Sums,
    ) -> Result<bool, String> {
        let Some(Described { cache, shards: Some(shards), .. }) = &mut self.described else {
            return Ok(false);
        };
        if !shards.finish(worker, range) {
            return Ok(false);
        }
        self.results.add(range, sums)?;
        self.step += 1;
        cache.absorb(&[range]).expect("what is leased lies in the data set");
        Ok(true)
    }
}
