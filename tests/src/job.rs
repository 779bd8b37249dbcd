//! One job as a real process with real workers.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

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
    #[must_use]
    pub fn verb(self, verb: &'static str) -> Self {
        Self { verb, ..self }
    }

    /// Adds `--name value`.
    #[must_use]
    pub fn option(mut self, name: &str, value: impl Into<OsString>) -> Self {
        self.options.push(format!("--{name}").into());
        self.options.push(value.into());
        self
    }

    /// Adds `--name`.
    #[must_use]
    pub fn flag(mut self, name: &str) -> Self {
        self.options.push(format!("--{name}").into());
        self
    }

    /// Sets a prefix for all commands; it gets the command as its last arguments.
    #[must_use]
    pub fn started_by<A: Into<OsString>>(mut self, starter: impl IntoIterator<Item = A>) -> Self {
        self.starter = starter.into_iter().map(Into::into).collect();
        self
    }

    /// Starts it.
    ///
    /// # Panics
    /// The command can't be started.
    #[must_use]
    pub fn start(self) -> Running {
        let starter = [self.starter, vec![self.elasticdl.into()]].concat();
        let child = command(&starter)
            .args([self.verb, "--local", "--job-dir"])
            .arg(&self.job_dir)
            .args(&self.options)
            .arg("--")
            .args(&self.program)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the command under test starts");
        Running { child: Some(child), starter, job_dir: self.job_dir, folder: None }
    }

    /// Starts the job and waits for its end.
    #[must_use]
    pub fn run(self) -> Ended {
        self.start().wait()
    }
}

/// A running job. Dropping it ends it.
#[derive(Debug)]
pub struct Running {
    child: Option<Child>,
    /// `elasticdl` and its prefix.
    starter: Vec<OsString>,
    job_dir: PathBuf,
    /// Temporary folder that is removed after the job.
    folder: Option<TempDir>,
}

/// The result of a job that has ended.
#[derive(Debug)]
pub struct Ended {
    /// Exit code of the command; `None` if a signal ended it.
    pub code: Option<i32>,
    /// What it printed.
    pub output: String,
    /// The summary, or null if none was written.
    pub summary: Value,
}

impl Running {
    /// Keeps `folder` for as long as the job runs.
    #[must_use]
    pub fn keeping(mut self, folder: TempDir) -> Self {
        self.folder = Some(folder);
        self
    }

