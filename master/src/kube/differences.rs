//! How a job differs from one that is asked for, by the options that users know.
//!
//! The anchor has the task and the pod templates that follow from the options. Each of their fields
//! belongs to an option; fields that follow from others belong to none.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde_json::Value;

use super::anchor::Data;
use super::objects::{TABLE_SERVER_POD, TASK, WORKER, WORKER_POD};
use super::scaling;

/// An option in which a job differs from one that is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The option, as a file of options names it.
    pub option: String,
    /// The value that the job has, and the one that is asked for; `None` if they are long.
    pub values: Option<(String, String)>,
}

impl Difference {
    /// As text for users of the command line.
    #[must_use]
    pub fn on_command_line(&self) -> String {
        let name = match &*self.option {
            PROGRAM => "PROGRAM".to_owned(),
            option => format!("--{option}"),
        };
        self.describe(&name)
    }

    fn describe(&self, name: &str) -> String {
        match &self.values {
            Some((present, asked)) => format!("{name} is {present}, not {asked}"),
            None => format!("{name} differs"),
        }
    }
}

/// As text for users of a file of options.
impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.describe(&format!("`{}`", self.option)))
    }
}

/// The options in which a job whose anchor has the data `present` differs from one with `asked`, in
/// alphabetical order. What only the master's pod and the other objects have is not compared.
#[must_use]
pub fn differences(present: &Data, asked: &Data) -> Vec<Difference> {
    let [present, asked] = [present, asked].map(Options::of_job);
    let mut names: Vec<&String> = present.0.keys().chain(asked.0.keys()).collect();
    names.sort();
    names.dedup();
    names.into_iter().filter_map(|name| present.difference(&asked, name)).collect()
}

/// For each option, the fields that belong to it, with their paths.
#[derive(Debug, Default)]
struct Options(BTreeMap<String, BTreeMap<String, Value>>);

impl Options {
    fn of_job(data: &Data) -> Self {
        let mut found = Self::default();
        let parse = |key| -> Option<Value> { serde_json::from_str(data.get(key)?).ok() };
        // The fields that an earlier release did not know have their defaults.
        let task = scaling::task(data).and_then(|task| serde_json::to_value(task).ok());
        let task: Value = task.or_else(|| parse(TASK)).unwrap_or_default();
        found.add_task("", &task);
        if task["job"]["work"]["Train"].is_null()
            && let Some(data) = found.0.remove("training-data")
        {
            found.0.insert("data".into(), data);
        }
        let [worker, server] = [WORKER_POD, TABLE_SERVER_POD].map(parse);
        let worker: Value = worker.unwrap_or_default();
        found.add_pod(&worker);
        let [of_worker, of_server] =
            [Some(&worker), server.as_ref()].map(|pod| resources(own_container(pod?)?));
        if of_server.is_some() && of_server != of_worker {
            found.add("table-server-resources", "", &Value::from(of_server));
        }
        found
    }

    fn add(&mut self, option: &str, path: &str, value: &Value) {
        if !value.is_null() {
            let fields = self.0.entry(option.into()).or_default();
            fields.insert(path.into(), value.clone());
        }
    }

    fn add_task(&mut self, path: &str, value: &Value) {
        let is_whole = WHOLE.contains(&path) || value.get("secs").is_some();
        if let (Value::Object(fields), false) = (value, is_whole) {
            for (key, value) in fields {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                // The data is that of the training.
                let is_split = path == "job.validation.data" && !fields["split"].is_null();
                if !is_split {
                    self.add_task(&path, value);
                }
            }
            return;
        }
        let option = match NAMES.iter().find(|(field, _)| *field == path) {
            Some((_, option)) => (*option).to_owned(),
            None => path.rsplit('.').next().unwrap_or_default().replace('_', "-"),
        };
        if !option.is_empty() {
            self.add(&option, path, value);
        }
    }

