//! A job that exists already, compared with one that is asked for.

use std::collections::BTreeSet;

use serde_json::Value;

use super::anchor::{Anchor, Data, SUMMARY};
use super::client::{Cluster, ClusterError};
use super::objects::{Objects, TABLE_SERVER_POD, TASK, Task, WORKER_POD};
use super::submit::was_refused;

/// A job that exists already.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExistingJob {
    /// Its data, as its anchor has them.
    pub data: Data,
    /// What differs from the job that is asked for: the path in the anchor, and both values.
    pub differences: Vec<String>,
}

impl ExistingJob {
    /// Finds the job `name`, and compares it with one of these objects. `None`: there is none, or
    /// its input was refused, so that its name is free.
    ///
    /// # Errors
    /// [`ClusterError`].
    pub async fn find(
        cluster: &Cluster,
        name: &str,
        objects: &Objects,
    ) -> Result<Option<Self>, ClusterError> {
        match Anchor::new(cluster, name).read().await {
            Ok(anchor) => {
                let data = anchor.data.unwrap_or_default();
                let differences = differences(&data, objects);
                Ok((!was_refused(&data)).then_some(Self { data, differences }))
            }
            Err(ClusterError::NoSuchJob { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// How the job has ended, such as `completed`. `None`: it has not.
    #[must_use]
    pub fn ended(&self) -> Option<String> {
        let summary: Value = serde_json::from_str(self.data.get(SUMMARY)?).unwrap_or_default();
        Some(summary["state"].as_str().unwrap_or("ended").to_owned())
    }
}

/// What differs between a job with this anchor and one that would have these objects.
fn differences(data: &Data, objects: &Objects) -> Vec<String> {
    let mut found = Vec::new();
    let asked = objects.anchor.data.clone().unwrap_or_default();
    for key in [TASK, WORKER_POD, TABLE_SERVER_POD] {
        let parse = |data: &Data| {
            let text = data.get(key)?;
            // The fields that an earlier release did not know have their defaults.
            let task = Task::in_anchor(data).filter(|_| key == TASK);
            let task = task.and_then(|task| serde_json::to_value(task).ok());
            task.or_else(|| serde_json::from_str(text).ok())
        };
        let [present, asked] = [data, &asked].map(|data| parse(data).unwrap_or_default());
        compare(key, &present, &asked, &mut found);
    }
    found
}

fn compare(path: &str, present: &Value, asked: &Value, found: &mut Vec<String>) {
    match (present, asked) {
        (Value::Object(left), Value::Object(right)) => {
            let keys: BTreeSet<&String> = left.keys().chain(right.keys()).collect();
            for key in keys.into_iter().filter(|key| *key != VERSION_LABEL) {
                let [left, right] = [left, right].map(|side| side.get(key).unwrap_or(&Value::Null));
                compare(&format!("{path}.{key}"), left, right, found);
            }
        }
        (Value::Array(left), Value::Array(right)) if left.len() == right.len() => {
            for (index, (left, right)) in left.iter().zip(right).enumerate() {
                compare(&format!("{path}[{index}]"), left, right, found);
            }
        }
        (present, asked) if present == asked => {}
        (present, asked) => {
            found.push(format!("{path} is {}, not {}", brief(present), brief(asked)));
        }
    }
}

fn brief(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(VALUE_LEN_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

const VALUE_LEN_MAX: usize = 60;
/// Label with the version of the command that has submitted a job.
const VERSION_LABEL: &str = "app.kubernetes.io/version";

#[cfg(test)]
mod tests {
    use k8s_openapi::api::batch::v1::Job;
    use k8s_openapi::api::core::v1::{ConfigMap, Secret, Service};
    use serde_json::json;

    use super::super::testing::FakeServer;
    use super::*;

    #[tokio::test]
    async fn a_job_that_has_ended_exists_and_one_that_was_refused_does_not() {
        let (fake, cluster) = FakeServer::start();
        let anchor = |seed: u32| Data::from([(TASK.into(), json!({"seed": seed}).to_string())]);
        let objects = Objects {
            job: Job::default(),
            anchor: ConfigMap { data: Some(anchor(7)), ..ConfigMap::default() },
            secret: Secret::default(),
            service: Service::default(),
            network_policies: Vec::new(),
            access: None,
        };
        let found = async || ExistingJob::find(&cluster, "j", &objects).await.unwrap();
        assert_eq!(found().await, None);
        let put = |state: &str, steps: u64| {
            let mut data = anchor(0);
            let summary = json!({"state": state, "steps": steps}).to_string();
            data.insert(SUMMARY.into(), summary);
            fake.put("configmaps", "j", json!({"metadata": {"name": "j"}, "data": data}));
        };
        put("refused", 0);
        assert_eq!(found().await, None);
        put("failed", 0);
        let failed = found().await.unwrap();
        assert_eq!(failed.ended().as_deref(), Some("failed"));
        assert_eq!(failed.differences, ["task.seed is 0, not 7"]);
        fake.put("configmaps", "j", json!({"metadata": {"name": "j"}, "data": anchor(7)}));
        let running = found().await.unwrap();
        assert_eq!((running.ended(), running.differences), (None, Vec::new()));
    }

    fn compared(present: &Value, asked: &Value) -> Vec<String> {
        let mut found = Vec::new();
        compare("task", present, asked, &mut found);
        found
    }

    #[test]
    fn a_difference_is_named_by_its_path_with_both_values() {
        let present = json!({"job": {"seed": 0, "epochs": 1, "args": ["a", "b"]}, "gone": true});
        let asked = json!({"job": {"seed": 7, "epochs": 1, "args": ["a", "c"]}, "new": "x"});
        let expected = [
            "task.gone is true, not null",
            "task.job.args[1] is \"b\", not \"c\"",
            "task.job.seed is 0, not 7",
            "task.new is null, not \"x\"",
        ];
        assert_eq!(compared(&present, &asked), expected);
        assert_eq!(compared(&present, &present), [""; 0]);
        let long = compared(&json!(["é".repeat(100)]), &json!([]));
        assert!(long[0].contains('…') && long[0].len() < 200, "{long:?}");
    }

    #[test]
    fn a_job_of_another_release_differs_by_its_version_only_where_it_says_so() {
        let of = |version: &str| json!({"labels": {VERSION_LABEL: version}});
        assert_eq!(compared(&of("0.1.0"), &of("0.2.0")), [""; 0]);
    }
}
