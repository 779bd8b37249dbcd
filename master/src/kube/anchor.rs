//! The anchor: a ConfigMap through which the user and the master of a job speak.
//!
//! | key | written by | holds |
//! |---|---|---|
//! | `task`, `worker-pod` | the user, at submission | what to train, and what workers' pods are made from |
//! | `num-workers`, `stop`, `checkpoint` | the user, later | what is to change |
//! | `incarnation` | each master, when it starts | how many masters there have been |
//! | `status` | the master | where the job stands, as `elasticdl status --json` |
//! | `record` | the master | what the next master needs, as [`JobRecord`](crate::job::JobRecord): see `kept` |
//! | `files` | the master, once | the list of the data set's files, or where it is: see `lists` |
//! | `summary` | the master, at the end | how the job ended |
//!
//! **Invariants:** who writes one key leaves the others alone, so nobody's word is lost. What a
//! master writes ([`AnchorWriter`]) is taken only while its incarnation is the newest: a write that was
//! sent before its lease ran out, and that the server looks at later, changes nothing.
//!
//! The server takes an object of 1 MiB. Each key has its part of that:
//!
//! | key | bytes at most | what keeps it so |
//! |---|---|---|
//! | `task`, `worker-pod` | 256 Ki | nothing yet: they are what the user wrote |
//! | `record` | 416 Ki | `kept` packs it, and shortens it where that is not enough; empty once there is a summary |
//! | `files` | 128 Ki | a longer list is in objects of its own |
//! | `status` | 224 Ki | it is written in one line, and with less in it, where that is needed |
//! | `summary` | 256 Ki | as for the status |

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Api;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use serde_json::json;
use tokio::time::Instant;
use tracing::warn;

use super::client::{Cluster, ClusterError, is_code};
use super::objects;
use super::watch::{Change, Selection, Watch, backoff};

/// The data of an anchor.
pub type Data = BTreeMap<String, String>;

/// The anchor of one job.
#[derive(Clone, Debug)]
pub struct Anchor {
    cluster: Cluster,
    job: String,
}

impl Anchor {
    /// The anchor of `job`, which may or may not be there.
    #[must_use]
    pub fn new(cluster: &Cluster, job: &str) -> Self {
        Self { cluster: cluster.clone(), job: job.into() }
    }

    /// Reads it.
    ///
    /// # Errors
    /// There is no such job, or [`ClusterError`].
    pub async fn read(&self) -> Result<ConfigMap, ClusterError> {
        match self.api().get(&self.job).await {
            Ok(anchor) if is_anchor(&anchor) => Ok(anchor),
            Ok(_) => Err(self.absent()),
            Err(error) if is_code(&error, 404) => Err(self.absent()),
            Err(error) => Err(self.cluster.explain("read the job's anchor", error)),
        }
    }

    /// Sets some keys; the others stay.
    ///
    /// # Errors
    /// There is no such job, or [`ClusterError`].
    pub async fn write(&self, data: &Data) -> Result<(), ClusterError> {
        let patch = Patch::Merge(json!({"data": data}));
        match self.api().patch(&self.job, &PatchParams::default(), &patch).await {
            Ok(_) => Ok(()),
            Err(error) if is_code(&error, 404) => Err(self.absent()),
            Err(error) => Err(self.cluster.explain("write to the job's anchor", error)),
        }
    }

    /// As [`Anchor::write`], again and again until the server takes it, or refuses, or the time is
    /// up.
    ///
    /// # Errors
    /// The last refusal.
    pub async fn write_within(&self, data: &Data, limit: Duration) -> Result<(), ClusterError> {
        let start = Instant::now();
        let mut failures = 0;
        loop {
            match self.write(data).await {
                Err(ClusterError::Unreachable { .. }) if start.elapsed() < limit => {
                    tokio::time::sleep(backoff(failures)).await;
                    failures += 1;
                }
                outcome => return outcome,
            }
        }
    }

