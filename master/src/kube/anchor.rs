//! The anchor: a ConfigMap through which the user and the master of a job speak.
//!
//! | key | written by | holds |
//! |---|---|---|
//! | `task`, `worker-pod` | the user, at submission | what to train, and what workers' pods are made from |
//! | `num-workers`, `stop`, `checkpoint` | the user, later | what is to change |
//! | `incarnation` | each master, when it starts | how many masters there have been |
//! | `status` | the master | where the job stands, as `elasticdl status --json` |
//! | `record` | the master | what the next master needs, as [`JobRecord`](crate::job::JobRecord) |
//! | `summary` | the master, at the end | how the job ended |
//!
//! **Invariant:** who writes one key leaves the others alone, so nobody's word is lost.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use kube::api::{ListParams, Patch, PatchParams};
use serde_json::json;
use tokio::time::Instant;
use tracing::warn;

use super::client::{Cluster, ClusterError, is_code};
use super::objects;
use super::watch::{Change, Selection, Watch, pause};

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

    /// As [`Anchor::write`], again and again until the server takes it, or refuses, or the time is up.
    ///
    /// # Errors
    /// The last refusal.
    pub async fn write_within(&self, data: &Data, limit: Duration) -> Result<(), ClusterError> {
        let start = Instant::now();
        let mut failures = 0;
        loop {
            match self.write(data).await {
                Err(ClusterError::Unreachable { .. }) if start.elapsed() < limit => {
                    tokio::time::sleep(pause(failures)).await;
                    failures += 1;
                }
                outcome => return outcome,
            }
        }
    }

    /// What it holds, now and whenever that changes.
    #[must_use]
    pub fn follow(&self) -> Followed {
        let fields = Some(format!("metadata.name={}", self.job));
        Followed { watch: Watch::start(self.api(), Selection { fields, labels: None }) }
    }

    fn api(&self) -> Api<ConfigMap> {
        self.cluster.api()
    }

    fn absent(&self) -> ClusterError {
        ClusterError::NoSuchJob { job: self.job.clone(), namespace: self.cluster.namespace.clone() }
    }
}

/// All anchors of a namespace.
///
/// # Errors
/// [`ClusterError`].
pub async fn all(cluster: &Cluster) -> Result<Vec<ConfigMap>, ClusterError> {
    let api: Api<ConfigMap> = cluster.api();
    let params = ListParams::default().labels(&objects::anchors_selector());
    api.list(&params).await.map(|list| list.items).map_err(|error| cluster.explain("list jobs", error))
}

/// An anchor that is watched.
#[derive(Debug)]
pub struct Followed {
    watch: Watch<ConfigMap>,
}

/// What is seen of an anchor.
#[derive(Clone, Debug, PartialEq)]
pub enum Sight {
    /// It may not be read; asked again all the same.
    Forbidden(String),
    /// It is not there any more, or never was.
    Gone,
    /// It holds this.
    Holds(Data),
}

impl Followed {
    /// The next sight. Safe to drop at any time.
    pub async fn next(&mut self) -> Sight {
        loop {
            return match self.watch.next().await {
                Change::Forbidden(message) => Sight::Forbidden(message),
                Change::Gone(_) => Sight::Gone,
                Change::Listed(_, uids) if uids.is_empty() => Sight::Gone,
                Change::Listed(..) => continue,
                Change::Seen(anchor) if anchor.metadata.deletion_timestamp.is_some() => Sight::Gone,
                Change::Seen(anchor) => Sight::Holds(anchor.data.unwrap_or_default()),
            };
        }
    }
}

/// What the user wants changed, by the keys of an anchor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wishes {
    /// Workers to keep.
    pub num_workers: Option<u32>,
    /// The job is to stop.
    pub stop: bool,
    /// Another number than before asks for a checkpoint.
    pub checkpoint: Option<u64>,
}

impl Wishes {
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

/// Whether and when what the master knows is written down: what happened soon, mere progress rarely.
#[derive(Clone, Debug, Default)]
pub struct Pace {
    written: Option<(Instant, u64)>,
}

impl Pace {
    /// When a status should be written whose news have this digest; `None`: it has been.
    #[must_use]
    pub fn due(&self, now: Instant, news: u64) -> Instant {
        match self.written {
            None => now,
            Some((at, known)) if known != news => at + NEWS_INTERVAL,
            Some((at, _)) => at + PROGRESS_INTERVAL,
        }
    }

    /// It has been written.
    pub fn wrote(&mut self, now: Instant, news: u64) {
        self.written = Some((now, news));
    }
}

fn is_anchor(config_map: &ConfigMap) -> bool {
    config_map.data.as_ref().is_some_and(|data| data.contains_key(objects::TASK))
}

/// The user wants a checkpoint.
pub const CHECKPOINT: &str = "checkpoint";
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

/// Between two writes.
const NEWS_INTERVAL: Duration = Duration::from_secs(5);
/// Between two writes when nothing but numbers has changed: with the lease's renewals that is eight calls a minute.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(15);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wishes_are_read_and_nonsense_wishes_nothing() {
        let data =
            |pairs: &[(&str, &str)]| pairs.iter().map(|&(k, v)| (k.into(), v.into())).collect::<Data>();
        let all = Wishes::read(&data(&[("num-workers", " 4 "), ("stop", "true"), ("checkpoint", "7")]));
        assert_eq!(all, Wishes { num_workers: Some(4), stop: true, checkpoint: Some(7) });
        for nonsense in [
            data(&[]),
            data(&[("num-workers", "many"), ("stop", "perhaps")]),
            data(&[("num-workers", "-1"), ("checkpoint", "now")]),
        ] {
            assert_eq!(Wishes::read(&nonsense), Wishes::default(), "{nonsense:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn news_are_written_within_5_s_and_progress_within_15() {
        let mut pace = Pace::default();
        let now = Instant::now();
        assert_eq!(pace.due(now, 1), now);
        pace.wrote(now, 1);
        assert_eq!(pace.due(now, 2), now + Duration::from_secs(5));
        assert_eq!(pace.due(now, 1), now + Duration::from_secs(15));
    }
}
