//! Tables in Arrow IPC files.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::columns::{Columns, column_methods, list_method};
use super::files;
use super::kept::Kept;
use super::parts::{self, BLOCK_ROWS, CheckedRow, Parts};
use super::row::Row;
use super::skipped::SkippedLog;
use crate::reader::{Access, DataError, Dataset, File, ReadOptions, Reader};
use ipc::IpcFile;
use values::{Leaf, LeafValues};

mod ipc;
mod values;

/// Reads rows of Arrow IPC files, also known as Feather version 2, and of Arrow streams.
///
/// Name the required columns, with their types, in the order in which they should appear in the
/// [`Row`]; other columns are not read. A field of a struct is named by its path, `a.b`. In
/// folders, files that end in `.arrow`, `.arrows`, `.feather` and `.ipc` are read. Buffers may be
/// compressed with LZ4 or zstd.
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
/// | `text` | `Utf8`, `LargeUtf8`, `Utf8View`, dictionaries of text |
/// | `f32_list` | `List`, `LargeList` and `FixedSizeList` of what `f32` reads |
///
/// ```
/// use elasticdl::readers::ArrowRows;
///
/// let reader = ArrowRows::new().f32("area").i64("rooms").text("city").f32("price");
/// ```
///
/// The format: Apache Arrow, Arrow Columnar Format, "Serialization and Interprocess Communication".
#[derive(Debug, Default)]
pub struct ArrowRows {
    columns: Columns,
    files: BTreeMap<PathBuf, Arc<IpcFile>>,
    /// The rows of each batch that are not left out, where rows may be.
    kept: BTreeMap<String, Kept>,
    /// The batches that were read last, the newest one at the end.
    open: Vec<(String, Arc<OpenBatch>)>,
}

/// A decoded record batch.
#[derive(Debug)]
struct OpenBatch {
    rows: u64,
    /// For each requested value, the names of its columns, and the columns.
    columns: Vec<(Vec<String>, Vec<LeafValues>)>,
}

impl ArrowRows {
    /// Creates a reader without columns; add the required ones.
    pub fn new() -> Self {
        Self::default()
    }

    column_methods!();
    list_method!();

    /// Opens the file at `path`. Its messages are found once.
    fn file(&mut self, path: &Path) -> Result<Arc<IpcFile>, DataError> {
        if let Some(file) = self.files.get(path) {
            return Ok(Arc::clone(file));
        }
        let file = Arc::new(IpcFile::open(path)?);
        self.files.insert(path.into(), Arc::clone(&file));
        Ok(file)
    }

    /// For each requested value, its columns.
    fn leaves(&self, path: &Path, file: &IpcFile) -> Result<Vec<Vec<Leaf>>, DataError> {
        let leaves = values::leaves(file.schema());
        let names: Vec<String> = leaves.iter().map(|leaf| leaf.name.clone()).collect();
        let by_name = |name: &str| (0..names.len()).filter(|&leaf| names[leaf] == name).collect();
        let found = self.columns.find(&names, "the file has", by_name);
        let checked = found.and_then(|found| {
            let mut requested = Vec::new();
            for (column, numbers) in self.columns.iter().zip(found) {
                let leaves: Vec<Leaf> = numbers.iter().map(|&leaf| leaves[leaf].clone()).collect();
                for leaf in &leaves {
                    leaf.check(column.kind)
                        .map_err(|reason| format!("column {:?} {reason}", leaf.name))?;
                }
                requested.push(leaves);
            }
            Ok(requested)
        });
        checked.map_err(|reason| files::malformed(path, &reason))
    }

    /// Decodes a batch, unless it is one of those that were read last.
    fn batch(&mut self, name: &str) -> Result<Arc<OpenBatch>, DataError> {
        if let Some(place) = self.open.iter().position(|(open, _)| open == name) {
            let newest = self.open.remove(place);
            self.open.push(newest);
        } else {
            let (path, index) = batch(name)?;
            let file = self.file(path)?;
            let leaves = self.leaves(path, &file)?;
            let mut roots: Vec<usize> = leaves.iter().flatten().map(|leaf| leaf.root).collect();
            roots.sort_unstable();
            roots.dedup();
            let read = file.read(index, &roots)?;
            let column = |leaves: Vec<Leaf>| {
                let values = leaves.iter().map(|leaf| leaf.values(&read, &roots)).collect();
                (leaves.into_iter().map(|leaf| leaf.name).collect(), values)
            };
            let columns = leaves.into_iter().map(column).collect();
            let open = OpenBatch { rows: read.num_rows() as u64, columns };
            if self.open.len() == OPEN_MAX {
                self.open.remove(0);
            }
            self.open.push((name.to_owned(), Arc::new(open)));
        }
        let (_, newest) = self.open.last().expect("a batch was added");
        Ok(Arc::clone(newest))
    }
}

