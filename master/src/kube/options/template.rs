//! The user's partial pod, as it is read from a file.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::PodSpec;
use serde_json::{Value, json};

use crate::kube::names::{RESERVED, check_label_key, check_label_value};

/// A partial pod, which is merged into the pods of the master or of the workers.
#[derive(Clone, Debug, PartialEq)]
pub struct PodTemplate {
    /// The option and the file, for messages.
    origin: String,
    /// Labels of the pods.
    pub labels: BTreeMap<String, String>,
    /// Annotations of the pods.
    pub annotations: BTreeMap<String, String>,
    /// A part of a pod's spec. A null removes a field.
    pub spec: Value,
}

/// A template from which no pod can be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{origin}: {field}: {why}")]
pub struct TemplateError {
    origin: String,
    field: String,
    why: String,
}

impl PodTemplate {
    /// Reads YAML: a pod's spec, or a mapping with `spec` and `metadata`. `origin`: the option and
    /// the file.
    ///
    /// # Errors
    /// A field that no pod has, a value of another type than the field's, or a field that is
    /// elasticdl's own in the pods of all jobs.
    pub fn parse(origin: &str, text: &str) -> Result<Self, TemplateError> {
        let mut template = Self {
            origin: origin.into(),
            labels: BTreeMap::new(),
            annotations: BTreeMap::new(),
            spec: json!({}),
        };
        let value = serde_saphyr::from_str(text)
            .map_err(|e| template.refuse("the file", format!("it is not YAML: {e}")))?;
        let Value::Object(mut fields) = value else {
            let why = "it must be a mapping, for example `nodeSelector: {disk: ssd}`";
            return Err(template.refuse("the file", why));
        };
        if fields.contains_key("spec") || fields.contains_key("metadata") {
            template.spec = fields.remove("spec").unwrap_or(template.spec);
            let metadata = fields.remove("metadata").unwrap_or_else(|| json!({}));
            if let Some(other) =
                fields.keys().find(|key| !["apiVersion", "kind"].contains(&&***key))
            {
                return Err(template.refuse(other, "a template has `metadata` and `spec`"));
            }
            template.read_metadata(&metadata)?;
        } else {
            template.spec = Value::Object(fields);
        }
        template.check_spec()?;
        Ok(template)
    }

    /// The priority class that the template sets.
    #[must_use]
    pub fn priority_class(&self) -> Option<String> {
        self.spec.get("priorityClassName")?.as_str().map(str::to_owned)
    }

    /// An error about a field of the template.
    pub(crate) fn refuse(&self, field: &str, why: impl Into<String>) -> TemplateError {
        TemplateError { origin: self.origin.clone(), field: field.into(), why: why.into() }
    }

    fn read_metadata(&mut self, metadata: &Value) -> Result<(), TemplateError> {
        let wrong = |template: &Self, field: &str| {
            let why = "a template sets `labels` and `annotations` of pods, which are texts; \
                       elasticdl sets the rest";
            Err(template.refuse(field, why))
        };
        let Value::Object(metadata) = metadata else { return wrong(self, "metadata") };
        for (kind, entries) in metadata {
            let field = format!("metadata.{kind}");
            let is_label = kind == "labels";
            let Value::Object(entries) = entries else { return wrong(self, &field) };
            if !is_label && kind != "annotations" {
                return wrong(self, &field);
            }
            for (key, value) in entries {
                let field = format!("{field}.{key}");
                let Value::String(value) = value else { return wrong(self, &field) };
                let checked = match check_label_key(key) {
                    Ok(()) if is_label => check_label_value(value).and_then(|()| check_free(key)),
                    checked => checked,
                };
                checked.map_err(|why| self.refuse(&field, why))?;
                let all = if is_label { &mut self.labels } else { &mut self.annotations };
                all.insert(key.clone(), value.clone());
            }
        }
        Ok(())
    }

    fn check_spec(&self) -> Result<(), TemplateError> {
        if let Some((field, why)) = blame(&self.spec, "spec", &fits) {
            return Err(self.refuse(&field, why));
        }
        let containers = self.spec.get("containers").and_then(Value::as_array);
        for container in containers.into_iter().flatten() {
            let variables = container.get("env").and_then(Value::as_array);
            let mut names = variables.into_iter().flatten().filter_map(|v| v.get("name")?.as_str());
            if let Some(own) = names.find(|name| name.starts_with(RESERVED)) {
                let container = container.get("name").and_then(Value::as_str).unwrap_or_default();
                let field = format!("spec.containers[{container}].env[{own}]");
                return Err(self.refuse(&field, "the variable is set by elasticdl itself"));
            }
        }
        Ok(())
    }
}

/// Refuses the labels by which elasticdl finds its objects.
fn check_free(label: &str) -> Result<(), String> {
    if OWN_LABELS.iter().any(|own| label.starts_with(own)) {
        return Err("the label is set by elasticdl itself".into());
    }
    Ok(())
}

/// Returns what is wrong with a part of a spec, if anything is.
fn fits(spec: &Value) -> Result<(), String> {
    let typed: PodSpec = serde_json::from_value(spec.clone()).map_err(|e| e.to_string())?;
    // Unknown fields are lost in the conversion to the types and back.
    let through = serde_json::to_value(typed).expect("a pod's keys are strings");
    if contains(&through, spec) { Ok(()) } else { Err("pods have no such field".into()) }
}

/// Returns the innermost part of `value` that `check` refuses by itself, and why.
fn blame(
    value: &Value,
    path: &str,
    check: &dyn Fn(&Value) -> Result<(), String>,
) -> Option<(String, String)> {
    let why = check(value).err()?;
    let inner = match value {
        Value::Object(fields) => fields.iter().find_map(|(key, value)| {
            blame(value, &format!("{path}.{key}"), &|value| check(&json!({key: value})))
        }),
        Value::Array(entries) => entries.iter().enumerate().find_map(|(index, value)| {
            blame(value, &format!("{path}[{index}]"), &|value| check(&json!([value])))
        }),
        _ => None,
    };
    inner.or_else(|| Some((path.into(), why)))
}

/// Returns whether all keys of `part` are in `whole`. A null, an empty list and an empty mapping
/// are equivalent to a missing key.
fn contains(whole: &Value, part: &Value) -> bool {
    match (whole, part) {
        (Value::Object(whole), Value::Object(part)) => part.iter().all(|(key, part)| {
            let is_empty = [Value::Null, json!([]), json!({})].contains(part);
            whole.get(key).map_or(is_empty, |whole| contains(whole, part))
        }),
        (Value::Array(whole), Value::Array(part)) => {
            whole.iter().zip(part).all(|(whole, part)| contains(whole, part))
        }
        _ => true,
    }
}

/// Prefixes of the labels by which the job's own objects are selected.
const OWN_LABELS: [&str; 2] = ["app.kubernetes.io/", "elasticdl/"];