    /// The command's process.
    ///
    /// # Panics
    /// Never, before `wait`.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("not waited for").id()
    }

    /// Whether the command is running.
    ///
    /// # Panics
    /// The state of the process can't be read.
    pub fn is_running(&mut self) -> bool {
        let child = self.child.as_mut().expect("not waited for");
        child.try_wait().expect("a child can be asked for").is_none()
    }

    /// Output of `elasticdl status --json`; null while there is no answer.
    #[must_use]
    pub fn status(&self) -> Value {
        let output = command(&self.starter)
            .arg("status")
            .arg(&self.job_dir)
            .arg("--json")
            .output()
            .expect("the command under test starts");
        serde_json::from_slice(&output.stdout).unwrap_or(Value::Null)
    }

    /// Runs `elasticdl checkpoint` and returns the path of the checkpoint.
    ///
    /// # Panics
    /// The command fails.
    #[must_use]
    pub fn checkpoint(&self) -> String {
        let output = command(&self.starter).arg("checkpoint").arg(&self.job_dir).output();
        let output = output.expect("the command under test starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    /// Runs `elasticdl scale --num-workers`.
    ///
    /// # Panics
    /// The command fails.
    pub fn scale(&self, num_workers: u32) {
        let status = self.try_scale(num_workers);
        assert!(status.success(), "scale to {num_workers}: {status}");
    }

    /// Runs `elasticdl scale --num-workers`, which fails if the job has ended.
    ///
    /// # Panics
    /// The command can't be started.
    #[must_use]
    pub fn try_scale(&self, num_workers: u32) -> std::process::ExitStatus {
        command(&self.starter)
            .arg("scale")
            .arg(&self.job_dir)
            .args(["--num-workers", &num_workers.to_string()])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .expect("the command under test starts")
    }

    /// Waits until the status satisfies `wanted`, and returns that status.
    ///
    /// # Panics
    /// It does not within a minute, or the job ends before.
    pub fn wait_for(&mut self, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let status = self.status();
            if wanted(&status) {
                return status;
            }
            assert!(self.is_running(), "the job ended before: {what}: {:?}", self.take_end());
            assert!(Instant::now() < deadline, "not within a minute: {what}: {status}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Process ids of the job's workers, by worker.
    #[must_use]
    pub fn workers(&self) -> BTreeMap<u64, u32> {
        let status = self.status();
        let workers = status["workers"].as_array().map(Vec::as_slice).unwrap_or_default();
        let entry =
            |w: &Value| Some((w["worker"].as_u64()?, u32::try_from(w["pid"].as_u64()?).ok()?));
        workers.iter().filter_map(entry).collect()
    }

    /// The job's members in rank order, with their process ids.
    #[must_use]
    pub fn members(&self) -> Vec<(u64, u32)> {
        let status = self.status();
        let workers = status["workers"].as_array().map(Vec::as_slice).unwrap_or_default();
        let entry = |w: &Value| {
            Some((
                w["rank"].as_u64()?,
                (w["worker"].as_u64()?, u32::try_from(w["pid"].as_u64()?).ok()?),
            ))
        };
        let by_rank: BTreeMap<u64, (u64, u32)> = workers.iter().filter_map(entry).collect();
        by_rank.into_values().collect()
    }

    /// Waits until the group has `count` members.
    ///
    /// # Panics
    /// As for [`Running::wait_for`].
    pub fn wait_for_members(&mut self, count: usize) {
        self.wait_for(&format!("{count} members"), |status| {
            let workers = status["workers"].as_array().into_iter().flatten();
            workers.filter(|w| w["rank"].is_u64()).count() == count
        });
    }

    /// Ports on which the job's processes listen.
    ///
    /// # Panics
    /// The system's socket tables can't be read.
    #[must_use]
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
    ///
    /// # Panics
    /// The command can't be waited for.
    pub fn kill_master(&mut self) {
        let child = self.child.as_mut().expect("not waited for");
        child.kill().expect("a child can be killed");
        child.wait().expect("a child can be waited for");
    }

    /// Stops the master's process until [`Running::continue_master`].
    pub fn stop_master(&self) {
        send(self.child.as_ref().expect("not waited for").id(), Signal::STOP);
    }

    /// See [`Running::stop_master`].
    pub fn continue_master(&self) {
        send(self.child.as_ref().expect("not waited for").id(), Signal::CONT);
    }

    /// Waits until `count` workers are members, and returns the group's generation.
    pub fn wait_for_group_of(&mut self, count: usize) -> Option<u64> {
        let status = self.wait_for("all members", |status| {
            let ranked =
                status["workers"].as_array().into_iter().flatten().filter(|w| w["rank"].is_u64());
            ranked.count() == count
        });
        status["generation"].as_u64()
    }

    /// Starts another master after [`Running::kill_master`]: `elasticdl train --resume`.
    ///
    /// # Panics
    /// The command can't be started.
    pub fn resume(&mut self) {
        let child = command(&self.starter)
            .args(["train", "--resume"])
            .arg(&self.job_dir)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the command under test starts");
        self.child = Some(child);
    }

    /// The error that `elasticdl status` prints when it fails.
    ///
    /// # Panics
    /// The command can't be started.
    #[must_use]
    pub fn status_error(&self) -> String {
        let output = command(&self.starter)
            .arg("status")
            .arg(&self.job_dir)
            .output()
            .expect("the command under test starts");
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    /// Sends a signal to the command itself.
    pub fn signal(&self, signal: Signal) {
        send(self.pid(), signal);
    }

    /// Waits for the job's end.
    ///
    /// # Panics
    /// It does not end within three minutes.
    #[must_use]
    pub fn wait(mut self) -> Ended {
        let deadline = Instant::now() + Duration::from_secs(180);
        // The output is short enough for the pipes, so nothing has to read it meanwhile.
        while self.is_running() {
            assert!(Instant::now() < deadline, "the job does not end: {}", self.status());
            std::thread::sleep(Duration::from_millis(5));
        }
        self.take_end()
    }

    fn take_end(&mut self) -> Ended {
        let output =
            self.child.take().expect("not waited for").wait_with_output().expect("it has ended");
        let text = [output.stdout, output.stderr]
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        let summary = std::fs::read(self.job_dir.join("summary.json")).unwrap_or_default();
        Ended {
            code: output.status.code(),
            output: text.concat(),
            summary: serde_json::from_slice(&summary).unwrap_or(Value::Null),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            // A test has failed: end the job in order, so that its workers end too.
            send(child.id(), Signal::TERM);
            std::thread::sleep(Duration::from_millis(100));
            send(child.id(), Signal::TERM);
            let _ = child.wait();
        }
    }
}

impl Ended {
    /// Asserts that the job has trained every record of every epoch exactly once.
    ///
    /// # Panics
    /// It has not.
    pub fn assert_exactly_once(&self, context: &str, records: u64, epochs: u64) {
        let total = records * epochs;
        let expected = serde_json::json!({
            "expected": total, "counted": total, "missing": 0, "repeated": 0
        });
        assert_eq!(self.summary["records"], expected, "{context}: {}", self.output);
        assert_eq!(self.summary["state"], "completed", "{context}: {}", self.output);
        // The model's own summary: the lowest and the highest count over all records, and their
        // sum.
        let counts = format!("{epochs} {epochs} {total}");
        assert_eq!(self.summary["model_summary"], counts.as_str(), "{context}: {}", self.output);
        assert_eq!(self.code, Some(0), "{context}: {}", self.output);
    }
}

fn command(words: &[OsString]) -> std::process::Command {
    let (program, args) = words.split_first().expect("there is a program at least");
    let mut command = std::process::Command::new(program);
    command.args(args);
    command
}

impl Ended {
    /// The job's memberships, oldest first.
    ///
    /// # Panics
    /// There is no summary.
    #[must_use]
    pub fn memberships(&self) -> &[Value] {
        self.summary["memberships"].as_array().expect("a job that ran has memberships")
    }

    /// Asserts that no worker was lost or replaced, and that `generation` was the last one.
    ///
    /// # Panics
    /// It was not so.
    pub fn assert_undisturbed(&self, generation: Option<u64>) {
        let last = self.memberships().last().and_then(|m| m["generation"].as_u64());
        assert_eq!(last, generation, "{:?}", self.memberships());
        assert_eq!((self.lost(), &self.summary["workers"]["restarts"]), (Vec::new(), &0.into()));
    }

    /// Workers that were lost, in the order of the memberships that report it.
    #[must_use]
    pub fn lost(&self) -> Vec<u64> {
        let lost = self.memberships().iter().filter_map(|m| m["lost"].as_array()).flatten();
        lost.filter_map(Value::as_u64).collect()
    }
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

/// Sends a signal; a process that has ended is not an error.
pub fn send(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, signal);
    }
}

/// Whether a process exists and is no zombie.
#[must_use]
pub fn is_alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat"));
    // The state follows the command's name in brackets.
    stat.is_ok_and(|s| s.rsplit(')').next().is_some_and(|rest| !rest.trim_start().starts_with('Z')))
}
