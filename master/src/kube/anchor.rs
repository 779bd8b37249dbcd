//! The anchor: the ConfigMap that is a job's owner object and its shared state.
//!
//! All objects of a job but the Job itself are owned by the anchor and are removed with it. The
//! user and the job's masters exchange data through its keys:
//!
//! | key | written by | holds |
//! |---|---|---|
//! | `task`, `worker-pod` | the user, at submission | what to train, and the worker pod template |
//! | `table-server-pod` | the user, at submission | the pod template of table servers, if there are any |
//! | `num-workers`, `min-workers`, `max-workers` | the user, later | requests |
//! | `weight` | the user, later | a request: the job's share of the cluster, for new workers |
//! | `stop`, `suspend`, `checkpoint`, `inspect` | the user, later | requests |
//! | `requested-by` | the user, with each of them | who requested it: see `requests` |
//! | `incarnation` | each master, at its start | number of masters so far: the fencing token |
//! | `status`, `status-at` | the master | status of the job, as in `elasticdl status --json`; when it was written |
//! | `record` | the master | the persisted job, for the next master: see `persisted_job` |
//! | `history` | the master, now and then | curves and lifetimes of workers, for the dashboard |
//! | `files` | the master, once | the data set's list of files, or its location: see `file_list` |
//! | `summary` | the master, at the end | result of the job |
//!
//! **Invariants:** a writer changes its own keys only, so that concurrent writes do not overwrite
//! each other. The server accepts a master's write (`AnchorWriter`) only while the master's
//! incarnation is the newest: a write that was sent before the leader Lease expired, and that
//! arrives after a take-over, changes nothing.
//!
//! The server accepts objects of at most 1 MiB. Each key has a part of that:
//!
//! | key | bytes at most | enforced by |
//! |---|---|---|
//! | `task`, `worker-pod`, `table-server-pod` | 240 Ki | the submission refuses longer options |
//! | `record` | 416 Ki | `persisted_job` compresses and shortens it; a few KiB after the summary |
//! | `files` | 128 Ki | a longer list is stored in objects of its own |
//! | `status` | 224 Ki | it is written in one line, and with fewer entries where needed |
//! | `history` | 12 Ki; after the summary 128 Ki | it loses resolution and its oldest entries |
//! | `summary` | 256 Ki | as for the status |

use std::collections::BTreeMap;
use std::time::Duration;

use elasticdl_proto::Status;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use serde_json::json;
use tokio::time::Instant;
use tracing::debug;

use super::client::{Cluster, ClusterError, is_code};
use super::objects;
use super::priority_tiers::{Weight, parse_weight};
use super::retry::retry;
use super::watch::{Change, Selection, Watch, backoff};
use crate::job::Scaling;

/// Keys and values of an anchor.
pub type Data = BTreeMap<String, String>;

/// Handle of a job's anchor.
#[derive(Clone, Debug)]
pub struct Anchor {
    cluster: Cluster,
    job: String,
}

impl Anchor {
    /// Returns a handle of the anchor of `job`. The anchor need not exist.
    #[must_use]
    pub fn new(cluster: &Cluster, job: &str) -> Self {
        Self { cluster: cluster.clone(), job: job.into() }
    }

    /// Reads the ConfigMap.
    ///
    /// # Errors
    /// There is no such job, or [`ClusterError`].
    pub async fn read(&self) -> Result<ConfigMap, ClusterError> {
        let doing = "read the job's anchor";
        retry(doing, || async {
            match self.api().get(&self.job).await {
                Ok(anchor) if is_anchor(&anchor) => Ok(anchor),
                Ok(_) => Err(self.absent()),
                Err(error) if is_code(&error, 404) => Err(self.absent()),
                Err(error) => Err(self.cluster.explain(doing, error)),
            }
        })
        .await
    }

