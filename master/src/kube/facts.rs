//! What the anchor of a job says of its records, for `elasticdl lineage`.

use elasticdl_proto::Summary;

use super::anchor::{self, Anchor, RECORD, SUMMARY};
use super::file_list::{self, LoadError};
use super::persisted_job;
use crate::exit::Failure;
use crate::lineage::{JobFacts, JobProgress};

/// Reads what is known of the job `name`, whose anchor this is.
///
/// # Errors
/// The anchor can't be read, or no worker has described the data set.
pub async fn read_facts(anchor: &Anchor, name: &str) -> Result<JobFacts, Failure> {
    let read = anchor.read().await?;
    let (data, uid) = (read.data.unwrap_or_default(), read.metadata.uid.unwrap_or_default());
    let unknown = || Failure::failed(format!("no worker of {name} has described its data yet"));
    let unreadable = |what: &str, why: &dyn std::fmt::Display| {
        Failure::failed(format!("can't read the {what} of {name}: {why}"))
    };
    let record = data.get(RECORD).filter(|text| !text.is_empty()).ok_or_else(unknown)?;
    let mut record = persisted_job::read(record).map_err(|why| unreadable("record", &why))?;
    let files = file_list::load(anchor, (name, &uid), &data, record.data().ok_or_else(unknown)?);
    let files = files.await.map_err(|error| match error {
        LoadError::Cluster(error) => error.into(),
        LoadError::Damaged(why) => unreadable("list of files", &why),
    })?;
    record.attach_file_list(files).map_err(|why| unreadable("list of files", &why))?;
    let progress: JobProgress = match data.get(SUMMARY) {
        Some(text) => {
            let summary: Summary =
                serde_json::from_str(text).map_err(|why| unreadable("summary", &why))?;
            summary.into()
        }
        None => anchor::status(&data).ok_or_else(unknown)?.into(),
    };
    JobFacts::of_record(&record, progress).ok_or_else(unknown)
}
