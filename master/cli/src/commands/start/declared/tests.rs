use std::collections::BTreeSet;
use std::path::Path;

use clap::{Arg, CommandFactory as _};
use elasticdl_master::kube::anchor::Data;
use elasticdl_master::kube::differences::differences;
use elasticdl_master::kube::objects::Credentials;
use serde_json::json;

use super::*;
use crate::args::Arguments;
use crate::commands::{Cli, parse_start};

/// Options, with others that they need, and those of another job that differs in them alone.
const SAMPLES: [(&str, &str, &str); 68] = [
    ("allow-mixed-builds", "", "--allow-mixed-builds"),
    ("audit", "", "--audit 1%"),
    ("autoscale", "", "--autoscale"),
    ("avoid-hosts", "", "--avoid-hosts node-1,node-2"),
    ("bad-records", "", "--bad-records skip:3"),
    ("best-metric", "--validation-data v", "--best-metric accuracy"),
    ("channels", "", "--channels 2"),
    ("checkpoint-dir", "", "--checkpoint-dir /v/c"),
    ("checkpoint-every", "--checkpoint-dir /v/c", "--checkpoint-every 9"),
    ("checkpoint-keep", "--checkpoint-dir /v/c", "--checkpoint-keep 9"),
    ("deadline", "", "--deadline 1h"),
    ("deterministic", "", "--deterministic"),
    ("early-stopping", "--validation-data v --evaluate-every 5", "--early-stopping 2"),
    ("end-timeout", "", "--end-timeout 1min"),
    ("env", "", "--env A=1"),
    ("env-from-secret", "", "--env-from-secret s"),
    ("env-from-secret", "", "--env-from-secret A=s:k"),
    ("evaluate-every", "--validation-data v", "--evaluate-every 5"),
    ("export", "", "--export /v/m"),
    ("export-best", "--validation-data v", "--export-best /v/b"),
    ("export-changes-since", "--export /v/m", "--export-changes-since 9"),
    ("global-batch-size", "", "--global-batch-size 32"),
    ("grace-period", "", "--grace-period 9s"),
    ("image-pull-secret", "", "--image-pull-secret s"),
    ("link-encryption", "", "--link-encryption off"),
    ("log-format", "", "--log-format json"),
    ("master-timeout", "", "--master-timeout 9s"),
    ("max-steps", "", "--max-steps 9"),
    ("max-worker-restarts", "", "--max-worker-restarts 9"),
    ("max-workers", "", "--max-workers 9"),
    ("metrics-from", "", "--metrics-from any"),
    ("metrics-port", "--metrics-from any", "--metrics-port 7072"),
    ("micro-batch", "", "--micro-batch 2"),
    ("min-workers", "", "--min-workers 2"),
    ("num-epochs", "", "--num-epochs 2"),
    ("num-workers", "--max-workers 9", "--num-workers 3"),
    ("on-exit", "", "--on-exit 3=stop"),
    ("on-nonfinite", "", "--on-nonfinite skip"),
    ("on-rows-lost", "", "--on-rows-lost stale"),
    ("param-dtype", "--shard-optimizer", "--param-dtype bf16"),
    ("priority-tiers", "", "--priority-tiers a,b"),
    ("priority-tiers", "", "--priority-tiers off"),
    ("restart-without-checkpoint", "", "--restart-without-checkpoint"),
    ("resume-from", "", "--resume-from /v/c"),
    ("scheduler", "", "--scheduler volcano"),
    ("seed", "", "--seed 7"),
    ("shard-optimizer", "", "--shard-optimizer"),
    ("shuffle", "", "--shuffle block:100"),
    ("spares", "", "--spares 1"),
    ("start-timeout", "", "--start-timeout 9s"),
    ("step-timeout", "", "--step-timeout 9s"),
    ("suspend", "", "--suspend"),
    ("table-lag", "", "--table-lag 1"),
    ("table-memory", "", "--table-memory 1GiB"),
    ("table-replicas", "", "--table-replicas 1"),
    ("table-server-resources", "--table-servers 2", "--table-server-resources cpu=2"),
    ("table-servers", "", "--table-servers 2"),
    ("tensorboard-dir", "", "--tensorboard-dir /v/t"),
    ("validation-data", "", "--validation-data v"),
    ("validation-split", "", "--validation-split 0.2"),
    ("volume", "", "--volume claim_name=d,mount_path=/w"),
    ("weight", "", "--weight 2"),
    ("wire-dtype", "", "--wire-dtype bf16"),
    ("worker-pod-template", "", "--worker-pod-template TEMPLATE"),
    ("worker-resources", "", "--worker-resources cpu=2,memory=2Gi,ephemeral-storage=1Gi"),
    ("worker-service-account", "", "--worker-service-account w"),
    ("worker-timeout", "", "--worker-timeout 2s"),
    ("workers-per-pod", "--num-workers 4 --min-workers 2 --max-workers 8", "--workers-per-pod 2"),
];
/// Options that are in both jobs, and what takes their place in another one.
const REPLACED: [(&str, &str, &str); 4] = [
    ("image", "--image i:1", "--image i:2"),
    ("queue", "--queue q", "--queue r"),
    ("training-data", "--training-data d", "--training-data e"),
    ("global-batch-size minibatch-size", "--global-batch-size 32", "--minibatch-size 32"),
];
/// Options that are none of a job in a cluster, or that the master's pod and the other objects
/// have alone.
const NOT_COMPARED: &str = "config context dashboard-port detach dry-run egress-to help \
    help-all host-command hosts if-not-exists job-dir job-name listen local \
    master-image master-pod-template master-resources namespace no-network-policy per-job-role \
    print-config quiet replace replay-step resume service-account summary tee \
    ttl-after-finished";

