//! Predictions of a model.

mod files;

pub use files::encode;

/// Predictions for a batch of records: named columns, each with one value per record, in the
/// records' order.
///
/// ```
/// # extern crate elasticdl_data as elasticdl;
/// use elasticdl::Predictions;
///
/// let predictions = Predictions::new()
///     .i64("class", vec![3, 5])
///     .f32("probability", vec![0.9, 0.6]);
/// assert_eq!(predictions.rows(), Ok(2));
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Predictions {
    columns: Vec<(String, Column)>,
}

/// A column: values of one type.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Column {
    /// Floating-point numbers.
    F32(Vec<f32>),
    /// Integers.
    I64(Vec<i64>),
    /// Text.
    Text(Vec<String>),
}

impl Predictions {
    /// Creates predictions without columns.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a column of floating-point numbers.
    pub fn f32(self, name: &str, values: Vec<f32>) -> Self {
        self.column(name, Column::F32(values))
    }

    /// Adds a column of integers.
    pub fn i64(self, name: &str, values: Vec<i64>) -> Self {
        self.column(name, Column::I64(values))
    }

    /// Adds a column of text.
    pub fn text(self, name: &str, values: Vec<String>) -> Self {
        self.column(name, Column::Text(values))
    }

    fn column(mut self, name: &str, column: Column) -> Self {
        self.columns.push((name.to_owned(), column));
        self
    }

    /// The columns with their names, in the order in which they were added.
    pub fn columns(&self) -> &[(String, Column)] {
        &self.columns
    }

    /// Number of records predicted for.
    ///
    /// # Errors
    /// There is no column, two columns have the same name, or columns differ in length.
    pub fn rows(&self) -> Result<usize, PredictionsError> {
        let Some((first, column)) = self.columns.first() else {
            return Err(PredictionsError::NoColumns);
        };
        let rows = column.len();
        for (index, (name, column)) in self.columns.iter().enumerate() {
            let (name, values) = (name.clone(), column.len());
            if name.is_empty() || self.columns[..index].iter().any(|(other, _)| *other == name) {
                return Err(PredictionsError::Name { index, name });
            }
            if values != rows {
                return Err(PredictionsError::Length { name, values, first: first.clone(), rows });
            }
        }
        Ok(rows)
    }

    /// Appends `other`'s rows.
    ///
    /// # Errors
    /// `other` has different columns.
    pub fn append(&mut self, other: Self) -> Result<(), PredictionsError> {
        if self.columns.is_empty() {
            *self = other;
            return Ok(());
        }
        let describe = |predictions: &Self| {
            let column =
                |(name, column): &(String, Column)| format!("{name:?} ({})", column.kind());
            predictions.columns.iter().map(column).collect::<Vec<_>>().join(", ")
        };
        let same = self.columns.len() == other.columns.len()
            && self
                .columns
                .iter()
                .zip(&other.columns)
                .all(|(a, b)| a.0 == b.0 && a.1.kind() == b.1.kind());
        if !same {
            let (expected, found) = (describe(self), describe(&other));
            return Err(PredictionsError::Columns { expected, found });
        }
        for ((_, column), (_, more)) in self.columns.iter_mut().zip(other.columns) {
            match (column, more) {
                (Column::F32(values), Column::F32(more)) => values.extend(more),
                (Column::I64(values), Column::I64(more)) => values.extend(more),
                (Column::Text(values), Column::Text(more)) => values.extend(more),
                _ => unreachable!("the kinds were compared above"),
            }
        }
        Ok(())
    }
}

impl Column {
    /// Number of values.
    #[expect(clippy::len_without_is_empty, reason = "an empty column has no special meaning")]
    pub fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::I64(values) => values.len(),
            Self::Text(values) => values.len(),
        }
    }

    fn kind(&self) -> &'static str {
        match self {
            Self::F32(_) => "f32",
            Self::I64(_) => "i64",
            Self::Text(_) => "text",
        }
    }
}

/// Why predictions can't be used. Correct the model's `predict`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PredictionsError {
    /// Two batches have different columns.
    #[error("all predictions of a job must have the same columns: got {found} after {expected}")]
    Columns {
        /// Names and types of the first batch's columns.
        expected: String,
        /// Names and types of the second batch's columns.
        found: String,
    },
    /// Two columns differ in length.
    #[error("column {name:?} has {values} values where {first:?} has {rows}")]
    Length {
        /// Name of the column.
        name: String,
        /// Its number of values.
        values: usize,
        /// Name of the first column.
        first: String,
        /// Number of values of the first column.
        rows: usize,
    },
    /// A name is empty, or the name of two columns.
    #[error("column {index} is named {name:?}: each needs a unique name")]
    Name {
        /// Index of the column.
        index: usize,
        /// Its name.
        name: String,
    },
    /// There are no columns.
    #[error("predictions need at least one column")]
    NoColumns,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two() -> Predictions {
        Predictions::new().i64("class", vec![1, 2]).f32("p", vec![0.5, 0.25])
    }

    #[test]
    fn columns_must_have_unique_names_and_equal_lengths() {
        assert_eq!(two().rows(), Ok(2));
        let table = [
            (Predictions::new(), "need at least one column"),
            (two().f32("class", vec![0.0; 2]), "column 2 is named \"class\""),
            (two().text("", vec![String::new(); 2]), "column 2 is named \"\""),
            (two().text("t", vec![]), "column \"t\" has 0 values where \"class\" has 2"),
        ];
        for (predictions, expected) in table {
            let error = predictions.rows().unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn only_rows_of_the_same_columns_can_be_appended() {
        let mut all = Predictions::new();
        all.append(two()).unwrap();
        all.append(Predictions::new().i64("class", vec![7]).f32("p", vec![1.0])).unwrap();
        assert_eq!(
            all,
            Predictions::new().i64("class", vec![1, 2, 7]).f32("p", vec![0.5, 0.25, 1.0])
        );
        for other in [
            Predictions::new().i64("class", vec![1]),
            Predictions::new().f32("p", vec![1.0]).i64("class", vec![1]),
            Predictions::new().i64("class", vec![1]).i64("p", vec![1]),
        ] {
            let error = all.append(other).unwrap_err().to_string();
            assert!(error.ends_with("after \"class\" (i64), \"p\" (f32)"), "{error}");
        }
    }
}
