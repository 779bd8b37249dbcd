//! Crates of others: where they come from, their licences, and their versions.
//!
//! Advisories are not checked here: the database of RustSec is not in the crate registry. With
//! network access, `cargo deny check advisories` reads it. Which versions are yanked is known from
//! cargo's copy of the registry's index, as of the last fetch.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::root;

#[test]
fn every_crate_comes_from_the_public_registry_with_a_digest() {
    let lock = fs::read_to_string(root().join("Cargo.lock")).unwrap();
    for package in lock.split("[[package]]").skip(1) {
        let has = |key: &str| package.lines().any(|line| line.starts_with(key));
        let is_ours = package.contains("name = \"elasticdl") && !has("source");
        let is_from_registry = has(&format!("source = \"{REGISTRY}\"")) && has("checksum = ");
        assert!(is_ours || is_from_registry, "its source can't be verified:{package}");
    }
}

/// A yanked version stays usable for those who have it in their lock file, whatever the reason for
/// which its authors have withdrawn it.
#[test]
fn no_version_is_yanked() {
    let folders = index_folders();
    let lock = fs::read_to_string(root().join("Cargo.lock")).unwrap();
    for package in lock.split("[[package]]").skip(1).filter(|text| text.contains("source = ")) {
        let value = |key: &str| {
            let mut lines = package.lines();
            let start = format!("{key} = \"");
            lines.find_map(|line| line.strip_prefix(&start)?.strip_suffix('"'))
        };
        let (name, version) = (value("name").unwrap(), value("version").unwrap());
        let entries =
            folders.iter().find_map(|folder| fs::read(folder.join(index_path(name))).ok());
        let yanked = entries.as_deref().and_then(|entries| is_yanked(entries, version));
        let unknown = "is not in cargo's copy of the index; run cargo fetch";
        assert!(
            !yanked.unwrap_or_else(|| panic!("{name} {version} {unknown}")),
            "{name} {version}"
        );
    }
}

#[test]
fn yanked_versions_are_found_in_the_index() {
    let entries =
        b"\x03\x02\0\0\0etag: \"x\"\x001.0.0\0{\"vers\":\"1.0.0\",\"yanked\":true}\x001.0.1\x00\
                    {\"vers\":\"1.0.1\",\"yanked\":false}\0";
    let found = ["1.0.0", "1.0.1", "1.0.2"].map(|version| is_yanked(entries, version));
    assert_eq!(found, [Some(true), Some(false), None]);
    let paths = ["a", "ab", "abc", "Serde_JSON"].map(index_path);
    assert_eq!(paths, ["1/a", "2/ab", "3/a/abc", "se/rd/serde_json"].map(PathBuf::from));
}

/// Cargo's copies of the indices of registries.
fn index_folders() -> Vec<PathBuf> {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(Path::new(&std::env::var_os("HOME")?).join(".cargo")));
    let index = home.unwrap().join("registry/index");
    let folders = fs::read_dir(&index).unwrap_or_else(|e| panic!("{}: {e}", index.display()));
    folders.map(|folder| folder.unwrap().path().join(".cache")).collect()
}

/// Place of a crate in an index.
fn index_path(name: &str) -> PathBuf {
    let name = name.to_ascii_lowercase();
    match name.len() {
        len @ 1..=2 => Path::new(&len.to_string()).join(name),
        3 => Path::new("3").join(&name[..1]).join(name),
        _ => Path::new(&name[..2]).join(&name[2..4]).join(name),
    }
}

/// Returns whether a version is yanked, or `None` if the index does not have it. An entry of
/// cargo's copy is a line of JSON for each version, between NUL bytes.
fn is_yanked(entries: &[u8], version: &str) -> Option<bool> {
    let versions = entries.split(|byte| *byte == 0).filter(|part| part.starts_with(b"{"));
    versions
        .filter_map(|json| serde_json::from_slice::<Value>(json).ok())
        .find(|json| json["vers"] == version)
        .map(|json| json["yanked"] == true)
}

