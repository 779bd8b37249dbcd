//! The values of columns of a record batch.

use arrow_array::cast::AsArray as _;
use arrow_array::types::{
    Float16Type, Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type, UInt8Type,
    UInt16Type, UInt32Type, UInt64Type,
};
use arrow_array::{Array, ArrayRef, RecordBatch};
use arrow_schema::{DataType, Field, Schema};

use super::super::columns::{Kind, number_as_class};
use super::super::parts::{Cell, Content, finite};
use super::super::row::Value;

/// A column of a table: a field of the schema, or one below it.
#[derive(Clone, Debug)]
pub(super) struct Leaf {
    /// Its name: the path of names to it, `a.b`.
    pub(super) name: String,
    /// Number of the field of the schema.
    pub(super) root: usize,
    /// Numbers of the fields below it.
    below: Vec<usize>,
    data_type: DataType,
}

/// A column of a record batch.
#[derive(Debug)]
pub(super) struct LeafValues {
    /// The structs that contain it, from the outermost one: a null there is a null.
    around: Vec<ArrayRef>,
    array: ArrayRef,
    /// For a dictionary, the value of each row.
    keys: Option<Vec<usize>>,
}

/// The columns of a table.
pub(super) fn leaves(schema: &Schema) -> Vec<Leaf> {
    let mut leaves = Vec::new();
    for (root, field) in schema.fields().iter().enumerate() {
        add_leaves(&mut leaves, root, String::new(), Vec::new(), field);
    }
    leaves
}

fn add_leaves(
    leaves: &mut Vec<Leaf>,
    root: usize,
    above: String,
    below: Vec<usize>,
    field: &Field,
) {
    let name = format!("{above}{}", field.name());
    match field.data_type() {
        DataType::Struct(fields) => {
            for (number, field) in fields.iter().enumerate() {
                let below = [&below[..], &[number]].concat();
                add_leaves(leaves, root, format!("{name}."), below, field);
            }
        }
        data_type => leaves.push(Leaf { name, root, below, data_type: data_type.clone() }),
    }
}

impl Leaf {
    /// Checks that the column can be read as `kind`.
    pub(super) fn check(&self, kind: Kind) -> Result<(), String> {
        let data_type = &self.data_type;
        let element = match (data_type, kind) {
            (
                DataType::List(field)
                | DataType::LargeList(field)
                | DataType::FixedSizeList(field, _),
                Kind::F32List(_),
            ) => field.data_type(),
            (data_type, Kind::F32List(_)) => {
                return Err(format!("is {data_type}, which is no list"));
            }
            (data_type, _) => data_type,
        };
        let (fits, wanted) = match kind {
            Kind::F32 | Kind::F32List(_) => (is_number(element), "f32: a float, Int8, Int16"),
            Kind::Class(_) | Kind::I64 => (is_integer(element), "i64: an integer or Boolean"),
            Kind::Text => (is_text(element), "text: Utf8, or a dictionary of it"),
        };
        if fits {
            return Ok(());
        }
        Err(format!("is {data_type}, which cannot be read as {wanted}"))
    }

    /// The column in a record batch whose columns are the fields `roots`.
    pub(super) fn values(&self, batch: &RecordBatch, roots: &[usize]) -> LeafValues {
        let place = roots.iter().position(|root| *root == self.root);
        let mut array = batch.column(place.expect("the field was requested")).clone();
        let mut around = Vec::new();
        for field in &self.below {
            let inner = array.as_struct().column(*field).clone();
            around.push(std::mem::replace(&mut array, inner));
        }
        let keys = array.as_any_dictionary_opt().map(|dictionary| {
            if dictionary.values().is_empty() { Vec::new() } else { dictionary.normalized_keys() }
        });
        LeafValues { around, array, keys }
    }
}

impl LeafValues {
    /// What the column holds in rows `start..start + count`.
    pub(super) fn cells(&self, kind: Kind, start: usize, count: usize) -> Vec<Cell> {
        (start..start + count).map(|row| self.cell(kind, row)).collect()
    }

