//! The master of a job as the cluster shows it: its pods, and the Job that makes them.

use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;

use super::client::Cluster;
use super::objects;
use super::verdict::{Cause, Verdict, judge};
use super::watch::{Change, Selection, Watch};

/// The watched masters of a job.
#[derive(Debug)]
pub struct MasterPods {
    job: Watch<Job>,
    pods: Watch<Pod>,
}

/// What is seen of a master.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MasterSight {
    /// It can't start as things are.
    CannotStart(String),
    /// It has ended, and another may follow.
    Ended(String),
    /// No other will follow.
    GaveUp(String),
    /// It runs.
    Runs,
    /// It waits for room.
    Waits(String),
}

impl MasterPods {
    /// Watches the masters of `job`. Must be called within a runtime.
    #[must_use]
    pub fn watch(cluster: &Cluster, job: &str) -> Self {
        let fields = Some(format!("metadata.name={}", objects::master_name(job)));
        let labels = Some(objects::master_selector(job));
        Self {
            job: Watch::start(cluster.api(), Selection { fields, labels: None }),
            pods: Watch::start(cluster.api(), Selection { fields: None, labels }),
        }
    }

    /// The next sight. Safe to drop at any time.
    pub async fn next(&mut self) -> MasterSight {
        loop {
            let sight = tokio::select! {
                change = self.pods.next() => match change {
                    Change::Seen(pod) => of_pod(&pod),
                    _ => None,
                },
                change = self.job.next() => match change {
                    Change::Seen(job) => of_job(&job),
                    _ => None,
                },
            };
            if let Some(sight) = sight {
                return sight;
            }
        }
    }
}

fn of_pod(pod: &Pod) -> Option<MasterSight> {
    match judge(pod) {
        Verdict::Asked | Verdict::Starts => None,
        Verdict::CannotStart(why) => Some(MasterSight::CannotStart(why)),
        Verdict::Ended(end) if end.cause == Cause::Exited(0) => None,
        Verdict::Ended(end) => Some(MasterSight::Ended(end.detail)),
        Verdict::Leaves(leave) => Some(MasterSight::Ended(leave.end.detail)),
        Verdict::Runs => Some(MasterSight::Runs),
        Verdict::WaitsForRoom(why) => Some(MasterSight::Waits(why)),
    }
}

fn of_job(job: &Job) -> Option<MasterSight> {
    let mut conditions = job.status.as_ref()?.conditions.iter().flatten();
    let failed = conditions.rfind(|c| c.type_ == "Failed" && c.status == "True")?;
    let words = [&failed.reason, &failed.message].map(|text| text.clone().unwrap_or_default());
    Some(MasterSight::GaveUp(words.join(": ")))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_job_that_gave_up_is_told_from_one_that_goes_on() {
        let job = |conditions: serde_json::Value| {
            let job: Job = serde_json::from_value(json!({"status": {"conditions": conditions}})).unwrap();
            of_job(&job)
        };
        let failed = json!([{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "too many"}]);
        assert_eq!(job(failed), Some(MasterSight::GaveUp("BackoffLimitExceeded: too many".into())));
        assert_eq!(job(json!([{"type": "Failed", "status": "False"}])), None);
        assert_eq!(job(json!([{"type": "Complete", "status": "True"}])), None);
        assert_eq!(of_job(&Job::default()), None);
    }

    #[test]
    fn a_master_that_ended_in_order_is_no_news() {
        let pod = |code: i32| {
            let status = json!({"phase": "Failed", "containerStatuses": [{
                "name": "master", "image": "i", "imageID": "", "ready": false, "restartCount": 0,
                "state": {"terminated": {"exitCode": code, "message": "error: forbidden"}}
            }]});
            of_pod(&serde_json::from_value::<Pod>(json!({"status": status})).unwrap())
        };
        assert_eq!(pod(0), None);
        assert_eq!(pod(1), Some(MasterSight::Ended("exited with code 1: error: forbidden".into())));
    }
}
