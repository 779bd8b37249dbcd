//! Refuses objects that would hold a credential in plain text.
//!
//! ConfigMaps and pods are readable with the cluster's role `view`, which excludes Secrets on
//! purpose; they are not encrypted at rest as Secrets are; and a dry run prints them.

use serde_json::Value;

use crate::kube::options::{has_credential_form, is_credential};

/// A credential in plain text. The message does not contain it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{place} looks like a credential, and would be stored in plain text in the job's ConfigMap and \
     pods; put it into a Secret (kubectl create secret generic NAME --from-literal={variable}=…) \
     and give it to the workers with --env-from-secret NAME:{variable}; \
     --worker-service-account gives them an identity instead"
)]
pub struct PlainCredential {
    place: String,
    variable: String,
}

/// Checks a value of the object `what`: its variables, and all its texts.
pub(super) fn check(what: &str, value: &Value) -> Result<(), PlainCredential> {
    match value {
        Value::Object(fields) => {
            if let (Some(Value::String(name)), Some(Value::String(value))) =
                (fields.get("name"), fields.get("value"))
                && is_credential(name, value)
            {
                let place = format!("the variable {name}");
                return Err(PlainCredential { place, variable: name.clone() });
            }
            fields.iter().try_for_each(|(key, value)| check(&format!("{what}.{key}"), value))
        }
        Value::Array(entries) => {
            let place = |index| format!("{what}[{index}]");
            entries.iter().enumerate().try_for_each(|(index, entry)| check(&place(index), entry))
        }
        Value::String(text) if has_credential_form(text) => {
            Err(PlainCredential { place: what.into(), variable: "VARIABLE".into() })
        }
        _ => Ok(()),
    }
}
