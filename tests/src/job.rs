//! One job as a real process with real workers.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::{Duration, Instant};

use elasticdl_proto::{
    Cause, Generation, MembershipChange, RecordsSummary, Status, Summary, WorkerId,
};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::child_output::ChildOutput;
use crate::job_fixture::HURRY;
use crate::process::send;

/// An `elasticdl train --local` that has not been started.
#[derive(Debug)]
pub struct Command {
    elasticdl: PathBuf,
    /// The subcommand that starts the job: `train`, `evaluate` or `predict`.
    verb: &'static str,
    options: Vec<OsString>,
    program: Vec<OsString>,
    job_dir: PathBuf,
    /// Prefix of all commands: the job's own and those that query it.
    starter: Vec<OsString>,
}

impl Command {
    /// A job in `job_dir` that trains `program` (with its arguments) by `elasticdl`.
    pub fn new<A: Into<OsString>>(
        elasticdl: impl Into<PathBuf>,
        job_dir: impl Into<PathBuf>,
        program: impl IntoIterator<Item = A>,
    ) -> Self {
        Self {
            elasticdl: elasticdl.into(),
            verb: "train",
            options: Vec::new(),
            program: program.into_iter().map(Into::into).collect(),
            job_dir: job_dir.into(),
            starter: Vec::new(),
        }
    }

    /// Sets a subcommand other than `train`.
    pub fn verb(self, verb: &'static str) -> Self {
        Self { verb, ..self }
    }

    /// Adds `--name value`.
    pub fn option(mut self, name: &str, value: impl Into<OsString>) -> Self {
        self.options.push(format!("--{name}").into());
        self.options.push(value.into());
        self
    }

    /// Adds `--name`.
    pub fn flag(mut self, name: &str) -> Self {
        self.options.push(format!("--{name}").into());
        self
    }

    /// Sets a prefix for all commands; it gets the command as its last arguments.
    pub fn started_by<A: Into<OsString>>(mut self, starter: impl IntoIterator<Item = A>) -> Self {
        self.starter = starter.into_iter().map(Into::into).collect();
        self
    }

    /// Starts it.
    pub fn start(self) -> Running {
        let starter = [self.starter, vec![self.elasticdl.into()]].concat();
        let mut train = command(&starter);
        train
            .args([self.verb, "--local", "--replace", "--job-dir"])
            .arg(&self.job_dir)
            .args(&self.options)
            .arg("--")
            .args(&self.program);
        Running {
            child: Some(ChildOutput::start(train)),
            starter,
            job_dir: self.job_dir,
            folder: None,
            highest_step: 0,
        }
    }

    /// Starts the job and waits for its end.
    pub fn run(self) -> Ended {
        self.start().wait()
    }
}

/// A running job. Dropping it ends it.
#[derive(Debug)]
pub struct Running {
    child: Option<ChildOutput>,
    /// `elasticdl` and its prefix.
    starter: Vec<OsString>,
    job_dir: PathBuf,
    /// Temporary folder that is removed after the job.
    folder: Option<TempDir>,
    /// The highest step that [`Running::makes_progress`] has seen.
    highest_step: u64,
}

/// The result of a job that has ended.
#[derive(Debug)]
pub struct Ended {
    /// Exit code of the command; `None` if a signal ended it.
    pub code: Option<i32>,
    /// What it printed.
    pub output: String,
    /// `None` if none was written.
    summary: Option<Summary>,
}

impl Running {
    /// Keeps `folder` for as long as the job runs.
    pub fn keeping(mut self, folder: TempDir) -> Self {
        self.folder = Some(folder);
        self
    }

    /// Ends the delay per record of all workers of a fixture's job.
    pub fn hurry(&self) {
        let folder = self.folder.as_ref().expect("the job has a fixture");
        std::fs::write(folder.path().join(HURRY), "").expect("the folder can be written to");
    }

