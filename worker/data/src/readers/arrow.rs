//! Tables in Arrow IPC files.

use super::parts::{PartTables, part_reader};
use ipc::IpcFile;

mod ipc;

/// Reads rows of Arrow IPC files, also known as Feather version 2, and of Arrow streams.
///
/// Name the required columns, with their types, in the order in which they should appear in the
/// [`Row`](crate::readers::Row); other columns are not read. A field of a struct, or of the structs
/// of a list, is named by its path, `a.b`. In folders, files that end in `.arrow`, `.arrows`,
/// `.feather` and `.ipc` are read. Buffers may be compressed with LZ4 or zstd.
///
/// Each record batch is a file of the data set, named `table.arrow#0`, and is held in memory while
/// it is read: write batches of some thousand rows. Schemas are validated before training starts,
/// values when they are read. If rows may be left out, for a null or as bad records, all values are
/// read before training starts, and each worker reads a batch once to find those rows.
///
/// | requested | column |
/// |---|---|
/// | `f32` | `Float16`, `Float32`; `Float64`, which is rounded; integers of 8 and 16 bits |
/// | `i64`, `class` | integers, `Boolean` |
/// | `text` | `Utf8`, `LargeUtf8`, `Utf8View`, `Binary` in UTF-8, dictionaries of text |
/// | `f32_list` | `List`, `LargeList` and `FixedSizeList` of what `f32` reads |
///
/// An empty list is a null.
///
/// Requires the feature `arrow`.
///
/// ```
/// # extern crate elasticdl_data as elasticdl;
/// use elasticdl::readers::ArrowRows;
///
/// let reader = ArrowRows::new().f32("area").i64("rooms").text("city").f32("price");
/// ```
///
/// The format: Apache Arrow, Arrow Columnar Format, "Serialization and Interprocess Communication".
#[derive(Debug, Default)]
pub struct ArrowRows {
    tables: PartTables<IpcFile>,
}

part_reader!(ArrowRows);

#[cfg(test)]
pub(super) mod tests;
