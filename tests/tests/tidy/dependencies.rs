//! Crates of others: who names them, and which come twice. `cargo deny` checks where they come
//! from, their licences and advisories.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::process::Command;

use serde_json::Value;

use crate::root;

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
    (&["opentelemetry", "opentelemetry-otlp", "opentelemetry_sdk"], &["master"]),
    (&["csv", "object_store", "parquet", "tar"], &["worker/data"]),
    (&["pyo3"], &["worker/python"]),
    (&["tokio"], &["master", "master/cli", "worker", "worker/data"]),
    (&["tonic"], &["master", "master/cli", "proto", "worker"]),
    (&["zune-core", "zune-jpeg", "zune-png"], &["worker/data"]),
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
