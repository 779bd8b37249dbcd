//! Rows of tables as tensors.

use std::cell::RefCell;
use std::ops::Range;

use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor, Var};
use elasticdl_tables::{BatchRows, Table};

use crate::metrics::UserError;

/// The rows of a batch's [ids](super::CandleModel::ids), as tensors on the model's device. The
/// gradients of these tensors become those of the rows.
///
/// `table` is an index in [`CandleModel::tables`](super::CandleModel::tables), and a position one
/// that [`Ids::push`](crate::Ids::push) returned.
///
/// # Panics
/// All methods, if there is no such table or position.
#[derive(Debug)]
pub struct Rows<'a> {
    rows: &'a BatchRows,
    tables: &'a [Table],
    device: &'a Device,
    taken: RefCell<Vec<Taken>>,
}

impl<'a> Rows<'a> {
    pub(super) fn new(rows: &'a BatchRows, tables: &'a [Table], device: &'a Device) -> Self {
        Self { rows, tables, device, taken: RefCell::default() }
    }

    /// The rows at these positions, `[positions, dim]`, in their order.
    ///
    /// # Errors
    /// An error of candle.
    pub fn look_up(&self, table: usize, positions: &[usize]) -> Result<Tensor, UserError> {
        self.sum(table, positions.chunks(1))
    }

    /// The sum of the rows of each bag of positions, `[bags, dim]`; zeros for an empty one.
    ///
    /// # Errors
    /// An error of candle.
    pub fn sum<B: AsRef<[usize]>>(
        &self,
        table: usize,
        bags: impl IntoIterator<Item = B>,
    ) -> Result<Tensor, UserError> {
        self.pool(table, bags, |_| 1.0)
    }

    /// The mean of the rows of each bag of positions, `[bags, dim]`; zeros for an empty one.
    ///
    /// # Errors
    /// An error of candle.
    pub fn mean<B: AsRef<[usize]>>(
        &self,
        table: usize,
        bags: impl IntoIterator<Item = B>,
    ) -> Result<Tensor, UserError> {
        self.pool(table, bags, |len| 1.0 / len.max(1) as f32)
    }

    fn pool<B: AsRef<[usize]>>(
        &self,
        table: usize,
        bags: impl IntoIterator<Item = B>,
        factor: impl Fn(usize) -> f32,
    ) -> Result<Tensor, UserError> {
        let dim = self.tables[table].dim;
        let (mut positions, mut found, mut values) = (Vec::new(), Vec::new(), Vec::new());
        for bag in bags {
            let (bag, start) = (bag.as_ref(), positions.len());
            let factor = factor(bag.len());
            positions.extend_from_slice(bag);
            found.push((start..positions.len(), factor));
            values.resize(found.len() * dim, 0.0);
            let to = &mut values[(found.len() - 1) * dim..];
            self.rows.add_rows(table, bag, factor, to);
        }
        let pooled = Tensor::from_vec(values, (found.len(), dim), self.device)?;
        let pooled = Var::from_tensor(&pooled)?;
        let tensor = pooled.as_tensor().clone();
        self.taken.borrow_mut().push(Taken { pooled, table, positions, bags: found });
        Ok(tensor)
    }

    /// The tensors that were taken.
    pub(super) fn into_taken(self) -> Vec<Taken> {
        self.taken.into_inner()
    }
}

/// A tensor that was made of rows.
#[derive(Debug)]
pub(super) struct Taken {
    /// `[bags, dim]`.
    pooled: Var,
    pub(super) table: usize,
    positions: Vec<usize>,
    /// Places in `positions`, and what their rows were multiplied by.
    bags: Vec<(Range<usize>, f32)>,
}

