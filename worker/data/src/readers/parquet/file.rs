//! Parquet files: their columns, and what row groups contain.

use std::io::{self, BufReader, Read, Seek as _, SeekFrom};
use std::iter;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use ::parquet::arrow::ProjectionMask;
use ::parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReader,
    ParquetRecordBatchReaderBuilder,
};
use ::parquet::basic::{Compression, ConvertedType, Type as Physical};
use ::parquet::errors::{ParquetError, Result as ParquetResult};
use ::parquet::file::metadata::{FileMetaData, ParquetMetaData, ParquetMetaDataReader};
use ::parquet::file::reader::{ChunkReader, Length};
use ::parquet::file::statistics::Statistics;
use ::parquet::schema::types::{SchemaDescriptor, Type, TypePtr};
use arrow_array::{RecordBatch, RecordBatchReader as _};
use arrow_schema::ArrowError;
use bytes::Bytes;

use super::super::files::{self, Source};
use super::super::parts::{BLOCK_ROWS, PartFile, Window, Windows, malformed};
use super::super::values::{self, Leaf};
use crate::reader::DataError;

/// An open file.
pub(super) struct ParquetFile {
    chunks: Chunks,
    metadata: ArrowReaderMetadata,
    leaves: Vec<Leaf>,
    rows: Vec<u64>,
}

impl PartFile for ParquetFile {
    const PART: &'static str = "row group";
    const EXTENSIONS: &'static [&'static str] = &["parquet"];
    /// An open row group holds a page of each column.
    const OPEN_MAX: usize = 1;

    fn open(path: &Path) -> Result<Self, DataError> {
        let failure = Arc::default();
        let chunks = Chunks { path: path.into(), bytes: files::length(path)?, failure };
        let metadata = metadata(&chunks).map_err(|error| {
            let reason = format!("not a readable Parquet file: {error}");
            chunks.take().unwrap_or_else(|| files::malformed(path, &reason))
        })?;
        let groups = metadata.metadata().row_groups().iter();
        let rows: Result<_, _> = groups.map(|group| u64::try_from(group.num_rows())).collect();
        let negative = |_| files::malformed(path, "a row group has a negative number of rows");
        let (leaves, rows) = (values::leaves(metadata.schema()), rows.map_err(negative)?);
        Ok(Self { chunks, metadata, leaves, rows })
    }

    fn leaves(&self) -> &[Leaf] {
        &self.leaves
    }

    fn rows(&self) -> &[u64] {
        &self.rows
    }

    fn check(&self, part: usize, leaf: usize, refuses_nulls: bool) -> Result<(), String> {
        let chunk = self.metadata.metadata().row_group(part).column(leaf);
        let compression = chunk.compression();
        if matches!(compression, Compression::BROTLI(_) | Compression::LZO) {
            let instead = "which is not supported; write it with ZSTD or SNAPPY";
            return Err(format!("is compressed with {compression}, {instead}"));
        }
        // An empty list counts as a null.
        if !refuses_nulls || self.leaves[leaf].is_list() {
            return Ok(());
        }
        match chunk.statistics().and_then(Statistics::null_count_opt) {
            None | Some(0) => Ok(()),
            Some(1) => Err("has a null where each row needs a value; fill it first".into()),
            Some(nulls) => {
                Err(format!("has {nulls} nulls where each row needs a value; fill them first"))
            }
        }
    }

    fn read(
        self: Arc<Self>,
        part: usize,
        leaves: &[usize],
        from: u64,
    ) -> Result<Windows, DataError> {
        let mut all = leaves.to_vec();
        all.sort_unstable();
        all.dedup();
        let reader = self.reader(part, &all, from);
        let mut reader = reader.map_err(|reason| self.failed(part, &all, from..from, reason))?;
        let found = values::leaves(&reader.schema());
        let columns = leaves.iter().map(|leaf| found[all.partition_point(|at| at < leaf)].clone());
        let columns: Vec<Leaf> = columns.collect();
        let mut at = from;
        Ok(Box::new(iter::from_fn(move || {
            let rows = at..self.rows[part].min(at + BLOCK_ROWS);
            if rows.is_empty() {
                return None;
            }
            at = rows.end;
            Some(match next(&mut reader, &rows) {
                Ok(batch) => {
                    let columns = columns.iter().map(|leaf| leaf.values(batch.column(leaf.root)));
                    Ok(Window { rows, columns: columns.collect() })
                }
                Err(reason) => Err(self.failed(part, &all, rows, reason)),
            })
        })))
    }

    fn read_ahead(&self, part: usize, leaves: &[usize], rows: Range<u64>) {
        for &leaf in leaves {
            let chunk = self.metadata.metadata().row_group(part).column(leaf);
            let (start, bytes) = chunk.byte_range();
            let all = self.rows[part].max(1);
            // The position of a row in a column is unknown; rows are assumed to have about the same
            // size.
            let at = |row: u64| (u128::from(bytes) * u128::from(row) / u128::from(all)) as u64;
            let (from, to) = (at(rows.start), at(rows.end));
            files::read_ahead(&self.chunks.path, start + from, to.saturating_sub(from).max(1));
        }
    }
}

impl ParquetFile {
    /// Reads columns of a row group from row `from` on, or says why it cannot.
    fn reader(
        &self,
        part: usize,
        leaves: &[usize],
        from: u64,
    ) -> Result<ParquetRecordBatchReader, String> {
        let columns = ProjectionMask::leaves(self.metadata.parquet_schema(), leaves.to_vec());
        let (chunks, metadata) = (self.chunks.clone(), self.metadata.clone());
        ParquetRecordBatchReaderBuilder::new_with_metadata(chunks, metadata)
            .with_row_groups(vec![part])
            .with_projection(columns)
            .with_batch_size(BLOCK_ROWS as usize)
            .with_offset(from as usize)
            .build()
            .map_err(|error| error.to_string())
    }

