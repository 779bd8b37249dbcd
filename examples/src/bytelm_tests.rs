use elasticdl::candle_core::DType;
use elasticdl::{Gradients, Model, NamedTensor};

use super::*;

const SMALL: [&str; 9] = [
    "bytelm",
    "--context=6",
    "--width=8",
    "--heads=2",
    "--layers=2",
    "--tail=3",
    "--rate=0.01",
    "--warm-up=1",
    "--prompt=ab",
];

fn small() -> (Candle<ByteModel>, Vec<f32>) {
    let arguments = Arguments::parse_from(SMALL);
    let mut model = Candle::new(ByteModel::new(arguments));
    let mut parameters = vec![0.0; NamedTensor::count(&model.tensors())];
    model.initialize(1, &mut parameters).unwrap();
    (model, parameters)
}

/// Returns the loss, summed over the windows.
fn add_gradients(
    model: &mut Candle<ByteModel>,
    parameters: &[f32],
    batch: Batch,
    sum: &mut [f32],
) -> f64 {
    let count = batch.windows;
    let loss = model.gradients(parameters, batch, &mut Gradients::new(sum, count)).unwrap();
    loss.sum_over(count)
}

/// The logits, `[windows · length][256]`, of a network with random parameters.
fn logits(windows: &[&[u8]]) -> Vec<Vec<f32>> {
    let model = ByteModel::new(Arguments::parse_from(SMALL));
    let zeros = VarBuilder::zeros(DType::F32, &Device::Cpu);
    let mut network = model.build(zeros).unwrap();
    let mut random = ChaCha8Rng::seed_from_u64(3);
    let mut draw = |tensor: &mut Tensor| {
        let numbers =
            (0..tensor.elem_count()).map(|_| random.next_u32() as f32 / u32::MAX as f32 - 0.5);
        *tensor =
            Tensor::from_iter(numbers, &Device::Cpu).unwrap().reshape(tensor.shape()).unwrap();
    };
    network.embeddings.iter_mut().for_each(&mut draw);
    draw(&mut network.positions);
    draw(&mut network.head);
    for Block { attend, merge, widen, narrow } in &mut network.blocks {
        [attend, merge, widen, narrow].into_iter().for_each(&mut draw);
    }
    let inputs = model.inputs(windows).unwrap();
    let logits = model.logits(&network, windows.len(), &inputs, &mut Cuts::none()).unwrap();
    logits.to_vec2().unwrap()
}

#[test]
fn logits_do_not_depend_on_later_bytes() {
    let before = logits(&[b"abcdef", b"ghijkl"]);
    let after = logits(&[b"abcdXf", b"ghijkl"]);
    for (place, (before, after)) in before.iter().zip(&after).enumerate() {
        // The fifth byte of the first window and the one after it depend on the change; the
        // second window does not.
        assert_eq!(before != after, place == 4 || place == 5, "place {place}");
    }
}

#[test]
fn logits_depend_on_every_earlier_byte() {
    let before = logits(&[b"abcdef"]);
    for changed in 0..6 {
        let mut window = *b"abcdef";
        window[changed] = b'X';
        assert_ne!(logits(&[&window])[5], before[5], "the last logits do not see byte {changed}");
    }
}

#[test]
fn inputs_are_shifted_within_their_window_and_targets_are_the_next_bytes() {
    let mut model = ByteModel::new(Arguments::parse_from(SMALL));
    let batch =
        model.feed(vec![vec![1, 2, 3, 4, 5, 6, 7], vec![11, 12, 13, 14, 15, 16, 17]]).unwrap();
    let inputs: Vec<Vec<u32>> = batch.inputs.iter().map(|input| input.to_vec1().unwrap()).collect();
    let expected = [
        [1, 2, 3, 4, 5, 6, 11, 12, 13, 14, 15, 16],
        [0, 1, 2, 3, 4, 5, 0, 11, 12, 13, 14, 15],
        [0, 0, 1, 2, 3, 4, 0, 0, 11, 12, 13, 14],
    ];
    assert_eq!(inputs, expected);
    assert_eq!(batch.targets.to_vec1::<u32>().unwrap(), [2, 3, 4, 5, 6, 7, 12, 13, 14, 15, 16, 17]);
}

