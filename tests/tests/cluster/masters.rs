//! Masters in a real cluster that are cut off, stopped, evicted and lost are followed by another
//! one while their workers train, with default options.

use std::collections::BTreeSet;
use std::process::Command;
use std::time::{Duration, Instant};

use elasticdl_proto::Generation;
use elasticdl_tests::cluster::{Job, Namespace, kubectl, must, name, pod_template, text, uid};
use elasticdl_tests::send;
use rustix::process::Signal;
use serde_json::Value;

use crate::{cluster_tests, namespace};

fn uids(pods: &[Value]) -> BTreeSet<String> {
    pods.iter().map(|pod| uid(pod).to_owned()).collect()
}

/// Process id of the master in a pod.
fn process_of(master: &Value) -> u32 {
    Namespace::process_inside(master, "elasticdl").unwrap()
}

/// The job's group, for a comparison: its pods and its generation.
fn group(job: &Job<'_>) -> (BTreeSet<String>, Generation) {
    let pods = job.wait_for_group(3);
    (uids(&pods), job.status().generation)
}

fn a_master_that_is_cut_off_reset_or_stopped_costs_no_worker() {
    let namespace = namespace("cut");
    let options = ["--num-workers", "3", "--num-epochs", "60", "--max-worker-restarts", "0"];
    let job = Job::start(&namespace, "count", &options, 4000);
    let before = group(&job);
    let pid = process_of(&job.wait_for("a master", || namespace.leader("count")));
    let iptables = |verb: &str, rule: &str| {
        let words =
            ["nsenter", "--net", "--target", &pid.to_string(), "iptables", verb].map(String::from);
        let words: Vec<String> =
            words.into_iter().chain(rule.split(' ').map(String::from)).collect();
        must(Command::new(&words[0]).args(&words[1..]));
    };
    let drops = "INPUT -p tcp --dport 7070 -j DROP";
    let resets = "INPUT -p tcp --dport 7070 -j REJECT --reject-with tcp-reset";
    for (rule, millis) in [(drops, 1000), (drops, 2000), (drops, 10_000), (resets, 300)] {
        iptables("-I", rule);
        std::thread::sleep(Duration::from_millis(millis));
        iptables("-D", rule);
        assert_eq!(group(&job), before, "{rule} for {millis} ms: {:?}", job.status().memberships);
    }
    send(pid, Signal::STOP);
    std::thread::sleep(Duration::from_secs(40));
    send(pid, Signal::CONT);
    assert_eq!(group(&job), before, "stopped: {:?}", job.status().memberships);
    job.assert_completes(60);
}

fn masters_that_are_deleted_and_drained_repeatedly_are_replaced_within_seconds() {
    let namespace = namespace("follow");
    let options = ["--num-workers", "2", "--num-epochs", "60", "--max-worker-restarts", "0"];
    let job = Job::start(&namespace, "count", &options, 4000);
    let workers = uids(&job.wait_for_group(2));
    for round in 0..6 {
        let old = job.wait_for("a master", || namespace.leader("count"));
        let since = Instant::now();
        match round % 2 {
            0 => namespace.delete_pod(name(&old), &["--wait=false"]),
            _ => namespace.evict(name(&old)),
        }
        job.wait_for("another master", || {
            namespace.leader("count").filter(|new| uid(new) != uid(&old))
        });
        let took = since.elapsed();
        println!("round {round}: another master leads after {took:?}");
        // Ten seconds, and the time that a busy machine takes for a pod.
        assert!(took < Duration::from_secs(20), "round {round}: {took:?}");
        assert_eq!(uids(&job.wait_for_group(2)), workers, "round {round}: workers were restarted");
    }
    job.assert_completes(60);
}

