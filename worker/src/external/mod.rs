//! Workers whose model is code in another language, which runs on a thread of its own.
//!
//! ```text
//!  trainer's thread                                 program's thread
//!    ExternalModel ── Call ───────────────────────►   Driver
//!       initialize / gradient / update                initial values, micro-batches, optimizer
//!                  ◄──── complete from … ── Reply ──
//!    session ── records of the next steps ──────────►   MicroBatches
//! ```
//!
//! The shipped trainer runs unchanged. Each call of its model lends memory, and waits until the
//! program's thread has replied. So both refer to the same parameters, optimizer state and
//! gradient, and nothing is copied. While the program computes the rest of a step's gradient, the
//! trainer sums the parts that the program has declared complete: see `crate::buckets`.
//!
//! With a sharded optimizer, an update lends the chunks of its state that this worker holds. The
//! parameters of the others come afterwards: a further call says that they are here.
//!
//! On a GPU, a call lends addresses. The program enqueues its work on the stream of the trainer's
//! device, so that the work of both runs in the order of the calls.
//!
//! Where a model is evaluated or predicts, its parameters are in the program's memory, too: those
//! of a file are copied there once.
//!
//! **Invariant:** the program decides nothing: records, their order, steps and the end are the
//! session's.

mod bridge;
mod calls;
#[cfg(feature = "gpu")]
mod device;
mod driver;
mod events;
mod lent;
mod memory;
mod micro_batches;
mod model;
mod numbers;
mod program_ring;
mod seed;
mod share;
mod worker;

pub(crate) use self::bridge::WEIGHT;
pub(crate) use self::bridge::observe;
pub use self::bridge::{Bridge, Comparison, Division, Progress, SourceFile, StatePart};
pub use self::driver::{Driver, Watch};
pub use self::events::{Chunk, Counted, Ended, Event, NextBatch};
pub use self::memory::Memory;
pub use self::model::{GroupProgress, Inference, Shape};
pub use self::numbers::Record;
pub use self::program_ring::{ProgramRing, RingMembers};
pub use self::seed::{Keyed, seed_of};
pub use self::share::{Share, StepShare};
#[cfg(feature = "gpu")]
pub use self::worker::end_nccl;
pub use self::worker::{AloneOptions, JobOptions, Worker, WorkerError};
pub use crate::inspection::program::{ProgramStacks, watch as watch_stacks};
pub use crate::state_buffer::{ProgramMemory, StateMemory, zeros};

#[cfg(test)]
mod tests;
