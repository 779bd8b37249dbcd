//! Options for the data of a job, and for the steps over it.

use std::num::NonZeroU64;

use clap::Args;
use elasticdl_master::job::{
    LinkEncryption, OnRowsLost, ParamDtype, Shuffle, ShuffleMode, WireDtype,
};
use elasticdl_master::limits::TABLE_REPLICAS;

use super::values::{self, Choices};

/// Options for training data and steps.
#[derive(Args, Debug)]
#[command(next_help_heading = HEADING)]
pub(crate) struct TrainingData {
    /// Training data, as PROGRAM's reader understands it: usually a file, a folder or a URI.
    ///
    /// A Python program needs none. Can be repeated, and can be a quoted pattern:
    /// 'data/2026-*.csv'.
    #[arg(long, value_name = "URI")]
    pub(crate) training_data: Vec<String>,

    /// Number of passes over the data.
    #[arg(long, value_name = "N", default_value = "1", value_parser = values::parse_epochs)]
    pub(crate) num_epochs: u32,

    /// Stop after this many steps, unless the data ends earlier. [default: no limit]
    #[arg(long, value_name = "N", value_parser = values::parse_steps)]
    pub(crate) max_steps: Option<u64>,

    /// Records per step over all workers, independent of their number. [default: 64]
    #[arg(long, value_name = "RECORDS", value_parser = values::parse_batch,
          conflicts_with = "minibatch_size")]
    pub(crate) global_batch_size: Option<u64>,

    /// Records per step and worker: the global batch grows with the number of workers.
    #[arg(long, value_name = "RECORDS", value_parser = values::parse_batch)]
    pub(crate) minibatch_size: Option<u64>,

    /// Records per micro-batch: a step consists of micro-batches, each computed by one worker.
    /// Faster workers compute more of them. [default: single records, split evenly over equal
    /// workers; a sixteenth of the step with --deterministic]
    #[arg(long, value_name = "RECORDS", value_parser = values::parse_batch)]
    pub(crate) micro_batch: Option<u64>,

    /// Compute bit-identical parameters for any number of workers and under any failure.
    ///
    /// The gradients of a step's micro-batches are summed exactly, so the sum does not depend on
    /// the workers that computed them. A worker keeps the gradient of each of its micro-batches
    /// until the step is summed. The digest of the final parameters and optimizer state is in the
    /// summary. Needs --global-batch-size and CPUs; the model's results must depend only on the
    /// arguments of its methods.
    #[arg(long)]
    pub(crate) deterministic: bool,

    /// What to shuffle in each epoch: auto, record, block, block:N or none. The order depends only
    /// on the seed and the epoch, not on the workers.
    ///
    /// record: all records. block: blocks, and the records within each few consecutive blocks, at
    /// least N at a time, by default 8192. A worker reads all blocks that contain its records, and
    /// keeps up to two of these buffers. auto: `record` if the reader is fast at single records,
    /// else `block`. none: the order of the data.
    #[arg(long, value_name = "WHAT", default_value = "auto", value_parser = parse_shuffle)]
    pub(crate) shuffle: Shuffle,

    /// Seed of all random choices: order of records and initial parameters.
    #[arg(long, value_name = "N", default_value = "0", allow_negative_numbers = true,
          value_parser = values::parse_seed)]
    pub(crate) seed: u64,

    #[command(flatten)]
    pub(crate) bad_records: BadRecordsOption,
}