fn a_master_that_is_killed_repeatedly_is_followed_by_its_standby() {
    let namespace = namespace("standby");
    let options = ["--num-workers", "2", "--num-epochs", "60", "--max-worker-restarts", "0"];
    let job = Job::start(&namespace, "count", &options, 4000);
    let workers = uids(&job.wait_for_group(2));
    // The first one is replaced by the Job.
    let first = job.wait_for("a master", || namespace.leader("count"));
    send(process_of(&first), Signal::KILL);
    let mut leader = job.wait_for("another master", || {
        namespace.leader("count").filter(|new| uid(new) != uid(&first))
    });
    for round in 1..4 {
        // The Job may have created a master too, which waits as the standby does.
        let waiting = job.wait_for("a standby", || {
            let mut masters = namespace.get("pods", "elasticdl/job=count,elasticdl/role=master");
            masters.retain(|pod| pod["status"]["phase"] == "Running" && uid(pod) != uid(&leader));
            (!masters.is_empty()).then(|| uids(&masters))
        });
        let since = Instant::now();
        send(process_of(&leader), Signal::KILL);
        let next = job.wait_for("the next master", || {
            namespace.leader("count").filter(|new| uid(new) != uid(&leader))
        });
        println!("round {round}: another master leads after {:?}", since.elapsed());
        // One that the Job has created at once may be faster than the standby, which then waits on.
        let masters = namespace.get("pods", "elasticdl/job=count,elasticdl/role=master");
        let is_there = |pod: &Value| pod["status"]["phase"] == "Running";
        let there =
            masters.iter().filter(|pod| is_there(pod)).any(|pod| waiting.contains(uid(pod)));
        assert!(there, "round {round}: the standby {waiting:?} is gone: {masters:?}");
        assert_eq!(uids(&job.wait_for_group(2)), workers, "round {round}: workers were restarted");
        leader = next;
    }
    job.assert_completes(60);
}

fn a_failed_job_starts_no_more_masters_and_its_logs_are_those_of_its_failure() {
    let namespace = namespace("failed");
    let options = ["--num-workers", "1", "--max-worker-restarts", "0"];
    let mut job = Job::start_program(&namespace, "count", &options, &["--fail-at", "1000"]);
    let (code, output) = job.wait();
    assert_eq!(code, Some(1), "{output}");
    let name = ["--namespace", namespace.name(), "wait", "--for=condition=failed", "--timeout=60s"];
    must(kubectl().args(name).arg("job/count-master"));
    let masters = namespace.get("pods", "elasticdl/job=count,elasticdl/role=master");
    assert_eq!(masters.len(), 1, "{masters:?}");
    let log = namespace.master_log("count");
    assert!(log.contains("worker pod created") && log.contains("the job failed"), "{log}");
    job.assert_deletes();
}

fn a_job_whose_masters_have_all_failed_is_reported_as_failed() {
    let namespace = namespace("used");
    let options = ["--num-workers", "2", "--num-epochs", "1000"];
    let mut job = Job::start(&namespace, "count", &options, 4000);
    let _ = job.wait_for_group(2);
    let patch = r#"{"spec": {"backoffLimit": 0}}"#;
    let words = [
        "--namespace",
        namespace.name(),
        "patch",
        "job",
        "count-master",
        "--type",
        "merge",
        "-p",
        patch,
    ];
    must(kubectl().args(words));
    let master = job.wait_for("a master", || namespace.leader("count"));
    send(process_of(&master), Signal::KILL);
    let (code, output) = job.wait();
    assert_eq!(code, Some(1), "{output}");
    assert!(output.contains("BackoffLimitExceeded"), "{output}");
    let list = namespace.elasticdl("list", [""; 0]).output().unwrap();
    assert!(text(&list).contains("failed (no master)"), "{}", text(&list));
    let status = namespace.elasticdl("status", ["count"]).output().unwrap();
    assert!(text(&status).contains("state        failed"), "{}", text(&status));
    assert!(text(&status).contains("BackoffLimitExceeded"), "{}", text(&status));
    for (command, args) in [("stop", &["count"][..]), ("scale", &["count", "--num-workers", "1"])] {
        let refused = namespace.elasticdl(command, args).output().unwrap();
        assert_eq!(refused.status.code(), Some(1), "{command}: {}", text(&refused));
        assert!(text(&refused).contains("no other master comes"), "{command}: {}", text(&refused));
    }
    // Its Job alone is left then.
    must(kubectl().args(["--namespace", namespace.name(), "delete", "configmap", "count"]));
    let list = namespace.elasticdl("list", [""; 0]).output().unwrap();
    assert!(text(&list).contains("failed (no master)"), "{}", text(&list));
    let status = namespace.elasticdl("status", ["count"]).output().unwrap();
    assert!(text(&status).contains("no other master comes"), "{}", text(&status));
    job.wait_for("the end of its pods", || {
        namespace.get("pods", "elasticdl/job=count,elasticdl/role=worker").is_empty().then_some(())
    });
    job.assert_deletes();
}

