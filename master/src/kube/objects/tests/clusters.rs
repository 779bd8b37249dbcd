//! What clusters with rules of their own require of the objects.

use super::*;

/// The specs of the master's and of a worker's pod.
fn pods(request: &Request) -> [Value; 2] {
    let master = objects(request).job.spec.unwrap().template.spec;
    [serde_json::to_value(master).unwrap(), worker(request, 1, 1)["spec"].clone()]
}

#[test]
fn user_ids_are_left_to_clusters_that_assign_them() {
    let ids = |cluster_assigns_ids, context: &Value| {
        let mut request = request();
        request.pods.cluster_assigns_ids = cluster_assigns_ids;
        let part = template_of(&json!({"securityContext": context}));
        request.pods.worker_pod_template.clone_from(&part);
        request.pods.master_pod_template = part;
        pods(&request).map(|spec| {
            let context = &spec["securityContext"];
            assert_eq!(context["runAsNonRoot"], true);
            let keys = ["runAsUser", "runAsGroup", "fsGroup"].map(|key| context[key].clone());
            (keys, spec["volumes"][0]["secret"]["defaultMode"].clone())
        })
    };
    let none = json!({});
    for pod in ids(false, &none) {
        assert_eq!(pod, ([json!(65532), json!(65532), json!(65532)], json!(0o440)));
    }
    for pod in ids(false, &json!({"runAsUser": 1000, "runAsGroup": 1000})) {
        assert_eq!(pod, ([json!(1000), json!(1000), json!(65532)], json!(0o440)));
    }
    // Any user can read the files, since the volume may have no group of the user's.
    let nulls = [Value::Null, Value::Null, Value::Null];
    for pod in ids(true, &none) {
        assert_eq!(pod, (nulls.clone(), json!(0o444)));
    }
    for pod in ids(false, &json!({"runAsUser": null, "runAsGroup": null, "fsGroup": null})) {
        assert_eq!(pod, (nulls.clone(), json!(0o444)));
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
    let part = template_of(&json!({"metadata": {"labels": {"sidecar.istio.io/inject": "true"}}}));
    request.pods.worker_pod_template.clone_from(&part);
    request.pods.master_pod_template = part;
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
