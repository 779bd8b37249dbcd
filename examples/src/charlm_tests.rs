use elasticdl::{Gradients, Model, NamedTensor, Reader, Update};

use elasticdl::candle_core;
use elasticdl::candle_nn::VarMap;

use super::*;

fn model() -> Candle<CharLm> {
    let options = ["charlm", "--context", "24", "--width", "32", "--layers", "1"];
    Candle::new(CharLm::try_parse_from(options).unwrap())
}

/// The loss of a batch, in nats per byte.
fn loss(model: &mut Candle<CharLm>, parameters: &[f32], windows: Vec<Vec<u8>>) -> f64 {
    let (count, mut sum) = (windows.len(), vec![0.0; NamedTensor::count(&model.tensors())]);
    let batch = model.feed(windows).unwrap();
    let loss = model.gradients(parameters, batch, &mut Gradients::new(&mut sum, count)).unwrap();
    loss.sum_over(count) / count as f64
}

/// Trains on the licence, with the model's parameters in bf16 if it `is_half`. Returns the loss of
/// windows that are not trained, before and after that.
fn train(is_half: bool) -> [f64; 2] {
    let licence = format!("{}/../LICENSE", env!("CARGO_MANIFEST_DIR"));
    let mut reader = TextWindows::new(24);
    let dataset = reader.describe(&licence).unwrap();
    let mut windows = reader.read(&dataset.files[0], 0..dataset.files[0].records).unwrap();
    // The last tenth is not trained.
    let unseen = windows.split_off(windows.len() / 10 * 9);
    let mut model = model();
    let (count, mut rule) = (NamedTensor::count(&model.tensors()), model.optimizer());
    let (mut parameters, mut slots) = (vec![0.0; count], vec![0.0; rule.slots() * count]);
    model.initialize(1, &mut parameters).unwrap();
    // Writes the parameters in bf16 to the model, if it has them.
    let set = |model: &mut Candle<CharLm>, parameters: &[f32]| {
        if is_half {
            let round = |p: &f32| ((p.to_bits() + 0x7fff + (p.to_bits() >> 16 & 1)) >> 16) as u16;
            let bits: Vec<u16> = parameters.iter().map(round).collect();
            model.as_half_model().unwrap().write(0, &bits).unwrap();
        }
    };
    if is_half {
        model.as_half_model().unwrap().begin().unwrap();
    }
    set(&mut model, &parameters);
    let before = loss(&mut model, &parameters, unseen.clone());
    for step in 0..150 {
        let start = step as usize * 32 % (windows.len() - 32);
        let batch = model.feed(windows[start..start + 32].to_vec()).unwrap();
        let mut sum = vec![0.0; count];
        model.gradients(&parameters, batch, &mut Gradients::new(&mut sum, 32)).unwrap();
        rule.apply(Update::new(step, 32, &sum, &mut parameters, &mut slots)).unwrap();
        set(&mut model, &parameters);
    }
    [before, loss(&mut model, &parameters, unseen)]
}

#[test]
fn the_model_learns_the_english_of_the_licence_in_bf16_as_well_as_in_f32() {
    let [before, after] = train(false);
    // All bytes are equally likely at first; a model of single bytes has about 3.1 nats.
    assert!(
        (before - 256_f64.ln()).abs() < 0.3 && after < 2.95,
        "{before} to {after} nats per byte"
    );
    let [_, half] = train(true);
    assert!((half - after).abs() < 0.03, "{half} nats per byte in bf16, {after} in f32");
}

#[test]
fn no_logit_depends_on_a_later_byte() {
    let parameters = VarBuilder::from_varmap(&VarMap::new(), candle_core::DType::F32, &Device::Cpu);
    let network = Transformer::build((6, 8, 2), &parameters).unwrap();
    let logits = |text: &[u8; 6]| {
        let bytes = text.iter().map(|byte| u32::from(*byte));
        let windows = Tensor::from_iter(bytes, &Device::Cpu).unwrap().reshape((1, 6)).unwrap();
        network.logits(&windows).unwrap().to_vec2::<f32>().unwrap()
    };
    let (before, after) = (logits(b"abcdef"), logits(b"abcdXf"));
    assert_eq!(before[..4], after[..4]);
}

#[test]
fn widths_that_the_heads_cannot_share_are_refused() {
    assert_eq!(parse_width("64"), Ok(64));
    for wrong in ["0", "7", "4098", "wide"] {
        assert!(parse_width(wrong).unwrap_err().contains("multiple of 2"), "{wrong}");
    }
}
