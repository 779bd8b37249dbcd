//! Detection of schedulers at a fake server.

use serde_json::json;

use super::super::testing::FakeServer;
use super::*;

fn options(scheduler: GangScheduler, queue: Option<&str>) -> GangOptions {
    GangOptions::new(scheduler, queue.map(str::to_owned), 2, &Default::default(), None)
}

/// Serves PodGroups of this API.
fn serve(fake: &FakeServer, group_version: &str) {
    let list = json!({"resources": [{"name": "podgroups"}, {"name": "podgroups/status"}]});
    fake.state().cluster_paths.insert(format!("/apis/{group_version}"), list);
}

#[tokio::test]
async fn the_newest_served_version_is_taken() {
    let (fake, cluster) = FakeServer::start();
    for (served, version) in [("v1alpha2", "v1alpha2"), ("v1beta1", "v1beta1")] {
        serve(&fake, &format!("scheduling.k8s.io/{served}"));
        let mut gang = options(GangScheduler::Native, None);
        detect(&cluster, &mut gang).await.unwrap();
        assert_eq!(gang.version, version);
    }
    serve(&fake, "scheduling.volcano.sh/v1beta1");
    detect(&cluster, &mut options(GangScheduler::Volcano, None)).await.unwrap();
}

#[tokio::test]
async fn a_scheduler_that_the_cluster_does_not_have_is_named() {
    let (fake, cluster) = FakeServer::start();
    // The group exists for priority classes, in every cluster.
    let classes = json!({"resources": [{"name": "priorityclasses"}]});
    fake.state().cluster_paths.insert("/apis/scheduling.k8s.io/v1beta1".into(), classes);
    for (scheduler, parts) in [
        (GangScheduler::Native, ["--scheduler native", "Kubernetes 1.36"]),
        (GangScheduler::Volcano, ["podgroups of scheduling.volcano.sh (v1beta1)", "install it"]),
        (GangScheduler::Kueue, ["the API group kueue.x-k8s.io", "install it"]),
    ] {
        let error = detect(&cluster, &mut options(scheduler, None)).await.unwrap_err().to_string();
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
}

#[tokio::test]
async fn a_queue_that_does_not_exist_is_named() {
    let (fake, cluster) = FakeServer::start();
    let preferred = json!({"preferredVersion": {"version": "v1beta2"}});
    fake.state().cluster_paths.insert("/apis/kueue.x-k8s.io".into(), preferred);
    serve(&fake, "scheduling.volcano.sh/v1beta1");
    for (scheduler, kind) in
        [(GangScheduler::Kueue, "LocalQueue"), (GangScheduler::Volcano, "Queue")]
    {
        let path = "/apis/scheduling.volcano.sh/v1beta1/queues/team";
        fake.state().cluster_paths.remove(path);
        let mut gang = options(scheduler, Some("team"));
        let error = detect(&cluster, &mut gang).await.unwrap_err().to_string();
        assert_eq!(error, format!("--queue: there is no {kind} team in the namespace ns"));
        let queue = json!({"metadata": {"name": "team"}});
        fake.put("localqueues", "team", queue.clone());
        fake.state().cluster_paths.insert(path.into(), queue);
        detect(&cluster, &mut gang).await.unwrap();
    }
}
