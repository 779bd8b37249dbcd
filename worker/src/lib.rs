//! The library that a training program links.
//!
//! Implement [`Model`] and pass it to [`run`]. That is a complete training program:
//!
//! ```no_run
//! use elasticdl_worker::readers::FixedRecords;
//! use elasticdl_worker::{Model, UserError};
//!
//! /// Learns the mean of all bytes.
//! struct Mean;
//!
//! impl Model for Mean {
//!     type Reader = FixedRecords;
//!     type Batch = Vec<Vec<u8>>;
//!
//!     fn reader(&self) -> FixedRecords {
//!         FixedRecords::new(1)
//!     }
//!     fn parameters(&self) -> usize {
//!         1
//!     }
//!     fn initialize(&mut self, _seed: u64, parameters: &mut [f32]) -> Result<(), UserError> {
//!         parameters.fill(0.0);
//!         Ok(())
//!     }
//!     fn feed(&mut self, records: Vec<Vec<u8>>) -> Result<Self::Batch, UserError> {
//!         Ok(records)
//!     }
//!     fn gradients(
//!         &mut self,
//!         parameters: &[f32],
//!         batch: Self::Batch,
//!         gradients: &mut [f32],
//!     ) -> Result<f64, UserError> {
//!         let errors = batch.iter().map(|record| parameters[0] - f32::from(record[0]));
//!         gradients[0] += errors.clone().sum::<f32>();
//!         Ok(errors.map(|error| f64::from(error * error / 2.0)).sum())
//!     }
//! }
//!
//! fn main() -> std::process::ExitCode {
//!     elasticdl_worker::run(Mean)
//! }
//! ```
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
//! beyond its environment variables. Generated protobuf types do not leave `control`. All decisions
//! are made in `core` (the session and its data types), which does no IO and reads no clock.

mod buckets;
#[cfg(feature = "candle")]
pub mod candle;
mod checkpoint;
mod control;
#[doc(hidden)]
pub mod core;
pub mod device;
mod donor;
mod environment;
mod failure;
mod gap;
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
pub use model::{Metrics, Model, NamedTensor, Update, UserError};
pub use optimizer::Optimizer;
pub use predictions::{Column, Predictions};
pub use reader::{DataError, Dataset, File, Reader};
pub use run::run;
pub use schedule::Schedule;
