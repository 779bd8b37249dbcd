//! The columns of a table as Arrow has them, and their values.

use std::ops::Range;

use arrow_array::ArrayRef;
use arrow_array::cast::AsArray as _;
use arrow_array::types::{
    Float16Type, Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type, UInt8Type,
    UInt16Type, UInt32Type, UInt64Type,
};
use arrow_buffer::NullBuffer;
use arrow_schema::{DataType, Schema};

use super::columns::{Columns, Found, Kind, number_as_class};
use super::row::Value;

/// A column of a table: a field of the schema, or one below it.
#[derive(Clone, Debug)]
pub(super) struct Leaf {
    /// Its name: the path of names to it, `a.b`.
    pub(super) name: String,
    /// Number of the field of the schema.
    pub(super) root: usize,
    /// Numbers of the fields of the structs around it.
    below: Vec<usize>,
    /// The number of lists around it.
    lists: usize,
    data_type: DataType,
}

/// The values of a column in consecutive rows.
pub(super) struct LeafValues {
    /// The rows whose list is null, and the lists.
    lists: Option<(Option<NullBuffer>, ArrayRef)>,
    /// Which values are null, those in a null struct included.
    nulls: Option<NullBuffer>,
    values: ArrayRef,
    /// For a dictionary, which of `values` each value is.
    keys: Option<Vec<usize>>,
}

/// The columns of a table.
pub(super) fn leaves(schema: &Schema) -> Vec<Leaf> {
    let mut leaves = Vec::new();
    for (root, field) in schema.fields().iter().enumerate() {
        let (name, data_type) = (field.name().clone(), field.data_type().clone());
        add_leaves(&mut leaves, Leaf { name, root, below: Vec::new(), lists: 0, data_type });
    }
    leaves
}

/// Adds the columns of a field.
fn add_leaves(leaves: &mut Vec<Leaf>, field: Leaf) {
    match &field.data_type {
        DataType::Struct(fields) => {
            for (number, inner) in fields.iter().enumerate() {
                let mut leaf = field.clone();
                leaf.name = format!("{}.{}", field.name, inner.name());
                leaf.below.push(number);
                leaf.data_type = inner.data_type().clone();
                add_leaves(leaves, leaf);
            }
        }
        DataType::List(inner) | DataType::LargeList(inner) | DataType::FixedSizeList(inner, _) => {
            let data_type = inner.data_type().clone();
            add_leaves(leaves, Leaf { lists: field.lists + 1, data_type, ..field });
        }
        _ => leaves.push(field),
    }
}

/// For each requested value, the numbers of its columns. A list is requested by its own name, and
/// may be a column below it.
pub(super) fn find(requested: &Columns, leaves: &[Leaf]) -> Result<Vec<Vec<usize>>, String> {
    let names: Vec<String> = leaves.iter().map(|leaf| leaf.name.clone()).collect();
    let by_name = |name: &str| {
        let is_below = |leaf: &Leaf| {
            let below = leaf.name.strip_prefix(name).is_some_and(|rest| rest.starts_with('.'));
            below && leaf.lists > 0
        };
        let exact: Vec<usize> = (0..names.len()).filter(|&leaf| names[leaf] == name).collect();
        if !exact.is_empty() {
            return exact;
        }
        (0..names.len()).filter(|&leaf| is_below(&leaves[leaf])).collect()
    };
    let found = requested.find(&names, "the file has", by_name)?;
    for (column, numbers) in requested.iter().zip(&found) {
        for &leaf in numbers {
            leaves[leaf]
                .check(column.kind)
                .map_err(|reason| format!("column {:?} {reason}", names[leaf]))?;
        }
    }
    Ok(found)
}

impl Leaf {
    #[cfg(feature = "parquet")]
    pub(super) fn is_list(&self) -> bool {
        self.lists > 0
    }

    /// Checks that the column can be read as `kind`.
    fn check(&self, kind: Kind) -> Result<(), String> {
        let data_type = &self.data_type;
        match (self.lists, kind) {
            (0, Kind::F32List(_)) => return Err(format!("is {data_type}, which is no list")),
            (0, _) | (1, Kind::F32List(_)) => {}
            (_, Kind::F32List(_)) => return Err("is a list of lists".into()),
            (_, _) => return Err(format!("is a list of {data_type}, not one value for each row")),
        }
        if data_type.is_decimal() {
            let instead = "which is not supported; write it as Float64 or Int64";
            return Err(format!("is {data_type}, {instead}"));
        }
        let (fits, wanted) = match kind {
            Kind::F32 | Kind::F32List(_) => {
                (is_number(data_type), "f32: a float, or an integer of 8 or 16 bits")
            }
            Kind::Class(_) | Kind::I64 => (is_integer(data_type), "i64: an integer or Boolean"),
            Kind::Text => (is_text(data_type), "text: Utf8, or a dictionary of it"),
        };
        if fits {
            return Ok(());
        }
        Err(format!("is {data_type}, which cannot be read as {wanted}"))
    }

