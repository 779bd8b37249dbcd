//! What clusters with rules of their own require of the objects.

use super::*;

/// The specs of the master's and of a worker's pod.
fn pods(request: &Request) -> [Value; 2] {
    let master = objects(request).job.spec.unwrap().template.spec;
    [serde_json::to_value(master).unwrap(), worker(request, 1, 1)["spec"].clone()]
}

#[test]
fn user_ids_are_left_to_clusters_that_assign_them() {
    let ids = |run_as| {
        let mut request = request();
        request.pods.run_as = run_as;
        let pods = pods(&request);
        pods.map(|spec| {
            let context = &spec["securityContext"];
            assert_eq!(context["runAsNonRoot"], true);
            let keys = ["runAsUser", "runAsGroup", "fsGroup"].map(|key| context[key].clone());
            (keys, spec["volumes"][0]["secret"]["defaultMode"].clone())
        })
    };
    let of = |user: i64| [json!(user), json!(user), json!(user)];
    for pod in ids(RunAs::default()) {
        assert_eq!(pod, (of(65532), json!(0o440)));
    }
    for pod in ids(RunAs::User(1_000_680_000)) {
        assert_eq!(pod, (of(1_000_680_000), json!(0o440)));
    }
    // Any user can read the files, since the cluster may give the volume no group.
    for pod in ids(RunAs::Cluster) {
        assert_eq!(pod, ([Value::Null, Value::Null, Value::Null], json!(0o444)));
    }
}

#[test]
fn pods_run_on_linux_and_where_the_user_says() {
    let selectors = |chosen: &[(&str, &str)]| {
        let mut request = request();
        let chosen = chosen.iter().map(|&(key, value)| (key.into(), value.into()));
        request.pods.node_selector = chosen.collect();
        pods(&request).map(|spec| spec["nodeSelector"].clone())
    };
    let linux = json!({"kubernetes.io/os": "linux"});
    assert_eq!(selectors(&[]), [linux.clone(), linux]);
    let arm = json!({"kubernetes.io/os": "linux", "kubernetes.io/arch": "arm64"});
    assert_eq!(selectors(&[("kubernetes.io/arch", "arm64")]), [arm.clone(), arm]);
}

#[test]
fn all_pods_have_the_priority_class_of_the_users_choice() {
    let mut request = request();
    request.pods.priority_class = Some("high".into());
    request.pods.worker_priority_class = Some("high".into());
    for spec in pods(&request) {
        assert_eq!(spec["priorityClassName"], "high");
    }
}

#[test]
fn meshes_are_told_the_protocols_and_add_no_sidecars_unless_asked() {
    let service = objects(&request()).service.spec.unwrap();
    let ports: Vec<_> = service
        .ports
        .unwrap()
        .into_iter()
        .map(|port| (port.name.unwrap(), port.app_protocol.unwrap()))
        .collect();
    let expected = [("tls-grpc", "tls"), ("metrics", "http")];
    assert_eq!(ports, expected.map(|(name, protocol)| (name.to_owned(), protocol.to_owned())));
    let metadata = |request: &Request| {
        let master = objects(request).job.spec.unwrap().template.metadata;
        [serde_json::to_value(master).unwrap(), worker(request, 1, 1)["metadata"].clone()]
    };
    for metadata in metadata(&request()) {
        let (labels, annotations) = (&metadata["labels"], &metadata["annotations"]);
        assert_eq!(labels["sidecar.istio.io/inject"], "false");
        assert_eq!(labels["kuma.io/sidecar-injection"], "disabled");
        assert_eq!(annotations["linkerd.io/inject"], "disabled");
    }
    let mut request = request();
    request.pods.labels.insert("sidecar.istio.io/inject".into(), "true".into());
    for metadata in metadata(&request) {
        assert_eq!(metadata["labels"]["sidecar.istio.io/inject"], "true");
        assert_eq!(metadata["annotations"]["sidecar.istio.io/inject"], Value::Null);
    }
}

#[test]
fn volumes_on_the_node_have_a_size_limit() {
    let limits = |resources: &str| {
        let mut request = request();
        request.pods.worker_resources = parse_resources(resources).unwrap();
        request.task.job.workers_per_pod = 2;
        pods(&request).map(|spec| {
            let volumes = spec["volumes"].as_array().unwrap().clone();
            let dirs = volumes.iter().filter(|volume| volume["emptyDir"].is_object());
            let limits = dirs.map(|dir| {
                (dir["name"].clone(), dir["emptyDir"]["sizeLimit"].as_str().map(str::to_owned))
            });
            limits.collect::<Vec<_>>()
        })
    };
    let dir = |name: &str, limit: &str| (json!(name), Some(limit.to_owned()));
    let [master, worker] = limits("cpu=1,memory=2Gi");
    assert_eq!(master, [dir("tmp", "64Mi")]);
    assert_eq!(worker, [dir("tmp", "10Gi"), dir("shm", "2Gi")]);
    let [_, worker] = limits("memory=1Gi,limits.memory=4Gi,ephemeral-storage=50Gi");
    assert_eq!(worker, [dir("tmp", "50Gi"), dir("shm", "4Gi")]);
}

#[test]
fn all_objects_have_the_recommended_labels() {
    let mut request = request();
    (request.pods.network_policy, request.pods.per_job_role) = (true, true);
    let objects = objects(&request);
    let Access { account, role, binding } = objects.access.as_ref().unwrap();
    let mut all = vec![
        objects.job.metadata.clone(),
        objects.job.spec.as_ref().unwrap().template.metadata.clone().unwrap(),
        objects.anchor.metadata.clone(),
        objects.secret.metadata.clone(),
        objects.service.metadata.clone(),
        account.metadata.clone(),
        role.metadata.clone(),
        binding.metadata.clone(),
        owned(&anchor_meta(), "mnist-files-0", "files"),
        template(&objects).metadata,
    ];
    all.extend(objects.network_policies.iter().map(|policy| policy.metadata.clone()));
    for metadata in all {
        let labels = metadata.labels.unwrap();
        let of = |name: &str| labels[&format!("app.kubernetes.io/{name}")].as_str();
        assert_eq!(
            ["name", "instance", "managed-by", "part-of", "version"].map(of),
            ["elasticdl", "mnist", "elasticdl", "elasticdl", env!("CARGO_PKG_VERSION")]
        );
        assert_eq!(of("component"), labels["elasticdl/role"]);
    }
}
