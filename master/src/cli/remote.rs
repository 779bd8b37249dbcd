//! `elasticdl list`, `logs`, `stop` and `delete`, and the lookup of a job by its name.
//!
//! A job with a `/` is a directory. With --namespace or --context it is a job of that cluster. Any
//! other name is looked up among the jobs of this machine first, and then in the configured
//! cluster.

use std::fmt::Write as _;
use std::fs;
use std::io::{Read as _, Write as _, stdout};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use clap::Args;
use k8s_openapi::api::core::v1::ConfigMap;
use serde_json::Value;
use tokio::runtime::Runtime;

use super::checkpoint::CheckpointWait;
use super::client::{directory_of, print};
use super::cluster::{ClusterTarget, to_failure};
use super::render::StatusJson;
use super::{EXIT_OK, Failure, follow, new_runtime};
use crate::job::LaunchId;
use crate::jobdir::{self, DeleteError, JobDirError, LookupError, StopError, StopTarget, quoted};
use crate::kube::anchor::{self, Anchor, CHECKPOINT, Data, NUM_WORKERS, STATUS, STOP, SUMMARY};
use crate::kube::client::{Cluster, ClusterError};
use crate::kube::logs::LogSource;
use crate::kube::master_pods::{self, MasterHealth};
use crate::kube::objects::{TASK, Task};
use crate::kube::{logs, objects, pods, submit};
use crate::progress::one_line;

/// Arguments of `elasticdl delete`.
#[derive(Args, Debug)]
pub struct DeleteArgs {
    /// Name of the job, or the path of its directory (with a `/`).
    #[arg(value_name = "JOB")]
    pub job: PathBuf,

    #[command(flatten)]
    #[allow(missing_docs, reason = "it would be taken for the command's own help")]
    pub target: ClusterTarget,
}

/// Arguments of `elasticdl list`.
#[derive(Args, Debug)]
pub struct ListArgs {
    /// List only the jobs of this machine.
    #[arg(long, conflicts_with_all = ["namespace", "context"])]
    pub local: bool,

    #[command(flatten)]
    #[allow(missing_docs, reason = "it would be taken for the command's own help")]
    pub target: ClusterTarget,
}

/// Arguments of `elasticdl logs`.
#[derive(Args, Debug)]
pub struct LogsArgs {
    /// Name of the job, or the path of its directory (with a `/`).
    #[arg(value_name = "JOB")]
    pub job: PathBuf,

    /// Print the log of the worker of this launch. [default: the master]
    #[arg(long, value_name = "LAUNCH")]
    pub launch: Option<u64>,

    /// Continue to print lines as they are written.
    #[arg(long, short)]
    pub follow: bool,

    #[command(flatten)]
    #[allow(missing_docs, reason = "it would be taken for the command's own help")]
    pub target: ClusterTarget,
}

/// Arguments of `elasticdl stop`.
#[derive(Args, Debug)]
pub struct StopArgs {
    /// Name of the job, or the path of its directory (with a `/`).
    #[arg(value_name = "JOB")]
    pub job: PathBuf,

    #[command(flatten)]
    #[allow(missing_docs, reason = "it would be taken for the command's own help")]
    pub target: ClusterTarget,
}

/// Location of a job.
pub(super) enum JobLookup {
    /// A directory of this machine, which may not exist.
    Local(PathBuf),
    /// A job of a cluster, which may not exist either.
    Cluster(Box<ClusterJob>),
}

/// Locates the job that the user names.
pub(super) fn find(job: &Path, target: &ClusterTarget) -> Result<JobLookup, Failure> {
    let directory = directory_of(job);
    let is_path = directory == job;
    if is_path && target.is_given() {
        return Err(Failure::usage(
            "a path can't be combined with --namespace and --context; a job in a cluster is given \
             by its name",
        ));
    }
    if is_path
        || (!target.is_given() && directory.is_dir())
        || (!target.is_given() && !Cluster::is_configured())
    {
        return Ok(JobLookup::Local(directory));
    }
    let name = job.to_str().ok_or_else(|| Failure::usage("the job's name is not UTF-8"))?;
    let runtime = new_runtime()?;
    let cluster = runtime.block_on(Cluster::connect(&target.choice())).map_err(to_failure)?;
    let anchor = Anchor::new(&cluster, name);
    Ok(JobLookup::Cluster(Box::new(ClusterJob { runtime, anchor, cluster, name: name.into() })))
}

/// A job in a cluster.
pub(super) struct ClusterJob {
    runtime: Runtime,
    cluster: Cluster,
    anchor: Anchor,
    name: String,
}

