//! Jobs in a real cluster, when `KUBECONFIG` names one; `.ci/cluster` starts one and runs these.
//!
//! The model's parameters count records, so the summary's last line proves what the ledger says.

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

use elasticdl_tests::cluster::{Following, Namespace, assert_exactly_once, text};
use elasticdl_tests::send;
use rustix::process::Signal;
use serde_json::Value;

/// Records in the image's `/data`.
const RECORDS: u64 = 6000;

fn namespace(test: &str) -> Option<Namespace> {
    let namespace = Namespace::new(test, env!("CARGO_BIN_EXE_elasticdl-under-test"))?;
    namespace.apply_rbac();
    Some(namespace)
}

fn counting(micros_per_record: u32) -> [String; 4] {
    let records = RECORDS.to_string();
    ["--records".into(), records, "--micros-per-record".into(), micros_per_record.to_string()]
}

fn start(namespace: &Namespace, options: &[&str], micros_per_record: u32) -> Following {
    let program = counting(micros_per_record);
    let program: Vec<&str> = program.iter().map(String::as_str).collect();
    Following::start(namespace.train("count", options, &program))
}

/// Waits until the group has this many members and a step more than now; gives back its pods.
fn wait_for_group(namespace: &Namespace, members: usize) -> Vec<Value> {
    let step = |status: &Value| status["step"].as_u64().unwrap_or(0);
    let before = step(&namespace.anchor("count", "status"));
    namespace.wait_for("count", &format!("a group of {members} that trains"), || {
        let status = namespace.anchor("count", "status");
        let ranked = status["workers"].as_array()?.iter().filter(|w| !w["rank"].is_null()).count();
        let pods = namespace.running_workers("count");
        (ranked == members && step(&status) > before && pods.len() == members).then_some(pods)
    })
}

fn name(pod: &Value) -> &str {
    pod["metadata"]["name"].as_str().unwrap()
}

fn assert_completed(namespace: &Namespace, ended: (Option<i32>, String), epochs: u64) {
    let (code, output) = ended;
    assert_eq!(code, Some(0), "{output}\n{}", namespace.master_log("count"));
    assert_exactly_once(&namespace.anchor("count", "summary"), RECORDS, epochs);
    let deleted = namespace.elasticdl("delete", ["count"]).output().unwrap();
    assert!(deleted.status.success(), "{}", text(&deleted));
    namespace.wait_for("count", "nothing is left", || namespace.leftovers().is_empty().then_some(()));
}

#[test]
fn three_pods_train_each_record_once_and_leave_nothing() {
    let Some(namespace) = namespace("train") else { return };
    let ended = start(&namespace, &["--num-workers", "3", "--num-epochs", "2"], 300).wait();
    println!("{}", ended.1);
    println!("{}", namespace.master_log("count"));
    assert!(ended.1.contains("the master runs"), "{}", ended.1);
    assert_completed(&namespace, ended, 2);
}

#[test]
fn pods_that_are_deleted_and_killed_cost_no_record() {
    let Some(namespace) = namespace("fire") else { return };
    let options = ["--num-workers", "3", "--num-epochs", "6", "--max-worker-restarts", "0"];
    let following = start(&namespace, &options, 4000);
    let pods = wait_for_group(&namespace, 3);
    namespace.delete_pod(name(&pods[0]), &["--wait=false"]);
    let pods = wait_for_others(&namespace, &pods[0]);
    namespace.delete_pod(name(&pods[1]), &["--grace-period=0", "--force", "--wait=false"]);
    let pods = wait_for_others(&namespace, &pods[1]);
    namespace.kill_inside(&pods[2]);
    wait_for_others(&namespace, &pods[2]);
    // Names are used once: three pods, and three in their places.
    let mut all: Vec<u64> = namespace
        .master_log("count")
        .lines()
        .filter(|line| line.contains("worker pod created"))
        .filter_map(|line| line.split("launch=").nth(1)?.split_whitespace().next()?.parse().ok())
        .collect();
    all.sort_unstable();
    assert_eq!(all, [1, 2, 3, 4, 5, 6]);
    // No end of these was the workers' own fault, so none counts.
    assert_completed(&namespace, following.wait(), 6);
}

/// Waits until three pods train, of which `gone` is none.
fn wait_for_others(namespace: &Namespace, gone: &Value) -> Vec<Value> {
    namespace.wait_for("count", "the pod is gone", || {
        let pods = namespace.running_workers("count");
        pods.iter().all(|pod| name(pod) != name(gone)).then_some(())
    });
    wait_for_group(namespace, 3)
}

