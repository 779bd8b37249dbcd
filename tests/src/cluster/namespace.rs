//! A namespace of a real cluster.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use elasticdl_proto::{Status, Summary};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tempfile::{NamedTempFile, TempDir};

use super::kubectl::{apply, kubectl, must};

/// A namespace of the cluster that `$KUBECONFIG` names, created for one test and removed with
/// everything in it.
#[derive(Debug)]
pub struct Namespace {
    name: String,
    elasticdl: PathBuf,
    image: String,
    /// Folder of this machine, which is the node, that its pods mount: files that end the delay per
    /// record.
    signs: TempDir,
}

/// A template of pods, in a file.
pub fn pod_template(text: &str) -> NamedTempFile {
    let file = NamedTempFile::new().expect("there is room for a file");
    fs::write(file.path(), text).expect("there is room for a file");
    file
}

impl Namespace {
    /// Creates a namespace.
    pub fn new(test: &str, elasticdl: impl Into<PathBuf>) -> Self {
        let name = format!("e2e-{test}-{}", std::process::id());
        must(kubectl().args(["create", "namespace", &name]));
        Self::existing(name, elasticdl)
    }

    /// An existing namespace; from now on it belongs to the test, which removes it.
    pub fn existing(name: impl Into<String>, elasticdl: impl Into<PathBuf>) -> Self {
        let image = std::env::var("ELASTICDL_TEST_IMAGE");
        let image = image.unwrap_or_else(|_| "localhost/elasticdl-tests:dev".into());
        let signs = tempfile::tempdir().expect("there is room for a directory");
        // Pods run as an unprivileged user.
        fs::set_permissions(signs.path(), fs::Permissions::from_mode(0o755))
            .expect("it is this user's");
        Self { name: name.into(), elasticdl: elasticdl.into(), image, signs }
    }

    /// Applies the RBAC manifest that users apply for the master's service account.
    pub fn apply_rbac(&self) {
        self.apply_shipped("rbac.yaml");
    }

    /// Applies a manifest of the folder `manifests` to the namespace.
    pub fn apply_shipped(&self, manifest: &str) {
        let root =
            Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a crate lies in its workspace");
        let text = fs::read_to_string(root.join("manifests").join(manifest))
            .expect("the manifest is there");
        self.apply(&text.replace("namespace: elasticdl", &format!("namespace: {}", self.name)));
    }

    /// Runs `kubectl apply` in the namespace.
    pub fn apply(&self, manifest: &str) {
        apply(manifest, &["--namespace", &self.name]);
    }

    /// Sets the namespace's quota of pods, and waits until it is in force.
    pub fn set_pod_quota(&self, pods: u32) {
        let kind = "apiVersion: v1\nkind: ResourceQuota\nmetadata: {name: pods}\n";
        self.apply(&format!("{kind}spec: {{hard: {{pods: {pods}}}}}\n"));
        self.wait_for("", "the quota is in force", || {
            let get = ["get", "resourcequota", "pods", "-o", "jsonpath={.status.hard.pods}"];
            let hard = must(kubectl().args(["--namespace", &self.name]).args(get));
            (hard.stdout == pods.to_string().as_bytes()).then_some(())
        });
    }

    /// The namespace's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The command `elasticdl COMMAND ARGS --namespace NAME`.
    pub fn elasticdl<A: AsRef<OsStr>>(
        &self,
        command: &str,
        args: impl IntoIterator<Item = A>,
    ) -> Command {
        let mut elasticdl = Command::new(&self.elasticdl);
        elasticdl.arg(command).args(args).args(["--namespace", &self.name]).stdin(Stdio::null());
        elasticdl
    }

    /// Runs `kubectl diff` in the namespace: it succeeds if applying the manifest changes nothing.
    pub fn diff(&self, manifest: &str) -> Output {
        let file = NamedTempFile::new().expect("there is room for a file");
        fs::write(file.path(), manifest).expect("there is room for a file");
        let diff = ["--namespace", &self.name, "diff", "-f"];
        kubectl().args(diff).arg(file.path()).output().expect("kubectl starts")
    }