    /// Adds what the pod of a worker has from options.
    fn add_pod(&mut self, pod: &Value) {
        for (kind, key, value) in ["labels", "annotations"]
            .into_iter()
            .flat_map(|kind| fields(&pod["metadata"][kind]).map(move |(k, v)| (kind, k, v)))
        {
            if ![VERSION_LABEL, QUEUE_LABEL].contains(&key.as_str()) {
                self.add(TEMPLATE, &format!("metadata.{kind}.{key}"), value);
            }
        }
        for (key, value) in fields(&pod["spec"]) {
            match key.as_str() {
                "containers" => {
                    let others = items(value).filter(|container| container["name"] != WORKER);
                    others.for_each(|other| self.add(TEMPLATE, &named("containers", other), other));
                }
                "imagePullSecrets" => self.add("image-pull-secret", key, value),
                "serviceAccountName" => self.add("worker-service-account", key, value),
                "volumes" => self.add_volumes(key, value),
                // They belong to the task.
                "schedulerName" | "terminationGracePeriodSeconds" => {}
                _ => self.add(TEMPLATE, key, value),
            }
        }
        let Some(container) = own_container(pod) else { return };
        for (key, value) in fields(container) {
            match key.as_str() {
                "args" | "command" | "name" => {}
                "env" => items(value).for_each(|variable| self.add_variable(variable)),
                "envFrom" => self.add("env-from-secret", key, value),
                "image" => self.add(key, key, value),
                "resources" => {
                    self.add("worker-resources", key, &Value::from(resources(container)));
                    self.add(TEMPLATE, "claims", &value["claims"]);
                }
                "volumeMounts" => self.add_volumes(key, value),
                _ => self.add(TEMPLATE, key, value),
            }
        }
        let words = items(&container["command"]).chain(items(&container["args"]));
        let words: Vec<&str> = words.filter_map(Value::as_str).collect();
        self.add(PROGRAM, "", &words.join(" ").into());
    }

    fn add_variable(&mut self, variable: &Value) {
        let name = variable["name"].as_str().unwrap_or_default();
        let from = &variable["valueFrom"];
        // Those of each worker: its job, the place of its pod, and its number of CPUs.
        let is_own = name.starts_with("ELASTICDL_") || !from["resourceFieldRef"].is_null();
        let option = if from["secretKeyRef"].is_null() { "env" } else { "env-from-secret" };
        if !is_own && variable["value"] != CUDA_CACHE {
            let value = variable["value"].as_str().map(|value| format!("{name}={value}"));
            self.add(option, name, &value.map_or_else(|| from.clone(), Value::from));
        }
    }

    /// Adds volumes, or where they are mounted.
    fn add_volumes(&mut self, key: &str, list: &Value) {
        for entry in items(list) {
            let name = entry["name"].as_str().unwrap_or_default();
            if !OWN_VOLUMES.contains(&name) {
                let option = if name.starts_with("volume-") { "volume" } else { TEMPLATE };
                self.add(option, &named(key, entry), entry);
            }
        }
    }

    /// How the option `name` differs.
    fn difference(&self, asked: &Self, name: &str) -> Option<Difference> {
        let lacks = |head: &&str| [self, asked].iter().any(|side| !side.0.contains_key(*head));
        let heads = DETAILS.iter().find(|(detail, _)| *detail == name);
        if heads.is_some_and(|(_, heads)| heads.iter().all(lacks)) {
            return None;
        }
        let none = BTreeMap::new();
        let [present, asked] = [self, asked].map(|side| side.0.get(name).unwrap_or(&none));
        let mut paths: Vec<&String> = present.keys().chain(asked.keys()).collect();
        paths.sort();
        paths.dedup();
        paths.retain(|path| present.get(*path) != asked.get(*path));
        let values = match paths[..] {
            [] => return None,
            [path] => shown(path, present.get(path)).zip(shown(path, asked.get(path))),
            _ => None,
        };
        Some(Difference { option: name.into(), values })
    }
}

/// The resources of a container, as `--worker-resources` has them.
fn resources(container: &Value) -> Option<String> {
    let found = container.get("resources")?;
    let word = |prefix: &str, (name, amount): (&String, &Value)| {
        format!("{prefix}{name}={}", amount.as_str().unwrap_or_default())
    };
    let requests = &found["requests"];
    let limits = fields(&found["limits"]).filter(|(name, amount)| requests[*name] != **amount);
    let words = fields(requests).map(|field| word("", field));
    let words: Vec<String> = words.chain(limits.map(|field| word("limits.", field))).collect();
    Some(words.join(","))
}

fn own_container(pod: &Value) -> Option<&Value> {
    items(&pod["spec"]["containers"]).find(|container| container["name"] == WORKER)
}

fn fields(value: &Value) -> impl Iterator<Item = (&String, &Value)> {
    value.as_object().into_iter().flatten()
}

