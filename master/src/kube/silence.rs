//! Jobs whose status is not kept up to date, because no master leads them.
//!
//! The status of a job in its anchor says what its last master knew. While a master leads, its pod
//! is ready and it renews the job's Lease. So a job without a ready master, whose Lease was not
//! renewed for longer than a take-over takes, has no master, whatever its status says. The pod
//! alone is not sufficient, since a take-over takes a moment.
//!
//! The age of a Lease is by the clock of the API server, which stamps each change. Those of the
//! master's host and of the user's may differ from it.

use std::time::Duration;

use elasticdl_proto::Status;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::api::ListParams;
use kube::{Api, ResourceExt as _};

use super::anchor::{Data, STATUS_AT, SUMMARY};
use super::client::Cluster;
use super::master_pods::{self, MasterHealth};
use super::objects::{JOB_LABEL, ROLE_LABEL};
use super::verdict::{Verdict, classify};

/// The masters of one job, or of all jobs of a namespace, as far as the user may read them.
#[derive(Debug)]
pub struct Masters {
    /// `None`: pods can't be read.
    pods: Option<Vec<Pod>>,
    leases: Vec<Lease>,
    /// When both were read, by the server's clock.
    pub now: Timestamp,
}

/// A job without a master.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Silence {
    /// How long it has had none.
    pub time: Duration,
    /// Why, if the cluster says so.
    pub why: Option<String>,
}

impl std::fmt::Display for Silence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.time.as_secs() {
            seconds @ ..120 => write!(f, "no master for {seconds} s")?,
            seconds => write!(f, "no master for {} min", seconds / 60)?,
        }
        self.why.as_ref().map_or(Ok(()), |why| write!(f, ": {why}"))
    }
}

/// Says in `status`, from the anchor's `data`, that no master of `job` keeps it up to date, if that
/// is so.
pub async fn note(cluster: &Cluster, job: &str, data: &Data, status: &mut Status) {
    if data.contains_key(SUMMARY) {
        return;
    }
    let masters = Masters::read(cluster, Some(job)).await;
    if let Some(silence) = masters.silence(cluster, job, data).await {
        status.state = NO_MASTER.into();
        status.events.push(format!(
            "{silence}; what is shown was known then; workers go on without a master for up to \
             --master-timeout"
        ));
    }
}

/// State of a job that no master leads.
pub const NO_MASTER: &str = "no master";

impl Masters {
    /// Reads the masters of `job`, or of all jobs.
    pub async fn read(cluster: &Cluster, job: Option<&str>) -> Self {
        let of_job = job.map_or_else(|| JOB_LABEL.to_owned(), |job| format!("{JOB_LABEL}={job}"));
        let of_role =
            |role: &str| ListParams::default().labels(&format!("{of_job},{ROLE_LABEL}={role}"));
        let (pods, leases): (Api<Pod>, Api<Lease>) = (cluster.api(), cluster.api());
        let (master, lease) = (of_role("master"), of_role("lease"));
        let (pods, leases, now) =
            tokio::join!(pods.list(&master), leases.list(&lease), cluster.now());
        Self {
            pods: pods.ok().map(|list| list.items),
            leases: leases.map(|list| list.items).unwrap_or_default(),
            now,
        }
    }

    /// Whether `job`, which has not ended and has this anchor, has no master.
    pub async fn silence(&self, cluster: &Cluster, job: &str, data: &Data) -> Option<Silence> {
        let time = self.silent_for(job, data)?;
        let MasterHealth { obstacle, .. } = master_pods::inspect(cluster, job).await;
        Some(Silence { time, why: obstacle.or_else(|| self.newest_pod(job)) })
    }

    fn silent_for(&self, job: &str, data: &Data) -> Option<Duration> {
        let limit = match &self.pods {
            Some(pods) if pods.iter().any(|pod| is_of(job, pod) && is_ready(pod)) => return None,
            Some(_) => SILENCE_MAX,
            None => SILENCE_MAX * 2,
        };
        let lease = self.leases.iter().find(|lease| lease.name_any() == job);
        // Without a Lease, only the master's clock tells when it wrote last.
        let written = || Timestamp::from_millisecond(data.get(STATUS_AT)?.parse().ok()?).ok();
        let last = lease.and_then(renewed_at).or_else(written)?;
        Duration::try_from(self.now.duration_since(last)).ok().filter(|time| *time >= limit)
    }

    /// What the newest pod of a master of `job` shows.
    fn newest_pod(&self, job: &str) -> Option<String> {
        let pods = self.pods.iter().flatten().filter(|pod| is_of(job, pod));
        let newest = pods.max_by_key(|pod| pod.metadata.creation_timestamp.clone())?;
        let name = newest.name_any();
        Some(match classify(newest) {
            Verdict::Created => format!("pod {name} is not scheduled yet"),
            Verdict::Ended(end) => format!("pod {name}: {}", end.detail),
            Verdict::Running => {
                format!("pod {name} runs, but can't lead: see `elasticdl logs {job}`")
            }
            Verdict::Starting => format!("pod {name} has a node and does not start"),
            Verdict::Terminating(termination) => format!("pod {name}: {}", termination.end.detail),
            Verdict::CannotStart(why) | Verdict::Queued(why) | Verdict::Unschedulable(why) => {
                format!("pod {name}: {why}")
            }
        })
    }
}

