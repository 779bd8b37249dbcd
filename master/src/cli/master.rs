//! `elasticdl master`: runs the master of a job in its pod.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash as _, Hasher as _};
use std::net::Ipv6Addr;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use clap::Args;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::time::Instant;
use tracing::{info, warn};

use super::cluster::to_failure;
use super::{EXIT_FAILED, EXIT_FENCED, EXIT_OK, EXIT_TERMINATED, EXIT_USAGE, Failure, job_options};
use crate::event_loop::{JobResult, Master, MasterTerm, UserCommand};
use crate::job::{Outcome, PersistedJob, Snapshot, Status};
use crate::kube::anchor::{
    Anchor, AnchorEvent, AnchorWriter, Data, DesiredState, INCARNATION, MASTER, RECORD, STATUS,
    SUMMARY, WriteError, WriteThrottle,
};
use crate::kube::client::{Cluster, ClusterChoice};
use crate::kube::events::EventRecorder;
use crate::kube::file_list;
use crate::kube::leader_lease::{Holder, LeaderLease, LeaseGuard};
use crate::kube::objects::{
    CERTIFICATE_FILE, KEY_FILE, METRICS_PORT, PORT, TASK, TOKEN_FILE, Task, WORKER_POD,
};
use crate::kube::persisted_job::{self, PersistedJobWriter, PersistedWatch};
use crate::kube::pods::{self, PodFactory, Pods};
use crate::kube::submit;
use crate::kube::succession::{self, NextMaster};
use crate::listener::{Identity, ServerConfig};
use crate::metrics;
use crate::progress::Progress;
use crate::report;
use crate::tensorboard::{self, EventFile};
use crate::token::Token;

/// Arguments of `elasticdl master`.
#[derive(Args, Debug)]
pub struct MasterArgs {
    /// Name of the job; its anchor has the specification.
    #[arg(long, value_name = "NAME", value_parser = job_options::parse_job_name)]
    pub job_name: String,

    /// Pod of this master.
    #[arg(long, value_name = "NAME/UID")]
    pub pod: Holder,

    /// File with the job's token.
    #[arg(long, value_name = "FILE", default_value = TOKEN_FILE)]
    pub token_file: PathBuf,

    /// TLS certificate of the master, PEM.
    #[arg(long, value_name = "FILE", default_value = CERTIFICATE_FILE)]
    pub tls_cert: PathBuf,

    /// Private key of the certificate, PEM.
    #[arg(long, value_name = "FILE", default_value = KEY_FILE)]
    pub tls_key: PathBuf,
}

/// Runs the master of a job to the end of the job. Returns the exit code.
pub(super) fn master(args: &MasterArgs) -> Result<u8, Failure> {
    let logging =
        tracing_subscriber::fmt().with_ansi(false).with_writer(std::io::stderr).try_init();
    // A test in this process may have set another subscriber.
    drop(logging);
    super::new_runtime()?.block_on(run(args))
}

async fn run(args: &MasterArgs) -> Result<u8, Failure> {
    // The kernel delivers no unhandled signal to the first process of a container.
    let mut terminate = signal(SignalKind::terminate())
        .map_err(|e| Failure::failed(format!("can't handle signals: {e}")))?;
    let cluster = Cluster::connect(&ClusterChoice::default()).await.map_err(to_failure)?;
    let anchor = Anchor::new(&cluster, &args.job_name);
    let ConfigMap { metadata: meta, data, .. } = anchor.read().await.map_err(to_failure)?;
    // A master that waits for the Lease answers liveness probes too.
    let http = HttpServer::serve(&data.unwrap_or_default()).await?;
    let mut lease = tokio::select! {
        lease = LeaderLease::acquire(&cluster, &meta, &args.pod) => lease.map_err(to_failure)?,
        _ = terminate.recv() => return Ok(EXIT_TERMINATED),
    };
    let (send_persisted, persisted) = oneshot::channel();
    let give_up = Notify::new();
    let lead = Leader { args, cluster: &cluster, anchor: &anchor, give_up: &give_up };
    let leading = lead.run(lease.guard(), &http, send_persisted);
    tokio::pin!(leading);
    let code = tokio::select! {
        code = &mut leading => code,
        holder = lease.lost() => {
            // The workers belong to the other master now: none is deleted.
            warn!(holder, "another master holds the job's lease; this one ends");
            return Ok(EXIT_FENCED);
        }
        _ = terminate.recv() => {
            // The pod is deleted. Workers continue and reconnect to the job's next master.
            info!("SIGTERM: handing the job over to its next master");
            tokio::select! {
                code = &mut leading => code,
                () = hand_over(&cluster, &meta, &args.pod, persisted, &give_up) => {
                    Ok(EXIT_TERMINATED)
                }
            }
        }
    };
    lease.release().await;
    code
}

