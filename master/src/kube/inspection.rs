//! What the workers of a job in a cluster do: asked for by users through the anchor.
//!
//! ```text
//!  user ──► anchor, key `inspect`: a number ──► master ──► asks its workers
//!       ◄────────────── ConfigMap <job>-inspection-<number> ◄──┘
//! ```
//!
//! The ConfigMap is deleted by the user's command once it is read, or with the job.

use std::io;
use std::time::{Duration, SystemTime};

use elasticdl_proto::Inspection;
use tokio::time::Instant;
use tracing::warn;

use super::anchor::{Anchor, AnchorWriter, Data, INSPECT};
use super::client::{Cluster, ClusterError};
use super::requests::request;
use crate::event_loop::Inspector;

/// Why there is no inspection.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InspectionError {
    /// There is no such job, or [`ClusterError`].
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// No master has answered.
    #[error("the master of {0} has not answered within 8 s: is it running?")]
    NoAnswer(String),
    /// The answer is of another release.
    #[error("can't read what the master of {job} has answered: {why}")]
    Unreadable {
        /// The job.
        job: String,
        /// The reader's error.
        why: io::Error,
    },
}

/// Asks the master of `job` what its workers do, and waits for the answer for some seconds.
///
/// # Errors
/// [`InspectionError`].
pub async fn ask(cluster: &Cluster, job: &str) -> Result<Inspection, InspectionError> {
    let anchor = Anchor::new(cluster, job);
    let deadline = Instant::now() + LIMIT;
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let number = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
    request(cluster, &anchor, Data::from([(INSPECT.into(), number.to_string())])).await?;
    let name = part_name(job, number);
    while Instant::now() < deadline {
        if let Some(packed) = anchor.read_part(&name).await? {
            anchor.delete_part(&name).await;
            return unpack(&packed)
                .map_err(|why| InspectionError::Unreadable { job: job.to_owned(), why });
        }
        tokio::time::sleep(POLL).await;
    }
    Err(InspectionError::NoAnswer(job.to_owned()))
}

/// Answers the request of this number, in a task of its own.
pub(crate) fn answer(inspector: Inspector, writer: AnchorWriter, number: u64) {
    tokio::spawn(async move {
        // The job may end meanwhile.
        let Some(inspection) = inspector.inspect().await else { return };
        let name = part_name(writer.job(), number);
        let written = writer.create_part(&name, "inspection", pack(inspection)).await;
        if let Err(error) = written {
            warn!(%error, "a user who asks what the workers do gets no answer");
        }
    });
}

/// A compressed inspection, without the reports of the last workers where it would be too long.
fn pack(mut inspection: Inspection) -> Vec<u8> {
    let pack = |inspection: &Inspection| {
        let json = serde_json::to_vec(inspection).expect("its keys are strings");
        zstd::encode_all(&json[..], 0).expect("memory is written")
    };
    let mut packed = pack(&inspection);
    let mut reports = inspection.workers.len();
    while packed.len() > BYTES_MAX && reports > 0 {
        reports /= 2;
        inspection.workers[reports..].iter_mut().for_each(|worker| worker.report = None);
        packed = pack(&inspection);
    }
    packed
}

fn unpack(packed: &[u8]) -> io::Result<Inspection> {
    let json = zstd::decode_all(packed)?;
    Ok(serde_json::from_slice(&json)?)
}

fn part_name(job: &str, number: u64) -> String {
    format!("{job}-inspection-{number}")
}

/// A little less than an object may have.
const BYTES_MAX: usize = 900 << 10;
/// Twice the time that a master gives its workers.
const LIMIT: Duration = Duration::from_secs(8);
const POLL: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use elasticdl_proto::{InspectedWorker, ThreadReport, WorkerId, WorkerReport};
    use serde_json::json;

    use super::super::testing::FakeServer;
    use super::*;

    fn worker(id: u64, frames: Vec<String>) -> InspectedWorker {
        let thread = ThreadReport { frames, ..ThreadReport::default() };
        let report = WorkerReport { threads: vec![thread], ..WorkerReport::default() };
        InspectedWorker {
            worker: WorkerId(id),
            rank: None,
            pid: None,
            address: None,
            state: "training".into(),
            reason: None,
            pod: None,
            node: None,
            heard_s: None,
            messages: Vec::new(),
            report: Some(report),
            process: None,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_in_the_anchor_is_answered_by_an_object_that_is_read_and_deleted() {
        let (fake, cluster) = FakeServer::start();
        let labels = json!({"elasticdl/role": "anchor"});
        let metadata = json!({"name": "job", "uid": "u", "namespace": "ns", "labels": labels});
        fake.put("configmaps", "job", json!({"metadata": metadata, "data": {"task": "{}"}}));
        let anchor = Anchor::new(&cluster, "job");
        let writer = AnchorWriter::begin(&anchor, &anchor.read().await.unwrap(), 1).await.unwrap();
        let known = Inspection { workers: vec![worker(1, Vec::new())], ..Inspection::default() };
        let answering = async {
            loop {
                let data = anchor.read().await.unwrap().data.unwrap();
                if let Some(number) = data.get(INSPECT) {
                    let name = part_name("job", number.parse().unwrap());
                    let packed = pack(known.clone());
                    return writer.create_part(&name, "inspection", packed).await.unwrap();
                }
                tokio::time::sleep(POLL).await;
            }
        };
        let (asked, ()) = tokio::join!(ask(&cluster, "job"), answering);
        assert_eq!(asked.unwrap(), known);
        assert_eq!(fake.state().all("configmaps").len(), 1);
        let error = ask(&cluster, "job").await.unwrap_err().to_string();
        assert_eq!(error, "the master of job has not answered within 8 s: is it running?");
    }

    #[test]
    fn the_reports_of_the_last_workers_are_left_out_of_an_answer_that_is_too_long() {
        // Names that do not compress.
        let frame = |id: u64, i: u64| {
            let hash = (id * 1_000_000 + i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            format!("{hash:016x}")
        };
        let worker = |id| worker(id, (0..20_000).map(|i| frame(id, i)).collect());
        let workers: Vec<InspectedWorker> = (0..9).map(worker).collect();
        let packed = pack(Inspection { workers, ..Inspection::default() });
        assert!(packed.len() <= BYTES_MAX, "{}", packed.len());
        let left = unpack(&packed).unwrap().workers;
        let reports = left.iter().filter(|worker| worker.report.is_some()).count();
        assert!(left.len() == 9 && (1..9).contains(&reports), "{reports}");
    }
}
