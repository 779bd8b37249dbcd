//! A job in a cluster, through its anchor and the API server.

mod follow;
mod page;

use std::fmt::Display;
use std::time::{Duration, SystemTime};

use elasticdl_master::cluster_page;
use elasticdl_master::job::{JobSpec, Scaling};
use elasticdl_master::kube::anchor::{
    Anchor, CHECKPOINT, Data, DesiredState, STATUS, STOP, STOP_AT_ONCE, SUMMARY, SUSPEND, WEIGHT,
};
use elasticdl_master::kube::client::{Cluster, ClusterChoice, ClusterError};
use elasticdl_master::kube::facts::read_facts;
use elasticdl_master::kube::inspection::{self, InspectionError};
use elasticdl_master::kube::logs::LogSource;
use elasticdl_master::kube::objects::Task;
use elasticdl_master::kube::priority_tiers::Weight;
use elasticdl_master::kube::requests::{DELETE, REQUESTED_BY, UserRequest, request};
use elasticdl_master::kube::scaling::Rescaling;
use elasticdl_master::kube::{
    anchor, logs, master_pods, objects, pods, route, scaling, silence, submit,
};
use elasticdl_master::lineage::JobFacts;
use elasticdl_proto::{DisconnectedStatus, Inspection, Status};
use tokio::runtime::Runtime;

pub(crate) use self::follow::{FollowOutput, detach, follow};
use super::checkpoint_wait::CheckpointWait;
use super::handle::{
    ENDING, JobHandle, JobLog, Scaled, WatchOptions, describe_ending, describe_suspension,
};
use crate::process::{Failure, new_runtime};
use crate::render::{JobEnd, Paths, summary_to_table};

/// A job in a cluster.
pub(super) struct ClusterHandle {
    runtime: Runtime,
    cluster: Cluster,
    anchor: Anchor,
    name: String,
}

impl ClusterHandle {
    pub(super) fn connect(choice: &ClusterChoice, name: String) -> Result<Self, Failure> {
        let runtime = new_runtime()?;
        let cluster = runtime.block_on(Cluster::connect(choice))?;
        let anchor = Anchor::new(&cluster, &name);
        Ok(Self { runtime, cluster, anchor, name })
    }

    fn data(&self) -> Result<Data, Failure> {
        let read = self.runtime.block_on(self.anchor.read());
        Ok(read.map_err(|error| self.explain(error))?.data.unwrap_or_default())
    }

    /// A Job whose anchor was deleted fails, and is all that is left of the job.
    fn explain(&self, error: ClusterError) -> Failure {
        let why = match &error {
            ClusterError::NoSuchJob { .. } => {
                self.runtime.block_on(master_pods::inspect(&self.cluster, &self.name)).failed
            }
            _ => None,
        };
        why.map_or_else(|| error.into(), |why| Failure::failed(self.job_failed(&why)))
    }

    /// Requests a change of the job, by keys of its anchor.
    fn request(&self, keys: Data) -> Result<(), Failure> {
        Ok(self.runtime.block_on(request(&self.cluster, &self.anchor, keys))?)
    }

    /// Checks that the job has not ended. Returns what prevents a master from running, if anything.
    fn check_running(&self, data: &Data) -> Result<Option<String>, Failure> {
        if data.contains_key(SUMMARY) {
            return Err(Failure::failed(format!("the job {} has ended", self.name)));
        }
        let health = self.runtime.block_on(master_pods::inspect(&self.cluster, &self.name));
        match health.failed {
            Some(why) => Err(Failure::failed(self.job_failed(&why))),
            None => Ok(health.obstacle),
        }
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

    /// What prints the logs of all workers in a cluster.
    fn logs_by_kubectl(&self, follow: bool) -> Failure {
        match self.runtime.block_on(self.anchor.read()).map(|anchor| anchor.metadata.uid) {
            Err(error) => self.explain(error),
            Ok(uid) => Failure::usage(format!(
                "--all is only for jobs of this machine; in a cluster use: kubectl logs \
                 --namespace {} --selector {} --prefix --max-log-requests 100{}",
                self.cluster.namespace,
                objects::worker_selector(&uid.unwrap_or_default()),
                if follow { " --follow" } else { " --tail -1" }
            )),
        }
    }

    /// The status in `data`. Without one the error says what keeps the master from reporting one.
    fn reported(&self, data: &Data, obstacle: Option<String>) -> Result<Status, Failure> {
        let text = data.get(STATUS).ok_or_else(|| {
            let (name, why) = (&self.name, obstacle.as_deref().unwrap_or("is it running?"));
            Failure::failed(format!("the master of {name} has not reported a status yet: {why}"))
        })?;
        serde_json::from_str(text).map_err(|error| unreadable("status", &error))
    }
}

impl JobHandle for ClusterHandle {
    fn ended(&self) -> Result<Option<String>, Failure> {
        let data = self.data()?;
        let Some(json) = data.get(SUMMARY) else { return Ok(None) };
        let summary = serde_json::from_str(json).map_err(|error| unreadable("summary", &error))?;
        Ok(Some(summary_to_table(&summary, Paths::default())))
    }