    /// What it holds, now and whenever that changes.
    #[must_use]
    pub fn watch(&self) -> AnchorWatch {
        let fields = Some(format!("metadata.name={}", self.job));
        AnchorWatch { watch: Watch::start(self.api(), Selection { fields, labels: None }) }
    }

    fn api(&self) -> Api<ConfigMap> {
        self.cluster.api()
    }

    fn absent(&self) -> ClusterError {
        ClusterError::NoSuchJob { job: self.job.clone(), namespace: self.cluster.namespace.clone() }
    }
}

/// One of a job's masters, as the writer of its anchor.
#[derive(Clone, Debug)]
pub struct AnchorWriter {
    anchor: Anchor,
    /// Of the anchor, as it was read.
    meta: ObjectMeta,
    incarnation: u64,
}

/// Why a master's write was not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WriteError {
    /// Another master has begun since. Write nothing more.
    #[error("another master of the job has begun since")]
    Fenced,
    /// Perhaps later.
    #[error(transparent)]
    Retryable(ClusterError),
    /// The server will never take it.
    #[error("{0}")]
    Refused(String),
}

impl AnchorWriter {
    /// Begins `incarnation` in an anchor that was read as `seen`.
    ///
    /// # Errors
    /// [`WriteError::Fenced`]: another master has begun since the anchor was read.
    pub async fn begin(
        anchor: &Anchor,
        seen: &ConfigMap,
        incarnation: u64,
    ) -> Result<Self, WriteError> {
        let writer = Self { anchor: anchor.clone(), meta: seen.metadata.clone(), incarnation };
        let before = seen.data.as_ref().and_then(|data| data.get(INCARNATION)).cloned();
        let mut version = seen.metadata.resource_version.clone().unwrap_or_default();
        loop {
            let operations = json!([
                {"op": "test", "path": "/metadata/resourceVersion", "value": version},
                {"op": "add", "path": format!("/data/{INCARNATION}"), "value": incarnation.to_string()},
            ]);
            let Err(error) = writer.patch(&operations).await else { return Ok(writer) };
            let now = anchor.read().await.map_err(WriteError::Retryable)?;
            let version_now = now.metadata.resource_version.unwrap_or_default();
            let found = now.data.as_ref().and_then(|data| data.get(INCARNATION)).cloned();
            match found {
                found if found.as_ref() == Some(&incarnation.to_string()) => return Ok(writer),
                found if found != before => return Err(WriteError::Fenced),
                // The user, or the status, was quicker.
                _ if version_now != version => version = version_now,
                _ => return Err(writer.explain(error)),
            }
        }
    }

    /// Sets some keys, if this is still the newest of the job's masters; the other keys stay.
    ///
    /// # Errors
    /// [`WriteError`].
    pub async fn write(&self, data: &Data) -> Result<(), WriteError> {
        let mut operations = vec![json!({
            "op": "test", "path": format!("/data/{INCARNATION}"), "value": self.incarnation.to_string()
        })];
        let set = |(key, value): (&String, &String)| json!({"op": "add", "path": format!("/data/{key}"), "value": value});
        operations.extend(data.iter().map(set));
        let Err(error) = self.patch(&operations.into()).await else { return Ok(()) };
        if !is_code(&error, 422) {
            return Err(self.explain(error));
        }
        // A test that fails and an object that is too long have the same code.
        let now = self.anchor.read().await.map_err(WriteError::Retryable)?;
        let newest = now.data.as_ref().and_then(|data| data.get(INCARNATION));
        match newest == Some(&self.incarnation.to_string()) {
            true => Err(self.explain(error)),
            false => Err(WriteError::Fenced),
        }
    }

    /// As [`AnchorWriter::write`], again and again until the server takes it, or refuses, or the time is
    /// up.
    ///
    /// # Errors
    /// The last one.
    pub async fn write_within(&self, data: &Data, limit: Duration) -> Result<(), WriteError> {
        let start = Instant::now();
        let mut failures = 0;
        loop {
            match self.write(data).await {
                Err(WriteError::Retryable(ClusterError::Unreachable { .. }))
                    if start.elapsed() < limit =>
                {
                    tokio::time::sleep(backoff(failures)).await;
                    failures += 1;
                }
                outcome => return outcome,
            }
        }
    }

