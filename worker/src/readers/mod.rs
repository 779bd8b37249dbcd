//! Readers of common kinds of data. A reader of your own is two methods: [`Reader`](crate::Reader).
//!
//! A source is a file, or a folder that is searched with its subfolders: files in the order of
//! their paths, names that begin with a dot left out, links to folders not followed. Either may be
//! in an object store: `s3://`, `gs://` and `az://`, with the settings of
//! [`storage`](crate::storage). Storage that does not answer is waited for. A file that changes
//! while a job reads it is an error that ends the job.

mod binary;
mod blocks;
mod csv;
mod files;
mod idx;
mod parquet;
mod remote;
mod row;
mod text;
mod versions;

pub use binary::FixedRecords;
pub use csv::CsvRows;
pub use idx::{IdxImages, LabeledImage};
pub use parquet::ParquetRows;
#[cfg(test)]
use parquet::tests::table as parquet_table;
pub use row::{Row, Value};
pub use text::TextWindows;
