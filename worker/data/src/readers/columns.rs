//! The columns that a program requests of a table, independent of the file format.

use super::files::printable;
use super::row::{Row, Value};
use crate::reader::{Purpose, ReadOptions};

/// The requested columns, in the order of the request.
#[derive(Clone, Debug, Default)]
pub(super) struct Columns {
    all: Vec<Column>,
    /// Whether rows with a null in a column without a substitute are left out.
    skips_nulls: bool,
    options: ReadOptions,
}

/// A requested value of each row.
#[derive(Clone, Debug)]
pub(super) struct Column {
    pub(super) source: Source,
    pub(super) kind: Kind,
    /// The classes of a column of texts that name them.
    names: Option<Vec<String>>,
    /// Substitute for a null; for several numbers, of each.
    fill: Option<Value>,
    is_label: bool,
}

/// The classes of a column: their number, or their names in order.
#[derive(Clone, Debug)]
pub struct Classes(Named);

#[derive(Clone, Debug)]
enum Named {
    Names(Vec<String>),
    Numbers(usize),
}

impl From<usize> for Classes {
    fn from(count: usize) -> Self {
        Self(Named::Numbers(count))
    }
}

impl From<Vec<String>> for Classes {
    fn from(names: Vec<String>) -> Self {
        Self(Named::Names(names))
    }
}

impl<const N: usize> From<[&str; N]> for Classes {
    fn from(names: [&str; N]) -> Self {
        Self::from(&names[..])
    }
}

impl From<&[&str]> for Classes {
    fn from(names: &[&str]) -> Self {
        Self(Named::Names(names.iter().map(|&name| name.to_owned()).collect()))
    }
}

/// Where a value comes from.
#[derive(Clone, Debug)]
pub(super) enum Source {
    One(String),
    Several(Vec<String>),
    /// All columns that are not requested by name, this many.
    Others(usize),
}

/// Type of a value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kind {
    /// An integer below this.
    Class(usize),
    F32,
    /// A list of this many numbers.
    F32List(usize),
    I64,
    Text,
}

/// What a table holds in place of a requested value: `None` for a null, or why it is invalid.
pub(super) type Found = Result<Option<Value>, String>;

impl Columns {
    pub(super) fn add(&mut self, source: Source, kind: Kind) {
        self.all.push(Column { source, kind, names: None, fill: None, is_label: false });
    }

    pub(super) fn add_one(&mut self, name: &str, kind: Kind) {
        assert!(kind != Kind::Class(0), "column {name:?}: there is at least one class");
        self.add(Source::One(name.to_owned()), kind);
    }

