//! Predictions as the content of a file.

use std::sync::Arc;

use csv::WriterBuilder;
use elasticdl_proto::Format;
use parquet::basic::{Compression, ConvertedType, Repetition, Type as Physical};
use parquet::data_type::{ByteArray, ByteArrayType, FloatType, Int64Type};
use parquet::errors::ParquetError;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::types::Type;

use super::{Column, Predictions};

/// The rows of `predictions` as a file of this format.
///
/// # Errors
/// Why the format cannot hold them.
pub fn encode(format: Format, predictions: &Predictions) -> Result<Vec<u8>, String> {
    match format {
        Format::Csv => Ok(to_csv(predictions)),
        Format::Jsonl => Ok(to_jsonl(predictions)),
        Format::Parquet => to_parquet(predictions).map_err(|error| error.to_string()),
    }
}

fn to_csv(predictions: &Predictions) -> Vec<u8> {
    let columns = predictions.columns();
    let mut rows = WriterBuilder::new().from_writer(Vec::new());
    let written = "a vector takes any row";
    rows.write_record(columns.iter().map(|(name, _)| name)).expect(written);
    for i in 0..columns.first().map_or(0, |(_, column)| column.len()) {
        let value = |(_, column): &(String, Column)| match column {
            Column::F32(values) => values[i].to_string(),
            Column::I64(values) => values[i].to_string(),
            Column::Text(values) => values[i].clone(),
        };
        rows.write_record(columns.iter().map(value)).expect(written);
    }
    rows.into_inner().expect(written)
}

/// Numbers that are not finite become `null`, as JSON cannot represent them.
fn to_jsonl(predictions: &Predictions) -> Vec<u8> {
    let columns = predictions.columns();
    let names: Vec<String> =
        columns.iter().map(|(name, _)| serde_json::json!(name).to_string()).collect();
    let mut lines = String::new();
    for i in 0..columns.first().map_or(0, |(_, column)| column.len()) {
        for (k, ((_, column), name)) in columns.iter().zip(&names).enumerate() {
            let value = match column {
                Column::F32(values) if values[i].is_finite() => serde_json::to_string(&values[i]),
                Column::F32(_) => Ok("null".into()),
                Column::I64(values) => serde_json::to_string(&values[i]),
                Column::Text(values) => serde_json::to_string(&values[i]),
            };
            lines.push(if k == 0 { '{' } else { ',' });
            lines.push_str(&format!("{name}:{}", value.expect("numbers and text are JSON")));
        }
        lines.push_str("}\n");
    }
    lines.into_bytes()
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
