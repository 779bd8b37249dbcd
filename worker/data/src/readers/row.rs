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

    /// Returns the numbers of a list or of several columns, which are value `index`.
    ///
    /// # Panics
    /// If the value was not requested as several `f32`s.
    pub fn f32s(&self, index: usize) -> &[f32] {
        let Value::F32s(numbers) = &self.values[index] else {
            panic!("value {index} was not requested as several f32s")
        };
        numbers
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

    /// Returns the bytes of value `index`: the pixels of an image, or the content of a member.
    ///
    /// # Panics
    /// If the value was not requested as an image or as bytes.
    pub fn bytes(&self, index: usize) -> &[u8] {
        let Value::Bytes(bytes) = &self.values[index] else {
            panic!("value {index} was not requested as an image or as bytes")
        };
        bytes
    }

    /// Returns the class in requested column `index`.
    ///
    /// # Panics
    /// If the column was not requested as a class.
    pub fn class(&self, index: usize) -> usize {
        let Value::Class(class) = self.values[index] else {
            panic!("column {index} was not requested as a class")
        };
        class
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
    /// The pixels of an image, or the content of a file.
    Bytes(Vec<u8>),
    /// A class: an integer from 0 to the number of classes less one.
    Class(usize),
    /// A finite number.
    F32(f32),
    /// The finite numbers of a list or of several columns.
    F32s(Vec<f32>),
    /// An integer.
    I64(i64),
    /// Text, without its quotes.
    Text(String),
}

impl From<f32> for Value {
    fn from(number: f32) -> Self {
        Self::F32(number)
    }
}

impl From<i64> for Value {
    fn from(number: i64) -> Self {
        Self::I64(number)
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}
