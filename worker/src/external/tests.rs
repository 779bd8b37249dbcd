//! Whole trainings of a worker that is alone, driven by a program that counts records, and one step
//! of two workers.

use std::collections::{BTreeMap, VecDeque};
use std::num::{NonZeroU64, NonZeroUsize};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use elasticdl_collective::testing::LocalRank;
use elasticdl_data::{Predictions, Purpose};
use elasticdl_tables::{BatchRows, Initialization, RowOptimizer, Table};

use super::calls::{Call, Change, Reply, Sums};
use super::lent::{Lent, LentMut};
use super::memory::Taken;
use super::model::{Batch, CallChannel, ExternalModel};
use super::*;
use crate::buckets::{self, Gradients, RecordKeys, SummedBuckets};
use crate::metrics::{Loss, Metrics};
use crate::model::{Model, NamedTensor};

const RECORDS: usize = 100;
const EPOCHS: u32 = 3;

/// A program whose parameter `i` counts record `i`, and which keeps up to `in_flight` micro-batches
/// drawn. Returns the final counts, the number of discarded micro-batches, and how it ended.
fn train(in_flight: usize, fail_at: Option<u64>) -> (Vec<f32>, usize, Ended) {
    let shape = Shape {
        records: RECORDS as u64,
        tensors: vec![NamedTensor::new("counts", [RECORDS])],
        state: RECORDS + 3,
        bucket_len: Some(RECORDS / 3),
        ..Shape::default()
    };
    let mut driver = Driver::new(alone(), shape, Memory::Trainer, 5);
    let mut queue = VecDeque::new();
    let (mut last, mut discarded) = (Vec::new(), 0);
    let ended = loop {
        let event = driver.wait(Duration::from_secs(20), None).expect("the trainer answers");
        match event {
            Event::Ended(ended) => break ended,
            Event::Evaluate { .. }
            | Event::AppliedIds { .. }
            | Event::EpochComplete
            | Event::Gathered { .. }
            | Event::Ids { .. }
            | Event::Predict { .. } => panic!("it trains, and has no tables: {event:?}"),
            Event::Initialize { seed } => {
                assert_eq!(seed, 7);
                driver.parameters().unwrap().fill(1.0);
                driver.done();
            }
            Event::Update { step, records, loads } => {
                // Discarded micro-batches do not count.
                assert_eq!(driver.watch().progress().tally["records"], records as f64);
                let sum = driver.sum().unwrap().to_vec();
                let parameters = driver.parameters().unwrap();
                for (parameter, sum) in parameters.iter_mut().zip(&sum) {
                    *parameter += sum;
                }
                last = parameters.to_vec();
                let state = driver.state().unwrap();
                state[0] += 1.0;
                assert_eq!(state[0], (step + 1) as f32, "loads: {loads}");
                driver.done();
            }
            Event::Gradient { .. } => {
                // A discarded micro-batch leaves the request open.
                while driver.is_requested() {
                    while queue.len() < in_flight
                        && let NextBatch::Batch(batch) = driver.next_batch(None)
                    {
                        queue.push_back(batch);
                    }
                    let batch: Vec<Record> = queue.pop_front().expect("one is in flight");
                    assert!(batch.len() <= 5);
                    if batch.iter().any(|record| Some(record.number) == fail_at) {
                        driver.fail("record refused".into(), false, Duration::from_secs(20));
                        break;
                    }
                    if let Some(Counted { records, before, is_overlapped, .. }) = driver.counted() {
                        assert_eq!((records, is_overlapped), (batch.len(), false), "alone");
                        let gradient = driver.gradient().unwrap();
                        if before == 0 {
                            gradient.fill(0.0);
                        }
                        batch.iter().for_each(|record| gradient[record.number as usize] += 1.0);
                        let absorbed: f32 = gradient.iter().sum();
                        assert_eq!(absorbed, (before + records as u64) as f32);
                        driver.complete_from(RECORDS / 2);
                        assert_eq!(driver.gradient().unwrap().len(), RECORDS);
                    }
                    driver.add("records".into(), batch.len() as f64);
                    discarded += usize::from(!driver.deliver(0.25).unwrap());
                }
            }
        }
    };
    (last, discarded, ended)
}

