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
//!
//! Text, CSV, JSON, IDX and fixed records are always there. The other formats are features of the
//! crate, so that a program compiles what it reads: `arrow`, `images`, `parquet` and `web-dataset`;
//! object stores are the feature `cloud`, and `full` is all of them.

#[cfg(feature = "arrow")]
mod arrow;
mod away;
mod binary;
mod blocks;
mod columns;
mod csv;
mod files;
mod idx;
#[cfg(feature = "images")]
mod images;
mod json;
mod kept;
mod packed;
#[cfg(feature = "parquet")]
mod parquet;
#[cfg(any(feature = "arrow", feature = "parquet"))]
mod parts;
#[cfg(feature = "images")]
mod pixels;
mod remote;
mod row;
mod skipped;
pub(crate) mod sources;
mod text;
mod text_table;
#[cfg(any(feature = "arrow", feature = "parquet"))]
mod values;
mod versions;
#[cfg(feature = "web-dataset")]
mod web_dataset;

#[cfg(feature = "arrow")]
pub use arrow::ArrowRows;
#[cfg(test)]
#[cfg(feature = "full")]
use arrow::tests::table as arrow_table;
pub use binary::FixedRecords;
pub use columns::Classes;
pub use csv::CsvRows;
pub use idx::{IdxImages, LabeledImage};
#[cfg(test)]
#[cfg(feature = "full")]
use images::tests::png as png_image;
#[cfg(feature = "images")]
pub use images::{ClassImage, ImageFolder};
pub use json::JsonRows;
#[cfg(feature = "parquet")]
pub use parquet::ParquetRows;
#[cfg(test)]
#[cfg(feature = "full")]
use parquet::tests::table as parquet_table;
pub use row::{Row, Value};
pub use text::TextWindows;
#[cfg(feature = "web-dataset")]
pub use web_dataset::WebDataset;
#[cfg(test)]
#[cfg(feature = "full")]
use web_dataset::tests::tar as tar_file;
