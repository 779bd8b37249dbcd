//! The user's partial pod, as it is read from a file.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::PodSpec;
use serde_json::{Map, Value, json};

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
    /// Another object than a pod, a field that no pod has, a value of another type than the
    /// field's, or a field that is elasticdl's own in the pods of all jobs.
    pub fn parse(origin: &str, text: &str) -> Result<Self, TemplateError> {
        let mut template = Self {
            origin: origin.into(),
            labels: BTreeMap::new(),
            annotations: BTreeMap::new(),
            spec: json!({}),
        };
        let value = serde_saphyr::from_str(text)
            .map_err(|error| template.refuse("the file", not_yaml(&error)))?;
        let Value::Object(mut fields) = value else {
            let why = "it must be a mapping, for example `nodeSelector: {disk: ssd}`";
            return Err(template.refuse("the file", why));
        };
        if let Some(part) = template.take_kind(&mut fields)? {
            fields = part;
        }
        if fields.contains_key("spec") || fields.contains_key("metadata") {
            let mut part = |key: &str| {
                let part = fields.remove(key).filter(|part| !part.is_null());
                part.unwrap_or_else(|| json!({}))
            };
            template.spec = part("spec");
            let metadata = part("metadata");
            if let Some(other) = fields.keys().next() {
                return Err(template.refuse(other, "a template has `metadata` and `spec`"));
            }
            template.read_metadata(&metadata)?;
        } else {
            template.spec = Value::Object(fields);
        }
        template.check_spec()?;
        Ok(template)
    }

    /// Takes what the file says of its kind from its `fields`. Returns the pod that is within a
    /// PodTemplate.
    fn take_kind(
        &self,
        fields: &mut Map<String, Value>,
    ) -> Result<Option<Map<String, Value>>, TemplateError> {
        let kind = fields.remove("kind");
        for (field, value, known) in [
            ("kind", kind.as_ref(), &["Pod", "PodTemplate"][..]),
            ("apiVersion", fields.remove("apiVersion").as_ref(), &["v1"]),
        ] {
            if value.is_some_and(|value| !known.iter().any(|known| value == known)) {
                let why = "the file must be a part of a pod: `kind: Pod` or `kind: PodTemplate` \
                           with `apiVersion: v1`, or neither, and what another object has in \
                           `spec.template`";
                return Err(self.refuse(field, why));
            }
        }
        if kind.is_none_or(|kind| kind != "PodTemplate") {
            return Ok(None);
        }
        let within = fields.remove("template");
        match (within, fields.keys().next()) {
            (Some(Value::Object(pod)), None) => Ok(Some(pod)),
            (Some(Value::Object(_)), Some(other)) => {
                Err(self.refuse(other, "`template` has all that is used of a PodTemplate"))
            }
            _ => Err(self.refuse("template", "a PodTemplate has a pod in `template`")),
        }
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
        if let Some((field, why)) = blame(&self.spec, "spec", &|spec| spec) {
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

/// Says where a text stops being YAML, or how it is more than a template needs.
fn not_yaml(error: &serde_saphyr::Error) -> String {
    if matches!(error.without_snippet(), serde_saphyr::Error::MultipleDocuments { .. }) {
        return "it has several documents, separated by `---`; a template is one".into();
    }
    let is_twice =
        matches!(error.without_snippet(), serde_saphyr::Error::DuplicateMappingKey { .. });
    let what = if is_twice { "it has a key twice" } else { "it is not YAML" };
    let place = error.location().filter(|place| place.line() > 0);
    let place =
        place.map(|place| format!(": see line {}, column {}", place.line(), place.column()));
    what.to_owned() + &place.unwrap_or_default()
}

/// Returns the outermost part of `value` that no pod has, and why. `at`: makes a spec of a value in
/// this place.
fn blame(value: &Value, path: &str, at: &dyn Fn(Value) -> Value) -> Option<(String, String)> {
    let is_taken = |value: &Value| serde_json::from_value::<PodSpec>(at(value.clone())).is_ok();
    let kinds = kinds();
    let taken = kinds.iter().filter(|(_, example)| is_taken(example));
    let taken = Vec::from_iter(taken.map(|(name, _)| *name));
    // What is not read at all takes anything.
    if taken.len() == kinds.len() {
        return Some((path.into(), "pods have no such field".into()));
    }
    let kind = kinds.iter().find(|(_, example)| is_alike(value, example));
    if let Some((kind, _)) = kind.filter(|(kind, _)| !taken.contains(kind)) {
        return Some((path.into(), format!("it is {kind}, and must be {}", taken.join(" or "))));
    }
    let inner = match value {
        Value::Object(fields) => fields.iter().find_map(|(key, value)| {
            blame(value, &format!("{path}.{key}"), &|value| at(json!({ key: value })))
        }),
        Value::Array(entries) => entries.iter().enumerate().find_map(|(index, value)| {
            let path = format!("{path}[{index}]");
            if value.is_null() {
                return Some((path, "the entry is empty".into()));
            }
            blame(value, &path, &|value| at(json!([value])))
        }),
        _ => None,
    };
    let out_of_range = || (path.into(), format!("{value} is not possible"));
    inner.or_else(|| (value.is_number() && !is_taken(value)).then(out_of_range))
}

fn is_alike(one: &Value, other: &Value) -> bool {
    std::mem::discriminant(one) == std::mem::discriminant(other)
}

/// What a value of YAML can be, with an example of each.
fn kinds() -> [(&'static str, Value); 5] {
    [
        ("true or false", json!(true)),
        ("a number", json!(1)),
        ("a text", json!("1")),
        ("a list", json!([])),
        ("a mapping", json!({})),
    ]
}

/// Prefixes of the labels by which the job's own objects are selected.
const OWN_LABELS: [&str; 2] = ["app.kubernetes.io/", "elasticdl/"];
