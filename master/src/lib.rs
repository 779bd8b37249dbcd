//! The master of a job. The `elasticdl` command, `elasticdl-cli`, runs it.
//!
//! ```text
//!  event_loop::Master ──owns──► job::Job       pure core: events and the time in, actions out
//!   ├── service                                gRPC server: streams of workers, user commands
//!   ├── worker_backend                         starts workers
//!   │     ├── local                            as processes of this machine
//!   │     └── kube                             as pods of a cluster
//!   ├── job_store                              persists the job for a successor master
//!   └── progress                               what it shows
//!         ├── exporters: tensorboard, mlflow   exported metrics
//!         │   └── otlp                         exported traces
//!         ├── metrics                          metrics for scrapers
//!         └── dashboard                        the page of the job, and its history
//!  local_master, cluster_master                a master in a command, in a pod: around its event loop
//!  cluster_page                                the page of a job whose master is in a cluster
//!  exit, panics                                ends of processes
//!  jobdir, token, listener                     files, authentication, server
//!  lineage                                     when a record was trained
//! ```
//!
//! **Invariants:** all decisions are made in [`job`]; the other modules are its shell. The crate
//! knows nothing about gradients or CUDA and does not link the worker crate: workers are programs
//! that it starts. It knows nothing about the command line. Messages and the status are the types
//! of `elasticdl-proto`.

#[cfg(not(target_os = "linux"))]
compile_error!("elasticdl runs on Linux only: it needs memfd, pidfd and /proc");

mod aborts;
mod backend_event;
pub mod certificates;
pub mod changes;
pub mod cluster_master;
pub mod cluster_page;
mod connection_limit;
pub mod dashboard;
pub mod event_loop;
pub mod exit;
mod exporters;
mod http_server;
pub mod job;
mod job_store;
pub mod jobdir;
pub mod kube;
pub mod limits;
pub mod lineage;
pub mod listener;
pub mod local;
pub mod local_master;
mod metrics;
pub mod mlflow;
mod otlp;
pub mod panics;
mod persisted_format;
mod process_state;
pub mod progress;
mod scalars;
mod service;
mod tensorboard;
pub mod token;
mod worker_backend;
pub mod worker_output;
