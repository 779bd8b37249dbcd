//! In a real cluster, pods that are deleted, force-deleted or killed inside, masters that are, and
//! a Service that is deleted cost no record; a deleted job leaves nothing; scaling, stopping and
//! deleting are named in events; at rest a job makes at most ten API calls a minute.
//!
//! The model's parameters count records, so the last line of its summary can be compared with the
//! ledger.

use std::collections::BTreeSet;
use std::process::Command;
use std::time::Duration;

use elasticdl_tests::cluster::{
    ApiServer, Job, Namespace, calls, kubectl, must, name, pod_template, text, uid,
};
use elasticdl_tests::{Browser, ChildOutput, Page, send};
use rustix::process::Signal;
use serde_json::Value;

use crate::{ELASTICDL, cluster_tests, namespace};

fn pods_that_are_deleted_and_killed_cost_no_record() {
    let namespace = namespace("fire");
    let options = ["--num-workers", "3", "--num-epochs", "25", "--max-worker-restarts", "0"];
    let job = Job::start(&namespace, "count", &options, 4000);
    let pods = job.wait_for_group(3);
    namespace.delete_pod(name(&pods[0]), &["--wait=false"]);
    let pods = job.wait_for_others(3, &pods[..1]);
    namespace.delete_pod(name(&pods[1]), &["--grace-period=0", "--force", "--wait=false"]);
    let pods = job.wait_for_others(3, &pods[1..2]);
    namespace.kill_inside(&pods[2]);
    let _ = job.wait_for_others(3, &pods[2..]);
    // Names are used once: three pods, and three replacements.
    assert_eq!(job.launches(), [1, 2, 3, 4, 5, 6]);
    job.wait_for_report("WorkerDeleted", "count-w-");
    // No worker failed by itself, so no failure counts.
    job.assert_completes(25);
}