    fn ended_json(&self) -> Result<Option<String>, Failure> {
        let data = self.data()?;
        let Some(json) = data.get(SUMMARY) else { return Ok(None) };
        let end = JobEnd::parse(json.as_bytes(), anchor::status(&data))
            .map_err(|error| unreadable("summary", &error))?;
        Ok(Some(end.to_json()))
    }

    /// Returns the status that the master has written last.
    fn status(&self) -> Result<Status, Failure> {
        let read = self.runtime.block_on(self.anchor.read());
        let anchor = read.map_err(|error| self.explain(error))?;
        let data = anchor.data.unwrap_or_default();
        let health = self.runtime.block_on(master_pods::inspect(&self.cluster, &self.name));
        let failed =
            health.failed.filter(|_| !data.contains_key(SUMMARY)).map(|why| self.job_failed(&why));
        let mut status = self.reported(&data, failed.clone().or(health.obstacle))?;
        if let Some(why) = failed {
            status.state = "failed".into();
            status.events.push(why);
        } else {
            self.runtime.block_on(silence::note(&self.cluster, &self.name, &data, &mut status));
        }
        let is_away = |worker: &DisconnectedStatus| worker.disconnected_s >= AWAY_S;
        if status.state != silence::NO_MASTER
            && status.workers_disconnected.iter().any(is_away)
            && let Some(why) = self.runtime.block_on(route::obstacle(&self.cluster, &self.name))
        {
            status.events.push(why);
        }
        let per_pod = Task::in_anchor(&data).map_or(1, |task| task.job.workers_per_pod);
        let locating = pods::locate(&self.cluster, &anchor.metadata, per_pod, &mut status.workers);
        self.runtime.block_on(locating);
        Ok(status)
    }

    fn watch(&self, options: &WatchOptions) -> Result<u8, Failure> {
        if options.json {
            return Err(Failure::usage(
                "in a cluster, --watch can't be combined with --json; run `elasticdl status \
                 --json` now and then instead",
            ));
        }
        let output = FollowOutput::default();
        self.runtime.block_on(follow(&self.cluster, &self.name, output))
    }

    fn dashboard(&self, port: u16) -> Result<u8, Failure> {
        self.check_running(&self.data()?)?;
        self.runtime.block_on(page::serve(self, port))
    }

    fn report(&self) -> Result<String, Failure> {
        let data = self.data()?;
        let json = data.get(SUMMARY).ok_or_else(|| {
            let name = &self.name;
            Failure::failed(format!("the job {name} has not ended: `elasticdl status {name}`"))
        })?;
        let summary = serde_json::from_str(json).map_err(|error| unreadable("summary", &error))?;
        Ok(cluster_page::report(summary, &data))
    }

    fn inspect(&self) -> Result<Inspection, Failure> {
        let obstacle = self.check_running(&self.data()?)?;
        let asked = self.runtime.block_on(inspection::ask(&self.cluster, &self.name));
        let mut found = asked.map_err(|error| match (error, obstacle) {
            (InspectionError::Cluster(error), _) => error.into(),
            (error @ InspectionError::NoAnswer(_), Some(why)) => {
                Failure::failed(format!("{error} {why}"))
            }
            (error, _) => Failure::failed(error.to_string()),
        })?;
        // The pods are known to the API server alone.
        let located = self.status().map(|status| status.workers).unwrap_or_default();
        for worker in &mut found.workers {
            if let Some(known) = located.iter().find(|known| known.worker == worker.worker) {
                (worker.pod, worker.node) = (known.pod.clone(), known.node.clone());
            }
        }
        Ok(found)
    }

    fn facts(&self) -> Result<JobFacts, Failure> {
        self.runtime.block_on(read_facts(&self.anchor, &self.name))
    }

    fn scale(&self, change: Scaling, weight: Option<Weight>) -> Result<Scaled, Failure> {
        let data = self.data()?;
        self.check_running(&data)?;
        let Task { job: spec, priority_tiers, .. } = task(&data)?;
        let Rescaling { was, job, mut keys } =
            scaling::rescale(&data, &spec, change).map_err(Failure::usage)?;
        if weight.is_some() && priority_tiers.is_none() {
            return Err(Failure::usage("--weight: this job has no priority tiers"));
        }
        keys.extend(weight.map(|weight| (WEIGHT.into(), weight.to_string())));
        self.request(keys)?;
        Ok(Scaled { was, now: job.num_workers, limits: (job.min_workers, job.max_workers) })
    }

