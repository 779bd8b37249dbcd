//! The user's guide, in reading order.
//!
//! 1. [`tutorial`]: from an empty folder to a trained model.
//! 2. [`model`]: the methods of [`Model`](crate::Model) and of candle models.
//! 3. [`data`]: readers, object stores, unavailable storage.
//! 4. [`optimizer`]: optimizers, learning-rate schedules, clipping, the wire format of gradients.
//! 5. [`tables`]: embedding tables whose rows the workers divide.
//! 6. [`determinism`]: the same records, and the same bits, for any number of workers.
//! 7. [`checkpoints`]: their options and contents, and how training resumes.
//! 8. [`evaluation`]: validation data, the best model, early stopping.
//! 9. [`export`]: the final model, for candle and PyTorch.
//! 10. [`inference`]: `elasticdl evaluate` and `elasticdl predict`.
//! 11. [`gpu`]: models on GPUs.
//!
//! The repository's `manifests/README.md` describes clusters, `master/README.md` the command line.

#[doc = include_str!("checkpoints.md")]
pub mod checkpoints {}

#[doc = include_str!("data.md")]
pub mod data {}

#[doc = include_str!("determinism.md")]
pub mod determinism {}

#[doc = include_str!("evaluation.md")]
pub mod evaluation {}

#[doc = include_str!("export.md")]
pub mod export {}

#[doc = include_str!("gpu.md")]
pub mod gpu {}

#[doc = include_str!("inference.md")]
pub mod inference {}

#[doc = include_str!("model.md")]
pub mod model {}

#[doc = include_str!("optimizer.md")]
pub mod optimizer {}

#[doc = include_str!("tables.md")]
pub mod tables {}

#[doc = include_str!("tutorial.md")]
pub mod tutorial {}