/// Data of the anchor of the job that has these options.
fn anchor(options: &str, credentials: &mut Option<Credentials>) -> Data {
    let line = format!("train --job-name j --volume claim_name=c,mount_path=/v {options} -- t");
    let asked = parse_start(&line).unwrap();
    let image = asked.job.image.as_deref().unwrap();
    let pods = pod_options(&asked.cluster, image).map_err(|e| e.text).unwrap();
    let request = cluster_job::request(&asked, pods, "n".into());
    let request = request.map_err(|e| format!("{options}: {}", e.text)).unwrap();
    let credentials =
        credentials.get_or_insert_with(|| cluster_job::draw(&request).map_err(|_| ()).unwrap());
    Objects::new(&request, credentials.clone()).unwrap().anchor.data.unwrap()
}

#[test]
fn each_option_in_which_jobs_differ_is_named_and_no_other() {
    let template = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&template, "spec: {nodeSelector: {zone: a}}").unwrap();
    let path = template.path().to_str().unwrap();
    let mut credentials = None;
    let mut check = |names: &str, present: &str, asked: &str| {
        let [present, asked] = [present, asked]
            .map(|options| anchor(&options.replace("TEMPLATE", path), &mut credentials));
        let found = differences(&present, &asked);
        let found: Vec<&str> = found.iter().map(|differs| &*differs.option).collect();
        assert_eq!(found.join(" "), names);
    };
    let base = "--image i:1 --training-data d";
    for (name, with, option) in SAMPLES {
        check(name, &format!("{base} {with}"), &format!("{base} {with} {option}"));
    }
    for (names, option, instead) in REPLACED {
        let queue = "--scheduler kueue --queue q";
        let base = if names == "queue" { format!("{base} {queue}") } else { base.to_owned() };
        let base = if base.contains(option) { base } else { format!("{base} {option}") };
        check(names, &base, &base.replace(option, instead));
    }
    let mut command = Cli::command();
    command.build();
    let train = command.find_subcommand("train").unwrap();
    let all: BTreeSet<&str> = train.get_arguments().filter_map(Arg::get_long).collect();
    let sampled = SAMPLES.iter().chain(&REPLACED).flat_map(|(names, ..)| names.split(' '));
    let known: BTreeSet<&str> = sampled.chain(NOT_COMPARED.split_whitespace()).collect();
    assert_eq!(all, known);
}