impl ClusterJob {
    /// The status that the master has written last.
    pub(super) fn status(&self) -> Result<StatusJson, Failure> {
        let anchor = self.runtime.block_on(self.anchor.read()).map_err(to_failure)?;
        let data = anchor.data.unwrap_or_default();
        let health = self.runtime.block_on(master_pods::inspect(&self.cluster, &self.name));
        let failed =
            health.failed.filter(|_| !data.contains_key(SUMMARY)).map(|why| self.job_failed(&why));
        let Some(text) = data.get(STATUS) else {
            let why = failed.or(health.obstacle).unwrap_or_else(|| "is it running?".into());
            let name = &self.name;
            return Err(Failure::failed(format!(
                "the master of {name} has not reported a status yet: {why}"
            )));
        };
        let mut status: StatusJson = serde_json::from_str(text).map_err(|e| {
            Failure::failed(format!("the status in the job's anchor can't be read: {e}"))
        })?;
        if let Some(why) = failed {
            status.state = "failed".into();
            status.events.push(why);
        }
        let task = data.get(TASK).and_then(|text| serde_json::from_str::<Task>(text).ok());
        let per_pod = task.map_or(1, |task| task.job.workers_per_pod);
        let uid = anchor.metadata.uid.unwrap_or_default();
        // Without the permission to list pods, the status has no nodes.
        let listed = self.runtime.block_on(pods::list(&self.cluster, &uid)).unwrap_or_default();
        for worker in &mut status.workers {
            let launch = logs::first_of_pod(LaunchId(worker.worker), per_pod);
            let pod = listed
                .iter()
                .find(|pod| objects::launch_and_slot(pod).is_some_and(|(l, _)| l == launch));
            worker.pod = Some(objects::worker_name(&self.name, launch));
            worker.node = pod.and_then(|pod| pod.spec.as_ref()?.node_name.clone());
        }
        Ok(status)
    }

    /// Error message for a job whose Job has failed before a master recorded its end.
    fn job_failed(&self, why: &str) -> String {
        let (name, namespace) = (&self.name, &self.cluster.namespace);
        format!(
            "the job {name} has failed, and no other master comes: the Job {} reports {why}; \
             `elasticdl delete {name} --namespace {namespace}` removes it",
            objects::master_name(name)
        )
    }

    /// Shows the job until it ends. Returns the exit code.
    pub(super) fn follow(&self) -> Result<u8, Failure> {
        let output = follow::OutputMode { quiet: false, summary: None };
        self.runtime.block_on(follow::follow(&self.cluster, &self.name, output))
    }

    /// Requests another number of workers.
    pub(super) fn scale(&self, num_workers: u32) -> Result<u8, Failure> {
        let data = self.data()?;
        self.check_running(&data)?;
        let task = data.get(TASK).and_then(|text| serde_json::from_str::<Task>(text).ok());
        let spec =
            task.ok_or_else(|| Failure::failed("the task in the job's anchor can't be read"))?.job;
        spec.check_scale(num_workers).map_err(Failure::usage)?;
        let status =
            data.get(STATUS).and_then(|text| serde_json::from_str::<StatusJson>(text).ok());
        let was = status.map_or(spec.num_workers, |status| status.workers_desired);
        self.request(NUM_WORKERS, num_workers.to_string())?;
        print(&format!("workers: {was} -> {num_workers}\n"))
    }

    /// Requests a checkpoint and waits for it.
    pub(super) fn checkpoint(&self, timeout: Duration) -> Result<u8, Failure> {
        let data = self.data()?;
        self.check_running(&data)?;
        let known = |data: &Data| {
            let status =
                data.get(STATUS).and_then(|text| serde_json::from_str::<StatusJson>(text).ok());
            status.map(|status| (status.step, status.checkpoints)).unwrap_or_default()
        };
        let (requested_at, checkpoints) = known(&data);
        if checkpoints.is_none() {
            let why = "this job writes no checkpoints (it was started without --checkpoint-dir), \
                or has not started yet";
            return Err(Failure::usage(why));
        }
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        self.request(CHECKPOINT, now.as_millis().to_string())?;
        let mut wait = CheckpointWait::new(timeout);
        loop {
            let data = self.data()?;
            if let Some(code) = wait.poll(requested_at, known(&data).1)? {
                return Ok(code);
            }
            self.check_running(&data)?;
            std::thread::sleep(POLL);
        }
    }

    fn stop(&self) -> Result<u8, Failure> {
        self.check_running(&self.data()?)?;
        self.request(STOP, "true".into())?;
        print(&format!("{} stops at the end of its step\n", self.name))
    }

    fn request(&self, key: &str, value: String) -> Result<(), Failure> {
        self.runtime
            .block_on(self.anchor.write(&Data::from([(key.into(), value)])))
            .map_err(to_failure)
    }