    /// The volume with the files that end the delay per record of jobs, as `--volume` has it.
    pub fn signs(&self) -> String {
        format!("host_path={},mount_path=/signs,read_only=true", self.signs.path().display())
    }

    /// The image with the command and the model under test.
    pub fn image(&self) -> &str {
        &self.image
    }

    /// The command `elasticdl train` of the counting model on the data of the test image.
    pub fn train(&self, job: &str, options: &[&str], program: &[&str]) -> Command {
        self.submission("train", "--training-data", job, options, program)
    }

    /// The command `elasticdl evaluate` or `predict`, with the same model and data.
    pub fn inference(
        &self,
        command: &str,
        job: &str,
        options: &[&str],
        program: &[&str],
    ) -> Command {
        self.submission(command, "--data", job, options, program)
    }

    fn submission(
        &self,
        command: &str,
        data: &str,
        job: &str,
        options: &[&str],
        program: &[&str],
    ) -> Command {
        let signs = self.signs();
        let mut command = self.elasticdl(command, ["--job-name", job]);
        command.args([data, "/data", "--volume", &signs]);
        // Small, so that many jobs fit on one small node, which may be busy otherwise for seconds.
        let defaults = [
            ("--image", self.image.as_str()),
            ("--master-resources", "cpu=10m,memory=64Mi"),
            ("--worker-resources", "cpu=10m,memory=64Mi"),
        ];
        for (option, value) in defaults {
            if !options.contains(&option) {
                command.args([option, value]);
            }
        }
        command
            .args(options)
            .args(["--", "counting", "--hurry-when", &format!("/signs/{job}")])
            .args(program);
        command
    }

    /// Ends the delay per record of the job's workers.
    pub fn hurry(&self, job: &str) {
        fs::write(self.signs.path().join(job), "").expect("there is room for a file");
    }

    /// Objects of a kind, as `kubectl get -o json` shows them.
    pub fn get(&self, kind: &str, selector: &str) -> Vec<Value> {
        let output = must(kubectl().args([
            "--namespace",
            &self.name,
            "get",
            kind,
            "-o",
            "json",
            "--selector",
            selector,
        ]));
        let list: Value = serde_json::from_slice(&output.stdout).expect("kubectl prints JSON");
        list["items"].as_array().cloned().unwrap_or_default()
    }

    /// All worker pods of the job.
    pub fn workers(&self, job: &str) -> Vec<Value> {
        self.get("pods", &format!("elasticdl/job={job},elasticdl/role=worker"))
    }

    /// The worker pods of the job that run and are not being deleted.
    pub fn running_workers(&self, job: &str) -> Vec<Value> {
        let mut pods = self.workers(job);
        pods.retain(|p| {
            p["status"]["phase"] == "Running" && p["metadata"]["deletionTimestamp"].is_null()
        });
        pods
    }

    /// Runs `kubectl delete pod` with these options.
    pub fn delete_pod(&self, name: &str, options: &[&str]) {
        must(kubectl().args(["--namespace", &self.name, "delete", "pod", name]).args(options));
    }

