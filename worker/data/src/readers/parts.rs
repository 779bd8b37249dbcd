//! Tables whose files consist of parts that are read by themselves: row groups of Parquet files,
//! record batches of Arrow files. Each part is a file of the data set, named `table.parquet#0`.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::columns::{Columns, Found, Kind, Source};
use super::files;
use super::kept::Kept;
use super::row::{Row, Value};
use super::skipped::SkippedLog;
use super::values::{self, Leaf, LeafValues};
use crate::reader::{DataError, Dataset, File};

/// A file of a table that consists of parts.
pub(super) trait PartFile: Sized {
    /// What a part is, for errors.
    const PART: &'static str;

    /// The extensions of files that are read in folders.
    const EXTENSIONS: &'static [&'static str];

    /// Number of parts of which a reader holds decoded rows.
    const OPEN_MAX: usize;

    /// Reads what the file says about itself.
    fn open(path: &Path) -> Result<Self, DataError>;

    /// The columns of the table.
    fn leaves(&self) -> &[Leaf];

    /// The number of rows of each part.
    fn rows(&self) -> &[u64];

    /// Checks that a column of a part can be read, as far as the file says.
    fn check(&self, _part: usize, _leaf: usize, _refuses_nulls: bool) -> Result<(), String> {
        Ok(())
    }

    /// Reads these columns of a part: windows that follow one another, of which the first contains
    /// row `from`, which exists.
    fn read(
        self: Arc<Self>,
        part: usize,
        leaves: &[usize],
        from: u64,
    ) -> Result<Windows, DataError>;

    /// Announces that these rows of a part will be read soon.
    fn read_ahead(&self, part: usize, leaves: &[usize], rows: Range<u64>);
}

pub(super) type Windows = Box<dyn Iterator<Item = Result<Window, DataError>> + Send>;

/// Consecutive rows of a part, decoded.
pub(super) struct Window {
    pub(super) rows: Range<u64>,
    /// Those that were requested of [`PartFile::read`], in that order.
    pub(super) columns: Vec<LeafValues>,
}

/// Reads tables that consist of parts.
pub(super) struct PartTables<F> {
    pub(super) columns: Columns,
    files: BTreeMap<PathBuf, Arc<OpenFile<F>>>,
    /// The rows of each part that are not left out, where rows may be.
    kept: BTreeMap<String, Kept>,
    /// The parts that were read last, the newest one at the end.
    open: Vec<OpenPart>,
}

struct OpenFile<F> {
    file: Arc<F>,
    /// The columns of all requested values, by their numbers.
    leaves: Vec<usize>,
    /// For each requested value, which of `leaves` it is.
    values: Vec<Range<usize>>,
}

/// Position in a part: the next read mostly continues there.
struct OpenPart {
    name: String,
    window: Window,
    windows: Windows,
}

/// A row, `None` if it is left out for a null, or why it is invalid.
type CheckedRow = Result<Option<Row>, String>;

impl<F: PartFile> PartTables<F> {
    /// Describes each part as a file, whose path ends in `#` and the number of the part.
    pub(super) fn describe(&mut self, source: &str) -> Result<Dataset, DataError> {
        let mut dataset = Dataset::default();
        let mut log = SkippedLog::new(self.columns.bad_records_max());
        let extensions: Vec<String> = F::EXTENSIONS.iter().map(|&name| name.to_owned()).collect();
        let listed = files::list_tables(source, &extensions)?;
        for path in &listed.paths {
            let open = self.file(path)?;
            let text = files::text(path)?;
            let version = files::version(&[path])?;
            for part in 0..open.file.rows().len() {
                for (column, values) in self.columns.iter().zip(&open.values) {
                    let refuses_nulls = self.columns.refuses_nulls(column);
                    for &leaf in &open.leaves[values.clone()] {
                        open.file.check(part, leaf, refuses_nulls).map_err(|reason| {
                            let name = &open.file.leaves()[leaf].name;
                            malformed::<F>(path, part, &format!("column {name:?} {reason}"))
                        })?;
                    }
                }
                let part = self.describe_part(format!("{text}#{part}"), version, &mut log)?;
                if part.records > 0 {
                    dataset.files.push(part);
                }
            }
        }
        dataset.skipped = log.into_skipped();
        listed.note_others(&mut dataset.skipped);
        files::not_empty(source, dataset, &format!("no row in any {}", F::PART))
    }

    /// Records which rows of the part are left out. `version`: of the file that holds it.
    fn describe_part(
        &mut self,
        path: String,
        version: u32,
        log: &mut SkippedLog,
    ) -> Result<File, DataError> {
        if !self.columns.skips() {
            let (_, _, records) = self.part(&path)?;
            return Ok(File { path, records, version: Some(version) });
        }
        let kept = self.find_kept(&path, Some(log))?;
        let (records, version) = (kept.count(), Some(files::version_without(version, &kept)));
        self.kept.insert(path.clone(), kept);
        Ok(File { path, records, version })
    }

