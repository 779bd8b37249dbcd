//! Frames, handshakes, state transfers, manifests, lists of files, tables, images, models, statuses
//! and summaries with any content cause no panic, no hang and no memory that their size does not
//! justify.
//!
//! | module | inputs |
//! |---|---|
//! | `documents` | status and summary of a job, as JSON; the list of a data set's files |
//! | `files` | files that users hand in: tables, images, tar files, safetensors, manifests of checkpoints |
//! | `network` | frames and state transfers of other ranks; handshakes |
//!
//! `tests/corpus/TARGET` has the valid inputs of a target, and inputs that it must refuse
//! (`refused-…`). An input that once caused a defect is added there. `ELASTICDL_FUZZ_INPUTS=100`
//! runs a hundred times as many changed inputs.

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

mod documents;
mod files;
mod harness;
mod network;
