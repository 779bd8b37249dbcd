//! What a table is: its dimension, its initial rows, its optimizer.

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::optimizer::RowOptimizer;

/// An embedding table: rows of `dim` numbers by id.
///
/// A row comes into being when a step's gradient touches it for the first time, or as often as the
/// table's [`admission`](Self::admitted_after) says. Until then it reads as its initial value,
/// which depends on the job's seed, the table and the id alone.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Table {
    /// Name, unique in the job.
    pub name: String,
    /// Numbers per row.
    pub dim: usize,
    /// How rows begin.
    pub initialization: Initialization,
    /// How rows change.
    pub optimizer: RowOptimizer,
    /// Touches with which a row comes into being, at least 1.
    #[serde(default = "at_once")]
    pub admission: u32,
    /// When rows are removed.
    #[serde(default)]
    pub eviction: Eviction,
}

/// When rows of a table are removed. Each row is checked once in as many steps as there are shards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Eviction {
    /// After so many steps without a touch; `None`: whenever that was.
    pub age: Option<u32>,
    /// If the L2 norm of its values is below this; `None`: whatever it is.
    pub norm: Option<f32>,
}

/// Initial values of rows.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Initialization {
    /// Independent, uniform in `-bound..bound`.
    Uniform {
        /// The largest magnitude.
        bound: f32,
    },
    /// Zeros.
    Zeros,
}

impl Table {
    /// A table of rows of `dim` numbers, uniform in ±0.05 at first and changed by SGD with a
    /// learning rate of 0.01.
    pub fn new(name: impl Into<String>, dim: usize) -> Self {
        Self {
            name: name.into(),
            dim,
            initialization: Initialization::Uniform { bound: 0.05 },
            optimizer: RowOptimizer::sgd(0.01),
            admission: at_once(),
            eviction: Eviction::default(),
        }
    }

    /// Sets how rows begin.
    #[must_use]
    pub fn initialized(self, initialization: Initialization) -> Self {
        Self { initialization, ..self }
    }

    /// Sets how rows change.
    #[must_use]
    pub fn optimized(self, optimizer: RowOptimizer) -> Self {
        Self { optimizer, ..self }
    }

    /// Lets a row come into being with the step that brings it to so many touches. Until then it
    /// takes 16 bytes, reads as its initial value, and its gradients have no effect.
    #[must_use]
    pub fn admitted_after(self, touches: u32) -> Self {
        Self { admission: touches, ..self }
    }

    /// Removes rows that no record has touched for so many steps. A touch lets a removed row begin
    /// anew.
    #[must_use]
    pub fn evicted_after(self, steps: u32) -> Self {
        Self { eviction: Eviction { age: Some(steps), ..self.eviction }, ..self }
    }

    /// Removes rows the L2 norm of whose values is less than this.
    #[must_use]
    pub fn evicted_below(self, norm: f32) -> Self {
        Self { eviction: Eviction { norm: Some(norm), ..self.eviction }, ..self }
    }

    /// Numbers that are stored per row: its values and its optimizer state.
    pub(crate) fn stored(&self) -> usize {
        self.dim + self.optimizer.slots(self.dim)
    }

    /// Writes the initial row of `id`, `[dim]`. `table`: the table's index in the job.
    pub(crate) fn initialize(&self, seed: u64, table: u32, id: u64, row: &mut [f32]) {
        match self.initialization {
            Initialization::Uniform { bound } => {
                let mut key = [0; 12];
                key[..4].copy_from_slice(&table.to_le_bytes());
                key[4..].copy_from_slice(&id.to_le_bytes());
                let mut state = xxh3_64_with_seed(&key, seed);
                for value in row {
                    // The upper 24 bits are a uniform number of 0..1 that an f32 holds exactly.
                    let uniform = (split_mix(&mut state) >> 40) as f32 / (1 << 24) as f32;
                    *value = bound * (2.0 * uniform - 1.0);
                }
            }
            Initialization::Zeros => row.fill(0.0),
        }
    }
}