#[test]
fn a_model_starts_at_eight_bits_per_byte_and_learns() {
    let (mut model, mut parameters) = small();
    let mut rule = model.optimizer();
    let mut slots = vec![0.0; parameters.len() * rule.slots()];
    let mut losses = Vec::new();
    for step in 0..200 {
        let batch = model.feed(vec![b"abababa".to_vec(), b"bababab".to_vec()]).unwrap();
        let mut sum = vec![0.0; parameters.len()];
        losses.push(add_gradients(&mut model, &parameters, batch, &mut sum) / 2.0);
        let (parameters, slots) = (&mut parameters[..], &mut slots[..]);
        rule.apply(elasticdl::Update::new(step, 2, &sum, parameters, slots)).unwrap();
    }
    assert!((losses[0] / std::f64::consts::LN_2 - 8.0).abs() < 0.2, "{}", losses[0]);
    assert!(losses[199] < 0.1, "{losses:?}");
    let summary = model.summary(&parameters).unwrap().unwrap();
    let sample = "ab".repeat(1 + SAMPLE_BYTES / 2);
    assert!(summary.ends_with(&format!("sample:\n{sample}")), "{summary}");
    assert!(summary.starts_with("bits per byte: "), "{summary}");
}

#[test]
fn gradients_equal_finite_differences() {
    let (mut model, parameters) = small();
    let records = || vec![b"abcdefg".to_vec(), b"gfaedcb".to_vec()];
    let mut sum = vec![0.0; parameters.len()];
    let batch = model.feed(records()).unwrap();
    add_gradients(&mut model, &parameters, batch, &mut sum);
    let mut loss_at = |parameters: &[f32]| {
        let batch = model.feed(records()).unwrap();
        add_gradients(&mut model, parameters, batch, &mut vec![0.0; parameters.len()])
    };
    // Moves along the gradient in stretches of the flat slice: each has many elements, so
    // rounding errors average out.
    for stretch in
        sum.chunks(192).zip((0..).step_by(192)).filter(|(part, _)| part.iter().any(|&g| g != 0.0))
    {
        let (part, start) = stretch;
        let length = part.iter().map(|&g| f64::from(g) * f64::from(g)).sum::<f64>().sqrt();
        let mut move_by = |distance: f64| {
            let mut moved = parameters.clone();
            for (moved, &gradient) in moved[start..].iter_mut().zip(part) {
                *moved += (f64::from(gradient) / length * distance) as f32;
            }
            loss_at(&moved)
        };
        let slope = (move_by(0.02) - move_by(-0.02)) / 0.04;
        assert!(
            (slope - length).abs() < 0.02 * length + 1e-3,
            "from {start}: {slope} is not {length}"
        );
    }
}

#[test]
fn queries_keys_and_values_all_have_gradients() {
    let (mut model, parameters) = small();
    let mut sum = vec![0.0; parameters.len()];
    let batch = model.feed(vec![b"abcdefg".to_vec()]).unwrap();
    add_gradients(&mut model, &parameters, batch, &mut sum);
    let attend: Vec<_> = model.declared().iter().filter(|t| t.name.ends_with("attend")).collect();
    assert_eq!(attend.len(), 2);
    for tensor in attend {
        assert!(
            sum[tensor.range.clone()].iter().all(|&gradient| gradient != 0.0),
            "{}",
            tensor.name
        );
    }
}

#[cfg(not(feature = "cuda"))]
#[test]
fn a_program_without_cuda_names_the_feature_to_build_with() {
    let mut model = Candle::new(ByteModel::new(Arguments::parse_from(["bytelm", "--device=cuda"])));
    let error = model.initialize(1, &mut []).unwrap_err().to_string();
    assert!(error.contains("build it with `--features cuda`"), "{error}");
    let auto = Candle::new(ByteModel::new(Arguments::parse_from(["bytelm", "--device=auto"])));
    assert!(!auto.tensors().is_empty());
}

#[test]
fn arguments_are_checked() {
    for wrong in ["--context=0", "--width=x", "--rate=0", "--rate=nan", "--tail=17", "--device=gpu"]
    {
        assert!(Arguments::try_parse_from(["bytelm", wrong]).is_err(), "{wrong}");
    }
    let arguments = Arguments::parse_from(["bytelm", "--width=10", "--heads=4"]);
    let mut model = Candle::new(ByteModel::new(arguments));
    let error = model.initialize(1, &mut []).unwrap_err().to_string();
    assert_eq!(error, "building the network: --width 10 is not a multiple of --heads 4");
}
