use elasticdl::candle_core::{D, Device, Var};

use super::*;

fn numbers(shape: &[usize]) -> Var {
    let len = shape.iter().product::<usize>();
    let numbers: Vec<f32> =
        (0..len).map(|i| ((i * i * 7 + i * 3) % 23) as f32 / 8.0 - 1.4).collect();
    Var::from_vec(numbers, shape, &Device::Cpu).unwrap()
}

/// The result and the gradient of a weighted sum of it.
fn result_and_gradient(variable: &Var, op: impl Fn(&Tensor) -> Result<Tensor>) -> [Vec<f32>; 2] {
    let result = op(variable).unwrap();
    let weights = numbers(result.dims());
    // The weights differ from element to element, so that no gradient can be confused with
    // another.
    let weights = (weights.as_tensor() * 0.7).unwrap().flatten_all().unwrap().cumsum(0).unwrap();
    let weighted = (&result * weights.reshape(result.shape()).unwrap()).unwrap().sum_all().unwrap();
    let gradients = weighted.backward().unwrap();
    [&result, gradients.get(variable).unwrap()].map(|t| t.flatten_all().unwrap().to_vec1().unwrap())
}

/// Checks that an operation equals `composed`, in its result and its gradient.
fn equal(
    shape: &[usize],
    op: impl Fn(&Tensor) -> Result<Tensor>,
    composed: impl Fn(&Tensor) -> Result<Tensor>,
) {
    let variable = numbers(shape);
    let found = result_and_gradient(&variable, op);
    let expected = result_and_gradient(&variable, composed);
    for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
        assert!((found - expected).abs() < 1e-4, "{found} is not {expected}");
    }
}

fn simple_softmax(x: &Tensor) -> Result<Tensor> {
    let exponentials = x.exp()?;
    exponentials.broadcast_div(&exponentials.sum_keepdim(D::Minus1)?)
}

#[test]
fn causal_softmax_equals_a_masked_softmax() {
    let n = 5;
    let mask: Vec<f32> = (0..n * n).map(|i| if i % n > i / n { -1e9 } else { 0.0 }).collect();
    let mask = Tensor::from_vec(mask, (n, n), &Device::Cpu).unwrap();
    for op in [causal_softmax, composed::causal_softmax] {
        equal(&[2, 3, n, n], op, |x| simple_softmax(&x.broadcast_add(&mask)?));
    }
}

#[test]
fn cross_entropy_equals_the_negative_log_of_the_softmax() {
    let targets = Tensor::new(&[2u32, 0, 8, 3], &Device::Cpu).unwrap();
    let negative_log_softmax = |x: &Tensor| {
        let chosen = simple_softmax(x)?.gather(&targets.unsqueeze(1)?, 1)?;
        chosen.squeeze(1)?.log()?.neg()
    };
    for op in [cross_entropy, composed::cross_entropy] {
        equal(&[4, 9], |x| op(x, &targets), negative_log_softmax);
    }
}

#[test]
fn rms_norm_equals_the_composed_operations() {
    let by_mean_square = |x: &Tensor| {
        let mean = x.sqr()?.mean_keepdim(D::Minus1)?;
        x.broadcast_div(&(mean + 1e-6)?.sqrt()?)
    };
    for op in [rms_norm, composed::rms_norm] {
        equal(&[3, 2, 19], op, by_mean_square);
    }
}

#[test]
fn large_logits_stay_finite() {
    let logits = Tensor::new(&[[1000.0f32, 0.0], [-1000.0, 0.0]], &Device::Cpu).unwrap();
    let targets = Tensor::new(&[1u32, 1], &Device::Cpu).unwrap();
    for op in [cross_entropy, composed::cross_entropy] {
        assert_eq!(op(&logits, &targets).unwrap().to_vec1::<f32>().unwrap(), [1000.0, 0.0]);
    }
}

#[test]
fn wrong_shapes_are_errors() {
    let matrix = numbers(&[2, 3]);
    let targets = Tensor::new(&[0u32, 3], &Device::Cpu).unwrap();
    assert!(causal_softmax(&matrix).is_err());
    assert!(cross_entropy(&matrix, &targets).is_err(), "a target beyond the last class");
    assert!(cross_entropy(&matrix, &targets.narrow(0, 0, 1).unwrap()).is_err(), "too few targets");
    assert!(rms_norm(&matrix.t().unwrap()).is_err(), "not contiguous");
}
