//! Merges the user's partial pod into the pod of the master or of a worker.
//!
//! Mappings are merged key by key. Lists whose entries have names (containers, volumes, variables,
//! mounts by their path) are merged by name. Tolerations are added, and replace those of the same
//! taint. Any other list of the user replaces the default. A null removes the key.
//!
//! **Invariant:** the fields of [`FIXED`] are as they would be without the template.

use std::path::Path;

use k8s_openapi::api::core::v1::PodSpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Map, Value};

use super::names::{ADDRESS_FOLDER, MASTER, TOKEN_FOLDER, WORKER};
use crate::kube::options::{PodTemplate, TemplateError};

/// Adds the template's labels and annotations to a pod's.
pub(super) fn mark(metadata: &mut ObjectMeta, template: Option<&PodTemplate>) {
    if let Some(template) = template {
        metadata.labels.get_or_insert_default().extend(template.labels.clone());
        metadata.annotations.get_or_insert_default().extend(template.annotations.clone());
    }
}

/// Returns `spec` with the template merged into it. `own`: name of elasticdl's container in it.
pub(super) fn merge(
    spec: PodSpec,
    template: Option<&PodTemplate>,
    own: &str,
) -> Result<PodSpec, TemplateError> {
    let Some(template) = template else { return Ok(spec) };
    let ours = serde_json::to_value(&spec).expect("a pod's keys are strings");
    let mut merged = ours.clone();
    merge_value(&mut merged, &template.spec);
    let fixed = FIXED.iter().filter(|(pods, ..)| [ALL, own].contains(pods));
    for (_, path, why) in fixed {
        let path = path.replace(OWN, own);
        if find(&merged, &path) != find(&ours, &path) {
            return Err(template.refuse(&format!("spec.{path}"), *why));
        }
    }
    let containers = merged["containers"].as_array().into_iter().flatten();
    let mut names = containers.filter_map(|c| c["name"].as_str());
    if let Some(name) = names.find(|name| own == MASTER && *name != own) {
        let why = "the Job would wait for it when the master has ended; a sidecar of the master is \
                   an entry of initContainers with `restartPolicy: Always`";
        return Err(template.refuse(&format!("spec.containers[{name}]"), why));
    }
    let mounts = find(&template.spec, &format!("containers[{own}].volumeMounts"));
    let paths = mounts.and_then(Value::as_array).into_iter().flatten();
    for path in paths.filter_map(|mount| mount.get("mountPath")?.as_str()) {
        if [TOKEN_FOLDER, ADDRESS_FOLDER].iter().any(|own| Path::new(path).starts_with(own)) {
            let field = format!("spec.containers[{own}].volumeMounts[{path}]");
            return Err(template.refuse(&field, FILES));
        }
    }
    serde_json::from_value(merged).map_err(|error| template.refuse("spec", error.to_string()))
}

/// Returns the field with this path. An entry of a list is given by its name.
fn find<'a>(spec: &'a Value, path: &str) -> Option<&'a Value> {
    path.split('.').try_fold(spec, |value, step| {
        let Some((list, name)) = step.strip_suffix(']').and_then(|step| step.split_once('['))
        else {
            return value.get(step);
        };
        let key = name_key(list)?;
        value.get(list)?.as_array()?.iter().find(|entry| entry[key] == name)
    })
}

fn merge_value(ours: &mut Value, theirs: &Value) {
    match (ours, theirs) {
        (Value::Object(ours), Value::Object(theirs)) => {
            for (key, value) in theirs {
                merge_field(ours, key, value);
            }
        }
        (ours, theirs) => *ours = theirs.clone(),
    }
}

fn merge_field(ours: &mut Map<String, Value>, key: &str, theirs: &Value) {
    match (ours.get_mut(key), theirs) {
        (_, Value::Null) => {
            ours.remove(key);
        }
        (Some(Value::Array(list)), Value::Array(theirs)) if key == "tolerations" => {
            list.retain(|ours| theirs.iter().all(|theirs| theirs["key"] != ours["key"]));
            list.extend_from_slice(theirs);
        }
        (Some(Value::Array(list)), Value::Array(theirs)) => match name_key(key) {
            Some(name) => theirs.iter().for_each(|entry| merge_entry(list, name, entry)),
            None => list.clone_from(theirs),
        },
        (Some(value), theirs) => merge_value(value, theirs),
        (None, theirs) => {
            ours.insert(key.into(), without_nulls(theirs));
        }
    }
}