/// Errors of the command line speak of options that a declaration does not have.
#[test]
fn options_that_exclude_an_image_are_refused_by_name() {
    let mut command = Cli::command();
    command.build();
    let train = command.find_subcommand("train").unwrap();
    let image = train.get_arguments().find(|arg| arg.get_id() == "image").unwrap();
    let names = |arg: &Arg, other: &Arg| {
        let conflicts = train.get_arg_conflicts_with(arg);
        conflicts.iter().any(|conflict| conflict.get_id() == other.get_id())
    };
    let excludes = |arg: &&Arg| names(arg, image) || names(image, arg);
    let name = |arg: &Arg| arg.get_long().unwrap().to_owned();
    let excluded: Vec<String> = train.get_arguments().filter(excludes).map(name).collect();
    assert!(excluded.contains(&"tee".to_owned()), "{excluded:?}");
    for key in excluded.iter().map(String::as_str).chain(["job-dir", "per-job-role"]) {
        let table = Table::from_iter([(key.to_owned(), Value::Boolean(true))]);
        let refused = check_declared("the annotation", &table).map_err(|e| e.text);
        let expected = format!("the annotation: leave out `{key}`: ");
        assert!(refused.is_err_and(|text| text.starts_with(&expected)), "{key}");
    }
}

/// The job that `elasticdl train` would start with these options.
fn read(table: Table) -> StartRequest {
    let mut command = Cli::command();
    command.build();
    let train = command.find_subcommand("train").unwrap();
    let words = Arguments::of_table(train, "it", table).map_err(|e| e.text).unwrap().all;
    let words: Vec<&str> = words[1..].iter().map(|word| word.to_str().unwrap()).collect();
    parse_start(&words.join(" ")).unwrap()
}

/// The options of a TrainJob of these fields, with those of its runtime and its annotation.
fn of_train_job(runtime: &str, own: &str, spec: serde_json::Value) -> Result<Table, String> {
    let per_pod = |mut table: Table| {
        for (key, value) in
            [("image", "i:0".into()), ("program", vec!["p"].into()), ("training-data", "d".into())]
        {
            table.entry(key).or_insert(value);
        }
        workers_per_pod(&read(table).cluster, true)
    };
    let (runtime, own) = (runtime.parse().unwrap(), own.parse().unwrap());
    let spec = serde_json::from_value(spec).unwrap();
    train_job::options("it", runtime, own, &spec, per_pod).map_err(|e| e.text)
}

#[test]
fn the_train_job_of_the_example_is_the_declared_job() {
    let manifest = |name: &str| -> serde_json::Value {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../manifests").join(name);
        serde_saphyr::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
    };
    let (job, train_job) = (manifest("example/declared.yaml"), manifest("example/trainjob.yaml"));
    let options = |of: &serde_json::Value| -> String {
        of["metadata"]["annotations"][OPTIONS].as_str().unwrap().into()
    };
    let runtime = manifest("kubeflow/runtime.yaml");
    let runtime = &runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"];
    let made = of_train_job(&options(runtime), &options(&train_job), train_job["spec"].clone());
    let mut expected: Table = options(&job).parse().unwrap();
    expected.insert("image".into(), "team/model:1".into());
    assert_eq!(made.unwrap(), expected);
}

