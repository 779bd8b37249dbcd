//! The manifests agree with the code.

use std::path::{Path, PathBuf};
use std::process::Command;

use elasticdl_master::kube::declaration::OPTIONS;
use elasticdl_master::kube::gang::GangScheduler;
use elasticdl_master::kube::submit::MASTER_RULES;
use serde_json::Value;

fn manifest(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join("manifests").join(name)
}

fn dry_run(options: &[&str]) -> (bool, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_elasticdl"))
        .args(["train", "--image", "elasticdl/quickstart:1", "--job-name", "example"])
        .args(["--namespace", "elasticdl", "--training-data", "/data", "--dry-run"])
        .args(options)
        .args(["--", "quickstart", "--hidden", "64"])
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.success(), text(output.stdout), text(output.stderr))
}

#[test]
fn the_example_equals_the_output_of_a_dry_run() {
    let template = manifest("example/pod.yaml");
    let template = template.to_str().unwrap();
    let options = [
        ["--num-workers", "4"],
        ["--volume", "claim_name=data,mount_path=/data,read_only=true"],
        ["--worker-resources", "cpu=2,memory=4Gi"],
        ["--env", "LOG=debug"],
        ["--worker-pod-template", template],
        ["--master-pod-template", template],
    ];
    let (success, made, error) = dry_run(&options.concat());
    assert!(success, "{error}");
    check_golden("example/job.yaml", &made);
}

#[test]
fn the_example_with_tables_has_servers_of_them() {
    let output = Command::new(env!("CARGO_BIN_EXE_elasticdl"))
        .args(["train", "--dry-run", "--config"])
        .arg(manifest("example/ctr.toml"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(String::from_utf8(output.stdout).unwrap().contains("table-server-pod: "));
}

/// Checks that a manifest is what `--dry-run` has printed, or replaces it.
fn check_golden(name: &str, made: &str) {
    let path = manifest(name);
    if std::env::var_os("ELASTICDL_BLESS").is_some() {
        std::fs::write(&path, made).unwrap();
    }
    let golden = std::fs::read_to_string(&path).unwrap();
    assert!(
        golden == made,
        "{}: run this test with ELASTICDL_BLESS=1 and check the difference",
        path.display()
    );
}

/// The options are what `elasticdl declare` submits; the pod meets the Pod Security Standard
/// `restricted`.
#[test]
fn the_declared_job_has_valid_options_and_may_run_where_pods_are_restricted() {
    let text = std::fs::read_to_string(manifest("example/declared.yaml")).unwrap();
    let job: Value = serde_saphyr::from_str(&text).unwrap();
    let options = job["metadata"]["annotations"][OPTIONS].as_str().unwrap();
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), options).unwrap();
    let pod = &job["spec"]["template"]["spec"];
    let container = &pod["containers"][0];
    let output = Command::new(env!("CARGO_BIN_EXE_elasticdl"))
        .args(["train", "--dry-run", "--image", container["image"].as_str().unwrap()])
        .args(["--job-name", job["metadata"]["name"].as_str().unwrap(), "--config"])
        .arg(file.path())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(container["command"], serde_json::json!(["elasticdl", "declare"]));
    check_restricted(pod);
    let rights = std::fs::read_to_string(manifest("rbac-declared.yaml")).unwrap();
    let rights: Vec<Value> = serde_saphyr::from_multiple(&rights).unwrap();
    assert_eq!(pod["serviceAccountName"], rights[0]["metadata"]["name"]);
    for binding in rights.iter().filter(|object| object["kind"] == "RoleBinding") {
        assert_eq!(binding["subjects"][0]["name"], rights[0]["metadata"]["name"]);
    }
}

/// Checks that a pod of one container meets the Pod Security Standard `restricted`.
fn check_restricted(pod: &Value) {
    let expected = serde_json::json!({
        "runAsNonRoot": true, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"},
    });
    assert_eq!(pod["securityContext"], expected);
    let expected = serde_json::json!({
        "allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]},
    });
    assert_eq!(pod["containers"][0]["securityContext"], expected);
}

#[test]
fn the_runtime_of_train_jobs_has_a_valid_command_and_may_run_where_pods_are_restricted() {
    let text = std::fs::read_to_string(manifest("kubeflow/runtime.yaml")).unwrap();
    let runtime: Value = serde_saphyr::from_str(&text).unwrap();
    let job = &runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"];
    let pod = &job["spec"]["template"]["spec"];
    check_restricted(pod);
    let words = pod["containers"][0]["command"].as_array().unwrap();
    let words: Vec<&str> = words.iter().map(|word| word.as_str().unwrap()).collect();
    let variables = pod["containers"][0]["env"].as_array().unwrap();
    for variable in variables {
        let used = format!("$({})", variable["name"].as_str().unwrap());
        assert!(words.contains(&&*used), "{used}");
    }
    let output = Command::new(env!("CARGO_BIN_EXE_elasticdl"))
        .args(&words[1..])
        .env("KUBECONFIG", "/nowhere")
        .output()
        .unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.starts_with("error: no cluster is configured"), "{error}");
}

