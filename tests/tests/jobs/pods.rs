//! In pods of several workers each worker is a rank; they start, leave and are replaced together,
//! and none outlives its supervisor.

use std::fs;
use std::net::Ipv4Addr;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

use elasticdl_master::event_loop::{JobResult, Master, UserCommand};
use elasticdl_master::job::WorkerOptions;
use elasticdl_master::job::{Batch, JobSpec, Outcome, Snapshot, Status};
use elasticdl_master::jobdir::JobDir;
use elasticdl_master::listener::ServerConfig;
use elasticdl_master::local::Launcher;
use elasticdl_master::progress::Progress;
use elasticdl_tests::{counting_data, is_alive, send};
use rustix::process::Signal;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use crate::PROGRAMS;

const RECORDS: u64 = 600;
const EPOCHS: u32 = 2;

/// A running job with two workers per pod.
struct Running {
    _folder: tempfile::TempDir,
    hurry: PathBuf,
    shown: watch::Receiver<Option<Snapshot>>,
    interrupts: mpsc::Sender<UserCommand>,
    ended: JoinHandle<JobResult>,
}

fn spec(data: &str) -> JobSpec {
    let batch = Batch::Global(NonZeroU64::new(8).unwrap());
    JobSpec {
        min_workers: 2,
        max_workers: 8,
        workers_per_pod: 2,
        max_worker_restarts: 1,
        restart_without_checkpoint: true,
        options: WorkerOptions { epochs: EPOCHS, ..WorkerOptions::new(data, batch) },
        ..JobSpec::new("count", data, 4, batch)
    }
}

impl Running {
    /// Starts the job, with these options of the model.
    async fn start(program: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (data, hurry) = (folder.path().join("data"), folder.path().join("hurry"));
        counting_data(&data, RECORDS, 3).unwrap();
        let dir = JobDir::create(&folder.path().join("job")).unwrap();
        let mut args = vec!["--records".into(), RECORDS.to_string().into()];
        args.extend(["--hurry-when".into(), hurry.clone().into()]);
        args.extend(program.iter().map(Into::into));
        let patience = Duration::from_secs(30);
        let mut launcher = Launcher::new(PROGRAMS.counting.into(), args, &dir, patience);
        launcher.env.push(("ELASTICDL_WORKERS".into(), "2".into()));
        launcher.env.push(("CUDA_VISIBLE_DEVICES".into(), "MIG-a,MIG-b".into()));
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let server_config = ServerConfig { listener, token: dir.token().clone(), identity: None };
        let (publish, shown) = watch::channel(None);
        let progress = Progress::quiet().publishing(publish);
        let master =
            Master::new(spec(data.to_str().unwrap()), server_config, launcher, progress).unwrap();
        let (interrupts, interrupted) = mpsc::channel(4);
        let ended = tokio::spawn(master.run(interrupted));
        Self { _folder: folder, hurry, shown, interrupts, ended }
    }

    async fn wait_for(&mut self, what: &str, is: impl Fn(&Status) -> bool) -> Status {
        let mut last = None;
        let found = tokio::time::timeout(Duration::from_secs(60), async {
            loop {
                let status =
                    self.shown.borrow_and_update().as_ref().map(|shown| shown.status.clone());
                if let Some(status) = status.as_ref().filter(|status| is(status)) {
                    return status.clone();
                }
                last = status;
                assert!(
                    self.shown.changed().await.is_ok(),
                    "the job has ended before {what}: {last:#?}"
                );
            }
        });
        let found = found.await;
        found.unwrap_or_else(|_| panic!("no {what}: {last:#?}"))
    }

    /// Waits until these workers, and no others, commit a step.
    async fn wait_for_members(&mut self, members: &[u64]) -> Status {
        let are = |status: &Status| {
            let mut ids: Vec<u64> =
                status.workers.iter().filter(|w| w.rank.is_some()).map(|w| w.worker.0).collect();
            ids.sort_unstable();
            ids == members
        };
        let then = self.wait_for(&format!("group of {members:?}"), are).await.step;
        self.wait_for(&format!("step of {members:?}"), |status| are(status) && status.step > then)
            .await
    }