    /// Sets some keys. The other keys keep their values.
    ///
    /// # Errors
    /// There is no such job, or [`ClusterError`].
    pub async fn write(&self, data: &Data) -> Result<(), ClusterError> {
        let (doing, patch) = ("write to the job's anchor", Patch::Merge(json!({"data": data})));
        retry(doing, || async {
            match self.api().patch(&self.job, &PatchParams::default(), &patch).await {
                Ok(_) => Ok(()),
                Err(error) if is_code(&error, 404) => Err(self.absent()),
                Err(error) => Err(self.cluster.explain(doing, error)),
            }
        })
        .await
    }

    /// Watches the anchor: yields its data now and after each change.
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

/// Writes the anchor on behalf of one of the job's masters.
#[derive(Clone, Debug)]
pub(crate) struct AnchorWriter {
    anchor: Anchor,
    /// Metadata of the anchor, as it was read.
    meta: ObjectMeta,
    incarnation: u64,
}

/// Why the server did not accept a master's write.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum WriteError {
    /// A newer master has started. Write nothing more.
    #[error("another master of the job has begun since")]
    Fenced,
    /// The server will never accept this write.
    #[error("{0}")]
    Refused(String),
    /// The write may succeed later. Retry it.
    #[error(transparent)]
    Retryable(ClusterError),
}

impl AnchorWriter {
    /// Starts `incarnation` in an anchor that was read as `seen`.
    ///
    /// # Errors
    /// [`WriteError::Fenced`]: another master has started since the anchor was read.
    pub(crate) async fn begin(
        anchor: &Anchor,
        seen: &ConfigMap,
        incarnation: u64,
    ) -> Result<Self, WriteError> {
        let writer = Self { anchor: anchor.clone(), meta: seen.metadata.clone(), incarnation };
        let before = seen.data.as_ref().and_then(|data| data.get(INCARNATION)).cloned();
        let mut version = seen.metadata.resource_version.clone().unwrap_or_default();
        let mut failures = 0;
        loop {
            let operations = json!([
                {"op": "test", "path": "/metadata/resourceVersion", "value": version},
                {
                    "op": "add",
                    "path": format!("/data/{INCARNATION}"),
                    "value": incarnation.to_string(),
                },
            ]);
            let Err(error) = writer.patch(&operations).await else { return Ok(writer) };
            let now = anchor.read().await.map_err(WriteError::Retryable)?;
            let version_now = now.metadata.resource_version.unwrap_or_default();
            let found = now.data.as_ref().and_then(|data| data.get(INCARNATION)).cloned();
            match found {
                found if found.as_ref() == Some(&incarnation.to_string()) => return Ok(writer),
                found if found != before => return Err(WriteError::Fenced),
                // The user, or a status write, changed the anchor concurrently.
                _ if version_now != version => version = version_now,
                _ => match writer.explain(error) {
                    WriteError::Retryable(ClusterError::Unreachable { .. })
                        if failures < BEGIN_FAILURES_MAX =>
                    {
                        tokio::time::sleep(backoff(failures)).await;
                        failures += 1;
                    }
                    error => return Err(error),
                },
            }
        }
    }

    /// Sets some keys if this master is still the job's newest. The other keys keep their values.
    pub(crate) async fn write(&self, data: &Data) -> Result<(), WriteError> {
        let mut operations = vec![json!({
            "op": "test",
            "path": format!("/data/{INCARNATION}"),
            "value": self.incarnation.to_string(),
        })];
        let set = |(key, value): (&String, &String)| {
            let path = format!("/data/{key}");
            json!({"op": "add", "path": path, "value": value})
        };
        operations.extend(data.iter().map(set));
        let Err(error) = self.patch(&operations.into()).await else { return Ok(()) };
        if !is_code(&error, 422) {
            return Err(self.explain(error));
        }
        // A failed `test` operation and an object that is too long have the same status code.
        let now = self.anchor.read().await.map_err(WriteError::Retryable)?;
        let newest = now.data.as_ref().and_then(|data| data.get(INCARNATION));
        if newest == Some(&self.incarnation.to_string()) {
            Err(self.explain(error))
        } else {
            Err(WriteError::Fenced)
        }
    }

