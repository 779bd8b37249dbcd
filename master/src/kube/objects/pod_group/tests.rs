//! The PodGroups of each scheduler, literally, and checked against schemas where there are some.

use super::*;
use crate::kube::gang::POD_GROUPS;
use crate::kube::options::parse_resources;

fn options(scheduler: GangScheduler) -> GangOptions {
    let resources = parse_resources("cpu=500m,memory=1.5Gi,nvidia.com/gpu=1,limits.cpu=2").unwrap();
    let queue = scheduler.has_queues().then(|| "team".to_owned());
    GangOptions::new(scheduler, queue, 4, &resources, Some("elasticdl-core".into()))
}

fn anchor() -> ObjectMeta {
    serde_json::from_value(json!({"name": "mnist", "uid": "anchor", "namespace": "ml"})).unwrap()
}

#[test]
fn pod_groups_have_the_size_the_resources_and_the_queue_of_the_core() {
    let spec = |scheduler| {
        pod_group(&options(scheduler), "mnist-g1", &anchor()).map(|group| group["spec"].clone())
    };
    let resources = json!({"cpu": "2000m", "memory": "6Gi", "nvidia.com/gpu": "4"});
    assert_eq!(spec(GangScheduler::Kueue), None, "Kueue makes Workloads of pods by itself");
    let volcano = json!({
        "minMember": 4, "minResources": resources, "queue": "team",
        "priorityClassName": "elasticdl-core"
    });
    assert_eq!(spec(GangScheduler::Volcano), Some(volcano));
    let native = json!({
        "schedulingPolicy": {"gang": {"minCount": 4}}, "priorityClassName": "elasticdl-core"
    });
    assert_eq!(spec(GangScheduler::Native), Some(native));
    // The first version has no priority.
    let first = GangOptions { version: "v1alpha2".into(), ..options(GangScheduler::Native) };
    let first = pod_group(&first, "mnist-g1", &anchor()).unwrap();
    assert_eq!(first["apiVersion"], "scheduling.k8s.io/v1alpha2");
    assert_eq!(first["spec"], json!({"schedulingPolicy": {"gang": {"minCount": 4}}}));
}

#[test]
fn a_pod_group_goes_with_its_job() {
    let group = pod_group(&options(GangScheduler::Volcano), "mnist-g1", &anchor()).unwrap();
    assert_eq!(group["apiVersion"], "scheduling.volcano.sh/v1beta1");
    assert_eq!(
        (&group["kind"], &group["metadata"]["name"]),
        (&"PodGroup".into(), &"mnist-g1".into())
    );
    let owner = &group["metadata"]["ownerReferences"][0];
    assert_eq!((&owner["kind"], &owner["uid"]), (&"ConfigMap".into(), &"anchor".into()));
    assert_eq!(group["metadata"]["namespace"], "ml");
}

/// PodGroups are valid by the CustomResourceDefinitions in `ELASTICDL_CRDS` (YAML files), and have
/// no field that the server would drop.
#[test]
#[ignore = "needs ELASTICDL_CRDS, a folder of the schedulers' definitions"]
fn pod_groups_fit_the_schemas_of_their_definitions() {
    let folder = std::env::var_os("ELASTICDL_CRDS").expect("ELASTICDL_CRDS is a folder");
    let mut checked = 0;
    for file in std::fs::read_dir(folder).unwrap() {
        let text = std::fs::read_to_string(file.unwrap().path()).unwrap();
        for definition in serde_saphyr::from_multiple::<Value>(&text).unwrap() {
            let group = pod_group(&options(GangScheduler::Volcano), "mnist-g1", &anchor()).unwrap();
            if let Some(schema) = schema_of(&definition, group["apiVersion"].as_str().unwrap()) {
                assert_eq!(first_misfit(schema, &group, "PodGroup"), None);
                checked += 1;
            }
        }
    }
    assert!(checked > 0, "no definition of PodGroups is in the folder");
}

/// The schema of PodGroups of this version, if it is defined there.
fn schema_of<'a>(definition: &'a Value, api_version: &str) -> Option<&'a Value> {
    let spec = &definition["spec"];
    let (group, version) = api_version.split_once('/')?;
    if spec["group"] != group || spec["names"]["plural"] != POD_GROUPS {
        return None;
    }
    let versions = spec["versions"].as_array()?;
    versions.iter().find(|v| v["name"] == version)?.pointer("/schema/openAPIV3Schema")
}

/// What of a value does not fit a structural schema. Unknown fields don't fit.
fn first_misfit(schema: &Value, value: &Value, path: &str) -> Option<String> {
    let is_open = schema["x-kubernetes-int-or-string"] == true;
    let fits = match schema["type"].as_str() {
        _ if is_open => value.is_string() || value.is_i64() || value.is_u64(),
        Some("object") => value.is_object(),
        Some("array") => value.is_array(),
        Some("string") => value.is_string(),
        Some("integer") => value.is_i64() || value.is_u64(),
        Some("boolean") => value.is_boolean(),
        other => return Some(format!("{path}: the schema has the type {other:?}")),
    };
    if !fits {
        return Some(format!("{path} is {value}"));
    }
    if value.as_i64().zip(schema["minimum"].as_i64()).is_some_and(|(value, least)| value < least) {
        return Some(format!("{path} is {value}, too low"));
    }
    let fields = value.as_object().into_iter().flatten();
    fields.into_iter().find_map(|(key, value)| {
        let path = format!("{path}.{key}");
        // The schema of metadata is built in.
        let is_built_in = path == "PodGroup.metadata";
        match (schema["properties"].get(key), schema.get("additionalProperties")) {
            _ if is_built_in => None,
            (Some(schema), _) | (None, Some(schema)) => first_misfit(schema, value, &path),
            (None, None) => Some(format!("{path} is no field")),
        }
    })
}

#[test]
fn the_check_of_schemas_finds_misfits() {
    let schema = json!({"type": "object", "properties": {
        "minMember": {"type": "integer", "minimum": 1},
        "minResources": {
            "type": "object", "additionalProperties": {"x-kubernetes-int-or-string": true}
        },
    }});
    let misfit = |value: Value| first_misfit(&schema, &value, "spec");
    assert_eq!(misfit(json!({"minMember": 4, "minResources": {"cpu": "4", "gpu": 4}})), None);
    for (value, expected) in [
        (json!({"minMembers": 4}), "spec.minMembers is no field"),
        (json!({"minMember": "4"}), "spec.minMember is \"4\""),
        (json!({"minMember": 0}), "spec.minMember is 0, too low"),
        (json!({"minResources": {"cpu": true}}), "spec.minResources.cpu is true"),
    ] {
        assert_eq!(misfit(value).as_deref(), Some(expected));
    }
}
