//! Tables in Parquet files.

use super::parts::{PartTables, part_reader};
use file::ParquetFile;

mod file;

/// Reads rows of Parquet files.
///
/// Name the required columns, with their types, in the order in which they should appear in the
/// [`Row`](crate::readers::Row); other columns are not read. A nested column is named by its path,
/// `a.b`. In folders, files that end in `.parquet` are read.
///
/// Each row group is a file of the data set, named `table.parquet#0`, so that shards do not span
/// row groups. Schemas are validated before training starts, values when they are read. If rows
/// may be left out, for a null or as bad records, all values are read before training starts, and
/// each worker reads a row group once to find those rows.
///
/// | requested | column |
/// |---|---|
/// | `f32` | `FLOAT`, `FLOAT16`; `DOUBLE`, which is rounded; integers of 8 and 16 bits |
/// | `i64`, `class` | integers, `BOOLEAN` |
/// | `text` | `BYTE_ARRAY` in UTF-8 |
/// | `f32_list` | a list of what `f32` reads, named without `.list.element` |
///
/// An empty list is a null.
///
/// Requires the feature `parquet`.
///
/// ```
/// # extern crate elasticdl_data as elasticdl;
/// use elasticdl::readers::ParquetRows;
///
/// let reader = ParquetRows::new().f32("area").i64("rooms").text("city").f32("price");
/// ```
#[derive(Debug, Default)]
pub struct ParquetRows {
    tables: PartTables<ParquetFile>,
}

part_reader!(ParquetRows);

#[cfg(test)]
pub(super) mod tests;