    /// Makes a ConfigMap that goes with the anchor, for `role`. One of this name that is there
    /// already is left as it is.
    pub(super) async fn create_part(
        &self,
        name: &str,
        role: &str,
        content: Vec<u8>,
    ) -> Result<(), WriteError> {
        let part = ConfigMap {
            metadata: objects::owned(&self.meta, name, role),
            binary_data: Some([(PART.to_owned(), ByteString(content))].into()),
            ..ConfigMap::default()
        };
        match self.anchor.api().create(&PostParams::default(), &part).await {
            Ok(_) => Ok(()),
            Err(error) if is_code(&error, 409) => Ok(()),
            Err(error) => Err(self.explain(error)),
        }
    }

    /// The uid of the anchor.
    pub(super) fn uid(&self) -> &str {
        self.meta.uid.as_deref().unwrap_or_default()
    }

    /// The job's name.
    pub(super) fn job(&self) -> &str {
        &self.anchor.job
    }

    async fn patch(&self, operations: &serde_json::Value) -> Result<(), kube::Error> {
        let Anchor { cluster, job } = &self.anchor;
        cluster.patch_json(&self.anchor.api(), job, operations).await.map(|_: ConfigMap| ())
    }

    fn explain(&self, error: kube::Error) -> WriteError {
        let is_final = [400, 413, 422].into_iter().any(|code| is_code(&error, code));
        let explained = match is_code(&error, 404) {
            true => self.anchor.absent(),
            false => self.anchor.cluster.explain("write to the job's anchor", error),
        };
        if is_final {
            WriteError::Refused(explained.to_string())
        } else {
            WriteError::Retryable(explained)
        }
    }
}

impl Anchor {
    /// The content of one of the objects that [`AnchorWriter::create_part`] made; `None`: it is not there.
    pub(super) async fn read_part(&self, name: &str) -> Result<Option<Vec<u8>>, ClusterError> {
        let found = self.api().get_opt(name).await;
        let found = found
            .map_err(|error| self.cluster.explain("read a part of the job's anchor", error))?;
        Ok(found.and_then(|part| part.binary_data?.remove(PART)).map(|content| content.0))
    }
}

/// All anchors of a namespace.
///
/// # Errors
/// [`ClusterError`].
pub async fn list_all(cluster: &Cluster) -> Result<Vec<ConfigMap>, ClusterError> {
    let api: Api<ConfigMap> = cluster.api();
    let params = ListParams::default().labels(&objects::anchors_selector());
    api.list(&params)
        .await
        .map(|list| list.items)
        .map_err(|error| cluster.explain("list jobs", error))
}

/// An anchor that is watched.
#[derive(Debug)]
pub struct AnchorWatch {
    watch: Watch<ConfigMap>,
}

/// What is seen of an anchor.
#[derive(Clone, Debug, PartialEq)]
pub enum AnchorEvent {
    /// It may not be read; asked again all the same.
    Forbidden(String),
    /// It is not there any more, or never was.
    Deleted,
    /// It holds this.
    Data(Data),
}

impl AnchorWatch {
    /// The next sight. Safe to drop at any time.
    pub async fn next(&mut self) -> AnchorEvent {
        loop {
            return match self.watch.next().await {
                Change::Forbidden(message) => AnchorEvent::Forbidden(message),
                Change::Deleted(_) => AnchorEvent::Deleted,
                Change::Listed(_, uids) if uids.is_empty() => AnchorEvent::Deleted,
                Change::Listed(..) => continue,
                Change::Applied(anchor) if anchor.metadata.deletion_timestamp.is_some() => {
                    AnchorEvent::Deleted
                }
                Change::Applied(anchor) => AnchorEvent::Data(anchor.data.unwrap_or_default()),
            };
        }
    }
}