#[test]
fn all_options_reach_the_objects() {
    let folder = tempfile::tempdir().unwrap();
    let template = folder.path().join("pod.yaml");
    std::fs::write(&template, "runtimeClassName: nvidia\n").unwrap();
    let template = template.to_str().unwrap();
    let table: [(&[&str], &str); 31] = [
        (&["--workers-per-pod", "3"], "\"workers_per_pod\": 3"),
        (&["--worker-resources", "nvidia.com/gpu=4"], "\"workers_per_pod\": 4"),
        (&["--service-account", "trainer"], "serviceAccountName: trainer"),
        (&["--master-image", "elasticdl:7"], "image: elasticdl:7"),
        (&["--master-resources", "cpu=3"], "cpu: \"3\""),
        (&["--worker-resources", "example.com/fpga=1"], "example.com/fpga"),
        (&["--env", "A=b"], "\"name\": \"A\""),
        (&["--env-from-secret", "bucket"], "\"secretRef\": {"),
        (&["--env-from-secret", "K=bucket:key"], "\"secretKeyRef\": {"),
        (&["--worker-service-account", "id"], "\"serviceAccountName\": \"id\""),
        (&["--image-pull-secret", "regcred"], "name: regcred"),
        (&["--scheduler", "volcano"], "\"schedulerName\": \"volcano\""),
        (&["--scheduler", "volcano", "--queue", "team"], "\"queue\": \"team\""),
        (&["--scheduler", "native"], "\"starts_core_together\": true"),
        (&["--scheduler", "kueue", "--queue", "team"], "\"kueue.x-k8s.io/queue-name\": \"team\""),
        (&["--scheduler", "volcano", "--per-job-role"], "- podgroups"),
        (&["--ttl-after-finished", "1h"], "ttlSecondsAfterFinished: 3600"),
        (&["--on-exit", "42=stop"], "\"action\": \"stop\""),
        (&["--on-exit", "preempted=ignore"], "\"event\": \"preempted\""),
        (&["--suspend"], "\"starts_suspended\": true"),
        (&["--deadline", "90s"], "\"deadline\": {"),
        (&["--metrics-port", "9100", "--metrics-from", "any"], "prometheus.io/port: \"9100\""),
        (&["--metrics-from", "monitoring,any"], "\"serve_metrics\": true"),
        (&["--metrics-from", "monitoring"], "kubernetes.io/metadata.name: monitoring"),
        (&["--egress-to", "10.0.0.0/8:443"], "cidr: 10.0.0.0/8"),
        (&["--log-format", "json"], "- --log-format\n        - json\n"),
        (&["--log-format", "json"], "FORMAT\",\n                \"value\": \"json\""),
        (&["--per-job-role"], "serviceAccountName: example-master"),
        (
            &["--tensorboard-dir", "/runs/a", "--volume", "claim_name=runs,mount_path=/runs"],
            "    volumeMounts:\n        - mountPath: /etc/elasticdl\n          \
             name: token\n          readOnly: true\n        - mountPath: /tmp\n          \
             name: tmp\n        - mountPath: /runs",
        ),
        (&["--worker-pod-template", template], "\"runtimeClassName\": \"nvidia\""),
        (&["--master-pod-template", template], "  runtimeClassName: nvidia"),
    ];
    let (_, without, _) = dry_run(&[]);
    assert!(without.contains("kind: NetworkPolicy"), "{without}");
    assert!(!dry_run(&["--no-network-policy"]).1.contains("kind: NetworkPolicy"));
    for (options, expected) in table {
        let (success, made, error) = dry_run(options);
        assert!(success, "{options:?}: {error}");
        assert!(
            made.contains(expected) && !without.contains(expected),
            "{options:?}: {expected}\n{made}"
        );
    }
}

/// What `--dry-run` with this template says.
fn dry_run_with(option: &str, template: &str, options: &[&str]) -> (bool, String, String) {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), template).unwrap();
    let path = file.path().to_str().unwrap();
    let (success, made, error) = dry_run(&[&[option, path], options].concat());
    (success, made, error.replace(path, "FILE"))
}

