//! Jobs in a real cluster whose API server stops, and whose node is drained, filled and given back.
//!
//! These disturb everything else in the cluster, so that only one of them runs at a time.

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use elasticdl_tests::cluster::{ApiServer, Job, Namespace, Node, kubectl, must, name, uid};
use serde_json::Value;

static NODE: Mutex<()> = Mutex::new(());

/// A namespace, and the whole cluster for as long as the guard lives.
fn namespace(test: &str) -> Option<(Namespace, MutexGuard<'static, ()>)> {
    let guard = NODE.lock().unwrap_or_else(PoisonError::into_inner);
    let namespace = Namespace::new(test, env!("CARGO_BIN_EXE_elasticdl-under-test"))?;
    namespace.apply_rbac();
    Some((namespace, guard))
}

fn uids(pods: &[Value]) -> Vec<&str> {
    let mut uids: Vec<&str> = pods.iter().map(uid).collect();
    uids.sort_unstable();
    uids
}

fn generation(job: &Job<'_>) -> u64 {
    job.status()["generation"].as_u64().unwrap()
}

#[test]
fn training_goes_on_while_the_api_server_is_away() {
    let Some((namespace, _guard)) = namespace("away") else { return };
    let server = ApiServer::new();
    let job = Job::start(&namespace, "count", &["--num-workers", "3", "--num-epochs", "200"], 4000);
    let pods = job.wait_for_group(3);
    let (generation, step, since) = (generation(&job), job.step(), Instant::now());
    let stopped = server.stop(AWAY + Duration::from_secs(10));
    std::thread::sleep(AWAY);
    drop(stopped);
    // Then its connections break too.
    server.restart();
    let pods_after = job.wait_for_group(3);
    // Three workers, 64 records a step, 4 ms a record: one that holds a third of them is done after 85 ms. Had they
    // not trained in those 30 s, they would have no more than this.
    let steps_beside = (since.elapsed() - AWAY).as_millis() as u64 / 85;
    let steps = job.step() - step;
    assert!(steps > steps_beside + 100, "{steps} steps, of which {steps_beside} may be from before or after");
    assert_eq!(uids(&pods_after), uids(&pods), "a worker was replaced");
    assert_eq!(job.status()["generation"].as_u64(), Some(generation), "{}", job.status()["memberships"]);
    assert_eq!(namespace.workers("count").len(), 3, "a worker was created twice");
    assert_eq!(job.launches(), [1, 2, 3]);
    job.assert_completes(200);
}

#[test]
fn drained_workers_come_back_with_the_node() {
    let Some((namespace, _guard)) = namespace("drained") else { return };
    let node = Node::only();
    let options = ["--num-workers", "3", "--num-epochs", "100", "--max-worker-restarts", "0"];
    let job = Job::start(&namespace, "count", &options, 4000);
    let pods = job.wait_for_group(3);
    let step = job.step();
    // With one node, all workers would go, and with them what they have trained: so one is left.
    let label = format!("drained={}", namespace.name());
    for pod in &pods[..2] {
        must(kubectl().args(["--namespace", namespace.name(), "label", "pod", name(pod), &label]));
    }
    let cordoned = node.drain(&label);
    let rest = job.wait_for("one worker trains on", || {
        let status = job.status();
        let ranked = status["workers"].as_array()?.iter().filter(|w| !w["rank"].is_null()).count();
        let pods = namespace.running_workers("count");
        (ranked == 1 && status["step"].as_u64()? > step).then_some(pods)
    });
    assert_eq!(uids(&rest), [uid(&pods[2])]);
    job.wait_for_event(&["Unschedulable", "unschedulable"]);
    drop(cordoned);
    let pods = job.wait_for_group(3);
    assert!(pods.iter().any(|pod| uid(pod) == uid(&rest[0])), "the worker that stayed was restarted");
    assert!(job.step() > step, "training began anew");
    job.assert_completes(100);
}

/// How long the API server does not answer.
const AWAY: Duration = Duration::from_secs(30);