/// Parts that a master needs while it holds the Lease.
struct Leader<'a> {
    args: &'a MasterArgs,
    cluster: &'a Cluster,
    anchor: &'a Anchor,
    /// Notified when the job must end at once.
    give_up: &'a Notify,
}

impl Leader<'_> {
    /// Leads the job and returns the exit code. If the job has failed, this also fails the Job.
    async fn run(
        &self,
        lease_guard: LeaseGuard,
        http: &HttpServer,
        send_persisted: oneshot::Sender<PersistedWatch>,
    ) -> Result<u8, Failure> {
        // The Lease is held, so the last write of the previous master is visible.
        let submitted = Submitted::read(self.anchor.read().await.map_err(to_failure)?);
        let (code, led) = match submitted {
            Ok(Submitted { ended: Some(code), .. }) => {
                info!("the job has ended before; this master has nothing to do");
                (Ok(code), false)
            }
            Ok(submitted) => {
                (self.conduct(submitted, lease_guard, http, send_persisted).await, true)
            }
            Err(failure) => (Err(failure), true),
        };
        // An invalid specification stays invalid: it must not be retried either.
        let has_failed = match &code {
            Ok(code) => [EXIT_FAILED, EXIT_USAGE].contains(code),
            Err(failure) => failure.code == EXIT_USAGE,
        };
        if has_failed {
            succession::stop_replacements(self.cluster, &self.args.job_name, led).await;
        }
        code
    }

    async fn conduct(
        &self,
        submitted: Submitted,
        lease_guard: LeaseGuard,
        http: &HttpServer,
        send_persisted: oneshot::Sender<PersistedWatch>,
    ) -> Result<u8, Failure> {
        let Self { args, cluster, anchor, give_up } = *self;
        lead(args, (cluster, anchor), submitted, lease_guard, http, send_persisted, give_up).await
    }
}

