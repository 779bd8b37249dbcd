//! A namespace of a real cluster, and jobs in it.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// A namespace of the cluster that `$KUBECONFIG` names, made for one test and removed with all that is in it.
#[derive(Debug)]
pub struct Namespace {
    name: String,
    elasticdl: PathBuf,
    image: String,
}

impl Namespace {
    /// Makes one; `None`, with a word to the reader, where no cluster is there.
    ///
    /// # Panics
    /// The cluster that is there does not do what it is told.
    #[must_use]
    #[expect(clippy::print_stdout, reason = "a test that was skipped says so to its reader")]
    pub fn new(test: &str, elasticdl: impl Into<PathBuf>) -> Option<Self> {
        if std::env::var_os("KUBECONFIG").is_none() {
            println!("skipped: {test}: KUBECONFIG is not set; `.ci/cluster` starts a cluster and runs this");
            return None;
        }
        let name = format!("e2e-{test}-{}", std::process::id());
        let image = std::env::var("ELASTICDL_TEST_IMAGE");
        let image = image.unwrap_or_else(|_| "localhost/elasticdl-tests:dev".into());
        let namespace = Self { name, elasticdl: elasticdl.into(), image };
        must(kubectl().args(["create", "namespace", &namespace.name]));
        Some(namespace)
    }

    /// Gives the master's service account its rights, by the manifest that users apply.
    ///
    /// # Panics
    /// It can't be applied.
    pub fn apply_rbac(&self) {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a crate lies in its workspace");
        let text = std::fs::read_to_string(root.join("manifests/rbac.yaml")).expect("the manifest is there");
        self.apply(&text.replace("namespace: elasticdl", &format!("namespace: {}", self.name)));
    }

