//! A model that predicts clicks, with embedding tables that elasticdl divides over the workers.
//!
//! ```sh
//! elasticdl train --local --num-workers 3 --training-data clicks:0..1000000 \
//!     --global-batch-size 1024 -- target/release/ctr
//! ```

mod clicks;
mod network;

use std::process::ExitCode;

use clap::Parser;
use clicks::{CATEGORIES, Click, Clicks};
use elasticdl::{
    Adam, Gradients, Ids, Loss, Metrics, Model, NamedTensor, RowOptimizer, Table, TableModel,
    UpdateRule, UserError,
};
use network::{DIM, HIDDEN, INPUTS, Network};

fn main() -> ExitCode {
    elasticdl::run(ClickModel::parse())
}

/// Wide and deep (Cheng et al., 2016): a weight per category, and a network over the categories'
/// embeddings and the numbers
#[derive(Debug, Parser)]
struct ClickModel {
    /// Seed of the generated data
    #[arg(long, default_value_t = 1)]
    data_seed: u64,
    /// Ids of the largest of the 26 categories
    #[arg(long, default_value_t = 100_000)]
    ids: u64,
    /// Learning rate of the network
    #[arg(long, default_value_t = 0.001)]
    learning_rate: f64,
    /// Learning rate of the tables
    #[arg(long, default_value_t = 0.05)]
    table_learning_rate: f32,
}

/// Records, and where their rows are.
#[derive(Clone)]
struct Batch {
    clicks: Vec<Click>,
    /// `[records, CATEGORIES]`: positions in the table `wide`, and in `deep`, where they are the
    /// same.
    rows: Vec<usize>,
}

const WIDE: usize = 0;
const DEEP: usize = 1;

impl TableModel for ClickModel {
    type Batch = Batch;

    /// One row of each table for each id of each category.
    fn tables(&self) -> Vec<Table> {
        let adagrad = RowOptimizer::adagrad(self.table_learning_rate);
        vec![Table::new("wide", 1).optimized(adagrad), Table::new("deep", DIM).optimized(adagrad)]
    }

    fn ids(&mut self, batch: &mut Batch, ids: &mut Ids) -> Result<(), UserError> {
        for click in &batch.clicks {
            ids.begin_record();
            for (column, id) in click.ids.iter().enumerate() {
                let key = ((column as u64) << 56) | id;
                ids.push(WIDE, key);
                batch.rows.push(ids.push(DEEP, key));
            }
        }
        Ok(())
    }
}

impl Model for ClickModel {
    type Reader = Clicks;
    type Batch = Batch;

    fn reader(&self) -> Clicks {
        Clicks { seed: self.data_seed, ids: self.ids }
    }

    fn as_table_model(&mut self) -> Option<&mut dyn TableModel<Batch = Batch>> {
        Some(self)
    }

    fn tensors(&self) -> Vec<NamedTensor> {
        vec![
            NamedTensor::new("hidden.weight", [HIDDEN, INPUTS]),
            NamedTensor::new("hidden.bias", [HIDDEN]),
            NamedTensor::new("output.weight", [HIDDEN]),
            NamedTensor::new("output.bias", []),
        ]
    }

    fn initialize(&mut self, seed: u64, parameters: &mut [f32]) -> Result<(), UserError> {
        network::initialize(seed, parameters);
        Ok(())
    }

    fn feed(&mut self, clicks: Vec<Click>) -> Result<Batch, UserError> {
        Ok(Batch { clicks, rows: Vec::new() })
    }

    fn gradients(
        &mut self,
        parameters: &[f32],
        batch: Batch,
        gradients: &mut Gradients<'_>,
    ) -> Result<Loss, UserError> {
        let (tables, sum) = gradients.rows_and_sum();
        let mut network = Network::new(parameters);
        let mut loss = 0.0;
        for (click, rows) in batch.clicks.iter().zip(batch.rows.chunks_exact(CATEGORIES)) {
            let logit = network.forward(&click.dense, rows, tables);
            loss += network::loss(logit, click.label);
            let slope = network::probability(logit) - click.label;
            network.backward(slope, rows, tables, sum);
        }
        Ok(Loss::Sum(loss))
    }