/// Sets up the master and runs it.
async fn lead(
    args: &MasterArgs,
    (cluster, anchor): (&Cluster, &Anchor),
    mut submitted: Submitted,
    lease_guard: LeaseGuard,
    http: &HttpServer,
    send_persisted: oneshot::Sender<PersistedWatch>,
    give_up: &Notify,
) -> Result<u8, Failure> {
    let token = std::fs::read_to_string(&args.token_file).map_err(|e| {
        Failure::failed(format!("can't read the token {}: {e}", args.token_file.display()))
    })?;
    let token = Token::from_hex(&token)
        .ok_or_else(|| Failure::failed(format!("{} holds no token", args.token_file.display())))?;
    let identity = Identity::read(&args.tls_cert, &args.tls_key)
        .map_err(|e| Failure::failed(e.to_string()))?;
    let data = submitted.record.as_ref().and_then(PersistedJob::data);
    let seen = &submitted.anchor;
    if let (Some(record), Some(mark)) = (&mut submitted.record, data) {
        let uid = seen.metadata.uid.as_deref().unwrap_or_default();
        let keys = seen.data.as_ref().expect("it has been read");
        let list = file_list::load(anchor, (&args.job_name, uid), keys, mark).await;
        let list = list.map_err(|error| Failure::failed(error.to_string()))?;
        record.attach_file_list(list).map_err(Failure::failed)?;
    }
    let writer =
        AnchorWriter::begin(anchor, seen, submitted.incarnation).await.map_err(not_written)?;
    let name = Data::from([(MASTER.into(), args.pod.pod.clone())]);
    writer.write(&name).await.map_err(not_written)?;
    succession::raise_backoff_limit(cluster, &args.job_name).await;
    let address = submit::service_address(cluster, &args.job_name).await.map_err(to_failure)?;
    let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, PORT as u16))
        .await
        .map_err(|e| Failure::failed(format!("can't listen on port {PORT}: {e}")))?;
    let recorder = EventRecorder::start(cluster, &submitted.meta);
    let pod_factory = PodFactory {
        template: submitted.template,
        anchor: submitted.meta,
        master: address,
        min_workers: submitted.task.job.min_workers,
        priority_tiers: submitted.task.priority_tiers,
    };
    // A master creates no pod before it has persisted the job, so the first master finds none.
    let left = match submitted.incarnation {
        2.. => pods::list(cluster, pod_factory.anchor.uid.as_deref().unwrap_or_default())
            .await
            .map_err(to_failure)?,
        _ => Vec::new(),
    };
    if submitted.record.is_none() && !left.is_empty() {
        return Err(Failure::failed(format!(
            "the anchor's {RECORD} is missing, but the job has {} pods, so it is not a new job and \
             its progress is unknown; delete it and submit it again (with --resume-from, if it has \
             written checkpoints)",
            left.len()
        )));
    }
    let pods = Pods::new(cluster, pod_factory, lease_guard.clone(), recorder.clone());
    if submitted.record.as_ref().is_some_and(|record| record.step() > 0) {
        pods.has_trained();
    }
    let record_writer =
        PersistedJobWriter::new(writer.clone(), lease_guard.clone(), recorder, data);
    let _ = http.lead.set(lease_guard.clone());
    let term = MasterTerm { incarnation: submitted.incarnation, lease_guard };
    // The receiver may have been dropped.
    let _ = send_persisted.send(record_writer.watch());
    let server_config = ServerConfig { listener, token, identity: Some(identity) };
    let published = http.publish.subscribe();
    let progress = Progress::on_stderr().publishing(http.publish.clone());
    let events = match &submitted.task.tensorboard_dir {
        Some(folder) => {
            let events = EventFile::create(folder, &args.job_name).map_err(|e| {
                Failure::failed(format!(
                    "can't write events for TensorBoard to {}: {e}",
                    folder.display()
                ))
            })?;
            Some(tokio::spawn(tensorboard::follow(events, published.clone())))
        }
        None => None,
    };
    let master = match submitted.record {
        None => Master::with_pods(
            submitted.task.job,
            server_config,
            pods,
            record_writer,
            term,
            progress,
        ),
        Some(record) => {
            let left = (record, left);
            Master::resume_with_pods(
                left,
                submitted.age,
                server_config,
                pods,
                record_writer,
                term,
                progress,
            )
            .map_err(|reason| Failure::failed(format!("the job's record is invalid: {reason}")))?
        }
    };
    info!(job = args.job_name, incarnation = submitted.incarnation, "master listens");
    let code = conduct(master, (anchor, &writer), published, submitted.age, give_up).await;
    if let Some(events) = events {
        // Writes the last point.
        let _ = events.await;
    }
    code
}

/// HTTP server of a master, for metrics and probes, from its start on.
struct HttpServer {
    publish: watch::Sender<Option<Snapshot>>,
    /// Set when this master has become the leader.
    lead: Arc<OnceLock<LeaseGuard>>,
}

impl HttpServer {
    /// Serves on the port that the anchor names.
    async fn serve(anchor: &Data) -> Result<Self, Failure> {
        let task = anchor.get(TASK).and_then(|text| serde_json::from_str::<Task>(text).ok());
        let port = task.map_or(METRICS_PORT, |task| task.metrics_port);
        let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).await.map_err(|e| {
            Failure::failed(format!("can't listen on port {port} for metrics: {e}"))
        })?;
        let http = Self { publish: watch::Sender::new(None), lead: Arc::default() };
        let lead = Arc::clone(&http.lead);
        let ready: metrics::Ready = Arc::new(move || lead.get().is_some_and(LeaseGuard::is_valid));
        tokio::spawn(metrics::serve(listener, http.publish.subscribe(), ready));
        Ok(http)
    }
}

