use elasticdl::{Gradients, Model, NamedTensor, Reader, Update};

use super::*;

/// The images of a folder of `examples/data/digits`.
fn digits(part: &str) -> Vec<LabeledImage> {
    let folder = format!("{}/data/digits/{part}", env!("CARGO_MANIFEST_DIR"));
    let mut reader = IdxImages::new(8, 8);
    let dataset = reader.describe(&folder).unwrap();
    reader.read(&dataset.files[0], 0..dataset.files[0].records).unwrap()
}

fn model() -> Candle<Mnist> {
    Candle::new(Mnist::try_parse_from(["mnist", "--size", "8"]).unwrap())
}

#[test]
fn the_network_learns_digits_of_writers_that_it_has_not_seen() {
    let (mut model, train, test) = (model(), digits("train"), digits("test"));
    assert_eq!((train.len(), test.len()), (1500, 297));
    let (count, mut rule) = (NamedTensor::count(&model.tensors()), model.optimizer());
    let (mut parameters, mut slots) = (vec![0.0; count], vec![0.0; rule.slots() * count]);
    model.initialize(1, &mut parameters).unwrap();
    for step in 0..240 {
        let part = train.chunks_exact(50).nth(step as usize % 30).unwrap().to_vec();
        let batch = model.feed(part).unwrap();
        let mut sum = vec![0.0; count];
        model.gradients(&parameters, batch, &mut Gradients::new(&mut sum, 50)).unwrap();
        rule.apply(Update::new(step, 50, &sum, &mut parameters, &mut slots)).unwrap();
    }
    let labels: Vec<i64> = test.iter().map(|image| image.label.into()).collect();
    let batch = model.feed(test).unwrap();
    let predicted = model.predict(&parameters, batch).unwrap();
    let Some((name, elasticdl::Column::I64(predicted))) = predicted.columns().first() else {
        panic!("{predicted:?}")
    };
    let right = predicted.iter().zip(&labels).filter(|(a, b)| a == b).count();
    assert_eq!(name, "digit");
    assert!(right * 100 > 85 * labels.len(), "{right} of {} digits", labels.len());
}

#[test]
fn sizes_that_are_not_halved_twice_are_refused() {
    assert_eq!(parse_size("28"), Ok(28));
    for wrong in ["0", "2", "27", "516", "many"] {
        assert!(parse_size(wrong).unwrap_err().contains("multiple of 4"), "{wrong}");
    }
}