#[test]
fn a_template_that_the_job_can_not_run_with_is_refused_with_its_file_and_field() {
    let args = "containers: [{name: NAME, args: [x]}]";
    let (worker, master) = (args.replace("NAME", "worker"), args.replace("NAME", "master"));
    let class = "priorityClassName: low";
    let table: [(&str, &str, &[&str], &str); 6] = [
        ("--worker-pod-template", &worker, &[], "FILE: spec.containers[worker].args: PROGRAM"),
        ("--master-pod-template", &master, &[], "FILE: spec.containers[master].args: elasticdl"),
        ("--master-pod-template", "nodeNmae: n", &[], "FILE: spec.nodeNmae: pods have no such"),
        ("--master-pod-template", "metadata: {name: n}", &[], "FILE: metadata.name: "),
        ("--worker-pod-template", class, &["--priority-tiers", "auto"], "priorityClassName low"),
        ("--worker-pod-template", class, &["--weight", "2"], "--weight: the job has no priority"),
    ];
    for (option, template, options, expected) in table {
        let (success, _, error) = dry_run_with(option, template, options);
        assert!(!success && error.contains(expected), "{option} {template}: {error}");
    }
}

#[test]
fn a_class_of_the_template_takes_the_place_of_priority_tiers() {
    let class = "priorityClassName: low";
    let (_, made, _) = dry_run_with("--worker-pod-template", class, &[]);
    assert!(
        made.contains("\"priorityClassName\": \"low\"")
            && made.contains("\"priority_tiers\": null")
    );
    // The class of the master's pod leaves the workers' as they are.
    let (_, made, _) = dry_run_with("--master-pod-template", class, &[]);
    assert!(
        made.contains("  priorityClassName: low") && made.contains("\"priority_tiers\": {"),
        "{made}"
    );
    let volcano = ["--scheduler", "volcano"];
    let (_, made, error) = dry_run_with("--worker-pod-template", class, &volcano);
    assert!(made.contains("\"priority_class\": \"low\""), "{made}{error}");
}

#[test]
fn other_work_than_training_reaches_the_task() {
    let folder = ["--model", "s3://bucket/m", "--data", "/d", "--image", "i:1", "--dry-run"];
    let table: [(&str, &[&str], &str); 3] = [
        ("evaluate", &[], "\"Evaluate\": {"),
        ("evaluate", &[], "\"model\": \"s3://bucket/m\""),
        ("predict", &["--predictions", "s3://b/out", "--format", "csv"], "\"format\": \"Csv\""),
    ];
    for (verb, options, expected) in table {
        let output = Command::new(env!("CARGO_BIN_EXE_elasticdl"))
            .arg(verb)
            .args(folder)
            .args(options)
            .args(["--", "mnist"])
            .output()
            .unwrap();
        let made = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success() && made.contains(expected), "{verb}: {expected}\n{made}");
    }
}

