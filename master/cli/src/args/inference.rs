//! The options that `elasticdl evaluate` and `elasticdl predict` share.

use std::ffi::OsString;

use clap::Args;

use super::{ClusterOptions, InferenceData, JobOptions, OutputOptions, WorkerOptions, values};

/// Options of a job whose workers apply a model and form no group.
#[derive(Args, Debug)]
pub(crate) struct InferenceOptions {
    /// The training program and its arguments. Without a `/` the program is looked up in $PATH; in
    /// a cluster, in the image.
    #[arg(last = true, required = true, value_names = ["PROGRAM", "ARGS"])]
    pub(crate) program: Vec<OsString>,

    /// Model: a safetensors file written by `elasticdl train --export`, or the folder of one
    /// checkpoint; a path or s3://, gs://, az://.
    #[arg(long, value_name = "URI", value_parser = values::parse_uri, help_heading = "Model")]
    pub(crate) model: String,

    #[command(flatten)]
    pub(crate) job: JobOptions,

    #[command(flatten)]
    pub(crate) data: InferenceData,

    #[command(flatten)]
    pub(crate) workers: WorkerOptions,

    #[command(flatten)]
    pub(crate) output: OutputOptions,

    #[command(flatten)]
    pub(crate) cluster: ClusterOptions,
}
