use std::time::Duration;

use k8s_openapi::api::core::v1::{Secret, Service};
use serde_json::{Value, json};

use super::super::anchor::{MAX_WORKERS, MIN_WORKERS, NUM_WORKERS};
use super::super::priority_tiers::{PriorityTiers, parse_weight};
use super::super::testing::FakeServer;
use super::*;
use crate::job::JobSpec;
use crate::job::testing::spec;

fn document(options: &str) -> Value {
    let metadata = json!({"name": "j", "uid": "doc", "annotations": {OPTIONS: options}});
    json!({"metadata": metadata, "spec": {"template": {"spec": {"containers": []}}}})
}

async fn declaration(fake: &std::sync::Arc<FakeServer>, cluster: &Cluster) -> Declaration {
    let owner = json!({
        "apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": "doc", "controller": true,
    });
    fake.put(
        "pods",
        "j-x1",
        json!({
            "metadata": {"name": "j-x1", "uid": "p", "ownerReferences": [owner]},
            "spec": {"containers": [{"name": "declare", "image": "model:1"}]},
        }),
    );
    Declaration::of_pod(cluster, "j-x1", None).await.unwrap().unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_pod_finds_its_job_and_sees_each_change_of_its_options() {
    let (fake, cluster) = FakeServer::start();
    let declaration = declaration(&fake, &cluster).await;
    assert_eq!((&*declaration.name, &*declaration.image), ("j", "model:1"));
    fake.put("jobs", "j", document("seed = 1"));
    let asked = |text: &str| Document { options: Some(text.into()), ..Document::default() };
    assert_eq!(declaration.document().await.unwrap(), asked("seed = 1"));
    let mut watch = declaration.watch();
    assert_eq!(watch.next().await, asked("seed = 1"));
    let mut changed = document("seed = 2");
    changed["spec"]["suspend"] = true.into();
    fake.put("jobs", "j", changed);
    assert_eq!(watch.next().await, Document { suspend: true, ..asked("seed = 2") });
    fake.put("pods", "alone", json!({"metadata": {"name": "alone", "uid": "q"}}));
    assert!(Declaration::of_pod(&cluster, "alone", None).await.unwrap().is_none());
}

#[tokio::test(start_paused = true)]
async fn the_pod_of_a_train_job_finds_it_and_what_its_runtime_asks_for() {
    let (fake, cluster) = FakeServer::start();
    declaration(&fake, &cluster).await;
    fake.put("jobs", "j", document("volume = 'v'"));
    let put = |uid: &str, spec: &Value| {
        let annotations = json!({OPTIONS: "seed = 1"});
        let metadata = json!({"name": "t", "uid": uid, "annotations": annotations});
        fake.put("trainjobs", "t", json!({"metadata": metadata, "spec": spec}));
    };
    let runtime = json!({"name": "elasticdl"});
    put("train", &json!({"runtimeRef": runtime, "managedBy": "trainer", "suspend": false}));
    let declaration = Declaration::of_pod(&cluster, "j-x1", Some("t")).await.unwrap().unwrap();
    assert_eq!((&*declaration.name, declaration.kind()), ("t", "TrainJob"));
    assert_eq!(declaration.runtime_options(), Some("volume = 'v'"));
    let asked = |spec| {
        let options = Some("seed = 1".into());
        Document { options, train_job: Some(spec), suspend: false }
    };
    let mut watch = declaration.watch();
    assert_eq!(watch.next().await, asked(TrainJobSpec::default()));
    assert_eq!(declaration.document().await.unwrap(), asked(TrainJobSpec::default()));
    // Another TrainJob of the name.
    put("later", &json!({"trainer": {"numNodes": 9}}));
    let trainer = json!({"numNodes": 3, "resourcesPerNode": {"limits": {"cpu": 2}}});
    put("train", &json!({"suspend": true, "trainer": trainer}));
    let spec = watch.next().await.train_job.unwrap();
    assert_eq!((spec.suspend, spec.trainer.num_nodes), (true, Some(3)));
    assert_eq!(spec.trainer.resources_per_node.limits["cpu"], 2);
    // The Job owns the training job, and Events are about the document.
    let mut objects = Objects {
        job: Job::default(),
        anchor: ConfigMap::default(),
        secret: Secret::default(),
        service: Service::default(),
        network_policies: Vec::new(),
        access: None,
    };
    declaration.own(&mut objects);
    let owner = objects.job.metadata.owner_references.unwrap().remove(0);
    assert_eq!((&*owner.kind, &*owner.name, &*owner.uid), ("Job", "j", "doc"));
    for (uid, expected) in [("doc", Holder::Declaration), ("former", Holder::Former)] {
        let mut master = document("");
        let owner = json!({"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": uid});
        master["metadata"] = json!({"name": "t-master", "ownerReferences": [owner]});
        fake.put("jobs", "t-master", master);
        assert_eq!(declaration.holder("t").await.unwrap(), expected, "{uid}");
    }
    declaration.record("Reason", "text").await;
    let about = fake.state().all("events")[0]["involvedObject"].clone();
    let expected = json!({
        "apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "name": "t",
        "namespace": "ns", "uid": "train",
    });
    assert_eq!(about, expected);
    declaration.outlive_pods().await;
    assert_eq!(fake.state().object("jobs", "j").unwrap()["spec"]["backoffLimit"], 1_000_000);
}

#[tokio::test]
async fn a_train_job_that_is_absent_is_told_from_a_definition_that_is() {
    let (_, cluster) = FakeServer::start();
    let told = |message: &str, reason: &str| {
        let status = kube::core::Status::failure(message, reason).with_code(404);
        explain::<TrainJob>(&cluster, "read", kube::Error::Api(status.boxed())).to_string()
    };
    let absent = told("404 page not found", "Failed to parse error data");
    assert!(absent.contains("the CRD trainjobs.trainer.kubeflow.org with"), "{absent}");
    assert!(told("trainjobs \"t\" not found", "NotFound").contains("\"t\" not found"));
}

#[tokio::test]
async fn the_name_of_a_job_is_held_by_the_declaration_that_owns_its_master() {
    let (fake, cluster) = FakeServer::start();
    let declaration = declaration(&fake, &cluster).await;
    let owned = |name: &str, uid: &str| {
        let owner = json!({"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": uid});
        json!([owner])
    };
    assert_eq!(declaration.holder("j").await.unwrap(), Holder::None);
    for (owner, expected) in [("other", Holder::ConfigMap), ("j-master", Holder::Former)] {
        let metadata = json!({"name": "j", "ownerReferences": owned(owner, "u")});
        fake.put("configmaps", "j", json!({"metadata": metadata}));
        assert_eq!(declaration.holder("j").await.unwrap(), expected, "{owner}");
    }
    for (owner, uid, parallelism, expected) in [
        ("j", "doc", 0, Holder::CutOff),
        ("j", "doc", 1, Holder::Declaration),
        ("j", "former", 1, Holder::Former),
        ("k", "another", 1, Holder::Other),
    ] {
        let mut master = document("");
        master["metadata"] = json!({"name": "j-master", "ownerReferences": owned(owner, uid)});
        master["spec"]["parallelism"] = parallelism.into();
        fake.put("jobs", "j-master", master);
        assert_eq!(declaration.holder("j").await.unwrap(), expected, "{uid} {parallelism}");
    }
}

fn task() -> Task {
    Task {
        job: JobSpec { max_workers: 8, ..spec() },
        master_timeout: Duration::from_secs(30),
        priority_tiers: None,
        metrics_port: 7071,
        serve_metrics: false,
        tensorboard_dir: None,
        gang: None,
    }
}

/// Values of these keys of the anchor of the job.
fn set<const N: usize>(fake: &FakeServer, keys: [&str; N]) -> [String; N] {
    let data = fake.state().object("configmaps", "j").unwrap()["data"].clone();
    keys.map(|key| data[key].as_str().unwrap_or_default().to_owned())
}

#[tokio::test]
async fn what_a_user_has_set_stays_until_the_declaration_asks_for_something_else() {
    let (fake, cluster) = FakeServer::start();
    let (declaration, task) = (declaration(&fake, &cluster).await, task());
    let data = json!({objects::TASK: "{}", NUM_WORKERS: "5"});
    fake.put("configmaps", "j", json!({"metadata": {"name": "j"}, "data": data}));
    let ask = async |num_workers: u32, suspend: Option<bool>| {
        let asked = Asked { scaling: num_workers.into(), weight: None, suspend };
        let done = declaration.request("j", &task, asked).await.unwrap();
        assert_eq!(done.refused, None);
        done.changed
    };
    let set = || set(&fake, [NUM_WORKERS, SUSPEND]);
    let (no, yes) = (Some(false), Some(true));
    assert_eq!(ask(3, no).await, [""; 0]);
    assert_eq!(set(), ["5", ""]);
    assert_eq!(ask(4, no).await, ["num-workers = 4"]);
    assert_eq!(set(), ["4", ""]);
    // `elasticdl scale`.
    fake.put("configmaps", "j", {
        let mut anchor = fake.state().object("configmaps", "j").unwrap();
        anchor["data"][NUM_WORKERS] = "6".into();
        anchor
    });
    assert_eq!(ask(4, no).await, [""; 0]);
    assert_eq!(ask(4, yes).await, ["suspend = true"]);
    assert_eq!(set(), ["6", "true"]);
    assert_eq!(ask(4, no).await, ["suspend = false"]);
    assert_eq!((ask(4, yes).await, ask(4, None).await), (vec!["suspend = true".into()], vec![]));
    assert_eq!(set(), ["6", "true"]);
}

#[tokio::test]
async fn limits_are_requested_together_with_the_number_or_refused_with_it() {
    let (fake, cluster) = FakeServer::start();
    let (declaration, task) = (declaration(&fake, &cluster).await, task());
    // An earlier release has noted what it has requested.
    let noted = json!({"num-workers": 3, "suspend": false}).to_string();
    let json = serde_json::to_string(&task).unwrap();
    let data = json!({objects::TASK: json, DECLARED: noted});
    fake.put("configmaps", "j", json!({"metadata": {"name": "j"}, "data": data}));
    let ask = async |number: u32, min: u32, max: Option<u32>| {
        let limits = Scaling { num_workers: None, min_workers: Some(min), max_workers: max };
        let asked = Asked { scaling: limits.or(number.into()), weight: None, suspend: Some(false) };
        declaration.request("j", &task, asked).await.unwrap()
    };
    let set = || set(&fake, [NUM_WORKERS, MIN_WORKERS, MAX_WORKERS]);
    assert_eq!(ask(3, 1, Some(8)).await, Requested::default());
    assert_eq!(ask(3, 1, None).await, Requested::default());
    let done = ask(12, 2, None).await;
    assert_eq!((done.changed, set()), (vec![], [""; 3].map(String::from)));
    assert!(done.refused.unwrap().starts_with("this job takes 2 to 8 workers, not 12"));
    let done = ask(12, 2, Some(16)).await;
    let changed = ["max-workers = 16", "min-workers = 2", "num-workers = 12"];
    assert_eq!((done.changed, done.refused), (changed.map(String::from).into(), None));
    assert_eq!(set(), ["12", "2", "16"]);
    assert_eq!(ask(12, 2, None).await, Requested::default(), "a maximum stays");
    assert_eq!(ask(15, 2, None).await.changed, ["num-workers = 15"]);
    // The number that was requested before does not contradict the maximum.
    let most = Scaling { max_workers: Some(9), ..Scaling::default() };
    let asked = Asked { scaling: most, weight: None, suspend: None };
    let done = declaration.request("j", &task, asked).await;
    assert_eq!(done.unwrap().changed, ["max-workers = 9", "num-workers = 9"]);
    assert_eq!(set(), ["9", "2", "9"]);
}

#[tokio::test]
async fn a_weight_is_requested_of_a_job_that_has_priority_tiers() {
    let (fake, cluster) = FakeServer::start();
    let declaration = declaration(&fake, &cluster).await;
    let ask = async |tiers: Option<PriorityTiers>, num_workers: u32, weight: &str| {
        let task = Task { priority_tiers: tiers, ..task() };
        let weight = parse_weight(weight).ok();
        let asked = Asked { scaling: num_workers.into(), weight, suspend: None };
        declaration.request("j", &task, asked).await.unwrap().changed
    };
    let begin = || {
        let data = json!({objects::TASK: serde_json::to_string(&task()).unwrap()});
        fake.put("configmaps", "j", json!({"metadata": {"name": "j"}, "data": data}));
    };
    begin();
    assert_eq!(ask(None, 3, "2").await, [""; 0]);
    let tiers = || Some(PriorityTiers::shipped());
    assert_eq!(ask(tiers(), 3, "1").await, [""; 0]);
    assert_eq!(ask(tiers(), 3, "2").await, ["weight = 2"]);
    assert_eq!(ask(tiers(), 4, "0.50").await, ["num-workers = 4", "weight = 0.5"]);
    assert_eq!(set(&fake, [NUM_WORKERS, WEIGHT]), ["4", "0.5"]);
    // `elasticdl scale`.
    let mut anchor = fake.state().object("configmaps", "j").unwrap();
    anchor["data"][WEIGHT] = "3".into();
    fake.put("configmaps", "j", anchor);
    assert_eq!(ask(tiers(), 4, "0.5").await, [""; 0]);
    assert_eq!(ask(tiers(), 4, "1").await, ["weight = 1"]);
}