impl Taken {
    /// Adds the gradient to those of the rows. Returns whether there is one.
    pub(super) fn add_gradient(
        &self,
        found: &GradStore,
        rows: &mut BatchRows,
    ) -> Result<bool, UserError> {
        let Some(gradient) = found.get(&self.pooled) else { return Ok(false) };
        let dim = gradient.dim(1)?;
        let gradient = gradient.flatten_all()?.to_vec1::<f32>()?;
        for ((bag, factor), gradient) in self.bags.iter().zip(gradient.chunks_exact(dim)) {
            rows.add_gradient(self.table, &self.positions[bag.clone()], *factor, gradient);
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use candle_nn::{Init, VarBuilder};
    use elasticdl_data::Predictions;
    use elasticdl_data::readers::FixedRecords;
    use elasticdl_tables::{Ids, Initialization};

    use super::*;
    use crate::buckets::Gradients;
    use crate::candle::{Candle, CandleModel};
    use crate::metrics::{Loss, Metrics};
    use crate::model::Model;
    use crate::table_model::TableModel;

    /// A score of an item for a user, who has seen other items: the sum of these is a vector of the
    /// user, the mean of tags one of the item.
    struct Items {
        uses_tags: bool,
    }

    #[derive(Default)]
    struct Batch {
        records: Vec<Vec<u8>>,
        items: Vec<usize>,
        seen: Vec<[usize; 2]>,
        tags: Vec<Vec<usize>>,
        taken: Option<[Tensor; 3]>,
    }

    impl CandleModel for Items {
        type Reader = FixedRecords;
        type Network = Tensor;
        type Batch = Batch;

        fn reader(&self) -> FixedRecords {
            FixedRecords::new(5)
        }

        fn build(&self, parameters: VarBuilder<'static>) -> Result<Tensor, UserError> {
            Ok(parameters.get_with_hints((), "scale", Init::Const(1.5))?)
        }

        fn feed(&mut self, records: Vec<Vec<u8>>) -> Result<Batch, UserError> {
            Ok(Batch { records, ..Batch::default() })
        }

        fn tables(&self) -> Vec<Table> {
            let zeros = Initialization::Zeros;
            vec![Table::new("item", 2), Table::new("tag", 2).initialized(zeros)]
        }

        fn ids(&mut self, batch: &mut Batch, ids: &mut Ids) -> Result<(), UserError> {
            for record in &batch.records {
                ids.begin_record();
                let mut push = |table, at: usize| ids.push(table, record[at].into());
                batch.items.push(push(0, 0));
                batch.seen.push([push(0, 1), push(0, 2)]);
                // Every second record has no tags.
                let tags = if batch.tags.len().is_multiple_of(2) { &[3, 4][..] } else { &[] };
                batch.tags.push(tags.iter().map(|&at| push(1, at)).collect());
            }
            Ok(())
        }

        fn take_rows(&mut self, batch: &mut Batch, rows: &Rows<'_>) -> Result<(), UserError> {
            let items = rows.look_up(0, &batch.items)?;
            let (seen, tags) = (rows.sum(0, &batch.seen)?, rows.mean(1, &batch.tags)?);
            batch.taken = Some([items, seen, tags]);
            Ok(())
        }

        fn loss(&mut self, scale: &Tensor, batch: Batch) -> Result<Loss<Tensor>, UserError> {
            let [items, seen, tags] = batch.taken.expect("rows were taken");
            let tags = if self.uses_tags { tags } else { tags.detach() };
            let scores = ((items + tags)? * seen)?.sum(1)?.broadcast_mul(scale)?;
            Ok(Loss::Sum((scores - 1.0)?.sqr()?.sum_all()?))
        }

        fn predict(&mut self, _: &Tensor, batch: Batch) -> Result<Predictions, UserError> {
            let [items, ..] = batch.taken.expect("rows were taken");
            Ok(Predictions::new().f32("first", items.narrow(1, 0, 1)?.flatten_all()?.to_vec1()?))
        }
    }

    fn records() -> Vec<Vec<u8>> {
        [[1, 2, 3, 7, 8], [2, 2, 4, 7, 9], [3, 1, 1, 8, 8]].map(Vec::from).to_vec()
    }

    /// The batch, and its rows, no two of which are equal.
    fn begin(model: &mut Candle<Items>) -> (Batch, BatchRows) {
        let mut ids = Ids::new(2);
        let mut batch = model.feed(records()).unwrap();
        model.ids(&mut batch, &mut ids).unwrap();
        let mut rows = BatchRows::initial(&TableModel::tables(model), 1, &ids);
        for table in 0..2 {
            for (i, value) in rows.values_mut(table).iter_mut().enumerate() {
                *value = 0.3 + 0.1 * (i as f32 + 3.0 * table as f32).sin();
            }
        }
        (batch, rows)
    }

    /// The loss when an element of a row has changed by `change`, and the gradients of all rows.
    fn loss(table: usize, element: usize, change: f32) -> (f64, [Vec<f32>; 2]) {
        let mut model = Candle::new(Items { uses_tags: true });
        let (batch, mut rows) = begin(&mut model);
        rows.values_mut(table)[element] += change;
        let mut sum = [0.0];
        let mut gradients = Gradients::new(&mut sum, 3).with_rows(Some(&mut rows));
        let loss = model.gradients(&[1.5], batch, &mut gradients).unwrap().sum_over(3);
        (loss, [0, 1].map(|table| rows.of(table).1.to_vec()))
    }

    #[test]
    fn gradients_of_rows_equal_finite_differences() {
        let (_, gradients) = loss(0, 0, 0.0);
        assert_eq!(gradients.each_ref().map(Vec::len), [8, 4], "items 1 to 4, tags 7 and 8");
        for (table, gradients) in gradients.iter().enumerate() {
            for (element, &gradient) in gradients.iter().enumerate() {
                let slope = (loss(table, element, 0.01).0 - loss(table, element, -0.01).0) / 0.02;
                let message = format!("table {table}, element {element}: {gradient} and {slope}");
                assert!((slope - f64::from(gradient)).abs() < 5e-4, "{message}");
                assert!(gradient.abs() > 2e-3, "{message}");
            }
        }
    }

    #[test]
    fn an_evaluation_and_a_prediction_have_the_rows() {
        let mut model = Candle::new(Items { uses_tags: true });
        let (batch, mut rows) = begin(&mut model);
        let mut sums = BTreeMap::new();
        let mut metrics = Metrics::new(&mut sums, 3).with_rows(Some(&mut rows));
        model.evaluate(&[1.5], batch, &mut metrics).unwrap();
        assert_eq!(sums["loss"], loss(0, 0, 0.0).0);
        let (batch, mut rows) = begin(&mut model);
        let predicted = model.predict_with_rows(&[1.5], batch, &rows).unwrap();
        // Items 1, 2 and 3 are the first, second and third row.
        let first = rows.of(0).0.chunks(2).map(|row| row[0]).take(3).collect();
        assert_eq!(predicted, Predictions::new().f32("first", first));
    }

    #[test]
    fn a_table_without_gradients_is_named() {
        let mut model = Candle::new(Items { uses_tags: false });
        let (batch, mut rows) = begin(&mut model);
        let mut sum = [0.0];
        let mut gradients = Gradients::new(&mut sum, 3).with_rows(Some(&mut rows));
        let error = model.gradients(&[1.5], batch, &mut gradients).unwrap_err().to_string();
        assert!(error.contains("no gradient for 1 parameters (table \"tag\")"), "{error}");
    }
}