fn a_master_that_cannot_be_created_is_reported_by_all_commands() {
    let namespace = namespace("unmade");
    namespace.set_pod_quota(0);
    let job = Job::start(&namespace, "count", &["--num-workers", "1"], 0);
    let reason = "exceeded quota: pods";
    let look =
        |command: &str, args: &[&str]| text(&namespace.elasticdl(command, args).output().unwrap());
    job.wait_for("the list shows why", || look("list", &[]).contains(reason).then_some(()));
    assert!(look("status", &["count"]).contains(reason), "{}", look("status", &["count"]));
    job.wait_for("the command that follows the job says why", || {
        let output = job.child().text();
        let pending = output.contains("the master is pending: FailedCreate");
        (pending && output.contains(reason)).then_some(())
    });
    namespace.set_pod_quota(5);
    job.assert_completes(1);
}

fn the_job_waits_for_a_replacement_whose_image_is_missing() {
    let namespace = namespace("image-away");
    let image = format!("localhost/elasticdl-away:{}", std::process::id());
    let runtime = std::env::var("CONTAINERD_ADDRESS");
    let runtime = runtime.unwrap_or_else(|_| "/run/k8s-dev/containerd.sock".into());
    let ctr = ["--address", &runtime, "--namespace", "k8s.io", "images"];
    let ctr = |args: &[&str]| drop(must(Command::new("ctr").args(ctr).args(args)));
    ctr(&["tag", namespace.image(), &image]);
    let options = ["--num-workers", "2", "--num-epochs", "60", "--max-worker-restarts", "0"];
    let local = pod_template("containers: [{name: worker, imagePullPolicy: Never}]");
    let local = local.path().display().to_string();
    let images = ["--image", &image, "--worker-pod-template", &local];
    let job = Job::start(&namespace, "count", &[&options[..], &images].concat(), 4000);
    let pods = job.wait_for_group(2);
    ctr(&["rm", &image]);
    namespace.delete_pod(name(&pods[0]), &["--wait=false"]);
    job.wait_for_event(&["ErrImage"]);
    // Longer than a pod that can't start is tolerated before any worker has run.
    std::thread::sleep(Duration::from_secs(30));
    let status = job.status();
    assert_eq!(status.state, "running", "{status:?}");
    ctr(&["tag", namespace.image(), &image]);
    let _ = job.wait_for_group(2);
    ctr(&["rm", &image]);
    job.assert_completes(60);
}

cluster_tests![
    a_master_that_is_cut_off_reset_or_stopped_costs_no_worker,
    masters_that_are_deleted_and_drained_repeatedly_are_replaced_within_seconds,
    a_master_that_is_killed_repeatedly_is_followed_by_its_standby,
    a_failed_job_starts_no_more_masters_and_its_logs_are_those_of_its_failure,
    a_job_whose_masters_have_all_failed_is_reported_as_failed,
    a_master_that_cannot_be_created_is_reported_by_all_commands,
    the_job_waits_for_a_replacement_whose_image_is_missing,
];
