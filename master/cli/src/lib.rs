//! The `elasticdl` command line.
//!
//! ```text
//!  commands ──► args                     groups of options, which commands compose
//!     │
//!     ├───────► backend ──► elasticdl-master   a handle to a job of this machine or of a cluster
//!     │            │
//!     └────────────┴──────► render         statuses and summaries as tables, lines and JSON
//! ```
//!
//! Each part also uses `process`: exit codes, failures, standard output and standard error. The
//! master of a job itself is the library [`elasticdl_master`].
//!
//! **Invariants:** no arrow leads back. `render` knows statuses and summaries only; where a job
//! runs is known to `backend`, and to the commands that start a job.

mod args;
mod backend;
mod commands;
mod log_output;
mod process;
mod progress;
mod render;
mod scratch;

pub use commands::main;
#[doc(hidden)]
pub use render::fuzzing;
