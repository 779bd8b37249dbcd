//! A master presents the certificate of its job, and workers accept no other.

use std::net::Ipv4Addr;
use std::num::NonZeroU64;
use std::path::Path;
use std::time::Duration;

use elasticdl_master::certificates::Certificates;
use elasticdl_master::event_loop::{JobResult, Master};
use elasticdl_master::job::WorkerOptions;
use elasticdl_master::job::{Batch, JobSpec, LaunchId, Outcome};
use elasticdl_master::jobdir::{JobDir, worker_log};
use elasticdl_master::listener::{Identity, ServerConfig};
use elasticdl_master::local::Launcher;
use elasticdl_master::progress::Progress;
use elasticdl_tests::counting_data;
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use crate::PROGRAMS;

const RECORDS: u64 = 600;
const NAME: &str = "count-master";

fn certificates() -> Certificates {
    Certificates::generate("count", &[NAME.into()]).unwrap()
}

fn spec(data: &Path) -> JobSpec {
    let batch = Batch::Global(NonZeroU64::new(20).unwrap());
    JobSpec {
        options: WorkerOptions { epochs: 2, ..WorkerOptions::new(data.to_str().unwrap(), batch) },
        ..JobSpec::new("count", data.to_str().unwrap(), 2, batch)
    }
}

/// A job whose master presents the certificate `shown`, and whose workers verify `ca` and `name`,
/// if given. Returns the first worker's log as well.
async fn run(
    shown: &Certificates,
    wanted: Option<(&str, &str)>,
    master_timeout: Duration,
) -> (JobResult, String) {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    counting_data(&data, RECORDS, 3).unwrap();
    let dir = JobDir::create(&folder.path().join("job")).unwrap();
    let args = vec!["--records".into(), RECORDS.to_string().into()];
    let mut launcher = Launcher::new(PROGRAMS.counting.into(), args, &dir, master_timeout);
    if let Some((ca, name)) = wanted {
        let file = folder.path().join("ca.crt");
        std::fs::write(&file, ca).unwrap();
        launcher.env.push(("ELASTICDL_CA_FILE".into(), file.into()));
        launcher.env.push(("ELASTICDL_MASTER_NAME".into(), name.into()));
    }
    let server_config = ServerConfig {
        listener: TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap(),
        token: dir.token().clone(),
        identity: Some(Identity::from_pem(&shown.certificate, &shown.key).unwrap()),
    };
    let master = Master::new(spec(&data), server_config, launcher, Progress::quiet()).unwrap();
    let (_interrupts, interrupted) = mpsc::channel(1);
    let ended = master.run(interrupted).await;
    let log = std::fs::read_to_string(worker_log(&dir.logs(), LaunchId(1))).unwrap();
    (ended, log)
}

#[tokio::test]
async fn workers_that_know_their_master_train_each_record_once() {
    let certificates = certificates();
    let (ended, log) =
        run(&certificates, Some((&certificates.ca, NAME)), Duration::from_secs(30)).await;
    assert_eq!(ended.outcome, Outcome::Completed, "{log}");
    let records = ended.summary.records;
    assert_eq!((records.counted, records.missing, records.repeated), (2 * RECORDS, 0, 0));
    // The model's own count: each record twice.
    assert_eq!(ended.summary.model_summary, Some(format!("2 2 {}", 2 * RECORDS)));
}

#[tokio::test]
async fn workers_that_cannot_verify_their_master_report_it_and_end() {
    let (ours, other) = (certificates(), certificates());
    let (failed, refused) = (Outcome::Failed, Outcome::InvalidInput);
    let table = [
        (Some((other.ca.as_str(), NAME)), failed, "invalid peer certificate"),
        (Some((&ours.ca, "cifar-master")), failed, "not valid for name"),
        (None, failed, "no welcome: "),
        (Some(("nonsense", NAME)), refused, "must hold the certificate of the job's CA"),
    ];
    for (wanted, outcome, expected) in table {
        let (ended, log) = run(&ours, wanted, Duration::from_millis(300)).await;
        assert_eq!((ended.outcome, ended.summary.records.counted), (outcome, 0), "{log}");
        assert!(log.contains(expected), "{expected}: {log}");
    }
}
