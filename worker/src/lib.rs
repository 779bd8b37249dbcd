//! Elastic synchronous data-parallel training: the library that a training program links.
//!
//! Implement [`Model`] and pass it to [`run`]; that is a complete training program. The [`guide`]
//! leads from an empty folder to a trained model and begins with the [tutorial](guide::tutorial).
//!
//! # Inside
//!
//! [`run`] connects four parts, each in a module of its own:
//!
//! ```text
//!   control ── gRPC, one thread ──► inbox ──► trainer ──► session   decides, does no IO (pure)
//!                                             │   └─────► ring      elasticdl-collective
//!   prefetch ── reads, one thread ─► buffer ──┘                     blocks, one thread
//! ```
//!
//! **Invariants:** This crate knows nothing about processes or pods, nor about how it was launched
//! beyond its environment variables. Messages to and from the master are the types of
//! `elasticdl-proto`. All decisions are made in `core` (the session, the control stream's state and
//! their data types), which does no IO and reads no clock.

mod buckets;
#[cfg(feature = "candle")]
pub mod candle;
mod checkpoint;
mod control;
#[cfg(not(feature = "simulation"))]
#[allow(dead_code, unreachable_pub, reason = "the simulation uses these parts by themselves")]
mod core;
#[cfg(feature = "simulation")]
#[doc(hidden)]
pub mod core;
pub mod device;
mod donor;
mod environment;
mod failure;
mod gap;
pub mod guide;
mod inference;
mod messages;
mod model;
mod optimizer;
mod paths;
mod predictions;
mod prefetch;
mod reader;
pub mod readers;
mod ring;
mod run;
mod schedule;
pub mod storage;
mod supervisor;
mod tensors;
mod trained_model;
mod trainer;
mod weights;

pub use buckets::Gradients;
#[cfg(feature = "candle")]
pub use candle_core;
pub use model::{Loss, Metrics, Model, NamedTensor, Update, UserError};
pub use optimizer::{Adam, AdamW, Optimizer, SettingError, Sgd};
pub use predictions::{Column, Predictions, PredictionsError};
pub use reader::{DataError, Dataset, File, Reader};
pub use run::run;
pub use schedule::Schedule;
