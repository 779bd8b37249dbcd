//! How much of anything a job may be asked to handle.
//!
//! Far above what makes sense, and small enough that no sum or product of them overflows: records
//! of all epochs stay below 2^60.

use std::time::Duration;

/// Passes over the data.
pub const EPOCHS_MAX: u32 = 1 << 20;
/// Workers of a job.
pub const WORKERS_MAX: u32 = 1024;
/// Records of a step.
pub const BATCH_RECORDS_MAX: u64 = 1 << 32;
/// Records of a shard.
pub const SHARD_RECORDS_MAX: u64 = DATASET_RECORDS_MAX;
/// Steps of a job.
pub const STEPS_MAX: u64 = 1 << 60;
/// Records of one epoch.
pub(crate) const DATASET_RECORDS_MAX: u64 = 1 << 40;
/// Files of a data set.
pub(crate) const DATASET_FILES_MAX: usize = 1 << 20;
/// Parameters of a model.
pub(crate) const PARAMETERS_MAX: u64 = 1 << 48;
/// Bytes of a file's path.
pub(crate) const PATH_BYTES_MAX: usize = 4096;
/// Bytes kept of an error text.
pub(crate) const ERROR_BYTES_MAX: usize = 4096;
/// Bytes kept of a model's closing words.
pub(crate) const SUMMARY_BYTES_MAX: usize = 64 << 10;
/// Microseconds of one phase of a membership change: 35 years.
pub(crate) const PHASE_US_MAX: u64 = 1 << 50;
/// Bytes of one gRPC message.
pub(crate) const MESSAGE_BYTES_MAX: usize = 64 << 20;
/// How long a connection may be open without having proved the token.
pub(crate) const AUTHENTICATION_TIMEOUT: Duration = Duration::from_secs(5);