    /// The command's process.
    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("not waited for").pid()
    }

    /// Whether the command is running.
    pub fn is_running(&mut self) -> bool {
        self.child.as_mut().expect("not waited for").is_running()
    }

    /// The status that `elasticdl status --json` prints, within a minute.
    pub fn status(&self) -> Status {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(status) = self.try_status() {
                return status;
            }
            assert!(Instant::now() < deadline, "no status: {}", self.status_error());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// As [`Running::status`]; `None` if no master answers now.
    pub fn try_status(&self) -> Option<Status> {
        let output = self.output_of(&["status", "--json"]);
        let text = String::from_utf8(output.stdout).expect("the status is text");
        let status = (!text.is_empty()).then(|| serde_json::from_str(&text))?;
        Some(status.unwrap_or_else(|error| panic!("{error} in the status {text}")))
    }

    /// Runs `elasticdl checkpoint` and returns the path of the checkpoint.
    pub fn checkpoint(&self) -> String {
        self.command(&["checkpoint"]).trim().to_owned()
    }

    /// Runs the command `elasticdl WORDS` with the job, and returns what it prints.
    pub fn command(&self, words: &[&str]) -> String {
        let output = self.output_of(words);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// As [`Running::command`], whether or not it fails.
    pub fn output_of(&self, words: &[&str]) -> Output {
        let output = command(&self.starter).args(words).arg(&self.job_dir).output();
        output.expect("the command under test starts")
    }

    /// Runs `elasticdl scale --num-workers`.
    pub fn scale(&self, num_workers: u32) {
        self.command(&["scale", "--num-workers", &num_workers.to_string()]);
    }

    /// Waits for at most a minute until the status satisfies `wanted`, and returns that status.
    pub fn wait_for(&mut self, what: &str, wanted: impl Fn(&Status) -> bool) -> Status {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let status = self.try_status();
            if let Some(status) = status.as_ref().filter(|status| wanted(status)) {
                return status.clone();
            }
            assert!(self.is_running(), "the job ended before: {what}: {}", self.take_end().cause());
            assert!(Instant::now() < deadline, "not within a minute: {what}: {status:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until the group has made more than three steps.
    pub fn wait_for_first_steps(&mut self) -> Status {
        self.wait_for("the first steps", |status| status.step > 3)
    }

    /// Waits until the group makes another step than the one that it is at now.
    pub fn wait_for_next_step(&mut self) {
        let step = self.status().step;
        self.wait_for("the next step", |status| status.step > step);
    }

    /// Whether the job has made a step since the last call that it had not made before. A job that
    /// is killed again and again without progress fails, and a slow machine makes none for a while.
    pub fn makes_progress(&mut self) -> bool {
        let step = self.try_status().map_or(0, |status| status.step);
        let is_new = step > self.highest_step;
        self.highest_step = self.highest_step.max(step);
        is_new
    }

    /// Process ids of the job's workers, by worker; none while no master answers.
    pub fn workers(&self) -> BTreeMap<WorkerId, u32> {
        let workers = self.try_status().unwrap_or_default().workers;
        workers.into_iter().map(|worker| (worker.worker, worker.pid)).collect()
    }

    /// The job's members in rank order, with their process ids; none while no master answers.
    pub fn members(&self) -> Vec<(WorkerId, u32)> {
        let status = self.try_status().unwrap_or_default();
        let by_rank: BTreeMap<_, _> =
            status.members().map(|member| (member.rank, (member.worker, member.pid))).collect();
        by_rank.into_values().collect()
    }

    /// Waits until the group has `count` members.
    pub fn wait_for_members(&mut self, count: usize) -> Status {
        self.wait_for(&format!("{count} members"), |status| status.members().count() == count)
    }

    /// Waits until the group has `count` members and has made more than three steps.
    pub fn wait_for_work_of(&mut self, count: usize) -> Status {
        self.wait_for(&format!("{count} members at work"), |status| {
            status.members().count() == count && status.step > 3
        })
    }

    /// Waits until the group has `count` members, and no worker is one of `gone`.
    pub fn wait_for_members_without(&mut self, count: usize, gone: &[WorkerId]) -> Status {
        self.wait_for(&format!("{count} members without {gone:?}"), |status| {
            status.members().count() == count
                && status.workers.iter().all(|worker| !gone.contains(&worker.worker))
        })
    }

    /// Waits until `count` workers are connected to the master, and the group makes another step.
    pub fn wait_for_return_of(&mut self, count: usize) {
        let step = self.status().step;
        self.wait_for("all to be back, and another step", |status| {
            status.workers.len() == count && status.step > step
        });
    }

    /// Ports on which the job's processes listen.
    pub fn listening_ports(&self) -> Vec<u16> {
        let mut pids: Vec<u32> = self.workers().into_values().collect();
        pids.push(self.pid());
        let table = std::fs::read_to_string("/proc/net/tcp").expect("the system shows its sockets");
        let ports = pids.iter().flat_map(|pid| socket_inodes(*pid)).filter_map(|inode| {
            let is_mine = |fields: &Vec<&str>| fields[3] == LISTENING && fields[9] == inode;
            let row =
                table.lines().skip(1).map(|l| l.split_whitespace().collect()).find(is_mine)?;
            u16::from_str_radix(row[1].rsplit(':').next()?, 16).ok()
        });
        ports.collect()
    }

    /// Kills the command, and only it, with SIGKILL.
    pub fn kill_master(&mut self) {
        self.child.as_mut().expect("not waited for").kill();
    }

    /// Stops the master's process until [`Running::continue_master`].
    pub fn stop_master(&self) {
        self.signal(Signal::STOP);
    }

    /// See [`Running::stop_master`].
    pub fn continue_master(&self) {
        self.signal(Signal::CONT);
    }

    /// Starts another master after [`Running::kill_master`]: `elasticdl train --resume`.
    pub fn resume(&mut self) {
        let mut train = command(&self.starter);
        train.args(["train", "--resume"]).arg(&self.job_dir);
        self.child = Some(ChildOutput::start(train));
    }

    /// The error that `elasticdl status` prints when it fails.
    pub fn status_error(&self) -> String {
        String::from_utf8_lossy(&self.output_of(&["status"]).stderr).into_owned()
    }

    /// Sends a signal to the command itself.
    pub fn signal(&self, signal: Signal) {
        send(self.pid(), signal);
    }

    /// As [`wait_within`](Self::wait_within), three minutes.
    pub fn wait(self) -> Ended {
        self.wait_within(Duration::from_secs(180))
    }

    /// Waits for the job's end.
    pub fn wait_within(mut self, limit: Duration) -> Ended {
        let child = self.child.as_mut().expect("not waited for");
        if !child.ends_within(limit) {
            panic!("the job does not end: {:?}", self.try_status());
        }
        self.take_end()
    }

    /// The end of a job that has ended.
    fn take_end(&mut self) -> Ended {
        let (code, output) = self.child.take().expect("not waited for").wait();
        Ended { code, output, summary: read_summary(&self.job_dir) }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            // A test has failed: end the job in order, so that its workers end too. A master that
            // hangs, or is stopped, is killed.
            send(child.pid(), Signal::TERM);
            std::thread::sleep(Duration::from_millis(100));
            send(child.pid(), Signal::TERM);
            child.ends_within(Duration::from_secs(60));
        }
    }
}

impl Ended {
    /// The exit code, and why the job ended: its error, or what was printed.
    pub fn cause(&self) -> String {
        let error = self.summary.as_ref().and_then(|summary| summary.error.as_deref());
        format!("exit code {:?}: {}", self.code, error.unwrap_or_else(|| self.output.trim()))
    }

    /// The summary.
    pub fn summary(&self) -> &Summary {
        self.summary.as_ref().unwrap_or_else(|| panic!("no summary was written: {}", self.output))
    }

    /// Asserts the command's exit code and the job's final state.
    pub fn assert_outcome(&self, code: i32, state: &str) {
        let state_shown = self.summary.as_ref().map(|summary| &*summary.state);
        assert_eq!((self.code, state_shown), (Some(code), Some(state)), "{}", self.output);
    }

    /// Asserts that the job has trained every record of every epoch exactly once.
    pub fn assert_exactly_once(&self, context: &str, records: u64, epochs: u64) {
        assert_exactly_once(
            self.summary(),
            &format!("{context}: {}", self.output),
            records,
            epochs,
        );
        assert_eq!(self.code, Some(0), "{context}: {}", self.output);
    }

    /// The job's memberships, oldest first.
    pub fn memberships(&self) -> &[MembershipChange] {
        &self.summary().memberships
    }

    /// Causes of the job's memberships, oldest first.
    pub fn causes(&self) -> Vec<Cause> {
        self.memberships().iter().map(|membership| membership.cause).collect()
    }

    /// Asserts that no worker was lost or replaced, and that `generation` was the last one.
    pub fn assert_undisturbed(&self, generation: Generation) {
        let last = self.memberships().last().map(|membership| membership.generation);
        assert_eq!(last, Some(generation), "{:?}", self.memberships());
        assert_eq!((self.lost(), self.summary().workers.restarts), (Vec::new(), 0));
    }

    /// Workers that were lost, in the order of the memberships that report it.
    pub fn lost(&self) -> Vec<WorkerId> {
        self.memberships().iter().flat_map(|membership| membership.lost.iter().copied()).collect()
    }
}

/// Asserts that a job of the counting model has trained every record of every epoch exactly once.
pub fn assert_exactly_once(summary: &Summary, context: &str, records: u64, epochs: u64) {
    let total = records * epochs;
    assert_eq!(summary.records, each_once(total), "{context}");
    assert_eq!(summary.state, "completed", "{context}");
    // The model's own summary: the lowest and the highest count over all records, and their sum.
    let counts = format!("{epochs} {epochs} {total}");
    assert_eq!(summary.model_summary.as_ref(), Some(&counts), "{context}");
}

/// What a summary reports if each of `records` was counted once.
pub fn each_once(records: u64) -> RecordsSummary {
    RecordsSummary { expected: records, counted: records, ..RecordsSummary::default() }
}

/// What a summary reports of a stopped job if each of `counted` records was counted once.
pub fn once_of(expected: u64, counted: u64) -> RecordsSummary {
    let not_trained = expected - counted;
    RecordsSummary { expected, counted, not_trained, ..RecordsSummary::default() }
}

/// The summary in a job's directory; `None` if there is none.
pub fn read_summary(job_dir: &Path) -> Option<Summary> {
    let bytes = std::fs::read(job_dir.join("summary.json")).ok()?;
    let summary = serde_json::from_slice(&bytes);
    Some(summary.unwrap_or_else(|error| {
        panic!("{error} in the summary {}", String::from_utf8_lossy(&bytes))
    }))
}

fn command(words: &[OsString]) -> std::process::Command {
    let (program, args) = words.split_first().expect("there is a program at least");
    let mut command = std::process::Command::new(program);
    command.args(args);
    command
}

fn socket_inodes(pid: u32) -> Vec<String> {
    let folder = Path::new("/proc").join(pid.to_string()).join("fd");
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let links = entries.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    links
        .filter_map(|l| Some(l.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned()))
        .collect()
}

/// State of a listening socket in the system's table.
const LISTENING: &str = "0A";
