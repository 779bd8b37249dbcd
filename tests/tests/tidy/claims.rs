//! The table of claims in `tests/README.md` is made of the tests: the first paragraph of a module
//! is its claim.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

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
    let mut table = String::from("\n| claim | needs | command |\n|---|---|---|\n");
    for path in sources(&tests) {
        let inside = path.strip_prefix(&tests).unwrap();
        let folder = inside.parent().and_then(Path::to_str).unwrap();
        let name = inside.file_stem().and_then(|stem| stem.to_str()).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        let in_cluster = folder == "cluster";
        let command = match (folder, name) {
            ("", "simulation" | "zoo") => format!("--test {name}"),
            ("cluster" | "jobs", "main") => continue,
            ("cluster", _) => String::new(),
            ("jobs", _) => format!("--test jobs {name}::"),
            ("fuzz", "main") => "--test fuzz".into(),
            _ => continue,
        };
        let ignored = needs_of(&text);
        let needs =
            if in_cluster { "a cluster" } else { ignored.first().map_or("", |needs| needs) };
        let command = match (in_cluster, ignored.is_empty()) {
            (true, _) => "`.ci/cluster`".into(),
            (false, true) => format!("`cargo test -p elasticdl-tests {command}`"),
            (false, false) => {
                format!("`cargo test -p elasticdl-tests {command} -- --include-ignored`")
            }
        };
        writeln!(table, "| {} | {needs} | {command} |", claim(&text)).unwrap();
    }
    table
}

/// The first paragraph of the module's documentation.
fn claim(text: &str) -> String {
    let lines = text.lines().map_while(|line| line.strip_prefix("//! "));
    lines.collect::<Vec<_>>().join(" ").trim_end_matches('.').to_owned()
}

/// What ignored tests of the module need, one entry each.
fn needs_of(text: &str) -> Vec<&str> {
    let marked = text.split("#[ignore = \"").skip(1);
    marked
        .filter_map(|rest| rest.strip_prefix("needs ")?.split_once('"'))
        .map(|(needs, _)| needs)
        .collect()
}

const BEGIN: &str = "<!-- claims, made of the tests -->\n";
const END: &str = "\n<!-- end of claims -->\n";
