//! The data: files, the cached ledger, and the shards of inference with their results.

pub(crate) mod dataset;
pub(crate) mod job_data;
pub(crate) mod ledger_cache;
pub(crate) mod results;
pub(crate) mod shard_leases;
pub(crate) mod shards;