    /// Hurries the job to its end, and asserts that it is complete.
    async fn assert_completes(self) -> JobResult {
        fs::write(&self.hurry, "").unwrap();
        let ended = self.ended.await.unwrap();
        assert_eq!(ended.outcome, Outcome::Completed, "{:?}", ended.summary);
        let (records, total) = (&ended.summary.records, u64::from(EPOCHS) * RECORDS);
        assert_eq!((records.counted, records.missing, records.repeated), (total, 0, 0));
        // The model's own count.
        assert_eq!(ended.summary.model_summary, Some(format!("{EPOCHS} {EPOCHS} {total}")));
        ended
    }
}

fn pid(status: &Status, worker: u64) -> u32 {
    status.workers.iter().find(|w| w.worker.0 == worker).unwrap().pid
}

fn parent(pid: u32) -> u32 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    stat.rsplit_once(')').unwrap().1.split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn variable(pid: u32, name: &str) -> Option<String> {
    let environ = fs::read(format!("/proc/{pid}/environ")).unwrap();
    let mut all = environ.split(|&byte| byte == 0).map(|v| String::from_utf8_lossy(v).into_owned());
    all.find_map(|v| Some(v.strip_prefix(name)?.strip_prefix('=')?.to_owned()))
}

/// A supervisor of two workers without a job: their master accepts connections and does not answer.
struct SilentPod {
    _folder: tempfile::TempDir,
    _master: std::net::TcpListener,
    supervisor: std::process::Child,
    workers: Vec<u32>,
}

impl SilentPod {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let token = folder.path().join("token");
        fs::write(&token, "abc").unwrap();
        let master = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let supervisor = std::process::Command::new(PROGRAMS.counting)
            .args(["--records", "1"])
            .env("ELASTICDL_MASTER", master.local_addr().unwrap().to_string())
            .env("ELASTICDL_TOKEN_FILE", token)
            .env("ELASTICDL_JOB", "count")
            .env("ELASTICDL_LAUNCH", "1")
            .env("ELASTICDL_MASTER_TIMEOUT_MS", "60000")
            .env("ELASTICDL_WORKERS", "2")
            .spawn()
            .unwrap();
        let children = format!("/proc/{0}/task/{0}/children", supervisor.id());
        let workers = wait_until(|| {
            let pids = fs::read_to_string(&children).unwrap();
            let pids: Vec<u32> = pids.split_whitespace().map(|pid| pid.parse().unwrap()).collect();
            // Each worker has connected to its master, so it already watches its supervisor.
            let calls =
                |pid: &u32| fs::read_dir(format!("/proc/{pid}/task")).is_ok_and(|t| t.count() > 1);
            (pids.len() == 2 && pids.iter().all(calls)).then_some(pids)
        });
        Self { _folder: folder, _master: master, supervisor, workers }
    }
}

