//! Jobs in a real cluster live with its limits: memory, disk, quotas, configuration, capacity,
//! neighbours.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use elasticdl_proto::Status;
use elasticdl_tests::assert_exactly_once;
use elasticdl_tests::cluster::{Job, Namespace, pod_template, text, uid};
use rand::rngs::ChaCha8Rng;
use rand::{RngExt as _, SeedableRng as _};

use crate::{cluster_tests, namespace};

/// The events that `elasticdl status --json` prints; none while it prints no status.
fn events(namespace: &Namespace, job: &str) -> String {
    let output = namespace.elasticdl("status", [job, "--json"]).output().unwrap();
    let status: Status = serde_json::from_slice(&output.stdout).unwrap_or_default();
    status.events.join("\n")
}

fn two_jobs_train_side_by_side() {
    let namespace = namespace("two");
    let options = ["--num-workers", "2", "--num-epochs", "15"];
    let jobs = ["left", "right"].map(|name| Job::start(&namespace, name, &options, 3000));
    let [left, right] = jobs;
    let pods = left.wait_for_group(2);
    let _ = right.wait_for_group(2);
    // A fault of one job does not affect the other.
    let generation = |job: &Job<'_>| job.status().generation;
    let before = generation(&right);
    namespace.kill_inside(&pods[0]);
    let _ = left.wait_for_others(2, &pods[..1]);
    left.assert_completes(15);
    assert_eq!(generation(&right), before);
    right.assert_completes(15);
    assert_eq!(namespace.leftovers(), Vec::<String>::new());
}

fn a_quota_holds_a_job_at_the_size_that_fits_until_it_is_raised() {
    let namespace = namespace("quota");
    let quota = |pods: u32| {
        let kind = "apiVersion: v1\nkind: ResourceQuota\nmetadata: {name: small}\n";
        namespace.apply(&format!("{kind}spec: {{hard: {{pods: {pods}}}}}\n"));
    };
    // The master and two workers.
    quota(3);
    let job = Job::start(&namespace, "count", &["--num-workers", "4", "--num-epochs", "20"], 4000);
    let few = job.wait_for_group(2);
    job.wait_for("the status shows the quota", || {
        events(&namespace, "count").contains("exceeded quota").then_some(())
    });
    job.wait_for_report("QuotaExceeded", "exceeded quota");
    quota(5);
    let many = job.wait_for_group(4);
    assert!(
        few.iter().all(|pod| many.iter().any(|other| uid(other) == uid(pod))),
        "a worker was restarted"
    );
    job.assert_completes(20);
}

fn workers_over_their_memory_limit_end_the_job_with_the_option_that_helps() {
    let namespace = namespace("memory");
    let options = ["--num-workers", "1", "--max-worker-restarts", "1"];
    // 200 MB of parameters in 64 MiB.
    let mut job = Job::start_program(&namespace, "count", &options, &["--parameters", "50000000"]);
    let (code, output) = job.wait();
    assert_eq!(code, Some(1), "{output}");
    for words in ["more memory than its limit", "--worker-resources"] {
        assert!(output.contains(words), "{words}: {output}");
        assert!(
            events(&namespace, "count").contains(words),
            "{words}: {}",
            events(&namespace, "count")
        );
    }
    job.wait_for_report("WorkerOOMKilled", "memory");
    job.assert_deletes();
}

fn a_worker_that_the_kubelet_evicts_for_its_disk_is_replaced_and_counted() {
    let namespace = namespace("evicted");
    let small = pod_template("volumes: [{name: tmp, emptyDir: {sizeLimit: 1Mi}}]");
    let file = small.path().display().to_string();
    let options = [
        "--num-workers",
        "2",
        "--num-epochs",
        "15",
        "--max-worker-restarts",
        "1",
        "--worker-pod-template",
        &file,
    ];
    let job = Job::start(&namespace, "count", &options, 3000);
    let pods = job.wait_for_group(2);
    // The node's folders are on this machine.
    let kubeconfig = std::env::var("KUBECONFIG").unwrap();
    let volumes = Path::new(&kubeconfig).with_file_name("kubelet").join("pods").join(uid(&pods[0]));
    fs::write(volumes.join("volumes/kubernetes.io~empty-dir/tmp/big"), vec![1; 4 << 20]).unwrap();
    let _ = job.wait_for_others(2, &pods[..1]);
    let events = events(&namespace, "count");
    // The pods of newer servers (1.36) do not tell why a worker got its SIGTERM.
    if !events.contains("has left after a SIGTERM of unknown origin") {
        assert!(
            events.contains("Evicted") && events.contains("failure 1 of at most 1"),
            "{events}"
        );
        job.wait_for_report("WorkerOverLimit", "Evicted");
    }
    job.assert_completes(15);
}