/// When the server stored the last renewal; without its stamps, when the master sent it.
fn renewed_at(lease: &Lease) -> Option<Timestamp> {
    let stamps = lease.metadata.managed_fields.iter().flatten();
    let stored = stamps.filter_map(|stamp| Some(stamp.time.as_ref()?.0)).max();
    stored.or_else(|| Some(lease.spec.as_ref()?.renew_time.as_ref()?.0))
}

fn is_of(job: &str, pod: &Pod) -> bool {
    pod.labels().get(JOB_LABEL).is_some_and(|label| label == job)
}

/// Whether the master in the pod leads: it is ready while it does.
fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    conditions.into_iter().any(|c| c.type_ == "Ready" && c.status == "True")
}

/// Time for which a Lease need not be renewed: a little more than it is valid.
const SILENCE_MAX: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn masters(ready: &str, state: Value, renewed: &str) -> Masters {
        let labels = json!({"elasticdl/job": "j", "elasticdl/role": "master"});
        let pod = json!({
            "metadata": {"name": "j-master-x", "labels": labels},
            "status": {
                "phase": "Running",
                "conditions": [{"type": "Ready", "status": ready}],
                "containerStatuses": [{
                    "name": "master", "image": "i", "imageID": "", "ready": false,
                    "restartCount": 0, "state": state
                }],
            },
        });
        let lease = json!({"metadata": {"name": "j"}, "spec": {"renewTime": renewed}});
        Masters {
            pods: Some(vec![serde_json::from_value(pod).unwrap()]),
            leases: vec![serde_json::from_value(lease).unwrap()],
            now: now(),
        }
    }

    /// 10 min after the epoch.
    fn now() -> Timestamp {
        Timestamp::from_second(600).unwrap()
    }

    #[test]
    fn a_job_has_no_master_if_none_is_ready_and_its_lease_is_old() {
        let running = json!({"running": {}});
        let silent = |ready: &str, renewed: &str| {
            let masters = masters(ready, running.clone(), renewed);
            masters.silent_for("j", &Data::new()).map(|time| time.as_secs())
        };
        assert_eq!(silent("True", "1970-01-01T00:05:00.000000Z"), None, "clocks differ");
        assert_eq!(silent("False", "1970-01-01T00:09:30.000000Z"), None, "a take-over");
        assert_eq!(silent("False", "1970-01-01T00:15:00.000000Z"), None, "clocks differ");
        assert_eq!(silent("False", "1970-01-01T00:05:00.000000Z"), Some(300));
    }

    #[test]
    fn clocks_of_hosts_make_no_living_master_silent_and_no_dead_one_alive() {
        let silent = |renewed: &str, stored: &str| {
            let mut masters = masters("False", json!({"running": {}}), renewed);
            let stamp = |time: &str| json!({"manager": "m", "operation": "Update", "time": time});
            let stamps = json!([stamp("1970-01-01T00:01:00Z"), stamp(stored)]);
            masters.leases[0].metadata.managed_fields = serde_json::from_value(stamps).unwrap();
            // The status has a time of the master's host, too.
            let data = Data::from([(STATUS_AT.into(), "3600000".into())]);
            masters.silent_for("j", &data).map(|time| time.as_secs())
        };
        assert_eq!(silent("1970-01-01T00:00:00.000000Z", "1970-01-01T00:09:50Z"), None, "behind");
        assert_eq!(
            silent("1970-01-01T01:00:00.000000Z", "1970-01-01T00:05:00Z"),
            Some(300),
            "ahead"
        );
    }

    #[test]
    fn without_the_right_to_read_pods_and_leases_the_age_of_the_status_decides() {
        let data = |ms: u64| Data::from([(STATUS_AT.into(), ms.to_string())]);
        let masters = Masters { pods: None, leases: Vec::new(), now: now() };
        let silent = |data: &Data| masters.silent_for("j", data);
        assert_eq!(silent(&data(500_000)), None);
        assert_eq!(silent(&data(400_000)), Some(Duration::from_secs(200)));
        // Another release has written it.
        assert_eq!(silent(&Data::new()), None);
    }

    #[test]
    fn the_newest_pod_tells_why() {
        let ended = json!({"terminated": {"exitCode": 1, "message": "the record is missing"}});
        let masters = masters("False", ended, "1970-01-01T00:05:00.000000Z");
        let why = masters.newest_pod("j");
        let silence = Silence { time: Duration::from_secs(185), why };
        assert_eq!(
            silence.to_string(),
            "no master for 3 min: pod j-master-x: exited with code 1: the record is missing"
        );
        assert_eq!(masters.newest_pod("other"), None);
    }
}
