//! Rows of tables, whatever file they are from.

/// One row: a value for each column that was asked for, in that order.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    values: Vec<Value>,
}

impl Row {
    pub(super) fn new(values: Vec<Value>) -> Self {
        Self { values }
    }

    /// All values.
    pub fn values(&self) -> &[Value] {
        &self.values
    }

    /// The number in column `index` of those asked for.
    ///
    /// # Panics
    /// If it was not asked for as `f32`.
    pub fn f32(&self, index: usize) -> f32 {
        let Value::F32(number) = self.values[index] else {
            panic!("column {index} was not asked for as f32")
        };
        number
    }

    /// The whole number in column `index` of those asked for.
    ///
    /// # Panics
    /// If it was not asked for as `i64`.
    pub fn i64(&self, index: usize) -> i64 {
        let Value::I64(number) = self.values[index] else {
            panic!("column {index} was not asked for as i64")
        };
        number
    }

    /// The text in column `index` of those asked for.
    ///
    /// # Panics
    /// If it was not asked for as text.
    pub fn text(&self, index: usize) -> &str {
        let Value::Text(text) = &self.values[index] else {
            panic!("column {index} was not asked for as text")
        };
        text
    }
}

/// A field of a [`Row`].
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A finite number.
    F32(f32),
    /// A whole number.
    I64(i64),
    /// Text, without its quotes.
    Text(String),
}

/// As what a column is read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kind {
    F32,
    I64,
    Text,
}
