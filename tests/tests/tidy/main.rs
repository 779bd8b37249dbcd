//! Rules of this repository that no compiler checks, with their reasons.

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

mod claims;
mod dependencies;
mod imports;
mod planted;
mod source;

use std::fs;
use std::path::{Path, PathBuf};

use imports::Imports;
use source::{Part, parts};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf()
}

fn sources(folder: &Path) -> Vec<PathBuf> {
    let files = files(folder, &["rs"]);
    assert!(!files.is_empty(), "{}: no sources", folder.display());
    files
}

/// The files of a folder and of its subfolders that have one of these extensions.
fn files(folder: &Path, extensions: &[&str]) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap().map(Result::unwrap) {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| extensions.iter().any(|one| e == *one)) {
                files.push(path);
            }
        }
    }
    files.sort();
    files
}

/// The code that is shipped, without comments, literals and tests.
fn code(path: &Path) -> String {
    source::code(&fs::read_to_string(path).unwrap())
}

fn crates() -> [&'static str; 6] {
    ["collective", "examples", "master", "proto", "tests", "worker"]
}

#[test]
fn the_core_has_no_io_no_clock_and_no_randomness() {
    let root = root();
    let mut core = sources(&root.join("master/src/job"));
    core.extend(sources(&root.join("worker/src/session")));
    core.push(root.join("worker/src/session.rs"));
    core.extend(sources(&root.join("collective/src/algorithm")));
    let tests = ["tests", "tests.rs", "testing.rs", "simulation.rs"];
    core.retain(|path| {
        let inside = path.strip_prefix(&root).unwrap();
        !inside.components().any(|c| tests.iter().any(|test| c.as_os_str() == *test))
    });
    let messages = sources(&root.join("proto/src")).into_iter();
    let messages = messages.filter(|path| !path.components().any(|c| c.as_os_str() == "wire"));
    // Threads share the order of records, which keeps the layouts of the epochs used last.
    let messages = messages.filter(|path| !path.ends_with("proto/src/order.rs"));
    // An inspection names threads.
    let names_threads = |path: &Path| path.to_string_lossy().contains("proto/src/inspection");
    core.extend(messages.filter(|path| !names_threads(path)));
    let files = [
        "collective/src/device/group/nccl_offer.rs",
        "collective/src/net/admission.rs",
        "collective/src/net/frame.rs",
        "collective/src/net/handshake.rs",
        "collective/src/shm/notes.rs",
        "master/src/dashboard/history.rs",
        "master/src/dashboard/history/curves.rs",
        "master/src/dashboard/history/goodput.rs",
        "master/src/kube/gang.rs",
        "master/src/kube/leader_lease/election.rs",
        "master/src/kube/pods/factory.rs",
        "master/src/kube/pods/tracker.rs",
        "master/src/kube/pods/tracker/gangs.rs",
        "master/src/kube/pods/tracker/timeouts.rs",
        "master/src/kube/priority_tiers.rs",
        "master/src/kube/verdict.rs",
        "proto/src/wire/decode.rs",
        "proto/src/wire/encode.rs",
    ];
    core.extend(files.map(|file| root.join(file)));
    let banned = [
        ("async ", "a core takes events and gives actions; it waits for nothing"),
        ("tokio", "the runtime belongs to the shell"),
        ("tonic", "gRPC belongs to the shell"),
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

/// A wall clock may be set, and may differ between hosts: neither may make a worker or a master
/// look lost. Other times are those of monotonic clocks.
#[test]
fn the_wall_clock_decides_about_no_worker_and_no_master() {
    let reads = ["SystemTime::now", "Timestamp::now", "Utc::now", "Realtime", "CLOCK_REALTIME"];
    let mut found = Vec::new();
    for path in
        ["collective", "master", "proto", "worker"].iter().flat_map(|c| sources(&root().join(c)))
    {
        let inside = path.strip_prefix(root()).unwrap();
        let is_test = inside.components().any(|part| part.as_os_str() == "tests");
        let is_test = is_test || inside.ends_with("tests.rs");
        if !is_test && reads.iter().any(|word| code(&path).contains(word)) {
            found.push(inside.to_str().unwrap().to_owned());
        }
    }
    let known = WALL_CLOCK.map(|(file, _)| file);
    assert_eq!(found, known, "use a monotonic clock, or say in WALL_CLOCK what the time is for");
}

#[test]
fn no_import_cycle_has_more_than_three_files() {
    // Each example is a program of its own.
    let libraries = crates().into_iter().filter(|name| *name != "examples");
    for name in libraries.chain(["master/cli", "worker/data", "worker/tables"]) {
        let imports = Imports::of(&root().join(name).join("src/lib.rs"));
        let cycles = imports.cycles(3);
        assert!(cycles.is_empty(), "{name}: these files import each other: {cycles:#?}");
    }
}

#[test]
fn the_parts_of_a_job_do_not_know_each_other() {
    let job = root().join("master/src/job");
    let imports = Imports::of(&root().join("master/src/lib.rs"));
    for part in ["workers", "group", "data"].map(|part| job.join(part)) {
        for (from, targets) in imports.arrows.iter().filter(|(from, _)| from.starts_with(&part)) {
            // Beside the folders are the words that all parts share: events, actions, times.
            let is_shared = |to: &Path| to.parent() == Some(&job) && !to.ends_with("job.rs");
            let other = targets.iter().find(|to| !to.starts_with(&part) && !is_shared(to));
            assert!(
                other.is_none(),
                "{} imports {other:?}; what spans parts is a handler",
                from.display()
            );
        }
    }
    let cycles = imports.cycles(3);
    let cycle = cycles.iter().find(|files| files.iter().any(|file| file.starts_with(&job)));
    assert!(cycle.is_none(), "these files import each other: {cycle:#?}");
    let lines = fs::read_to_string(job.join("job.rs")).unwrap().lines().count();
    assert!(lines <= 300, "job.rs has {lines} lines; it only dispatches");
}

#[test]
fn the_layers_of_collective_import_only_downwards() {
    let source = root().join("collective/src");
    // What is not in a folder, the errors and the trait, is below all layers.
    let layers = ["algorithm", "net", "transfer", "shm", "state", "group", "device", "testing"];
    assert_layers(&Imports::of(&source.join("lib.rs")), &source, &layers);
}

#[test]
fn the_parts_of_the_command_line_import_only_downwards() {
    let source = root().join("master/cli/src");
    let parts = ["process.rs", "args", "render", "backend", "commands"];
    assert_layers(&Imports::of(&source.join("lib.rs")), &source, &parts);
}

/// Asserts that no file in `source` imports one of a later layer. Files and folders in no layer are
/// below all.
fn assert_layers(imports: &Imports, source: &Path, layers: &[&str]) {
    let layer = |file: &Path| {
        let inside = file.strip_prefix(source).ok()?;
        layers.iter().position(|layer| inside.starts_with(layer))
    };
    let is_root =
        |file: &Path| [source.join("lib.rs"), source.join("mod.rs")].contains(&file.into());
    for (from, targets) in imports.arrows.iter().filter(|(from, _)| from.starts_with(source)) {
        for to in targets.iter().filter(|_| !is_root(from)) {
            assert!(
                layer(to) <= layer(from),
                "{} imports {}, of a layer above it",
                from.display(),
                to.display()
            );
        }
    }
}

#[test]
fn the_readme_is_short_and_shows_the_model_of_the_candle_adapter() {
    let read = |path: &str| fs::read_to_string(root().join(path)).unwrap();
    let readme = read("README.md");
    let after = readme.split("<!-- first model -->\n```rust\n").nth(1).unwrap();
    let model = after.split("\n```").next().unwrap();
    // The doctest of the adapter compiles this code.
    let adapter = read("worker/src/candle.rs");
    let example = adapter.split("/// ```no_run\n").nth(1).unwrap().split("/// ```").next().unwrap();
    let example: Vec<&str> =
        example.lines().map(|line| line.strip_prefix("/// ").unwrap_or_default()).collect();
    assert!(model == example.join("\n"), "copy the model of worker/src/candle.rs into README.md");
    assert!(model.lines().count() <= 48, "the first model has {} lines", model.lines().count());
    let lines = readme.lines().count();
    assert!(
        lines <= 170,
        "README.md has {lines} lines; details belong into the pages that it links"
    );
}

#[test]
fn links_between_documents_lead_somewhere() {
    let documents = [
        "README.md",
        ".github/ARCHITECTURE.md",
        ".github/CHANGELOG.md",
        ".github/CONTRIBUTING.md",
        "collective/README.md",
        "manifests/README.md",
        "master/README.md",
        "tests/README.md",
    ];
    for path in documents {
        let path = root().join(path);
        let text = fs::read_to_string(&path).unwrap();
        let targets = text.split("](").skip(1).map(|rest| rest.split(')').next().unwrap());
        for target in targets.filter(|t| !t.contains("://") && !t.starts_with('#')) {
            let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
            let target = path.parent().unwrap().join(file);
            assert!(target.exists(), "{}: {file} does not exist", path.display());
            let heading = |line: &str| line.starts_with('#') && slug(line) == anchor;
            let found =
                anchor.is_empty() || fs::read_to_string(&target).unwrap().lines().any(heading);
            assert!(found, "{}: {file} has no heading {anchor}", path.display());
        }
    }
    // Paths in code spans of the architecture page.
    let text = fs::read_to_string(root().join(".github/ARCHITECTURE.md")).unwrap();
    let spans = text.split('`').skip(1).step_by(2).filter(|span| !span.contains('\n'));
    let folders = crates().map(|name| format!("{name}/"));
    for span in spans.filter(|span| folders.iter().any(|folder| span.starts_with(folder))) {
        assert!(root().join(span).exists(), "ARCHITECTURE.md: {span} does not exist");
    }
}

/// The anchor that Markdown renderers make of a heading.
fn slug(heading: &str) -> String {
    let heading = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || *c == ' ' || *c == '-');
    kept.collect::<String>().replace(' ', "-")
}

/// `test = false` of a library or a program says that it has none.
#[test]
fn no_test_is_in_a_target_whose_tests_are_not_run() {
    for package in ["collective/stand-ins", "examples", "master/cli", "tests"] {
        let package = root().join(package);
        let manifest = fs::read_to_string(package.join("Cargo.toml")).unwrap();
        for entry in manifest.split("\n\n").filter(|entry| entry.ends_with("\ntest = false")) {
            let value = |key: &str| {
                let mut lines = entry.lines().filter_map(|line| line.strip_prefix(key));
                lines.next().map(|value| value.trim_matches([' ', '=', '"']))
            };
            let path = match (value("path"), value("name")) {
                (Some(path), _) => path.to_owned(),
                (None, Some(name)) => format!("src/bin/{name}.rs"),
                (None, None) => "src/lib.rs".to_owned(),
            };
            let file = package.join(path);
            let folder = file.with_extension("").join("main.rs");
            let file = if file.exists() { file } else { folder };
            for file in Imports::of(&file).arrows.keys() {
                let text = fs::read_to_string(file).unwrap();
                let hidden = ["#[test]", "#[cfg(test)]"].iter().find(|mark| text.contains(**mark));
                assert_eq!(hidden, None, "{}: `test = false` hides it", file.display());
            }
        }
    }
}

#[test]
fn no_file_is_too_long() {
    for path in crates().iter().flat_map(|name| sources(&root().join(name))) {
        let lines = fs::read_to_string(&path).unwrap().lines().count();
        assert!(lines <= 600, "{}: {lines} lines; split it by topic", path.display());
    }
}

#[test]
fn no_open_ends_are_left_in_the_code() {
    // A test that is ignored says what it needs.
    let marks =
        ["todo!(", "unimplemented!(", "#[ignore]", "FIXME", "XXX", "TODO", "allow(dead_code)"];
    for path in crates().iter().flat_map(|name| sources(&root().join(name))) {
        if path.ends_with("tests/tests/tidy/main.rs") {
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
        let mut reasons = text.split("#[ignore = \"").skip(1);
        let other = reasons.find(|reason| !reason.starts_with("needs "));
        assert_eq!(other, None, "{}: ignored for another reason", path.display());
    }
}

#[test]
fn lines_have_at_most_100_columns() {
    let mut wrong = Vec::new();
    for path in crates().iter().flat_map(|name| files(&root().join(name), &["rs", "proto", "md"])) {
        let text = fs::read_to_string(&path).unwrap();
        let verbatim =
            if path.extension().is_some_and(|e| e == "rs") { verbatim(&text) } else { Vec::new() };
        let mut is_fenced = false;
        for (number, line) in (1..).zip(text.lines()) {
            // Diagrams and tables, in Markdown files and in doc comments.
            let prose = line.trim_start().trim_start_matches(['/', '!']).trim_start();
            is_fenced ^= prose.starts_with("```");
            let is_verbatim = is_fenced || prose.starts_with('|') || verbatim.contains(&number);
            let is_exempt = is_verbatim || line.contains("://") || is_long_literal(line);
            if line.chars().count() > COLUMNS_MAX && !is_exempt {
                wrong.push(format!("{}:{number}", path.display()));
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "more than {COLUMNS_MAX} columns; wrap the comment, or continue the string with a \\:\n{}",
        wrong.join("\n")
    );
}

#[test]
fn names_and_comments_use_standard_terms() {
    let mut wrong = Vec::new();
    for path in crates().iter().flat_map(|name| sources(&root().join(name))) {
        let text = fs::read_to_string(&path).unwrap();
        let inside = path.strip_prefix(root()).unwrap().to_str().unwrap().to_owned();
        for part in parts(&text) {
            let (line, text, is_comment) = match part {
                Part::Code(line, text) => (line, text, false),
                Part::Comment(line, text) => (line, text, true),
                Part::Literal(..) => continue,
            };
            for (offset, text) in text.lines().enumerate() {
                for word in words(text) {
                    let Some((_, term)) =
                        REFUSED.iter().find(|(refused, _)| is_form(&word, refused))
                    else {
                        continue;
                    };
                    let is_allowed = ALLOWED.iter().any(|(file, allowed, in_comments, _)| {
                        inside.starts_with(file) && word == *allowed && *in_comments == is_comment
                    });
                    if !is_allowed {
                        wrong.push(format!("{inside}:{}: {word}: say {term}", line + offset));
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "private words; use the field's:\n{}", wrong.join("\n"));
}

/// Whether a line is too long because of one string literal without a sensible place to break it:
/// a pattern, a path, a command line or a header.
fn is_long_literal(line: &str) -> bool {
    let literal = line.split('"').skip(1).step_by(2).map(|text| text.chars().count()).max();
    let spaces = line.split('"').skip(1).step_by(2).map(|text| text.matches(' ').count()).max();
    literal > Some(40) && spaces < Some(4)
}

/// Numbers of the lines that begin within a string literal, and whose text a program prints or
/// reads as it stands.
fn verbatim(text: &str) -> Vec<usize> {
    let mut verbatim = Vec::new();
    for part in parts(text) {
        let Part::Literal(line, text) = part else { continue };
        let lines: Vec<&str> = text.lines().collect();
        let continued = |at: usize| lines[at - 1].ends_with('\\');
        verbatim.extend((1..lines.len()).filter(|at| !continued(*at)).map(|at| line + at));
    }
    verbatim
}

/// The words of a text in lower case; `snake_case` and `CamelCase` are several.
fn words(text: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut was_lower = false;
    for c in text.chars() {
        if !c.is_alphabetic() || (was_lower && c.is_uppercase()) {
            words.push(String::new());
        }
        if c.is_alphabetic() {
            words.last_mut().unwrap().extend(c.to_lowercase());
        }
        was_lower = c.is_lowercase();
    }
    words.retain(|word| !word.is_empty());
    words
}

/// Whether `word` is `refused` or its plural.
fn is_form(word: &str, refused: &str) -> bool {
    let stem = refused.strip_suffix('y');
    word == refused
        || word.strip_suffix('s') == Some(refused)
        || stem.is_some_and(|stem| word.strip_suffix("ies") == Some(stem))
}

const COLUMNS_MAX: usize = 100;

/// Files that read the wall clock, and what for.
const WALL_CLOCK: [(&str, &str); 20] = [
    ("master/cli/src/backend/cluster.rs", "times shown to the user"),
    ("master/cli/src/backend/list.rs", "times shown to the user"),
    ("master/cli/src/process.rs", "times of lines of output"),
    ("master/cli/src/progress.rs", "times of lines of output"),
    ("master/cli/src/render/end.rs", "times of lines of output"),
    ("master/src/certificates.rs", "validity of certificates, of ten years"),
    ("master/src/cluster_master/leader.rs", "when the job began, as the page shows it"),
    ("master/src/cluster_master/publish.rs", "when the status was published, for the user"),
    ("master/src/jobdir/start_time.rs", "age of the job after a reboot of its machine"),
    ("master/src/kube/client.rs", "time where the API server does not tell its own"),
    ("master/src/kube/declaration.rs", "times of Events"),
    ("master/src/kube/events.rs", "times of Events"),
    ("master/src/kube/inspection.rs", "a number of the request that no earlier one has"),
    ("master/src/kube/leader_lease.rs", "times in the Lease, for its readers"),
    ("master/src/kube/requests.rs", "times of Events"),
    ("master/src/kube/train_job.rs", "the time of a report, for its readers"),
    ("master/src/mlflow.rs", "times of metrics"),
    ("master/src/otlp.rs", "times of spans"),
    ("master/src/tensorboard.rs", "times of metrics"),
    ("worker/src/checkpoint/writer.rs", "when a checkpoint was written, for the user"),
];

/// Words that a reader would have to translate, each with the standard term.
const REFUSED: [(&str, &str); 21] = [
    ("bell", "notifier"),
    ("borne", "tolerated"),
    ("crew", "workers, worker table"),
    ("doze", "park, wait"),
    ("foreman", "pod controller"),
    ("ladder", "priority tiers"),
    ("limbo", "unaccounted"),
    ("lobby", "pending requests"),
    ("mould", "template"),
    ("newcomer", "joiner"),
    ("nobody", "no rank, no worker"),
    ("parking", "pending dials"),
    ("porter", "acceptor"),
    ("rung", "tier"),
    ("sight", "event, observation"),
    ("somebody", "a rank, a worker"),
    ("story", "history, trace"),
    ("stranger", "unauthenticated peer"),
    ("warrant", "fencing token, lease guard"),
    ("whoever", "the rank that, each worker that"),
    ("wishes", "desired state"),
];

/// Exceptions: a path's beginning, the word, whether in comments, and the reason.
const ALLOWED: [(&str, &str, bool, &str); 1] =
    [("tests/src/bin/simulate.rs", "story", true, "the name of the flag `--story`")];