    /// The values of the column, which is or lies below `root`.
    pub(super) fn values(&self, root: &ArrayRef) -> LeafValues {
        let (mut values, mut nulls, mut lists) = (root.clone(), root.nulls().cloned(), None);
        let mut below = self.below.iter();
        loop {
            let inner = if let Some(elements) = elements(&values) {
                let elements = elements.clone();
                let of_lists = std::mem::replace(&mut nulls, elements.nulls().cloned());
                lists = Some((of_lists, values));
                elements
            } else if let (Some(outer), Some(field)) = (values.as_struct_opt(), below.next()) {
                let field = outer.column(*field).clone();
                nulls = NullBuffer::union(nulls.as_ref(), field.nulls());
                field
            } else {
                break;
            };
            values = inner;
        }
        let Some(dictionary) = values.as_any_dictionary_opt() else {
            return LeafValues { lists, nulls, values, keys: None };
        };
        let values = dictionary.values().clone();
        let keys = if values.is_empty() { Vec::new() } else { dictionary.normalized_keys() };
        LeafValues { lists, nulls, values, keys: Some(keys) }
    }
}

impl LeafValues {
    /// Value `i`: of a row, numbered from the first one here, or of all those in lists. `None` for
    /// a null.
    pub(super) fn value(&self, kind: Kind, i: usize) -> Found {
        if is_null(self.nulls.as_ref(), i) {
            return Ok(None);
        }
        let Some(keys) = &self.keys else { return scalar(&self.values, kind, i).map(Some) };
        match keys.get(i) {
            Some(&key) if !self.values.is_null(key) => scalar(&self.values, kind, key).map(Some),
            // Without values, all rows are null.
            _ => Ok(None),
        }
    }

    /// Which values the list in a row has, if the column is one of lists; `None` for a null. Some
    /// writers know no empty lists, so these count as nulls.
    pub(super) fn list(&self, row: usize) -> Option<Range<usize>> {
        let (nulls, lists) = self.lists.as_ref()?;
        let list = range(lists, row);
        (!is_null(nulls.as_ref(), row) && !list.is_empty()).then_some(list)
    }
}

/// The elements of lists, of all rows; `None` if they are no lists.
fn elements(lists: &ArrayRef) -> Option<&ArrayRef> {
    match lists.data_type() {
        DataType::List(_) => Some(lists.as_list::<i32>().values()),
        DataType::LargeList(_) => Some(lists.as_list::<i64>().values()),
        DataType::FixedSizeList(..) => Some(lists.as_fixed_size_list().values()),
        _ => None,
    }
}

/// Which of the elements the list in a row has.
fn range(lists: &ArrayRef, row: usize) -> Range<usize> {
    match lists.data_type() {
        DataType::List(_) => {
            let ends = lists.as_list::<i32>().value_offsets();
            ends[row] as usize..ends[row + 1] as usize
        }
        DataType::LargeList(_) => {
            let ends = lists.as_list::<i64>().value_offsets();
            ends[row] as usize..ends[row + 1] as usize
        }
        _ => {
            let len = lists.as_fixed_size_list().value_length() as usize;
            row * len..(row + 1) * len
        }
    }
}

fn is_null(nulls: Option<&NullBuffer>, i: usize) -> bool {
    nulls.is_some_and(|nulls| nulls.is_null(i))
}

/// What an array holds at `row`, where it is not null.
fn scalar(array: &ArrayRef, kind: Kind, row: usize) -> Result<Value, String> {
    let float = |number: f64| match number as f32 {
        found if found.is_finite() => Ok(Value::F32(found)),
        _ => Err(format!("{number} where a finite f32 should be")),
    };
    let integer = |number: i64| match kind {
        Kind::Class(classes) => number_as_class(number, classes),
        // Of 8 or 16 bits.
        Kind::F32 | Kind::F32List(_) => Ok(Value::F32(number as f32)),
        Kind::I64 | Kind::Text => Ok(Value::I64(number)),
    };
    let text = |text: &str| Ok(Value::Text(text.to_owned()));
    match array.data_type() {
        DataType::Float16 => float(array.as_primitive::<Float16Type>().value(row).into()),
        DataType::Float32 => float(array.as_primitive::<Float32Type>().value(row).into()),
        DataType::Float64 => float(array.as_primitive::<Float64Type>().value(row)),
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
            let found = i64::try_from(number);
            found.map_err(|_| format!("{number} where an i64 should be")).and_then(integer)
        }
        DataType::Utf8 => text(array.as_string::<i32>().value(row)),
        DataType::LargeUtf8 => text(array.as_string::<i64>().value(row)),
        DataType::Utf8View => text(array.as_string_view().value(row)),
        DataType::Binary => {
            let bytes = array.as_binary::<i32>().value(row);
            str::from_utf8(bytes).map_err(|_| "bytes that are not UTF-8".into()).and_then(text)
        }
        other => Err(format!("{other}, which is not supported")),
    }
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
        DataType::Binary | DataType::LargeUtf8 | DataType::Utf8 | DataType::Utf8View => true,
        _ => false,
    }
}
