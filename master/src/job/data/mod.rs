//! The data: shards, leases, and the cached ledger.

pub(crate) mod lease_table;
pub(crate) mod shards;
