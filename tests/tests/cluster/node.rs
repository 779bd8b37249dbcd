//! Jobs survive an API server that is unavailable for 30 s, a lost and a drained node, preemption,
//! and 29 workers lost at once; two jobs share a node evenly.
//!
//! These disturb everything else in the cluster, so only one of them runs at a time.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use elasticdl_tests::cluster::{
    ApiServer, Job, Namespace, Node, PriorityClass, RECORDS, SecondNode, kubectl, must, name,
    pod_template, uid,
};
use elasticdl_tests::{ChildOutput, assert_exactly_once, counting_data};
use serde_json::Value;

use crate::{ELASTICDL, cluster_tests};

static NODE: Mutex<()> = Mutex::new(());

/// A namespace, and exclusive use of the cluster for as long as the guard lives.
fn namespace(test: &str) -> (Namespace, MutexGuard<'static, ()>) {
    let guard = NODE.lock().unwrap_or_else(PoisonError::into_inner);
    let namespace = crate::namespace(test);
    (namespace, guard)
}

fn uids(pods: &[Value]) -> Vec<&str> {
    let mut uids: Vec<&str> = pods.iter().map(uid).collect();
    uids.sort_unstable();
    uids
}

fn training_continues_while_the_api_server_is_unavailable() {
    let (namespace, _guard) = namespace("away");
    let server = ApiServer::new();
    let job = Job::start(&namespace, "count", &["--num-workers", "3", "--num-epochs", "25"], 4000);
    let pods = job.wait_for_group(3);
    let (before, since) = (job.status(), Instant::now());
    let stopped = server.stop(UNAVAILABLE + Duration::from_secs(10));
    std::thread::sleep(UNAVAILABLE);
    drop(stopped);
    // Then its connections break too.
    server.restart();
    let pods_after = job.wait_for_group(3);
    // Three workers, 64 records a step, 4 ms a record: a worker that holds a third of them is done
    // after 85 ms. If the group had not trained in those 30 s, it would have made no more than this
    // number of steps.
    let steps_beside = (since.elapsed() - UNAVAILABLE).as_millis() as u64 / 85;
    let steps = job.step() - before.step;
    assert!(
        steps > steps_beside + 100,
        "{steps} steps, of which {steps_beside} may be from before or after"
    );
    assert_eq!(uids(&pods_after), uids(&pods), "a worker was replaced");
    let after = job.status();
    assert_eq!(after.generation, before.generation, "{:?}", after.memberships);
    assert_eq!(namespace.workers("count").len(), 3, "a worker was created twice");
    assert_eq!(job.launches(), [1, 2, 3]);
    job.assert_completes(25);
}

fn drained_workers_come_back_with_the_node() {
    let (namespace, _guard) = namespace("drained");
    let node = Node::only();
    let options = ["--num-workers", "3", "--num-epochs", "25", "--max-worker-restarts", "0"];
    let job = Job::start(&namespace, "count", &options, 4000);
    let pods = job.wait_for_group(3);
    let step = job.step();
    // On one node, all workers would be drained, and their state would be lost: so one stays.
    let label = format!("drained={}", namespace.name());
    for pod in &pods[..2] {
        must(kubectl().args(["--namespace", namespace.name(), "label", "pod", name(pod), &label]));
    }
    let cordoned = node.drain(&label);
    let rest = job.wait_for("one worker trains on", || {
        let status = job.status();
        let pods = namespace.running_workers("count");
        (status.members().count() == 1 && status.step > step).then_some(pods)
    });
    assert_eq!(uids(&rest), [uid(&pods[2])]);
    job.wait_for_event(&["Unschedulable", "unschedulable"]);
    drop(cordoned);
    let pods = job.wait_for_group(3);
    assert!(
        pods.iter().any(|pod| uid(pod) == uid(&rest[0])),
        "the worker that stayed was restarted"
    );
    assert!(job.step() > step, "training began anew");
    job.assert_completes(25);
}

