//! Groups of options, which commands compose, the parsers of their values, and files of options.

mod checkpoint;
mod cluster;
mod config;
mod data;
mod help;
mod inference;
mod job;
mod lifecycle;
mod output;
mod resilience;
mod training;
mod validation;
mod values;
mod workers;

pub(crate) use checkpoint::CheckpointOptions;
pub(crate) use cluster::{ClusterOptions, ClusterTarget};
pub(crate) use config::{Arguments, to_file as to_config_file};
pub(crate) use data::{InferenceData, TrainingData, TuningOptions};
pub(crate) use help::{HelpOptions, usual_in_short_help};
pub(crate) use inference::InferenceOptions;
pub(crate) use job::{HostList, JobOptions, PRINT_CONFIG};
pub(crate) use lifecycle::LifecycleOptions;
pub(crate) use output::{DashboardPort, OutputOptions};
pub(crate) use resilience::ResilienceOptions;
pub(crate) use training::TrainingOptions;
pub(crate) use validation::{ValidationOptions, sources};
pub(crate) use values::{
    JOB_NAME_LEN_MAX, parse_interval, parse_job_name, parse_steps, parse_timeout, parse_uri,
    parse_workers,
};
pub(crate) use workers::WorkerOptions;