    /// The error for rows that cannot be read. The crate does not say in which column.
    fn failed(&self, part: usize, leaves: &[usize], rows: Range<u64>, reason: String) -> DataError {
        if let Some(error) = self.chunks.take() {
            return error;
        }
        let alone = leaves.iter().find_map(|&leaf| {
            let reader = self.reader(part, &[leaf], rows.start);
            let reason = reader.and_then(|mut reader| next(&mut reader, &rows)).err()?;
            Some(format!("column {:?}, rows {rows:?}: {reason}", self.leaves[leaf].name))
        });
        let reason = alone.unwrap_or_else(|| format!("rows {rows:?}: {reason}"));
        self.chunks.take().unwrap_or_else(|| malformed::<Self>(&self.chunks.path, part, &reason))
    }
}

/// The next rows, or why they cannot be read.
fn next(reader: &mut ParquetRecordBatchReader, rows: &Range<u64>) -> Result<RecordBatch, String> {
    // Some of the crate's decoders assert that pages are as they should be.
    let read = catch_unwind(AssertUnwindSafe(|| reader.next().transpose()));
    let batch = read.map_err(|_| "a page is corrupted")?.map_err(|error| match error {
        ArrowError::ParquetError(reason) => reason,
        error => error.to_string(),
    })?;
    let (found, wanted) = (batch.as_ref().map_or(0, RecordBatch::num_rows), rows.end - rows.start);
    match batch {
        Some(batch) if found as u64 == wanted => Ok(batch),
        _ => Err(format!("{found} rows where {wanted} should be")),
    }
}

/// What a file says about itself.
fn metadata(chunks: &Chunks) -> ParquetResult<ArrowReaderMetadata> {
    let found = ParquetMetaDataReader::new().parse_and_finish(chunks)?;
    let file = found.file_metadata();
    let schema = Arc::new(SchemaDescriptor::new(plain(file.schema_descr().root_schema_ptr(), 0)?));
    let writer = file.created_by().map(str::to_owned);
    let file = FileMetaData::new(file.version(), file.num_rows(), writer, None, schema, None);
    let plain = ParquetMetaData::new(file, found.row_groups().to_vec());
    ArrowReaderMetadata::try_new(Arc::new(plain), ArrowReaderOptions::new())
}

/// The schema without annotations but those of numbers. So texts are checked row by row, times are
/// integers, and each column is a field of its own, whatever lists and maps are made of. `depth`:
/// the number of groups around the field.
fn plain(field: TypePtr, depth: usize) -> ParquetResult<TypePtr> {
    if depth > DEPTH_MAX {
        return Err(ParquetError::General(format!("more than {DEPTH_MAX} nested groups")));
    }
    let info = field.get_basic_info();
    if field.is_group() {
        let fields = field.get_fields().iter().map(|field| plain(Arc::clone(field), depth + 1));
        let mut group = Type::group_type_builder(field.name())
            .with_fields(fields.collect::<ParquetResult<_>>()?);
        if info.has_repetition() {
            group = group.with_repetition(info.repetition());
        }
        return Ok(Arc::new(group.build()?));
    }
    match (info.converted_type(), field.get_physical_type()) {
        (
            ConvertedType::DECIMAL
            | ConvertedType::INT_8
            | ConvertedType::INT_16
            | ConvertedType::UINT_8
            | ConvertedType::UINT_16
            | ConvertedType::UINT_32
            | ConvertedType::UINT_64,
            _,
        )
        | (_, Physical::FIXED_LEN_BYTE_ARRAY) => Ok(field),
        (_, physical) => {
            let builder = Type::primitive_type_builder(field.name(), physical);
            Ok(Arc::new(builder.with_repetition(info.repetition()).build()?))
        }
    }
}

/// Access of the parquet crate to a file or object.
#[derive(Clone)]
struct Chunks {
    path: PathBuf,
    bytes: u64,
    /// The last error of the file: the crate passes on no more than its text.
    failure: Arc<Mutex<Option<DataError>>>,
}

impl Chunks {
    fn keep(&self, error: DataError) -> io::Error {
        let text = error.to_string();
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        io::Error::other(text)
    }

    fn take(&self) -> Option<DataError> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Length for Chunks {
    fn len(&self) -> u64 {
        self.bytes
    }
}

impl ChunkReader for Chunks {
    type T = BufReader<Chunk>;

    fn get_read(&self, start: u64) -> ParquetResult<Self::T> {
        let mut file = files::open(&self.path).map_err(|error| self.keep(error))?;
        file.seek(SeekFrom::Start(start))?;
        Ok(BufReader::new(Chunk { file, chunks: self.clone() }))
    }

    fn get_bytes(&self, start: u64, length: usize) -> ParquetResult<Bytes> {
        let bytes = files::read(&self.path, start, length as u64);
        Ok(bytes.map_err(|error| self.keep(error))?.into())
    }
}

/// A file from some byte on.
struct Chunk {
    file: Box<dyn Source>,
    chunks: Chunks,
}

impl Read for Chunk {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(buf);
        read.map_err(|error| self.chunks.keep(files::io_error(&self.chunks.path, error)))
    }
}

/// Greatest number of groups around a column.
const DEPTH_MAX: usize = 64;