    /// Writes this master's incarnation again, which a user has edited. Only for a master that
    /// holds the Lease.
    pub(super) async fn restore_incarnation(&self) -> Result<(), WriteError> {
        let operation = json!([{
            "op": "add",
            "path": format!("/data/{INCARNATION}"),
            "value": self.incarnation.to_string(),
        }]);
        self.patch(&operation).await.map_err(|error| self.explain(error))
    }

    /// Repeats [`AnchorWriter::write`] while the server is unreachable, for at most `limit`.
    ///
    /// # Errors
    /// The last error.
    pub(crate) async fn write_within(
        &self,
        data: &Data,
        limit: Duration,
    ) -> Result<(), WriteError> {
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

    /// Creates a ConfigMap for `role` that the anchor owns. An existing one of this name is left
    /// unchanged.
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

    /// Uid of the anchor.
    pub(super) fn uid(&self) -> &str {
        self.meta.uid.as_deref().unwrap_or_default()
    }

    /// Name of the job.
    pub(super) fn job(&self) -> &str {
        &self.anchor.job
    }

    async fn patch(&self, operations: &serde_json::Value) -> Result<(), kube::Error> {
        let Anchor { cluster, job } = &self.anchor;
        cluster.patch_json(&self.anchor.api(), job, operations).await.map(|_: ConfigMap| ())
    }

    fn explain(&self, error: kube::Error) -> WriteError {
        let is_final = [400, 413, 422].into_iter().any(|code| is_code(&error, code));
        let explained = if is_code(&error, 404) {
            self.anchor.absent()
        } else {
            self.anchor.cluster.explain("write to the job's anchor", error)
        };
        if is_final {
            WriteError::Refused(explained.to_string())
        } else {
            WriteError::Retryable(explained)
        }
    }
}

impl Anchor {
    /// Reads the content of a ConfigMap that [`AnchorWriter::create_part`] created. `None`: it does
    /// not exist.
    pub(super) async fn read_part(&self, name: &str) -> Result<Option<Vec<u8>>, ClusterError> {
        let found = self.api().get_opt(name).await;
        let found = found
            .map_err(|error| self.cluster.explain("read a part of the job's anchor", error))?;
        Ok(found.and_then(|part| part.binary_data?.remove(PART)).map(|content| content.0))
    }

    /// Deletes a ConfigMap that [`AnchorWriter::create_part`] created, if this user may. It goes
    /// with the job anyway.
    pub(super) async fn delete_part(&self, name: &str) {
        let deleted = self.api().delete(name, &DeleteParams::default()).await;
        if let Err(error) = deleted {
            debug!(%error, name, "a part of the job's anchor is left until the job is deleted");
        }
    }
}

/// The status in an anchor; `None` if there is none that this release can read.
#[must_use]
pub fn status(data: &Data) -> Option<Status> {
    serde_json::from_str(data.get(STATUS)?).ok()
}

/// Age of an object at `now` of the API server's clock.
#[must_use]
pub fn age(metadata: &ObjectMeta, now: Timestamp) -> Duration {
    let age = metadata.creation_timestamp.as_ref().map(|born| now.duration_since(born.0));
    age.and_then(|age| Duration::try_from(age).ok()).unwrap_or_default()
}

/// Lists all anchors of the namespace.
///
/// # Errors
/// [`ClusterError`].
pub async fn list_all(cluster: &Cluster) -> Result<Vec<ConfigMap>, ClusterError> {
    let api: Api<ConfigMap> = cluster.api();
    let params = ListParams::default().labels(&objects::anchors_selector());
    let list =
        async || api.list(&params).await.map_err(|error| cluster.explain("list jobs", error));
    Ok(retry("list jobs", list).await?.items)
}

/// A running watch of an anchor.
#[derive(Debug)]
pub struct AnchorWatch {
    watch: Watch<ConfigMap>,
}

/// A change of a watched anchor.
#[derive(Clone, Debug, PartialEq)]
pub enum AnchorEvent {
    /// The anchor's present data.
    Data(Data),
    /// The anchor was deleted, or never existed.
    Deleted,
    /// The server denies the watch; it is retried all the same.
    Forbidden(String),
}

impl AnchorWatch {
    /// Returns the next event. Cancel-safe.
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

/// Changes that the user requests through the keys of an anchor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DesiredState {
    /// Desired number of workers, and its limits.
    pub scaling: Scaling,
    /// The job's share of the cluster.
    pub weight: Option<Weight>,
    /// Whether, and when, the job is to stop.
    pub stop: Option<StopRequest>,
    /// Number of the last checkpoint request. A new number requests a checkpoint.
    pub checkpoint: Option<u64>,
    /// Number of the last request to say what the workers do: see `inspection`.
    pub inspect: Option<u64>,
    /// Whether the job is to be suspended, or resumed.
    pub suspend: Option<bool>,
}

/// When a job is to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StopRequest {
    /// At the end of its step.
    AtStep,
    /// Without waiting for its workers.
    AtOnce,
}

