//! An inspection as text: one block for each worker.

use std::collections::BTreeMap;
use std::fmt::{self, Display, Formatter};
use std::net::SocketAddr;

use super::{
    InspectedWorker, Inspection, KernelThread, LinkReport, ProcessState, StallReport, ThreadReport,
    WorkerReport,
};

impl Display for Inspection {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}, step {}", self.job, self.state, self.step)?;
        if self.generation.0 > 0 {
            write!(f, " of generation {}", self.generation)?;
        }
        if let Some(ago) = self.committed_s {
            write!(f, "; the last steps were committed {ago:.1} s ago")?;
        }
        writeln!(f)?;
        if let Some(transport) = &self.allreduce_transport {
            writeln!(f, "gradients are summed over {transport}")?;
        }
        let peers = self.ends_of_links();
        self.workers.iter().try_for_each(|worker| worker.write(f, &peers))
    }
}

/// Which worker listens at this address, or has a connection with it at its end.
type Peers<'a> = BTreeMap<SocketAddr, &'a InspectedWorker>;

impl Inspection {
    fn ends_of_links(&self) -> Peers<'_> {
        let links = |worker: &InspectedWorker| {
            let report = worker.report.iter();
            report.flat_map(|report| &report.links).map(|link| link.local).collect::<Vec<_>>()
        };
        let ends = |worker| links(worker).into_iter().chain(worker.address);
        let all = self.workers.iter();
        all.flat_map(|worker| ends(worker).map(move |end| (end, worker))).collect()
    }
}

impl Display for InspectedWorker {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.write(f, &Peers::new())
    }
}

impl InspectedWorker {
    /// `worker 2, rank 1`
    fn name(&self) -> String {
        let rank = self.rank.map(|rank| format!(", rank {rank}")).unwrap_or_default();
        format!("worker {}{rank}", self.worker)
    }

    fn write(&self, f: &mut Formatter<'_>, peers: &Peers<'_>) -> fmt::Result {
        write!(f, "\n{}", self.name())?;
        let process = self.pid.map(|pid| format!("process {pid}"));
        let pod = self.pod.as_ref().map(|pod| format!("pod {pod}"));
        let node = self.node.as_ref().map(|node| format!("node {node}"));
        let place: Vec<String> = [pod, node, process].into_iter().flatten().collect();
        if !place.is_empty() {
            write!(f, " ({})", place.join(", "))?;
        }
        write!(f, ": {}", self.state)?;
        if let Some(reason) = &self.reason {
            write!(f, ", {reason}")?;
        }
        writeln!(f)?;
        match (&self.report, self.heard_s) {
            (Some(report), _) => report.write(f, peers)?,
            (None, Some(heard)) => {
                writeln!(f, "  it does not answer: its last message came {heard:.1} s ago")?;
            }
            (None, None) => writeln!(f, "  it is not connected to the master")?,
        }
        if !self.messages.is_empty() {
            write!(f, "  last messages:")?;
            for (i, message) in self.messages.iter().enumerate() {
                let arrow = if message.from_master { "to it" } else { "from it" };
                let end = if i == 0 { "" } else { "," };
                let times = match message.count {
                    0 | 1 => String::new(),
                    count => format!(" ({count} times)"),
                };
                write!(f, "{end} {}{times} {arrow} {:.1} s ago", message.kind, message.ago_s)?;
            }
            writeln!(f)?;
        }
        match &self.process {
            Some(process) if self.report.is_none() => process.write(f),
            _ => Ok(()),
        }
    }
}

impl ProcessState {
    fn write(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "  its process is {}", self.state)?;
        if self.state.starts_with('T') {
            write!(f, ", by a signal or a debugger; `kill -CONT` lets it go on")?;
        }
        writeln!(f)?;
        let line = |thread: &KernelThread| format!("{thread}");
        self.threads.iter().try_for_each(|thread| writeln!(f, "  thread {}", line(thread)))
    }
}

impl Display for KernelThread {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}): {}", self.name, self.tid, self.state)?;
        match self.waits_in.as_str() {
            "" | "0" => Ok(()),
            waits_in => write!(f, " in {waits_in}"),
        }
    }
}

impl Display for StallReport {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let which = match &self.far[..] {
            [] if self.waits_for_next => "the next member of the ring".to_owned(),
            [] => "the previous member of the ring".to_owned(),
            [worker] => format!("worker {worker}"),
            [worker, ..] => format!("worker {worker} and others"),
        };
        write!(
            f,
            "waits for {which} for {:.1} s: operation {} of generation {}, {} bytes received, {} \
             sent",
            self.for_s, self.operation, self.generation, self.received, self.sent
        )
    }
}

impl Display for WorkerReport {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.write(f, &Peers::new())
    }
}