#[test]
fn a_job_that_is_deleted_midway_leaves_nothing() {
    let Some(namespace) = namespace("delete") else { return };
    let following = start(&namespace, &["--num-workers", "2", "--num-epochs", "1000"], 1000);
    wait_for_group(&namespace, 2);
    let deleted = namespace.elasticdl("delete", ["count"]).output().unwrap();
    assert!(deleted.status.success(), "{}", text(&deleted));
    assert_eq!(namespace.leftovers(), Vec::<String>::new());
    let (code, output) = following.wait();
    assert_eq!(code, Some(1), "{output}");
    assert!(output.contains("has been deleted"), "{output}");
    let again = namespace.elasticdl("delete", ["count"]).output().unwrap();
    assert_eq!(again.status.code(), Some(2), "{}", text(&again));
}

#[test]
fn a_job_is_resized_left_alone_and_stopped_from_outside() {
    let Some(namespace) = namespace("scale") else { return };
    let following = start(&namespace, &["--num-workers", "1", "--num-epochs", "1000"], 1000);
    wait_for_group(&namespace, 1);
    let again = start(&namespace, &["--num-workers", "1"], 0).wait();
    assert_eq!(again.0, Some(2), "{}", again.1);
    assert!(again.1.contains("already") && again.1.contains("elasticdl delete count"), "{}", again.1);
    // The one who follows goes; the job stays.
    send(following.pid(), Signal::INT);
    let (code, output) = following.wait();
    assert_eq!(code, Some(130), "{output}");
    assert!(output.contains("The job goes on"), "{output}");
    let scaled = namespace.elasticdl("scale", ["count", "--num-workers", "3"]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&scaled.stdout), "workers: 1 -> 3\n", "{}", text(&scaled));
    wait_for_group(&namespace, 3);
    let too_many = namespace.elasticdl("scale", ["count", "--num-workers", "300"]).output().unwrap();
    assert_eq!(too_many.status.code(), Some(2), "{}", text(&too_many));
    let scaled = namespace.elasticdl("scale", ["count", "--num-workers", "1"]).output().unwrap();
    assert!(scaled.status.success(), "{}", text(&scaled));
    wait_for_group(&namespace, 1);
    let status = namespace.elasticdl("status", ["count"]).output().unwrap();
    assert!(text(&status).contains("state        running"), "{}", text(&status));
    let list = namespace.elasticdl("list", [""; 0]).output().unwrap();
    assert!(text(&list).contains("count") && text(&list).contains("running"), "{}", text(&list));
    let stopped = namespace.elasticdl("stop", ["count"]).output().unwrap();
    assert!(stopped.status.success(), "{}", text(&stopped));
    let state = namespace.wait_for("count", "its summary", || {
        namespace.anchor("count", "summary")["state"].as_str().map(str::to_owned)
    });
    assert_eq!(state, "stopped");
}

#[test]
fn a_namespace_without_rights_is_refused_before_anything_is_made() {
    let Some(namespace) = Namespace::new("rights", env!("CARGO_BIN_EXE_elasticdl-under-test")) else {
        return;
    };
    let (code, output) = start(&namespace, &["--num-workers", "1"], 0).wait();
    assert_eq!(code, Some(1), "{output}");
    for word in ["service account elasticdl", "manifests/rbac.yaml", namespace.name()] {
        assert!(output.contains(word), "{word}: {output}");
    }
    // An account without a role.
    namespace.apply("apiVersion: v1\nkind: ServiceAccount\nmetadata: {name: elasticdl}\n");
    let (code, output) = start(&namespace, &["--num-workers", "1"], 0).wait();
    assert_eq!(code, Some(1), "{output}");
    for word in ["create pods", "patch configmaps", "manifests/rbac.yaml"] {
        assert!(output.contains(word), "{word}: {output}");
    }
    assert_eq!(namespace.leftovers(), Vec::<String>::new());
}

#[test]
fn an_image_that_is_not_there_ends_the_command_with_its_name() {
    let Some(namespace) = namespace("image") else { return };
    // The master's image is there, the workers' is not.
    let options = ["--num-workers", "1", "--max-worker-restarts", "0", "--image", "localhost/absent:1"];
    let mut command = namespace.elasticdl("train", options);
    command.args(["--job-name", "count", "--training-data", "/data", "--image-pull-policy", "Never"]);
    command.args([
        "--master-image",
        "localhost/elasticdl-tests:dev",
        "--worker-resources",
        "cpu=10m,memory=64Mi",
    ]);
    command.args(["--", "counting"]);
    let (code, output) = Following::start(command).wait();
    assert_eq!(code, Some(1), "{output}");
    assert!(output.contains("localhost/absent:1"), "{output}");
}