#[test]
fn the_fields_of_a_train_job_are_options_between_those_of_its_runtime_and_its_own() {
    let trainer = json!({
        "image": "team/model:1", "command": ["python"], "args": ["train.py", "--x", "a b"],
        "numNodes": 4,
        "resourcesPerNode": {
            "requests": {"cpu": 2, "memory": "4Gi"}, "limits": {"cpu": "3", "memory": "4Gi"},
        },
        "env": [
            {"name": "A", "value": "1=2"}, {"name": "B"},
            {"name": "K", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}},
        ],
    });
    let runtime = "volume = 'claim_name=c,mount_path=/v'\nenv = ['A=0', 'R=0', 'Z=0']\n\
                   num-workers = 9\nworker-resources = 'cpu=1'\nenv-from-secret = 'bucket'";
    let own = "env = 'R=1'\ncheckpoint-dir = '/v/c'\nvolume = 'claim_name=d,mount_path=/v'";
    let made = of_train_job(runtime, own, json!({"suspend": true, "trainer": trainer})).unwrap();
    let expected = r#"
        checkpoint-dir = "/v/c"
        env = ["Z=0", "A=1=2", "B=", "R=1"]
        env-from-secret = ["bucket", "K=hub:token"]
        image = "team/model:1"
        num-workers = 4
        program = ["python", "train.py", "--x", "a b"]
        suspend = true
        volume = "claim_name=d,mount_path=/v"
        worker-resources = "cpu=2,limits.cpu=3,memory=4Gi"
    "#;
    assert_eq!(made, expected.parse::<Table>().unwrap());
    let all = of_train_job(runtime, own, json!({"suspend": false})).unwrap();
    assert_eq!((all["num-workers"].as_integer(), all.contains_key("suspend")), (Some(9), false));
    let limits = json!({"cpu": "2", "memory": "4Gi", "nvidia.com/gpu": 1});
    let equal = json!({"requests": {"cpu": "2", "memory": "2Gi"}, "limits": limits});
    let made = of_train_job("", "", json!({"trainer": {"resourcesPerNode": equal}})).unwrap();
    let expected = "cpu=2,limits.cpu=2,limits.memory=4Gi,memory=2Gi,nvidia.com/gpu=1";
    assert_eq!(made["worker-resources"].as_str(), Some(expected));
}

#[test]
fn the_number_of_nodes_of_a_train_job_is_that_of_its_pods() {
    let number = |runtime: &str, own: &str, trainer: serde_json::Value| {
        let made = of_train_job(runtime, own, json!({"trainer": trainer})).unwrap();
        made["num-workers"].as_integer().unwrap()
    };
    let gpus = json!({"limits": {"nvidia.com/gpu": 4}});
    let two_of_four = json!({"numNodes": 2, "resourcesPerNode": gpus});
    assert_eq!(number("", "", two_of_four.clone()), 8);
    assert_eq!(number("", "workers-per-pod = 1", two_of_four.clone()), 2);
    assert_eq!(number("", "num-workers = 12", two_of_four), 12);
    assert_eq!(number("", "", json!({"numNodes": 2, "numProcPerNode": 3})), 6);
    assert_eq!(number("workers-per-pod = 5", "", json!({"numNodes": 2})), 10);
    assert_eq!(number("worker-resources = 'nvidia.com/gpu=2'", "", json!({"numNodes": 2})), 4);
    assert_eq!(number("", "", json!({"numNodes": 0})), 0);
}

#[test]
fn fields_of_a_train_job_that_no_option_stands_for_are_refused() {
    let from = json!({"fieldRef": {"fieldPath": "metadata.name"}});
    let claims = json!({"claims": [{"name": "gpu"}]});
    for (trainer, named) in [
        (json!({"env": [{"name": "POD", "valueFrom": from}]}), "it: `spec.trainer.env`: the value"),
        (json!({"resourcesPerNode": claims}), "it: `spec.trainer.resourcesPerNode.claims`"),
    ] {
        let refused = of_train_job("", "", json!({"trainer": trainer})).unwrap_err();
        assert!(refused.starts_with(named), "{refused}");
    }
}