/// A value that nothing is there to merge with.
fn without_nulls(value: &Value) -> Value {
    let Value::Object(fields) = value else { return value.clone() };
    let fields = fields.iter().filter(|(_, value)| !value.is_null());
    Value::Object(fields.map(|(key, value)| (key.clone(), without_nulls(value))).collect())
}

fn merge_entry(list: &mut Vec<Value>, name: &str, theirs: &Value) {
    match list
        .iter_mut()
        .find(|ours| theirs.get(name).is_some() && ours.get(name) == theirs.get(name))
    {
        Some(ours) => merge_value(ours, theirs),
        None => list.push(without_nulls(theirs)),
    }
}

/// Returns the key that identifies the entries of a list, as the API server defines it.
fn name_key(list: &str) -> Option<&'static str> {
    match list {
        "containers" | "env" | "imagePullSecrets" | "initContainers" | "volumes" => Some("name"),
        "volumeMounts" => Some("mountPath"),
        _ => None,
    }
}

/// Fields that a template must not change: in which pods, the field, and what to do instead.
const FIXED: [(&str, &str, &str); 34] = [
    (ALL, "activeDeadlineSeconds", "--deadline ends a job"),
    (ALL, "restartPolicy", "it must be Never: elasticdl replaces pods that have ended"),
    (ALL, "volumes[token]", "elasticdl mounts the job's token and certificates from it"),
    (ALL, "containers[OWN].name", "the container is elasticdl's own, and must stay"),
    (ALL, "containers[OWN].volumeMounts[/etc/elasticdl]", FILES),
    (ALL, "containers[OWN].restartPolicy", "elasticdl replaces pods that have ended"),
    (MASTER, "automountServiceAccountToken", "the master needs its token for the API server"),
    (MASTER, "serviceAccountName", ACCOUNT),
    (MASTER, "serviceAccount", ACCOUNT),
    (MASTER, "terminationGracePeriodSeconds", "a preempting pod waits for the master's end"),
    (MASTER, "containers[OWN].image", "it is set by --master-image"),
    (MASTER, "containers[OWN].command", COMMAND),
    (MASTER, "containers[OWN].args", COMMAND),
    (MASTER, "containers[OWN].env[POD_IP]", VARIABLE),
    (MASTER, "containers[OWN].env[POD_NAME]", VARIABLE),
    (MASTER, "containers[OWN].env[POD_UID]", VARIABLE),
    (MASTER, "containers[OWN].ports", "the job's Service and the probes use them"),
    (MASTER, "containers[OWN].livenessProbe", PROBE),
    (MASTER, "containers[OWN].readinessProbe", PROBE),
    (MASTER, "containers[OWN].startupProbe", PROBE),
    (MASTER, "containers[OWN].resources.limits", "they are set by --master-resources"),
    (MASTER, "containers[OWN].resources.requests", "they are set by --master-resources"),
    (WORKER, "automountServiceAccountToken", "workers have no token of the API server"),
    (WORKER, "serviceAccountName", WORKER_ACCOUNT),
    (WORKER, "serviceAccount", WORKER_ACCOUNT),
    (WORKER, "terminationGracePeriodSeconds", "it is set by --grace-period, which workers know"),
    (WORKER, "containers[OWN].volumeMounts[/etc/elasticdl-master]", FILES),
    (WORKER, "containers[OWN].env[ELASTICDL_JOB]", VARIABLE),
    (WORKER, "volumes[master]", "workers find the master's address in it"),
    (WORKER, "containers[OWN].image", "it is set by --image"),
    (WORKER, "containers[OWN].command", PROGRAM),
    (WORKER, "containers[OWN].args", PROGRAM),
    (WORKER, "containers[OWN].resources.limits", "they are set by --worker-resources"),
    (WORKER, "containers[OWN].resources.requests", "they are set by --worker-resources"),
];
/// Stands for the pods of the master and of the workers.
const ALL: &str = "";
/// Stands for the name of elasticdl's container.
const OWN: &str = "OWN";
const ACCOUNT: &str = "it is set by --service-account or --per-job-role";
const COMMAND: &str = "elasticdl sets the master's command and its arguments";
const FILES: &str = "elasticdl mounts its own files there";
const PROBE: &str = "elasticdl sets the master's probes, by which workers find it";
const PROGRAM: &str = "PROGRAM and its arguments are given after `--`";
const VARIABLE: &str = "the variable is set by elasticdl itself";
const WORKER_ACCOUNT: &str = "it is set by --worker-service-account";
