use std::collections::BTreeSet;

use clap::{Arg, CommandFactory as _};
use elasticdl_master::kube::anchor::Data;
use elasticdl_master::kube::differences::differences;
use elasticdl_master::kube::objects::Credentials;

use super::*;
use crate::commands::{Cli, parse_start};

/// Options, with others that they need, and those of another job that differs in them alone.
const SAMPLES: [(&str, &str, &str); 69] = [
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
    ("success-policy", "", "--success-policy lowest-rank"),
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