/// Waits until the job is persisted and the next master's pod is created, within a time limit. If
/// there will be no next master, ends the job and completes after that.
async fn hand_over(
    cluster: &Cluster,
    meta: &ObjectMeta,
    pod: &Holder,
    persisted: oneshot::Receiver<PersistedWatch>,
    give_up: &Notify,
) {
    let persist = async {
        if let Ok(mut persisted) = persisted.await {
            persisted.flush(HAND_OVER_TIMEOUT).await;
        }
    };
    let next =
        tokio::time::timeout(HAND_OVER_TIMEOUT, succession::ensure_successor(cluster, meta, pod));
    match tokio::join!(persist, next).1 {
        Ok(Ok(NextMaster::Expected)) => {}
        Ok(Ok(NextMaster::Unwanted(why))) => {
            warn!(why, "there will be no other master: the job ends");
            give_up.notify_one();
            tokio::time::sleep(GIVE_UP_TIMEOUT).await;
        }
        Ok(Err(error)) => warn!(%error, "the Job controller has to create the next master"),
        Err(_) => warn!(
            "the API server does not answer: the Job controller has to create the next master"
        ),
    }
}

/// Runs `master`: publishes its status to the anchor, and passes the requests of the anchor to it.
async fn conduct(
    master: Master,
    (anchor, writer): (&Anchor, &AnchorWriter),
    mut published: watch::Receiver<Option<Snapshot>>,
    age: Duration,
    give_up: &Notify,
) -> Result<u8, Failure> {
    let start = Instant::now();
    let (commands, received) = mpsc::channel(COMMANDS_MAX);
    let mut desired = DesiredState::default();
    let mut followed = anchor.watch();
    let times = RefCell::default();
    let publishing = publish(writer, published.clone(), age, &times);
    tokio::pin!(publishing);
    let run = master.run(received);
    tokio::pin!(run);
    let ended = loop {
        tokio::select! {
            ended = &mut run => break ended,
            () = &mut publishing => {}
            () = give_up.notified() => {
                let _ = commands.send(UserCommand::Kill).await;
            }
            event = followed.next() => match event {
                AnchorEvent::Forbidden(message) => {
                    warn!(message, "the anchor can't be watched: scale and stop have no effect");
                }
                AnchorEvent::Deleted => {
                    info!("the job has been deleted");
                    return Ok(EXIT_TERMINATED);
                }
                AnchorEvent::Data(data) => {
                    let now = DesiredState::read(&data);
                    for command in changes(desired, now) {
                        // The master takes them faster than users send them.
                        let _ = commands.send(command).await;
                    }
                    desired = now;
                }
            },
        }
    };
    drop(followed);
    let status = published.borrow_and_update().as_ref().map(|snapshot| snapshot.status.clone());
    let mut times = times.take();
    times.note(age + start.elapsed(), status.as_ref().map_or(0, |status| status.events_emitted));
    write_end(writer, &ended, status, &times).await?;
    Ok(code_of(ended.outcome))
}

/// Commands to the master that follow from a change of the desired state.
fn changes(before: DesiredState, now: DesiredState) -> Vec<UserCommand> {
    let scale =
        now.num_workers.filter(|_| now.num_workers != before.num_workers).map(UserCommand::Scale);
    let stop = (now.stop && !before.stop).then_some(UserCommand::Stop);
    let asked = now.checkpoint.is_some() && now.checkpoint != before.checkpoint;
    let checkpoint = asked.then_some(UserCommand::Checkpoint);
    scale.into_iter().chain(checkpoint).chain(stop).collect()
}