fn a_master_whose_node_is_lost_is_replaced_while_its_workers_train() {
    let (namespace, _guard) = namespace("lost-node");
    let first = Node::only();
    let second = SecondNode::add();
    // The master goes to the second node, and its workers to the first one.
    let cordoned = first.cordon();
    let options = ["--num-workers", "3", "--num-epochs", "60", "--max-worker-restarts", "0"];
    let job = Job::start(&namespace, "count", &options, 4000);
    job.wait_for("the master's pod is on the second node", || {
        let masters = namespace.get("pods", "elasticdl/job=count,elasticdl/role=master");
        masters.iter().any(|pod| pod["spec"]["nodeName"] == "node-1").then_some(())
    });
    let second_cordoned = second.node().cordon();
    drop(cordoned);
    let workers = job.wait_for_group(3);
    let old = job.wait_for("a master", || namespace.leader("count"));
    assert!(workers.iter().all(|pod| pod["spec"]["nodeName"] != "node-1"), "{workers:?}");
    let before = job.status();
    let since = Instant::now();
    second.lose();
    let new = job.wait_for("another master", || {
        namespace.leader("count").filter(|new| uid(new) != uid(&old))
    });
    println!("a master leads {:?} after the node of the one before was lost", since.elapsed());
    assert_ne!(new["spec"]["nodeName"], "node-1");
    let after = job.wait_for_group(3);
    assert_eq!(uids(&after), uids(&workers), "workers were restarted");
    let status = job.status();
    assert!(status.step > before.step, "training began anew: {status:?}");
    assert_eq!(status.generation, before.generation, "{:?}", status.memberships);
    // A pod on a lost node is not gone until the node is.
    drop(second_cordoned);
    drop(second);
    namespace.delete_pod(name(&old), &["--grace-period=0", "--force", "--ignore-not-found"]);
    job.assert_completes(60);
}

fn preempted_workers_come_back_when_the_service_is_deleted() {
    let (namespace, _guard) = namespace("preempted");
    // Below all other classes, so that no pods but these workers are preempted.
    let [low, high] = [("low", -20), ("high", -10)]
        .map(|(name, value)| PriorityClass::new(format!("{}-{name}", namespace.name()), value));
    // Four workers and the master fill the node.
    let cpu = (Node::only().free_cpu_millis() - 30) / 4;
    let resources = format!("cpu={cpu}m,memory=64Mi");
    let options = ["--num-workers", "4", "--num-epochs", "25", "--max-worker-restarts", "0"];
    let class = pod_template(&format!("priorityClassName: {}", low.name()));
    let class = class.path().display().to_string();
    let placed = ["--worker-resources", &resources, "--worker-pod-template", &class];
    let job = Job::start(&namespace, "count", &[&options[..], &placed].concat(), 4000);
    let pods = job.wait_for_group(4);
    namespace.apply(&service(high.name(), 2, cpu));
    let rest = job.wait_for_group(2);
    assert!(
        uids(&rest).iter().all(|uid| uids(&pods).contains(uid)),
        "a worker that was not in the way was restarted"
    );
    job.wait_for_report("WorkerPreempted", "reempt");
    let step = job.step();
    must(kubectl().args(["--namespace", namespace.name(), "delete", "deployment", "service"]));
    let pods = job.wait_for_group(4);
    assert!(
        uids(&rest).iter().all(|uid| uids(&pods).contains(uid)),
        "a worker that was not in the way was restarted"
    );
    assert!(job.step() > step, "training began anew");
    job.assert_completes(25);
}

