//! Templates of pods.

use super::*;
use crate::kube::objects::names::{MASTER, WORKER};
use crate::kube::options::TemplateError;

/// A job, the template of whose pods with the container `own` is this.
fn request_with(own: &str, part: &Value) -> Request {
    let mut request = request();
    if own == MASTER {
        request.pods.master_pod_template = template_of(part);
    } else {
        request.pods.worker_pod_template = template_of(part);
    }
    request
}

/// The pod with the container `own` and this template.
fn pod_with(own: &str, part: &Value) -> Value {
    let request = request_with(own, part);
    if own == MASTER { master(&request) } else { worker(&request, 1, 1) }
}

/// The error about this template.
fn refused(own: &str, part: &Value) -> String {
    match Objects::new(&request_with(own, part), credentials()) {
        Err(ObjectsError::Template(error)) => error.to_string(),
        other => panic!("{own} {part}: {:?}", other.map(|objects| objects.job)),
    }
}

#[test]
fn a_template_is_merged_by_name_into_the_pods_of_the_master_and_of_the_workers() {
    for (own, image) in [(MASTER, "elasticdl:1"), (WORKER, "train:1")] {
        let mut template = json!({
            "metadata": {"labels": {"team": "x"}, "annotations": {"note": "any text / here"}},
            "spec": {
                "nodeSelector": {"disk": "ssd"},
                "runtimeClassName": "nvidia",
                "securityContext": {"runAsUser": 1000, "fsGroupChangePolicy": null},
                "priorityClassName": "high",
                "initContainers": [{"name": "side", "image": "i", "restartPolicy": "Always"}],
                "containers": [
                    {
                        "name": own, "workingDir": "/w", "imagePullPolicy": "Never",
                        "resources": {"claims": [{"name": "gpu"}]},
                        "env": [{"name": "A", "value": "c"}, {"name": "B", "value": "d"}],
                        "volumeMounts": [{"name": "more", "mountPath": "/more"}]
                    }
                ],
                "volumes": [{"name": "tmp", "emptyDir": {"medium": "Memory"}}]
            }
        });
        // The master's Job would wait for a container beside the master.
        let beside = if own == WORKER { vec!["beside"] } else { vec![] };
        let containers = template["spec"]["containers"].as_array_mut().unwrap();
        containers.extend(beside.iter().map(|name| json!({"name": name, "image": "i"})));
        let pod = pod_with(own, &template);
        let (meta, spec) = (&pod["metadata"], &pod["spec"]);
        assert_eq!(
            (&meta["labels"]["team"], &meta["labels"]["elasticdl/job"]),
            (&json!("x"), &json!("mnist"))
        );
        assert_eq!(meta["annotations"]["note"], "any text / here");
        let selector = json!({"disk": "ssd", "kubernetes.io/os": "linux"});
        assert_eq!(spec["nodeSelector"], selector);
        assert_eq!(
            (&spec["runtimeClassName"], &spec["priorityClassName"]),
            (&json!("nvidia"), &json!("high"))
        );
        let context = &spec["securityContext"];
        assert_eq!((&context["runAsUser"], &context["runAsNonRoot"]), (&json!(1000), &json!(true)));
        assert_eq!(context["fsGroupChangePolicy"], Value::Null);
        let containers = spec["containers"].as_array().unwrap();
        let names = containers.iter().map(|c| c["name"].as_str().unwrap()).collect::<Vec<_>>();
        assert_eq!(names, [vec![own], beside].concat());
        assert_eq!(spec["initContainers"][0]["name"], "side");
        let container = &containers[0];
        assert_eq!((&container["image"], &container["workingDir"]), (&json!(image), &json!("/w")));
        assert_eq!(container["imagePullPolicy"], "Never");
        assert!(container["resources"]["claims"].is_array());
        let env = container["env"].as_array().unwrap();
        let values = |name: &str| {
            env.iter().filter(|v| v["name"] == name).map(|v| v["value"].clone()).collect::<Vec<_>>()
        };
        assert_eq!((values("A"), values("B")), (vec![json!("c")], vec![json!("d")]));
        let mounts = container["volumeMounts"].as_array().unwrap();
        assert!(
            ["/etc/elasticdl", "/tmp", "/more"]
                .iter()
                .all(|path| mounts.iter().any(|m| m["mountPath"] == *path))
        );
        let volumes = spec["volumes"].as_array().unwrap();
        let tmp = &volumes.iter().find(|v| v["name"] == "tmp").unwrap()["emptyDir"];
        assert!(tmp["medium"] == "Memory" && tmp["sizeLimit"].is_string(), "{tmp}");
    }
}

