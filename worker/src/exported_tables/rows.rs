//! The rows of an exported model, for a worker that evaluates it or predicts with it.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use bytes::Bytes;
use elasticdl_data::storage::Storage;
use elasticdl_data::worker::{TableRows, encode_table};
use elasticdl_tables::{BatchRows, Ids, Table, shard_of};
use safetensors::tensor::{Dtype, Metadata};

use super::index::{ExportedPart, ExportedTables, folder_of, names_of};
use crate::weights::WeightsError;

/// Rows that are read when they are needed.
///
/// Of a part that has been needed, the ids are in memory; its values are read from a file of this
/// machine row by row, and are in memory if they come from an object store.
#[derive(Debug)]
pub(crate) struct TrainedRows {
    tables: Vec<Table>,
    seed: u64,
    folder: String,
    parts: Vec<(ExportedPart, Option<OpenPart>)>,
    changes_since: Option<u64>,
}

impl TrainedRows {
    /// The rows of the model at `address`, for a program whose model has these tables.
    ///
    /// # Errors
    /// The file has other tables, or can't be read.
    pub(crate) fn open(address: &str, tables: &[Table]) -> Result<Option<Self>, String> {
        let found = Storage::open(address).map_err(WeightsError::from);
        let found = found.and_then(|file| ExportedTables::read(&file));
        let found = found.map_err(|error| error.to_string())?;
        let had = found.as_ref().map_or(&[][..], |found| &found.tables);
        // How rows would change does not matter.
        let optimizer = |index: usize| had.get(index).map(|table| table.optimizer);
        let like = |(index, table): (usize, &Table)| match optimizer(index) {
            Some(optimizer) => table.clone().optimized(optimizer),
            None => table.clone(),
        };
        let tables: Vec<Table> = tables.iter().enumerate().map(like).collect();
        if let Some(difference) = elasticdl_tables::difference(had, &tables) {
            return Err(format!("{address}: {difference}; both must have the same tables"));
        }
        Ok(found.map(|found| Self {
            tables,
            seed: found.seed,
            folder: folder_of(address).to_owned(),
            parts: found.parts.into_iter().map(|part| (part, None)).collect(),
            changes_since: found.changes_since,
        }))
    }

    /// The step after which a record has touched each of these rows; `None`: they are all rows.
    pub(crate) fn changes_since(&self) -> Option<u64> {
        self.changes_since
    }

    /// No ids of these tables.
    pub(crate) fn ids(&self) -> Ids {
        Ids::new(self.tables.len())
    }

    /// Looks up the rows of `ids`. Those that no record has touched have their initial values.
    ///
    /// # Errors
    /// A part is missing or damaged.
    pub(crate) fn look_up(&mut self, ids: &Ids) -> Result<BatchRows, String> {
        let mut rows = BatchRows::initial(&self.tables, self.seed, ids);
        let parts = self.parts.len() as u32;
        for index in 0..self.tables.len() {
            let values = rows.values_mut(index).chunks_exact_mut(self.tables[index].dim);
            for (&id, row) in ids.of(index).iter().zip(values) {
                let number = shard_of(index as u32, id, parts);
                self.of_part(number, |part| part.read(index, id, row))?;
            }
        }
        Ok(rows)
    }

