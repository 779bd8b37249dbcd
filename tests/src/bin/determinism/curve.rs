//! The loss of two jobs with different workers, step by step, in one plot.

use std::io;
use std::path::Path;

use elasticdl_tests::{Curve, DeterminismCase, Plot, Programs, print};

/// Trains at one worker, and at seven of which one after the other is killed, and draws the loss of
/// both on the validation data after each step. Returns whether all are equal.
pub(crate) fn draw(programs: Programs, file: &Path) -> io::Result<bool> {
    let curves: Vec<Vec<(u64, f64)>> = DeterminismCase::CURVES
        .iter()
        .map(|case| {
            let ended = case.run(programs, true);
            let evaluations = &ended.summary().evaluations;
            let all = evaluations.iter().flat_map(|evaluations| &evaluations.all);
            all.filter_map(|e| Some((e.step, (*e.metrics.get("loss")?)?))).collect()
        })
        .collect();
    let [alone, under_fire] = &curves[..] else { unreachable!("there are two curves") };
    std::fs::write(file, svg(alone, under_fire))?;
    let is_same = alone == under_fire;
    let relation = if is_same { "identical" } else { "different" };
    print(&format!("{} losses of 1 and of 7 workers: {relation}", alone.len()));
    Ok(is_same && !alone.is_empty())
}

/// The second curve, dashed, over the first one.
fn svg(alone: &[(u64, f64)], under_fire: &[(u64, f64)]) -> String {
    let steps = alone.iter().chain(under_fire).map(|point| point.0).max().unwrap_or_default();
    let points = |curve: &[(u64, f64)]| curve.iter().map(|(x, y)| (*x as f64, *y)).collect();
    let wide = Curve { points: points(alone), color: "#9ecae1", width: 7.0, dashes: None };
    let dashed =
        Curve { points: points(under_fire), color: "#d62728", width: 1.6, dashes: Some("6 4") };
    let plot = Plot {
        title: "validation loss: 1 worker (wide), 7 workers under kills (dashed)".into(),
        end: format!("step {steps}"),
        decimals: 3,
        curves: vec![wide, dashed],
    };
    plot.to_svg()
}
