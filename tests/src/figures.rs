//! Helpers of the benchmarks: their entry point and parts, the programs that they measure,
//! quantiles and printing.

use std::error::Error;
use std::fmt::Display;
use std::io::ErrorKind;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use elasticdl::Model;
use serde_json::{Map, Value, json};

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
    exit_code(measure())
}

/// The exit code of a program that ends so, whose error is printed.
pub fn exit_code<E: Display>(result: Result<(), E>) -> ExitCode {
    match result {
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

/// Median and 99th percentile of the values, which it sorts, as an object.
pub fn spread(values: &mut [f64]) -> Value {
    json!({ "p50": quantile(values, 0.5), "p99": quantile(values, 0.99) })
}

/// Measures the parts that are asked for, prints the object of all their keys, and writes it to a
/// file. `measure` returns `None` for a part that does not exist.
pub fn measure_parts(
    parts: &[String],
    json: Option<&Path>,
    mut measure: impl FnMut(&str) -> Result<Option<Value>, Box<dyn Error>>,
) -> Result<(), Box<dyn Error>> {
    let mut result = Map::new();
    for part in parts {
        let Some(measured) = measure(part)? else {
            return Err(format!("--only {part}: there is no such part").into());
        };
        print(&format!("{part}: {measured}"));
        if let Value::Object(measured) = measured {
            result.extend(measured);
        }
    }
    let result = Value::Object(result).to_string();
    print(&result);
    json.map_or(Ok(()), |path| Ok(std::fs::write(path, result)?))
}

/// Parses seeds, `A..B`, of which there is one at least.
pub fn parse_seeds(text: &str) -> Result<Range<u64>, String> {
    let range =
        text.split_once("..").and_then(|(from, to)| Some(from.parse().ok()?..to.parse().ok()?));
    range
        .filter(|range: &Range<u64>| range.start < range.end)
        .ok_or_else(|| "expected A..B, A less than B".into())
}

/// The results in a file that a benchmark adds to; none if there is no file.
pub fn read_results(path: &Path) -> Result<Map<String, Value>, Box<dyn Error>> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(serde_json::from_slice(&bytes)?),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Map::new()),
        Err(error) => Err(format!("{}: {error}", path.display()).into()),
    }
}

/// Writes the file in one piece: the benchmark may be ended at any time.
pub fn write_results(path: &Path, results: &Map<String, Value>) -> Result<(), Box<dyn Error>> {
    let next = path.with_extension("next");
    std::fs::write(&next, serde_json::to_vec_pretty(results)?)?;
    Ok(std::fs::rename(next, path)?)
}

/// Builds a program of the workspace in this profile, and returns its path.
pub fn built(package: &str, name: &str) -> Result<PathBuf, Box<dyn Error>> {
    let this = std::env::current_exe()?;
    let folder = this.parent().ok_or("this program is in no folder")?;
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut build = Command::new(cargo);
    build.current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(".."));
    // With those that this program is built with, so that they share what they depend on.
    build.args(["build", "--quiet", "--package", "elasticdl-tests"]);
    build.args(["--package", package, "--bin", name]);
    if !cfg!(debug_assertions) {
        build.arg("--release");
    }
    if !build.status()?.success() {
        return Err(format!("{name} of {package} can't be built").into());
    }
    Ok(folder.join(name))
}

/// Area under the curve of true by false positives: the probability that a click has a higher score
/// than another record, where equal scores count half. Mann, Whitney, Ann. Math. Stat. 18 (1947).
pub fn auc(scores: &mut [(f32, bool)]) -> f64 {
    scores.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    let clicks = scores.iter().filter(|(_, is_click)| *is_click).count() as f64;
    let (mut below, mut pairs) = (0.0, 0.0);
    for equal in scores.chunk_by(|(a, _), (b, _)| a == b) {
        let clicks = equal.iter().filter(|(_, is_click)| *is_click).count() as f64;
        let others = equal.len() as f64 - clicks;
        pairs += clicks * (below + others / 2.0);
        below += others;
    }
    pairs / (clicks * below)
}

/// Jain's fairness index: 1 if all values are equal, 1/n if one of n has everything; 0 if no value
/// is above 0.
pub fn jain(values: &[usize]) -> f64 {
    let sum: f64 = values.iter().map(|&value| value as f64).sum();
    let squares: f64 = values.iter().map(|&value| (value * value) as f64).sum();
    if squares > 0.0 { sum * sum / (values.len() as f64 * squares) } else { 0.0 }
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

    #[test]
    fn jains_index_is_1_for_equal_shares_and_1_of_n_for_a_single_owner() {
        assert!((jain(&[20; 20]) - 1.0).abs() < 1e-9);
        assert!((jain(&[8, 0, 0, 0]) - 0.25).abs() < 1e-9);
        assert!((jain(&[1, 3]) - 0.8).abs() < 1e-9);
        assert_eq!((jain(&[0, 0]), jain(&[])), (0.0, 0.0));
    }

    #[test]
    fn auc_is_the_share_of_pairs_in_order() {
        let of = |scores: &[(f32, bool)]| auc(&mut scores.to_vec());
        assert_eq!(of(&[(0.9, true), (0.1, false), (0.8, true)]), 1.0);
        assert_eq!(of(&[(0.1, true), (0.9, false)]), 0.0);
        assert_eq!(of(&[(0.5, true), (0.5, false), (0.5, false)]), 0.5);
        // Of six pairs, four are in order and one has equal scores.
        let mixed = [(0.2, false), (0.7, true), (0.7, false), (0.9, false), (0.95, true)];
        assert_eq!(of(&mixed), (4.0 + 0.5) / 6.0);
    }
}