    /// The loss, and what the best possible predictions would have: that of the generating logit.
    fn evaluate(
        &mut self,
        parameters: &[f32],
        batch: Batch,
        metrics: &mut Metrics<'_>,
    ) -> Result<(), UserError> {
        let mut network = Network::new(parameters);
        let (mut loss, mut best) = (0.0, 0.0);
        for (click, rows) in batch.clicks.iter().zip(batch.rows.chunks_exact(CATEGORIES)) {
            loss += network::loss(network.forward(&click.dense, rows, metrics.rows()), click.label);
            best += network::loss(click.logit, click.label);
        }
        metrics.add_sum("loss", loss);
        metrics.add_sum("loss_of_best", best);
        Ok(())
    }

    fn optimizer(&self) -> impl UpdateRule {
        Adam::new(self.learning_rate)
    }
}

#[cfg(test)]
mod tests {
    use elasticdl::{BatchRows, Reader as _};

    use super::*;

    /// The model, with a batch of 6 records, its initial parameters and its rows.
    fn batch() -> (ClickModel, Batch, Vec<f32>, BatchRows) {
        let mut model = ClickModel::parse_from(["ctr", "--ids", "1000"]);
        let mut reader = model.reader();
        let data = reader.describe("clicks:0..6").unwrap();
        let clicks = reader.read(&data.files[0], 0..6).unwrap();
        let mut batch = model.feed(clicks).unwrap();
        let mut ids = Ids::new(2);
        model.ids(&mut batch, &mut ids).unwrap();
        let rows = BatchRows::initial(&model.tables(), 5, &ids);
        let mut parameters = vec![0.0; NamedTensor::count(&model.tensors())];
        model.initialize(3, &mut parameters).unwrap();
        (model, batch, parameters, rows)
    }

    #[test]
    fn gradients_equal_finite_differences() {
        let (mut model, batch, parameters, mut rows) = batch();
        let (mut sum, copy) = (vec![0.0; parameters.len()], batch.clone());
        let mut gradients = Gradients::new(&mut sum, 6).with_rows(Some(&mut rows));
        model.gradients(&parameters, copy, &mut gradients).unwrap();
        let mut loss = |parameters: &[f32], row: Option<(usize, usize, f32)>| {
            let mut rows = rows.clone();
            if let Some((table, at, change)) = row {
                rows.values_mut(table)[at] += change;
            }
            let mut discarded = vec![0.0; parameters.len()];
            let mut gradients = Gradients::new(&mut discarded, 6).with_rows(Some(&mut rows));
            model.gradients(parameters, batch.clone(), &mut gradients).unwrap().sum_over(6)
        };
        let step = 1.0 / 512.0;
        let check = |what: &str, gradient: f32, slope: f64| {
            let error = (slope - f64::from(gradient)).abs();
            assert!(error < 2e-3 * (1.0 + slope.abs()), "{what}: {slope}, {gradient}");
        };
        for at in [0, 40, HIDDEN * INPUTS + 3, HIDDEN * INPUTS + HIDDEN + 1, parameters.len() - 1] {
            let moved = |by: f32| {
                let mut moved = parameters.clone();
                moved[at] += by;
                moved
            };
            let rise = loss(&moved(step), None) - loss(&moved(-step), None);
            check(&format!("parameter {at}"), sum[at], rise / f64::from(2.0 * step));
        }
        let gradients = [WIDE, DEEP].map(|table| rows.clone().of(table).1.to_vec());
        for (table, at) in [(WIDE, 0), (WIDE, 30), (DEEP, 5), (DEEP, 700)] {
            let at_row = |by| Some((table, at, by));
            let rise = loss(&parameters, at_row(step)) - loss(&parameters, at_row(-step));
            check(&format!("{table} {at}"), gradients[table][at], rise / f64::from(2.0 * step));
        }
    }

    #[test]
    fn records_depend_on_their_numbers_alone() {
        let mut reader = Clicks { seed: 1, ids: 10_000_000 };
        let mut read = |source: &str| {
            let data = reader.describe(source).unwrap();
            reader.read(&data.files[0], 0..data.files[0].records).unwrap()
        };
        let (all, last) = (read("clicks:0..2000"), read("clicks:1990..2000"));
        let key = |click: &Click| (click.ids, click.label.to_bits());
        assert!(all[1990..].iter().zip(&last).all(|(a, b)| key(a) == key(b)));
        let clicks = all.iter().filter(|click| click.label > 0.0).count();
        assert!((400..1000).contains(&clicks), "{clicks} clicks");
        assert!(all.iter().any(|click| click.ids[CATEGORIES - 1] > 1_000_000));
        for wrong in ["clicks:5..5", "clicks:7", "rows.csv"] {
            assert!(reader.describe(wrong).unwrap_err().to_string().contains("clicks:FROM..TO"));
        }
    }
}
