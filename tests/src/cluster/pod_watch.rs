//! Times at which the pods of a namespace changed their phase.

use std::collections::BTreeMap;
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use serde_json::Value;

use super::kubectl::{kubectl, must};
use super::namespace::Namespace;

/// The time at which each phase of each pod was first observed, as time since midnight, UTC.
#[derive(Debug)]
pub struct PodWatch {
    kubectl: Child,
    seen: Arc<Mutex<BTreeMap<(String, String), Duration>>>,
}

impl PodWatch {
    /// Watches the pods for as long as this value lives.
    pub fn watch(namespace: &Namespace) -> Self {
        let mut kubectl = kubectl()
            .args(["--namespace", namespace.name(), "get", "pods", "--watch", "-o", "json"])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("kubectl starts");
        let stdout = kubectl.stdout.take().expect("it was piped");
        let seen = Arc::new(Mutex::new(BTreeMap::new()));
        let noted = Arc::clone(&seen);
        std::thread::spawn(move || {
            let pods = serde_json::Deserializer::from_reader(std::io::BufReader::new(stdout))
                .into_iter::<Value>();
            for pod in pods.map_while(Result::ok) {
                let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
                let key = (word(&pod["metadata"]["name"]), word(&pod["status"]["phase"]));
                let mut noted = noted.lock().unwrap_or_else(PoisonError::into_inner);
                noted.entry(key).or_insert_with(|| since_midnight(SystemTime::now()));
            }
        });
        Self { kubectl, seen }
    }

    /// Times at which pods whose names begin with `prefix` were first observed in a phase, earliest
    /// first.
    pub fn times(&self, prefix: &str, phase: &str) -> Vec<Duration> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let these = seen.iter().filter(|((name, p), _)| name.starts_with(prefix) && p == phase);
        let mut times: Vec<Duration> = these.map(|(_, &time)| time).collect();
        times.sort_unstable();
        times
    }
}

impl Drop for PodWatch {
    fn drop(&mut self) {
        let _ = self.kubectl.kill();
        let _ = self.kubectl.wait();
    }
}

/// The time of the day, UTC.
pub fn since_midnight(time: SystemTime) -> Duration {
    let time = time.duration_since(SystemTime::UNIX_EPOCH).expect("it is after 1970");
    Duration::from_nanos((time.as_nanos() % 86_400_000_000_000) as u64)
}

/// Time of the first line in a pod's log that contains `words`, by the clock of its container
/// runtime, as time since midnight, UTC.
pub fn time_of_line(namespace: &Namespace, pod: &str, words: &str) -> Option<Duration> {
    let output =
        must(kubectl().args(["--namespace", namespace.name(), "logs", "--timestamps", pod]));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = text.lines().find(|line| line.contains(words))?;
    let time = line.split('T').nth(1)?.split('Z').next()?;
    let mut seconds = 0.0;
    for part in time.split(':') {
        seconds = seconds * 60.0 + part.parse::<f64>().ok()?;
    }
    Some(Duration::from_secs_f64(seconds))
}