impl DesiredState {
    /// Reads the requests from `data`. A value that can't be parsed is ignored.
    #[must_use]
    pub fn read(data: &Data) -> Self {
        let number = |key| data.get(key).and_then(|text| text.trim().parse().ok());
        let scaling = Scaling {
            num_workers: number(NUM_WORKERS),
            min_workers: number(MIN_WORKERS),
            max_workers: number(MAX_WORKERS),
        };
        let weight = data.get(WEIGHT).and_then(|text| parse_weight(text.trim()).ok());
        let stop = data.get(STOP).and_then(|text| match text.trim() {
            "true" => Some(StopRequest::AtStep),
            STOP_AT_ONCE => Some(StopRequest::AtOnce),
            _ => None,
        });
        let checkpoint = data.get(CHECKPOINT).and_then(|text| text.trim().parse().ok());
        let inspect = data.get(INSPECT).and_then(|text| text.trim().parse().ok());
        let suspend = data.get(SUSPEND).and_then(|text| text.trim().parse().ok());
        Self { scaling, weight, stop, checkpoint, inspect, suspend }
    }
}

/// What is wrong with a request in `data` that is ignored.
pub(crate) fn ignored_request(data: &Data) -> Option<String> {
    let check_number =
        |text: &str| text.parse::<u32>().map(drop).map_err(|_| "it must be a number".to_owned());
    let check_weight = |text: &str| parse_weight(text).map(drop);
    [NUM_WORKERS, MIN_WORKERS, MAX_WORKERS, WEIGHT].into_iter().find_map(|key| {
        let text = data.get(key)?;
        let checked =
            if key == WEIGHT { check_weight(text.trim()) } else { check_number(text.trim()) };
        let why = checked.err()?;
        Some(format!("{key} is {text:?} in the job's ConfigMap, and is ignored: {why}"))
    })
}

/// Decides when the status is written: soon after an event, rarely for mere progress.
#[derive(Clone, Debug, Default)]
pub(crate) struct WriteThrottle {
    written: Option<(Instant, u64)>,
}

impl WriteThrottle {
    /// Returns when a status is to be written whose events have the digest `digest`.
    pub(crate) fn due(&self, now: Instant, digest: u64) -> Instant {
        match self.written {
            None => now,
            Some((at, known)) if known != digest => at + CHANGE_INTERVAL,
            Some((at, _)) => at + PROGRESS_INTERVAL,
        }
    }

    /// Notes that the status was written.
    pub(crate) fn on_written(&mut self, now: Instant, digest: u64) {
        self.written = Some((now, digest));
    }
}

fn is_anchor(config_map: &ConfigMap) -> bool {
    config_map.data.as_ref().is_some_and(|data| data.contains_key(objects::TASK))
}