fn wait_until<T>(look: impl Fn() -> Option<T>) -> T {
    for _ in 0..3000 {
        if let Some(found) = look() {
            return found;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("it did not come to that");
}

#[test]
fn workers_end_with_a_supervisor_that_is_killed() {
    let mut pod = SilentPod::start();
    pod.supervisor.kill().unwrap();
    pod.supervisor.wait().unwrap();
    wait_until(|| (!pod.workers.iter().any(|pid| is_alive(*pid))).then_some(()));
}

/// The other worker does not leave on SIGTERM, as it has no stream yet; so it is killed, too.
#[test]
fn a_supervisor_ends_as_the_first_of_its_workers_that_failed() {
    let mut pod = SilentPod::start();
    send(pod.workers[1], Signal::ABORT);
    assert_eq!(pod.supervisor.wait().unwrap().code(), Some(128 + 6));
    assert!(!pod.workers.iter().any(|pid| is_alive(*pid)));
}

const SLOW: [&str; 2] = ["--micros-per-record", "5000"];

#[tokio::test]
async fn the_workers_of_a_pod_are_ordinary_ranks_and_each_has_its_own_index() {
    let mut job = Running::start(&SLOW).await;
    let status = job.wait_for_members(&[1, 2, 3, 4]).await;
    let pids = [1, 2, 3, 4].map(|worker| pid(&status, worker));
    assert_eq!(pids.map(|pid| variable(pid, "ELASTICDL_LAUNCH").unwrap()), ["1", "2", "3", "4"]);
    assert_eq!(pids.map(|pid| variable(pid, "ELASTICDL_INDEX").unwrap()), ["0", "1", "0", "1"]);
    assert_eq!(pids.map(|pid| variable(pid, "ELASTICDL_WORKERS")), [None, None, None, None]);
    let instances = pids.map(|pid| variable(pid, "CUDA_VISIBLE_DEVICES").unwrap());
    assert_eq!(instances, ["MIG-a", "MIG-b", "MIG-a", "MIG-b"]);
    let parents = pids.map(parent);
    assert!(
        parents[0] == parents[1] && parents[2] == parents[3] && parents[1] != parents[2],
        "{parents:?}"
    );
    let ended = job.assert_completes().await;
    assert_eq!((ended.summary.workers.peak, ended.summary.workers.restarts), (4, 0));
    assert_eq!(ended.summary.memberships.len(), 1, "{:?}", ended.summary.memberships);
    assert!(!parents.into_iter().chain(pids).any(is_alive));
}

/// Its end is one failure, and the job allows one.
#[tokio::test]
async fn a_killed_worker_takes_its_pod_along_in_one_change_and_the_pod_is_replaced() {
    let mut job = Running::start(&SLOW).await;
    let status = job.wait_for_members(&[1, 2, 3, 4]).await;
    let (killed, other) = (pid(&status, 1), pid(&status, 2));
    let supervisor = parent(killed);
    send(killed, Signal::KILL);
    let status = job.wait_for_members(&[3, 4, 5, 6]).await;
    assert!(![killed, other, supervisor].into_iter().any(is_alive));
    assert!(parent(pid(&status, 5)) == parent(pid(&status, 6)));
    let ended = job.assert_completes().await;
    assert_eq!(ended.summary.workers.restarts, 1);
    let mut memberships = ended.summary.memberships.iter();
    let first = memberships.find(|m| !m.lost.is_empty() || !m.left.is_empty()).unwrap();
    let mut gone: Vec<u64> = first.lost.iter().chain(&first.left).map(|id| id.0).collect();
    gone.sort_unstable();
    assert_eq!((gone, first.world_size), (vec![1, 2], 2));
}

#[tokio::test]
async fn a_killed_supervisor_costs_its_pod_and_no_record() {
    let mut job = Running::start(&SLOW).await;
    let status = job.wait_for_members(&[1, 2, 3, 4]).await;
    let workers = [pid(&status, 3), pid(&status, 4)];
    send(parent(workers[0]), Signal::KILL);
    job.wait_for_members(&[1, 2, 5, 6]).await;
    assert!(!workers.into_iter().any(is_alive));
    job.assert_completes().await;
}

#[tokio::test]
async fn a_pod_that_gets_sigterm_leaves_in_one_change_without_a_loss() {
    let mut job = Running::start(&SLOW).await;
    let status = job.wait_for_members(&[1, 2, 3, 4]).await;
    send(parent(pid(&status, 1)), Signal::TERM);
    job.wait_for_members(&[3, 4, 5, 6]).await;
    let ended = job.assert_completes().await;
    let summary = &ended.summary;
    assert!(summary.memberships.iter().all(|m| m.lost.is_empty()), "{:?}", summary.memberships);
    let left = summary.memberships.iter().filter(|m| !m.left.is_empty());
    assert_eq!(left.map(|m| m.left.len()).collect::<Vec<_>>(), [2]);
}

#[tokio::test]
async fn a_job_is_scaled_by_whole_pods() {
    let mut job = Running::start(&SLOW).await;
    job.wait_for_members(&[1, 2, 3, 4]).await;
    job.interrupts.send(UserCommand::Scale(2.into())).await.unwrap();
    job.wait_for_members(&[1, 2]).await;
    job.interrupts.send(UserCommand::Scale(6.into())).await.unwrap();
    job.wait_for_members(&[1, 2, 5, 6, 7, 8]).await;
    let ended = job.assert_completes().await;
    assert!(ended.summary.memberships.iter().all(|m| m.lost.is_empty()));
    assert_eq!(ended.summary.workers.restarts, 0);
}

#[tokio::test]
async fn a_pod_that_fails_counts_once_and_too_many_fail_the_job() {
    let job = Running::start(&["--exit-at", "300"]).await;
    fs::write(&job.hurry, "").unwrap();
    let ended = job.ended.await.unwrap();
    let error = ended.summary.error.unwrap();
    assert_eq!(ended.outcome, Outcome::Failed, "{error}");
    assert!(error.contains("exited with code 9") && error.contains("giving up after"), "{error}");
    // The first pod that failed was replaced: its two workers were one failure.
    assert!(ended.summary.workers.restarts >= 1, "{error}");
}
