//! Checks that the Role of manifests/rbac.yaml is what masters need, and nothing more, but for what
//! the manifests of options allow: `begin` enables the audit log of a test cluster's API server;
//! after the tests, `check` compares.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use elasticdl_tests::cluster::{ApiServer, calls, kubectl, must};
use serde_json::Value;

#[derive(Parser)]
enum Command {
    /// Enable the audit log of the API server.
    Begin,
    /// Compare the calls of the masters in namespaces e2e-… with what the Role allows.
    Check,
}

type Right = (String, String);

#[expect(clippy::print_stdout, reason = "it is what the command is for")]
fn main() -> ExitCode {
    let log = ApiServer::new().audit();
    if matches!(Command::parse(), Command::Begin) {
        println!("the API server writes to {}", log.display());
        return ExitCode::SUCCESS;
    }
    let role = rights("rbac.yaml");
    let optional: BTreeSet<Right> = OPTIONAL.iter().flat_map(|file| rights(file)).collect();
    let mut used: BTreeMap<Right, usize> = BTreeMap::new();
    let mut faults = BTreeSet::new();
    for call in calls(&log).into_iter().filter(|call| call.home.starts_with("e2e-")) {
        let right = (call.resource.clone(), call.verb.clone());
        if optional.contains(&right) {
            // Allowed or not: the master goes on without it, or the job asks for it.
        } else if !call.allowed && role.contains(&right) {
            // An API server that has just started does not know the Role yet.
        } else if !call.allowed {
            faults.insert(format!("refused: {} {}", call.verb, call.resource));
        } else if call.resource.starts_with('/') {
            // Discovery, which all accounts may do.
        } else if call.namespace != call.home {
            faults.insert(format!("outside its namespace: {} {}", call.verb, call.resource));
        } else if !role.contains(&right) {
            faults.insert(format!("allowed by another role: {} {}", call.verb, call.resource));
        }
        *used.entry(right).or_default() += 1;
    }
    for ((resource, verb), count) in &used {
        println!("{count:>6}  {verb:<8} {resource}");
    }
    let rare = |(resource, verb): &&Right| RARE.iter().any(|(r, v, _)| resource == r && verb == v);
    for (resource, verb) in role.iter().filter(|right| !used.contains_key(right) && !rare(right)) {
        faults.insert(format!("allowed and never asked for: {verb} {resource}"));
    }
    for (resource, verb, why) in RARE {
        println!("     -  {verb:<8} {resource}: only after {why}");
    }
    faults.iter().for_each(|fault| println!("{fault}"));
    if faults.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Resources, with their group, and verbs that the roles of a manifest allow.
fn rights(manifest: &str) -> BTreeSet<Right> {
    let root =
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a crate lies in its workspace");
    let file = root.join("manifests").join(manifest).display().to_string();
    let output = must(kubectl().args(["create", "--dry-run=client", "-o", "json", "-f", &file]));
    let stream = serde_json::Deserializer::from_slice(&output.stdout).into_iter::<Value>();
    let objects = stream.map(|object| object.expect("kubectl prints JSON"));
    let is_role = |object: &Value| object["kind"] == "Role" || object["kind"] == "ClusterRole";
    let rules = objects.filter(is_role).flat_map(|role| list(&role["rules"]));
    let mut rights = BTreeSet::new();
    for rule in rules {
        for (group, resource) in pairs(&rule["apiGroups"], &rule["resources"]) {
            let resource = if group.is_empty() { resource } else { format!("{group}/{resource}") };
            rights.extend(list(&rule["verbs"]).iter().map(|verb| (resource.clone(), text(verb))));
        }
    }
    assert!(!rights.is_empty(), "{file} has no role");
    rights
}

fn pairs(left: &Value, right: &Value) -> Vec<(String, String)> {
    let right = list(right);
    list(left)
        .iter()
        .flat_map(|l| right.iter().map(|r| (text(l), text(r))).collect::<Vec<_>>())
        .collect()
}

fn list(value: &Value) -> Vec<Value> {
    value.as_array().cloned().unwrap_or_default()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().into()
}

/// Manifests with rights that some jobs use, and that masters do without otherwise.
const OPTIONAL: [&str; 3] =
    ["schedulers/native.yaml", "schedulers/volcano.yaml", "topology/nodes.yaml"];
/// Rights that no test can make a master use: resource, verb, and when it is used.
const RARE: [(&str, &str, &str); 1] = [("pods", "get", "a create whose answer was lost")];
