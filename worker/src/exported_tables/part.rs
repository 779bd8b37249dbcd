//! A file with a part of the rows.

use bytemuck::NoUninit;
use bytes::Bytes;
use elasticdl_data::storage::Storage;
use elasticdl_tables::{ExportedRows, Part, Table};
use safetensors::tensor::Dtype;
use xxhash_rust::xxh3::Xxh3Default;

use super::index::{ExportedPart, names_of, parts_folder};
use crate::weights::{self, WeightsError};

/// Writes a part of the rows of the model at `address`. `rows`: by table.
///
/// # Errors
/// An error of the storage.
pub(crate) fn write_part(
    address: &str,
    part: Part,
    tables: &[Table],
    rows: Vec<ExportedRows>,
) -> Result<ExportedPart, WeightsError> {
    // Ids come first: they are aligned to 8 bytes.
    let (mut names, mut columns) = (Vec::new(), vec![Bytes::new()]);
    let (mut other_names, mut other_columns) = (Vec::new(), Vec::new());
    for (table, ExportedRows { ids, touches, values }) in tables.iter().zip(rows) {
        let [of_values, of_ids, of_touches] = names_of(table);
        let len = ids.len();
        names.push((of_ids, Dtype::U64, vec![len]));
        columns.push(bytes_of(ids));
        other_names.push((of_values, Dtype::F32, vec![len, table.dim]));
        other_columns.push(bytes_of(values));
        other_names.push((of_touches, Dtype::U32, vec![len]));
        other_columns.push(bytes_of(touches));
    }
    names.append(&mut other_names);
    columns.append(&mut other_columns);
    columns[0] = weights::encode_header(names, [])?.into();
    let mut digest = Xxh3Default::new();
    columns.iter().for_each(|column| digest.update(column));
    let Part { index, parts } = part;
    let file = format!("{index:05}-of-{parts:05}-{:032x}.safetensors", digest.digest128());
    let bytes = columns.iter().map(|column| column.len() as u64).sum();
    let (folder, name) = parts_folder(address);
    let at = Storage::open(&folder)?.join(&file);
    at.write("", columns)?;
    if let Err(error) = at.remove_unfinished() {
        tracing::debug!(%error, "what a killed writer has left is still there");
    }
    Ok(ExportedPart { file: format!("{name}/{file}"), bytes })
}

fn bytes_of<T: NoUninit + Send + 'static>(numbers: Vec<T>) -> Bytes {
    struct Column<T>(Vec<T>);
    impl<T: NoUninit> AsRef<[u8]> for Column<T> {
        fn as_ref(&self) -> &[u8] {
            bytemuck::cast_slice(&self.0)
        }
    }
    Bytes::from_owner(Column(numbers))
}
