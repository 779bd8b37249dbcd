//! Readers of common data formats. To read another format, implement the two methods of
//! [`Reader`](crate::Reader).
//!
//! A source is a file, or a folder that is searched recursively: files are taken in the order of
//! their paths; names that begin with a dot and links to folders are skipped. Either may be in an
//! object store: `s3://`, `gs://` and `az://`, with the settings of [`storage`](crate::storage).
//! Requests to storage that does not answer are retried. A file that changes while a job reads it
//! is an error that ends the job.

mod binary;
mod blocks;
mod columns;
mod csv;
mod files;
mod idx;
mod json;
mod kept;
mod packed;
mod parquet;
mod remote;
mod row;
mod skipped;
mod text;
mod text_table;
mod versions;

pub use binary::FixedRecords;
pub use csv::CsvRows;
pub use idx::{IdxImages, LabeledImage};
pub use json::JsonRows;
pub use parquet::ParquetRows;
#[cfg(test)]
use parquet::tests::table as parquet_table;
pub use row::{Row, Value};
pub use text::TextWindows;