fn the_page_of_a_job_shows_it_scales_it_and_stops_it() {
    let namespace = namespace("page");
    let options = ["--num-workers", "2", "--max-workers", "3", "--num-epochs", "1000"];
    let mut job = Job::start(&namespace, "count", &options, 4000);
    let pods = job.wait_for_group(2);
    let served = ChildOutput::start(namespace.elasticdl("dashboard", ["count"]));
    let page = job.wait_for("a link", || {
        let text = served.text();
        text.lines().find(|line| line.starts_with("http://127.0.0.1:")).map(Page::at)
    });
    let (own, key) = (page.address.as_str(), page.key.as_str());
    let refused = [
        page.ask("GET /api/job", (own, ""), "").0,
        page.ask("POST /api/stop", (own, &"0".repeat(32)), "{}").0,
        page.ask("GET /", ("rebound.example", key), "").0,
        page.post("/api/scale", r#"{"num_workers":4}"#),
    ];
    assert_eq!(refused, [401, 403, 403, 400]);
    namespace.delete_pod(name(&pods[0]), &["--wait=false"]);
    let _ = job.wait_for_others(2, &pods[..1]);
    // The history of a job is in its anchor, from where this command has it.
    job.wait_for("the end of the worker in the history", || {
        let end = page.job()["history"]["workers"]["1"]["end"].clone();
        (end != Value::Null).then(|| assert_eq!(end, "terminated"))
    });
    let seen = page.job();
    assert_eq!(seen["status"]["state"], "running", "{seen}");
    assert!(seen["history"]["goodput"]["value"].as_f64() > Some(0.0), "{seen}");
    let shown = Browser::find().dump(&page.link);
    assert!(shown.contains("data-state=\"running\"") && shown.contains("count"), "{shown}");
    assert!(shown.contains("data-worker=\"1\""), "{shown}");
    assert_eq!(page.post("/api/scale", r#"{"num_workers":3}"#), 200);
    let _ = job.wait_for_group(3);
    assert_eq!(page.post("/api/stop", "{}"), 200);
    let (code, output) = job.wait();
    assert_eq!(code, Some(143), "{output}");
    let (code, text_of_page) = served.wait();
    assert!(code == Some(0) && text_of_page.contains("elasticdl report"), "{text_of_page}");
    let html = tempfile::NamedTempFile::new().unwrap();
    let path = html.path().to_str().unwrap();
    let report = namespace.elasticdl("report", ["count", "--html", path]).output().unwrap();
    assert!(report.status.success(), "{}", text(&report));
    let report = std::fs::read_to_string(path).unwrap();
    assert!(report.contains("\"state\":\"stopped\"") && !report.contains(key), "{report}");
    job.assert_deletes();
}

fn pods_of_two_workers_train_each_record_once_and_end_together() {
    let namespace = namespace("pods");
    let options = [
        "--workers-per-pod",
        "2",
        "--num-workers",
        "4",
        "--worker-resources",
        "cpu=20m,memory=160Mi",
    ];
    let options = [&options[..], &["--num-epochs", "25", "--max-worker-restarts", "0"]].concat();
    let job = Job::start(&namespace, "count", &options, 8000);
    let pods = job.wait_for_pods(4, 2);
    // The ranks of a pod find each other's memory.
    job.wait_for("a sum in shared memory inside hosts", || {
        let transport = job.status().allreduce_transport?;
        transport.contains("shared memory inside hosts").then_some(())
    });
    // The supervisor, and its workers.
    let processes = Namespace::processes_inside(&pods[0], "counting");
    assert_eq!(processes.len(), 3, "{processes:?}");
    send(processes[2], Signal::KILL);
    job.wait_until_gone(&pods[..1]);
    let pods = job.wait_for_pods(4, 2);
    namespace.delete_pod(name(&pods[0]), &["--grace-period=0", "--force", "--wait=false"]);
    job.wait_until_gone(&pods[..1]);
    let pods = job.wait_for_pods(4, 2);
    assert_eq!(job.launches(), [1, 3, 5, 7]);
    // The next master finds the workers of both pods from the pods.
    let before = namespace.incarnation("count");
    let master = job.wait_for("a master", || namespace.leader("count"));
    send(Namespace::process_inside(&master, "elasticdl").unwrap(), Signal::KILL);
    job.wait_for("another master", || (namespace.incarnation("count") > before).then_some(()));
    let after = job.wait_for_pods(4, 2);
    let uids = |pods: &[Value]| pods.iter().map(|pod| uid(pod).to_owned()).collect::<BTreeSet<_>>();
    assert_eq!(uids(&after), uids(&pods));
    // Worker 8 prints into its pod's log, which is named after worker 7.
    let log = namespace.elasticdl("logs", ["count", "--worker", "8"]).output().unwrap();
    assert!(text(&log).contains("worker=8") && text(&log).contains("worker=7"), "{}", text(&log));
    let half = namespace.elasticdl("scale", ["count", "--num-workers", "3"]).output().unwrap();
    assert_eq!(half.status.code(), Some(2), "{}", text(&half));
    assert!(text(&half).contains("a multiple of 2, not 3: 2 or 4"), "{}", text(&half));
    let scaled = namespace.elasticdl("scale", ["count", "--num-workers", "2"]).output().unwrap();
    assert!(scaled.status.success(), "{}", text(&scaled));
    let _ = job.wait_for_pods(2, 1);
    namespace.delete_pod(name(&pods[0]), &["--wait=false", "--ignore-not-found"]);
    // No worker failed by itself, so no failure counts.
    job.assert_completes(25);
}

fn masters_that_are_deleted_and_killed_leave_their_workers_training() {
    let namespace = namespace("masters");
    let options = ["--num-workers", "3", "--num-epochs", "45", "--max-worker-restarts", "0"];
    let job = Job::start(&namespace, "count", &options, 4000);
    let uids = |pods: &[Value]| pods.iter().map(|pod| uid(pod).to_owned()).collect::<BTreeSet<_>>();
    let workers = uids(&job.wait_for_group(3));
    let end = |how: &str, pod: &Value| match how {
        "deleted" => namespace.delete_pod(name(pod), &["--wait=false"]),
        "force-deleted" => {
            namespace.delete_pod(name(pod), &["--grace-period=0", "--force", "--wait=false"])
        }
        _ => send(Namespace::process_inside(pod, "elasticdl").unwrap(), Signal::KILL),
    };
    // The next masters could not start without it.
    must(kubectl().args(["--namespace", namespace.name(), "delete", "service", "count-master"]));
    job.wait_for_report("ServiceRestored", "count-master");
    for how in ["deleted", "killed", "force-deleted"] {
        let (last, before) = (namespace.incarnation("count"), job.status());
        // Not the next master, which waits beside it.
        let old = job.wait_for("a master", || namespace.leader("count"));
        end(how, &old);
        job.wait_for(&format!("a master after one that was {how}"), || {
            let new = namespace.leader("count").filter(|new| uid(new) != uid(&old));
            new.filter(|_| namespace.incarnation("count") > last)
        });
        assert_eq!(uids(&job.wait_for_group(3)), workers, "{how}: workers were restarted");
        let status = job.status();
        assert!(status.step > before.step, "{how}: training began anew: {status:?}");
        assert!(status.generation <= before.generation.next(), "{how}: {:?}", status.memberships);
    }
    job.assert_completes(45);
}

fn a_job_that_is_deleted_midway_leaves_nothing() {
    let namespace = namespace("delete");
    let mut job =
        Job::start(&namespace, "count", &["--num-workers", "2", "--num-epochs", "1000"], 1000);
    let _ = job.wait_for_group(2);
    let deleted = namespace.elasticdl("delete", ["count"]).output().unwrap();
    assert!(deleted.status.success(), "{}", text(&deleted));
    assert_eq!(namespace.leftovers(), Vec::<String>::new());
    let (code, output) = job.wait();
    assert_eq!(code, Some(1), "{output}");
    assert!(output.contains("has been deleted"), "{output}");
    let again = namespace.elasticdl("delete", ["count"]).output().unwrap();
    assert_eq!(again.status.code(), Some(2), "{}", text(&again));
}

fn a_job_is_scaled_detached_and_stopped_from_outside() {
    let namespace = namespace("scale");
    let mut job =
        Job::start(&namespace, "count", &["--num-workers", "1", "--num-epochs", "1000"], 1000);
    let _ = job.wait_for_group(1);
    let (code, output) = Job::start(&namespace, "count", &["--num-workers", "1"], 0).wait();
    assert_eq!(code, Some(2), "{output}");
    assert!(output.contains("already") && output.contains("elasticdl delete count"), "{output}");
    // The command that follows the job ends; the job stays.
    send(job.child().pid(), Signal::INT);
    let (code, output) = job.wait();
    assert_eq!(code, Some(130), "{output}");
    assert!(output.contains("The job continues"), "{output}");
    let scaled = namespace.elasticdl("scale", ["count", "--num-workers", "3"]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&scaled.stdout), "workers: 1 -> 3\n", "{}", text(&scaled));
    let _ = job.wait_for_group(3);
    let too_many =
        namespace.elasticdl("scale", ["count", "--num-workers", "300"]).output().unwrap();
    assert_eq!(too_many.status.code(), Some(2), "{}", text(&too_many));
    let scaled = namespace.elasticdl("scale", ["count", "--num-workers", "1"]).output().unwrap();
    assert!(scaled.status.success(), "{}", text(&scaled));
    let _ = job.wait_for_group(1);
    let status = namespace.elasticdl("status", ["count"]).output().unwrap();
    assert!(text(&status).contains("state        running"), "{}", text(&status));
    let list = namespace.elasticdl("list", [""; 0]).output().unwrap();
    assert!(text(&list).contains("count") && text(&list).contains("running"), "{}", text(&list));
    let stopped = namespace.elasticdl("stop", ["count"]).output().unwrap();
    assert!(stopped.status.success(), "{}", text(&stopped));
    let summary = job.wait_for("its summary", || namespace.summary("count"));
    assert_eq!(summary.state, "stopped");
    job.assert_deletes();
}

fn a_namespace_without_rights_is_refused_before_any_object_is_created() {
    let namespace = Namespace::new("rights", ELASTICDL);
    let (code, output) = Job::start(&namespace, "count", &["--num-workers", "1"], 0).wait();
    assert_eq!(code, Some(1), "{output}");
    for word in ["service account elasticdl", "manifests/rbac.yaml", namespace.name()] {
        assert!(output.contains(word), "{word}: {output}");
    }
    let advice =
        output.split("manifests/rbac.yaml: ").nth(1).unwrap().lines().next().unwrap().to_owned();
    // An account without a role.
    namespace.apply("apiVersion: v1\nkind: ServiceAccount\nmetadata: {name: elasticdl}\n");
    let (code, output) = Job::start(&namespace, "count", &["--num-workers", "1"], 0).wait();
    assert_eq!(code, Some(1), "{output}");
    for word in ["create pods", "patch configmaps", "manifests/rbac.yaml"] {
        assert!(output.contains(word), "{word}: {output}");
    }
    assert_eq!(namespace.leftovers(), Vec::<String>::new());
    // The remedy in the message is sufficient.
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    must(Command::new("sh").args(["-c", &advice]).current_dir(root));
    Job::start(&namespace, "count", &["--num-workers", "1"], 0).assert_completes(1);
}

fn a_missing_image_ends_the_command_with_its_name() {
    let namespace = namespace("image");
    // The master's image exists, the workers' does not: the last --image counts.
    let image = namespace.image().to_owned();
    let options = ["--num-workers", "1", "--max-worker-restarts", "0", "--master-image", &image];
    let local = pod_template("containers: [{name: worker, imagePullPolicy: Never}]");
    let local = local.path().display().to_string();
    let absent = ["--image", "localhost/absent:1", "--worker-pod-template", &local];
    let mut job = Job::start(&namespace, "count", &[&options[..], &absent].concat(), 0);
    let (code, output) = job.wait();
    assert_eq!(code, Some(1), "{output}");
    assert!(output.contains("localhost/absent:1"), "{output}");
    job.wait_for_report("ImagePullFailed", "localhost/absent:1");
    job.assert_deletes();
}

fn a_job_at_rest_makes_few_api_calls() {
    let namespace = namespace("rest");
    let log = ApiServer::new().audit();
    // An epoch takes longer than the test, so that the end of an epoch is not reported meanwhile.
    let job = Job::start(&namespace, "count", &["--num-workers", "4", "--num-epochs", "4"], 60_000);
    let _ = job.wait_for_group(4);
    // Right after the first step there may still be changes to report.
    std::thread::sleep(Duration::from_secs(10));
    let count =
        || calls(&log).into_iter().filter(|call| call.home == namespace.name()).collect::<Vec<_>>();
    let before = count().len();
    std::thread::sleep(Duration::from_secs(60));
    let asked = count().split_off(before);
    assert!(
        !asked.is_empty() && asked.len() <= 10,
        "{} calls in a minute: {asked:#?}",
        asked.len()
    );
    let master = job.wait_for("its master", || namespace.leader("count"));
    let pid = Namespace::process_inside(&master, "elasticdl").unwrap();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    let kib: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
    println!("{} calls in a minute; at most {kib} KiB of memory", asked.len());
    // Of a build that is not optimized.
    assert!(kib <= 60 << 10, "{kib} KiB");
    job.assert_completes(4);
}

cluster_tests![
    a_job_at_rest_makes_few_api_calls,
    pods_that_are_deleted_and_killed_cost_no_record,
    the_page_of_a_job_shows_it_scales_it_and_stops_it,
    pods_of_two_workers_train_each_record_once_and_end_together,
    masters_that_are_deleted_and_killed_leave_their_workers_training,
    a_job_that_is_deleted_midway_leaves_nothing,
    a_job_is_scaled_detached_and_stopped_from_outside,
    a_namespace_without_rights_is_refused_before_any_object_is_created,
    a_missing_image_ends_the_command_with_its_name,
];
