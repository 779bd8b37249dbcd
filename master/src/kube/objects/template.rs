//! Merges the user's partial pod spec into the worker pod's.
//!
//! Mappings are merged key by key. Lists whose entries have names (containers, volumes, variables,
//! mounts by their path) are merged by name; any other list of the user replaces the default. A
//! null removes the key.

use k8s_openapi::api::core::v1::PodSpec;
use serde_json::{Map, Value};

use super::names::WORKER;

/// A template from which no worker pod can be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the worker pod template can't be used: {0}")]
pub struct TemplateError(String);

/// Returns `spec` with `template` merged into it.
pub(super) fn merge(spec: &PodSpec, template: &Value) -> Result<PodSpec, TemplateError> {
    let mut value = serde_json::to_value(spec).expect("a pod's keys are strings");
    merge_value(&mut value, template);
    let merged: PodSpec =
        serde_json::from_value(value).map_err(|error| TemplateError(error.to_string()))?;
    // Unknown fields are lost in the conversion to the types and back.
    let through = serde_json::to_value(&merged).expect("a pod's keys are strings");
    if let Some(path) = first_lost(template, &through, "spec") {
        return Err(TemplateError(format!("{path} is no field of a pod's spec")));
    }
    if merged.restart_policy.as_deref() != Some("Never") {
        return Err(TemplateError(
            "restartPolicy must be Never: the master starts workers anew".into(),
        ));
    }
    if merged.termination_grace_period_seconds != spec.termination_grace_period_seconds {
        return Err(TemplateError(
            "terminationGracePeriodSeconds is set by --grace-period, which workers know too".into(),
        ));
    }
    if !merged.containers.iter().any(|c| c.name == WORKER) {
        return Err(TemplateError(format!("there is no container with the name {WORKER}")));
    }
    let ours = merged.containers.iter().flat_map(|c| c.env.iter().flatten());
    let written = |name: &str| {
        let containers = template.get("containers").and_then(Value::as_array).into_iter().flatten();
        containers.filter_map(|c| c.get("env")?.as_array()).flatten().any(|v| v["name"] == name)
    };
    for variable in ours.filter(|v| v.name.starts_with("ELASTICDL_")) {
        if written(&variable.name) {
            return Err(TemplateError(format!(
                "the variable {} is set by elasticdl itself",
                variable.name
            )));
        }
    }
    Ok(merged)
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
        (Some(Value::Array(list)), Value::Array(theirs)) => match name_key(key) {
            Some(name) => theirs.iter().for_each(|entry| merge_entry(list, name, entry)),
            None => list.clone_from(theirs),
        },
        (Some(value), theirs) => merge_value(value, theirs),
        (None, theirs) => {
            ours.insert(key.into(), theirs.clone());
        }
    }
}

fn merge_entry(list: &mut Vec<Value>, name: &str, theirs: &Value) {
    match list
        .iter_mut()
        .find(|ours| theirs.get(name).is_some() && ours.get(name) == theirs.get(name))
    {
        Some(ours) => merge_value(ours, theirs),
        None => list.push(theirs.clone()),
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

/// Returns the path of the first key of `wanted` that is missing in `got`.
fn first_lost(wanted: &Value, got: &Value, path: &str) -> Option<String> {
    match (wanted, got) {
        (Value::Object(wanted), _) => {
            wanted.iter().filter(|(_, v)| !v.is_null()).find_map(|(key, value)| {
                let path = format!("{path}.{key}");
                match got.get(key) {
                    // An empty list or mapping is equivalent to a missing one.
                    None if value.as_array().is_some_and(Vec::is_empty) => None,
                    None if value.as_object().is_some_and(Map::is_empty) => None,
                    None => Some(path),
                    Some(got) => first_lost(value, got, &path),
                }
            })
        }
        (Value::Array(wanted), Value::Array(got)) => {
            wanted.iter().enumerate().find_map(|(index, value)| {
                let path = format!("{path}[{index}]");
                let same = |key: &str| {
                    got.iter().find(|g| value.get(key).is_some() && g.get(key) == value.get(key))
                };
                let got = same("mountPath").or_else(|| same("name")).or_else(|| got.get(index));
                got.map_or_else(|| Some(path.clone()), |got| first_lost(value, got, &path))
            })
        }
        _ => None,
    }
}
