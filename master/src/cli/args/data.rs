//! Options for the data of a job, and for the steps over it.

use clap::{Args, ValueEnum};

use super::values;
use crate::job::WireDtype;

/// Options for training data and steps.
#[derive(Args, Debug)]
#[command(next_help_heading = HEADING)]
pub(crate) struct TrainingData {
    /// Training data, as PROGRAM's reader understands it: usually a file, a folder or a URI.
    #[arg(long, value_name = "URI", required_unless_present = "resume")]
    pub(crate) training_data: Option<String>,

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

    /// Shuffle the shards in each epoch. This is the default.
    #[arg(long, overrides_with = "no_shuffle")]
    pub(crate) shuffle: bool,

    /// Lease shards in the order of the data.
    #[arg(long, overrides_with = "shuffle")]
    pub(crate) no_shuffle: bool,

    /// Seed of everything random: the order of shards and the initial parameters.
    #[arg(long, value_name = "N", default_value = "0")]
    pub(crate) seed: u64,
}

/// Options of `elasticdl train` whose defaults are good for nearly all jobs.
#[derive(Args, Debug)]
#[command(next_help_heading = "Advanced")]
pub(crate) struct TuningOptions {
    /// Records per shard, the unit in which data is shuffled and leased to workers. [default: from
    /// the size of the data]
    #[arg(long, value_name = "RECORDS", value_parser = values::parse_shard)]
    pub(crate) records_per_shard: Option<u64>,

    /// Data type of gradients on the wire: bf16 and f16 halve the traffic, for slow networks.
    ///
    /// Sums are computed in f32 and rounded each time they leave a worker: over N workers an
    /// element is off by at most N/256 of the largest partial sum with bf16, and N/2048 with f16,
    /// which is infinite above 65504. All workers get bit-identical results.
    #[arg(long, value_name = "DTYPE", value_enum, default_value = "f32")]
    pub(crate) wire_dtype: WireDtypeArg,

    /// Number of connections between two neighbours in the ring, 1 to 16.
    ///
    /// More than one helps in networks that limit the bandwidth of each connection, or that lose
    /// packets. A gradient of at least 256 KiB per connection is split over them. Workers that
    /// share memory do not use them.
    #[arg(long, alias = "streams", value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u8).range(1..=16))]
    pub(crate) channels: u8,
}

/// Options for data that a model is evaluated on, or that it predicts.
#[derive(Args, Debug)]
#[command(next_help_heading = HEADING)]
pub(crate) struct InferenceData {
    /// Data, as PROGRAM's reader understands it: usually a file, a folder or a URI.
    #[arg(long, value_name = "URI")]
    pub(crate) data: String,

    /// Records per batch, unless the model asks for fewer. [default: 64]
    #[arg(long, value_name = "RECORDS", value_parser = values::parse_batch)]
    pub(crate) minibatch_size: Option<u64>,

    /// Records per shard, the unit in which data is leased and results are reported. [default:
    /// 4096, more for billions of records]
    #[arg(long, value_name = "RECORDS", value_parser = values::parse_shard)]
    pub(crate) records_per_shard: Option<u64>,
}

/// A value of `--wire-dtype`.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum WireDtypeArg {
    /// Rounded to 8 bits of precision.
    Bf16,
    /// Rounded to 11 bits of precision, up to 65504.
    F16,
    /// As they are.
    F32,
}

impl From<WireDtypeArg> for WireDtype {
    fn from(arg: WireDtypeArg) -> Self {
        match arg {
            WireDtypeArg::Bf16 => Self::Bf16,
            WireDtypeArg::F16 => Self::F16,
            WireDtypeArg::F32 => Self::F32,
        }
    }
}

const HEADING: &str = "Data and steps";
