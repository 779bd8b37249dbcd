//! The gradient, on the fake GPU.

use super::*;

/// The summed loss of the images, computed in double precision by the host.
fn loss_on_host(parameters: &[f64], pixels: &[f32], digits: &[f32], hidden: usize) -> f64 {
    let inputs = pixels.len() / digits.len();
    let layer = |weights: &[f64], values: &[f64], outputs: usize| -> Vec<f64> {
        let column = |c: usize| {
            let products =
                values.iter().enumerate().map(|(k, value)| value * weights[k * outputs + c]);
            products.sum::<f64>() + weights[values.len() * outputs + c]
        };
        (0..outputs).map(column).collect()
    };
    let (first, second) = parameters.split_at((inputs + 1) * hidden);
    let loss = |(pixels, digit): (&[f32], &f32)| {
        let pixels: Vec<f64> = pixels.iter().copied().map(f64::from).collect();
        let hidden = layer(first, &pixels, hidden).into_iter().map(|value| value.max(0.0));
        let logits = layer(second, &hidden.collect::<Vec<_>>(), DIGITS);
        logits.iter().map(|logit| logit.exp()).sum::<f64>().ln() - logits[*digit as usize]
    };
    pixels.chunks_exact(inputs).zip(digits).map(loss).sum()
}

#[test]
fn the_gradient_is_that_of_the_loss() {
    elasticdl_stand_ins::load();
    let settings = Settings::parse_from(["gpu_mlp", "--size", "3", "--hidden", "5"]);
    let mut model = Perceptron::open(settings).unwrap();
    let mut random = ChaCha8Rng::seed_from_u64(1);
    let mut parameters = vec![0.0; NamedTensor::count(&model.tensors())];
    model.initialize(1, &mut parameters).unwrap();
    parameters.iter_mut().for_each(|weight| *weight += random.random_range(-0.5..0.5));
    let pixels: Vec<f32> = (0..7 * 9).map(|_| random.random_range(0.0..1.0)).collect();
    let digits = [3.0, 0.0, 9.0, 1.0, 4.0, 4.0, 8.0_f32];

    let stream = model.device.stream().clone();
    let images = Images {
        pixels: stream.clone_htod(&pixels).unwrap(),
        digits: stream.clone_htod(&digits).unwrap(),
    };
    let on_device = stream.clone_htod(&parameters).unwrap();
    // What other micro-batches have added stays.
    let mut gradient = stream.clone_htod(&vec![1.0; parameters.len()]).unwrap();
    let (losses, logits) = model.pass(&on_device, &images, Some(gradient.as_view_mut())).unwrap();
    let gradient = stream.clone_dtoh(&gradient).unwrap();

    let of = |parameters: &[f64]| loss_on_host(parameters, &pixels, &digits, 5);
    let mut point: Vec<f64> = parameters.iter().copied().map(f64::from).collect();
    let loss: f64 = losses.into_iter().map(f64::from).sum();
    assert!((loss - of(&point)).abs() < 1e-4 && logits.len() == 70, "{loss}, {}", of(&point));
    for (index, found) in gradient.iter().enumerate() {
        let at = point[index];
        let [less, more] = [-1e-6, 1e-6].map(|step| {
            point[index] = at + step;
            of(&point)
        });
        point[index] = at;
        let expected = 1.0 + (more - less) / 2e-6;
        assert!((f64::from(*found) - expected).abs() < 1e-4, "{index}: {found}, {expected}");
    }
}

#[test]
fn a_label_that_is_no_digit_is_an_error() {
    elasticdl_stand_ins::load();
    let mut model = Perceptron::open(Settings::parse_from(["gpu_mlp"])).unwrap();
    // The crate of tests builds this program, too.
    let data = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/data/digits/test");
    let mut reader = model.reader();
    let dataset = elasticdl::Reader::describe(&mut reader, data).unwrap();
    let mut images = elasticdl::Reader::read(&mut reader, &dataset.files[0], 0..2).unwrap();
    assert!(model.feed(images.clone()).is_ok());
    images[1].label = 10;
    let error = model.feed(images).err().unwrap().to_string();
    assert!(error.contains("label 10"), "{error}");
}
