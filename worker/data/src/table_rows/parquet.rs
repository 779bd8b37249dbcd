//! Rows of an embedding table as a Parquet file.

use std::mem;
use std::sync::Arc;

use ::parquet::arrow::ArrowWriter;
use ::parquet::errors::ParquetError;
use ::parquet::file::properties::WriterProperties;
use arrow_array::{
    ArrayRef, FixedSizeListArray, Float32Array, RecordBatch, UInt32Array, UInt64Array,
};
use arrow_schema::{DataType, Field, Schema};
use bytes::Bytes;

use super::TableRows;

pub(super) fn encode(
    dim: usize,
    parts: impl Iterator<Item = Result<TableRows, String>>,
) -> Result<Vec<Bytes>, String> {
    let (mut file, schema) = begin(dim).map_err(|error| error.to_string())?;
    let mut written = Vec::new();
    for part in parts {
        add(&mut file, &schema, part?).map_err(|error| error.to_string())?;
        written.push(mem::take(file.inner_mut()).into());
    }
    written.push(file.into_inner().map_err(|error| error.to_string())?.into());
    Ok(written)
}

fn begin(dim: usize) -> Result<(ArrowWriter<Vec<u8>>, Arc<Schema>), ParquetError> {
    // The type that PyArrow calls `list_(float32(), dim)`.
    let row = DataType::new_fixed_size_list(DataType::Float32, dim as i32, true);
    let columns = [("key", DataType::UInt64), ("touches", DataType::UInt32), ("embedding", row)];
    let columns = columns.map(|(name, kind)| Field::new(name, kind, false));
    let schema = Arc::new(Schema::new(columns.to_vec()));
    // Hardly two numbers are equal.
    let properties = WriterProperties::builder().set_dictionary_enabled(false).build();
    let file = ArrowWriter::try_new(Vec::new(), Arc::clone(&schema), Some(properties))?;
    Ok((file, schema))
}

fn add(
    file: &mut ArrowWriter<Vec<u8>>,
    schema: &Arc<Schema>,
    TableRows { keys, touches, values }: TableRows,
) -> Result<(), ParquetError> {
    let DataType::FixedSizeList(number, dim) = schema.field(2).data_type() else {
        unreachable!("it is the column of embeddings")
    };
    let values = Arc::new(Float32Array::from(values));
    let rows = FixedSizeListArray::try_new(Arc::clone(number), *dim, values, None)?;
    let columns: Vec<ArrayRef> = vec![
        Arc::new(UInt64Array::from(keys)),
        Arc::new(UInt32Array::from(touches)),
        Arc::new(rows),
    ];
    file.write(&RecordBatch::try_new(Arc::clone(schema), columns)?)?;
    file.flush()
}