    fn cell(&self, kind: Kind, row: usize) -> Cell {
        if self.array.is_null(row) || self.around.iter().any(|array| array.is_null(row)) {
            return Ok(Content::Null);
        }
        if let Some(keys) = &self.keys {
            // Without values, all rows are null.
            let Some(key) = keys.get(row) else { return Ok(Content::Null) };
            return scalar(self.array.as_any_dictionary().values(), kind, *key);
        }
        let list = match self.array.data_type() {
            DataType::List(_) => self.array.as_list::<i32>().value(row),
            DataType::LargeList(_) => self.array.as_list::<i64>().value(row),
            DataType::FixedSizeList(..) => self.array.as_fixed_size_list().value(row),
            _ => return scalar(&self.array, kind, row),
        };
        let number = |i: usize| match scalar(&list, kind, i)? {
            Content::Value(Value::F32(number)) => Ok(Some(number)),
            _ => Ok(None),
        };
        (0..list.len()).map(number).collect::<Result<_, String>>().map(Content::List)
    }
}

/// What an array holds at `row`.
fn scalar(array: &ArrayRef, kind: Kind, row: usize) -> Cell {
    if array.is_null(row) {
        return Ok(Content::Null);
    }
    let integer = |number: i64| match kind {
        Kind::Class(classes) => number_as_class(number, classes),
        // Of 8 or 16 bits.
        Kind::F32 | Kind::F32List(_) => Ok(Value::F32(number as f32)),
        Kind::I64 | Kind::Text => Ok(Value::I64(number)),
    };
    let text = |text: &str| Ok(Value::Text(text.to_owned()));
    let value = match array.data_type() {
        DataType::Float16 => {
            let number = f32::from(array.as_primitive::<Float16Type>().value(row));
            finite(number.into(), number)
        }
        DataType::Float32 => {
            let number = array.as_primitive::<Float32Type>().value(row);
            finite(number.into(), number)
        }
        DataType::Float64 => {
            let number = array.as_primitive::<Float64Type>().value(row);
            finite(number, number as f32)
        }
        DataType::Boolean => integer(array.as_boolean().value(row).into()),
        DataType::Int8 => integer(array.as_primitive::<Int8Type>().value(row).into()),
        DataType::Int16 => integer(array.as_primitive::<Int16Type>().value(row).into()),
        DataType::Int32 => integer(array.as_primitive::<Int32Type>().value(row).into()),
        DataType::Int64 => integer(array.as_primitive::<Int64Type>().value(row)),
        DataType::UInt8 => integer(array.as_primitive::<UInt8Type>().value(row).into()),
        DataType::UInt16 => integer(array.as_primitive::<UInt16Type>().value(row).into()),
        DataType::UInt32 => integer(array.as_primitive::<UInt32Type>().value(row).into()),
        DataType::UInt64 => {
            let number = array.as_primitive::<UInt64Type>().value(row);
            i64::try_from(number)
                .map_err(|_| format!("{number} where an i64 should be"))
                .and_then(integer)
        }
        DataType::Utf8 => text(array.as_string::<i32>().value(row)),
        DataType::LargeUtf8 => text(array.as_string::<i64>().value(row)),
        DataType::Utf8View => text(array.as_string_view().value(row)),
        other => Err(format!("{other}, which is not supported")),
    };
    value.map(Content::Value)
}

fn is_number(data_type: &DataType) -> bool {
    data_type.is_floating()
        || matches!(
            data_type,
            DataType::Int8 | DataType::Int16 | DataType::UInt8 | DataType::UInt16
        )
}

fn is_integer(data_type: &DataType) -> bool {
    data_type.is_integer() || *data_type == DataType::Boolean
}

fn is_text(data_type: &DataType) -> bool {
    match data_type {
        DataType::Dictionary(_, values) => is_text(values),
        DataType::LargeUtf8 | DataType::Utf8 | DataType::Utf8View => true,
        _ => false,
    }
}
