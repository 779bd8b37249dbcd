//! The labels, annotations and groups of each scheduler's pods, literally.

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::*;
use crate::kube::options::parse_resources;

fn options(scheduler: GangScheduler) -> GangOptions {
    let resources = parse_resources("cpu=500m,memory=1.5Gi,nvidia.com/gpu=1,limits.cpu=2").unwrap();
    let queue = scheduler.has_queues().then(|| "team".to_owned());
    GangOptions::new(scheduler, queue, 4, &resources, Some("elasticdl-core".into()))
}

/// Labels, annotations and the group of a pod that is marked.
fn marked(scheduler: GangScheduler, gang: Option<&str>, is_core: bool) -> Value {
    let mut pod = Pod::default();
    options(scheduler).mark_template(&mut pod.metadata);
    options(scheduler).mark(&mut pod, gang, is_core);
    let json = options(scheduler).pod_to_json(&pod);
    let part = |pointer: &str| json.pointer(pointer).cloned().unwrap_or(Value::Null);
    json!([
        part("/metadata/labels"),
        part("/metadata/annotations"),
        part("/spec/schedulingGroup/podGroupName"),
    ])
}

#[test]
fn core_pods_of_each_scheduler_are_members_of_a_gang() {
    let gang = Some("mnist-g1");
    let table = [
        (
            GangScheduler::Kueue,
            json!([
                {
                    "elasticdl/gang": "mnist-g1",
                    "kueue.x-k8s.io/queue-name": "team",
                    "kueue.x-k8s.io/pod-group-name": "mnist-g1"
                },
                {"kueue.x-k8s.io/pod-group-total-count": "4"},
                null
            ]),
        ),
        (GangScheduler::Native, json!([{"elasticdl/gang": "mnist-g1"}, null, "mnist-g1"])),
        (
            GangScheduler::Volcano,
            json!([
                {"elasticdl/gang": "mnist-g1"},
                {"scheduling.k8s.io/group-name": "mnist-g1", "volcano.sh/preemptable": "false"},
                null
            ]),
        ),
    ];
    for (scheduler, expected) in table {
        assert_eq!(marked(scheduler, gang, true), expected, "{scheduler:?}");
    }
}

#[test]
fn further_pods_are_single_and_preemptable() {
    assert!(!options(GangScheduler::Native).has_gang(false));
    assert_eq!(marked(GangScheduler::Native, None, false), json!([{}, null, null]));
    assert!(!options(GangScheduler::Kueue).has_gang(false));
    let queued = json!([{"kueue.x-k8s.io/queue-name": "team"}, null, null]);
    assert_eq!(marked(GangScheduler::Kueue, None, false), queued);
    // Volcano evicts members of a group above its minimum only.
    assert!(options(GangScheduler::Volcano).has_gang(false));
    let group = json!({
        "scheduling.k8s.io/group-name": "mnist-g1", "volcano.sh/preemptable": "true"
    });
    let expected = json!([{"elasticdl/gang": "mnist-g1"}, group, null]);
    assert_eq!(marked(GangScheduler::Volcano, Some("mnist-g1"), false), expected);
}

#[test]
fn a_core_of_one_pod_is_no_gang_except_where_the_group_has_the_queue() {
    for (scheduler, expected) in [
        (GangScheduler::Kueue, false),
        (GangScheduler::Native, false),
        (GangScheduler::Volcano, true),
    ] {
        let options = GangOptions { core_pods: 1, ..options(scheduler) };
        assert_eq!(options.has_gang(true), expected, "{scheduler:?}");
    }
}

#[test]
fn the_name_of_a_gang_is_a_label_of_any_job() {
    assert_eq!(gang_name("mnist", LaunchId(17)), "mnist-g17");
    assert!(gang_name(&"a".repeat(40), LaunchId(u64::MAX)).len() <= 63);
}

#[test]
fn quantities_are_multiplied_exactly() {
    for (quantity, count, product) in [
        ("1", 4, "4"),
        ("500m", 4, "2000m"),
        ("1.5Gi", 4, "6Gi"),
        ("0.25", 3, "0.75"),
        ("2.50", 3, "7.5"),
        ("1e3", 2, "2e3"),
        ("340282366920938463463374607431768211455", 2, "340282366920938463463374607431768211455"),
    ] {
        assert_eq!(times(quantity, count), product, "{quantity} times {count}");
    }
}

#[test]
fn masters_may_create_and_delete_pod_groups_of_their_scheduler_only() {
    let rule = |scheduler: GangScheduler| scheduler.master_rule();
    assert_eq!(rule(GangScheduler::Kueue), None);
    let expected = ("scheduling.volcano.sh", "podgroups", &["create", "delete"][..]);
    assert_eq!(rule(GangScheduler::Volcano), Some(expected));
}
