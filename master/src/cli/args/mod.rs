//! Groups of options, which commands compose, and the parsers of their values.

mod checkpoint;
mod cluster;
mod data;
mod inference;
mod job;
mod output;
mod resilience;
mod training;
mod validation;
mod values;
mod workers;

pub(crate) use checkpoint::CheckpointOptions;
pub(crate) use cluster::{ClusterOptions, ClusterTarget};
pub(crate) use data::{InferenceData, TrainingData, TuningOptions};
pub(crate) use inference::InferenceOptions;
pub(crate) use job::JobOptions;
pub(crate) use output::OutputOptions;
pub(crate) use resilience::ResilienceOptions;
pub(crate) use training::TrainingOptions;
pub(crate) use validation::ValidationOptions;
pub(crate) use values::{
    JOB_NAME_LEN_MAX, parse_interval, parse_job_name, parse_timeout, parse_uri, parse_workers,
};
pub(crate) use workers::WorkerOptions;