impl Parts for ArrowRows {
    const NAME: &'static str = "batch";

    fn columns(&self) -> &Columns {
        &self.columns
    }

    fn rows(&mut self, part: &str) -> Result<u64, DataError> {
        let (path, index) = batch(part)?;
        Ok(self.file(path)?.batches().get(index).map_or(0, |batch| batch.rows))
    }

    fn read_rows(&mut self, part: &str, range: Range<u64>) -> Result<Vec<CheckedRow>, DataError> {
        let open = self.batch(part)?;
        if range.end > open.rows {
            let (path, index) = batch(part)?;
            let reason = format!("{} rows where more should be: has it changed?", open.rows);
            return Err(parts::malformed::<Self>(path, Some(index), &reason));
        }
        let count = range.end.saturating_sub(range.start);
        let mut values = Vec::new();
        for (column, (names, leaves)) in self.columns.iter().zip(&open.columns) {
            let cells = leaves.iter().map(|leaf| {
                // The batch is in memory, so its rows are numbered by a usize.
                leaf.cells(column.kind, range.start as usize, count as usize).into_iter()
            });
            values.push((column, names.clone(), cells.collect()));
        }
        Ok((range.start..range.end)
            .map(|number| parts::row(&self.columns, &mut values, number))
            .collect())
    }

    fn kept(&mut self) -> &mut BTreeMap<String, Kept> {
        &mut self.kept
    }
}

impl Reader for ArrowRows {
    type Record = Row;

    fn configure(&mut self, options: ReadOptions) -> Result<(), DataError> {
        self.columns.configure(options);
        Ok(())
    }

    /// Describes each record batch as a file, whose path ends in `#` and the number of the batch.
    fn describe(&mut self, source: &str) -> Result<Dataset, DataError> {
        let mut dataset = Dataset::default();
        let mut log = SkippedLog::new(self.columns.bad_records_max());
        let listed = files::list_tables(source, &EXTENSIONS.map(str::to_owned))?;
        for path in &listed.paths {
            let file = self.file(path)?;
            self.leaves(path, &file)?;
            let text = files::text(path)?;
            let version = files::version(&[path])?;
            for index in 0..file.batches().len() {
                let name = format!("{text}#{index}");
                let part = parts::describe(self, name, version, &mut log)?;
                if part.records > 0 {
                    dataset.files.push(part);
                }
            }
        }
        dataset.skipped = log.into_skipped();
        listed.note_others(&mut dataset.skipped);
        files::not_empty(source, dataset, "no row in any record batch")
    }

    /// Blocks of rows: a batch is decoded as a whole.
    fn access(&self, _dataset: &Dataset) -> Access {
        Access::Block { records: BLOCK_ROWS }
    }

    fn read_ahead(&mut self, file: &File, _range: Range<u64>) {
        let Ok((path, index)) = batch(&file.path) else { return };
        if let Some(open) = self.files.get(path) {
            open.read_ahead(index);
        }
    }

    fn read(&mut self, file: &File, range: Range<u64>) -> Result<Vec<Row>, DataError> {
        let (path, _) = batch(&file.path)?;
        files::check_table(file, &[path], self.columns.skips())?;
        parts::read(self, file, range)
    }
}

/// The path and the number of a batch that is a file of the data set.
fn batch(file: &str) -> Result<(&Path, usize), DataError> {
    let unnamed = "the path names no record batch, as `FILE#0`";
    parts::part(file).ok_or_else(|| files::malformed(Path::new(file), unnamed))
}

/// Number of decoded batches that a reader holds: the records of a few blocks are shuffled among
/// each other.
const OPEN_MAX: usize = 4;
const EXTENSIONS: [&str; 4] = ["arrow", "arrows", "feather", "ipc"];

#[cfg(test)]
pub(super) mod tests;
