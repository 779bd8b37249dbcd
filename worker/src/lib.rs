//! Elastic synchronous data-parallel training: the library that a training program links.
//!
//! Implement [`Model`] and pass it to [`run`]; that is a complete training program. The [`guide`]
//! leads from an empty folder to a trained model, beginning with the [tutorial](guide::tutorial).
//!
//! # Inside
//!
//! [`run`] connects four parts, each in its own module:
//!
//! ```text
//!   control ── gRPC, one thread ──► inbox ──► trainer ──► session   decides, does no IO (pure)
//!                                             │   └─────► ring      elasticdl-collective
//!   prefetch ── reads, one thread ─► buffer ──┘                     blocks, one thread
//! ```
//!
//! What trainer and donor touch outside of themselves are the traits of `machine`, which the
//! simulation of jobs implements, too.
//!
//! **Invariants:** This crate knows nothing about processes or pods, nor about how it was launched
//! beyond its environment variables. Messages to and from the master are types of
//! `elasticdl-proto`. All decisions are made in `session` (with the control stream's state and the
//! data types of both), which does no IO and reads no clock.

mod audit;
mod buckets;
#[cfg(feature = "candle")]
pub mod candle;
mod cgroup;
mod checkpoint;
mod control;
mod conversion;
mod descriptors;
#[cfg(feature = "gpu")]
pub mod device;
#[cfg(not(feature = "gpu"))]
#[path = "no_device.rs"]
mod device;
mod digests;
mod donor;
mod environment;
mod exact_sum;
mod exported_tables;
mod exports;
#[doc(hidden)]
pub mod external;
mod failure;
#[cfg(feature = "simulation")]
#[doc(hidden)]
pub mod fuzzing;
mod gap;
pub mod guide;
mod half_model;
mod host_check;
mod inference;
mod inspection;
mod log_output;
#[doc(hidden)]
pub mod machine;
mod messages;
mod metrics;
mod model;
mod optimizer;
mod ordered_reader;
mod outputs;
mod paths;
mod prefetch;
mod program;
mod run;
mod schedule;
#[doc(hidden)]
pub mod session;
mod setting_error;
#[doc(hidden)]
pub mod simulated;
mod split;
mod state_buffer;
mod supervisor;
mod table_model;
mod tensor;
mod tensors;
mod termination;
mod trained_model;
mod trainer;
mod update;
mod usage;
mod weights;

pub use buckets::Gradients;
#[cfg(feature = "candle")]
pub use candle_core;
#[cfg(feature = "candle")]
pub use candle_nn;
#[doc(inline)]
pub use elasticdl_data::{
    Access, Column, DataError, Dataset, File, Map, Predictions, PredictionsError, Purpose,
    ReadOptions, Reader, Skipped, readers, storage,
};
pub use elasticdl_tables::{BatchRows, Eviction, Ids, Initialization, RowOptimizer, Table, id_of};
#[doc(hidden)]
pub use half_model::HalfModel;
pub use metrics::{Loss, Metrics, UserError, report_mean, report_sum};
pub use model::{Model, NamedTensor};
pub use optimizer::{Adam, AdamW, Optimizer, Sgd};
pub use run::run;
pub use schedule::Schedule;
pub use setting_error::SettingError;
pub use table_model::TableModel;
pub use update::{Update, UpdateRule};

/// The check of a step's sum, for a benchmark.
#[cfg(feature = "simulation")]
#[doc(hidden)]
#[must_use]
pub fn is_finite(values: &[f32]) -> bool {
    tensors::is_finite(values)
}