/// What differs between the tables of a state and those of a model that is to go on from it.
/// Settings of optimizers may differ, their kinds may not. `None`: nothing.
pub fn difference(had: &[Table], has: &[Table]) -> Option<String> {
    if had.len() != has.len() {
        return Some(format!("it has {} tables, and this model has {}", had.len(), has.len()));
    }
    had.iter().zip(has).find_map(|(had, has)| {
        let name = &had.name;
        if *name != has.name {
            return Some(format!("it has table {name:?} where this model has {:?}", has.name));
        }
        if had.dim != has.dim {
            let (had, has) = (had.dim, has.dim);
            return Some(format!("table {name:?} has rows of {had} numbers, and here of {has}"));
        }
        if had.initialization != has.initialization {
            let (had, has) = (had.initialization, has.initialization);
            return Some(format!("rows of table {name:?} begin as {had:?}, and here as {has:?}"));
        }
        if had.optimizer.name() != has.optimizer.name() {
            let (had, has) = (had.optimizer.name(), has.optimizer.name());
            return Some(format!("the optimizer of table {name:?} is {had}, and here {has}"));
        }
        None
    })
}

/// Checks the tables of a job.
///
/// # Errors
/// What is wrong with which table.
pub fn check(tables: &[Table]) -> Result<(), String> {
    if tables.len() > TABLES_MAX {
        return Err(format!("{} tables; at most {TABLES_MAX} are possible", tables.len()));
    }
    for (i, table) in tables.iter().enumerate() {
        let Table { name, dim, initialization, optimizer, admission, eviction } = table;
        let fail = |what: String| Err(format!("table {name:?}: {what}"));
        if name.is_empty() {
            return fail("a table needs a name".into());
        }
        if tables[..i].iter().any(|other| other.name == *name) {
            return fail("another table has this name".into());
        }
        if !(1..=DIM_MAX).contains(dim) {
            return fail(format!("rows of {dim} numbers; 1 to {DIM_MAX} are possible"));
        }
        if let Initialization::Uniform { bound } = initialization
            && !(bound.is_finite() && *bound >= 0.0)
        {
            return fail(format!("initial values of ±{bound}; a bound is finite and not negative"));
        }
        optimizer.check().or_else(fail)?;
        if *admission == 0 {
            return fail("rows that are admitted after 0 touches; 1 or more are possible".into());
        }
        if eviction.age == Some(0) {
            return fail("rows that are evicted after 0 steps; 1 or more are possible".into());
        }
        if let Some(norm) = eviction.norm
            && !(norm.is_finite() && norm >= 0.0)
        {
            return fail(format!("rows that are evicted below a norm of {norm}; it is 0 or more"));
        }
    }
    Ok(())
}

fn at_once() -> u32 {
    1
}

/// The next number of the generator of this state. Steele, Lea, Flood, OOPSLA 2014.
fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

const TABLES_MAX: usize = 4096;
const DIM_MAX: usize = 65_536;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_initial_row_depends_on_seed_table_and_id_alone() {
        let table = Table::new("user", 3);
        let row = |seed, table_index, id| {
            let mut row = [0.0; 3];
            table.initialize(seed, table_index, id, &mut row);
            row
        };
        assert_eq!(row(1, 2, 3), row(1, 2, 3));
        let others = [row(2, 2, 3), row(1, 3, 3), row(1, 2, 4)];
        assert!(others.iter().all(|other| *other != row(1, 2, 3)), "{others:?}");
        let many = (0..10_000).flat_map(|id| row(1, 0, id)).collect::<Vec<_>>();
        assert!(many.iter().all(|value| value.abs() <= 0.05));
        let mean = many.iter().sum::<f32>() / many.len() as f32;
        let square = many.iter().map(|value| value * value).sum::<f32>() / many.len() as f32;
        assert!(mean.abs() < 0.001, "{mean}");
        assert!((square / (0.05 * 0.05 / 3.0) - 1.0).abs() < 0.05, "{square}");
    }

    #[test]
    fn tables_that_cannot_be_are_refused_by_name() {
        let error = |table: Table| check(&[Table::new("first", 1), table]).unwrap_err();
        assert!(error(Table::new("first", 4)).contains("another table has this name"));
        assert!(error(Table::new("", 4)).contains("needs a name"));
        assert!(error(Table::new("second", 0)).contains("rows of 0 numbers"));
        let bound = Initialization::Uniform { bound: f32::NAN };
        assert!(error(Table::new("second", 4).initialized(bound)).contains("±NaN"));
        let optimizer = RowOptimizer::adagrad(-1.0);
        assert!(error(Table::new("second", 4).optimized(optimizer)).contains("\"second\""));
        assert!(error(Table::new("second", 4).admitted_after(0)).contains("after 0 touches"));
        assert!(error(Table::new("second", 4).evicted_after(0)).contains("after 0 steps"));
        assert!(error(Table::new("second", 4).evicted_below(-1.0)).contains("norm of -1;"));
        assert_eq!(check(&[Table::new("first", 1), Table::new("second", 16)]), Ok(()));
    }
}
