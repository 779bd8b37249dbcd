mod clusters;
mod templates;

use std::time::Duration;

use serde_json::{Value, json};

use super::*;
use crate::job::testing::spec;
use crate::job::{Batch, JobSpec};
use crate::kube::options::{
    PodOptions, PodTemplate, parse_env_from_secret, parse_resources, parse_volumes,
};
use elasticdl_proto::WorkerOptions;

fn request() -> Request {
    let job = JobSpec {
        name: "mnist".into(),
        max_workers: 8,
        options: WorkerOptions {
            training_data: "/data".into(),
            epochs: 1,
            batch: Batch::Global(64.try_into().unwrap()),
            seed: 0,
            worker_timeout: Some(Duration::from_millis(800)),
            ..spec().options
        },
        ..spec()
    };
    let pods = PodOptions {
        image: "train:1".into(),
        master_image: "elasticdl:1".into(),
        service_account: "elasticdl".into(),
        worker_resources: parse_resources("cpu=2,memory=1Gi,nvidia.com/gpu=1").unwrap(),
        table_server_resources: None,
        env: vec![("A".into(), "b".into())],
        volumes: parse_volumes("claim_name=c,mount_path=/data").unwrap(),
        ..PodOptions::default()
    };
    Request {
        namespace: "ml".into(),
        task: Task {
            job,
            master_timeout: Duration::from_secs(30),
            priority_tiers: None,
            metrics_port: METRICS_PORT,
            serve_metrics: true,
            tensorboard_dir: None,
            gang: None,
        },
        program: vec!["/bin/train".into(), "--hidden".into()],
        pods,
    }
}

fn credentials() -> Credentials {
    let certificates =
        Certificates { ca: "vouching".into(), certificate: "shown".into(), key: "5ec4e7".into() };
    Credentials { token: Token::from_hex(&"5ec4e7cd".repeat(8)).unwrap(), certificates }
}

fn objects(request: &Request) -> Objects {
    Objects::new(request, credentials()).unwrap()
}

fn template(objects: &Objects) -> Pod {
    serde_json::from_str(&objects.anchor.data.as_ref().unwrap()[WORKER_POD]).unwrap()
}

fn anchor_meta() -> ObjectMeta {
    ObjectMeta {
        name: Some("mnist".into()),
        uid: Some("anchor-uid".into()),
        ..ObjectMeta::default()
    }
}

fn template_of(part: &Value) -> Option<PodTemplate> {
    Some(PodTemplate::parse("--worker-pod-template t.yaml", &part.to_string()).unwrap())
}

/// The metadata and the spec of the master's pod.
fn master(request: &Request) -> Value {
    serde_json::to_value(objects(request).job.spec.unwrap().template).unwrap()
}

fn worker(request: &Request, launch: u64, slot: u32) -> Value {
    let template = template(&objects(request));
    let pod = worker_pod(&template, LaunchId(launch), slot, &anchor_meta(), "10.0.0.1:7070");
    serde_json::to_value(pod).unwrap()
}

#[test]
fn each_object_has_one_owner_and_the_job_is_at_the_top() {
    let mut request = request();
    (request.pods.network_policy, request.pods.per_job_role) = (true, true);
    let mut objects = objects(&request);
    let meta = |name: &str| ObjectMeta {
        name: Some(name.into()),
        uid: Some(format!("{name}-uid")),
        ..ObjectMeta::default()
    };
    objects.own_anchor(&meta("mnist-master"));
    objects.own_rest(&meta("mnist"));
    let owners = |meta: &ObjectMeta| serde_json::to_value(&meta.owner_references).unwrap();
    let by = |api_version: &str, kind: &str, name: &str| {
        json!([{
            "apiVersion": api_version, "kind": kind, "name": name, "uid": format!("{name}-uid"),
            "controller": true
        }])
    };
    assert_eq!(owners(&objects.job.metadata), Value::Null);
    assert_eq!(owners(&objects.anchor.metadata), by("batch/v1", "Job", "mnist-master"));
    let Access { account, role, binding } = objects.access.as_ref().unwrap();
    let mut owned = vec![&objects.secret.metadata, &objects.service.metadata];
    owned.extend(objects.network_policies.iter().map(|policy| &policy.metadata));
    owned.extend([&account.metadata, &role.metadata, &binding.metadata]);
    assert_eq!(owned.len(), 7);
    for meta in owned {
        assert_eq!(owners(meta), by("v1", "ConfigMap", "mnist"));
    }
    let pod = worker(&request, 1, 1);
    let owner = json!([{
        "apiVersion": "v1", "kind": "ConfigMap", "name": "mnist", "uid": "anchor-uid",
        "controller": true
    }]);
    assert_eq!(pod["metadata"]["ownerReferences"], owner);
}

