//! Helpers of the benchmarks: their entry point, quantiles and printing.

use std::error::Error;
use std::process::ExitCode;

use elasticdl::Model;

/// Runs a program that is at once a benchmark, the `elasticdl` command and the worker of the
/// benchmark's jobs: `model` if a job has started it, the command if its first argument is a
/// subcommand, `measure` otherwise.
pub fn run_benchmark<M: Model>(
    model: impl FnOnce() -> M,
    measure: impl FnOnce() -> Result<(), Box<dyn Error>>,
) -> ExitCode {
    const COMMANDS: [&str; 4] = ["train", "status", "scale", "checkpoint"];
    if std::env::args().nth(1).is_some_and(|word| COMMANDS.contains(&word.as_str())) {
        return elasticdl_cli::main();
    }
    if std::env::var_os("ELASTICDL_MASTER").is_some() {
        return elasticdl::run(model());
    }
    match measure() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            print(&format!("error: {error}"));
            ExitCode::FAILURE
        }
    }
}

/// The smallest value at or below which `part` of the values lie; 0 if there are no values. Sorts
/// them.
pub fn quantile(values: &mut [f64], part: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let rank = (values.len() as f64 * part).ceil() as usize;
    values.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
}

/// Prints a line of a benchmark's result.
#[expect(clippy::print_stdout, reason = "the benchmark's result")]
pub fn print(text: &str) {
    println!("{text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_one_of_the_values_and_the_least_with_enough_below() {
        let of =
            |n: u32, part| quantile(&mut (1..=n).rev().map(f64::from).collect::<Vec<_>>(), part);
        assert_eq!([of(1, 0.5), of(2, 0.5), of(3, 0.5), of(20, 0.5)], [1.0, 1.0, 2.0, 10.0]);
        assert_eq!(
            [of(20, 0.99), of(100, 0.99), of(100, 1.0), of(9, 0.0), of(0, 0.5)],
            [20.0, 99.0, 100.0, 1.0, 0.0]
        );
    }
}