    pub(super) fn add_class(&mut self, name: &str, classes: Classes) {
        let names = match classes.0 {
            Named::Numbers(count) => return self.add_one(name, Kind::Class(count)),
            Named::Names(names) => names,
        };
        assert!(!names.is_empty(), "column {name:?}: there is at least one class");
        for (i, class) in names.iter().enumerate() {
            assert!(!names[..i].contains(class), "column {name:?}: {class:?} appears twice");
        }
        self.add_one(name, Kind::Text);
        self.all.last_mut().expect("it was just added").names = Some(names);
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Column> {
        self.all.iter()
    }

    /// Sets the substitute for nulls of the column that was added last.
    pub(super) fn fill(&mut self, value: Value) {
        let column = self.all.last_mut().expect("fill() follows the column that it is for");
        let value = match (column.kind, value) {
            (_, Value::Text(text)) if column.names.is_some() => {
                let class = column.class(Value::Text(text));
                let class = class.unwrap_or_else(|reason| panic!("fill(): {reason}"));
                class.expect("fill() is not empty")
            }
            (Kind::Class(classes), Value::I64(class)) => {
                number_as_class(class, classes).unwrap_or_else(|reason| panic!("fill(): {reason}"))
            }
            (Kind::F32 | Kind::F32List(_), Value::F32(number)) => Value::F32(number),
            (Kind::I64, Value::I64(number)) => Value::I64(number),
            (Kind::Text, Value::Text(text)) => Value::Text(text),
            (kind, value) => panic!("fill(): {value:?} is not of the column's type, {kind:?}"),
        };
        column.fill = Some(value);
    }

    /// Marks the column that was added last as the label.
    pub(super) fn label(&mut self) {
        self.all.last_mut().expect("label() follows the column that it is for").is_label = true;
    }

    pub(super) fn skip_nulls(&mut self) {
        self.skips_nulls = true;
    }

    pub(super) fn configure(&mut self, options: ReadOptions) {
        self.options = options;
    }

    pub(super) fn bad_records_max(&self) -> u64 {
        self.options.bad_records_max
    }

    /// Whether rows may be left out, so that each has to be looked at before rows can be numbered.
    pub(super) fn skips(&self) -> bool {
        self.skips_nulls || self.options.bad_records_max > 0
    }

    /// Whether a null in this column is an error.
    #[cfg(any(feature = "arrow", feature = "parquet"))]
    pub(super) fn refuses_nulls(&self, column: &Column) -> bool {
        column.fill.is_none() && !self.skips() && !self.may_lack(column)
    }

    /// Whether the table may lack this column: predictions need no label.
    pub(super) fn may_lack(&self, column: &Column) -> bool {
        column.is_label && self.options.purpose == Purpose::Predict
    }

    /// The substitute for a null: `Ok(None)` where the row is left out. `null`: describes it.
    pub(super) fn substitute(
        &self,
        column: &Column,
        null: impl FnOnce() -> String,
    ) -> Result<Option<Value>, String> {
        if let Some(fill) = &column.fill {
            return Ok(Some(fill.clone()));
        }
        if self.may_lack(column) {
            return Ok(Some(column.zero()));
        }
        if self.skips_nulls { Ok(None) } else { Err(null()) }
    }

    /// The row of these values, in the order of the columns; `None` if it is left out for a null.
    /// `null`: describes a null in a column.
    pub(super) fn row(
        &self,
        values: impl Iterator<Item = Found>,
        null: impl Fn(&Column) -> String,
    ) -> Result<Option<Row>, String> {
        let mut row = Vec::with_capacity(self.all.len());
        for (column, value) in self.all.iter().zip(values) {
            let value = match value? {
                Some(value) => column.class(value)?,
                None => None,
            };
            let value = match (value, column.kind) {
                (Some(value), _) => Some(value),
                (None, Kind::F32List(len)) => match self.substitute(column, || null(column))? {
                    Some(Value::F32(fill)) => Some(Value::F32s(vec![fill; len])),
                    other => other,
                },
                (None, _) => self.substitute(column, || null(column))?,
            };
            let Some(value) = value else { return Ok(None) };
            row.push(value);
        }
        Ok(Some(Row::new(row)))
    }

    /// The numbers of several columns or of a list, `None` for a null, as one value; `Ok(None)` if
    /// the row is left out. `null`: describes a null at an index.
    pub(super) fn numbers(
        &self,
        column: &Column,
        numbers: impl Iterator<Item = Result<Option<f32>, String>>,
        null: impl Fn(usize) -> String,
    ) -> Found {
        let mut all = Vec::new();
        for (i, number) in numbers.enumerate() {
            let number = match number? {
                Some(number) => number,
                None => match self.substitute(column, || null(i))? {
                    Some(Value::F32(fill)) => fill,
                    Some(_) => 0.0,
                    None => return Ok(None),
                },
            };
            all.push(number);
        }
        Ok(Some(Value::F32s(all)))
    }

    /// The names of the columns that are requested by name.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.all.iter().flat_map(|column| {
            match &column.source {
                Source::One(name) => std::slice::from_ref(name),
                Source::Several(names) => names,
                Source::Others(_) => &[],
            }
            .iter()
            .map(String::as_str)
        })
    }

    /// For each requested value, the numbers of its columns in a table that has columns of these
    /// names; none for a label that the table may lack. `by_name`: the columns that a requested
    /// name stands for. `has`: begins the list of columns in errors.
    pub(super) fn find(
        &self,
        table: &[String],
        has: &str,
        by_name: impl Fn(&str) -> Vec<usize>,
    ) -> Result<Vec<Vec<usize>>, String> {
        let list = || printable(&table.join(", "));
        let one = |name: &str| match by_name(name)[..] {
            [field] => Ok(field),
            [] => Err(format!("no column {name:?}: {has} {}", list())),
            _ => Err(format!("more than one column {name:?}: {has} {}", list())),
        };
        let requested: Vec<usize> = self.names().flat_map(&by_name).collect();
        let fields = |column: &Column| match &column.source {
            Source::One(name) if self.may_lack(column) && by_name(name).is_empty() => Ok(vec![]),
            Source::One(name) => Ok(vec![one(name)?]),
            Source::Several(names) => names.iter().map(|name| one(name)).collect(),
            Source::Others(count) => {
                let is_other = |field: &usize| !requested.contains(field);
                let others: Vec<usize> = (0..table.len()).filter(is_other).collect();
                if others.len() == *count {
                    return Ok(others);
                }
                let found = others.len();
                Err(format!("{found} other columns where {count} should be: {has} {}", list()))
            }
        };
        self.all.iter().map(fields).collect()
    }
}

impl Column {
    /// The class that a text names, where texts name classes; `None` for an empty text.
    fn class(&self, value: Value) -> Found {
        let (Some(names), Value::Text(text)) = (&self.names, &value) else {
            return Ok(Some(value));
        };
        let text = text.trim();
        match names.iter().position(|name| name == text) {
            Some(class) => Ok(Some(Value::Class(class))),
            None if text.is_empty() => Ok(None),
            None => {
                let name = if let Source::One(name) = &self.source { name } else { "" };
                let (text, names) = (printable(text), printable(&names.join(", ")));
                Err(format!("column {name:?} is \"{text}\" where one of {names} should be"))
            }
        }
    }

