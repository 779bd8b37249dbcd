//! Rows of embedding tables, between Python's tensors and the trainer.

use elasticdl::external::{Driver, WorkerError};
use elasticdl::{Ids, Initialization, RowOptimizer, Table};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::borrowed::Borrowed;

/// An embedding table, as attributes of an object of Python.
#[derive(Debug, FromPyObject)]
pub(crate) struct TableOfProgram {
    name: String,
    dim: usize,
    /// Bound of the initial values.
    bound: f32,
    /// Kind of the optimizer, and its settings.
    rule: (String, Vec<f32>),
    /// Touches with which a row comes into being.
    admitted_after: u32,
    /// Steps without a touch after which a row is removed.
    evicted_after: Option<u32>,
    /// Norm of its values below which a row is removed.
    evicted_below: Option<f32>,
}

/// Ids of a micro-batch's records in one table: `ids[starts[r]..starts[r + 1]]` are those of record
/// `r`, and the last record has the rest. Both are arrays of i64; an id is its bits.
#[derive(Debug, FromPyObject)]
pub(crate) struct Feature<'py>(usize, Bound<'py, PyAny>, Bound<'py, PyAny>);

/// Why ids are not announced.
#[derive(Debug)]
pub(crate) struct NotAnnounced(PyErr);

impl TableOfProgram {
    pub(crate) fn table(self) -> PyResult<Table> {
        let Self { name, dim, bound, rule: (kind, settings), .. } = self;
        let optimizer = match (kind.as_str(), &settings[..]) {
            ("sgd", &[learning_rate]) => RowOptimizer::sgd(learning_rate),
            ("adagrad", &[learning_rate, epsilon]) => {
                RowOptimizer::Adagrad { learning_rate, epsilon }
            }
            ("adam", &[learning_rate, beta1, beta2, epsilon]) => {
                RowOptimizer::LazyAdam { learning_rate, beta1, beta2, epsilon }
            }
            _ => return Err(PyValueError::new_err(format!("{kind} is no optimizer of rows"))),
        };
        let initialization = match bound {
            0.0 => Initialization::Zeros,
            bound => Initialization::Uniform { bound },
        };
        let table = Table::new(name, dim).initialized(initialization).optimized(optimizer);
        let mut table = table.admitted_after(self.admitted_after);
        table.eviction.age = self.evicted_after;
        table.eviction.norm = self.evicted_below;
        Ok(table)
    }
}

/// Adds the ids of a micro-batch.
pub(crate) fn add(features: Vec<Feature<'_>>, ids: &mut Ids) -> PyResult<()> {
    let mut borrowed = Vec::new();
    for Feature(table, ids, starts) in features {
        borrowed.push((table, Borrowed::new(&ids)?, Borrowed::new(&starts)?));
    }
    let mut columns = Vec::new();
    for (table, ids, starts) in &mut borrowed {
        columns.push((*table, &*ids.integers()?, &*starts.integers()?));
    }
    let records = columns.first().map_or(0, |(_, _, starts)| starts.len());
    for record in 0..records {
        ids.begin_record();
        for (table, of_table, starts) in &columns {
            let start = starts.get(record).copied().unwrap_or(-1);
            let end = starts.get(record + 1).map_or(Ok(of_table.len()), |&end| end.try_into());
            let range = usize::try_from(start).ok().zip(end.ok());
            let of_record = range.and_then(|(start, end)| of_table.get(start..end));
            let Some(of_record) = of_record else {
                return Err(PyValueError::new_err(format!(
                    "the ids of record {record} of the micro-batch begin at {start}, and there \
                     are {} ids; offsets grow from 0 to at most the number of ids",
                    of_table.len()
                )));
            };
            for id in of_record {
                ids.push(*table, id.cast_unsigned());
            }
        }
    }
    Ok(())
}

/// Writes the positions of the rows of ids to `to`. Returns the first id that was not announced.
pub(crate) fn find(
    driver: &Driver,
    table: usize,
    ids: &Bound<'_, PyAny>,
    to: &Bound<'_, PyAny>,
) -> PyResult<Option<i64>> {
    let (mut ids, mut to) = (Borrowed::new(ids)?, Borrowed::new(to)?);
    for (id, to) in ids.integers()?.iter().zip(to.integers()?) {
        match driver.ids().position(table, id.cast_unsigned()) {
            Some(position) => *to = position as i64,
            None => return Ok(Some(*id)),
        }
    }
    Ok(None)
}

/// Copies the rows of a table to `to`, `[ids, dim]`.
pub(crate) fn read(driver: &mut Driver, table: usize, to: &Bound<'_, PyAny>) -> PyResult<()> {
    let mut to = Borrowed::new(to)?;
    let rows = driver.rows().ok_or_else(no_rows)?;
    let (values, to) = (rows.of(table).0, to.floats()?);
    if values.len() != to.len() {
        let error = format!("{} numbers for rows of {}", to.len(), values.len());
        return Err(PyValueError::new_err(error));
    }
    to.copy_from_slice(values);
    Ok(())
}

/// Adds `scale` times `gradient`, `[ids, dim]`, to that of the rows of a table.
pub(crate) fn add_gradient(
    driver: &mut Driver,
    table: usize,
    gradient: &Bound<'_, PyAny>,
    scale: f32,
) -> PyResult<()> {
    let mut gradient = Borrowed::new(gradient)?;
    let rows = driver.rows().ok_or_else(no_rows)?;
    let (sums, gradient) = (rows.of(table).1, gradient.floats()?);
    if sums.len() != gradient.len() {
        let error = format!("a gradient of {} numbers for rows of {}", gradient.len(), sums.len());
        return Err(PyValueError::new_err(error));
    }
    sums.iter_mut().zip(gradient).for_each(|(sum, g)| *sum += scale * *g);
    Ok(())
}

fn no_rows() -> PyErr {
    PyRuntimeError::new_err("there are no rows now")
}

impl From<PyErr> for NotAnnounced {
    fn from(error: PyErr) -> Self {
        Self(error)
    }
}

impl From<WorkerError> for NotAnnounced {
    fn from(error: WorkerError) -> Self {
        Self(PyRuntimeError::new_err(error.to_string()))
    }
}

impl From<NotAnnounced> for PyErr {
    fn from(NotAnnounced(error): NotAnnounced) -> Self {
        error
    }
}
