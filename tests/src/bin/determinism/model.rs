//! A model whose sums are never exact: an embedding of a number, and a layer with dropout; also
//! with rows of tables.

use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use elasticdl::readers::FixedRecords;
use elasticdl::{
    AdamW, BatchRows, Gradients, HalfModel, Ids, Loss, Model, NamedTensor, Optimizer, RowOptimizer,
    Table, TableModel, UpdateRule, UserError,
};
use elasticdl_tests::{HalfParameters, counting_reader, numbers};

/// Learns a function of the record's number.
#[derive(Debug, Parser)]
pub(crate) struct Mlp {
    /// Records in the data set.
    #[arg(long)]
    records: u64,
    /// Time to compute the gradient of a record, in addition to the computation.
    #[arg(long)]
    micros_per_record: u64,
    /// Parameters, if more than the model uses.
    #[arg(long)]
    parameters: usize,
    /// Take no additional time once this file exists.
    #[arg(long)]
    hurry_when: PathBuf,
    /// Add rows of two tables to the embedding.
    #[arg(long)]
    tables: bool,
    #[arg(skip)]
    half: HalfParameters,
}

/// A record, and the places of its rows in both tables.
pub(crate) struct Example {
    record: u64,
    rows: [usize; 2],
}

impl Mlp {
    /// Sleeps for as long as `records` are to take, and longer in one worker if that is asked for.
    fn delay(&self, records: usize) {
        let variable = |name| std::env::var(name).ok();
        let slow = variable("DETERMINISM_SLOW").and_then(|factor| factor.parse().ok());
        let is_slow = variable("ELASTICDL_LAUNCH").is_some_and(|launch| launch == "2");
        let factor = slow.filter(|_| is_slow).unwrap_or(1);
        if self.micros_per_record > 0 && !self.hurry_when.exists() {
            std::thread::sleep(Duration::from_micros(
                self.micros_per_record * records as u64 * factor,
            ));
        }
    }

    /// Adds the gradient of one record's loss. Returns the loss. `dropout`: seed of the units that
    /// are dropped.
    fn learn(
        parameters: &[f32],
        Example { record, rows: places }: &Example,
        dropout: u64,
        mut rows: Option<&mut BatchRows>,
        gradient: &mut [f32],
    ) -> f64 {
        let row = mix(*record) as usize % ROWS * WIDTH;
        let mut input: [f32; WIDTH] = std::array::from_fn(|i| parameters[row + i]);
        if let Some(rows) = &rows {
            places.iter().enumerate().for_each(|(t, at)| rows.add_rows(t, &[*at], 1.0, &mut input));
        }
        let layer = &parameters[ROWS * WIDTH..][..UNITS * WIDTH + UNITS];
        let (weights, outputs) = layer.split_at(UNITS * WIDTH);
        let is_kept = |unit: usize| !mix(dropout ^ unit as u64).is_multiple_of(10);
        let mut hidden = [0.0; UNITS];
        for (unit, hidden) in hidden.iter_mut().enumerate().filter(|(unit, _)| is_kept(*unit)) {
            let weights = &weights[unit * WIDTH..][..WIDTH];
            let sum: f32 = input.iter().zip(weights).map(|(x, w)| x * w).sum();
            *hidden = sum.tanh();
        }
        let prediction: f32 = hidden.iter().zip(outputs).map(|(h, w)| h * w).sum();
        let error = prediction - (*record as f32 * 0.37).sin();
        let mut of_input = [0.0; WIDTH];
        for unit in 0..UNITS {
            let slope = error * outputs[unit] * (1.0 - hidden[unit] * hidden[unit]);
            gradient[ROWS * WIDTH + UNITS * WIDTH + unit] += error * hidden[unit];
            if !is_kept(unit) {
                continue;
            }
            for i in 0..WIDTH {
                let weight = unit * WIDTH + i;
                gradient[ROWS * WIDTH + weight] += slope * input[i];
                of_input[i] += slope * weights[weight];
            }
        }
        gradient[row..row + WIDTH].iter_mut().zip(of_input).for_each(|(sum, g)| *sum += g);
        if let Some(rows) = &mut rows {
            for (table, at) in places.iter().enumerate() {
                rows.add_gradient(table, &[*at], 1.0, &of_input);
            }
        }
        f64::from(error * error) / 2.0
    }
}

impl Model for Mlp {
    type Reader = FixedRecords;
    type Batch = Vec<Example>;

    fn as_table_model(&mut self) -> Option<&mut dyn TableModel<Batch = Vec<Example>>> {
        self.tables.then_some(self as _)
    }

    fn as_half_model(&mut self) -> Option<&mut dyn HalfModel> {
        Some(self.half.of(USED.max(self.parameters)))
    }

    fn reader(&self) -> FixedRecords {
        counting_reader()
    }

    fn tensors(&self) -> Vec<NamedTensor> {
        vec![NamedTensor::new("parameters", [USED.max(self.parameters)])]
    }

    fn initialize(&mut self, seed: u64, parameters: &mut [f32]) -> Result<(), UserError> {
        parameters.fill(0.0);
        for (i, parameter) in parameters[..USED].iter_mut().enumerate() {
            *parameter = (mix(seed ^ mix(i as u64)) % 20_001) as f32 / 40_000.0 - 0.25;
        }
        Ok(())
    }

    fn feed(&mut self, records: Vec<Vec<u8>>) -> Result<Vec<Example>, UserError> {
        let examples = numbers(records)?.into_iter();
        Ok(examples.map(|record| Example { record, rows: [0; 2] }).collect())
    }

    fn gradients(
        &mut self,
        parameters: &[f32],
        batch: Vec<Example>,
        gradients: &mut Gradients<'_>,
    ) -> Result<Loss, UserError> {
        self.delay(batch.len());
        let parameters = &self.half.or_given(parameters);
        let mut loss = 0.0;
        for (index, example) in batch.iter().enumerate() {
            let dropout = gradients.record_key(index);
            let (rows, sum) = match self.tables {
                true => {
                    let (rows, sum) = gradients.rows_and_sum();
                    (Some(rows), sum)
                }
                false => (None, gradients.sum()),
            };
            loss += Self::learn(parameters, example, dropout, rows, sum);
        }
        Ok(Loss::Sum(loss))
    }

    fn optimizer(&self) -> impl UpdateRule {
        Optimizer::from(AdamW::new(3e-3)).clip_norm(0.001)
    }
}

impl TableModel for Mlp {
    type Batch = Vec<Example>;

    fn tables(&self) -> Vec<Table> {
        let table = |name| Table::new(name, WIDTH);
        vec![
            table("many").optimized(RowOptimizer::adagrad(0.01)),
            table("few").optimized(RowOptimizer::lazy_adam(0.003)),
        ]
    }

    /// Rows that few records touch, and rows that most ranks touch in each step.
    fn ids(&mut self, batch: &mut Vec<Example>, ids: &mut Ids) -> Result<(), UserError> {
        for example in batch {
            ids.begin_record();
            let of_record = [mix(example.record) % 500, example.record % 7];
            example.rows = [0, 1].map(|table| ids.push(table, of_record[table]));
        }
        Ok(())
    }
}

/// Mixes the bits of a number (SplitMix64).
fn mix(number: u64) -> u64 {
    let mut x = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Rows of the embedding.
const ROWS: usize = 1024;
/// Width of a row.
const WIDTH: usize = 16;
/// Units of the layer.
const UNITS: usize = 128;
/// Parameters that the model uses.
const USED: usize = ROWS * WIDTH + UNITS * WIDTH + UNITS;