    /// Reads records `range` of a part.
    pub(super) fn read(&mut self, part: &File, range: Range<u64>) -> Result<Vec<Row>, DataError> {
        let name = &*part.path;
        let (path, number) = split::<F>(name)?;
        files::check_table(part, &[path], self.columns.skips())?;
        let wrong = |reason: &str| malformed::<F>(path, number, reason);
        if !self.columns.skips() {
            let row = |row: CheckedRow| match row {
                Ok(row) => Ok(row.expect("no row is left out")),
                Err(reason) => Err(wrong(&reason)),
            };
            return self.read_rows(name, range)?.into_iter().map(row).collect();
        }
        if !self.kept.contains_key(name) {
            let kept = self.find_kept(name, None)?;
            self.kept.insert(name.to_owned(), kept);
        }
        let kept = &self.kept[name];
        files::check_left_out(part, path, kept)?;
        if range.end > kept.count() {
            return Err(wrong(&fewer(kept.count())));
        }
        if range.is_empty() {
            return Ok(Vec::new());
        }
        let rows = kept.row(range.start)..kept.row(range.end - 1) + 1;
        Ok(self.read_rows(name, rows)?.into_iter().filter_map(|row| row.ok()?).collect())
    }

    /// Announces that a part of an open file will be read soon.
    pub(super) fn read_ahead(&self, part: &File, range: Range<u64>) {
        let Ok((path, number)) = split::<F>(&part.path) else { return };
        let Some(open) = self.files.get(path) else { return };
        if number < open.file.rows().len() {
            open.file.read_ahead(number, &open.leaves, range);
        }
    }

    /// The rows of a part that are not left out. With a `log`, records the others.
    fn find_kept(
        &mut self,
        name: &str,
        mut log: Option<&mut SkippedLog>,
    ) -> Result<Kept, DataError> {
        let (_, _, rows) = self.part(name)?;
        let (path, part) = split::<F>(name)?;
        let place = |reason: &str| malformed::<F>(path, part, reason);
        let mut kept = Kept::default();
        let mut start = 0;
        while start < rows {
            let end = rows.min(start + BLOCK_ROWS);
            for row in self.read_rows(name, start..end)? {
                match (&row, &mut log) {
                    (Ok(None), Some(log)) => {
                        let row = kept.rows();
                        log.skip_null(|| place(&format!("row {row}: left out for a null")));
                    }
                    (Err(reason), Some(log)) => log.skip_bad(|| place(reason))?,
                    _ => {}
                }
                kept.push(matches!(row, Ok(Some(_))));
            }
            start = end;
        }
        Ok(kept)
    }

    /// Reads rows `range` of a part.
    fn read_rows(&mut self, name: &str, range: Range<u64>) -> Result<Vec<CheckedRow>, DataError> {
        let (open, part, rows) = self.part(name)?;
        let (path, _) = split::<F>(name)?;
        if range.end > rows {
            return Err(malformed::<F>(path, part, &fewer(rows)));
        }
        let mut found = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let mut reached = self.open_at(name, &open, part, at)?;
            while reached.window.rows.end <= at {
                let next = reached.windows.next();
                reached.window = next.ok_or_else(|| malformed::<F>(path, part, &fewer(at)))??;
            }
            let end = range.end.min(reached.window.rows.end);
            found.extend((at..end).map(|row| self.row(&open, &reached.window, row)));
            if self.open.len() == F::OPEN_MAX {
                self.open.remove(0);
            }
            self.open.push(reached);
            at = end;
        }
        Ok(found)
    }

    /// Takes the position in a part if row `at` is in its window or soon after it, or opens the
    /// part there.
    fn open_at(
        &mut self,
        name: &str,
        open: &OpenFile<F>,
        part: usize,
        at: u64,
    ) -> Result<OpenPart, DataError> {
        if let Some(place) = self.open.iter().position(|open| open.name == name) {
            let reached = self.open.remove(place);
            let rows = &reached.window.rows;
            if (rows.start..rows.end + REACH_ROWS).contains(&at) {
                return Ok(reached);
            }
        }
        let windows = Arc::clone(&open.file).read(part, &open.leaves, at)?;
        let window = Window { rows: at..at, columns: Vec::new() };
        Ok(OpenPart { name: name.to_owned(), window, windows })
    }

    /// A row of a window; `None` if it is left out for a null.
    fn row(&self, open: &OpenFile<F>, window: &Window, number: u64) -> CheckedRow {
        let name = |value: usize| &*open.file.leaves()[open.leaves[value]].name;
        let at = |name: &str, reason: &str| format!("column {name:?}, row {number}: {reason}");
        // A window is in memory, so its rows are numbered by a usize.
        let place = (number - window.rows.start) as usize;
        let found = self.columns.iter().zip(&open.values).map(|(column, values)| -> Found {
            let first = values.start;
            let found = |value: usize, i: usize| {
                let found = window.columns[value].value(column.kind, i);
                found.map_err(|reason| at(name(value), &reason))
            };
            let f32 = |found: Found| match found? {
                Some(Value::F32(number)) => Ok(Some(number)),
                _ => Ok(None),
            };
            match (&column.source, column.kind) {
                (Source::One(_), _) if values.is_empty() => Ok(None),
                (Source::One(_), Kind::F32List(len)) => {
                    let Some(list) = window.columns[first].list(place) else { return Ok(None) };
                    if list.len() != len {
                        let found = list.len();
                        let reason = format!("a list of {found} where one of {len} should be");
                        return Err(at(name(first), &reason));
                    }
                    let numbers = list.map(|i| f32(found(first, i)));
                    self.columns.numbers(column, numbers, |_| at(name(first), NULL))
                }
                (Source::One(_), _) => found(first, place),
                (Source::Several(_) | Source::Others(_), _) => {
                    let numbers = values.clone().map(|value| f32(found(value, place)));
                    self.columns.numbers(column, numbers, |i| at(name(first + i), NULL))
                }
            }
        });
        self.columns.row(found, |column| match &column.source {
            Source::One(name) => at(name, NULL),
            Source::Several(_) | Source::Others(_) => at("", NULL),
        })
    }

    /// The file that holds a part, the number of the part, and that of its rows.
    fn part(&mut self, name: &str) -> Result<(Arc<OpenFile<F>>, usize, u64), DataError> {
        let (path, part) = split::<F>(name)?;
        let open = self.file(path)?;
        let rows = open.file.rows();
        let Some(&count) = rows.get(part) else {
            let reason = format!("the file has {} of them: has it changed?", rows.len());
            return Err(malformed::<F>(path, part, &reason));
        };
        Ok((open, part, count))
    }

    /// Opens the file at `path`, once, and finds the requested columns in it.
    fn file(&mut self, path: &Path) -> Result<Arc<OpenFile<F>>, DataError> {
        if let Some(open) = self.files.get(path) {
            return Ok(Arc::clone(open));
        }
        let file = Arc::new(F::open(path)?);
        let found = values::find(&self.columns, file.leaves());
        let found = found.map_err(|reason| files::malformed(path, &reason))?;
        let mut open = OpenFile { file, leaves: Vec::new(), values: Vec::new() };
        for leaves in found {
            let start = open.leaves.len();
            open.leaves.extend(leaves);
            open.values.push(start..open.leaves.len());
        }
        let open = Arc::new(open);
        self.files.insert(path.into(), Arc::clone(&open));
        Ok(open)
    }
}

