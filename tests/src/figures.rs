//! What the benchmarks share: quantiles, and printing.

/// The value at or below which `part` of the values lie; 0 of none. Sorts them.
pub fn quantile(values: &mut [f64], part: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let last = values.len().saturating_sub(1);
    values.get((last as f64 * part).ceil() as usize).copied().unwrap_or(0.0)
}

/// Prints a line of a benchmark's result.
#[expect(clippy::print_stdout, reason = "the benchmark's result")]
pub fn print(text: &str) {
    println!("{text}");
}