    /// `kubectl apply`.
    ///
    /// # Panics
    /// It fails.
    pub fn apply(&self, manifest: &str) {
        use std::io::Write as _;
        let mut child = kubectl()
            .args(["--namespace", &self.name, "apply", "-f", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("kubectl starts");
        let mut stdin = child.stdin.take().expect("it was piped");
        stdin.write_all(manifest.as_bytes()).expect("kubectl reads");
        drop(stdin);
        let output = child.wait_with_output().expect("kubectl ends");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    /// The namespace's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// `elasticdl COMMAND ARGS --namespace NAME`.
    #[must_use]
    pub fn elasticdl<A: AsRef<OsStr>>(&self, command: &str, args: impl IntoIterator<Item = A>) -> Command {
        let mut elasticdl = Command::new(&self.elasticdl);
        elasticdl.arg(command).args(args).args(["--namespace", &self.name]).stdin(Stdio::null());
        elasticdl
    }

    /// `elasticdl train` of the counting model on the data of the test image.
    #[must_use]
    pub fn train(&self, job: &str, options: &[&str], program: &[&str]) -> Command {
        let mut command = self.elasticdl("train", ["--image", &self.image, "--job-name", job]);
        command.args(["--training-data", "/data", "--image-pull-policy", "Never", "--worker-timeout", "10s"]);
        // Small, so that many fit on one small node.
        command.args([
            "--master-resources",
            "cpu=10m,memory=64Mi",
            "--worker-resources",
            "cpu=10m,memory=64Mi",
        ]);
        command.args(options).args(["--", "counting"]).args(program);
        command
    }

    /// Objects of a kind, as `kubectl get -o json` shows them.
    ///
    /// # Panics
    /// kubectl fails.
    #[must_use]
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

    /// The names of the job's worker pods that run and are not being deleted.
    #[must_use]
    pub fn running_workers(&self, job: &str) -> Vec<Value> {
        let mut pods = self.get("pods", &format!("elasticdl/job={job},elasticdl/role=worker"));
        pods.retain(|p| p["status"]["phase"] == "Running" && p["metadata"]["deletionTimestamp"].is_null());
        pods
    }

    /// `kubectl delete pod`, with these options.
    ///
    /// # Panics
    /// It fails.
    pub fn delete_pod(&self, name: &str, options: &[&str]) {
        must(kubectl().args(["--namespace", &self.name, "delete", "pod", name]).args(options));
    }

    /// What the anchor holds under a key, as JSON; null where there is none.
    #[must_use]
    pub fn anchor(&self, job: &str, key: &str) -> Value {
        let output = kubectl()
            .args(["--namespace", &self.name, "get", "configmap", job, "-o", "json", "--ignore-not-found"])
            .output()
            .expect("kubectl starts");
        let anchor: Value = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
        anchor["data"][key].as_str().and_then(|text| serde_json::from_str(text).ok()).unwrap_or(Value::Null)
    }

    /// The master's log, whole.
    #[must_use]
    pub fn master_log(&self, job: &str) -> String {
        let output = self.elasticdl("logs", [job]).output().expect("the command under test starts");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Kills the program inside a worker's container, from the node's side.
    ///
    /// # Panics
    /// It is not found on this machine, which is the node.
    pub fn kill_inside(&self, pod: &Value) {
        let uid = pod["metadata"]["uid"].as_str().expect("a pod has a uid");
        let is_inside = |pid: &u32| {
            let read =
                |file: &str| std::fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
            read("cgroup").contains(uid) && read("comm").trim() == "counting"
        };
        let processes = std::fs::read_dir("/proc").expect("the system shows its processes").flatten();
        let mut pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let pid = pids.find(is_inside).expect("the worker's program runs on this machine");
        crate::send(pid, rustix::process::Signal::KILL);
    }

    /// Waits for something.
    ///
    /// # Panics
    /// It is not there after two minutes.
    pub fn wait_for<T>(&self, job: &str, what: &str, mut look: impl FnMut() -> Option<T>) -> T {
        let deadline = Instant::now() + Duration::from_secs(120);
        loop {
            if let Some(found) = look() {
                return found;
            }
            if Instant::now() >= deadline {
                let pods = self.get("pods", "").iter().map(|p| p["status"].to_string()).collect::<Vec<_>>();
                panic!("not within two minutes: {what}\n{}\n{}", pods.join("\n"), self.master_log(job));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Everything that elasticdl has made here and that is still there: kind and name.
    #[must_use]
    pub fn leftovers(&self) -> Vec<String> {
        let selector = "app.kubernetes.io/managed-by=elasticdl";
        let kinds = ["jobs", "pods", "configmaps", "secrets", "services"];
        let objects =
            kinds.iter().flat_map(|kind| self.get(kind, selector).into_iter().map(move |o| (kind, o)));
        objects.map(|(kind, o)| format!("{kind} {}", o["metadata"]["name"])).collect()
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = kubectl().args(["delete", "namespace", &self.name, "--wait=false"]).output();
    }
}

/// A command that follows a job; ended when it is dropped.
#[derive(Debug)]
pub struct Following(Option<Child>);

impl Following {
    /// Starts it.
    ///
    /// # Panics
    /// It can't be started.
    #[must_use]
    pub fn start(mut command: Command) -> Self {
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        Self(Some(command.spawn().expect("the command under test starts")))
    }

    /// Its process.
    ///
    /// # Panics
    /// Never, before `wait`.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.0.as_ref().expect("not waited for").id()
    }

    /// Waits for its end: its exit code and what it printed.
    ///
    /// # Panics
    /// It doesn't end within four minutes.
    #[must_use]
    pub fn wait(mut self) -> (Option<i32>, String) {
        let deadline = Instant::now() + Duration::from_secs(240);
        let child = self.0.as_mut().expect("not waited for");
        while child.try_wait().expect("a child can be asked for").is_none() {
            assert!(Instant::now() < deadline, "the command does not end");
            std::thread::sleep(Duration::from_millis(20));
        }
        let output = self.0.take().expect("not waited for").wait_with_output().expect("it has ended");
        (output.status.code(), text(&output))
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// What a command printed, both ways.
#[must_use]
pub fn text(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned()).concat()
}

/// What a summary must say of a job that counted each of `records` once per epoch.
///
/// # Panics
/// It says something else.
pub fn assert_exactly_once(summary: &Value, records: u64, epochs: u64) {
    let total = records * epochs;
    let expected = json!({"expected": total, "counted": total, "missing": 0, "repeated": 0});
    assert_eq!(summary["records"], expected, "{summary}");
    assert_eq!(summary["state"], "completed", "{summary}");
    assert_eq!(summary["model_summary"], format!("{epochs} {epochs} {total}").as_str(), "{summary}");
}

fn kubectl() -> Command {
    Command::new("kubectl")
}

fn must(command: &mut Command) -> Output {
    let output = command.output().expect("the command starts");
    assert!(output.status.success(), "{command:?}: {}", text(&output));
    output
}
