//! Predictions as the content of a file.

use csv::WriterBuilder;
use elasticdl_proto::Format;

use super::{Column, Predictions};

#[cfg(feature = "parquet")]
mod parquet;
#[cfg(not(feature = "parquet"))]
mod parquet {
    pub(super) fn encode(_predictions: &super::Predictions) -> Result<Vec<u8>, String> {
        Err(crate::feature::missing("Parquet", "parquet"))
    }
}

/// The rows of `predictions` as a file of this format.
///
/// # Errors
/// Why the format cannot hold them.
pub fn encode(format: Format, predictions: &Predictions) -> Result<Vec<u8>, String> {
    match format {
        Format::Csv => Ok(to_csv(predictions)),
        Format::Jsonl => Ok(to_jsonl(predictions)),
        Format::Parquet => parquet::encode(predictions),
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

#[cfg(test)]
#[cfg(not(feature = "parquet"))]
mod tests {
    use super::*;

    #[test]
    fn predictions_as_parquet_say_which_feature_is_missing() {
        let error = encode(Format::Parquet, &Predictions::new().f32("p", vec![0.5])).unwrap_err();
        let expected = "this program was built without Parquet; run `cargo add elasticdl \
                        --features parquet` and build it again";
        assert!(error.starts_with(expected), "{error}");
    }
}