    /// Evicts a pod, as `kubectl drain` does.
    pub fn evict(&self, pod: &str) {
        let eviction = format!(
            r#"{{"apiVersion": "policy/v1beta1", "kind": "Eviction",
                 "metadata": {{"name": "{pod}", "namespace": "{}"}}}}"#,
            self.name
        );
        let file = NamedTempFile::new().expect("there is room for a file");
        fs::write(file.path(), eviction).expect("there is room for a file");
        let path = format!("/api/v1/namespaces/{}/pods/{pod}/eviction", self.name);
        must(kubectl().args(["create", "--raw", &path, "-f"]).arg(file.path()));
    }

    /// The pod of the leading master, once it is ready.
    pub fn leader(&self, job: &str) -> Option<Value> {
        let masters = self.get("pods", &format!("elasticdl/job={job},elasticdl/role=master"));
        let is_ready = |pod: &Value| {
            let conditions = pod["status"]["conditions"].as_array().cloned().unwrap_or_default();
            conditions.iter().any(|c| c["type"] == "Ready" && c["status"] == "True")
        };
        masters
            .into_iter()
            .find(|pod| pod["metadata"]["deletionTimestamp"].is_null() && is_ready(pod))
    }

    /// The status in the job's anchor; `None` while there is none.
    pub fn status(&self, job: &str) -> Option<Status> {
        self.anchor(job, "status")
    }

    /// The summary in the job's anchor; `None` until the job has ended.
    pub fn summary(&self, job: &str) -> Option<Summary> {
        self.anchor(job, "summary")
    }

    /// Number of masters that have led the job; 0 before the first.
    pub fn incarnation(&self, job: &str) -> u64 {
        self.anchor(job, "incarnation").unwrap_or(0)
    }

    /// The value of a key in the job's anchor; `None` if there is none.
    fn anchor<T: DeserializeOwned>(&self, job: &str, key: &str) -> Option<T> {
        let output = kubectl()
            .args([
                "--namespace",
                &self.name,
                "get",
                "configmap",
                job,
                "-o",
                "json",
                "--ignore-not-found",
            ])
            .output()
            .expect("kubectl starts");
        let anchor: Value = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
        let text = anchor["data"][key].as_str()?;
        let value = serde_json::from_str(text);
        Some(value.unwrap_or_else(|error| panic!("{error} in the anchor's {key}: {text}")))
    }

    /// The whole log of the master.
    pub fn master_log(&self, job: &str) -> String {
        let output = self.elasticdl("logs", [job]).output().expect("the command under test starts");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Kills the program in a worker's container from the node.
    pub fn kill_inside(&self, pod: &Value) {
        let pid = Self::process_inside(pod, "counting")
            .expect("the worker's program runs on this machine");
        crate::send(pid, rustix::process::Signal::KILL);
    }

    /// Process id, on this machine, which is the node, of the first process with this name in a
    /// pod's containers.
    pub fn process_inside(pod: &Value, command: &str) -> Option<u32> {
        Self::processes_inside(pod, command).first().copied()
    }

    /// Process ids of all of them, in the order of their starts.
    pub fn processes_inside(pod: &Value, command: &str) -> Vec<u32> {
        let uid = super::uid(pod);
        let is_inside = |pid: &u32| {
            let read =
                |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
            read("cgroup").contains(uid) && read("comm").trim() == command
        };
        let processes = fs::read_dir("/proc").expect("the system shows its processes").flatten();
        let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let mut pids: Vec<u32> = pids.filter(is_inside).collect();
        pids.sort_unstable();
        pids
    }

    /// Waits until `poll` returns a value.
    pub fn wait_for<T>(&self, job: &str, what: &str, mut poll: impl FnMut() -> Option<T>) -> T {
        let deadline = Instant::now() + Duration::from_secs(120);
        loop {
            if let Some(found) = poll() {
                return found;
            }
            if Instant::now() >= deadline {
                let pods = self
                    .get("pods", "")
                    .iter()
                    .map(|p| p["status"].to_string())
                    .collect::<Vec<_>>();
                panic!(
                    "not within two minutes: {what}\n{}\n{}",
                    pods.join("\n"),
                    self.master_log(job)
                );
            }
            std::thread::sleep(Duration::from_millis(300));
        }
    }

    /// Kind and name of every object that elasticdl has created in the namespace and that still
    /// exists.
    pub fn leftovers(&self) -> Vec<String> {
        let selector = "app.kubernetes.io/managed-by=elasticdl";
        let kinds = [
            "jobs",
            "pods",
            "configmaps",
            "secrets",
            "services",
            "leases",
            "networkpolicies",
            "serviceaccounts",
            "roles",
            "rolebindings",
        ];
        let objects = kinds
            .iter()
            .flat_map(|kind| self.get(kind, selector).into_iter().map(move |o| (kind, o)));
        objects.map(|(kind, o)| format!("{kind} {}", o["metadata"]["name"])).collect()
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = kubectl().args(["delete", "namespace", &self.name, "--wait=false"]).output();
    }
}