#[test]
fn ids_are_announced_for_all_micro_batches_of_a_step_before_the_first_is_computed() {
    let table = Table::new("counts", 1)
        .initialized(Initialization::Zeros)
        .optimized(RowOptimizer::sgd(1.0));
    let shape = Shape {
        records: RECORDS as u64,
        tensors: vec![NamedTensor::new("bias", [1])],
        tables: vec![table],
        state: 0,
        ..Shape::default()
    };
    // Two steps of one micro-batch more than fits, in flight.
    let mut driver = Driver::new(alone(), shape, Memory::Trainer, 5);
    let (mut announced, mut drawn) = (VecDeque::new(), VecDeque::new());
    // Rows, by a count of their records; and those of the step.
    let (mut rows, mut of_step) = ([0.0_f32; RECORDS / 2], [0.0_f32; RECORDS / 2]);
    let ended = loop {
        match driver.wait(Duration::from_secs(20), None).expect("the trainer answers") {
            Event::Ended(ended) => break ended,
            Event::Ids { .. } => {
                while driver.announced() == Some(false) {
                    while drawn.len() < 6
                        && let NextBatch::Batch(batch) = driver.next_batch(None)
                    {
                        drawn.push_back(batch);
                    }
                    let batch: Vec<Record> = drawn.pop_front().expect("one is in flight");
                    let counts = driver.announce::<WorkerError>(|ids| {
                        for record in &batch {
                            ids.begin_record();
                            ids.push(0, record.number / 2);
                        }
                        Ok(())
                    });
                    announced.extend(counts.unwrap().then_some(batch));
                }
                driver.look_up();
            }
            Event::Gradient { .. } => {
                while driver.is_requested() {
                    let batch = announced.pop_front().expect("one is announced");
                    let Counted { records, before, .. } = driver.counted().expect("it counts");
                    assert_eq!(records, batch.len());
                    if before == 0 {
                        driver.gradient().unwrap().fill(0.0);
                    }
                    for record in &batch {
                        let id = record.number / 2;
                        let position = driver.ids().position(0, id).unwrap();
                        let found = driver.rows().unwrap();
                        let (row, expected) = (found.of(0).0[position], rows[id as usize]);
                        assert!((row - expected).abs() < 1e-6, "{id}: {row}, {expected}");
                        found.add_gradient(0, &[position], -1.0, &[1.0]);
                        of_step[id as usize] += 1.0;
                    }
                    assert!(driver.deliver(0.25).unwrap());
                }
            }
            Event::Initialize { .. } => driver.done(),
            Event::Update { records, .. } => {
                let change = std::mem::replace(&mut of_step, [0.0; RECORDS / 2]);
                rows.iter_mut().zip(change).for_each(|(row, n)| *row += n / records as f32);
                driver.done();
            }
            event => panic!("it only trains: {event:?}"),
        }
    };
    assert_eq!(ended, Ended::Complete);
    // 16 records in a step, and 4 in the last one of an epoch.
    let steps = EPOCHS as f32 * RECORDS.div_ceil(16) as f32;
    assert!((rows.iter().sum::<f32>() - steps).abs() < 1e-4, "{rows:?}");
}

fn alone() -> Worker {
    let options = AloneOptions {
        epochs: EPOCHS,
        max_steps: None,
        global_batch: NonZeroU64::new(16).unwrap(),
        seed: 7,
        shuffles: true,
    };
    Worker::alone(options).unwrap()
}

#[test]
fn every_record_counts_once_per_epoch_whatever_is_drawn_ahead() {
    for in_flight in [1, 2, 8] {
        let (counts, discarded, ended) = train(in_flight, None);
        assert_eq!(ended, Ended::Complete);
        assert_eq!(counts, [1.0 + EPOCHS as f32; RECORDS], "{in_flight} in flight");
        assert!(in_flight > 1 || discarded == 0, "{discarded} discarded");
    }
}

#[test]
fn an_error_of_the_program_ends_the_worker_with_its_text() {
    let (_, _, ended) = train(1, Some(42));
    let Ended::Failed(error) = ended else { panic!("{ended:?}") };
    assert!(error.contains("record refused"), "{error}");
}

