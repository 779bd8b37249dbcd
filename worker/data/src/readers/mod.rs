//! Readers of common data formats. To read another format, implement the two methods of
//! [`Reader`](crate::Reader).
//!
//! A source is a file, or a folder that is searched recursively: files are taken in the order of
//! their paths; names that begin with a dot and links to folders are skipped. Readers of tables
//! also skip names that begin with `_`, which Spark and Hive give to files that are no data, and
//! refuse a folder with `a.csv` beside `a.csv.gz`. Extensions may be in upper case. The job's
//! events and its summary count the files of a folder that are no data. Either may be in an object
//! store: `s3://`, `gs://` and `az://`, with the settings of [`storage`](crate::storage). Requests
//! to storage that does not answer are retried. A file that changes while a job reads it is an
//! error that ends the job.

mod arrow;
mod binary;
mod blocks;
mod columns;
mod csv;
mod files;
mod idx;
mod images;
mod json;
mod kept;
mod packed;
mod parquet;
mod parts;
mod pixels;
mod remote;
mod row;
mod skipped;
pub(crate) mod sources;
mod text;
mod text_table;
mod values;
mod versions;
mod web_dataset;

pub use arrow::ArrowRows;
#[cfg(test)]
use arrow::tests::table as arrow_table;
pub use binary::FixedRecords;
pub use columns::Classes;
pub use csv::CsvRows;
pub use idx::{IdxImages, LabeledImage};
#[cfg(test)]
use images::tests::png as png_image;
pub use images::{ClassImage, ImageFolder};
pub use json::JsonRows;
pub use parquet::ParquetRows;
#[cfg(test)]
use parquet::tests::table as parquet_table;
pub use row::{Row, Value};
pub use text::TextWindows;
pub use web_dataset::WebDataset;
#[cfg(test)]
use web_dataset::tests::tar as tar_file;
