//! Objects of a job that are missing or damaged, so that no master can start.
//!
//! A user may have deleted an object and may restore it, so several masters try. If each of them
//! finds the same, the Job fails: otherwise it would create masters for ever, at longer and longer
//! intervals, and no user would learn of it. The workers are left alone: they train on, and end by
//! themselves, or with a checkpoint when their pods are deleted.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tracing::{error, warn};

use crate::kube::anchor::{Anchor, AnchorWriter, Data};
use crate::kube::client::Cluster;
use crate::kube::events::EventRecorder;
use crate::kube::{objects, succession};

/// Consecutive masters that have found the same.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Damage {
    masters: u32,
    text: String,
}

/// Counts this master, which can't start for the reason `text`. Fails the Job after
/// [`MASTERS_MAX`] of them.
pub(super) async fn count(cluster: &Cluster, anchor: &Anchor, job: &str, text: &str) {
    let Ok(read) = anchor.read().await else { return };
    let known: Option<Damage> =
        read.data.as_ref().and_then(|data| serde_json::from_str(data.get(DAMAGE)?).ok());
    let before = known.filter(|known| known.text == text).map_or(0, |known| known.masters);
    let masters = before.saturating_add(1);
    if masters >= MASTERS_MAX {
        let message = format!("{masters} masters could not start: {text}");
        error!(message, "the Job fails");
        let recorder = EventRecorder::start(cluster, &read.metadata);
        recorder.record("MasterFailed", message);
        succession::stop_replacements(cluster, &objects::master_name(job), true).await;
        // The Event is recorded concurrently, while there is a recorder.
        tokio::time::sleep(EVENT_TIME).await;
        return drop(recorder);
    }
    let damage = Damage { masters, text: text.into() };
    let damage = serde_json::to_string(&damage).expect("its keys are strings");
    if let Err(error) = anchor.write(&Data::from([(DAMAGE.into(), damage)])).await {
        warn!(%error, "this master's failure is not counted");
    }
}

/// Forgets the masters that could not start, which `data` of the anchor tells: this one can.
pub(super) async fn forget(data: Option<&Data>, writer: &AnchorWriter) {
    if data.is_some_and(|data| data.get(DAMAGE).is_some_and(|text| !text.is_empty())) {
        // It counts from this number on, if this is not written.
        drop(writer.write(&Data::from([(DAMAGE.into(), String::new())])).await);
    }
}

/// Key of the anchor.
const DAMAGE: &str = "damage";
/// With the back-off of a Job they take about five minutes.
const MASTERS_MAX: u32 = 5;
const EVENT_TIME: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::kube::testing::FakeServer;

    #[tokio::test(start_paused = true)]
    async fn the_job_fails_after_five_masters_that_find_the_same_damage_and_not_before() {
        let (fake, cluster) = FakeServer::start();
        let owner =
            json!({"apiVersion": "batch/v1", "kind": "Job", "name": "j-master", "uid": "b"});
        let meta = json!({"name": "j", "uid": "a", "ownerReferences": [owner]});
        fake.put("configmaps", "j", json!({"metadata": meta, "data": {"task": "{}"}}));
        fake.put(
            "jobs",
            "j-master",
            json!({
                "metadata": {"name": "j-master", "uid": "b"},
                "spec": {"backoffLimit": 1_000_000}, "status": {"failed": 9}
            }),
        );
        let anchor = Anchor::new(&cluster, "j");
        let limit = |fake: &FakeServer| -> Value {
            fake.state().object("jobs", "j-master").unwrap()["spec"]["backoffLimit"].clone()
        };
        let lost = "the record is missing";
        for _ in 0..4 {
            count(&cluster, &anchor, "j", lost).await;
        }
        // One that finds something else, and one that leads.
        count(&cluster, &anchor, "j", "there is no service").await;
        for _ in 0..4 {
            count(&cluster, &anchor, "j", lost).await;
        }
        let writer = AnchorWriter::begin(&anchor, &anchor.read().await.unwrap(), 1).await.unwrap();
        forget(anchor.read().await.unwrap().data.as_ref(), &writer).await;
        for _ in 0..4 {
            count(&cluster, &anchor, "j", lost).await;
        }
        assert_eq!(limit(&fake), 1_000_000);
        count(&cluster, &anchor, "j", lost).await;
        assert_eq!(limit(&fake), 9);
        let events = fake.state().all("events");
        assert_eq!(events[0]["reason"], "MasterFailed");
        assert!(events[0]["message"].as_str().unwrap().contains(lost));
    }
}
