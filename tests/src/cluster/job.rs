//! A job of the counting model in a namespace.

use std::time::{Duration, Instant};

use elasticdl_proto::Status;
use serde_json::Value;

use super::kubectl::{kubectl, must, text};
use super::namespace::Namespace;
use crate::{ChildOutput, assert_exactly_once};

/// A job whose model's parameters count records, so that its last line of output can be compared
/// with the ledger.
#[derive(Debug)]
pub struct Job<'a> {
    namespace: &'a Namespace,
    name: String,
    child: Option<ChildOutput>,
}

impl<'a> Job<'a> {
    /// Submits the job and follows it. A worker sleeps `micros_per_record` for each record, until
    /// [`Job::hurry`].
    pub fn start(
        namespace: &'a Namespace,
        name: &str,
        options: &[&str],
        micros_per_record: u32,
    ) -> Self {
        Self::start_program(
            namespace,
            name,
            options,
            &["--micros-per-record", &micros_per_record.to_string()],
        )
    }

    /// As [`Job::start`], with these options of the model.
    pub fn start_program(
        namespace: &'a Namespace,
        name: &str,
        options: &[&str],
        program: &[&str],
    ) -> Self {
        let records = RECORDS.to_string();
        let program: Vec<&str> = ["--records", &records].iter().chain(program).copied().collect();
        let child = ChildOutput::start(namespace.train(name, options, &program));
        Self { namespace, name: name.into(), child: Some(child) }
    }

    /// The command that follows the job.
    pub fn child(&self) -> &ChildOutput {
        self.child.as_ref().expect("not waited for")
    }

    /// The status in the job's anchor; a status without workers while there is none.
    pub fn status(&self) -> Status {
        self.namespace.status(&self.name).unwrap_or_default()
    }

    /// The step in the job's anchor.
    pub fn step(&self) -> u64 {
        self.status().step
    }

    /// Waits until the group has `members` members and has made a further step, and as many pods
    /// run; returns the pods.
    pub fn wait_for_group(&self, members: usize) -> Vec<Value> {
        self.wait_for_pods(members, members)
    }

    /// As [`Job::wait_for_group`], in this number of pods.
    pub fn wait_for_pods(&self, members: usize, count: usize) -> Vec<Value> {
        let before = self.step();
        self.wait_for(&format!("a group of {members} that trains"), || {
            let status = self.status();
            if status.members().count() != members || status.step <= before {
                return None;
            }
            let pods = self.namespace.running_workers(&self.name);
            (pods.len() == count).then_some(pods)
        })
    }

    /// Waits until this number of workers trains, none of which is in a pod of `gone`.
    pub fn wait_for_others(&self, members: usize, gone: &[Value]) -> Vec<Value> {
        self.wait_until_gone(gone);
        self.wait_for_group(members)
    }

    /// Waits until none of these pods runs.
    pub fn wait_until_gone(&self, gone: &[Value]) {
        self.wait_for("the pods are gone", || {
            let pods = self.namespace.running_workers(&self.name);
            pods.iter().all(|pod| gone.iter().all(|gone| uid(pod) != uid(gone))).then_some(())
        });
    }

    /// Waits for an event in the status that contains all of `words`.
    pub fn wait_for_event(&self, words: &[&str]) {
        self.wait_for(&format!("an event with {words:?}"), || {
            let says = |event: &String| words.iter().all(|word| event.contains(word));
            self.status().events.iter().any(says).then_some(())
        });
    }

    /// Waits for an Event about the master's Job with this reason and text, as `kubectl describe
    /// job` shows it.
    pub fn wait_for_report(&self, reason: &str, words: &str) {
        let about = format!(
            "involvedObject.kind=Job,involvedObject.name={}-master,reason={reason}",
            self.name
        );
        self.wait_for(&format!("an Event {reason}: {words}"), || {
            let get = [
                "--namespace",
                self.namespace.name(),
                "get",
                "events",
                "-o",
                "json",
                "--field-selector",
            ];
            let output = must(kubectl().args(get).arg(&about));
            let list: Value = serde_json::from_slice(&output.stdout).expect("kubectl prints JSON");
            let says = |event: &Value| {
                event["message"].as_str().is_some_and(|message| message.contains(words))
            };
            list["items"].as_array()?.iter().any(says).then_some(())
        });
    }

    /// Waits until `poll` returns a value.
    pub fn wait_for<T>(&self, what: &str, poll: impl FnMut() -> Option<T>) -> T {
        self.namespace.wait_for(&self.name, what, poll)
    }

    /// Ends the delay per record of all workers.
    pub fn hurry(&self) {
        self.namespace.hurry(&self.name);
    }

    /// Launches whose pods the master created, in their order.
    pub fn launches(&self) -> Vec<u64> {
        let log = self.namespace.master_log(&self.name);
        let created = log.lines().filter(|line| line.contains("worker pod created"));
        let launch =
            |line: &str| line.split("launch=").nth(1)?.split_whitespace().next()?.parse().ok();
        let mut launches: Vec<u64> = created.filter_map(launch).collect();
        launches.sort_unstable();
        launches
    }

    /// Waits for the end of the command that follows the job, and returns its exit code and output.
    pub fn wait(&mut self) -> (Option<i32>, String) {
        self.child.take().expect("not waited for").wait()
    }

    /// Hurries the job to its end, and asserts that each record of each epoch was counted once, and
    /// that deleting the job leaves no object behind. Returns the output of the command that
    /// followed it.
    pub fn assert_completes(mut self, epochs: u64) -> String {
        self.hurry();
        let (code, output) = self.wait();
        assert_eq!(code, Some(0), "{output}\n{}", self.namespace.master_log(&self.name));
        let summary = self.namespace.summary(&self.name).expect("a job that ended has a summary");
        assert_exactly_once(&summary, &output, RECORDS, epochs);
        self.assert_deletes();
        output
    }

    /// Asserts that deleting the job leaves no object behind.
    pub fn assert_deletes(self) {
        let deleted =
            self.namespace.elasticdl("delete", [&self.name]).output().expect("the command starts");
        assert!(deleted.status.success(), "{}", text(&deleted));
        let mine = format!("\"{}", self.name);
        let left = || {
            self.namespace
                .leftovers()
                .into_iter()
                .filter(|left| left.contains(&mine))
                .collect::<Vec<_>>()
        };
        let deadline = Instant::now() + Duration::from_secs(30);
        while !left().is_empty() {
            assert!(Instant::now() < deadline, "these are left: {:?}", left());
            std::thread::sleep(Duration::from_millis(300));
        }
    }
}

/// The name of a pod.
pub fn name(pod: &Value) -> &str {
    pod["metadata"]["name"].as_str().expect("an object has a name")
}

/// The uid of a pod.
pub fn uid(pod: &Value) -> &str {
    pod["metadata"]["uid"].as_str().expect("an object has a uid")
}

/// Number of records in the test image's `/data`.
pub const RECORDS: u64 = 6000;
/// Line in a worker's log before it computes for the first time.
pub const FIRST_GRADIENT: &str = "the first gradient";
/// Line in a worker's log when its first step is committed.
pub const FIRST_UPDATE: &str = "the first update";