/// Options of `elasticdl train` whose defaults are good for nearly all jobs.
#[derive(Args, Debug)]
#[command(next_help_heading = "Advanced")]
pub(crate) struct TuningOptions {
    /// Data type of gradients on the network: bf16 and f16 halve the traffic, for slow networks.
    ///
    /// Sums are computed in f32 and rounded each time they leave a worker: over N workers an
    /// element differs by at most N/256 of the largest partial sum with bf16, and N/2048 with f16,
    /// which is infinite above 65504. All workers get bit-identical results.
    #[arg(long, value_name = "DTYPE", default_value = "f32",
          value_parser = values::choice(WIRE_DTYPES))]
    pub(crate) wire_dtype: WireDtype,

    /// Number of connections between two neighbours in the ring, 1 to 16.
    ///
    /// More than one helps in networks that limit the bandwidth of each connection or lose packets.
    /// A gradient of at least 256 KiB per connection is split over them. Workers that share memory
    /// do not use them.
    #[arg(long, value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u8).range(1..=16))]
    pub(crate) channels: u8,

    /// Which connections between workers to encrypt.
    ///
    /// The two ends of every connection prove to each other that they know the job's secret. auto:
    /// connections between hosts are also encrypted, with AES-256-GCM and new keys for each. on:
    /// connections within a host as well. off: none, so an attacker who can read or modify network
    /// traffic can read or modify the model. NCCL does not encrypt: GPUs of several hosts use it
    /// only with off.
    #[arg(long, value_name = "WHICH", default_value = "auto",
          value_parser = values::choice(LINK_ENCRYPTIONS))]
    pub(crate) link_encryption: LinkEncryption,

    /// Divide the optimizer's state over the workers, each part on two of them.
    ///
    /// A worker then needs less memory: with AdamW, W workers and n parameters, 8 + 24/W bytes per
    /// parameter instead of 24. Each step also sends all parameters to all workers. One worker can
    /// be lost without any loss; if two are, in the seconds before the group has made new copies,
    /// it goes back to the newest checkpoint. For optimizers of the library, rules that are
    /// element-wise, and such optimizers of torch.optim; not for models with tables. Of a model on
    /// a GPU, the optimizer's state and the update are on the host.
    #[arg(long)]
    pub(crate) shard_optimizer: bool,

    /// Data type of the parameters that each worker computes with: bf16 needs --shard-optimizer.
    ///
    /// With bf16, each worker holds 2 bytes per parameter, and the f32 numbers that the optimizer
    /// changes are divided over the workers with its state. Checkpoints have these; an exported
    /// model has the rounded ones, in f32. For candle models, whose network then gets bf16 tensors;
    /// not for PyTorch or models on GPUs.
    #[arg(long, value_name = "DTYPE", default_value = "f32",
          value_parser = values::choice(PARAM_DTYPES))]
    pub(crate) param_dtype: ParamDtype,

    /// Number of workers that hold each row of the model's tables, 1 to 3.
    ///
    /// All but one of these workers can be lost at once without any loss of rows; they are on
    /// different hosts if the job has several. The group then makes new copies while it trains.
    /// With 1, the loss of a worker takes the group back to the newest checkpoint.
    #[arg(long, value_name = "N", default_value_t = TABLE_REPLICAS,
          value_parser = clap::value_parser!(u8).range(1..=3))]
    pub(crate) table_replicas: u8,

    /// Number of commits by which the rows that a step reads are older than the last one, 0 to 16.
    ///
    /// 0: a step reads rows as of the step before. 1: as of one step earlier, so that between hosts
    /// all rows are on their way while the step before is computed. The rows are exactly so old,
    /// whatever happens to workers: the asynchronous SGD of parameter servers, with the same bits
    /// each time. Other parameters are those of the step before.
    #[arg(long, value_name = "COMMITS", default_value_t = 0,
          value_parser = clap::value_parser!(u8).range(0..=16))]
    pub(crate) table_lag: u8,

    /// Number of table servers: further workers that hold the rows of the model's tables and
    /// compute no records.
    ///
    /// With as many of them as --table-replicas, all rows are on table servers; with fewer, the
    /// copies that are missing are on the other workers. A table server that ends is replaced by
    /// another, and its rows are on other members until then. --num-workers, --min-workers,
    /// --max-workers and `elasticdl scale` count the others only. Each of them runs the program and
    /// holds the model's other parameters.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) table_servers: u32,

    /// Action if all copies of rows of the model's tables are lost with their workers.
    ///
    /// go-back: the group goes back to the newest checkpoint and trains the records since then
    /// again. stale: it goes on, with the rows of the newest checkpoint in place of the lost ones.
    /// What records since then have added to these rows is missing; the summary begins with the
    /// number of such touches.
    #[arg(long, value_name = "WHAT", default_value = "go-back",
          value_parser = values::choice(ON_ROWS_LOST))]
    pub(crate) on_rows_lost: OnRowsLost,

    /// Maximum memory of the rows of the model's tables on each worker, for example `8GiB`.
    ///
    /// A worker that has more ends the job with its newest state in a checkpoint, and an error that
    /// names the largest tables, before the kernel kills it. Its own rows and the copies that it
    /// keeps for other workers count; what a step needs does not. [default: three quarters of the
    /// memory limit of the workers' cgroup or container, if it has one, for all workers of a host
    /// together]
    #[arg(long, value_name = "SIZE", value_parser = values::parse_memory)]
    pub(crate) table_memory: Option<u64>,

    /// Export only the rows of tables that steps after this one have touched, for a server that has
    /// an earlier export.
    ///
    /// The other parameters are exported as usual, and --export-best is not affected. Rows that
    /// were evicted after that step are not listed. A whole model of this name is not replaced:
    /// name another file.
    #[arg(long, value_name = "STEP", requires = "export", value_parser = values::parse_steps)]
    pub(crate) export_changes_since: Option<u64>,
}

/// Values of `--on-rows-lost`.
const ON_ROWS_LOST: Choices<OnRowsLost> = &[
    ("go-back", OnRowsLost::GoBack, "The group goes back to the newest checkpoint"),
    ("stale", OnRowsLost::Stale, "The group goes on with the rows of the newest checkpoint"),
];