impl WorkerReport {
    fn write(&self, f: &mut Formatter<'_>, peers: &Peers<'_>) -> fmt::Result {
        if let Some(activity) = &self.activity {
            let (what, step) = (&activity.what, activity.step);
            writeln!(f, "  it {what} for {:.1} s, after step {step}", activity.for_s)?;
        }
        if let Some(stall) = &self.stall {
            writeln!(f, "  it {stall}")?;
        }
        if let Some(storage) = &self.storage {
            writeln!(f, "  it waits for storage: {storage}")?;
        }
        for link in &self.links {
            link.write(f, peers.get(&link.peer).copied())?;
        }
        for (thread, others) in groups(&self.threads) {
            thread.write(f, others)?;
        }
        match self.omitted {
            0 => Ok(()),
            omitted => writeln!(f, "  {omitted} threads and frames are not shown"),
        }
    }
}

impl LinkReport {
    fn write(&self, f: &mut Formatter<'_>, peer: Option<&InspectedWorker>) -> fmt::Result {
        let to = match peer {
            _ if self.to_master => "the master".into(),
            Some(worker) => worker.name(),
            None => self.peer.to_string(),
        };
        writeln!(
            f,
            "  link to {to}: {} out, {} in; last sent {:.1} s ago, received {:.1} s ago",
            rate(self.sent_bytes_per_s),
            rate(self.received_bytes_per_s),
            self.sent_ago_s,
            self.received_ago_s
        )
    }
}

/// Bytes per second for people.
fn rate(bytes_per_s: f64) -> String {
    match bytes_per_s {
        rate if rate >= 1e6 => format!("{:.1} MB/s", rate / 1e6),
        rate if rate >= 1e3 => format!("{:.1} kB/s", rate / 1e3),
        rate => format!("{rate:.0} B/s"),
    }
}

/// Threads with the same stack, each with the number of others like it.
fn groups(threads: &[ThreadReport]) -> Vec<(&ThreadReport, usize)> {
    let mut groups: Vec<(&ThreadReport, usize)> = Vec::new();
    for thread in threads {
        let is_same = |known: &ThreadReport| {
            known.kernel.state == thread.kernel.state
                && known.frames == thread.frames
                && known.python == thread.python
                && (known.kernel.name == thread.kernel.name || !known.frames.is_empty())
        };
        match groups.iter_mut().find(|(known, _)| is_same(known)) {
            Some((_, others)) => *others += 1,
            None => groups.push((thread, 0)),
        }
    }
    groups
}

impl ThreadReport {
    fn write(&self, f: &mut Formatter<'_>, others: usize) -> fmt::Result {
        write!(f, "  thread {}", self.kernel)?;
        match others {
            0 => writeln!(f)?,
            others => writeln!(f, ", and {others} more like it")?,
        }
        if self.frames.is_empty() && self.python.is_empty() {
            return writeln!(
                f,
                "    it has not answered: it sleeps in the kernel, or blocks signals"
            );
        }
        self.python.iter().try_for_each(|frame| writeln!(f, "    {frame}"))?;
        let is_interpreter = |frame: &String| frame.starts_with("_PyEval");
        let has_python = !self.python.is_empty() || self.frames.iter().any(is_interpreter);
        let is_shown = |(i, frame): &(usize, &String)| *i == 0 || !is_runtime(frame, has_python);
        let mut frames = self.frames.iter().enumerate().filter(is_shown);
        frames.try_for_each(|(_, frame)| writeln!(f, "    {frame}"))
    }
}

/// Whether a function is of a runtime, so that it explains nothing.
fn is_runtime(frame: &str, has_python: bool) -> bool {
    let frame = frame.trim_start_matches(['<', '&']);
    RUNTIMES.iter().any(|prefix| frame.starts_with(prefix))
        || (has_python && INTERPRETER.iter().any(|prefix| frame.starts_with(prefix)))
}