fn a_missing_secret_is_named_and_ends_the_job() {
    let namespace = namespace("config");
    let environment = "env: [{name: KEY, valueFrom: {secretKeyRef: {name: absent, key: k}}}]";
    let file = pod_template(&format!("containers: [{{name: worker, {environment}}}]"));
    let path = file.path().display().to_string();
    let options =
        ["--num-workers", "1", "--max-worker-restarts", "0", "--worker-pod-template", &path];
    let mut job = Job::start(&namespace, "count", &options, 0);
    job.wait_for_event(&["CreateContainerConfigError", "secret \"absent\" not found"]);
    let (code, output) = job.wait();
    assert_eq!(code, Some(1), "{output}");
    assert!(output.contains("secret \"absent\" not found"), "{output}");
    job.wait_for_report("ConfigError", "secret \"absent\" not found");
    job.assert_deletes();
}

fn unschedulable_workers_wait_and_the_status_shows_why() {
    let namespace = namespace("nowhere");
    let options = ["--num-workers", "2", "--worker-resources", "cpu=1000,memory=64Mi"];
    let mut job = Job::start(&namespace, "count", &options, 0);
    job.wait_for_event(&["Unschedulable", "Insufficient cpu"]);
    assert!(
        events(&namespace, "count").contains("Insufficient cpu"),
        "{}",
        events(&namespace, "count")
    );
    job.wait_for_report("Unschedulable", "Insufficient cpu");
    let stopped = namespace.elasticdl("stop", ["count"]).output().unwrap();
    assert!(stopped.status.success());
    let (code, output) = job.wait();
    assert_eq!(code, Some(143), "{output}");
    job.assert_deletes();
}

fn fifteen_thousand_files_with_long_paths_are_no_limit() {
    const FILES: u64 = 15_000;
    let namespace = namespace("files");
    let data = tempfile::tempdir().unwrap();
    fs::set_permissions(data.path(), fs::Permissions::from_mode(0o755)).unwrap();
    // Names that do not compress: the list exceeds what the anchor holds and is stored in
    // ConfigMaps of its own.
    let mut rng = ChaCha8Rng::seed_from_u64(14);
    for i in 0..FILES {
        let name =
            format!("part-{:032x}{:032x}{i:021}", rng.random::<u128>(), rng.random::<u128>());
        fs::write(data.path().join(name), i.to_le_bytes()).unwrap();
    }
    let volume = format!("host_path={},mount_path=/data,read_only=true", data.path().display());
    let options = [
        "--num-workers",
        "2",
        "--num-epochs",
        "1",
        "--global-batch-size",
        "500",
        "--volume",
        &volume,
    ];
    let output =
        namespace.train("count", &options, &["--records", &FILES.to_string()]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert_exactly_once(&namespace.summary("count").unwrap(), &text(&output), FILES, 1);
    assert!(text(&output).contains("15000 records in 15000 files"), "{}", text(&output));
    let lists = namespace.get("configmaps", "elasticdl/job=count,elasticdl/role=files");
    assert!(!lists.is_empty(), "the list of the files is in no object of its own");
    assert!(namespace.elasticdl("delete", ["count"]).output().unwrap().status.success());
    assert_eq!(namespace.leftovers(), Vec::<String>::new());
}

cluster_tests![
    two_jobs_train_side_by_side,
    a_quota_holds_a_job_at_the_size_that_fits_until_it_is_raised,
    workers_over_their_memory_limit_end_the_job_with_the_option_that_helps,
    a_worker_that_the_kubelet_evicts_for_its_disk_is_replaced_and_counted,
    a_missing_secret_is_named_and_ends_the_job,
    unschedulable_workers_wait_and_the_status_shows_why,
    fifteen_thousand_files_with_long_paths_are_no_limit,
];