#[test]
fn secrets_are_in_the_secret_only() {
    let request = request();
    let objects = objects(&request);
    let secret = objects.secret.data.clone().unwrap();
    let values: Vec<_> = secret
        .iter()
        .map(|(key, value)| (key.as_str(), str::from_utf8(&value.0).unwrap()))
        .collect();
    let token = "5ec4e7cd".repeat(8);
    let expected = [
        ("ca.crt", "vouching"),
        ("tls.crt", "shown"),
        ("tls.key", "5ec4e7"),
        ("token", token.as_str()),
    ];
    assert_eq!(values, expected);
    let others = [
        serde_json::to_string(&objects.job).unwrap(),
        serde_json::to_string(&objects.anchor).unwrap(),
        serde_json::to_string(&objects.service).unwrap(),
        worker(&request, 1, 1).to_string(),
        objects.to_yaml(),
    ];
    for text in others {
        // Not even in base64.
        assert!(!text.contains("5ec4e7") && !text.contains("NWVjNGU3"), "{text}");
    }
    assert!(!format!("{:?}", credentials()).contains("5ec4e7"));
}

#[test]
fn variables_from_secrets_are_references_in_the_worker_alone() {
    let mut request = request();
    request.pods.env_from_secret =
        ["bucket", "TOKEN=hub:token"].map(|text| parse_env_from_secret(text).unwrap()).into();
    request.pods.worker_service_account = Some("trainer".into());
    let spec = worker(&request, 1, 1)["spec"].clone();
    let container = &spec["containers"][0];
    assert_eq!(container["envFrom"], json!([{"secretRef": {"name": "bucket"}}]));
    let token = json!({
        "name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}
    });
    assert!(container["env"].as_array().unwrap().contains(&token));
    // A service account is an identity for storage, and no access to the API server.
    assert_eq!(spec["serviceAccountName"], "trainer");
    assert_eq!(spec["automountServiceAccountToken"], false);
    let master = serde_json::to_string(&objects(&request).job).unwrap();
    assert!(!master.contains("bucket") && !master.contains("hub") && !master.contains("trainer"));
}

#[test]
fn the_master_gets_the_variables_of_mlflow_and_opentelemetry_and_no_others() {
    let mut request = request();
    let uri = ("MLFLOW_TRACKING_URI".to_owned(), "http://mlflow:5000".to_owned());
    let endpoint = ("OTEL_EXPORTER_OTLP_ENDPOINT".to_owned(), "http://otel:4318".to_owned());
    request.pods.env.extend([uri, endpoint]);
    request.pods.env_from_secret = ["bucket", "TOKEN=hub:token", "MLFLOW_TRACKING_TOKEN=hub:flow"]
        .map(|text| parse_env_from_secret(text).unwrap())
        .into();
    let job = serde_json::to_value(objects(&request).job).unwrap();
    let container = &job["spec"]["template"]["spec"]["containers"][0];
    let secret = json!({"secretKeyRef": {"name": "hub", "key": "flow"}});
    let env = container["env"].as_array().unwrap();
    assert_eq!(env.len(), 6, "{env:?}");
    assert_eq!(env[0], json!({"name": "MLFLOW_TRACKING_URI", "value": "http://mlflow:5000"}));
    assert_eq!(env[1], json!({"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://otel:4318"}));
    assert_eq!(env[2], json!({"name": "MLFLOW_TRACKING_TOKEN", "valueFrom": secret}));
    assert_eq!(container["envFrom"], Value::Null);
}