fn two_jobs_share_the_node_evenly_and_a_service_preempts_all_tiers_but_the_core() {
    let (namespace, _guard) = namespace("fair");
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    must(kubectl().args(["apply", "-f", "manifests/priorityclasses.yaml"]).current_dir(root));
    // Eight workers and two masters fill the node.
    let cpu = (Node::only().free_cpu_millis() - 40) / 8;
    let resources = format!("cpu={cpu}m,memory=64Mi");
    let options = ["--num-workers", "8", "--num-epochs", "30", "--max-worker-restarts", "0"];
    let options = [&options[..], &["--worker-resources", &resources]].concat();
    let first = Job::start(&namespace, "first", &options, 4000);
    let alone = first.wait_for_group(8);
    let second = Job::start(&namespace, "second", &options, 4000);
    // The core, and the tiers up to the fourth worker: four workers each.
    let [ours, theirs] = [&first, &second].map(|job| job.wait_for_group(4));
    assert!(
        uids(&ours).iter().all(|uid| uids(&alone).contains(uid)),
        "a worker that was not in the way was restarted"
    );
    let core = |pods: &[Value]| {
        let class = |pod: &&Value| pod["spec"]["priorityClassName"] == "elasticdl-core";
        pods.iter().filter(class).map(|pod| uid(pod).to_owned()).collect::<Vec<_>>()
    };
    let cores = [core(&ours), core(&theirs)];
    assert_eq!(cores.each_ref().map(Vec::len), [1, 1]);
    // A service, which has no priority class, needs everything but the core.
    namespace.apply(&service("", 6, cpu));
    for (job, core) in [&first, &second].into_iter().zip(&cores) {
        assert_eq!(uids(&job.wait_for_group(1)), *core, "a service took a core worker's place");
    }
    // A pod that is deleted while it is bound keeps its capacity for ever in the scheduler of 1.20.
    first.wait_for("all pods of the service", || {
        let pods = namespace.get("pods", "app=service");
        let running = pods.iter().filter(|pod| pod["status"]["phase"] == "Running").count();
        (running == 6).then_some(())
    });
    let steps = [&first, &second].map(Job::step);
    must(kubectl().args(["--namespace", namespace.name(), "delete", "deployment", "service"]));
    let _ = [&first, &second].map(|job| job.wait_for_group(4));
    assert!(first.step() > steps[0] && second.step() > steps[1], "training began anew");
    first.assert_completes(30);
    second.assert_completes(30);
}

/// A Deployment that does nothing, with resource requests.
fn service(priority_class: &str, replicas: u32, cpu_millis: u64) -> String {
    format!(
        "apiVersion: apps/v1
kind: Deployment
metadata: {{name: service}}
spec:
  replicas: {replicas}
  selector: {{matchLabels: {{app: service}}}}
  template:
    metadata: {{labels: {{app: service}}}}
    spec:
      priorityClassName: '{priority_class}'
      terminationGracePeriodSeconds: 1
      containers:
      - name: service
        image: localhost/pause:dev
        imagePullPolicy: Never
        resources: {{requests: {{cpu: {cpu_millis}m}}}}
"
    )
}

fn thirty_workers_that_are_lost_at_once_are_replaced_in_parallel() {
    let (namespace, _guard) = namespace("thirty");
    let options = ["--num-workers", "30", "--num-epochs", "100", "--max-worker-restarts", "0"];
    // Few steps, since thirty workers on two cores take long for each.
    let small = ["--worker-resources", "cpu=1m,memory=64Mi", "--global-batch-size", "600"];
    let job = Job::start(&namespace, "count", &[&options[..], &small].concat(), 10_000);
    let pods = job.wait_for_group(30);
    // One worker stays, and with it the state.
    let (kept, lost): (_, Vec<&str>) =
        (uid(&pods[0]).to_owned(), pods[1..].iter().map(name).collect());
    let delete = [
        "--namespace",
        namespace.name(),
        "delete",
        "pod",
        "--grace-period=0",
        "--force",
        "--wait=false",
    ];
    must(kubectl().args(delete).args(&lost));
    let pods = job.wait_for_others(30, &pods[1..]);
    // They are replaced concurrently, not one after another.
    let made = |pod: &Value| {
        let time = pod["metadata"]["creationTimestamp"].as_str().unwrap().to_owned();
        let output = must(Command::new("date").args(["+%s", "--date", &time]));
        String::from_utf8(output.stdout).unwrap().trim().parse::<u64>().unwrap()
    };
    let made: Vec<u64> = pods.iter().filter(|pod| uid(pod) != kept).map(made).collect();
    let spread = made.iter().max().unwrap() - made.iter().min().unwrap();
    println!("{} workers were replaced within {spread} s", made.len());
    assert!(made.len() == 29 && spread <= 10, "{made:?}");
    job.assert_completes(100);
}

