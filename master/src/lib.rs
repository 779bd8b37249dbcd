//! The master of a job and the `elasticdl` command.
//!
//! ```text
//!  cli ──► event_loop::Master ──owns──► job::Job   pure core: events and the time in, actions out
//!              ├── service                         gRPC server: streams of workers, user commands
//!              ├── worker_backend                  starts workers
//!              │     ├── local                     as processes of this machine
//!              │     └── kube                      as pods of a cluster
//!              ├── job_store                       persists the job for a successor master
//!              └── progress                        terminal output
//!                    ├── metrics, tensorboard, mlflow   exported metrics
//!                    └── dashboard                 the page of the job, and its history
//!  jobdir, token, listener                         files, authentication, server configuration
//! ```
//!
//! **Invariants:** all decisions are made in [`job`]; the other modules are its shell. The crate
//! knows nothing about gradients or CUDA and does not link the worker crate: workers are programs
//! that it starts. Messages and the status are the types of `elasticdl-proto`.

#[cfg(not(target_os = "linux"))]
compile_error!("elasticdl runs on Linux only: it needs memfd, pidfd and /proc");

mod backend_event;
pub mod certificates;
pub mod cli;
mod connection_limit;
mod dashboard;
pub mod event_loop;
mod http_server;
pub mod job;
mod job_store;
pub mod jobdir;
pub mod kube;
pub mod limits;
pub mod listener;
pub mod local;
mod log_output;
pub mod metrics;
pub mod mlflow;
mod persisted_format;
pub mod progress;
mod scalars;
mod service;
pub mod tensorboard;
pub mod token;
mod worker_backend;
mod worker_output;