    fn data(&self) -> Result<Data, Failure> {
        let anchor = self.runtime.block_on(self.anchor.read()).map_err(to_failure)?;
        Ok(anchor.data.unwrap_or_default())
    }

    fn check_running(&self, data: &Data) -> Result<(), Failure> {
        match data.get(SUMMARY) {
            Some(_) => Err(Failure::failed(format!("the job {} has ended", self.name))),
            None => {
                match self.runtime.block_on(master_pods::inspect(&self.cluster, &self.name)).failed
                {
                    Some(why) => Err(Failure::failed(self.job_failed(&why))),
                    None => Ok(()),
                }
            }
        }
    }
}

/// Deletes a job. Returns the exit code.
pub(super) fn delete(args: &DeleteArgs) -> Result<u8, Failure> {
    match find(&args.job, &args.target)? {
        JobLookup::Cluster(job) => {
            job.runtime.block_on(submit::delete(&job.cluster, &job.name)).map_err(to_failure)?;
            print(&format!("{} and its objects are deleted\n", job.name))
        }
        JobLookup::Local(root) => {
            let left = jobdir::delete(&root).map_err(|error| match error {
                DeleteError::Lookup(error) => Failure::usage(error.to_string()),
                DeleteError::InUse(error @ JobDirError::Running { .. }) => {
                    Failure::failed(format!("{error}, or run `elasticdl stop {}`", quoted(&root)))
                }
                error => Failure::failed(error.to_string()),
            })?;
            match left.as_slice() {
                [] => print(&format!("{} is deleted\n", root.display())),
                [first, ..] => print(&format!(
                    "the job in {} is deleted; the folder stays, because it has files that no job \
                     has written: {}{}\n",
                    root.display(),
                    first.display(),
                    if left.len() > 1 {
                        format!(" and {} more", left.len() - 1)
                    } else {
                        String::new()
                    }
                )),
            }
        }
    }
}

/// Lists all jobs. Returns the exit code.
pub(super) fn list(args: &ListArgs) -> Result<u8, Failure> {
    let mut rows = Vec::new();
    if !args.target.is_given() {
        rows.extend(local_rows(&jobdir::default_root()));
    }
    if args.target.is_given() || (!args.local && Cluster::is_configured()) {
        let listed = new_runtime()?.block_on(async {
            let cluster = Cluster::connect(&args.target.choice()).await?;
            let anchors = anchor::list_all(&cluster).await?;
            let failed = master_pods::failed_jobs(&cluster).await;
            let mut rows = Vec::new();
            for anchor in anchors {
                let has_status = anchor.data.as_ref().is_some_and(|data| data.contains_key(STATUS));
                let name = anchor.metadata.name.clone().unwrap_or_default();
                let mut health =
                    MasterHealth { failed: failed.get(&name).cloned(), obstacle: None };
                if !has_status {
                    health = master_pods::inspect(&cluster, &name).await;
                }
                rows.extend(cluster_row(&cluster.namespace, anchor, health));
            }
            Ok::<_, ClusterError>(rows)
        });
        rows.extend(listed.map_err(to_failure)?);
    }
    print(&to_table(&rows))
}

/// Stops a job. Returns the exit code.
pub(super) fn stop(args: &StopArgs) -> Result<u8, Failure> {
    match find(&args.job, &args.target)? {
        JobLookup::Cluster(job) => job.stop(),
        JobLookup::Local(root) => {
            let target = jobdir::stop(&root).map_err(|error| match error {
                StopError::Lookup(LookupError::NotRunning { .. }) => {
                    Failure::failed(error.to_string())
                }
                StopError::Lookup(error) => Failure::usage(error.to_string()),
                error => Failure::failed(error.to_string()),
            })?;
            print(&match target {
                StopTarget::Master => {
                    format!("the job in {} stops at the end of its step\n", root.display())
                }
                StopTarget::Workers(workers) => format!(
                    "the master of the job in {} is gone; SIGTERM was sent to {workers} of its \
                     workers\n",
                    root.display()
                ),
            })
        }
    }
}

/// Prints logs. Returns the exit code.
pub(super) fn logs(args: &LogsArgs) -> Result<u8, Failure> {
    match find(&args.job, &args.target)? {
        JobLookup::Cluster(job) => {
            let source =
                args.launch.map_or(LogSource::Master, |launch| LogSource::Worker(LaunchId(launch)));
            let copied = job.runtime.block_on(logs::copy(
                &job.cluster,
                &job.anchor,
                &job.name,
                source,
                args.follow,
                |bytes| stdout().write_all(bytes).is_ok(),
            ));
            copied.map_err(to_failure).map(|()| EXIT_OK)
        }
        JobLookup::Local(root) => {
            if let Err(error @ LookupError::NoSuchJob { .. }) = jobdir::look_up(&root) {
                return Err(Failure::usage(error.to_string()));
            }
            let folder = root.join("logs");
            let path = match args.launch {
                Some(launch) => jobdir::worker_log(&folder, LaunchId(launch)),
                None => folder.join("master.log"),
            };
            copy_file(&path, args.follow.then_some(&root))
        }
    }
}

