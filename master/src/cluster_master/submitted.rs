//! What a master reads from the anchor of its job.

use std::time::Duration;

use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::jiff::Timestamp;

use crate::dashboard::{History, StoredHistory};
use crate::exit::{EXIT_FAILED, Failure, code_of_summary};
use crate::job::{DatasetFingerprint, PersistedJob};
use crate::kube::anchor::{Anchor, HISTORY, INCARNATION, RECORD, SUMMARY};
use crate::kube::file_list::LoadError;
use crate::kube::objects::{TABLE_SERVER_POD, TASK, Task, WORKER_POD};
use crate::kube::{anchor, file_list, persisted_job};

/// Contents of the anchor.
pub(super) struct Submitted {
    /// The anchor as it was read.
    pub(super) anchor: ConfigMap,
    pub(super) task: Task,
    pub(super) template: Pod,
    /// The template of table servers' pods, if the job has any.
    pub(super) table_server: Option<Pod>,
    pub(super) meta: ObjectMeta,
    /// Incarnation of this master.
    pub(super) incarnation: u64,
    /// The persisted job of the previous master.
    pub(super) record: Option<PersistedJob>,
    /// Age of the job.
    pub(super) age: Duration,
    /// The history that former masters have written.
    pub(super) history: History,
    /// Exit code of the master that has ended the job.
    pub(super) ended: Option<u8>,
}

impl Submitted {
    /// `transitions`: how often the leader Lease has changed hands. `now`: by the server's clock,
    /// so that the job is as old for each of its masters.
    pub(super) fn read(
        anchor: ConfigMap,
        transitions: u64,
        now: Timestamp,
    ) -> Result<Self, Failure> {
        let seen = anchor.clone();
        let data = anchor.data.unwrap_or_default();
        let malformed = |key: &str, error: &dyn std::fmt::Display| {
            Failure::usage(format!(
                "the anchor's {key} can't be read: {error}; submit the job again"
            ))
        };
        let ended = data.get(SUMMARY).map(|text| {
            serde_json::from_str(text).map_or(EXIT_FAILED, |summary| code_of_summary(&summary))
        });
        // Checked before any write: an unreadable record is left for a master that can read it.
        // And before the task, which another release may have written in another format, too.
        let unreadable = |error| {
            Failure::damaged(format!(
                "the anchor's {RECORD} can't be read: {error}; nothing was changed, and the \
                 workers continue for up to --master-timeout"
            ))
        };
        let record = data.get(RECORD).filter(|_| ended.is_none());
        let mut record =
            record.map(|text| persisted_job::read(text).map_err(unreadable)).transpose()?;
        // The status is written more often than the record.
        if let (Some(record), Some(status)) = (&mut record, anchor::status(&data)) {
            record.note_step(status.step);
        }
        let need = |key: &str| data.get(key).ok_or_else(|| malformed(key, &"it is missing"));
        let task: Task = serde_json::from_str(need(TASK)?).map_err(|e| malformed(TASK, &e))?;
        task.job.check().map_err(|e| malformed(TASK, &e))?;
        let template =
            serde_json::from_str(need(WORKER_POD)?).map_err(|e| malformed(WORKER_POD, &e))?;
        let table_server = match task.job.options.table_servers {
            0 => None,
            _ => serde_json::from_str(need(TABLE_SERVER_POD)?)
                .map_err(|e| malformed(TABLE_SERVER_POD, &e))?,
        };
        let incarnation = next_incarnation(data.get(INCARNATION), transitions);
        let (age, meta) = (anchor::age(&seen.metadata, now), anchor.metadata);
        // The history is for the user alone; one that can't be read begins anew.
        let history = data.get(HISTORY).and_then(|text| StoredHistory::unpack(text).ok());
        let history = history.unwrap_or_default().history.resumed();
        Ok(Self {
            history,
            anchor: seen,
            task,
            template,
            table_server,
            meta,
            incarnation,
            record,
            age,
            ended,
        })
    }

    /// Adds the data set's list of files, which is stored apart, to the persisted job. Returns the
    /// fingerprint of the stored list.
    pub(super) async fn load_file_list(
        &mut self,
        anchor: &Anchor,
        job: &str,
    ) -> Result<Option<DatasetFingerprint>, Failure> {
        let stored = self.record.as_ref().and_then(PersistedJob::data);
        if let (Some(record), Some(stored)) = (&mut self.record, stored) {
            let uid = self.anchor.metadata.uid.as_deref().unwrap_or_default();
            let keys = self.anchor.data.as_ref().expect("it has been read");
            let list = file_list::load(anchor, (job, uid), keys, stored).await;
            let list = list.map_err(|error| match error {
                LoadError::Cluster(error) => error.into(),
                error @ LoadError::Damaged(_) => Failure::damaged(error.to_string()),
            })?;
            record.attach_file_list(list).map_err(Failure::damaged)?;
        }
        Ok(stored)
    }
}

/// The incarnation after the one in the anchor. Workers accept no master with a lower number than
/// they know, so if a user has removed or edited it, that of the Lease counts, which has changed
/// hands at least as often.
pub(super) fn next_incarnation(before: Option<&String>, transitions: u64) -> u64 {
    let before = before.and_then(|text| text.trim().parse().ok()).unwrap_or(0);
    transitions.max(before).saturating_add(1)
}
