//! Lookup of a job by its name, and jobs in a cluster.
//!
//! A job with a `/` is a directory. With --namespace or --context it is a job of that cluster. Any
//! other name is looked up among the jobs of this machine first, and then in the configured
//! cluster.

use std::io::{Write as _, stdout};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use tokio::runtime::Runtime;

use super::checkpoint::CheckpointWait;
use super::client::{directory_of, print};
use super::cluster::{ClusterTarget, to_failure};
use super::render::StatusJson;
use super::{EXIT_OK, Failure, follow, new_runtime};
use crate::job::LaunchId;
use crate::kube::anchor::{Anchor, CHECKPOINT, Data, NUM_WORKERS, STATUS, STOP, SUMMARY};
use crate::kube::client::Cluster;
use crate::kube::logs::LogSource;
use crate::kube::objects::{TASK, Task};
use crate::kube::{logs, master_pods, objects, pods, submit};

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
            let launch = logs::first_of_pod(LaunchId(worker.worker.0), per_pod);
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

    /// Deletes the objects of the job. Returns the exit code.
    pub(super) fn delete(&self) -> Result<u8, Failure> {
        self.runtime.block_on(submit::delete(&self.cluster, &self.name)).map_err(to_failure)?;
        print(&format!("{} and its objects are deleted\n", self.name))
    }

    /// Prints the logs of `source`. Returns the exit code.
    pub(super) fn logs(&self, source: LogSource, follow: bool) -> Result<u8, Failure> {
        let copied = self.runtime.block_on(logs::copy(
            &self.cluster,
            &self.anchor,
            &self.name,
            source,
            follow,
            |bytes| stdout().write_all(bytes).is_ok(),
        ));
        copied.map_err(to_failure).map(|()| EXIT_OK)
    }

    /// Stops the job at the end of its step. Returns the exit code.
    pub(super) fn stop(&self) -> Result<u8, Failure> {
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
        if data.contains_key(SUMMARY) {
            return Err(Failure::failed(format!("the job {} has ended", self.name)));
        }
        let health = self.runtime.block_on(master_pods::inspect(&self.cluster, &self.name));
        match health.failed {
            Some(why) => Err(Failure::failed(self.job_failed(&why))),
            None => Ok(()),
        }
    }
}

/// Interval between reads of the anchor while a checkpoint is awaited.
const POLL: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_never_names_a_job_of_a_cluster() {
        let target = ClusterTarget { namespace: Some("ml".into()), context: None };
        assert!(find(Path::new("./job"), &target).is_err());
        assert!(matches!(find(Path::new("./job"), &ClusterTarget::default()),
                     Ok(JobLookup::Local(path)) if path == Path::new("./job")));
    }
}