    /// Writes the rows of each table to a Parquet file in `folder`. `files`: their names, by table.
    ///
    /// # Errors
    /// A part is missing or damaged, this program has no Parquet, or an error of the storage.
    pub(crate) fn write_parquet(
        &mut self,
        folder: &Storage,
        files: &[String],
    ) -> Result<(), String> {
        for (index, file) in files.iter().enumerate() {
            let dim = self.tables[index].dim;
            let parts = 0..self.parts.len() as u32;
            let parts = parts.map(|number| self.of_part(number, |part| part.rows(index, dim)));
            let content = encode_table(dim, parts)?;
            folder.write(file, content).map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    /// Reads from a part, which is opened when it is needed for the first time.
    fn of_part<T>(
        &mut self,
        number: u32,
        read: impl FnOnce(&OpenPart) -> Result<T, String>,
    ) -> Result<T, String> {
        let parts = self.parts.len() as u32;
        let (part, open) = &mut self.parts[number as usize];
        let damaged = |error: String| format!("{}{}: {error}", self.folder, part.file);
        if open.is_none() {
            let place = (index_of(number, parts), &self.tables[..]);
            *open = Some(OpenPart::new(&self.folder, part, place).map_err(damaged)?);
        }
        read(open.as_ref().expect("it was just opened")).map_err(damaged)
    }
}

/// A part whose ids are known.
#[derive(Debug)]
struct OpenPart {
    content: Content,
    tables: Vec<TableColumns>,
}

#[derive(Debug)]
struct TableColumns {
    /// Ascending.
    ids: Vec<u64>,
    /// Where the values begin.
    values: u64,
    /// Where the touches begin.
    touches: u64,
}

#[derive(Debug)]
enum Content {
    File(File),
    Memory(Bytes),
}

/// Says in which part of how many each row must lie.
fn index_of(index: u32, parts: u32) -> impl Fn(usize, u64) -> bool {
    move |table, id| shard_of(table as u32, id, parts) == index
}

impl OpenPart {
    fn new(
        folder: &str,
        part: &ExportedPart,
        (belongs, tables): (impl Fn(usize, u64) -> bool, &[Table]),
    ) -> Result<Self, String> {
        let storage = Storage::open(folder).map_err(|error| error.to_string())?;
        let bytes = storage.bytes(&part.file).map_err(|error| error.to_string())?;
        if bytes != part.bytes {
            return Err(format!("it has {bytes} bytes, not {}", part.bytes));
        }
        let content = if Storage::is_remote(folder) {
            Content::Memory(storage.read(&part.file).map_err(|error| error.to_string())?)
        } else {
            let path = folder.strip_prefix("file://").unwrap_or(folder);
            let file = File::open(format!("{path}{}", part.file));
            Content::File(file.map_err(|error| error.to_string())?)
        };
        let (start, metadata) = content.header(bytes)?;
        let mut columns = Vec::with_capacity(tables.len());
        for (index, table) in tables.iter().enumerate() {
            let [of_values, of_ids, of_touches] = names_of(table);
            let (at, rows) = place(&metadata, &of_ids, Dtype::U64, None)?;
            let (values, of_rows) = place(&metadata, &of_values, Dtype::F32, Some(table.dim))?;
            let (touches, touched) = place(&metadata, &of_touches, Dtype::U32, None)?;
            if [of_rows, touched] != [rows; 2] {
                return Err(format!(
                    "{rows} ids, {touched} touches and {of_rows} rows of table {:?}",
                    table.name
                ));
            }
            let mut ids = vec![0_u64; rows];
            content.read(start + at, bytemuck::cast_slice_mut(&mut ids))?;
            let is_ascending = ids.windows(2).all(|pair| pair[0] < pair[1]);
            if !is_ascending || !ids.iter().all(|&id| belongs(index, id)) {
                return Err(format!("the ids of table {:?} are not those of a part", table.name));
            }
            columns.push(TableColumns { ids, values: start + values, touches: start + touches });
        }
        Ok(Self { content, tables: columns })
    }

    /// Reads the row of `id`, `[dim]`, if it is here.
    fn read(&self, table: usize, id: u64, row: &mut [f32]) -> Result<(), String> {
        let TableColumns { ids, values, .. } = &self.tables[table];
        let Ok(at) = ids.binary_search(&id) else { return Ok(()) };
        self.content.read(values + (at * size_of_val(row)) as u64, bytemuck::cast_slice_mut(row))
    }

    /// Reads all rows of a table, each of `dim` numbers.
    fn rows(&self, table: usize, dim: usize) -> Result<TableRows, String> {
        let columns = &self.tables[table];
        let keys = columns.ids.clone();
        let (mut touches, mut values) = (vec![0; keys.len()], vec![0.0; keys.len() * dim]);
        self.content.read(columns.touches, bytemuck::cast_slice_mut::<u32, u8>(&mut touches))?;
        self.content.read(columns.values, bytemuck::cast_slice_mut::<f32, u8>(&mut values))?;
        Ok(TableRows { keys, touches, values })
    }
}

/// Where a tensor of so many columns lies behind the header, and its number of rows.
fn place(
    metadata: &Metadata,
    name: &str,
    dtype: Dtype,
    columns: Option<usize>,
) -> Result<(u64, usize), String> {
    let info = metadata.info(name).ok_or_else(|| format!("it has no tensor {name:?}"))?;
    let (start, end) = info.data_offsets;
    let rows = match (&info.shape[..], columns) {
        (&[rows], None) => Some(rows),
        (&[rows, found], Some(expected)) if found == expected => Some(rows),
        _ => None,
    };
    let row = columns.unwrap_or(1) * (dtype.bitsize() / 8);
    let is_whole = |rows: &usize| {
        let bytes = rows.checked_mul(row);
        end <= metadata.data_len()
            && bytes.is_some_and(|bytes| start.checked_add(bytes) == Some(end))
    };
    match rows.filter(is_whole).filter(|_| info.dtype == dtype) {
        Some(rows) => Ok((start as u64, rows)),
        None => {
            let (dtype, shape) = (info.dtype, &info.shape);
            Err(format!("its tensor {name:?} is {dtype:?} of shape {shape:?} at {start}..{end}"))
        }
    }
}

impl Content {
    /// Where the data of this file of `bytes` begins, and what it consists of.
    fn header(&self, bytes: u64) -> Result<(u64, Metadata), String> {
        let mut len = [0; 8];
        self.read(0, &mut len)?;
        let end = u64::from_le_bytes(len).checked_add(8).filter(|end| *end <= bytes);
        let end = end.ok_or("it is no safetensors file")?;
        let mut header = vec![0; end as usize];
        self.read(0, &mut header)?;
        let metadata: Metadata = serde_json::from_slice(&header[8..])
            .map_err(|error| format!("it is no safetensors file: {error}"))?;
        if metadata.data_len() as u64 != bytes - end {
            return Err(format!("its tensors have {} bytes", metadata.data_len()));
        }
        Ok((end, metadata))
    }

    fn read(&self, at: u64, to: &mut [u8]) -> Result<(), String> {
        match self {
            Self::File(file) => file.read_exact_at(to, at).map_err(|error| error.to_string()),
            Self::Memory(bytes) => {
                let end = at as usize + to.len();
                let found = bytes.get(at as usize..end).ok_or("it ends too early")?;
                to.copy_from_slice(found);
                Ok(())
            }
        }
    }
}