fn items(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn named(list: &str, entry: &Value) -> String {
    format!("{list}.{}", entry["name"].as_str().unwrap_or_default())
}

/// The value of a field, as users write it; `None` if it is long.
fn shown(path: &str, value: Option<&Value>) -> Option<String> {
    let text = match (path, value.unwrap_or(&Value::Null)) {
        (_, Value::Null) => "none".into(),
        ("job.validation.highest", _) => return None,
        ("job.audit", value) => format!("{}%", value.as_f64()? / 10_000.0),
        ("job.bad_records_max", value) if value == 0 => "fail".into(),
        ("job.bad_records_max", value) => format!("skip:{value}"),
        ("job.validation.split", value) => (value.as_f64()? / 1000.0).to_string(),
        ("priority_tiers.weight", value) => (value.as_f64()? / 100.0).to_string(),
        ("job.checkpoints.every", Value::Object(every)) => shown("", every.values().next())?,
        ("job.shuffle", shuffle) => match &shuffle["buffer"] {
            Value::Null => kebab(shuffle["mode"].as_str()?),
            records => format!("{}:{records}", kebab(shuffle["mode"].as_str()?)),
        },
        (path, Value::String(word)) if CHOICES.contains(&path) => kebab(word),
        (_, Value::Array(words)) if words.iter().all(Value::is_string) => {
            let words: Vec<&str> = words.iter().filter_map(Value::as_str).collect();
            words.join(",")
        }
        (_, Value::Array(_)) => return None,
        (_, Value::Object(_)) => {
            let time: Duration = serde_json::from_value(value?.clone()).ok()?;
            format!("{time:?}")
        }
        (_, value) => value.to_string(),
    };
    Some(match text.char_indices().nth(VALUE_LEN_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    })
}

/// The name of a choice, as users write it.
fn kebab(name: &str) -> String {
    let mut text = String::new();
    for character in name.chars() {
        if character.is_ascii_uppercase() && !text.is_empty() {
            text.push('-');
        }
        text.push(character.to_ascii_lowercase());
    }
    text
}

/// Fields that the last word of their path does not name; the option is empty if they follow from
/// other fields.
const NAMES: [(&str, &str); 27] = [
    ("gang.core_pods", ""),
    ("gang.core_resources", ""),
    ("gang.priority_class", ""),
    ("gang.version", ""),
    ("job.bad_records_max", "bad-records"),
    ("job.batch.Global", "global-batch-size"),
    ("job.batch.PerWorker", "minibatch-size"),
    ("job.checkpoints.dir", "checkpoint-dir"),
    ("job.checkpoints.every", "checkpoint-every"),
    ("job.checkpoints.exclusive", ""),
    ("job.checkpoints.keep", "checkpoint-keep"),
    ("job.epochs", "num-epochs"),
    ("job.name", ""),
    ("job.policies.starts_core_together", ""),
    ("job.policies.starts_suspended", "suspend"),
    ("job.policies.starts_together", ""),
    ("job.validation.data", "validation-data"),
    ("job.validation.every", "evaluate-every"),
    ("job.validation.highest", "best-metric"),
    ("job.validation.metric", "best-metric"),
    ("job.validation.patience", "early-stopping"),
    ("job.validation.split", "validation-split"),
    ("job.work.Predict.output", "predictions"),
    ("master_timeout", ""),
    ("priority_tiers.core", "priority-tiers"),
    ("priority_tiers.tiers", "priority-tiers"),
    ("serve_metrics", "metrics-from"),
];
/// Fields that are shown as a whole.
const WHOLE: [&str; 3] = ["gang.core_resources", "job.checkpoints.every", "job.shuffle"];
/// Fields whose values are choices.
const CHOICES: [&str; 7] = [
    "gang.scheduler",
    "job.link_encryption",
    "job.on_nonfinite",
    "job.on_rows_lost",
    "job.param_dtype",
    "job.policies.success",
    "job.wire_dtype",
];
/// Options with defaults that apply only together with one of others.
const DETAILS: [(&str, &[&str]); 4] = [
    ("best-metric", &["validation-data", "validation-split"]),
    ("checkpoint-every", &["checkpoint-dir"]),
    ("checkpoint-keep", &["checkpoint-dir"]),
    ("weight", &["priority-tiers"]),
];
/// Volumes that each worker has.
const OWN_VOLUMES: [&str; 4] = ["master", "shm", "tmp", "token"];
/// Folder of compiled kernels, which each worker with a GPU has.
const CUDA_CACHE: &str = "/tmp/cuda";
const PROGRAM: &str = "program";
const TEMPLATE: &str = "worker-pod-template";
/// Label with the version of the command that has submitted a job.
const VERSION_LABEL: &str = "app.kubernetes.io/version";
/// Label with the queue of the task.
const QUEUE_LABEL: &str = "kueue.x-k8s.io/queue-name";
const VALUE_LEN_MAX: usize = 60;

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// What users of the command line read of two jobs with these tasks and pods.
    fn told(present: [Value; 2], asked: [Value; 2]) -> Vec<String> {
        let [present, asked] = [present, asked].map(|[task, pod]| {
            Data::from([(TASK, task), (WORKER_POD, pod)].map(|(k, v)| (k.into(), v.to_string())))
        });
        let found = differences(&present, &asked);
        found.iter().map(Difference::on_command_line).collect()
    }

    fn of_tasks(present: Value, asked: Value) -> Vec<String> {
        told([json!({"job": present}), Value::Null], [json!({"job": asked}), Value::Null])
    }

    #[test]
    fn a_difference_has_the_name_of_its_option_and_values_as_users_write_them() {
        let seconds = |secs: u64| json!({"secs": secs, "nanos": 500_000_000});
        let train = |export: Value| json!({"Train": {"export": export}});
        let present = json!({
            "name": "j", "work": train(Value::Null), "seed": 0, "audit": 10_000,
            "on_rows_lost": "GoBack", "worker_timeout": seconds(0), "max_steps": null,
            "shuffle": {"mode": "Block", "buffer": 100}, "bad_records_max": 0,
            "batch": {"Global": 64}, "checkpoints": null, "training_data": "d",
        });
        let asked = json!({
            "name": "j", "work": train("/m".into()), "seed": 7, "audit": 500,
            "on_rows_lost": "Stale", "worker_timeout": seconds(2), "max_steps": 9,
            "shuffle": {"mode": "None", "buffer": null}, "bad_records_max": 3,
            "batch": {"PerWorker": 32}, "training_data": "e",
            "checkpoints": {"dir": "/c", "every": {"Steps": 5}, "keep": 1, "exclusive": false},
        });
        let expected = [
            "--audit is 1%, not 0.05%",
            "--bad-records is fail, not skip:3",
            "--checkpoint-dir is none, not \"/c\"",
            "--export is none, not \"/m\"",
            "--global-batch-size is 64, not none",
            "--max-steps is none, not 9",
            "--minibatch-size is none, not 32",
            "--on-rows-lost is go-back, not stale",
            "--seed is 0, not 7",
            "--shuffle is block:100, not none",
            "--training-data is \"d\", not \"e\"",
            "--worker-timeout is 500ms, not 2.5s",
        ];
        assert_eq!(of_tasks(present.clone(), asked), expected);
        assert_eq!(of_tasks(present.clone(), present), [""; 0]);
        let every = |every: Value| json!({"checkpoints": {"dir": "/c", "every": every}});
        let told = of_tasks(every(json!({"Time": seconds(9)})), every(json!({"Steps": 5})));
        assert_eq!(told, ["--checkpoint-every is 9.5s, not 5"]);
    }

    #[test]
    fn a_difference_of_pods_has_the_name_of_its_option() {
        let pod = |image: &str, cpu: &str, env: Value, volumes: Value, zone: &str| {
            let own = json!({"name": "OMP_NUM_THREADS", "valueFrom": {"resourceFieldRef": {}}});
            let env: Vec<&Value> = [&own].into_iter().chain(items(&env)).collect();
            let amounts = json!({"cpu": cpu, "memory": "1Gi"});
            let worker = json!({
                "name": WORKER, "image": image, "command": ["train"], "args": ["--lr", "1"],
                "env": env, "resources": {"requests": amounts, "limits": {"memory": "1Gi"}},
            });
            let nodes = json!({"zone": zone});
            json!({
                "metadata": {"labels": {VERSION_LABEL: image}},
                "spec": {"containers": [worker], "volumes": volumes, "nodeSelector": nodes},
            })
        };
        let tmp = |size: &str| json!({"name": "tmp", "emptyDir": {"sizeLimit": size}});
        let env = |value: &str| json!([{"name": "A", "value": value}]);
        let present = pod("a", "1", env("1"), json!([tmp("1Gi")]), "x");
        let volumes = json!([tmp("2Gi"), {"name": "volume-0", "emptyDir": {}}]);
        let asked = pod("b", "2", env("2"), volumes, "y");
        let task = || json!({"job": {}});
        let expected = [
            "--env is \"A=1\", not \"A=2\"",
            "--image is \"a\", not \"b\"",
            "--volume differs",
            "--worker-pod-template differs",
            "--worker-resources is \"cpu=1,memory=1Gi\", not \"cpu=2,memory=1Gi\"",
        ];
        assert_eq!(told([task(), present.clone()], [task(), asked]), expected);
        let mut other = present.clone();
        other["spec"]["containers"][0]["args"][1] = "2".into();
        let program = "PROGRAM is \"train --lr 1\", not \"train --lr 2\"";
        assert_eq!(told([task(), present], [task(), other]), [program]);
    }

    #[test]
    fn a_file_of_options_has_keys_and_long_values_are_cut() {
        let task = |seed: Value| json!({"job": {"seed": seed}}).to_string();
        let data = |seed: Value| Data::from([(TASK.into(), task(seed))]);
        let found = differences(&data(0.into()), &data("é".repeat(100).into()));
        let text = found[0].to_string();
        assert!(text.starts_with("`seed` is 0, not \"é") && text.contains('…'), "{text}");
        assert!(text.len() < 200, "{text}");
    }
}
