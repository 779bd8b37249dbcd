//! Quotas on limits, limit ranges and webhooks that refuse the master are reported by `elasticdl
//! train` at once; jobs run under any user id.

use std::time::{Duration, Instant};

use elasticdl_tests::cluster::{Job, Namespace, PriorityClass, kubectl, must, pod_template, text};

use crate::{cluster_tests, namespace};

/// Asserts that a submission ends at once with a message that contains these words, and leaves
/// nothing.
fn assert_refused(namespace: &Namespace, options: &[&str], words: &[&str]) {
    let start = Instant::now();
    let output = namespace.train("count", options, &[]).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    for word in words {
        assert!(text(&output).contains(word), "{word}: {}", text(&output));
    }
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    namespace
        .wait_for("count", "nothing is left", || namespace.leftovers().is_empty().then_some(()));
}

fn a_quota_on_limits_is_reported_at_once_and_met_by_options_or_by_a_limit_range() {
    let namespace = namespace("limits");
    namespace.apply(
        "apiVersion: v1
kind: ResourceQuota
metadata: {name: limits}
spec: {hard: {limits.cpu: 4, limits.memory: 4Gi, pods: 10}}
",
    );
    let words = ["create the master's pod", "must specify limits.cpu", "--master-resources"];
    assert_refused(&namespace, &["--num-workers", "1"], &words);
    assert_refused(&namespace, &["--num-workers", "1", "--detach"], &words);
    let resources = "cpu=10m,memory=64Mi,limits.cpu=1";
    let limits = ["--master-resources", resources, "--worker-resources", resources];
    let options = [&["--num-workers", "2"][..], &limits].concat();
    Job::start(&namespace, "count", &options, 0).assert_completes(1);
    namespace.apply(
        "apiVersion: v1
kind: LimitRange
metadata: {name: defaults}
spec: {limits: [{type: Container, default: {cpu: 1}, max: {memory: 1Gi}}]}
",
    );
    Job::start(&namespace, "count", &["--num-workers", "2"], 0).assert_completes(1);
    let large = ["--num-workers", "1", "--master-resources", "cpu=10m,memory=2Gi"];
    assert_refused(&namespace, &large, &["maximum memory usage per Container is 1Gi"]);
}

fn a_quota_that_is_exhausted_is_waited_for() {
    let namespace = namespace("full");
    namespace.set_pod_quota(0);
    let options = ["--num-workers", "1", "--detach"];
    let output = namespace.train("count", &options, &["--records", "6000"]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    assert!(text(&output).contains("the master waits: ") && text(&output).contains("exceeded"));
    namespace.set_pod_quota(5);
    namespace.wait_for("count", "the job completes", || {
        namespace.summary("count").filter(|summary| summary.state == "completed").map(drop)
    });
    assert!(namespace.elasticdl("delete", ["count"]).output().unwrap().status.success());
}

/// A webhook for pods, which is removed with this value.
struct Webhook(String);

impl Drop for Webhook {
    fn drop(&mut self) {
        let kind = "validatingwebhookconfiguration";
        let _ = kubectl().args(["delete", kind, &self.0, "--wait=false"]).output();
    }
}

fn a_webhook_that_refuses_the_masters_pod_is_reported_at_once() {
    let namespace = namespace("webhook");
    let name = namespace.name().to_owned();
    must(kubectl().args(["label", "namespace", &name, &format!("refuses={name}")]));
    let webhook = Webhook(name.clone());
    namespace.apply(&format!(
        "apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingWebhookConfiguration
metadata: {{name: {name}}}
webhooks:
- name: pods.example.com
  admissionReviewVersions: [v1]
  sideEffects: None
  failurePolicy: Fail
  clientConfig: {{service: {{namespace: {name}, name: absent}}}}
  namespaceSelector: {{matchLabels: {{refuses: {name}}}}}
  rules:
  - {{apiGroups: [''], apiVersions: [v1], operations: [CREATE], resources: [pods]}}
"
    ));
    // The API server reads its configuration again after a moment.
    namespace.wait_for("count", "the webhook is in force", || {
        let run = ["run", "probe", "--image=localhost/pause:dev", "--dry-run=server"];
        let output = kubectl().args(["--namespace", &name]).args(run).output().unwrap();
        text(&output).contains("pods.example.com").then_some(())
    });
    let words = ["create the master's pod", "webhook \"pods.example.com\""];
    assert_refused(&namespace, &["--num-workers", "1"], &words);
    drop(webhook);
}

fn a_job_runs_under_a_user_id_that_no_image_knows_with_a_class_for_all_pods() {
    let namespace = namespace("user");
    let class = PriorityClass::new(format!("{}-all", namespace.name()), -30);
    let user = "securityContext: {runAsUser: 1000680000}";
    let template = pod_template(&format!("{user}\npriorityClassName: {}", class.name()));
    let template = template.path().display().to_string();
    let options = ["--num-workers", "2", "--num-epochs", "25"];
    let templates = ["--worker-pod-template", &template, "--master-pod-template", &template];
    let options = [&options[..], &templates].concat();
    let job = Job::start(&namespace, "count", &options, 3000);
    let _ = job.wait_for_group(2);
    let pods = namespace.get("pods", "elasticdl/job=count");
    assert_eq!(pods.len(), 3);
    for pod in pods {
        assert_eq!(pod["spec"]["priorityClassName"], class.name());
        let program = ["elasticdl", "counting"]
            .iter()
            .find_map(|program| Namespace::process_inside(&pod, program))
            .unwrap();
        let status = std::fs::read_to_string(format!("/proc/{program}/status")).unwrap();
        let user = status.lines().find(|line| line.starts_with("Uid:")).unwrap();
        assert!(user.split_whitespace().skip(1).all(|id| id == "1000680000"), "{user}");
    }
    job.assert_completes(25);
}

cluster_tests![
    a_quota_on_limits_is_reported_at_once_and_met_by_options_or_by_a_limit_range,
    a_quota_that_is_exhausted_is_waited_for,
    a_webhook_that_refuses_the_masters_pod_is_reported_at_once,
    a_job_runs_under_a_user_id_that_no_image_knows_with_a_class_for_all_pods,
];