#[test]
fn options_that_no_cluster_accepts_are_refused_by_name() {
    let gpus = ["--worker-resources", "nvidia.com/gpu=4"];
    let with_gpus = |options: [&'static str; 2]| [gpus, options].concat();
    let pods: [(&[&str], &str); 5] = [
        (
            &with_gpus(["--num-workers", "6"]),
            "--num-workers 6: a pod holds 4 workers (nvidia.com/gpu=4), so this must be a multiple \
             of 4: 4 or 8",
        ),
        (
            &with_gpus(["--min-workers", "1"]),
            "--min-workers 1: a pod holds 4 workers (nvidia.com/gpu=4), so this must be a multiple \
             of 4: 4\n",
        ),
        (
            &["--workers-per-pod", "2", "--max-workers", "9"],
            "--max-workers 9: a pod holds 2 workers (--workers-per-pod 2)",
        ),
        (&["--workers-per-pod", "65"], "from 1 to 64"),
        (
            &["--worker-resources", "nvidia.com/gpu=100"],
            "at most 64; set the number with --workers-per-pod",
        ),
    ];
    for (options, expected) in pods {
        let (success, _, error) = dry_run(options);
        assert!(!success && error.contains(expected), "{options:?}: {error}");
    }
    let table: [(&[&str], &str); 25] = [
        (&["--worker-resources", "cpu=fast"], "--worker-resources"),
        (&["--env", "DB_PASSWORD=hunter2"], "--env-from-secret NAME:DB_PASSWORD"),
        (&["--env-from-secret", "A=bucket"], "needs the key"),
        (&["--env", "ELASTICDL_JOB=x"], "set by elasticdl itself"),
        (&["--volume", "claim_name=c"], "mount_path is missing"),
        (&["--scheduler", "slurm"], "volcano"),
        (&["--scheduler", "kueue"], "--queue is missing"),
        (&["--queue", "team"], "--queue team: without --scheduler there are no queues"),
        (&["--scheduler", "native", "--queue", "team"], "--scheduler native has no queues"),
        (&["--ttl-after-finished", "soon"], "--ttl-after-finished"),
        (&["--on-exit", "70=ignore"], "70 is an exit code of the worker library"),
        (&["--on-exit", "oom=stop"], "one of the events deleted, evicted, node-lost, not-started"),
        (&["--local"], "--local"),
        (&["--worker-pod-template", "/absent.yaml"], "--worker-pod-template /absent.yaml: "),
        (&["--master-pod-template", "/absent.yaml"], "--master-pod-template /absent.yaml: "),
        (&["--metrics-port", "9100"], "--metrics-from any"),
        (&["--metrics-from", "10.0.0.0/40"], "CIDR"),
        (&["--egress-to", "10.0.0.1"], "CIDR"),
        (&["--egress-to", "none", "--no-network-policy"], "cannot be used with"),
        (&["--per-job-role", "--service-account", "a"], "cannot be used with"),
        (&["--metrics-from", "Monitoring"], "a namespace"),
        (&["--metrics-port", "0"], "1 to 65535"),
        (&["--metrics-port", "7070"], "workers reach the master"),
        (&["--tensorboard-dir", "/runs"], "--volume"),
        (
            &["--tensorboard-dir", "/r", "--volume", "claim_name=c,mount_path=/r,read_only=true"],
            "--volume",
        ),
    ];
    for (options, expected) in table {
        let (success, _, error) = dry_run(options);
        assert!(!success && error.contains(expected), "{options:?}: {error}");
        assert!(!error.contains("hunter2"), "{error}");
    }
}

#[test]
fn the_role_has_the_rights_that_the_master_needs_and_no_more() {
    let text = std::fs::read_to_string(manifest("rbac.yaml")).unwrap();
    let documents: Vec<Value> = serde_saphyr::from_multiple(&text).unwrap();
    let role = documents.iter().find(|d| d["kind"] == "Role").unwrap();
    let expected: Vec<Value> = MASTER_RULES
        .iter()
        .map(|(group, resource, verbs)| {
            serde_json::json!({"apiGroups": [group], "resources": [resource], "verbs": verbs})
        })
        .collect();
    assert_eq!(role["rules"], Value::from(expected));
    assert!(
        documents.iter().all(|d| d["metadata"]["namespace"] == "elasticdl"),
        "no right reaches further"
    );
}

#[test]
fn each_scheduler_has_a_role_with_the_rights_that_its_groups_need_and_no_more() {
    let schedulers = [GangScheduler::Native, GangScheduler::Volcano];
    for scheduler in schedulers {
        let path = manifest(&format!("schedulers/{}.yaml", scheduler.name()));
        let text = std::fs::read_to_string(path).unwrap();
        let documents: Vec<Value> = serde_saphyr::from_multiple(&text).unwrap();
        let role = documents.iter().find(|d| d["kind"] == "Role").unwrap();
        let (group, resource, verbs) = scheduler.master_rule().unwrap();
        let expected =
            serde_json::json!([{"apiGroups": [group], "resources": [resource], "verbs": verbs}]);
        assert_eq!(role["rules"], expected, "{scheduler:?}");
        let binding = documents.iter().find(|d| d["kind"] == "RoleBinding").unwrap();
        assert_eq!(binding["roleRef"]["name"], role["metadata"]["name"]);
        assert_eq!(binding["subjects"][0]["name"], "elasticdl");
        assert!(documents.iter().all(|d| d["metadata"]["namespace"] == "elasticdl"));
    }
}

/// The API server lets a user grant those rights only that the user has.
#[test]
fn users_who_submit_with_a_role_per_job_have_the_rights_of_a_master() {
    let text = std::fs::read_to_string(manifest("rbac-per-job.yaml")).unwrap();
    let documents: Vec<Value> = serde_saphyr::from_multiple(&text).unwrap();
    let rules = documents.iter().find(|d| d["kind"] == "Role").unwrap()["rules"].clone();
    let has = |group: &str, resource: &str, verb: &str| {
        let list = |rule: &Value, key: &str, word: &str| {
            rule[key].as_array().unwrap().iter().any(|entry| entry == word)
        };
        rules.as_array().unwrap().iter().any(|rule| {
            list(rule, "apiGroups", group)
                && list(rule, "resources", resource)
                && list(rule, "verbs", verb)
        })
    };
    for (group, resource, verbs) in MASTER_RULES {
        for verb in verbs {
            assert!(has(group, resource, verb), "{verb} {resource}");
        }
    }
    assert!(
        documents.iter().all(|d| d["metadata"]["namespace"] == "elasticdl"),
        "no right reaches further"
    );
}