#[test]
fn credentials_in_plain_text_are_refused_wherever_they_are_written() {
    let password = "hunter2";
    let token = format!("ghp_{}", "Z9".repeat(18));
    let url = format!("https://user:{password}@host/data");
    let variable = json!([{"name": "DB_PASSWORD", "value": password}]);
    let refused = |change: &dyn Fn(&mut Request), place: &str| {
        let mut request = request();
        change(&mut request);
        let error = Objects::new(&request, credentials()).unwrap_err().to_string();
        assert!(error.contains(place) && error.contains("--env-from-secret NAME:"), "{error}");
        assert!(!error.contains(password) && !error.contains(&token), "{error}");
    };
    refused(&|r| r.pods.env.push(("DB_PASSWORD".into(), password.into())), "DB_PASSWORD");
    refused(&|r| r.program.push(format!("--hub={token}")), "containers[0].args[1]");
    refused(&|r| r.task.job.options.training_data.clone_from(&url), "task.job.training_data");
    let annotation = json!({"metadata": {"annotations": {"a": token}}});
    let worker = json!({"containers": [{"name": "worker", "env": variable}]});
    let sidecar = json!({"containers": [{"name": "side", "image": "i", "env": variable}]});
    refused(&|r| r.pods.master_pod_template = template_of(&annotation), "annotations.a");
    for (part, place) in
        [(annotation, "annotations.a"), (worker, "DB_PASSWORD"), (sidecar, "DB_PASSWORD")]
    {
        refused(&|r| r.pods.worker_pod_template = template_of(&part), place);
    }
}

#[test]
fn a_masters_own_role_has_the_masters_rights_on_its_own_objects_where_names_are_known() {
    let mut request = request();
    assert_eq!(objects(&request).access, None);
    request.pods.per_job_role = true;
    let objects = objects(&request);
    let Access { account, role, binding } = objects.access.unwrap();
    let name = "mnist-master";
    for metadata in [&account.metadata, &role.metadata, &binding.metadata] {
        let found = (metadata.name.as_deref(), metadata.namespace.as_deref());
        assert_eq!(found, (Some(name), Some("ml")));
    }
    let job = serde_json::to_value(&objects.job).unwrap();
    assert_eq!(job["spec"]["template"]["spec"]["serviceAccountName"], "mnist-master");
    let role_ref = (binding.role_ref.kind.as_str(), binding.role_ref.name.as_str());
    assert_eq!(role_ref, ("Role", name));
    let mut rights = BTreeMap::new();
    for rule in role.rules.unwrap() {
        let names = rule.resource_names.unwrap_or_default().join(",");
        for verb in &rule.verbs {
            let right = (rule.resources.as_ref().unwrap()[0].clone(), verb.clone());
            assert_eq!(rights.insert(right.clone(), names.clone()), None, "{right:?} twice");
        }
    }
    let all = crate::kube::submit::MASTER_RULES;
    let all = all.iter().flat_map(|(_, resource, verbs)| {
        verbs.iter().map(|verb| ((*resource).to_owned(), (*verb).to_owned()))
    });
    assert!(all.collect::<std::collections::BTreeSet<_>>().iter().eq(rights.keys()), "{rights:?}");
    let of = |resource: &str, verb: &str| rights[&(resource.to_owned(), verb.to_owned())].clone();
    // Other jobs' state, leadership and lives.
    for (resource, verb, names) in [
        ("configmaps", "patch", "mnist,mnist-master-address"),
        ("configmaps", "list", "mnist"),
        ("leases", "update", "mnist"),
        ("jobs", "patch", "mnist-master"),
        ("services", "get", "mnist-master"),
        ("pods", "delete", ""),
    ] {
        assert_eq!(of(resource, verb), names, "{verb} {resource}");
    }
}

