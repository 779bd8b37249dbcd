//! The data: files, shards, leases, the cached ledger, and results of shards.

pub(crate) mod job_data;
pub(crate) mod lease_table;
pub(crate) mod results;
pub(crate) mod shards;
