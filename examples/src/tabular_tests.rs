use elasticdl::{Reader, Update};
use rand::{RngExt as _, SeedableRng as _, rngs::ChaCha8Rng};

use super::*;

const BUCKETS: &str = "4096";

/// Rows of a user and an item, whose label depends on neither alone: it is 1 if both numbers are
/// even or both are odd, but for one row in twenty.
fn rows(records: u64, seed: u64) -> (Tabular, Vec<Row>) {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut text = String::from("user,item,label\n");
    for _ in 0..records {
        let (user, item) = (random.random_range(0..20), random.random_range(0..20));
        let label = (user % 2 == item % 2) ^ (random.random_range(0..20) == 0);
        text.push_str(&format!("u{user},i{item},{}\n", u8::from(label)));
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.csv");
    std::fs::write(&path, text).unwrap();
    let options = ["tabular", "--columns", "user,item", "--buckets", BUCKETS];
    let model = Tabular::try_parse_from(options).unwrap();
    let mut reader = model.reader();
    let dataset = reader.describe(path.to_str().unwrap()).unwrap();
    let rows = reader.read(&dataset.files[0], 0..records).unwrap();
    (model, rows)
}

#[test]
fn gradients_equal_finite_differences() {
    let (mut model, rows) = rows(8, 1);
    let batch = model.feed(rows).unwrap();
    let mut start = vec![0.0; NamedTensor::count(&model.tensors())];
    model.initialize(7, &mut start).unwrap();
    let mut sum = vec![0.0; start.len()];
    let loss = model.gradients(&start, batch.clone(), &mut Gradients::new(&mut sum, 8)).unwrap();
    let loss_at = |parameters: &[f32]| -> f64 {
        let machine = Machine::new(4096, parameters);
        batch.iter().map(|(features, label)| machine.loss(features, *label)).sum()
    };
    assert!((loss.sum_over(8) - loss_at(&start)).abs() < 1e-9);
    assert!(sum.iter().filter(|gradient| **gradient != 0.0).count() > 20);
    for (i, gradient) in sum.iter().enumerate() {
        let moved = |distance: f32| {
            let mut parameters = start.clone();
            parameters[i] += distance;
            loss_at(&parameters)
        };
        let expected = (moved(0.01) - moved(-0.01)) / 0.02;
        assert!(
            (f64::from(*gradient) - expected).abs() < 1e-3,
            "{i}: {gradient} is not {expected}"
        );
    }
}

#[test]
fn training_finds_pairs_of_categories_that_belong_together() {
    let (mut model, rows_trained) = rows(2000, 1);
    let batch = model.feed(rows_trained).unwrap();
    let (count, mut rule) = (NamedTensor::count(&model.tensors()), model.optimizer());
    let (mut parameters, mut slots) = (vec![0.0; count], vec![0.0; rule.slots() * count]);
    model.initialize(1, &mut parameters).unwrap();
    for step in 0..400 {
        let mut sum = vec![0.0; count];
        let part = batch.chunks(200).nth(step as usize % 10).unwrap().to_vec();
        model.gradients(&parameters, part, &mut Gradients::new(&mut sum, 200)).unwrap();
        rule.apply(Update::new(step, 200, &sum, &mut parameters, &mut slots)).unwrap();
    }
    let (_, unseen) = rows(500, 2);
    let machine = Machine::new(4096, &parameters);
    let unseen = model.feed(unseen).unwrap();
    let right = unseen.iter().filter(|(f, label)| (machine.score(f) > 0.0) == (*label > 0.5));
    let right = right.count();
    // One row in twenty has the other label.
    assert!(right > 450, "{right} of 500 rows");
}

#[test]
fn features_are_spread_over_the_buckets() {
    let numbers = (0..2000).map(|i| feature(i % 2, &format!("c{i}"), 1000));
    let used: std::collections::BTreeSet<usize> = numbers.collect();
    // A random function hits 1000 · (1 − e⁻²) = 865 of them.
    assert!((800..930).contains(&used.len()), "{}", used.len());
    for wrong in ["0", "-1", "many", "268435457"] {
        assert!(parse_buckets(wrong).unwrap_err().contains("from 1 to 268435456"), "{wrong}");
    }
    assert_ne!(feature(0, "a", 1 << 40), feature(1, "a", 1 << 40));
}