/// Readers and builds stop at a crate's wall: who needs no clusters compiles no client of them.
/// The tests may name all crates.
#[test]
fn crates_are_named_only_where_they_belong() {
    let manifest = |member: &str| fs::read_to_string(root().join(member).join("Cargo.toml"));
    let mut named = BTreeMap::<String, BTreeSet<String>>::new();
    for member in members().into_iter().filter(|member| member != "tests") {
        for name in shipped_dependencies(&manifest(&member).unwrap()) {
            named.entry(name).or_default().insert(member.clone());
        }
    }
    for (names, members) in NAMED_BY {
        let may: BTreeSet<String> = members.iter().map(|member| (*member).into()).collect();
        for name in *names {
            let by = named.remove(*name).unwrap_or_default();
            assert!(by == may, "{name} is named by {by:?}, and must be by {may:?}; see NAMED_BY");
        }
    }
    let ours: Vec<_> = named.keys().filter(|name| name.starts_with("elasticdl")).collect();
    assert!(ours.is_empty(), "{ours:?}: say in NAMED_BY who may name them");
}

/// The members of the workspace.
fn members() -> Vec<String> {
    let workspace = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let list = workspace.lines().find_map(|line| line.strip_prefix("members = [")).unwrap();
    let quoted = list.split('"').skip(1).step_by(2);
    quoted.map(Into::into).collect()
}

/// The crates that a manifest names for what it ships and for build scripts.
fn shipped_dependencies(manifest: &str) -> BTreeSet<String> {
    let mut is_shipped = false;
    let mut names = BTreeSet::new();
    for line in manifest.lines() {
        if let Some(section) = line.strip_prefix('[') {
            is_shipped = section.contains("dependencies]") && !section.contains("dev-");
        } else if is_shipped && line.starts_with(|c: char| c.is_ascii_alphanumeric()) {
            names.extend(line.split([' ', '.', '=']).next().map(Into::into));
        }
    }
    names
}

#[test]
fn every_crate_has_a_licence_that_allows_distribution() {
    let metadata = metadata();
    for package in metadata["packages"].as_array().unwrap() {
        let licence = package["license"].as_str().unwrap_or_default();
        assert!(
            is_allowed(licence),
            "{} {} has the licence {licence:?}; if its terms allow distribution, add it here",
            package["name"],
            package["version"]
        );
    }
}

#[test]
fn licence_expressions_are_evaluated() {
    for allowed in ["MIT", "GPL-3.0 OR MIT", "MIT/GPL-3.0", "(GPL-3.0 OR MIT) AND ISC"] {
        assert!(is_allowed(allowed), "{allowed}");
    }
    for refused in ["", "GPL-3.0", "MIT AND GPL-3.0", "(GPL-3.0 OR MIT) AND GPL-3.0"] {
        assert!(!is_allowed(refused), "{refused}");
    }
}

/// Two versions of a crate are built, loaded and audited twice.
#[test]
fn no_second_version_of_a_crate_is_linked_but_those_that_other_crates_need() {
    let mut versions = BTreeMap::<String, BTreeSet<String>>::new();
    let metadata = metadata();
    for package in linked(&metadata) {
        let text = |key: &str| package[key].as_str().unwrap().to_owned();
        versions.entry(text("name")).or_default().insert(text("version"));
    }
    for (name, versions) in versions {
        let is_known = TWICE.contains(&name.as_str());
        assert!(
            versions.len() == 1 || is_known,
            "{name}: {versions:?}; see `cargo tree -i {name}`"
        );
    }
}

/// What `cargo metadata` prints for this machine.
fn metadata() -> Value {
    let version = Command::new("rustc").arg("-vV").output().unwrap();
    let version = String::from_utf8(version.stdout).unwrap();
    let host = version.lines().find_map(|line| line.strip_prefix("host: ")).unwrap();
    let output = Command::new(env!("CARGO"))
        .args([
            "metadata",
            "--format-version=1",
            "--locked",
            "--offline",
            "--filter-platform",
            host,
        ])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The packages that the shipped crates are linked with: no tests, build scripts and macros.
fn linked(metadata: &Value) -> Vec<&Value> {
    let by_id = |list: &'static str| {
        let list = if list == "nodes" { &metadata["resolve"][list] } else { &metadata[list] };
        let entries = list.as_array().unwrap().iter();
        entries.map(|entry| (entry["id"].as_str().unwrap(), entry)).collect::<BTreeMap<_, _>>()
    };
    let (packages, nodes) = (by_id("packages"), by_id("nodes"));
    let is_shipped = |package: &Value| SHIPPED.iter().any(|name| package["name"] == *name);
    let is_macro = |id: &str| packages[id]["targets"][0]["kind"][0] == "proc-macro";
    let mut open: Vec<&str> =
        packages.iter().filter(|(_, package)| is_shipped(package)).map(|(id, _)| *id).collect();
    let mut found: BTreeSet<&str> = open.iter().copied().collect();
    while let Some(id) = open.pop() {
        for dependency in nodes[id]["deps"].as_array().unwrap() {
            let kinds = dependency["dep_kinds"].as_array().unwrap();
            let id = dependency["pkg"].as_str().unwrap();
            let is_linked = kinds.iter().any(|kind| kind["kind"].is_null()) && !is_macro(id);
            if is_linked && found.insert(id) {
                open.push(id);
            }
        }
    }
    found.into_iter().map(|id| packages[id]).collect()
}

