//! Training data and files: the readers of common formats, and storage in folders and object
//! stores.
//!
//! Users import all of it from `elasticdl`, which has the same names.
//!
//! **Invariant:** this crate knows no model, no worker and no job. What the worker alone needs of
//! it is in the hidden module `worker`.

#[cfg(not(all(feature = "cloud", feature = "parquet")))]
mod feature;
mod map;
mod paths;
mod predictions;
mod reader;
pub mod readers;
pub mod storage;
mod table_rows;

pub use map::Map;
pub use predictions::{Column, Predictions, PredictionsError};
pub use reader::{Access, DataError, Dataset, File, Purpose, ReadOptions, Reader, Skipped};

/// What only the worker of this project needs.
#[doc(hidden)]
pub mod worker {
    pub use crate::paths::{absolute, random_digits};
    pub use crate::predictions::encode;
    pub use crate::reader::refuse_bad_records;
    pub use crate::readers::sources::{describe_sources, place_of};
    pub use crate::storage::retry::{
        StorageWait, WaitStatus, pause_unless_stopped, set_stop_flag, set_wait_flag, stop_flag,
        wait_for_access, wait_status, with_patience,
    };
    pub use crate::table_rows::{TableRows, encode_table};
}
