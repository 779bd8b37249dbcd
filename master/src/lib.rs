//! The job's brain and the `elasticdl` command.
//!
//! ```text
//!  cli ──► event_loop::Master ──owns──► job::Job          the pure core: events and the time in, actions out
//!              ├── service                         gRPC: workers' streams, the commands' questions
//!              ├── local                           workers as processes of this machine
//!              ├── kube                            jobs in a cluster: workers as pods
//!              └── progress                        what the user sees meanwhile
//!                    └── metrics, tensorboard      what other programs see of it
//!  jobdir, token, entrance                         what lies on disk, who may speak and where
//!  report                                          how it ended
//! ```
//!
//! **Invariants:** everything but [`job`] is shell and decides nothing. Knows nothing about
//! gradients or CUDA, and does not link the worker crate: workers are programs that it starts.
//! Prost types stop at `service` and at the commands' client.

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
pub mod report;
mod service;
pub mod tensorboard;
pub mod token;
mod worker_backend;