/// Whether a licence expression can be met with allowed licences. A `/` is the old form of `OR`.
fn is_allowed(expression: &str) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let spaced = spaced.replace(" WITH ", "+");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut rest = &words[..];
    let is_met = any_of(&mut rest);
    is_met && rest.is_empty()
}

fn any_of(rest: &mut &[&str]) -> bool {
    let mut is_met = all_of(rest);
    while let Some((&"OR", after)) = rest.split_first() {
        *rest = after;
        is_met |= all_of(rest);
    }
    is_met
}

fn all_of(rest: &mut &[&str]) -> bool {
    let mut is_met = one(rest);
    while let Some((&"AND", after)) = rest.split_first() {
        *rest = after;
        is_met &= one(rest);
    }
    is_met
}

fn one(rest: &mut &[&str]) -> bool {
    let Some((word, after)) = rest.split_first() else { return false };
    *rest = after;
    if *word != "(" {
        return ALLOWED.contains(word);
    }
    let is_met = any_of(rest);
    let Some((&")", after)) = rest.split_first() else { return false };
    *rest = after;
    is_met
}

const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// Crates whose code is in the programs and libraries that users get.
const SHIPPED: [&str; 9] = [
    "elasticdl",
    "elasticdl-cli",
    "elasticdl-collective",
    "elasticdl-data",
    "elasticdl-examples",
    "elasticdl-master",
    "elasticdl-proto",
    "elasticdl-python",
    "elasticdl-tables",
];

/// Crates, and the members of the workspace that name them.
const NAMED_BY: &[(&[&str], &[&str])] = &[
    (&["arrow-array", "arrow-buffer", "arrow-ipc", "arrow-schema"], &["worker/data"]),
    (&["candle-core", "candle-nn"], &["worker"]),
    (&["clap"], &["examples", "master/cli"]),
    (&["clap_complete", "clap_mangen", "indicatif"], &["master/cli"]),
    (&["cudarc"], &["collective", "worker"]),
    (&["elasticdl"], &["examples", "worker/python"]),
    (&["elasticdl-cli"], &[]),
    (&["elasticdl-collective"], &["worker"]),
    (&["elasticdl-data"], &["worker"]),
    (&["elasticdl-master"], &["master/cli"]),
    (&["elasticdl-proto"], &["master", "master/cli", "worker", "worker/data"]),
    (&["elasticdl-stand-ins"], &[]),
    (&["elasticdl-tables"], &["worker"]),
    (&["k8s-openapi", "kube"], &["master"]),
    (&["csv", "object_store", "parquet", "tar"], &["worker/data"]),
    (&["pyo3"], &["worker/python"]),
    (&["tokio"], &["master", "master/cli", "worker", "worker/data"]),
    (&["tonic"], &["master", "master/cli", "proto", "worker"]),
    (&["zune-core", "zune-jpeg", "zune-png"], &["worker/data"]),
];

/// Licences without conditions on the programs that contain the code, but notices.
const ALLOWED: [&str; 13] = [
    "0BSD",
    "Apache-2.0",
    "Apache-2.0+LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "CDLA-Permissive-2.0",
    "ISC",
    "MIT",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// Crates of which others need two versions: `snow` has the hashes and ciphers of RustCrypto before
/// their change of major versions; candle and its tokenizers bring older ones of the others.
const TWICE: [&str; 16] = [
    "base64",
    "bit-vec",
    "block-buffer",
    "chacha20",
    "cpufeatures",
    "crypto-common",
    "digest",
    "embedded-io",
    "getrandom",
    "hashbrown",
    "itertools",
    "num-bigint",
    "rand",
    "rand_core",
    "sha2",
    "tower-http",
];
