//! The rows of a model's tables, and how often they were touched.

use serde::{Deserialize, Serialize};

/// How often records have touched rows of tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowTouches {
    /// Pairs of a record and a row that it touches, of the records in committed steps.
    pub expected: u64,
    /// Sum of the touches that the rows themselves have counted.
    pub counted: u64,
}

/// The tables of a group. The names of its fields are a public format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TablesStatus {
    /// Rows that exist, each counted once.
    pub rows: u64,
    /// Pairs of a record and a row that it touches, of the records in committed steps.
    pub touches: u64,
    /// Shards with fewer copies than there could be: those that a loss of workers may take away.
    pub shards_at_risk: u32,
}

/// As [`RowTouches`], with the differences.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowTouchesSummary {
    /// Pairs of a record and a row that it touches, of the records in committed steps.
    pub expected: u64,
    /// Sum of the touches that the rows themselves have counted.
    pub counted: u64,
    /// Touches that no row has counted.
    pub missing: u64,
    /// Touches that rows have counted more than once.
    pub repeated: u64,
}

impl From<RowTouches> for RowTouchesSummary {
    fn from(RowTouches { expected, counted }: RowTouches) -> Self {
        let (missing, repeated) =
            (expected.saturating_sub(counted), counted.saturating_sub(expected));
        Self { expected, counted, missing, repeated }
    }
}

/// Losses of all copies of rows of tables, after which the group went back to a checkpoint or to
/// the beginning, or went on with older rows. The names of its fields are a public format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowsLoss {
    /// Number of losses.
    pub count: u64,
    /// Steps that the last lost state contained.
    pub at_step: u64,
    /// Touches of rows since the checkpoints that the group went back to, of all losses: they are
    /// lost, and made again.
    pub row_touches: u64,
    /// Touches that the rows have not counted, if the group went on with older ones.
    pub missing: Option<u64>,
}
