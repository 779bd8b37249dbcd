//! Number of API calls of a master whose job trains without changes.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::json;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::cluster_master::publish::publish as publish_status;
use crate::job::{Job, LaunchId, Time};
use crate::kube::anchor::{Anchor, AnchorWriter};
use crate::kube::events::EventRecorder;
use crate::kube::leader_lease::{Holder, LeaderLease};
use crate::kube::pods::{PodFactory, Pods};
use crate::kube::testing::FakeServer;

/// API calls by kind in ten minutes, of a master whose job trains with three workers and without
/// any change.
async fn calls_without_changes() -> BTreeMap<String, usize> {
    let (fake, cluster) = FakeServer::start();
    let meta = json!({"name": "j", "namespace": "ns", "uid": "anchor", "ownerReferences": [
        {"apiVersion": "batch/v1", "kind": "Job", "name": "j-master", "uid": "job"}
    ]});
    fake.put("configmaps", "j", json!({"metadata": meta, "data": {"task": "{}"}}));
    let meta: ObjectMeta = serde_json::from_value(meta).unwrap();
    let identity = Holder { pod: "one".into(), uid: "u".into() };
    let lease = LeaderLease::acquire(&cluster, &meta, &identity).await.unwrap();
    let pod_factory = PodFactory::for_tests(meta.clone(), 1);
    let mut pods =
        Pods::new(&cluster, pod_factory, lease.guard(), EventRecorder::start(&cluster, &meta));
    let anchor = Anchor::new(&cluster, "j");
    let mut followed = anchor.watch();
    let (publish, published) = watch::channel(None);
    let (times, history) = (RefCell::default(), RefCell::default());
    let writer = AnchorWriter::begin(&anchor, &anchor.read().await.unwrap(), 1).await.unwrap();
    let writing = publish_status(&writer, published, Duration::ZERO, &times, &history);
    tokio::pin!(writing);
    for launch in 1..=3 {
        pods.start(LaunchId(launch), launch as u32 - 1);
    }
    let mut snapshot = Job::new(crate::job::testing::spec()).snapshot(Time::default());
    let mut steps = tokio::time::interval(Duration::from_millis(100));
    let settled = Instant::now() + Duration::from_secs(60);
    let end = settled + Duration::from_secs(600);
    while Instant::now() < end {
        tokio::select! {
            () = &mut writing => {}
            _ = followed.next() => {}
            _ = pods.next() => {}
            _ = steps.tick() => {
                snapshot.status.step += 1;
                publish.send_replace(Some(snapshot.clone()));
            }
        }
    }
    let mut calls = BTreeMap::new();
    for (_, kind) in fake.state().calls.iter().filter(|(at, _)| *at >= settled) {
        *calls.entry(kind.clone()).or_default() += 1;
    }
    calls
}

#[tokio::test(start_paused = true)]
async fn a_master_without_changes_makes_at_most_ten_api_calls_a_minute() {
    let calls = calls_without_changes().await;
    let all: usize = calls.values().sum();
    assert!(all <= 100, "{all} in ten minutes: {calls:?}");
    // Each periodic call is made.
    for kind in ["PUT leases", "PATCH configmaps", "WATCH pods", "LIST pods", "WATCH configmaps"] {
        assert!(calls.contains_key(kind), "{kind}: {calls:?}");
    }
}
