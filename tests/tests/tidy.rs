//! Rules of this repository that no compiler checks, with their reasons.

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf()
}

fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap().map(Result::unwrap) {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                files.push(path);
            }
        }
    }
    files.sort();
    assert!(!files.is_empty(), "{}: no sources", folder.display());
    files
}

fn crates() -> [&'static str; 6] {
    ["collective", "examples", "master", "proto", "tests", "worker"]
}

/// The code of a file: without comments, and without the tests at its end.
fn code(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap();
    let text = text.split("#[cfg(test)]").next().unwrap_or_default();
    text.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

#[test]
fn the_core_has_no_io_no_clock_and_no_randomness() {
    let root = root();
    let mut core = sources(&root.join("master/src/job"));
    core.extend(sources(&root.join("worker/src/core")));
    let tests = ["tests", "tests.rs", "testing.rs"];
    core.retain(|path| {
        let inside = path.strip_prefix(&root).unwrap();
        !inside.components().any(|c| tests.iter().any(|test| c.as_os_str() == *test))
    });
    let files = [
        "collective/src/chunk.rs",
        "collective/src/frame.rs",
        "collective/src/schedule.rs",
        "master/src/kube/priority_tiers.rs",
        "master/src/kube/leader_lease/election.rs",
        "master/src/kube/verdict.rs",
        "proto/src/ledger.rs",
        "proto/src/ranges.rs",
    ];
    core.extend(files.map(|file| root.join(file)));
    let banned = [
        ("async ", "a core takes events and gives actions; it waits for nothing"),
        ("tokio", "the runtime belongs to the shell"),
        ("tonic", "generated types stop at the service and client files"),
        ("Instant", "the time is an argument, so that tests can choose it"),
        ("SystemTime", "the time is an argument, so that tests can choose it"),
        ("HashMap", "its order differs from run to run; a BTreeMap's does not"),
        ("HashSet", "its order differs from run to run; a BTreeSet's does not"),
        ("std::env", "what a core needs is passed to it"),
        ("std::fs", "a core does no IO"),
        ("TcpStream", "a core does no IO"),
        ("thread", "a core is one state machine, driven by one task"),
        ("Mutex", "one task owns the state; it is not shared"),
    ];
    for path in core {
        let code = code(&path);
        for (word, reason) in banned {
            assert!(!code.contains(word), "{}: {word}: {reason}", path.display());
        }
    }
}

#[test]
fn crates_depend_only_on_allowed_crates() {
    let arrows = [
        ("proto", vec![]),
        ("collective", vec![]),
        ("worker", vec!["collective", "proto"]),
        ("master", vec!["proto"]),
        ("examples", vec!["worker"]),
    ];
    for (name, may) in arrows {
        let manifest = fs::read_to_string(root().join(name).join("Cargo.toml")).unwrap();
        for other in crates() {
            let knows =
                manifest.lines().any(|line| line.starts_with(&format!("elasticdl-{other}")));
            assert!(
                !knows || may.contains(&other),
                "{name} may not know {other}; see the architecture page"
            );
        }
    }
    for name in crates() {
        let manifest = fs::read_to_string(root().join(name).join("Cargo.toml")).unwrap();
        let shipped = manifest.split("[dev-dependencies]").next().unwrap();
        assert!(
            !shipped.contains("elasticdl-stand-ins"),
            "{name}: what stands in for a GPU is for tests"
        );
    }
    let collective = fs::read_to_string(root().join("collective/Cargo.toml")).unwrap();
    for word in ["tonic", "tokio", "kube"] {
        assert!(
            !collective.contains(word),
            "collective: {word}: the ring blocks on threads of its own"
        );
    }
}

#[test]
fn the_readme_shows_the_smallest_model_as_it_is() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let shown =
        readme.split("<!-- linear -->\n```rust\n").nth(1).unwrap().split("\n```").next().unwrap();
    let model = fs::read_to_string(root().join("examples/src/bin/linear.rs")).unwrap();
    let model = model.split("#[cfg(test)]").next().unwrap().trim_end();
    assert!(shown == model, "copy examples/src/bin/linear.rs into the README");
    assert!(
        model.lines().count() < 80,
        "the smallest model has grown to {} lines",
        model.lines().count()
    );
}

#[test]
fn no_file_is_too_long() {
    for folder in crates().map(|name| root().join(name)) {
        for path in sources(&folder) {
            let lines = fs::read_to_string(&path).unwrap().lines().count();
            let is_test =
                path.strip_prefix(&folder).unwrap().components().any(|c| c.as_os_str() == "tests");
            let most = if is_test { 820 } else { 700 };
            assert!(lines <= most, "{}: {lines} lines; split it by topic", path.display());
        }
    }
}

#[test]
fn no_open_ends_are_left_in_the_code() {
    let this = Path::new(file!()).file_name().unwrap();
    let marks =
        ["todo!(", "unimplemented!(", "#[ignore", "FIXME", "XXX", "TODO", "allow(dead_code)"];
    for path in crates().iter().flat_map(|name| sources(&root().join(name))) {
        if path.file_name() == Some(this) {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        for mark in marks {
            assert!(
                !text.contains(mark),
                "{}: {mark}: finish it, or list it in the README as missing",
                path.display()
            );
        }
    }
}
