//! A job that is declared as a Job is applied twice, changed and deleted with `kubectl` alone; its
//! pod may be lost, and what a running job can't change is refused.

use serde_json::Value;

use elasticdl_tests::cluster::{Namespace, kubectl, must, text};

use crate::{cluster_tests, namespace};

/// The document of a job.
fn document(namespace: &Namespace, num_workers: u32, seed: u32) -> String {
    format!(
        r#"apiVersion: batch/v1
kind: Job
metadata:
  name: declared
  annotations:
    elasticdl/options: |
      training-data = "/data"
      volume = "{signs}"
      num-workers = {num_workers}
      seed = {seed}
      num-epochs = 50
      master-resources = "cpu=10m,memory=64Mi"
      worker-resources = "cpu=10m,memory=64Mi"
      program = ["counting", "--records", "6000", "--micros-per-record", "3000",
                 "--hurry-when", "/signs/declared"]
spec:
  template:
    spec:
      serviceAccountName: elasticdl-declare
      restartPolicy: Never
      containers:
        - name: declare
          image: {image}
          command: [elasticdl, declare]
          resources: {{requests: {{cpu: 10m, memory: 64Mi}}, limits: {{memory: 64Mi}}}}
"#,
        signs = namespace.signs(),
        image = namespace.image(),
    )
}

/// The Job that declares the job.
fn declaring(namespace: &Namespace) -> Option<Value> {
    let get = ["get", "job", "declared", "-o", "json", "--ignore-not-found"];
    let output = must(kubectl().args(["--namespace", namespace.name()]).args(get));
    serde_json::from_slice(&output.stdout).ok()
}

fn condition(job: &Value) -> String {
    let conditions = job["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let is_true = conditions.iter().filter(|condition| condition["status"] == "True");
    let mut types = is_true.filter_map(|condition| condition["type"].as_str());
    // Newer servers say first that the Job is about to end.
    let end = types.find(|&of| of != "SuccessCriteriaMet" && of != "FailureTarget");
    end.unwrap_or_default().to_owned()
}

/// Waits for an Event about the declaring Job.
fn wait_for_report(namespace: &Namespace, reason: &str, words: &str) {
    let about = format!("involvedObject.name=declared,reason={reason}");
    namespace.wait_for("declared", &format!("an Event {reason}: {words}"), || {
        let get = ["get", "events", "-o", "json", "--field-selector", &about];
        let output = must(kubectl().args(["--namespace", namespace.name()]).args(get));
        let list: Value = serde_json::from_slice(&output.stdout).unwrap();
        let says = |event: &Value| event["message"].as_str().is_some_and(|m| m.contains(words));
        list["items"].as_array()?.iter().any(says).then_some(())
    });
}

fn a_declared_job_is_applied_changed_and_deleted_with_kubectl() {
    let namespace = namespace("declared");
    namespace.apply_shipped("rbac-declared.yaml");
    let trains = |workers: usize| {
        namespace.wait_for("declared", "the group trains", || {
            let status = namespace.status("declared")?;
            (status.members().count() == workers && status.step > 0).then_some(status.generation)
        })
    };
    namespace.apply(&document(&namespace, 2, 0));
    let generation = trains(2);
    // The document stays what the cluster has, applied twice or not.
    namespace.apply(&document(&namespace, 2, 0));
    let diff = namespace.diff(&document(&namespace, 2, 0));
    assert!(diff.status.success(), "{}", text(&diff));
    assert_eq!(trains(2), generation);
    let mut again = namespace.train("declared", &["--if-not-exists", "--seed", "7"], &[]);
    let again = again.output().unwrap();
    assert!(again.status.success(), "{}", text(&again));
    for part in ["exists already", "and has not ended: nothing is submitted", "--seed is 0, not 7"]
    {
        assert!(text(&again).contains(part), "{part}: {}", text(&again));
    }
    namespace.apply(&document(&namespace, 3, 0));
    wait_for_report(&namespace, "ChangeRequested", "num-workers = 3");
    trains(3);
    // Another pod takes the job up, and what the document asks for meanwhile.
    let selector = "job-name=declared";
    let pods = namespace.get("pods", selector);
    namespace.delete_pod(pods[0]["metadata"]["name"].as_str().unwrap(), &["--wait=false"]);
    let options = "max-workers = 1\n      weight = 2\n      seed";
    let one = document(&namespace, 1, 7).replace("seed", options);
    namespace.apply(&one);
    let changed = "max-workers = 1, num-workers = 1, weight = 2";
    wait_for_report(&namespace, "ChangeRequested", changed);
    wait_for_report(&namespace, "OptionsRefused", "goes on as it is: `seed` is 0, not 7");
    trains(1);
    let status = namespace.status("declared").unwrap();
    assert_eq!((status.workers_min, status.workers_max), (1, 1));
    namespace.hurry("declared");
    let job = namespace.wait_for("declared", "the Job is complete", || {
        declaring(&namespace).filter(|job| !condition(job).is_empty())
    });
    assert_eq!(condition(&job), "Complete", "{job}");
    namespace.wait_for("declared", "both Jobs tell the state", || {
        let count = |told: &str| namespace.get("jobs", told).len();
        let all = "elasticdl/state=completed,elasticdl/progress=100";
        ([count("elasticdl/state=completed"), count(all)] == [2, 1]).then_some(())
    });
    let summary = namespace.summary("declared").unwrap();
    assert_eq!((&*summary.state, summary.records.missing), ("completed", 0));
    must(kubectl().args(["--namespace", namespace.name(), "delete", "job", "declared"]));
    namespace
        .wait_for("declared", "nothing is left", || namespace.leftovers().is_empty().then_some(()));
}

fn options_that_are_none_fail_the_job_that_declares_them() {
    let namespace = namespace("undeclared");
    namespace.apply_shipped("rbac-declared.yaml");
    namespace.apply(&document(&namespace, 2, 0).replace("seed", "sede"));
    let job = namespace.wait_for("declared", "the Job has failed", || {
        declaring(&namespace).filter(|job| !condition(job).is_empty())
    });
    assert_eq!(condition(&job), "Failed", "{job}");
    wait_for_report(&namespace, "JobFailed", "`sede` is not a key; is `seed` meant?");
    assert_eq!(namespace.leftovers(), [""; 0]);
}

cluster_tests![
    a_declared_job_is_applied_changed_and_deleted_with_kubectl,
    options_that_are_none_fail_the_job_that_declares_them,
];