#[test]
fn metrics_are_announced_only_where_they_are_served() {
    let served = objects(&request());
    let mut request = request();
    request.task.serve_metrics = false;
    let not_served = objects(&request);
    for (objects, is_served) in [(served, true), (not_served, false)] {
        let ports = objects.service.spec.unwrap().ports.unwrap();
        assert_eq!(ports.iter().any(|port| port.port == 7071), is_served);
        let pod = objects.job.spec.unwrap().template;
        let annotations = pod.metadata.unwrap().annotations.unwrap_or_default();
        assert_eq!(annotations.contains_key("prometheus.io/scrape"), is_served);
        // The probes are served in any case.
        let container = pod.spec.unwrap().containers.remove(0);
        assert!(container.ports.unwrap().iter().any(|port| port.container_port == 7071));
        assert!(container.liveness_probe.is_some());
    }
}

#[test]
fn each_pod_mounts_only_the_keys_that_it_needs() {
    let master = objects(&request()).job.spec.unwrap().template.spec.unwrap();
    let master = serde_json::to_value(master).unwrap();
    let worker = worker(&request(), 1, 1)["spec"].clone();
    let sees: [(_, &[&str]); 2] =
        [(master, &["token", "tls.crt", "tls.key"]), (worker, &["token", "ca.crt"])];
    for (spec, keys) in sees {
        let volumes = spec["volumes"].as_array().unwrap();
        let secrets: Vec<&Value> =
            volumes.iter().map(|v| &v["secret"]).filter(|s| !s.is_null()).collect();
        let items: Vec<Value> = keys.iter().map(|key| json!({"key": key, "path": key})).collect();
        assert_eq!(
            secrets,
            [&json!({"secretName": "mnist", "defaultMode": 0o440, "items": items})]
        );
    }
}

#[test]
fn pods_have_the_least_privileges() {
    let objects = objects(&request());
    let master = serde_json::to_value(&objects.job.spec.unwrap().template.spec).unwrap();
    let worker = worker(&request(), 1, 1)["spec"].clone();
    for (spec, reaches_the_api) in [(master, true), (worker, false)] {
        assert_eq!(spec["automountServiceAccountToken"], reaches_the_api);
        assert_eq!(spec["securityContext"]["runAsNonRoot"], true);
        assert_ne!(spec["securityContext"]["runAsUser"], 0);
        assert_eq!(spec["securityContext"]["seccompProfile"], json!({"type": "RuntimeDefault"}));
        let container = &spec["containers"][0]["securityContext"];
        let expected = json!({
            "allowPrivilegeEscalation": false,
            "capabilities": {"drop": ["ALL"]},
            "privileged": false,
            "readOnlyRootFilesystem": true
        });
        assert_eq!(container, &expected);
        assert_eq!(spec["terminationGracePeriodSeconds"], if reaches_the_api { 10 } else { 14 });
        assert_eq!(spec["restartPolicy"], "Never");
    }
}

#[test]
fn the_kubelet_expands_nothing_in_what_the_user_wrote() {
    let texts =
        [("$(HOME)", "$$(HOME)"), ("^a$$", "^a$$$"), ("$$(A", "$$$$(A"), ("$x ${y}$", "$x ${y}$")];
    for (text, escaped) in texts {
        let mut request = request();
        request.program = vec![text.into(), text.into()];
        request.pods.env.push(("TEXT".into(), text.into()));
        let pod = worker(&request, 7, 1);
        let container = &pod["spec"]["containers"][0];
        assert_eq!(container["command"], json!([escaped]));
        assert_eq!(container["args"], json!([escaped]));
        let env = container["env"].as_array().unwrap();
        assert!(env.contains(&json!({"name": "TEXT", "value": escaped})), "{env:?}");
    }
}