/// Writes the status of a job of this age to the anchor at throttled intervals, until the job ends.
async fn publish(
    writer: &AnchorWriter,
    mut published: watch::Receiver<Option<Snapshot>>,
    age: Duration,
    times: &RefCell<EventTimes>,
) {
    let mut pace = WriteThrottle::default();
    let start = Instant::now();
    loop {
        let snapshot = published.borrow_and_update().clone();
        let Some(Snapshot { status, .. }) = snapshot else {
            if published.changed().await.is_err() {
                return std::future::pending().await;
            }
            continue;
        };
        times.borrow_mut().note(age + start.elapsed(), status.events_emitted);
        let news = status_digest(&status);
        let due = pace.due(Instant::now(), news);
        if due > Instant::now() {
            tokio::select! {
                () = tokio::time::sleep_until(due) => {}
                changed = published.changed() => if changed.is_err() {
                    return std::future::pending().await;
                },
            }
            continue;
        }
        let text = status_json(status, &times.borrow());
        if let Err(error) = writer.write(&Data::from([(STATUS.into(), text)])).await {
            // Training does not depend on it.
            warn!(%error, "the status was not written to the anchor");
        }
        pace.on_written(Instant::now(), news);
    }
}

fn status_json(mut status: Status, times: &EventTimes) -> String {
    status.events_at_s = times.of_last(status.events.len());
    status.into_json_within(STATUS_BYTES_MAX)
}

/// Age of the job at each of its newest event lines.
#[derive(Debug, Default)]
struct EventTimes {
    emitted: u64,
    /// Ages at the newest lines.
    at: VecDeque<Duration>,
}

impl EventTimes {
    /// Records that at this age of the job, `emitted` lines had been emitted.
    fn note(&mut self, age: Duration, emitted: u64) {
        let new = emitted.saturating_sub(self.emitted).min(LINES_MAX as u64);
        self.emitted = emitted;
        self.at.extend((0..new).map(|_| age));
        self.at.drain(..self.at.len().saturating_sub(LINES_MAX));
    }

    /// Ages at the last `count` lines, in seconds.
    fn of_last(&self, count: usize) -> Vec<f64> {
        let skipped = self.at.len().saturating_sub(count);
        self.at
            .iter()
            .skip(skipped)
            .map(|at| (at.as_secs_f64() * 1000.0).round() / 1000.0)
            .collect()
    }
}

/// Digest of the parts of a status whose change is written at once.
fn status_digest(status: &Status) -> u64 {
    let mut hasher = DefaultHasher::new();
    (&status.state, status.generation.0, status.workers_desired, &status.events).hash(&mut hasher);
    // A command waits for the checkpoint that it has requested.
    status
        .checkpoints
        .as_ref()
        .map(|known| (&known.error, known.newest.is_some()))
        .hash(&mut hasher);
    for worker in &status.workers {
        (worker.worker.0, worker.rank, &worker.state).hash(&mut hasher);
    }
    hasher.finish()
}

async fn write_end(
    writer: &AnchorWriter,
    ended: &JobResult,
    status: Option<Status>,
    times: &EventTimes,
) -> Result<(), Failure> {
    let mut summary = ended.summary.clone();
    // An anchor holds 1 MiB. The newest changes are retained.
    let surplus = summary.memberships.len().saturating_sub(MEMBERSHIPS_MAX);
    summary.memberships.drain(..surplus);
    let text = report::into_json_within(summary, SUMMARY_BYTES_MAX);
    // No master resumes a job that has ended.
    let mut data = Data::from([(SUMMARY.into(), text), (RECORD.into(), String::new())]);
    data.extend(status.map(|status| (STATUS.into(), status_json(status, times))));
    writer.write_within(&data, END_TIMEOUT).await.map_err(not_written)
}

fn not_written(error: WriteError) -> Failure {
    match error {
        WriteError::Retryable(error) => to_failure(error),
        error => Failure::failed(error.to_string()),
    }
}

/// Contents of the anchor.
struct Submitted {
    /// The anchor as it was read.
    anchor: ConfigMap,
    task: Task,
    template: Pod,
    meta: ObjectMeta,
    /// Incarnation of this master.
    incarnation: u64,
    /// The persisted job of the previous master.
    record: Option<PersistedJob>,
    /// Age of the job.
    age: Duration,
    /// Exit code of the master that has ended the job.
    ended: Option<u8>,
}