#[test]
fn no_template_changes_what_the_job_needs() {
    for own in [MASTER, WORKER] {
        let container = |field: Value| {
            let mut container = json!({"name": own});
            container.as_object_mut().unwrap().extend(field.as_object().unwrap().clone());
            json!({"containers": [container]})
        };
        let variable = |name: &str| container(json!({"env": [{"name": name, "value": "x"}]}));
        let mount =
            |path: &str| container(json!({"volumeMounts": [{"name": "tmp", "mountPath": path}]}));
        let probe = json!({"exec": {"command": ["true"]}});
        let both = [
            (json!({"restartPolicy": "Always"}), "spec.restartPolicy: it must be Never"),
            (json!({"restartPolicy": null}), "spec.restartPolicy"),
            (json!({"activeDeadlineSeconds": 60}), "spec.activeDeadlineSeconds: --deadline"),
            (json!({"terminationGracePeriodSeconds": 60}), "spec.terminationGracePeriodSeconds"),
            (json!({"volumes": [{"name": "token", "emptyDir": {}}]}), "spec.volumes[token]"),
            (json!({"volumes": null}), "spec.volumes[token]"),
            (json!({"containers": null}), "must stay"),
            (container(json!({"args": ["x"]})), "].args: "),
            (container(json!({"command": ["x"]})), "].command: "),
            (container(json!({"image": "other"})), "image: it is set by --"),
            (container(json!({"resources": {"limits": {"cpu": "9"}}})), "-resources"),
            (container(json!({"resources": {"requests": {"cpu": "9"}}})), "-resources"),
            (container(json!({"volumeMounts": null})), "volumeMounts[/etc/elasticdl]"),
            (container(json!({"env": null})), "].env["),
            (mount("/etc/elasticdl"), "volumeMounts[/etc/elasticdl]"),
            (mount("/etc//elasticdl/"), "volumeMounts[/etc//elasticdl/]"),
            (mount("/etc/elasticdl/token"), "volumeMounts[/etc/elasticdl/token]"),
            (json!({"serviceAccountName": "admin"}), "service-account"),
            (json!({"serviceAccount": "admin"}), "service-account"),
        ];
        let masters = [
            (json!({"automountServiceAccountToken": false}), "spec.automountServiceAccountToken"),
            (container(json!({"ports": [{"containerPort": 80}]})), "ports: the job's Service"),
            (container(json!({"livenessProbe": null})), "livenessProbe"),
            (container(json!({"readinessProbe": probe})), "readinessProbe"),
            (container(json!({"startupProbe": probe})), "startupProbe"),
            (
                json!({"containers": [{"name": "side", "image": "i"}]}),
                "spec.containers[side]: the Job",
            ),
            (variable("POD_NAME"), "spec.containers[master].env[POD_NAME]"),
            (variable("POD_UID"), "spec.containers[master].env[POD_UID]"),
            (variable("POD_IP"), "spec.containers[master].env[POD_IP]"),
        ];
        let workers = [
            (json!({"automountServiceAccountToken": true}), "spec.automountServiceAccountToken"),
            (json!({"volumes": [{"name": "master", "emptyDir": {}}]}), "volumes[master]"),
        ];
        let own_rows = if own == MASTER { &masters[..] } else { &workers[..] };
        for (part, expected) in both.iter().chain(own_rows) {
            let error = refused(own, part);
            assert!(error.starts_with("--worker-pod-template t.yaml: spec."), "{error}");
            assert!(error.contains(expected), "{own} {part}: {error}");
        }
        // What elasticdl sets may be repeated.
        let pod = pod_with(own, &json!({"restartPolicy": "Never"}));
        assert_eq!(pod, pod_with(own, &json!({})));
    }
}