#[test]
fn a_worker_pods_environment_has_its_identity_and_master_and_nothing_that_changes() {
    let pod = worker(&request(), 7, 1);
    assert_eq!(pod["metadata"]["name"], "mnist-w-7");
    assert_eq!(pod["metadata"]["namespace"], "ml");
    let labels = &pod["metadata"]["labels"];
    assert_eq!(
        (&labels["elasticdl/launch"], &labels["elasticdl/anchor"]),
        (&json!("7"), &json!("anchor-uid"))
    );
    let container = &pod["spec"]["containers"][0];
    assert_eq!(
        (&container["command"], &container["args"]),
        (&json!(["/bin/train"]), &json!(["--hidden"]))
    );
    let env = container["env"].as_array().unwrap();
    let value = |name: &str| env.iter().find(|v| v["name"] == name).map(|v| v["value"].clone());
    assert_eq!(value("ELASTICDL_JOB"), Some(json!("mnist")));
    assert_eq!(value("ELASTICDL_LAUNCH"), Some(json!("7")));
    assert_eq!(value("ELASTICDL_MASTER"), Some(json!("10.0.0.1:7070")));
    assert_eq!(value("ELASTICDL_MASTER_TIMEOUT_MS"), Some(json!("30000")));
    assert_eq!(value("ELASTICDL_TOKEN_FILE"), Some(json!("/etc/elasticdl/token")));
    assert_eq!(value("ELASTICDL_CA_FILE"), Some(json!("/etc/elasticdl/ca.crt")));
    let [name, _] = master_dns_names("mnist", "ml");
    assert_eq!(value("ELASTICDL_MASTER_NAME"), Some(json!(name)));
    assert_eq!(value("A"), Some(json!("b")));
    assert!(
        !env.iter()
            .any(|v| v["name"].as_str().unwrap().contains("RANK") || v["name"] == "WORLD_SIZE")
    );
    let resources = json!({
        "requests": {"cpu": "2", "memory": "1Gi", "nvidia.com/gpu": "1"},
        "limits": {"memory": "1Gi", "nvidia.com/gpu": "1"}
    });
    assert_eq!(container["resources"], resources);
    let data =
        container["volumeMounts"].as_array().unwrap().iter().find(|m| m["mountPath"] == "/data");
    assert_eq!(data.unwrap()["name"], "volume-0");
}

#[test]
fn a_pods_labels_name_its_launch_and_slot() {
    let pod = worker(&request(), 12, 3);
    assert_eq!(pod["metadata"]["name"], format!("{}-w-12", request().task.job.name));
    let labels = &pod["metadata"]["labels"];
    assert_eq!(
        (&labels["elasticdl/launch"], &labels["elasticdl/index"]),
        (&json!("12"), &json!("3"))
    );
    let pod = serde_json::from_value(pod).unwrap();
    assert_eq!(launch_and_slot(&pod), Some((LaunchId(12), 3)));
}

#[test]
fn several_workers_of_a_pod_share_cpus_and_memory() {
    let one = worker(&request(), 1, 0);
    let mut request = request();
    request.task.job.workers_per_pod = 4;
    let pod = worker(&request, 5, 4);
    assert_eq!(
        (&pod["metadata"]["name"], &pod["metadata"]["labels"]["elasticdl/index"]),
        (&json!("mnist-w-5"), &json!("4"))
    );
    let variable = |pod: &Value, name: &str| {
        let env = pod["spec"]["containers"][0]["env"].as_array().unwrap().clone();
        env.into_iter().find(|v| v["name"] == name)
    };
    let cpus = json!({"resourceFieldRef": {"resource": "requests.cpu"}});
    assert_eq!(variable(&pod, "ELASTICDL_WORKERS").unwrap()["value"], "4");
    assert_eq!(variable(&pod, "ELASTICDL_LAUNCH").unwrap()["value"], "5");
    assert_eq!(variable(&pod, "ELASTICDL_CPUS").unwrap()["valueFrom"], cpus);
    assert_eq!(variable(&pod, "RAYON_NUM_THREADS"), None);
    assert_eq!(variable(&pod, "CUDA_CACHE_PATH").unwrap()["value"], "/tmp/cuda");
    for threads in ["RAYON_NUM_THREADS", "OMP_NUM_THREADS"] {
        assert_eq!(variable(&one, threads).unwrap()["valueFrom"], cpus);
    }
    assert_eq!(
        (variable(&one, "ELASTICDL_WORKERS"), variable(&one, "ELASTICDL_CPUS")),
        (None, None)
    );
    let memory = |pod: &Value| {
        let volumes = pod["spec"]["volumes"].as_array().unwrap();
        let is_memory = |v: &&Value| v["emptyDir"]["medium"] == "Memory";
        let names: Vec<String> =
            volumes.iter().filter(is_memory).map(|v| v["name"].to_string()).collect();
        let mounts = pod["spec"]["containers"][0]["volumeMounts"].as_array().unwrap();
        let mounts = mounts.iter().filter(|m| m["mountPath"] == "/dev/shm").count();
        (names.len(), mounts)
    };
    assert_eq!((memory(&one), memory(&pod)), ((0, 0), (1, 1)));
    // The user's own volume stays.
    request.pods.volumes = parse_volumes("host_path=/dev/shm,mount_path=/dev/shm").unwrap();
    assert_eq!(memory(&worker(&request, 5, 4)), (0, 1));
}