/// Key of the number of the last checkpoint request.
pub const CHECKPOINT: &str = "checkpoint";
/// Key of the list of the data set's files, or of its location.
pub(crate) const FILES: &str = "files";
/// Key of the job's history.
pub(crate) const HISTORY: &str = "history";
/// Key of the number of masters so far.
pub(crate) const INCARNATION: &str = "incarnation";
/// Key of the number of the last request to say what the workers do.
pub(crate) const INSPECT: &str = "inspect";
/// Key of the name of the newest leading master's pod.
pub(crate) const MASTER: &str = "master";
/// Key of the desired maximum number of workers.
pub const MAX_WORKERS: &str = "max-workers";
/// Key of the desired minimum number of workers.
pub const MIN_WORKERS: &str = "min-workers";
/// Key of the desired number of workers.
pub const NUM_WORKERS: &str = "num-workers";
/// Key of the persisted job.
pub(crate) const RECORD: &str = "record";
/// Key of the job's status.
pub const STATUS: &str = "status";
/// Key of the time at which the status was written, in ms since 1970.
pub(crate) const STATUS_AT: &str = "status-at";
/// Key of the request to stop.
pub const STOP: &str = "stop";
/// Value of [`STOP`] that does not wait for the job's workers.
pub const STOP_AT_ONCE: &str = "force";
/// Key of the request to suspend the job, `true`, or to resume it, `false`.
pub const SUSPEND: &str = "suspend";
/// Key of the job's summary.
pub const SUMMARY: &str = "summary";
/// Key of the desired weight of the job.
pub const WEIGHT: &str = "weight";

/// Number of attempts to begin an incarnation after the first: they take about a minute.
const BEGIN_FAILURES_MAX: u32 = 8;
/// Key of the content of a part.
const PART: &str = "part";
/// Time between two writes when events have occurred.
const CHANGE_INTERVAL: Duration = Duration::from_secs(5);
/// Time between two writes when only numbers have changed. With the renewals of the leader Lease
/// that makes eight calls a minute.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(15);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_parsed_and_invalid_ones_are_ignored() {
        let data = |pairs: &[(&str, &str)]| {
            pairs.iter().map(|&(k, v)| (k.into(), v.into())).collect::<Data>()
        };
        let all = DesiredState::read(&data(&[
            ("num-workers", " 4 "),
            ("min-workers", "2"),
            ("weight", "2.50"),
            ("stop", "true"),
            ("checkpoint", "7"),
            ("inspect", "8"),
            ("suspend", "false"),
        ]));
        let expected = DesiredState {
            scaling: Scaling { num_workers: Some(4), min_workers: Some(2), max_workers: None },
            weight: parse_weight("2.5").ok(),
            stop: Some(StopRequest::AtStep),
            checkpoint: Some(7),
            inspect: Some(8),
            suspend: Some(false),
        };
        assert_eq!(all, expected);
        let forced = DesiredState::read(&data(&[("stop", "force")]));
        assert_eq!(forced.stop, Some(StopRequest::AtOnce));
        for nonsense in [
            data(&[]),
            data(&[("num-workers", "many"), ("stop", "perhaps"), ("max-workers", "4.0")]),
            data(&[("num-workers", "-1"), ("checkpoint", "now"), ("suspend", "yes")]),
            data(&[("weight", "heavy")]),
        ] {
            assert_eq!(DesiredState::read(&nonsense), DesiredState::default(), "{nonsense:?}");
        }
        let ignored = |text: &str| ignored_request(&data(&[(NUM_WORKERS, text)]));
        assert_eq!(
            ignored("many").unwrap(),
            "num-workers is \"many\" in the job's ConfigMap, and is ignored: it must be a number"
        );
        assert_eq!((ignored(" 4 "), ignored_request(&Data::new())), (None, None));
        let light = ignored_request(&data(&[(WEIGHT, "0.01")])).unwrap();
        assert!(light.ends_with("is ignored: it must be a number from 0.1 to 10"), "{light}");
    }

    #[tokio::test(start_paused = true)]
    async fn events_are_written_within_5_s_and_progress_within_15() {
        let mut pace = WriteThrottle::default();
        let now = Instant::now();
        assert_eq!(pace.due(now, 1), now);
        pace.on_written(now, 1);
        assert_eq!(pace.due(now, 2), now + Duration::from_secs(5));
        assert_eq!(pace.due(now, 1), now + Duration::from_secs(15));
    }
}