fn the_commands_of_the_readme_suffice_for_a_fresh_cluster() {
    let (_namespace, _guard) = namespace("readme");
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let page = std::fs::read_to_string(root.join("manifests/README.md")).unwrap();
    let block = page.split("```").nth(1).unwrap();
    let lines = block.strip_prefix("sh\n").unwrap().replace("\\\n", " ");
    let [apply, train] = lines.lines().collect::<Vec<_>>()[..] else {
        panic!("two commands: {lines}")
    };
    assert_eq!(apply, "kubectl apply -k manifests/");
    must(kubectl().args(["apply", "-k", "manifests/"]).current_dir(root));
    let namespace = Namespace::existing("elasticdl", ELASTICDL);
    // The data: a claim with the name in the README.
    let data = tempfile::tempdir().unwrap();
    std::fs::set_permissions(data.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    counting_data(&data.path().join("mnist"), RECORDS, 3).unwrap();
    let _volume = Volume::new(&namespace, "data", data.path());
    // The image: the test's, which has another program.
    let words = train.replace("team/model:1", namespace.image());
    let (options, program) =
        words.strip_prefix("elasticdl train ").unwrap().split_once(" -- ").unwrap();
    assert_eq!(program.trim(), "mnist");
    let mut command = Command::new(ELASTICDL);
    command.arg("train").args(options.split_whitespace());
    command.args(["--", "counting", "--records", &RECORDS.to_string()]);
    let (code, output) = ChildOutput::start(command).wait();
    assert_eq!(code, Some(0), "{output}");
    assert_exactly_once(&namespace.summary("mnist").unwrap(), &output, RECORDS, 1);
    let deleted = namespace.elasticdl("delete", ["mnist"]).output().unwrap();
    assert!(deleted.status.success(), "{deleted:?}");
    assert_eq!(namespace.leftovers(), Vec::<String>::new());
}

/// A folder of this machine as a persistent volume claim.
struct Volume(String);

impl Volume {
    fn new(namespace: &Namespace, claim: &str, folder: &Path) -> Self {
        let volume = format!("e2e-{}", std::process::id());
        namespace.apply(&format!(
            "apiVersion: v1
kind: PersistentVolume
metadata: {{name: {volume}}}
spec:
  capacity: {{storage: 1Mi}}
  accessModes: [ReadOnlyMany]
  hostPath: {{path: {}}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {{name: {claim}}}
spec:
  storageClassName: ''
  volumeName: {volume}
  accessModes: [ReadOnlyMany]
  resources: {{requests: {{storage: 1Mi}}}}
",
            folder.display()
        ));
        Self(volume)
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        let _ = kubectl().args(["delete", "persistentvolume", &self.0, "--wait=false"]).output();
    }
}

/// How long the API server does not answer.
const UNAVAILABLE: Duration = Duration::from_secs(30);

cluster_tests![
    training_continues_while_the_api_server_is_unavailable,
    drained_workers_come_back_with_the_node,
    a_master_whose_node_is_lost_is_replaced_while_its_workers_train,
    preempted_workers_come_back_when_the_service_is_deleted,
    two_jobs_share_the_node_evenly_and_a_service_preempts_all_tiers_but_the_core,
    thirty_workers_that_are_lost_at_once_are_replaced_in_parallel,
    the_commands_of_the_readme_suffice_for_a_fresh_cluster,
];
