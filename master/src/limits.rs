//! Upper bounds on everything that a job accepts from outside.
//!
//! Each bound is far above any sensible value, and small enough that no sum or product of bounded
//! values overflows: the records of all epochs stay below 2^60.

use std::time::Duration;

/// Most epochs of a job.
pub const EPOCHS_MAX: u32 = 1 << 20;
/// Most workers of a job.
pub const WORKERS_MAX: u32 = 1024;
/// Most records of a step.
pub const BATCH_RECORDS_MAX: u64 = 1 << 32;
/// Most records of a shard.
pub const SHARD_RECORDS_MAX: u64 = DATASET_RECORDS_MAX;
/// Most steps of a job.
pub const STEPS_MAX: u64 = 1 << 60;
/// Most records of one epoch.
pub(crate) const DATASET_RECORDS_MAX: u64 = 1 << 40;
/// Most files of a data set.
pub(crate) const DATASET_FILES_MAX: usize = 1 << 20;
/// Most parameters of a model.
pub(crate) const PARAMETERS_MAX: u64 = 1 << 48;
/// Most bytes of a file's path.
pub(crate) const PATH_BYTES_MAX: usize = 4096;
/// Bytes to which an error text is truncated.
pub(crate) const ERROR_BYTES_MAX: usize = 4096;
/// Bytes to which a model's summary is truncated.
pub(crate) const SUMMARY_BYTES_MAX: usize = 64 << 10;
/// Longest phase of a membership change in microseconds: 35 years.
pub(crate) const PHASE_US_MAX: u64 = 1 << 50;
/// Most bytes of one gRPC message.
pub(crate) const MESSAGE_BYTES_MAX: usize = 64 << 20;
/// Time within which a connection must authenticate.
pub(crate) const AUTHENTICATION_TIMEOUT: Duration = Duration::from_secs(5);