#[test]
fn an_invalid_template_is_refused_with_the_path_of_the_error() {
    let error = |part: &Value| -> TemplateError {
        PodTemplate::parse("--master-pod-template m.yaml", &part.to_string()).unwrap_err()
    };
    let table = [
        (json!({"nodeNmae": "n"}), "spec.nodeNmae: pods have no such field"),
        (json!({"containers": [{"name": "a"}, {"imagee": "x"}]}), "spec.containers[1].imagee: "),
        // No value makes a field known.
        (json!({"nodeSelektor": {}}), "spec.nodeSelektor: pods have no such field"),
        (json!({"nodeSelektor": null}), "spec.nodeSelektor: pods have no such field"),
        (json!({"containers": [{"name": "a", "envv": []}]}), "spec.containers[0].envv: pods have"),
        (
            json!({"terminationGracePeriodSeconds": "ten"}),
            "spec.terminationGracePeriodSeconds: it is a text, and must be a number",
        ),
        (json!({"priority": 1_u64 << 40}), "spec.priority: 1099511627776 is not possible"),
        (json!({"containers": "a"}), "spec.containers: it is a text, and must be a list"),
        (json!({"nodeSelector": ["a"]}), "spec.nodeSelector: it is a list, and must be a mapping"),
        (json!({"containers": [null]}), "spec.containers[0]: the entry is empty"),
        (
            json!({"nodeSelector": {"a": 1}}),
            "spec.nodeSelector.a: it is a number, and must be a text",
        ),
        (
            json!({"containers": [{"name": "a", "env": [{"name": "ELASTICDL_JOB"}]}]}),
            "spec.containers[a].env[ELASTICDL_JOB]: the variable is set by elasticdl",
        ),
        (
            json!({"kind": "Deployment", "spec": {"template": {}}}),
            "kind: the file must be a part of",
        ),
        (json!({"kind": "Pod", "apiVersion": "apps/v1"}), "apiVersion: the file must be a part of"),
        (json!({"kind": null, "hostname": "h"}), "kind: the file must be a part of a pod"),
        (json!({"kind": "Pod", "spec": {"template": {}, "x": 1}}), "spec.template: "),
        (json!({"kind": "PodTemplate", "spec": {}}), "template: a PodTemplate has a pod in"),
        (
            json!({"kind": "PodTemplate", "metadata": {}, "template": {}}),
            "metadata: `template` has all",
        ),
        (json!({"spec": {}, "nodeName": "n"}), "nodeName: a template has `metadata` and `spec`"),
        (json!({"metadata": {"name": "n"}}), "metadata.name: "),
        (
            json!({"metadata": {"labels": {"elasticdl/job": "x"}}}),
            "metadata.labels.elasticdl/job: ",
        ),
        (json!({"metadata": {"labels": {"app.kubernetes.io/name": "x"}}}), "set by elasticdl"),
        (json!({"metadata": {"labels": {"a": "b c"}}}), "metadata.labels.a: "),
        (json!({"metadata": {"labels": {"a": true}}}), "metadata.labels.a: "),
        (json!({"metadata": {"annotations": {"no te": "x"}}}), "metadata.annotations.no te: "),
        (json!({"metadata": {"annotations": []}}), "metadata.annotations: "),
        (json!([]), "the file: it must be a mapping"),
        (json!("text"), "the file: it must be a mapping"),
    ];
    for (part, expected) in table {
        let error = error(&part).to_string();
        assert!(error.starts_with("--master-pod-template m.yaml: "), "{error}");
        assert!(error.contains(expected), "{part}: {error}");
    }
    for (text, expected) in [
        ("a:\n  - b\n c: [", "o: the file: it is not YAML: see line 3, column "),
        ("a: 1\na: 2\n", "o: the file: it has a key twice: see line 2, column 1"),
        ("a: 1\n---\nb: 2\n", "o: the file: it has several documents, separated by `---`; "),
    ] {
        let error = PodTemplate::parse("o", text).unwrap_err().to_string();
        assert!(error.starts_with(expected) && !error.contains('\n'), "{error}");
    }
}

#[test]
fn a_template_may_be_a_pod_a_podtemplate_or_a_bare_spec_and_may_remove_entries() {
    let spec = json!({"nodeSelector": {"disk": "ssd"}, "hostname": null});
    let parse = |file: &Value| PodTemplate::parse("o", &file.to_string()).unwrap();
    let bare = parse(&spec);
    assert_eq!(bare.spec, spec);
    for file in [
        json!({"kind": "Pod", "apiVersion": "v1", "spec": spec}),
        json!({"kind": "PodTemplate", "apiVersion": "v1", "template": {"spec": spec}}),
        json!({"kind": "Pod", "nodeSelector": {"disk": "ssd"}, "hostname": null}),
    ] {
        assert_eq!(parse(&file), bare, "{file}");
    }
    for file in [json!({}), json!({"kind": "Pod"}), json!({"metadata": null, "spec": null})] {
        assert_eq!(parse(&file).spec, json!({}), "{file}");
    }
    // Whether or not elasticdl's own pod has what is removed.
    let nulls = json!({"affinity": {"podAffinity": null}, "nodeSelector": {"none": null}});
    for own in [MASTER, WORKER] {
        let mut plain = pod_with(own, &json!({}));
        plain["spec"]["affinity"] = json!({});
        assert_eq!(pod_with(own, &nulls), plain);
    }
}

#[test]
fn pods_are_evicted_from_a_lost_node_within_seconds_unless_the_template_overrides_it() {
    let taint = |name: &str| format!("node.kubernetes.io/{name}");
    let tolerations = |own: &Value| {
        [MASTER, WORKER].map(|container| {
            let pod = pod_with(container, &json!({"tolerations": own}));
            let all = pod["spec"]["tolerations"].as_array().unwrap().clone();
            let fields = ["key", "effect", "tolerationSeconds"];
            all.into_iter().map(|t| fields.map(|field| t[field].clone())).collect::<Vec<_>>()
        })
    };
    let lost = |name: &str| [json!(taint(name)), json!("NoExecute"), json!(20)];
    // The job itself replaces silent workers, but not those that never started there.
    for found in tolerations(&json!([])) {
        assert_eq!(found, [lost("not-ready"), lost("unreachable")]);
    }
    let own = json!([
        {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "gpu", "operator": "Exists", "effect": "NoExecute"},
        {"key": taint("not-ready"), "operator": "Exists", "effect": "NoExecute"}
    ]);
    for found in tolerations(&own) {
        let row = |key: &str, effect: &str| [json!(key), json!(effect), Value::Null];
        let expected = [
            lost("unreachable"),
            row("gpu", "NoSchedule"),
            row("gpu", "NoExecute"),
            row(&taint("not-ready"), "NoExecute"),
        ];
        assert_eq!(found, expected);
    }
}