/// Copies a log to standard output; with `follow`, until the job in that directory has ended.
fn copy_file(path: &Path, follow: Option<&PathBuf>) -> Result<u8, Failure> {
    let failed = |e: std::io::Error| Failure::usage(format!("can't read {}: {e}", path.display()));
    let mut file = fs::File::open(path).map_err(failed)?;
    let mut bytes = Vec::new();
    loop {
        let runs = follow.is_some_and(|root| jobdir::look_up(root).is_ok());
        bytes.clear();
        file.read_to_end(&mut bytes).map_err(failed)?;
        if stdout().write_all(&bytes).is_err() || !runs {
            return Ok(EXIT_OK);
        }
        std::thread::sleep(FOLLOW_INTERVAL);
    }
}

/// One line of the list: namespace, name, state, progress, workers.
type Row = [String; 5];

fn local_rows(root: &Path) -> Vec<Row> {
    let mut names: Vec<_> =
        fs::read_dir(root).into_iter().flatten().flatten().map(|e| e.path()).collect();
    names.sort();
    let row = |path: PathBuf| {
        let name = path.file_name()?.to_str()?.to_owned();
        let state = match jobdir::look_up(&path) {
            Ok(_) if jobdir::is_running(&path) => "running".into(),
            Err(LookupError::NoSuchJob { .. }) => return None,
            Err(LookupError::NotRunning { summary: Some(summary), .. }) => {
                let summary: Option<Value> = serde_json::from_slice(&fs::read(summary).ok()?).ok();
                summary?["state"].as_str()?.to_owned()
            }
            _ => "lost".into(),
        };
        Some(["(this machine)".into(), name, state, "-".into(), "-".into()])
    };
    names.into_iter().filter_map(row).collect()
}

fn cluster_row(namespace: &str, anchor: ConfigMap, health: MasterHealth) -> Option<Row> {
    let name = anchor.metadata.name?;
    let data = anchor.data.unwrap_or_default();
    let status = data.get(STATUS).and_then(|text| serde_json::from_str::<StatusJson>(text).ok());
    let failed = health.failed.filter(|_| !data.contains_key(SUMMARY));
    let (state, progress, workers) = match status {
        Some(status) if failed.is_some() => {
            let progress = format!("{:.1} %", status.progress * 100.0);
            ("failed (no master)".into(), progress, format!("-/{}", status.workers_desired))
        }
        Some(status) => {
            let members = status.workers.iter().filter(|w| w.rank.is_some()).count();
            let progress = format!("{:.1} %", status.progress * 100.0);
            (status.state, progress, format!("{members}/{}", status.workers_desired))
        }
        None if failed.is_some() => ("failed (no master)".into(), "-".into(), "-".into()),
        None => {
            let why = health.obstacle.map(|why| format!(" (no master: {})", one_line(&why)));
            (format!("submitted{}", why.unwrap_or_default()), "-".into(), "-".into())
        }
    };
    Some([namespace.into(), name, state, progress, workers])
}

fn to_table(rows: &[Row]) -> String {
    let head = ["NAMESPACE", "JOB", "STATE", "PROGRESS", "WORKERS"].map(String::from);
    let all: Vec<&Row> = std::iter::once(&head).chain(rows).collect();
    let width =
        |column: usize| all.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let mut text = String::new();
    for row in all {
        let cells: Vec<String> =
            row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:<width$}")).collect();
        writeln!(text, "{}", cells.join("  ").trim_end()).expect("a string takes any text");
    }
    text
}

/// Interval between reads of the anchor while a checkpoint is awaited.
const POLL: Duration = Duration::from_secs(1);
const FOLLOW_INTERVAL: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_columns_of_a_list_are_aligned() {
        let row = |state: &str| ["ns", "job", state, "-", "3/4"].map(String::from);
        let expected = "\
NAMESPACE  JOB  STATE      PROGRESS  WORKERS
ns         job  running    -         3/4
ns         job  completed  -         3/4
";
        assert_eq!(to_table(&[row("running"), row("completed")]), expected);
    }

    #[test]
    fn a_path_never_names_a_job_of_a_cluster() {
        let target = ClusterTarget { namespace: Some("ml".into()), context: None };
        assert!(find(Path::new("./job"), &target).is_err());
        assert!(matches!(find(Path::new("./job"), &ClusterTarget::default()),
                     Ok(JobLookup::Local(path)) if path == Path::new("./job")));
    }
}
