//! Checks that the Role of manifests/rbac.yaml is what masters need, that of rbac-declared.yaml
//! what declared jobs need, and nothing more, but for what the manifests of options allow: `begin`
//! enables the audit log of a test cluster's API server; after the tests, `check` compares.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use elasticdl_tests::cluster::{ApiServer, Call, calls, kubectl, must};
use serde_json::Value;

#[derive(Parser)]
enum Command {
    /// Enable the audit log of the API server.
    Begin,
    /// Compare the calls in namespaces e2e-… with what the Roles allow.
    Check,
}

type Right = (String, String);
/// Resource, verb, and when it is used.
type Rare = (&'static str, &'static str, &'static str);

#[expect(clippy::print_stdout, reason = "it is what the command is for")]
fn main() -> ExitCode {
    let log = ApiServer::new().audit();
    if matches!(Command::parse(), Command::Begin) {
        println!("the API server writes to {}", log.display());
        return ExitCode::SUCCESS;
    }
    let tests = calls(&log).into_iter().filter(|call| call.home.starts_with("e2e-"));
    let (declared, masters): (Vec<Call>, Vec<Call>) = tests.partition(|call| call.declares);
    let mut optional: BTreeSet<Right> = OPTIONAL.iter().flat_map(|file| rights(file)).collect();
    let mut faults = check("rbac.yaml", masters, &optional, &RARE);
    optional.extend(DECLARED_OPTIONAL.map(|(resource, verb)| (resource.into(), verb.into())));
    faults.extend(check("rbac-declared.yaml", declared, &optional, &DECLARED_RARE));
    faults.iter().for_each(|fault| println!("{fault}"));
    if faults.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Compares calls with what the Role of a manifest allows. `optional`: rights that callers do
/// without. Returns the differences.
#[expect(clippy::print_stdout, reason = "it is what the command is for")]
fn check(
    manifest: &str,
    calls: Vec<Call>,
    optional: &BTreeSet<Right>,
    rare: &[Rare],
) -> BTreeSet<String> {
    let role = rights(manifest);
    let mut used: BTreeMap<Right, usize> = BTreeMap::new();
    let mut faults = BTreeSet::new();
    let mut fault = |what: &str, (resource, verb): &Right| {
        faults.insert(format!("{manifest}: {what}: {verb} {resource}"));
    };
    for call in calls {
        let right = (call.resource.clone(), call.verb.clone());
        if optional.contains(&right) {
            // Allowed or not: the caller goes on without it, or the job asks for it.
        } else if !call.allowed && role.contains(&right) {
            // An API server that has just started does not know the Role yet.
        } else if !call.allowed {
            fault("refused", &right);
        } else if call.resource.starts_with('/') {
            // Discovery, which all accounts may do.
        } else if call.namespace != call.home {
            fault("outside its namespace", &right);
        } else if !role.contains(&right) {
            fault("allowed by another role", &right);
        }
        *used.entry(right).or_default() += 1;
    }
    println!("{manifest}:");
    for ((resource, verb), count) in &used {
        println!("{count:>6}  {verb:<8} {resource}");
    }
    for (resource, verb, why) in rare {
        println!("     -  {verb:<8} {resource}: only after {why}");
    }
    let is_rare =
        |(resource, verb): &&Right| rare.iter().any(|(r, v, _)| resource == r && verb == v);
    let unused = role.iter().filter(|right| !used.contains_key(right) && !is_rare(right));
    unused.for_each(|right| fault("allowed and never asked for", right));
    faults
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
const RARE: [Rare; 1] = [("pods", "get", "a create whose answer was lost")];
/// As [`RARE`], of declared jobs.
const DECLARED_RARE: [Rare; 1] = [("batch/jobs", "delete", "a submission that was cut off")];
/// Rights that declared jobs ask for, as `elasticdl train` does, and do without.
const DECLARED_OPTIONAL: [(&str, &str); 4] = [
    ("authentication.k8s.io/selfsubjectreviews", "create"),
    ("authorization.k8s.io/localsubjectaccessreviews", "create"),
    ("certificates.k8s.io/certificatesigningrequests", "create"),
    ("namespaces", "get"),
];
