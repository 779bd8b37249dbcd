//! The pod of a declared job that is ended with the suspension of its Job or TrainJob passes the
//! suspension on, and the next pod the resumption; one that is only lost requests nothing.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use elasticdl_tests::{KubeApi, send};
use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::NamedTempFile;

/// Training job, and its document.
const JOB: &str = "declared";

/// What declares the job: a Job, or a `TrainJob` from which its controller makes a Job.
struct Document {
    api: KubeApi,
    kubeconfig: NamedTempFile,
    is_train_job: bool,
}

impl Document {
    /// A document of a job that an earlier pod has submitted.
    fn new(is_train_job: bool, checkpoints: &str) -> Self {
        let api = KubeApi::start();
        let kubeconfig = NamedTempFile::new().unwrap();
        std::fs::write(kubeconfig.path(), api.kubeconfig("ml")).unwrap();
        let document = Self { api, kubeconfig, is_train_job };
        let options = format!(
            "training-data = '/data'\nvolume = 'claim_name=c,mount_path=/v'\nprogram = ['p']\n\
             num-workers = 2\ncheckpoint-dir = '{checkpoints}'"
        );
        let meta =
            json!({"name": JOB, "uid": "doc", "annotations": {"elasticdl/options": options}});
        document.api.put(document.plural(), json!({"metadata": meta, "spec": {"template": {}}}));
        let declaring = if is_train_job { "declared-node-0" } else { JOB };
        if is_train_job {
            let meta = json!({"name": declaring, "uid": "doc"});
            document.api.put("jobs", json!({"metadata": meta, "spec": {"template": {}}}));
        }
        let owner = json!({
            "apiVersion": "batch/v1", "kind": "Job", "name": declaring, "uid": "doc",
            "controller": true,
        });
        let meta = json!({"name": "pod", "uid": "pod", "ownerReferences": [owner]});
        let spec = json!({"containers": [{"name": "declare", "image": "i:1"}]});
        document.api.put("pods", json!({"metadata": meta, "spec": spec}));
        let output = document
            .elasticdl(&["train", "--image", "i:1", "--job-name", JOB, "--training-data", "/data"])
            .args(["--volume", "claim_name=c,mount_path=/v", "--checkpoint-dir", checkpoints])
            .args(["--num-workers", "2", "--dry-run", "--", "p"])
            .output()
            .unwrap();
        let objects = String::from_utf8(output.stdout).unwrap();
        for mut object in serde_saphyr::from_multiple::<Value>(&objects).unwrap() {
            let plural = match object["kind"].as_str().unwrap() {
                "ConfigMap" => "configmaps",
                "Job" => "jobs",
                _ => continue,
            };
            object["metadata"]["uid"] = plural.into();
            if plural == "jobs" {
                object["metadata"]["ownerReferences"] = json!([owner]);
                object["spec"]["parallelism"] = 1.into();
            }
            document.api.put(plural, object);
        }
        document
    }

    fn plural(&self) -> &'static str {
        if self.is_train_job { "trainjobs" } else { "jobs" }
    }

    fn elasticdl(&self, args: &[&str]) -> Command {
        let mut command = Command::new(crate::PROGRAMS.elasticdl);
        command.args(args).env("KUBECONFIG", self.kubeconfig.path()).stdin(Stdio::null());
        command
    }

    /// Suspends or resumes the document, without an event for its watches.
    fn set_suspended(&self, suspend: bool) {
        let mut document = self.api.get(self.plural(), JOB);
        document["spec"]["suspend"] = suspend.into();
        self.api.put(self.plural(), document);
    }

    /// What is requested of the job.
    fn requested(&self) -> Value {
        self.api.get("configmaps", JOB)["data"]["suspend"].clone()
    }

    /// A pod of the document that follows the job.
    fn pod(&self) -> Child {
        let mut command = self.elasticdl(&["declare", "--pod", "pod"]);
        if self.is_train_job {
            command.args(["--train-job", JOB]);
        }
        let pod = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        for plural in [self.plural(), "configmaps"] {
            let until = Instant::now() + Duration::from_secs(60);
            while !self.api.was_watched(plural, JOB) {
                assert!(Instant::now() < until, "{plural} are not watched");
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        pod
    }
}

/// Ends a pod as the cluster does. Returns what it has printed.
fn end(pod: Child) -> String {
    send(pod.id(), Signal::TERM);
    let ended = pod.wait_with_output().unwrap();
    let printed = [ended.stdout, ended.stderr].map(|text| String::from_utf8(text).unwrap());
    assert_eq!(ended.status.code(), Some(143), "{printed:?}");
    printed.concat()
}

#[test]
fn the_pod_that_ends_passes_a_suspension_on_and_the_next_one_the_resumption() {
    for is_train_job in [false, true] {
        let document = Document::new(is_train_job, "/v/c");
        let printed = end(document.pod());
        assert!(printed.contains("exists already") && !printed.contains("Requested"), "{printed}");
        assert_eq!(document.requested(), Value::Null, "the pod is lost");
        let pod = document.pod();
        document.set_suspended(true);
        let printed = end(pod);
        assert_eq!(document.requested(), "true", "{printed}");
        assert!(printed.contains("ChangeRequested: suspend = true"), "{printed}");
        document.set_suspended(false);
        let printed = end(document.pod());
        assert_eq!(document.requested(), "false", "{printed}");
        assert!(!printed.contains("OptionsRefused"), "{printed}");
    }
}

#[test]
fn a_job_that_would_lose_its_state_goes_on_and_says_so() {
    let document = Document::new(false, "none");
    let pod = document.pod();
    document.set_suspended(true);
    let printed = end(pod);
    assert_eq!(document.requested(), Value::Null);
    assert!(printed.contains("OptionsRefused: ") && printed.contains("checkpoint"), "{printed}");
}