    /// The value of a label that the data lacks.
    fn zero(&self) -> Value {
        match (&self.source, self.kind) {
            _ if self.names.is_some() => Value::Class(0),
            (Source::Several(names), _) => Value::F32s(vec![0.0; names.len()]),
            (Source::Others(count), _) => Value::F32s(vec![0.0; *count]),
            (Source::One(_), Kind::Class(_)) => Value::Class(0),
            (Source::One(_), Kind::F32) => Value::F32(0.0),
            (Source::One(_), Kind::F32List(len)) => Value::F32s(vec![0.0; len]),
            (Source::One(_), Kind::I64) => Value::I64(0),
            (Source::One(_), Kind::Text) => Value::Text(String::new()),
        }
    }
}

impl Kind {
    /// What a value of this type is, for errors.
    pub(super) fn wanted(self) -> String {
        match self {
            Self::Class(classes) => format!("an integer from 0 to {}", classes - 1),
            Self::F32 => "a finite number".into(),
            Self::F32List(len) => format!("a list of {len} finite numbers"),
            Self::I64 => "an integer".into(),
            Self::Text => "a text".into(),
        }
    }
}

/// The class that an integer is.
pub(super) fn number_as_class(number: i64, classes: usize) -> Result<Value, String> {
    usize::try_from(number)
        .ok()
        .filter(|class| *class < classes)
        .map(Value::Class)
        .ok_or_else(|| format!("{number} where {} should be", Kind::Class(classes).wanted()))
}

/// The methods of a reader of tables that request columns, which it has in this field.
macro_rules! column_methods {
    ($($columns:ident).+) => {
        /// Adds a column of finite numbers.
        pub fn f32(mut self, name: &str) -> Self {
            self.$($columns).+.add_one(name, $crate::readers::columns::Kind::F32);
            self
        }

        /// Adds several columns of finite numbers as one value, which
        /// [`Row::f32s`](crate::readers::Row::f32s) returns.
        pub fn f32s<N: Into<String>>(mut self, names: impl IntoIterator<Item = N>) -> Self {
            use $crate::readers::columns::{Kind, Source};
            let names = names.into_iter().map(Into::into).collect();
            self.$($columns).+.add(Source::Several(names), Kind::F32);
            self
        }

        /// Adds all columns that are not requested by name, in the order of the file, as one value
        /// of `count` finite numbers. A file with another number of such columns is refused.
        pub fn other_f32s(mut self, count: usize) -> Self {
            use $crate::readers::columns::{Kind, Source};
            self.$($columns).+.add(Source::Others(count), Kind::F32);
            self
        }

        /// Adds a column of integers.
        pub fn i64(mut self, name: &str) -> Self {
            self.$($columns).+.add_one(name, $crate::readers::columns::Kind::I64);
            self
        }

        /// Adds a column of classes: integers from 0 to `classes` less one, or texts, which
        /// `classes` lists: `class("kind", ["cat", "dog"])`. Others are refused. False and true are
        /// 0 and 1, and 1.0 is 1, as pandas writes a column with nulls.
        ///
        /// # Panics
        /// If there is no class, or a name appears twice.
        pub fn class(mut self, name: &str, classes: impl Into<$crate::readers::Classes>) -> Self {
            self.$($columns).+.add_class(name, classes.into());
            self
        }

        /// Adds a column of text.
        pub fn text(mut self, name: &str) -> Self {
            self.$($columns).+.add_one(name, $crate::readers::columns::Kind::Text);
            self
        }

        /// Takes `value` in place of a null in the column that was added last; in several columns
        /// or a list, in place of each null. Without it, a null is an error.
        ///
        /// # Panics
        /// If there is no column yet, or `value` is not of its type. Classes are `i64`, or texts
        /// where they have names.
        pub fn fill(mut self, value: impl Into<$crate::readers::Value>) -> Self {
            self.$($columns).+.fill(value.into());
            self
        }

        /// Marks the column that was added last as the label. `elasticdl predict` also reads data
        /// without it, and with nulls in it: the value is then 0, or an empty text.
        ///
        /// # Panics
        /// If there is no column yet.
        pub fn label(mut self) -> Self {
            self.$($columns).+.label();
            self
        }

        /// Leaves out rows with a null in a column without [`fill`](Self::fill). The job's summary
        /// counts them. Without it, such a null is an error.
        pub fn skip_nulls(mut self) -> Self {
            self.$($columns).+.skip_nulls();
            self
        }
    };
}

/// The method of a reader of tables that requests lists.
macro_rules! list_method {
    ($($columns:ident).+) => {
        /// Adds a column of lists of `len` finite numbers, which
        /// [`Row::f32s`](crate::readers::Row::f32s) returns. Lists of another length are refused.
        pub fn f32_list(mut self, name: &str, len: usize) -> Self {
            self.$($columns).+.add_one(name, $crate::readers::columns::Kind::F32List(len));
            self
        }
    };
}

pub(super) use {column_methods, list_method};
