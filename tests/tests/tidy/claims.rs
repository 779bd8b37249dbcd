//! The table of claims in `tests/README.md` is made of the tests: the first paragraph of a module
//! is its claim.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use super::{root, sources};

#[test]
fn the_table_of_claims_is_that_of_the_tests() {
    let path = root().join("tests/README.md");
    let text = fs::read_to_string(&path).unwrap();
    let (before, rest) = text.split_once(BEGIN).unwrap();
    let (_, after) = rest.split_once(END).unwrap();
    let made = format!("{before}{BEGIN}{}{END}{after}", table());
    if std::env::var_os("ELASTICDL_BLESS").is_some() {
        fs::write(&path, &made).unwrap();
    }
    let text = fs::read_to_string(&path).unwrap();
    assert!(made == text, "{}: run this test with ELASTICDL_BLESS=1", path.display());
}

fn table() -> String {
    let tests = root().join("tests/tests");
    let mut table = String::from("\n| claim | tests | command |\n|---|---|---|\n");
    for path in sources(&tests) {
        let inside = path.strip_prefix(&tests).unwrap();
        let folder = inside.parent().and_then(Path::to_str).unwrap();
        let name = inside.file_stem().and_then(|stem| stem.to_str()).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        let in_cluster = text.contains("cluster_tests![");
        let command = match (folder, name) {
            ("" | "jobs", "network_policy" | "simulation" | "zoo") => format!("--test {name}"),
            ("", _) if in_cluster => String::new(),
            ("jobs", "main") => continue,
            ("jobs", _) => format!("--test jobs {name}::"),
            ("fuzz", "main") => "--test fuzz".into(),
            _ => continue,
        };
        let ignored = reasons(&text);
        let count = match ignored.first() {
            _ if in_cluster => listed(&text).to_string(),
            _ if folder == "fuzz" => {
                sources(path.parent().unwrap()).iter().map(count).sum::<usize>().to_string()
            }
            None => count(&path).to_string(),
            Some(reason) => format!("{}, {} {reason}", count(&path), ignored.len()),
        };
        let command = match (in_cluster, ignored.is_empty()) {
            (true, _) => "`.ci/cluster`".into(),
            (false, true) => format!("`cargo test -p elasticdl-tests {command}`"),
            (false, false) => {
                format!("`cargo test -p elasticdl-tests {command} -- --include-ignored`")
            }
        };
        writeln!(table, "| {} | {count} | {command} |", claim(&text)).unwrap();
    }
    table
}

/// The first paragraph of the module's documentation.
fn claim(text: &str) -> String {
    let lines = text.lines().map_while(|line| line.strip_prefix("//! "));
    lines.collect::<Vec<_>>().join(" ").trim_end_matches('.').to_owned()
}

/// Number of a module's tests.
fn count(path: &PathBuf) -> usize {
    let text = fs::read_to_string(path).unwrap();
    ["#[test]", "#[tokio::test"].iter().map(|mark| text.matches(mark).count()).sum()
}

/// Why tests of the module are ignored, one entry each.
fn reasons(text: &str) -> Vec<&str> {
    let marked = text.split("#[ignore = \"").skip(1);
    marked.filter_map(|rest| rest.split_once('"')).map(|(reason, _)| reason).collect()
}

/// Number of tests that the module's harness runs.
fn listed(text: &str) -> usize {
    let (_, list) = text.split_once("cluster_tests![").unwrap();
    list.split_once(']').unwrap().0.split(',').filter(|name| !name.trim().is_empty()).count()
}

const BEGIN: &str = "<!-- claims, made of the tests -->\n";
const END: &str = "\n<!-- end of claims -->\n";
