//! Predictions as a Parquet file.

use std::sync::Arc;

use ::parquet::basic::{Compression, ConvertedType, Repetition, Type as Physical};
use ::parquet::data_type::{ByteArray, ByteArrayType, FloatType, Int64Type};
use ::parquet::errors::ParquetError;
use ::parquet::file::properties::WriterProperties;
use ::parquet::file::writer::SerializedFileWriter;
use ::parquet::schema::types::Type;

use crate::{Column, Predictions};

pub(super) fn encode(predictions: &Predictions) -> Result<Vec<u8>, String> {
    to_parquet(predictions).map_err(|error| error.to_string())
}

fn to_parquet(predictions: &Predictions) -> Result<Vec<u8>, ParquetError> {
    let field = |(name, column): &(String, Column)| {
        let (physical, meant) = match column {
            Column::F32(_) => (Physical::FLOAT, ConvertedType::NONE),
            Column::I64(_) => (Physical::INT64, ConvertedType::NONE),
            Column::Text(_) => (Physical::BYTE_ARRAY, ConvertedType::UTF8),
        };
        let field = Type::primitive_type_builder(name, physical)
            .with_repetition(Repetition::REQUIRED)
            .with_converted_type(meant);
        field.build().map(Arc::new)
    };
    let fields = predictions.columns().iter().map(field).collect::<Result<_, _>>()?;
    let schema = Arc::new(Type::group_type_builder("predictions").with_fields(fields).build()?);
    let properties = WriterProperties::builder().set_compression(Compression::SNAPPY).build();
    let mut file = SerializedFileWriter::new(Vec::new(), schema, Arc::new(properties))?;
    let mut group = file.next_row_group()?;
    for (_, column) in predictions.columns() {
        let Some(mut writer) = group.next_column()? else { break };
        match column {
            Column::F32(values) => writer.typed::<FloatType>().write_batch(values, None, None)?,
            Column::I64(values) => writer.typed::<Int64Type>().write_batch(values, None, None)?,
            Column::Text(values) => {
                let values: Vec<ByteArray> =
                    values.iter().map(|text| text.as_str().into()).collect();
                writer.typed::<ByteArrayType>().write_batch(&values, None, None)?
            }
        };
        writer.close()?;
    }
    group.close()?;
    file.into_inner()
}
