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
//!                    └── metrics, tensorboard      exported metrics
//!  jobdir, token, listener                         files, authentication, server configuration
//! ```
//!
//! **Invariants:** all decisions are made in [`job`]; the other modules are its shell. The crate
//! knows nothing about gradients or CUDA and does not link the worker crate: workers are programs
//! that it starts. Messages and the status are the types of `elasticdl-proto`.

pub mod cli;
pub mod event_loop;
pub mod job;
mod job_store;
pub mod jobdir;
pub mod kube;
pub mod limits;
pub mod listener;
pub mod local;
pub mod metrics;
pub mod progress;
mod service;
pub mod tensorboard;
pub mod token;
mod worker_backend;