    fn checkpoint(&self, timeout: Duration) -> Result<String, Failure> {
        let data = self.data()?;
        let obstacle = self.check_running(&data)?;
        let status = self.reported(&data, obstacle)?;
        if status.checkpoints.is_none() {
            return Err(Failure::usage(
                "this job writes no checkpoints: it was started without --checkpoint-dir",
            ));
        }
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        self.request(one(CHECKPOINT, now.as_millis().to_string()))?;
        let mut wait = CheckpointWait::new(timeout);
        loop {
            let data = self.data()?;
            let checkpoints = anchor::status(&data).and_then(|status| status.checkpoints);
            if let Some(location) = wait.poll(status.step, checkpoints)? {
                return Ok(location);
            }
            self.check_running(&data)?;
            std::thread::sleep(CHECKPOINT_POLL);
        }
    }

    fn set_suspended(&self, suspend: bool) -> Result<String, Failure> {
        let data = self.data()?;
        self.check_running(&data)?;
        let spec = task(&data)?.job;
        if suspend {
            check_suspendable(&spec)?;
        }
        let desired = DesiredState::read(&data);
        if suspend && desired.stop.is_some() {
            return Err(Failure::failed(format!("the job {} is stopping", self.name)));
        }
        let unchanged = desired.suspend.unwrap_or(spec.policies.starts_suspended) == suspend;
        self.request(one(SUSPEND, suspend.to_string()))?;
        Ok(describe_suspension(&self.name, suspend, unchanged))
    }

    fn stop(&self, force: bool) -> Result<String, Failure> {
        let data = self.data()?;
        self.check_running(&data)?;
        let value = if force { STOP_AT_ONCE } else { "true" };
        self.request(one(STOP, value.into()))?;
        let name = &self.name;
        let status = anchor::status(&data);
        let away = status.as_ref().map_or(0, |status| status.workers_disconnected.len());
        Ok(match (force, away) {
            (true, _) => format!("{name} is ended at once"),
            _ if status.is_some_and(|status| status.state == ENDING) => describe_ending(name),
            (false, 0) => format!("{name} stops at the end of its step"),
            (false, away) => format!(
                "{name} stops when its {away} disconnected workers have returned to the master, \
                 for which it waits up to --master-timeout; `elasticdl stop {name} --force` ends \
                 it without them, and what they trained since the last checkpoint is lost"
            ),
        })
    }

    fn delete(&self) -> Result<String, Failure> {
        self.runtime.block_on(async {
            if let Ok(anchor) = self.anchor.read().await {
                let by = UserRequest::new(&self.cluster, &one(DELETE, String::new())).await;
                if !by.record(&self.cluster, &anchor.metadata).await {
                    // The master is given a moment to record it.
                    let data = Data::from([(REQUESTED_BY.into(), by.to_json())]);
                    if self.anchor.write(&data).await.is_ok() {
                        tokio::time::sleep(RECORDING_TIME).await;
                    }
                }
            }
            submit::delete(&self.cluster, &self.name).await
        })?;
        Ok(format!("{} and its objects are deleted", self.name))
    }

    fn logs(
        &self,
        log: JobLog,
        follow: bool,
        write: &mut dyn FnMut(&[u8]) -> bool,
    ) -> Result<(), Failure> {
        let source = match log {
            JobLog::Master => LogSource::Master,
            JobLog::Worker(launch) => LogSource::Worker(launch),
            JobLog::Workers => return Err(self.logs_by_kubectl(follow)),
        };
        let copied = logs::copy(&self.cluster, &self.anchor, &self.name, source, follow, write);
        self.runtime.block_on(copied).map_err(|error| self.explain(error))
    }
}

/// Checks that a job would not lose its state if it were suspended.
pub(crate) fn check_suspendable(spec: &JobSpec) -> Result<(), Failure> {
    if spec.options.work.trains() && spec.options.checkpoints.is_none() {
        return Err(Failure::usage(
            "this job writes no checkpoints, so its state would be lost: it was started without \
             --checkpoint-dir",
        ));
    }
    Ok(())
}

/// The data of an anchor that has only this key.
fn one(key: &str, value: String) -> Data {
    Data::from([(key.into(), value)])
}

/// The task of the job with this anchor.
fn task(data: &Data) -> Result<Task, Failure> {
    scaling::task(data).ok_or_else(|| unreadable("options", &"they are not whole"))
}

/// The error of what can't be read in the anchor of a job.
fn unreadable(what: &str, why: &dyn Display) -> Failure {
    Failure::failed(format!(
        "can't read the {what} in the job's ConfigMap: {why}; the `elasticdl` that started the job \
         can, unless somebody has edited it"
    ))
}

/// Time without contact after which the status says why it may be.
const AWAY_S: f64 = 15.0;
/// Interval between reads of the anchor while a checkpoint is awaited.
const CHECKPOINT_POLL: Duration = Duration::from_secs(1);
/// Time for the master to record the request to delete its job.
const RECORDING_TIME: Duration = Duration::from_secs(1);