/// What the user wants changed, by the keys of an anchor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DesiredState {
    /// Workers to keep.
    pub num_workers: Option<u32>,
    /// The job is to stop.
    pub stop: bool,
    /// Another number than before asks for a checkpoint.
    pub checkpoint: Option<u64>,
}

impl DesiredState {
    /// What `data` asks for; what can't be read asks for nothing.
    #[must_use]
    pub fn read(data: &Data) -> Self {
        let num_workers = data.get(NUM_WORKERS).and_then(|text| {
            let number = text.trim().parse().ok();
            if number.is_none() {
                warn!(text, "the anchor's num-workers is not a number");
            }
            number
        });
        let stop = data.get(STOP).is_some_and(|text| text.trim() == "true");
        let checkpoint = data.get(CHECKPOINT).and_then(|text| text.trim().parse().ok());
        Self { num_workers, stop, checkpoint }
    }
}

/// Whether and when what the master knows is written down: what happened soon, mere progress
/// rarely.
#[derive(Clone, Debug, Default)]
pub struct WriteThrottle {
    written: Option<(Instant, u64)>,
}

impl WriteThrottle {
    /// When a status should be written whose news have this digest; `None`: it has been.
    #[must_use]
    pub fn due(&self, now: Instant, news: u64) -> Instant {
        match self.written {
            None => now,
            Some((at, known)) if known != news => at + CHANGE_INTERVAL,
            Some((at, _)) => at + PROGRESS_INTERVAL,
        }
    }

    /// It has been written.
    pub fn on_written(&mut self, now: Instant, news: u64) {
        self.written = Some((now, news));
    }
}

fn is_anchor(config_map: &ConfigMap) -> bool {
    config_map.data.as_ref().is_some_and(|data| data.contains_key(objects::TASK))
}

/// The user wants a checkpoint.
pub const CHECKPOINT: &str = "checkpoint";
/// The list of the data set's files, or where it is.
pub const FILES: &str = "files";
/// How many masters there have been.
pub const INCARNATION: &str = "incarnation";
/// The pod of the newest master that has led the job.
pub const MASTER: &str = "master";
/// Workers that the user wants.
pub const NUM_WORKERS: &str = "num-workers";
/// What the next master needs.
pub const RECORD: &str = "record";
/// Where the job stands.
pub const STATUS: &str = "status";
/// The job is to stop.
pub const STOP: &str = "stop";
/// How the job ended.
pub const SUMMARY: &str = "summary";

/// The key of what a part holds.
const PART: &str = "part";
/// Between two writes.
const CHANGE_INTERVAL: Duration = Duration::from_secs(5);
/// Between two writes when nothing but numbers has changed: with the lease's renewals that is eight
/// calls a minute.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(15);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wishes_are_read_and_nonsense_wishes_nothing() {
        let data = |pairs: &[(&str, &str)]| {
            pairs.iter().map(|&(k, v)| (k.into(), v.into())).collect::<Data>()
        };
        let all = DesiredState::read(&data(&[
            ("num-workers", " 4 "),
            ("stop", "true"),
            ("checkpoint", "7"),
        ]));
        assert_eq!(all, DesiredState { num_workers: Some(4), stop: true, checkpoint: Some(7) });
        for nonsense in [
            data(&[]),
            data(&[("num-workers", "many"), ("stop", "perhaps")]),
            data(&[("num-workers", "-1"), ("checkpoint", "now")]),
        ] {
            assert_eq!(DesiredState::read(&nonsense), DesiredState::default(), "{nonsense:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn news_are_written_within_5_s_and_progress_within_15() {
        let mut pace = WriteThrottle::default();
        let now = Instant::now();
        assert_eq!(pace.due(now, 1), now);
        pace.on_written(now, 1);
        assert_eq!(pace.due(now, 2), now + Duration::from_secs(5));
        assert_eq!(pace.due(now, 1), now + Duration::from_secs(15));
    }
}
