//! The API server of a cluster whose control plane runs as processes of this machine.

use std::fs::{self, OpenOptions};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::kubectl::kubectl;

/// The API server, as a process that can be stopped and restarted.
#[derive(Debug)]
pub struct ApiServer {
    /// Folder of the cluster's files: `pids/kube-apiserver`, `log/kube-apiserver.log`.
    dir: PathBuf,
}

impl ApiServer {
    /// The API server of the cluster that `$KUBECONFIG` names.
    pub fn new() -> Self {
        let kubeconfig =
            std::env::var_os("KUBECONFIG").expect("a namespace was made, so there is a cluster");
        let dir =
            Path::new(&kubeconfig).parent().expect("a file lies in a directory").to_path_buf();
        let server = Self { dir };
        let named =
            fs::read_to_string(format!("/proc/{}/cmdline", server.pid())).unwrap_or_default();
        assert!(
            named.contains("kube-apiserver"),
            "the API server does not run on this machine: {named}"
        );
        server
    }

    /// Process id of the node's kubelet.
    pub fn kubelet(&self) -> u32 {
        self.pid_of("kubelet")
    }

    /// Time after which the node controller declares a node lost whose kubelet is silent.
    pub fn node_grace(&self) -> Duration {
        let arguments = arguments_of(self.pid_of("kube-controller-manager"));
        let mut values = arguments.iter().skip_while(|a| *a != "--node-monitor-grace-period");
        let value = values.nth(1).and_then(|value| value.strip_suffix('s')?.parse().ok());
        value.map_or(NODE_GRACE_DEFAULT, Duration::from_secs)
    }

    fn pid(&self) -> u32 {
        self.pid_of("kube-apiserver")
    }

    fn pid_of(&self, program: &str) -> u32 {
        let file = self.dir.join("pids").join(program);
        let text = fs::read_to_string(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        text.trim().parse().expect("the file holds a process's id")
    }

    /// Stops the API server: it keeps its connections and answers nothing, until the guard is
    /// dropped, or for `at_most`, even if this process dies.
    pub fn stop(&self, at_most: Duration) -> Stopped {
        let pid = self.pid();
        let watchdog = format!("sleep {}; kill -CONT {pid}", at_most.as_secs());
        let watchdog =
            Command::new("sh").args(["-c", &watchdog]).process_group(0).spawn().expect("sh starts");
        crate::send(pid, Signal::STOP);
        Stopped { pid, watchdog }
    }

    /// Kills the API server, starts it again with the same arguments, and waits until it serves:
    /// its connections break.
    pub fn restart(&self) {
        self.restart_with(&[]);
    }

    /// Enables the audit log, if it is not enabled yet: calls of service accounts, one JSON object
    /// per line. Returns the file.
    pub fn audit(&self) -> PathBuf {
        let log = self.dir.join("log/audit.log");
        if !arguments_of(self.pid()).iter().any(|argument| argument.starts_with("--audit-log-path"))
        {
            let policy = self.dir.join("audit-policy.yaml");
            fs::write(&policy, AUDIT_POLICY).expect("the cluster's directory takes files");
            let option = |name: &str, path: &Path| format!("--audit-{name}={}", path.display());
            self.restart_with(&[option("log-path", &log), option("policy-file", &policy)]);
        }
        log
    }

    #[expect(clippy::zombie_processes, reason = "the server outlives this process")]
    fn restart_with(&self, more: &[String]) {
        let (pid, arguments) = (self.pid(), arguments_of(self.pid()));
        let cwd = fs::read_link(format!("/proc/{pid}/cwd")).expect("a process has a directory");
        let log = OpenOptions::new().append(true).open(self.dir.join("log/kube-apiserver.log"));
        let log = log.expect("the server has a log");
        crate::send(pid, Signal::KILL);
        let deadline = Instant::now() + Duration::from_secs(60);
        while crate::is_alive(pid) {
            assert!(Instant::now() < deadline, "the API server outlives SIGKILL");
            std::thread::sleep(Duration::from_millis(10));
        }
        let start = || {
            let child = Command::new(&arguments[0])
                .args(&arguments[1..])
                .args(more)
                .current_dir(&cwd)
                .stdin(Stdio::null())
                .stdout(log.try_clone().expect("a file can be shared"))
                .stderr(log.try_clone().expect("a file can be shared"))
                .process_group(0)
                .spawn()
                .expect("the API server starts");
            fs::write(self.dir.join("pids/kube-apiserver"), child.id().to_string())
                .expect("its id can be kept");
            child
        };
        let mut child = start();
        while !is_ready() {
            assert!(Instant::now() < deadline, "the API server does not come back");
            std::thread::sleep(Duration::from_millis(200));
            // The port of the killed server may still be in use.
            if child.try_wait().is_ok_and(|ended| ended.is_some()) {
                child = start();
            }
        }
    }
}

impl Default for ApiServer {
    fn default() -> Self {
        Self::new()
    }
}

/// An API server that is stopped for as long as this value lives.
#[derive(Debug)]
pub struct Stopped {
    pid: u32,
    watchdog: Child,
}

impl Drop for Stopped {
    fn drop(&mut self) {
        crate::send(self.pid, Signal::CONT);
        let _ = self.watchdog.kill();
        let _ = self.watchdog.wait();
    }
}

/// Arguments of a process's command line.
fn arguments_of(pid: u32) -> Vec<String> {
    let line = fs::read(format!("/proc/{pid}/cmdline")).expect("a process has a command line");
    let arguments = line.split(|&b| b == 0).filter(|argument| !argument.is_empty());
    arguments.map(|argument| String::from_utf8_lossy(argument).into_owned()).collect()
}

fn is_ready() -> bool {
    let output = kubectl().args(["get", "--raw", "/readyz", "--request-timeout", "2s"]).output();
    output.is_ok_and(|output| output.stdout == b"ok")
}

/// The default of the controller manager.
const NODE_GRACE_DEFAULT: Duration = Duration::from_secs(40);

const AUDIT_POLICY: &str = "\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
  - {level: Metadata, userGroups: ['system:serviceaccounts']}
  - {level: None}
";