impl Submitted {
    fn read(anchor: ConfigMap) -> Result<Self, Failure> {
        let seen = anchor.clone();
        let data = anchor.data.unwrap_or_default();
        let malformed = |key: &str, error: &dyn std::fmt::Display| {
            Failure::usage(format!(
                "the anchor's {key} can't be read: {error}; submit the job again"
            ))
        };
        let need = |key: &str| data.get(key).ok_or_else(|| malformed(key, &"it is missing"));
        let task: Task = serde_json::from_str(need(TASK)?).map_err(|e| malformed(TASK, &e))?;
        task.job.check().map_err(|e| malformed(TASK, &e))?;
        let template =
            serde_json::from_str(need(WORKER_POD)?).map_err(|e| malformed(WORKER_POD, &e))?;
        let before: u64 = match data.get(INCARNATION) {
            Some(text) => text.parse().map_err(|e| malformed(INCARNATION, &e))?,
            None => 0,
        };
        let ended = data.get(SUMMARY).map(|text| {
            let summary: Option<serde_json::Value> = serde_json::from_str(text).ok();
            summary.as_ref().and_then(|s| s["state"].as_str()).map_or(EXIT_FAILED, code_of_state)
        });
        // Checked before any write: an unreadable record is left for a master that can read it.
        let unreadable = |error| {
            Failure::failed(format!(
                "the anchor's {RECORD} can't be read: {error}; nothing was changed, and the \
                 workers continue for up to --master-timeout"
            ))
        };
        let record = data.get(RECORD).filter(|_| ended.is_none());
        let record =
            record.map(|text| persisted_job::read(text).map_err(unreadable)).transpose()?;
        let incarnation = before.saturating_add(1);
        let meta = anchor.metadata;
        let born = meta.creation_timestamp.as_ref().map(|t| SystemTime::from(t.0));
        // The clock of the API server may be ahead.
        let age = born.and_then(|born| born.elapsed().ok()).unwrap_or_default();
        Ok(Self { anchor: seen, task, template, meta, incarnation, record, age, ended })
    }
}

/// Exit code for the state of an ended job.
pub(super) fn code_of_state(state: &str) -> u8 {
    match state {
        "completed" => EXIT_OK,
        "refused" => EXIT_USAGE,
        // A job that the user has stopped is complete for the cluster.
        "stopped" => EXIT_OK,
        _ => EXIT_FAILED,
    }
}

fn code_of(outcome: Outcome) -> u8 {
    match outcome {
        Outcome::Completed | Outcome::Stopped => EXIT_OK,
        Outcome::Failed => EXIT_FAILED,
        Outcome::InvalidInput => EXIT_USAGE,
    }
}

const END_TIMEOUT: Duration = Duration::from_secs(60);
/// With [`HAND_OVER_TIMEOUT`] less than the grace period of the master's pod.
const GIVE_UP_TIMEOUT: Duration = Duration::from_secs(6);
const HAND_OVER_TIMEOUT: Duration = Duration::from_secs(3);
const COMMANDS_MAX: usize = 4;
/// Number of event lines in a status.
const LINES_MAX: usize = 20;
const MEMBERSHIPS_MAX: usize = 200;
/// Shares of the 1 MiB of an anchor.
const STATUS_BYTES_MAX: usize = 224 << 10;
const SUMMARY_BYTES_MAX: usize = 256 << 10;

#[cfg(test)]
mod api_budget;
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_request_is_passed_on_once() {
        let none = DesiredState::default();
        let four = DesiredState { num_workers: Some(4), ..none };
        let stop = DesiredState { stop: true, ..four };
        assert_eq!(changes(none, four), [UserCommand::Scale(4)]);
        assert_eq!(changes(four, four), []);
        assert_eq!(changes(four, stop), [UserCommand::Stop]);
        assert_eq!(changes(none, stop), [UserCommand::Scale(4), UserCommand::Stop]);
        assert_eq!(changes(stop, none), []);
        let asked = DesiredState { checkpoint: Some(7), ..four };
        assert_eq!(changes(four, asked), [UserCommand::Checkpoint]);
        assert_eq!(changes(asked, asked), []);
    }
}
