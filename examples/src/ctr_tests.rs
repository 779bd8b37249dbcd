use elasticdl::{BatchRows, Column, Reader as _};

use super::*;

/// The model, with a batch of 6 records, its initial parameters and its rows.
fn batch(kind: &str) -> (ClickModel, Batch, Vec<f32>, BatchRows) {
    let mut model = ClickModel::parse_from(["ctr", "--ids", "1000", "--model", kind]);
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
    ["wide-and-deep", "deepfm"].into_iter().for_each(check_gradients);
}

#[test]
fn deepfm_adds_the_products_of_all_pairs_of_embeddings() {
    let (model, batch, parameters, mut rows) = batch("deepfm");
    rows.values_mut(DEEP).iter_mut().enumerate().for_each(|(at, v)| *v = (at % 7) as f32 / 9.0);
    let logit = |has_products| {
        let mut network = Network::new(&parameters, has_products);
        network.forward(&batch.clicks[0].dense, &batch.rows[..CATEGORIES], &rows)
    };
    let (with, without) = (logit(true), logit(false));
    let embedding = |column: usize| {
        let mut embedding = [0.0; DIM];
        rows.add_rows(DEEP, &batch.rows[column..=column], 1.0, &mut embedding);
        embedding
    };
    let mut sum = 0.0;
    for (a, b) in (0..CATEGORIES).flat_map(|a| (0..a).map(move |b| (a, b))) {
        sum += embedding(a).iter().zip(embedding(b)).map(|(a, b)| a * b).sum::<f32>();
    }
    assert!((with - without - sum).abs() < 1e-3 * sum, "{with}, {without}, {sum}");
    assert_eq!(model.tables().len(), 2);
}

fn check_gradients(kind: &str) {
    let (mut model, batch, parameters, mut rows) = batch(kind);
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
        check(&format!("{kind}: parameter {at}"), sum[at], rise / f64::from(2.0 * step));
    }
    let gradients = [WIDE, DEEP].map(|table| rows.clone().of(table).1.to_vec());
    for (table, at) in [(WIDE, 0), (WIDE, 30), (DEEP, 5), (DEEP, 700)] {
        let at_row = |by| Some((table, at, by));
        let rise = loss(&parameters, at_row(step)) - loss(&parameters, at_row(-step));
        check(&format!("{kind}: {table} {at}"), gradients[table][at], rise / f64::from(2.0 * step));
    }
}

#[test]
fn predictions_stand_beside_the_best_possible_ones() {
    let (mut model, batch, parameters, rows) = batch("deepfm");
    let predictions = model.predict_with_rows(&parameters, batch.clone(), &rows).unwrap();
    let [(label, labels), (probability, Column::F32(predicted)), (best, Column::F32(of_best))] =
        predictions.columns()
    else {
        panic!("{predictions:?}")
    };
    assert_eq!(
        [label, probability, best].map(|name| &**name),
        ["label", "probability", "best_probability"]
    );
    let expected = batch.clicks.iter().map(|click| click.label as i64).collect();
    assert_eq!(*labels, Column::I64(expected));
    let logits = batch.clicks.iter().map(|click| click.logit.unwrap());
    assert_eq!(*of_best, logits.map(network::probability).collect::<Vec<_>>());
    assert!(predicted.iter().all(|p| (0.0..1.0).contains(p)) && predicted != of_best);
    // The logits of Criteo's clicks are not known.
    let mut unknown = batch;
    unknown.clicks.iter_mut().for_each(|click| click.logit = None);
    let predictions = model.predict_with_rows(&parameters, unknown, &rows).unwrap();
    assert_eq!(predictions.columns().len(), 2);
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
    for wrong in ["clicks:5..5", "clicks:7"] {
        assert!(reader.describe(wrong).unwrap_err().to_string().contains("clicks:FROM..TO"));
    }
}

#[test]
fn the_manifest_has_a_command_that_the_program_takes() {
    let options = include_str!("../../manifests/example/ctr.toml");
    let value = |key: &str| {
        let lines = options.lines().filter_map(|line| line.split_once(" = "));
        lines.filter(|(name, _)| *name == key).map(|(_, value)| value).next().unwrap()
    };
    let program: Vec<String> = serde_json::from_str(value("program")).unwrap();
    assert_eq!(program[0], "ctr");
    let mut reader = ClickModel::try_parse_from(program).unwrap().reader();
    let sources = ["training-data", "validation-data"].map(|key| value(key).replace('"', ""));
    let records = sources.map(|source| reader.describe(&source).unwrap().files[0].records);
    assert_eq!(records, [2_000_000, 100_000]);
}