/// Parses what is shuffled.
fn parse_shuffle(text: &str) -> Result<Shuffle, String> {
    let whole = |mode| Ok(Shuffle { mode, buffer: None });
    match text {
        "auto" => whole(ShuffleMode::Auto),
        "block" => whole(ShuffleMode::Block),
        "none" => Ok(Shuffle::NONE),
        "record" => whole(ShuffleMode::Record),
        _ => {
            let records = text.strip_prefix("block:").ok_or(
                "it must be `auto`, `record`, `none`, `block`, or `block:` and the number of \
                 records that are mixed at a time, e.g. `block:8192`",
            )?;
            let buffer = NonZeroU64::new(values::parse_shard(records)?);
            Ok(Shuffle { mode: ShuffleMode::Block, buffer })
        }
    }
}

/// Parses the number of bad records that are skipped.
fn parse_bad_records(text: &str) -> Result<u64, String> {
    let records = match text.split_once(':') {
        None if text == "fail" => return Ok(0),
        Some(("skip", records)) => records.parse().ok().filter(|records| *records > 0),
        _ => None,
    };
    records.ok_or_else(|| "it must be `fail`, or `skip:` and a number, e.g. `skip:100`".to_owned())
}

/// Treatment of unreadable records.
#[derive(Args, Debug)]
#[command(next_help_heading = HEADING)]
pub(crate) struct BadRecordsOption {
    /// What to do with an unreadable record: `fail`, or `skip:N`.
    ///
    /// fail: the job ends with an error that names the file and the line. skip:N: up to N such
    /// records are skipped; one more ends the job. The summary has their number and the first few
    /// of them. Only some readers, such as those of tables, can skip records.
    #[arg(long, value_name = "WHAT", default_value = "fail", value_parser = parse_bad_records)]
    pub(crate) bad_records: u64,
}

/// Options for data that a model is evaluated on, or that it predicts.
#[derive(Args, Debug)]
#[command(next_help_heading = HEADING)]
pub(crate) struct InferenceData {
    /// Data, as PROGRAM's reader understands it: usually a file, a folder or a URI. Can be
    /// repeated, and can be a quoted pattern: 'data/2026-*.csv'.
    #[arg(long, value_name = "URI", required = true)]
    pub(crate) data: Vec<String>,

    /// Records per batch, unless the model requires fewer. [default: 64]
    #[arg(long, value_name = "RECORDS", value_parser = values::parse_batch)]
    pub(crate) minibatch_size: Option<u64>,

    /// Records per shard, the unit of leases and results. [default: 4096, more for billions of
    /// records]
    #[arg(long, value_name = "RECORDS", value_parser = values::parse_shard)]
    pub(crate) records_per_shard: Option<u64>,

    #[command(flatten)]
    pub(crate) bad_records: BadRecordsOption,
}

const HEADING: &str = "Data and steps";
/// Values of `--link-encryption`.
const LINK_ENCRYPTIONS: Choices<LinkEncryption> = &[
    ("auto", LinkEncryption::Auto, "Those between hosts"),
    ("off", LinkEncryption::Off, "No connection"),
    ("on", LinkEncryption::On, "All connections"),
];
/// Values of `--param-dtype`.
const PARAM_DTYPES: Choices<ParamDtype> = &[
    ("bf16", ParamDtype::Bf16, "Rounded to 8 bits of precision"),
    ("f32", ParamDtype::F32, "Not rounded"),
];
/// Values of `--wire-dtype`.
const WIRE_DTYPES: Choices<WireDtype> = &[
    ("bf16", WireDtype::Bf16, "Rounded to 8 bits of precision"),
    ("f16", WireDtype::F16, "Rounded to 11 bits of precision, up to 65504"),
    ("f32", WireDtype::F32, "Not rounded"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_shuffled_with_a_buffer_of_a_number_of_records() {
        let shuffle = |mode, records| Ok(Shuffle { mode, buffer: NonZeroU64::new(records) });
        assert_eq!(parse_shuffle("block"), shuffle(ShuffleMode::Block, 0));
        assert_eq!(parse_shuffle("block:100"), shuffle(ShuffleMode::Block, 100));
        assert_eq!(parse_shuffle("record"), shuffle(ShuffleMode::Record, 0));
        for bad in ["", "all", "record:1", "auto:1", "Block"] {
            assert!(parse_shuffle(bad).unwrap_err().contains("`block:8192`"), "{bad}");
        }
        for bad in ["block:", "block:0", "block:-1", "block:x"] {
            assert!(parse_shuffle(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn bad_records_end_the_job_or_are_skipped_up_to_a_number() {
        assert_eq!(parse_bad_records("fail"), Ok(0));
        assert_eq!(parse_bad_records("skip:10"), Ok(10));
        for bad in ["", "skip", "skip:", "skip:0", "skip:-1", "skip:x", "fail:1", "10"] {
            assert!(parse_bad_records(bad).unwrap_err().contains("`skip:100`"), "{bad}");
        }
    }
}
