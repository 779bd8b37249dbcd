//! The API server's audit log.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::Value;

/// A call of a job's master, or of a Job that declares one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Call {
    /// The namespace of the account.
    pub home: String,
    /// Whether the account is that of declared jobs.
    pub declares: bool,
    /// `get`, `watch`, …
    pub verb: String,
    /// Kind of the object, possibly with its group before it (`batch/jobs`) and a subresource after
    /// it (`pods/log`); or a path.
    pub resource: String,
    /// The namespace of the object.
    pub namespace: String,
    /// Whether the server authorized the call.
    pub allowed: bool,
    /// Time of the call, as `2026-01-01T00:00:00.000000Z`.
    pub at: String,
}

/// The calls in an audit log, oldest first, of masters, whose service accounts are named
/// `elasticdl` or `NAME-master`, and of declared jobs, `elasticdl-declare`.
pub fn calls(log: &Path) -> Vec<Call> {
    let bytes = fs::read(log).unwrap_or_else(|e| panic!("{}: {e}", log.display()));
    // The last line may be incomplete, and end within a character.
    let text = String::from_utf8_lossy(&bytes);
    let mut calls = BTreeMap::new();
    for event in text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
        if let Some(call) = call(&event) {
            // A watch has two lines: its start and its end.
            calls.entry(event["auditID"].to_string()).or_insert(call);
        }
    }
    let mut calls: Vec<Call> = calls.into_values().collect();
    calls.sort_by(|a, b| a.at.cmp(&b.at));
    calls
}

fn call(event: &Value) -> Option<Call> {
    let account = event["user"]["username"].as_str()?.strip_prefix("system:serviceaccount:")?;
    let (home, name) = account.split_once(':')?;
    let declares = name == "elasticdl-declare";
    if name != "elasticdl" && !declares && !name.ends_with("-master") {
        return None;
    }
    let object = &event["objectRef"];
    let word = |key: &str| object[key].as_str().unwrap_or_default();
    let resource = match word("resource") {
        "" => event["requestURI"].as_str()?.split('?').next()?.to_owned(),
        resource => {
            let around = |text: &str, before: &str, after: &str| match text {
                "" => String::new(),
                text => format!("{before}{text}{after}"),
            };
            around(word("apiGroup"), "", "/") + resource + &around(word("subresource"), "/", "")
        }
    };
    Some(Call {
        home: home.into(),
        declares,
        verb: event["verb"].as_str()?.into(),
        resource,
        namespace: word("namespace").into(),
        allowed: event["annotations"]["authorization.k8s.io/decision"] == "allow",
        at: event["requestReceivedTimestamp"].as_str()?.into(),
    })
}
