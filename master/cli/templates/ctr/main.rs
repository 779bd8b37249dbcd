//! A model that predicts clicks, with embedding tables that elasticdl divides over the workers.
//!
//! ```sh
//! elasticdl train --local --num-workers 3 --training-data clicks:0..1000000 \
//!     --global-batch-size 1024 -- target/release/ctr
//! ```
//!
//! `--training-data train.txt` reads files in Criteo's format in place of generated clicks, and
//! `--model deepfm` after the program's name trains another model.

mod clicks;
mod data;
mod network;

use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use clicks::{CATEGORIES, Click, Clicks};
use data::Data;
use elasticdl::{
    Adam, BatchRows, Gradients, Ids, Loss, Metrics, Model, NamedTensor, Predictions, RowOptimizer,
    Table, TableModel, UpdateRule, UserError,
};
use network::{DIM, HIDDEN, INPUTS, Network};

fn main() -> ExitCode {
    elasticdl::run(ClickModel::parse())
}

/// Predicts clicks from 13 numbers and 26 categories
#[derive(Debug, Parser)]
struct ClickModel {
    /// Which model
    #[arg(long, value_enum, default_value_t = Kind::WideAndDeep)]
    model: Kind,
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
    #[arg(long, default_value_t = 0.02)]
    table_learning_rate: f32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// A factorization machine besides (Guo et al., 2017): products of all pairs of embeddings
    Deepfm,
    /// A weight per category, and a network over the categories' embeddings and the numbers (Cheng
    /// et al., 2016)
    WideAndDeep,
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

    /// The label, the probability of a click, and the best possible one of generated clicks.
    fn predict_with_rows(
        &mut self,
        parameters: &[f32],
        batch: Batch,
        rows: &BatchRows,
    ) -> Result<Predictions, UserError> {
        let mut network = Network::new(parameters, self.model == Kind::Deepfm);
        let records = || batch.clicks.iter().zip(batch.rows.chunks_exact(CATEGORIES));
        let logits = records().map(|(click, at)| network.forward(&click.dense, at, rows));
        let predicted = logits.map(network::probability).collect();
        let labels = batch.clicks.iter().map(|click| i64::from(click.label > 0.0)).collect();
        let predictions = Predictions::new().i64("label", labels).f32("probability", predicted);
        let best = batch.clicks.iter().map(|click| click.logit.map(network::probability));
        Ok(match best.collect::<Option<Vec<f32>>>() {
            Some(best) => predictions.f32("best_probability", best),
            None => predictions,
        })
    }
}

impl Model for ClickModel {
    type Reader = Data;
    type Batch = Batch;

    fn reader(&self) -> Data {
        Data::new(Clicks { seed: self.data_seed, ids: self.ids })
    }

    fn as_table_model(&mut self) -> Option<&mut dyn TableModel<Batch = Batch>> {
        Some(self)
    }

    fn tensors(&self) -> Vec<NamedTensor> {
        // A state of one model is no state of the other, though their tensors have equal shapes.
        let named = |name: &str, shape: &[usize]| match self.model {
            Kind::Deepfm => NamedTensor::new(format!("deepfm.{name}"), shape),
            Kind::WideAndDeep => NamedTensor::new(name, shape),
        };
        vec![
            named("hidden.weight", &[HIDDEN, INPUTS]),
            named("hidden.bias", &[HIDDEN]),
            named("output.weight", &[HIDDEN]),
            named("output.bias", &[]),
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
        let mut network = Network::new(parameters, self.model == Kind::Deepfm);
        let mut loss = 0.0;
        for (click, rows) in batch.clicks.iter().zip(batch.rows.chunks_exact(CATEGORIES)) {
            let logit = network.forward(&click.dense, rows, tables);
            loss += network::loss(logit, click.label);
            let slope = network::probability(logit) - click.label;
            network.backward(slope, rows, tables, sum);
        }
        Ok(Loss::Sum(loss))
    }

    /// The loss, and what the best possible predictions of generated clicks would have: that of the
    /// generating logit.
    fn evaluate(
        &mut self,
        parameters: &[f32],
        batch: Batch,
        metrics: &mut Metrics<'_>,
    ) -> Result<(), UserError> {
        let mut network = Network::new(parameters, self.model == Kind::Deepfm);
        let (mut loss, mut best) = (0.0, Some(0.0));
        for (click, rows) in batch.clicks.iter().zip(batch.rows.chunks_exact(CATEGORIES)) {
            loss += network::loss(network.forward(&click.dense, rows, metrics.rows()), click.label);
            let of_best = click.logit.map(|logit| network::loss(logit, click.label));
            best = best.zip(of_best).map(|(sum, loss)| sum + loss);
        }
        metrics.add_sum("loss", loss);
        if let Some(best) = best {
            metrics.add_sum("loss_of_best", best);
        }
        Ok(())
    }

    fn optimizer(&self) -> impl UpdateRule {
        Adam::new(self.learning_rate)
    }
}

#[cfg(test)]
#[path = "../../../../examples/src/ctr_tests.rs"]
mod tests;