/// The path and the number of a part that is a file of the data set.
fn split<F: PartFile>(name: &str) -> Result<(&Path, usize), DataError> {
    let parts = name.rsplit_once('#');
    parts.and_then(|(path, part)| Some((Path::new(path), part.parse().ok()?))).ok_or_else(|| {
        let reason = format!("the path names no {}, as `FILE#0`", F::PART);
        files::malformed(Path::new(name), &reason)
    })
}

/// The error for what is wrong in a part.
pub(super) fn malformed<F: PartFile>(path: &Path, part: usize, reason: &str) -> DataError {
    files::malformed(path, &format!("{} {part}: {reason}", F::PART))
}

fn fewer(rows: u64) -> String {
    format!("{rows} rows where more should be: has it changed?")
}

impl<F> Default for PartTables<F> {
    fn default() -> Self {
        let (columns, files, kept, open) = Default::default();
        Self { columns, files, kept, open }
    }
}

impl<F> std::fmt::Debug for PartTables<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PartTables").field("columns", &self.columns).finish_non_exhaustive()
    }
}

/// The methods of a reader of tables in a field `tables`: [`PartTables`].
macro_rules! part_reader {
    ($reader:ident) => {
        impl $reader {
            /// Creates a reader without columns; add the required ones.
            pub fn new() -> Self {
                Self::default()
            }

            $crate::readers::columns::column_methods!(tables.columns);
            $crate::readers::columns::list_method!(tables.columns);
        }

        impl $crate::Reader for $reader {
            type Record = $crate::readers::Row;

            fn configure(&mut self, options: $crate::ReadOptions) -> Result<(), $crate::DataError> {
                self.tables.columns.configure(options);
                Ok(())
            }

            /// Describes each part as a file, whose path ends in `#` and the number of the part.
            fn describe(&mut self, source: &str) -> Result<$crate::Dataset, $crate::DataError> {
                self.tables.describe(source)
            }

            /// Blocks of rows: values are stored column by column, and decoded many at once.
            fn access(&self, _dataset: &$crate::Dataset) -> $crate::Access {
                $crate::Access::Block { records: $crate::readers::parts::BLOCK_ROWS }
            }

            fn read_ahead(&mut self, file: &$crate::File, range: std::ops::Range<u64>) {
                self.tables.read_ahead(file, range);
            }

            fn read(
                &mut self,
                file: &$crate::File,
                range: std::ops::Range<u64>,
            ) -> Result<Vec<$crate::readers::Row>, $crate::DataError> {
                self.tables.read(file, range)
            }
        }
    };
}

pub(super) use part_reader;

/// Rows that are decoded at once.
pub(super) const BLOCK_ROWS: u64 = 4096;
/// Greatest distance to rows that are reached by decoding those before them, not by opening anew.
const REACH_ROWS: u64 = 4 * BLOCK_ROWS;
const NULL: &str = "a null where a value should be";
