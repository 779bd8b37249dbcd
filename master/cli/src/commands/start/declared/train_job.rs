//! The options that a `TrainJob` of Kubeflow stands for.

use std::collections::BTreeMap;

use elasticdl_master::kube::anchor::{NUM_WORKERS, SUSPEND};
use elasticdl_master::kube::train_job::{Requirements, TrainJobSpec, Trainer};
use toml::{Table, Value};

use crate::process::Failure;

/// The options of a `TrainJob`: those of its `runtime`, over them its fields, and over these its
/// `own`, of its annotation. Variables of the environment are merged by name. `per_pod`: the number
/// of workers per pod of a job with these options, and what it follows from.
///
/// # Errors
/// A field has no option that stands for it, or [`Failure`] of `per_pod`.
pub(super) fn options(
    origin: &str,
    runtime: Table,
    own: Table,
    train_job: &TrainJobSpec,
    per_pod: impl FnOnce(Table) -> Result<(u32, String), Failure>,
) -> Result<Table, Failure> {
    let nodes = train_job.trainer.num_nodes.filter(|_| !own.contains_key(NUM_WORKERS));
    let fields = fields(&train_job.trainer);
    let fields = fields.map_err(|why| Failure::usage(format!("{origin}: {why}")))?;
    let mut all = runtime;
    for (key, value) in fields.into_iter().chain(own) {
        let value = match all.remove(&key) {
            Some(before) if key == ENV || key == ENV_FROM_SECRET => merge(before, value),
            _ => value,
        };
        all.insert(key, value);
    }
    if let Some(nodes) = nodes {
        let (per_pod, _) = per_pod(all.clone())?;
        all.insert(NUM_WORKERS.into(), i64::from(nodes.saturating_mul(per_pod)).into());
    }
    if train_job.suspend {
        all.insert(SUSPEND.into(), true.into());
    }
    Ok(all)
}

/// The options that fields of `spec.trainer` stand for, without the number of workers: that of a
/// pod follows from all options.
fn fields(trainer: &Trainer) -> Result<Table, String> {
    let Trainer { image, command, args, env, resources_per_node, num_proc_per_node, .. } = trainer;
    let mut all = Table::new();
    let mut set = |key: &str, value: Option<Value>| {
        all.extend(value.map(|value| (key.to_owned(), value)));
    };
    set("image", image.clone().map(Value::from));
    let program: Vec<Value> = command.iter().chain(args).cloned().map(Value::from).collect();
    set("program", (!program.is_empty()).then(|| program.into()));
    set("worker-resources", resources(resources_per_node)?.map(Value::from));
    set("workers-per-pod", num_proc_per_node.map(|number| i64::from(number).into()));
    let (mut plain, mut secret) = (Vec::<Value>::new(), Vec::<Value>::new());
    for variable in env {
        let name = &variable.name;
        let Some(from) = &variable.value_from else {
            plain.push(format!("{name}={}", variable.value.as_deref().unwrap_or_default()).into());
            continue;
        };
        let Some(key) = &from.secret_key_ref else {
            return Err(format!(
                "`spec.trainer.env`: the value of {name} must be text or the key of a Secret; for \
                 others, name a file with `worker-pod-template` in the options"
            ));
        };
        secret.push(format!("{name}={}:{}", key.name, key.key).into());
    }
    set(ENV, (!plain.is_empty()).then(|| plain.into()));
    set(ENV_FROM_SECRET, (!secret.is_empty()).then(|| secret.into()));
    Ok(all)
}

/// Resources as `worker-resources` has them: a limit without a request is the request, too.
fn resources(resources: &Requirements) -> Result<Option<String>, String> {
    let Requirements { claims, limits, requests } = resources;
    if !claims.is_empty() {
        return Err("`spec.trainer.resourcesPerNode.claims`: name a file with \
                    `worker-pod-template` in the options, which has them"
            .into());
    }
    let text = |(name, amount): (&String, &serde_json::Value)| {
        let amount = amount.as_str().map_or_else(|| amount.to_string(), str::to_owned);
        (name.clone(), amount)
    };
    let limits: BTreeMap<String, String> = limits.iter().map(text).collect();
    let mut all = limits.clone();
    all.extend(requests.iter().map(text));
    for (name, amount) in limits {
        // Memory and devices are limited to what is requested.
        if name == "cpu" || all[&name] != amount {
            all.insert(format!("limits.{name}"), amount);
        }
    }
    let all: Vec<String> =
        all.into_iter().map(|(name, amount)| format!("{name}={amount}")).collect();
    Ok((!all.is_empty()).then(|| all.join(",")))
}

/// The variables `before` and `over`, which come before those of the same name.
fn merge(before: Value, over: Value) -> Value {
    let list = |value| match value {
        Value::Array(values) => values,
        value => vec![value],
    };
    let name = |value: &Value| {
        value.as_str().and_then(|text| text.split_once('=')).map(|(name, _)| name.to_owned())
    };
    let over = list(over);
    let is_same = |value: &Value| {
        name(value)
            .is_some_and(|known| over.iter().any(|other| name(other).as_ref() == Some(&known)))
    };
    let mut all: Vec<Value> = list(before).into_iter().filter(|value| !is_same(value)).collect();
    all.extend(over);
    all.into()
}

const ENV: &str = "env";
const ENV_FROM_SECRET: &str = "env-from-secret";
