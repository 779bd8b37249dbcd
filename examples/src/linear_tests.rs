use elasticdl::{Reader, Update};

use super::*;

fn rows(text: &str) -> (Linear, Vec<Row>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.csv");
    std::fs::write(&path, text).unwrap();
    let linear = Linear::try_parse_from(["linear", "--columns", "a,b"]).unwrap();
    let mut reader = linear.reader();
    let dataset = reader.describe(path.to_str().unwrap()).unwrap();
    let rows = reader.read(&dataset.files[0], 0..dataset.files[0].records).unwrap();
    (linear, rows)
}

/// Returns the loss, summed over the rows.
fn add_gradients(linear: &mut Linear, parameters: &[f32], rows: &[Row], sum: &mut [f32]) -> f64 {
    let mut gradients = Gradients::new(sum, rows.len());
    let loss = linear.gradients(parameters, rows.to_vec(), &mut gradients).unwrap();
    loss.sum_over(rows.len())
}

/// Points of the plane y = 2a − b + 3.
const PLANE: &str = "y,a,b\n3,0,0\n5,1,0\n2,0,1\n4,1,1\n0.5,-1,0.5\n1.5,0.25,2\n";

#[test]
fn gradients_equal_finite_differences() {
    let (mut linear, rows) = rows(PLANE);
    let start = [0.5, 0.25, -1.0];
    let mut gradients = [0.0; 3];
    add_gradients(&mut linear, &start, &rows, &mut gradients);
    for i in 0..3 {
        let mut loss_at = |distance: f32| {
            let mut parameters = start;
            parameters[i] += distance;
            add_gradients(&mut linear, &parameters, &rows, &mut [0.0; 3])
        };
        let expected = (loss_at(0.125) - loss_at(-0.125)) / 0.25;
        assert!(
            (f64::from(gradients[i]) - expected).abs() < 1e-4,
            "{i}: {} is not {expected}",
            gradients[i]
        );
    }
}

#[test]
fn training_converges_to_the_plane_of_the_rows() {
    let (mut linear, rows) = rows(PLANE);
    let (mut parameters, mut slots) = ([f32::NAN; 3], [0.0; 3]);
    linear.initialize(1, &mut parameters).unwrap();
    let mut rule = linear.optimizer();
    for step in 0..500 {
        let mut sum = [0.0; 3];
        add_gradients(&mut linear, &parameters, &rows, &mut sum);
        let (parameters, slots) = (&mut parameters[..], &mut slots[..]);
        rule.apply(Update::new(step, rows.len() as u64, &sum, parameters, slots)).unwrap();
    }
    assert_eq!(linear.summary(&parameters).unwrap().unwrap(), "y = 2.0000·a + -1.0000·b + 3.0000");
}
