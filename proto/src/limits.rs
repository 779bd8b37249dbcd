//! Upper bounds on everything that a job accepts from outside, and the truncation of texts.
//!
//! Each bound is far above any sensible value, and small enough that no sum or product of bounded
//! values overflows: the records of all epochs stay below 2^60.

/// Most epochs of a job.
pub const EPOCHS_MAX: u32 = 1 << 20;
/// Most workers of a job.
pub const WORKERS_MAX: u32 = 16_384;
/// Most parallel connections between neighbours in the ring.
pub const CHANNELS_MAX: u8 = 16;
/// Workers with a copy of a row, unless a job has its own number.
pub const TABLE_REPLICAS: u8 = 2;
/// Most workers with a copy of a row.
pub const TABLE_REPLICAS_MAX: u8 = 3;

/// The most commits by which the rows that a step reads may be older than the last one.
pub const TABLE_LAG_MAX: u8 = 16;
/// Parts per million of the steps that are audited, if all are.
pub const AUDIT_MAX: u32 = 1_000_000;
/// Most members that a stalled worker waits for and that are no neighbours in the ring.
pub const STALL_FAR_MAX: usize = 2;
/// Most records of a step.
pub const BATCH_RECORDS_MAX: u64 = 1 << 32;
/// Most micro-batches of a step whose sum is exact: each halving of their size costs a bit of
/// precision.
pub const MICRO_BATCHES_MAX: u64 = 1024;
/// Most records of a shard.
pub const SHARD_RECORDS_MAX: u64 = DATASET_RECORDS_MAX;
/// Most steps of a job.
pub const STEPS_MAX: u64 = 1 << 60;
/// Most records of one epoch.
pub const DATASET_RECORDS_MAX: u64 = 1 << 40;
/// Most files of a data set.
pub const DATASET_FILES_MAX: usize = 1 << 20;
/// Most bytes of a packed list of files: a little less than a message may hold.
pub const DATASET_PACKED_BYTES_MAX: usize = 60 << 20;
/// Most parameters of a model.
pub const PARAMETERS_MAX: u64 = 1 << 48;
/// Most bytes of a file's path.
pub const PATH_BYTES_MAX: usize = 4096;
/// Most metrics of an evaluation.
pub const METRICS_MAX: usize = 100;
/// Most bytes of a metric's name.
pub const METRIC_NAME_BYTES_MAX: usize = 100;
/// Bytes to which an error text is truncated.
pub const ERROR_BYTES_MAX: usize = 4096;
/// Bytes to which the name of a zone, a rack or a node is truncated.
pub const PLACE_BYTES_MAX: usize = 256;
/// Most skipped records that are listed.
pub const SKIPPED_LISTED_MAX: usize = 5;
/// Bytes to which the text about a skipped record is truncated.
pub const SKIPPED_TEXT_BYTES_MAX: usize = 1024;
/// Bytes to which the name of a checkpoint is truncated.
pub const CHECKPOINT_NAME_BYTES_MAX: usize = 256;
/// Most bytes of a worker's report of what it does, as JSON.
pub const REPORT_BYTES_MAX: u64 = 256 << 10;
/// Bytes to which a model's summary is truncated.
pub const SUMMARY_BYTES_MAX: usize = 64 << 10;
/// Longest phase of a membership change in microseconds: 35 years.
pub const PHASE_US_MAX: u64 = 1 << 50;
/// Most bytes of one gRPC message.
pub const MESSAGE_BYTES_MAX: usize = 64 << 20;

/// Truncates `text` to at most `bytes_max` bytes at a character boundary, and marks the cut.
#[must_use]
pub fn clip(mut text: String, bytes_max: usize) -> String {
    if text.len() > bytes_max {
        text.truncate(text.floor_char_boundary(bytes_max));
        text.push('…');
    }
    text
}
