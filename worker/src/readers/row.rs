//! Rows of tables, independent of the file format.

/// A row: one value per requested column, in the order of the request.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    values: Vec<Value>,
}

impl Row {
    pub(super) fn new(values: Vec<Value>) -> Self {
        Self { values }
    }

    /// All values of the row.
    pub fn values(&self) -> &[Value] {
        &self.values
    }

    /// Returns the number in requested column `index`.
    ///
    /// # Panics
    /// If the column was not requested as `f32`.
    pub fn f32(&self, index: usize) -> f32 {
        let Value::F32(number) = self.values[index] else {
            panic!("column {index} was not requested as f32")
        };
        number
    }

    /// Returns the integer in requested column `index`.
    ///
    /// # Panics
    /// If the column was not requested as `i64`.
    pub fn i64(&self, index: usize) -> i64 {
        let Value::I64(number) = self.values[index] else {
            panic!("column {index} was not requested as i64")
        };
        number
    }

    /// Returns the text in requested column `index`.
    ///
    /// # Panics
    /// If the column was not requested as text.
    pub fn text(&self, index: usize) -> &str {
        let Value::Text(text) = &self.values[index] else {
            panic!("column {index} was not requested as text")
        };
        text
    }
}

/// A field of a [`Row`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Value {
    /// A finite number.
    F32(f32),
    /// An integer.
    I64(i64),
    /// Text, without its quotes.
    Text(String),
}

/// Type that a column is read as.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kind {
    F32,
    I64,
    Text,
}
