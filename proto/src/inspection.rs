//! What a job's processes do at one moment: what `elasticdl debug` shows.
//!
//! **Invariant:** no values of variables, no arguments and no environment: names of functions,
//! files and threads, and numbers.

mod text;

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::ids::{Generation, WorkerId};

/// What the processes of a job do at one moment. The names of its fields are a public format.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Inspection {
    /// The job's name.
    pub job: String,
    /// The job's state, as in its status.
    pub state: String,
    /// The newest generation; 0 before the first.
    pub generation: Generation,
    /// Steps committed, as last reported.
    pub step: u64,
    /// Seconds since the master has last heard of committed steps; `None` if it has not.
    pub committed_s: Option<f64>,
    /// The transport of the all-reduce, as text; `None` before the first step.
    pub allreduce_transport: Option<String>,
    /// The workers, by id: those that have joined, and those that have not.
    pub workers: Vec<InspectedWorker>,
}

/// A worker of an inspected job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct InspectedWorker {
    /// The worker.
    pub worker: WorkerId,
    /// Its rank in the newest generation; `None` while it is no member.
    pub rank: Option<u32>,
    /// Process id; `None` if it is not known.
    pub pid: Option<u32>,
    /// Where the others reach it; `None` if it is not connected.
    pub address: Option<SocketAddr>,
    /// As in the status of the job.
    pub state: String,
    /// What it waits for, if it has not joined and that is known.
    pub reason: Option<String>,
    /// In a cluster: its pod.
    pub pod: Option<String>,
    /// In a cluster: the node of the pod.
    pub node: Option<String>,
    /// Seconds since its last message, heartbeats included; `None` if it has no open stream.
    pub heard_s: Option<f64>,
    /// Its last messages and those to it, oldest first, without heartbeats.
    pub messages: Vec<SeenMessage>,
    /// What it says of itself; `None` if it has not answered.
    pub report: Option<WorkerReport>,
    /// What the kernel says of its process; `None` if it runs on another machine, or has ended.
    pub process: Option<ProcessState>,
}

/// A message between a worker and its master.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SeenMessage {
    /// Seconds since it was sent or received, the last time.
    pub ago_s: f64,
    /// How often one of this kind was sent in succession.
    pub count: u64,
    /// Whether the master sent it.
    pub from_master: bool,
    /// Its kind.
    pub kind: String,
}

/// What the kernel says of a process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ProcessState {
    /// `S (sleeping)`, for example.
    pub state: String,
    /// Its threads, up to 64.
    pub threads: Vec<KernelThread>,
}

/// What the kernel says of a thread.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct KernelThread {
    /// Name.
    pub name: String,
    /// Thread id.
    pub tid: u32,
    /// `S (sleeping)`, for example.
    pub state: String,
    /// The kernel's function that it waits in; empty if it runs, or that is not shown.
    pub waits_in: String,
}

/// What a worker says of itself.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WorkerReport {
    /// What its trainer does; `None` before its first task, and in an inference job.
    pub activity: Option<Activity>,
    /// The point in the group's operations at which it waits; `None` if it does not.
    pub stall: Option<StallReport>,
    /// The request to storage that it waits for, and the last error.
    pub storage: Option<String>,
    /// Its threads, up to 256, the main one first.
    pub threads: Vec<ThreadReport>,
    /// Number of threads, or of their frames, that are not shown.
    pub omitted: u64,
    /// Its TCP connections.
    pub links: Vec<LinkReport>,
}

/// What a trainer does.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Activity {
    /// As a sentence without its subject.
    pub what: String,
    /// Steps that its state contains.
    pub step: u64,
    /// Seconds since it began.
    pub for_s: f64,
}

/// Where a worker waits for its neighbours in the ring.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StallReport {
    /// Generation of its group.
    pub generation: Generation,
    /// Number of operations begun in this generation, including this one.
    pub operation: u64,
    /// Bytes of this operation received.
    pub received: u64,
    /// Bytes of this operation sent.
    pub sent: u64,
    /// Whether it waits for the next member, rather than for the previous one.
    pub waits_for_next: bool,
    /// Members that are no neighbours in the ring, for which it waits.
    pub far: Vec<WorkerId>,
    /// Seconds since the last byte.
    pub for_s: f64,
}

/// A thread of a worker.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ThreadReport {
    /// What the kernel says.
    #[serde(flatten)]
    pub kernel: KernelThread,
    /// Functions of its native stack, the innermost first; empty if it did not answer in time.
    pub frames: Vec<String>,
    /// Functions of its Python stack with file and line, the innermost first.
    pub python: Vec<String>,
}

/// A TCP connection of a worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LinkReport {
    /// Its address at this end.
    pub local: SocketAddr,
    /// Its address at the other end.
    pub peer: SocketAddr,
    /// Whether it is the stream to the master.
    pub to_master: bool,
    /// Bytes that the peer has acknowledged, in all.
    pub sent_bytes: u64,
    /// Bytes received, in all.
    pub received_bytes: u64,
    /// Bytes per second that the peer acknowledges now.
    pub sent_bytes_per_s: f64,
    /// Bytes per second that arrive now.
    pub received_bytes_per_s: f64,
    /// Seconds since the last byte was sent.
    pub sent_ago_s: f64,
    /// Seconds since the last byte was received.
    pub received_ago_s: f64,
}

impl Inspection {
    /// The inspection as indented JSON.
    #[must_use]
    pub fn to_pretty_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("its keys are strings") + "\n"
    }
}

impl WorkerReport {
    /// The report without its last threads and innermost detail, so that its JSON has at most
    /// `bytes` (at least 4 KiB).
    #[must_use]
    pub fn within(mut self, bytes: usize) -> Self {
        let len = |report: &Self| serde_json::to_string(report).map_or(0, |json| json.len());
        let mut rounds = 0;
        while len(&self) > bytes && rounds < ROUNDS_MAX {
            let frames = FRAMES_KEPT >> rounds;
            for thread in &mut self.threads {
                for stack in [&mut thread.frames, &mut thread.python] {
                    self.omitted += stack.len().saturating_sub(frames) as u64;
                    stack.truncate(frames);
                }
            }
            let threads = self.threads.len().div_ceil(2).max(1);
            self.omitted += (self.threads.len() - threads) as u64;
            self.threads.truncate(threads);
            self.links.truncate(self.links.len().div_ceil(2));
            rounds += 1;
        }
        self
    }
}

/// Frames of a stack that is shortened for the first time.
const FRAMES_KEPT: usize = 32;
/// Enough rounds to halve 256 threads down to one.
const ROUNDS_MAX: u32 = 9;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_shortened_to_the_bytes_that_it_may_have() {
        let thread = ThreadReport {
            frames: vec!["a::very::long::name::of::a::function".repeat(3); 48],
            ..ThreadReport::default()
        };
        let report = WorkerReport { threads: vec![thread; 256], ..WorkerReport::default() };
        let whole = report.clone().within(64 << 20);
        assert_eq!((&whole, whole.omitted), (&report, 0));
        let short = report.within(4 << 10);
        let json = serde_json::to_string(&short).unwrap();
        assert!(json.len() <= 4 << 10, "{}", json.len());
        assert!(!short.threads.is_empty() && short.omitted > 255, "{short:?}");
    }
}