#[test]
fn nothing_runs_until_all_objects_exist() {
    let objects = objects(&request());
    assert_eq!(objects.job.spec.unwrap().parallelism, Some(0));
}

#[test]
fn the_service_selects_the_master_and_no_worker() {
    let objects = objects(&request());
    let selector = objects.service.spec.unwrap().selector.unwrap();
    let matches =
        |labels: &Value| selector.iter().all(|(key, value)| labels[key] == value.as_str());
    let master = serde_json::to_value(objects.job.spec.unwrap().template.metadata).unwrap();
    assert!(matches(&master["labels"]));
    assert!(!matches(&worker(&request(), 1, 1)["metadata"]["labels"]));
    let text: Vec<String> = selector.iter().map(|(key, value)| format!("{key}={value}")).collect();
    assert_eq!(master_selector("mnist"), text.join(","));
}

#[test]
fn the_service_routes_only_to_a_ready_master() {
    let objects = objects(&request());
    assert_eq!(objects.service.spec.unwrap().publish_not_ready_addresses, None);
    let spec = serde_json::to_value(objects.job.spec.unwrap().template.spec).unwrap();
    let container = &spec["containers"][0];
    let get = |path: &str| json!({"path": path, "port": "metrics"});
    assert_eq!(container["readinessProbe"]["httpGet"], get("/readyz"));
    assert_eq!(container["readinessProbe"]["periodSeconds"], 1);
    assert_eq!(container["livenessProbe"]["httpGet"], get("/healthz"));
}

#[test]
fn cpus_are_limited_only_where_the_user_sets_a_limit() {
    let mut request = request();
    request.pods.worker_resources = parse_resources("cpu=2,memory=1Gi,limits.cpu=4").unwrap();
    let resources = json!({
        "requests": {"cpu": "2", "memory": "1Gi"},
        "limits": {"cpu": "4", "memory": "1Gi"}
    });
    assert_eq!(worker(&request, 1, 0)["spec"]["containers"][0]["resources"], resources);
}

#[test]
fn pods_of_table_servers_have_resources_of_their_own() {
    let mut request = request();
    assert!(!objects(&request).anchor.data.unwrap().contains_key(TABLE_SERVER_POD));
    request.task.job.options.table_servers = 2;
    let memory = |request: &Request| {
        let data = objects(request).anchor.data.unwrap();
        let memory = |key: &str| {
            let pod: Value = serde_json::from_str(&data[key]).unwrap();
            pod["spec"]["containers"][0]["resources"]["requests"]["memory"].clone()
        };
        [WORKER_POD, TABLE_SERVER_POD].map(memory)
    };
    assert_eq!(memory(&request), ["1Gi", "1Gi"]);
    request.pods.table_server_resources = Some(parse_resources("cpu=1,memory=32Gi").unwrap());
    assert_eq!(memory(&request), ["1Gi", "32Gi"]);
}

#[test]
fn a_task_round_trips_through_the_anchor() {
    let request = request();
    let anchor = objects(&request).anchor;
    let task: Task = serde_json::from_str(&anchor.data.unwrap()[TASK]).unwrap();
    assert_eq!(task, request.task);
}

#[test]
fn options_that_do_not_fit_into_the_anchor_are_refused() {
    let mut request = request();
    request.program.push("x".repeat(200 << 10));
    assert!(Objects::new(&request, credentials()).is_ok());
    request.program.push("x".repeat(40 << 10));
    let error = Objects::new(&request, credentials()).unwrap_err().to_string();
    assert!(error.contains("at most 240 KiB"), "{error}");
}