#[test]
fn parts_of_a_gradient_are_summed_while_the_program_computes_the_rest() {
    let all: Vec<Vec<f32>> = thread::scope(|scope| {
        let ranks = LocalRank::group(2, 1).into_iter();
        let ranks: Vec<_> = ranks.map(|ring| scope.spawn(move || overlapped(ring))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert_eq!(all, vec![[vec![4.0; 6], vec![2.0; 4]].concat(); 2]);
}

/// One rank's part of a step whose gradient has ten elements: twos, then ones. Returns the sums.
fn overlapped(mut ring: LocalRank) -> Vec<f32> {
    let ((calls, from_trainer), (to_trainer, replies)) = (channel(), channel());
    let program = thread::spawn(move || {
        let Ok(Call::Gradient { mut gradient, before, is_overlapped, .. }) = from_trainer.recv()
        else {
            panic!("expected the call of a gradient")
        };
        assert_eq!((before, is_overlapped), (3, true));
        gradient.slice().unwrap()[6..].fill(1.0);
        gradient.truncate(6);
        to_trainer.send(Ok(Reply::CompleteFrom(6))).unwrap();
        gradient.slice().unwrap().fill(2.0);
        let discarded = Duration::from_secs(3);
        let sums = Sums { loss: 0.5, discarded, ..Sums::default() };
        to_trainer.send(Ok(Reply::Gradient(sums))).unwrap();
    });
    let shape = Shape {
        records: 10,
        tensors: vec![NamedTensor::new("sums", [10])],
        state: 0,
        bucket_len: Some(4),
        ..Shape::default()
    };
    let channel = CallChannel::new(calls, replies);
    let mut model = ExternalModel::new(shape, Taken::default(), channel, Arc::default());
    model.step_records = 3;
    let (mut gradient, mut sums) = (vec![f32::NAN; 10], vec![f32::NAN; 10]);
    let batch = (2, RecordKeys::default());
    let (loss, summed) =
        buckets::overlap(&mut ring, &mut gradient, &mut sums, batch, 4, |gradients| {
            let records = [0, 1].map(|number| Record { epoch: 0, number }).to_vec();
            model.gradients(&[], Batch { purpose: Purpose::Train, records }, gradients).unwrap()
        });
    program.join().unwrap();
    assert_eq!((loss, summed.unwrap(), model.step_records), (Loss::Sum(0.5), 1, 5));
    // The time per record is that of what counts.
    assert_eq!([model.take_discarded().as_secs(), model.take_discarded().as_secs()], [3, 0]);
    buckets::sum_rest(&mut ring, &[], &gradient, &mut sums, SummedBuckets { len: 4, summed: 1 })
        .unwrap();
    sums
}

#[test]
fn what_is_computed_again_leaves_nothing_behind() {
    let ((calls, from_trainer), (to_trainer, replies)) = (channel(), channel());
    let program = thread::spawn(move || {
        let mut seen = Vec::new();
        while let Ok(Call::Gradient { before, comparison, .. }) = from_trainer.recv() {
            seen.push((before, comparison));
            let (discarded, tally) = (Duration::from_secs(3), vec![("weight".to_owned(), 1.0)]);
            let sums = Sums { discarded, tally, ..Sums::default() };
            to_trainer.send(Ok(Reply::Gradient(sums))).unwrap();
        }
        seen
    });
    let shape = Shape { tensors: vec![NamedTensor::new("pair", [2])], ..Shape::default() };
    let channel = CallChannel::new(calls, replies);
    let mut model = ExternalModel::new(shape, Taken::default(), channel, Arc::default());
    let records = vec![Record { epoch: 0, number: 7 }; 5];
    let batch = Batch { purpose: Purpose::Train, records };
    let expected = [
        (0, Comparison::Own),
        (0, Comparison::Again),
        (0, Comparison::Again),
        (5, Comparison::None),
    ];
    for (_, comparison) in expected {
        model.compare(comparison);
        let is_again = comparison == Comparison::Again;
        if is_again {
            model.begin_gradient();
        }
        let mut sum = [0.0; 2];
        model.gradients(&[], batch.clone(), &mut Gradients::new(&mut sum, 5)).unwrap();
        if !is_again {
            assert_eq!(model.take_discarded(), Duration::from_secs(3), "{comparison:?}");
            assert_eq!(model.take_tally(), BTreeMap::from([("weight".to_owned(), 1.0)]));
        }
    }
    drop(model);
    assert_eq!(program.join().unwrap(), expected);
}

#[test]
fn a_program_loads_the_state_again_that_follows_one_that_was_given_up() {
    let ((calls, from_trainer), (to_trainer, replies)) = (channel(), channel());
    let program = thread::spawn(move || {
        let mut loaded = Vec::new();
        while let Ok(call) = from_trainer.recv() {
            let (loads, reply) = match call {
                Call::Gradient { loads, .. } => (loads, Reply::Gradient(Sums::default())),
                Call::Update(Change { loads, .. }) => (loads, Reply::Done),
                other => panic!("{other:?}"),
            };
            loaded.push(loads);
            to_trainer.send(Ok(reply)).unwrap();
        }
        loaded
    });
    let shape = Shape { tensors: vec![NamedTensor::new("pair", [2])], ..Shape::default() };
    let channel = CallChannel::new(calls, replies);
    let mut model = ExternalModel::new(shape, Taken::default(), channel, Arc::default());
    let step = |model: &mut ExternalModel, updates: bool| {
        let (mut sum, mut parameters) = ([0.0; 2], [0.0; 2]);
        let records = vec![Record { epoch: 0, number: 7 }];
        let batch = Batch { purpose: Purpose::Train, records };
        model.gradients(&[], batch, &mut Gradients::new(&mut sum, 1)).unwrap();
        let lent = (Lent::new(&sum), LentMut::new(&mut parameters), LentMut::new(&mut []));
        let change = Change::new((1, 1), lent.0, lent.1, lent.2);
        if updates {
            model.channel().change(change).unwrap();
        }
    };
    (0..2).for_each(|_| step(&mut model, true));
    model.forget();
    // What it has computed from is given up before it is updated, too.
    step(&mut model, false);
    model.forget();
    (0..2).for_each(|_| step(&mut model, true));
    drop(model);
    let first = [true, true, false, false];
    assert_eq!(program.join().unwrap(), [&first[..], &[true], &first].concat());
}

#[test]
fn metrics_are_means_over_the_records_of_all_calls() {
    let ((calls, from_trainer), (to_trainer, replies)) = (channel(), channel());
    let program = thread::spawn(move || {
        let mut lens = Vec::new();
        while let Ok(Call::Evaluate { records, .. } | Call::Predict { records, .. }) =
            from_trainer.recv()
        {
            lens.push(records.len());
            let numbers: Vec<i64> = records.iter().map(|r| r.number.cast_signed()).collect();
            let reply = match lens.len() {
                ..=3 => {
                    let means = vec![("first".into(), numbers[0] as f64)];
                    Reply::Metrics(means, BatchRows::default())
                }
                _ => Reply::Predictions(Predictions::new().i64("number", numbers)),
            };
            to_trainer.send(Ok(reply)).unwrap();
        }
        lens
    });
    let [three, two] = [3, 2].map(|batch| NonZeroUsize::new(batch).unwrap());
    let data = |batch| Some(Inference { records: 7, batch });
    let (evaluation, prediction) = (data(three), data(two));
    let tensors = vec![NamedTensor::new("pair", [2])];
    let shape = Shape { tensors, evaluation, prediction, ..Shape::default() };
    let channel = CallChannel::new(calls, replies);
    let mut model = ExternalModel::new(shape, Taken::default(), channel, Arc::default());
    let records: Vec<Record> = (0..7).map(|number| Record { epoch: 0, number }).collect();
    let batch = Batch { purpose: Purpose::Predict, records };
    let mut sums = BTreeMap::new();
    model.evaluate(&[0.0; 2], batch.clone(), &mut Metrics::new(&mut sums, 7)).unwrap();
    assert_eq!(sums, BTreeMap::from([("first".to_owned(), 3.0 * 3.0 + 6.0)]));
    let rows = model.predict(&[0.0; 2], batch).unwrap();
    assert_eq!(rows, Predictions::new().i64("number", (0..7).collect()));
    drop(model);
    assert_eq!(program.join().unwrap(), [3, 3, 1, 2, 2, 2, 1]);
}

#[test]
fn a_data_set_without_records_is_refused() {
    let shape = Shape {
        records: 0,
        tensors: vec![NamedTensor::new("counts", [1])],
        state: 0,
        bucket_len: None,
        ..Shape::default()
    };
    let mut driver = Driver::new(alone(), shape, Memory::Trainer, 5);
    let event = driver.wait(Duration::from_secs(20), None);
    let Some(Event::Ended(Ended::Failed(error))) = event else { panic!("{event:?}") };
    assert!(error.contains("the sampler's length is 0"), "{error}");
}
