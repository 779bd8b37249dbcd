//! Rows of an embedding table as the content of a file.

use bytes::Bytes;

#[cfg(feature = "parquet")]
mod parquet;
#[cfg(not(feature = "parquet"))]
mod parquet {
    use super::{Bytes, TableRows};

    pub(super) fn encode(
        _dim: usize,
        _parts: impl Iterator<Item = Result<TableRows, String>>,
    ) -> Result<Vec<Bytes>, String> {
        Err(crate::feature::missing("Parquet", "parquet"))
    }
}

/// Some rows of a table.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TableRows {
    /// Distinct ids.
    pub keys: Vec<u64>,
    /// Records that touched each row.
    pub touches: Vec<u32>,
    /// `[rows, dim]`.
    pub values: Vec<f32>,
}

/// The content of a Parquet file with the columns `key`, `touches` and `embedding`, lists of `dim`
/// numbers. Each part is a group of rows, so that one of them is in memory beside the content.
///
/// # Errors
/// That of a part, the feature that is missing, or why the format cannot hold the rows.
pub fn encode_table(
    dim: usize,
    parts: impl Iterator<Item = Result<TableRows, String>>,
) -> Result<Vec<Bytes>, String> {
    parquet::encode(dim, parts)
}

#[cfg(test)]
#[cfg(not(feature = "parquet"))]
mod tests {
    use super::*;

    #[test]
    fn rows_as_parquet_say_which_feature_is_missing() {
        let error = encode_table(1, std::iter::empty()).unwrap_err();
        assert!(error.contains("was built without Parquet"), "{error}");
    }
}