/// How names begin of the runtimes of Rust and C, and of what is around each task of a worker.
const RUNTIMES: &[&str] = &[
    "std::",
    "core::",
    "alloc::",
    "tokio::",
    "mio::",
    "rustix::",
    "__rust",
    "rust_",
    "_start",
    "__libc_start",
    "libc.so.6+",
    "start_thread",
    "clone",
    "main",
    "elasticdl::failure::call_user",
    "elasticdl::run::",
    "elasticdl::trainer::Trainer<M>::perform",
    "elasticdl::trainer::Trainer<M>::turn",
    "elasticdl::trainer::Trainer<M>::run",
    "?",
];
/// The same of Python's interpreter, whose frames are shown as Python's.
const INTERPRETER: &[&str] =
    &["Py", "_Py", "cfunction_", "method_vectorcall", "pythread_", "run_mod", "thread_run"];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inspection::{Activity, SeenMessage};
    use crate::{Generation, WorkerId};

    fn thread(name: &str, tid: u32, frames: &[&str], python: &[&str]) -> ThreadReport {
        let owned = |lines: &[&str]| lines.iter().map(|&line| line.to_owned()).collect();
        let kernel = KernelThread {
            name: name.into(),
            tid,
            state: "S (sleeping)".into(),
            waits_in: "futex_wait".into(),
        };
        ThreadReport { kernel, frames: owned(frames), python: owned(python) }
    }

    fn link(local: &str, peer: &str, to_master: bool) -> LinkReport {
        LinkReport {
            local: local.parse().unwrap(),
            peer: peer.parse().unwrap(),
            to_master,
            sent_bytes: 10,
            received_bytes: 20,
            sent_bytes_per_s: 2_500_000.0,
            received_bytes_per_s: 12.0,
            sent_ago_s: 0.5,
            received_ago_s: 63.0,
        }
    }

    fn worker(id: u64, state: &str) -> InspectedWorker {
        InspectedWorker {
            worker: WorkerId(id),
            rank: None,
            pid: None,
            address: None,
            state: state.into(),
            reason: None,
            pod: None,
            node: None,
            heard_s: None,
            messages: Vec::new(),
            report: None,
            process: None,
        }
    }

    #[test]
    fn each_worker_has_a_block_that_says_what_it_does_and_with_whom() {
        let report = WorkerReport {
            activity: Some(Activity { what: "computes".into(), step: 7, for_s: 63.25 }),
            threads: vec![
                thread("main", 71, &["std::futex", "mine::step", "std::rt", "main"], &[]),
                thread("pool", 72, &["std::futex", "pool::idle"], &[]),
                thread("pool", 73, &["std::futex", "pool::idle"], &[]),
                thread("py", 74, &["nanosleep", "PyEval", "mod::x"], &["step (a.py:3)"]),
                thread("stuck", 75, &[], &[]),
            ],
            links: vec![
                link("10.0.0.1:1", "10.0.0.2:2", false),
                link("10.0.0.1:3", "[::1]:4", true),
            ],
            ..WorkerReport::default()
        };
        let first = InspectedWorker {
            rank: Some(0),
            pid: Some(71),
            heard_s: Some(0.1),
            messages: vec![
                SeenMessage { ago_s: 64.0, count: 1, from_master: true, kind: "Membership".into() },
                SeenMessage { ago_s: 63.5, count: 9, from_master: false, kind: "Committed".into() },
            ],
            report: Some(report),
            ..worker(1, "training")
        };
        let waits = WorkerReport {
            stall: Some(StallReport {
                generation: Generation(2),
                operation: 5,
                for_s: 63.0,
                ..StallReport::default()
            }),
            storage: Some("s3://b: 503".into()),
            links: vec![
                link("10.0.0.2:2", "10.0.0.1:1", false),
                link("10.0.0.2:7", "10.0.0.3:9", false),
            ],
            omitted: 3,
            ..WorkerReport::default()
        };
        let second = InspectedWorker {
            rank: Some(1),
            pod: Some("w-2".into()),
            node: Some("n".into()),
            report: Some(waits),
            ..worker(2, "training")
        };
        let kernel = thread("main", 90, &[], &[]).kernel;
        let stopped = InspectedWorker {
            address: Some("10.0.0.3:9".parse().unwrap()),
            heard_s: Some(9.0),
            process: Some(ProcessState { state: "T (stopped)".into(), threads: vec![kernel] }),
            ..worker(3, "disconnected")
        };
        let pending =
            InspectedWorker { reason: Some("its image is pulled".into()), ..worker(4, "starting") };
        let inspection = Inspection {
            job: "mnist".into(),
            state: "running".into(),
            generation: Generation(2),
            step: 7,
            committed_s: Some(63.25),
            allreduce_transport: Some("TCP".into()),
            workers: vec![first, second, stopped, pending],
        };
        let expected = "\
mnist: running, step 7 of generation 2; the last steps were committed 63.2 s ago
gradients are summed over TCP

worker 1, rank 0 (process 71): training
  it computes for 63.2 s, after step 7
  link to worker 2, rank 1: 2.5 MB/s out, 12 B/s in; last sent 0.5 s ago, received 63.0 s ago
  link to the master: 2.5 MB/s out, 12 B/s in; last sent 0.5 s ago, received 63.0 s ago
  thread main (71): S (sleeping) in futex_wait
    std::futex
    mine::step
  thread pool (72): S (sleeping) in futex_wait, and 1 more like it
    std::futex
    pool::idle
  thread py (74): S (sleeping) in futex_wait
    step (a.py:3)
    nanosleep
    mod::x
  thread stuck (75): S (sleeping) in futex_wait
    it has not answered: it sleeps in the kernel, or blocks signals
  last messages: Membership to it 64.0 s ago, Committed (9 times) from it 63.5 s ago

worker 2, rank 1 (pod w-2, node n): training
  it waits for the previous member of the ring for 63.0 s: operation 5 of generation 2, 0 bytes \
received, 0 sent
  it waits for storage: s3://b: 503
  link to worker 1, rank 0: 2.5 MB/s out, 12 B/s in; last sent 0.5 s ago, received 63.0 s ago
  link to worker 3: 2.5 MB/s out, 12 B/s in; last sent 0.5 s ago, received 63.0 s ago
  3 threads and frames are not shown

worker 3: disconnected
  it does not answer: its last message came 9.0 s ago
  its process is T (stopped), by a signal or a debugger; `kill -CONT` lets it go on
  thread main (90): S (sleeping) in futex_wait

worker 4: starting, its image is pulled
  it is not connected to the master
";
        assert_eq!(inspection.to_string(), expected);
        let read: Inspection = serde_json::from_str(&inspection.to_pretty_json()).unwrap();
        assert_eq!(read, inspection);
    }
}
