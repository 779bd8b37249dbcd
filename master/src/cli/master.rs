//! `elasticdl master`: the master of a job in a cluster, in its pod.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash as _, Hasher as _};
use std::net::Ipv6Addr;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use clap::Args;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use tracing::{info, warn};

use super::cluster::to_failure;
use super::view::StatusJson;
use super::{EXIT_FAILED, EXIT_FENCED, EXIT_OK, EXIT_TERMINATED, EXIT_USAGE, Failure, plan};
use crate::entrance::{Entrance, Identity};
use crate::job::{JobRecord, Outcome, Snapshot, Status};
use crate::kube::anchor::{Anchor, Data, INCARNATION, Pace, RECORD, STATUS, SUMMARY, Sight, Wishes};
use crate::kube::client::{Choice, Cluster};
use crate::kube::events::Recorder;
use crate::kube::kept::{self, Keeper, Kept};
use crate::kube::lease::{Holder, Lease, Warrant};
use crate::kube::objects::{CERTIFICATE_FILE, KEY_FILE, PORT, TASK, TOKEN_FILE, Task, WORKER_POD};
use crate::kube::pods::{self, Mould, Pods};
use crate::kube::submit;
use crate::metrics;
use crate::progress::Progress;
use crate::report;
use crate::run::{Ended, Interrupt, Master, Office};
use crate::service;
use crate::tensorboard::{self, EventFile};
use crate::token::Token;

/// What `elasticdl master` is told.
#[derive(Args, Debug)]
pub struct MasterArgs {
    /// The job's name; its anchor says the rest.
    #[arg(long, value_name = "NAME", value_parser = plan::parse_job_name)]
    pub job_name: String,

    /// This master's pod.
    #[arg(long, value_name = "NAME/UID")]
    pub pod: Holder,

    /// Where the job's secret is.
    #[arg(long, value_name = "FILE", default_value = TOKEN_FILE)]
    pub token_file: PathBuf,

    /// The certificate that workers are shown, PEM.
    #[arg(long, value_name = "FILE", default_value = CERTIFICATE_FILE)]
    pub tls_cert: PathBuf,

    /// The certificate's key, PEM.
    #[arg(long, value_name = "FILE", default_value = KEY_FILE)]
    pub tls_key: PathBuf,
}

/// Runs the master of a job to the job's end; the exit code.
pub(super) fn master(args: &MasterArgs) -> Result<u8, Failure> {
    let logging = tracing_subscriber::fmt().with_ansi(false).with_writer(std::io::stderr).try_init();
    // A test in this process may have set another subscriber.
    drop(logging);
    super::new_runtime()?.block_on(run(args))
}

async fn run(args: &MasterArgs) -> Result<u8, Failure> {
    // The first process of a container dies of no signal that it does not handle.
    let mut terminate =
        signal(SignalKind::terminate()).map_err(|e| Failure::failed(format!("can't handle signals: {e}")))?;
    let cluster = Cluster::connect(&Choice::default()).await.map_err(to_failure)?;
    let anchor = Anchor::new(&cluster, &args.job_name);
    let meta = anchor.read().await.map_err(to_failure)?.metadata;
    let mut lease = tokio::select! {
        lease = Lease::acquire(&cluster, &meta, &args.pod) => lease.map_err(to_failure)?,
        _ = terminate.recv() => return Ok(EXIT_TERMINATED),
    };
    let (tell_keeper, keeper) = oneshot::channel();
    let leading = lead(args, &cluster, &anchor, lease.warrant(), tell_keeper);
    tokio::pin!(leading);
    let code = tokio::select! {
        code = &mut leading => code,
        holder = lease.lost() => {
            // Its workers are another's now: none is deleted.
            warn!(holder, "another master holds the job's lease; this one ends");
            return Ok(EXIT_FENCED);
        }
        _ = terminate.recv() => {
            // The pod goes. Workers go on, and look for the job's next master.
            info!("told to end: the job is left to its next master");
            tokio::select! {
                code = &mut leading => code,
                () = hand_over(keeper) => Ok(EXIT_TERMINATED),
            }
        }
    };
    lease.release().await;
    code
}

/// Does a master's work, while the lease is held.
async fn lead(
    args: &MasterArgs,
    cluster: &Cluster,
    anchor: &Anchor,
    warrant: Warrant,
    tell_keeper: oneshot::Sender<Kept>,
) -> Result<u8, Failure> {
    // What the master before this one has written last is there by now.
    let submitted = Submitted::read(anchor.read().await.map_err(to_failure)?)?;
    if let Some(code) = submitted.ended {
        info!("the job has ended before; this master has nothing to do");
        return Ok(code);
    }
    let token = std::fs::read_to_string(&args.token_file)
        .map_err(|e| Failure::failed(format!("can't read the token {}: {e}", args.token_file.display())))?;
    let token = Token::from_hex(&token)
        .ok_or_else(|| Failure::failed(format!("{} holds no token", args.token_file.display())))?;
    let identity =
        Identity::read(&args.tls_cert, &args.tls_key).map_err(|e| Failure::failed(e.to_string()))?;
    let incarnation = Data::from([(INCARNATION.into(), submitted.incarnation.to_string())]);
    anchor.write(&incarnation).await.map_err(to_failure)?;
    let address = submit::service_address(cluster, &args.job_name).await.map_err(to_failure)?;
    let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, PORT as u16))
        .await
        .map_err(|e| Failure::failed(format!("can't listen on port {PORT}: {e}")))?;
    let metrics_port = submitted.task.metrics_port;
    let scraped = TcpListener::bind((Ipv6Addr::UNSPECIFIED, metrics_port))
        .await
        .map_err(|e| Failure::failed(format!("can't listen on port {metrics_port} for metrics: {e}")))?;
    let recorder = Recorder::start(cluster, &submitted.meta);
    let mould = Mould {
        template: submitted.template,
        anchor: submitted.meta,
        master: address,
        min_workers: submitted.task.job.min_workers,
        ladder: submitted.task.ladder,
    };
    // Nothing is made before there is a record of it, and the first master finds none.
    let left = match submitted.incarnation {
        2.. => {
            pods::list(cluster, mould.anchor.uid.as_deref().unwrap_or_default()).await.map_err(to_failure)?
        }
        _ => Vec::new(),
    };
    if submitted.record.is_none() && !left.is_empty() {
        return Err(Failure::failed(format!(
            "the anchor's {RECORD} is gone, and {} pods of the job are there: this is no new job, and nobody knows how far it \
             was; delete it, and submit it again (with --resume-from, if it has kept checkpoints)",
            left.len()
        )));
    }
    let pods = Pods::new(cluster, mould, warrant.clone(), recorder);
    let keeper = Keeper::new(anchor.clone(), warrant.clone());
    let office = Office { incarnation: submitted.incarnation, warrant };
    // Who waits for it may have gone.
    let _ = tell_keeper.send(keeper.watch());
    let entrance = Entrance { listener, token, identity: Some(identity) };
    let (publish, published) = watch::channel(None);
    let progress = Progress::on_stderr().published(publish);
    tokio::spawn(metrics::serve(scraped, published.clone()));
    let events = match &submitted.task.tensorboard_dir {
        Some(folder) => {
            let events = EventFile::create(folder, &args.job_name).map_err(|e| {
                Failure::failed(format!("can't write events for TensorBoard to {}: {e}", folder.display()))
            })?;
            Some(tokio::spawn(tensorboard::follow(events, published.clone())))
        }
        None => None,
    };
    let master = match submitted.record {
        None => Master::with_pods(submitted.task.job, entrance, pods, keeper, office, progress),
        Some(record) => {
            let left = (record, left);
            Master::resume_with_pods(left, submitted.age, entrance, pods, keeper, office, progress)
                .map_err(|reason| Failure::failed(format!("the job's record can't be true: {reason}")))?
        }
    };
    info!(job = args.job_name, incarnation = submitted.incarnation, "master listens");
    let code = conduct(master, anchor, published).await;
    if let Some(events) = events {
        // The last point.
        let _ = events.await;
    }
    code
}

/// Waits until what the next master needs is kept, for as long as that usually takes.
async fn hand_over(keeper: oneshot::Receiver<Kept>) {
    if let Ok(mut kept) = keeper.await {
        kept.flush(HAND_OVER_TIMEOUT).await;
    }
}

/// Runs `master`, telling the anchor what it does, and it what the anchor asks for.
async fn conduct(
    master: Master,
    anchor: &Anchor,
    mut published: watch::Receiver<Option<Snapshot>>,
) -> Result<u8, Failure> {
    let (interrupts, interrupted) = mpsc::channel(INTERRUPTS_MAX);
    let mut wishes = Wishes::default();
    let mut followed = anchor.follow();
    let publishing = publish(anchor, published.clone());
    tokio::pin!(publishing);
    let run = master.run(interrupted);
    tokio::pin!(run);
    let ended = loop {
        tokio::select! {
            ended = &mut run => break ended,
            () = &mut publishing => {}
            sight = followed.next() => match sight {
                Sight::Forbidden(message) => warn!(message, "the anchor can't be watched: scale and stop have no effect"),
                Sight::Gone => {
                    info!("the job has been deleted");
                    return Ok(EXIT_TERMINATED);
                }
                Sight::Holds(data) => {
                    let now = Wishes::read(&data);
                    for interrupt in changes(wishes, now) {
                        // The master takes them faster than anybody asks.
                        let _ = interrupts.send(interrupt).await;
                    }
                    wishes = now;
                }
            },
        }
    };
    drop(followed);
    let status = published.borrow_and_update().as_ref().map(|snapshot| snapshot.status.clone());
    write_end(anchor, &ended, status).await?;
    Ok(code_of(ended.outcome))
}

/// What the master is to be told when the wishes change.
fn changes(before: Wishes, now: Wishes) -> Vec<Interrupt> {
    let scale = now.num_workers.filter(|_| now.num_workers != before.num_workers).map(Interrupt::Scale);
    let stop = (now.stop && !before.stop).then_some(Interrupt::Stop);
    let asked = now.checkpoint.is_some() && now.checkpoint != before.checkpoint;
    let checkpoint = asked.then_some(Interrupt::Checkpoint);
    scale.into_iter().chain(checkpoint).chain(stop).collect()
}

/// Writes the status to the anchor whenever it is time; ends with the job.
async fn publish(anchor: &Anchor, mut published: watch::Receiver<Option<Snapshot>>) {
    let mut pace = Pace::default();
    loop {
        let snapshot = published.borrow_and_update().clone();
        let Some(Snapshot { status, .. }) = snapshot else {
            if published.changed().await.is_err() {
                return std::future::pending().await;
            }
            continue;
        };
        let news = news_of(&status);
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
        let text = status_json(status);
        if let Err(error) = anchor.write(&Data::from([(STATUS.into(), text)])).await {
            // Training does not wait for it.
            warn!(%error, "the status was not written to the anchor");
        }
        pace.wrote(Instant::now(), news);
    }
}

fn status_json(status: Status) -> String {
    StatusJson::from(service::status_reply(status)).to_pretty_json()
}

/// A digest of what is worth a write of its own.
fn news_of(status: &Status) -> u64 {
    let mut hasher = DefaultHasher::new();
    (status.state, status.generation.0, status.workers_wanted, &status.events).hash(&mut hasher);
    // One that is asked for is waited for.
    status.checkpoints.as_ref().map(|known| (&known.error, known.newest.is_some())).hash(&mut hasher);
    for worker in &status.workers {
        (worker.worker.0, worker.rank, worker.state).hash(&mut hasher);
    }
    hasher.finish()
}

async fn write_end(anchor: &Anchor, ended: &Ended, status: Option<Status>) -> Result<(), Failure> {
    let mut summary = ended.summary.clone();
    // An anchor holds a megabyte. The last changes tell most.
    let surplus = summary.memberships.len().saturating_sub(MEMBERSHIPS_MAX);
    summary.memberships.drain(..surplus);
    let text = String::from_utf8(report::to_json(&summary)).expect("JSON is UTF-8");
    let mut data = Data::from([(SUMMARY.into(), text)]);
    data.extend(status.map(|status| (STATUS.into(), status_json(status))));
    anchor.write_within(&data, END_TIMEOUT).await.map_err(to_failure)
}

/// What the anchor says.
struct Submitted {
    task: Task,
    template: Pod,
    meta: k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta,
    /// This master's.
    incarnation: u64,
    /// How far the master before this one was.
    record: Option<JobRecord>,
    /// Of the job.
    age: Duration,
    /// The exit code of the master that has ended the job.
    ended: Option<u8>,
}

impl Submitted {
    fn read(anchor: ConfigMap) -> Result<Self, Failure> {
        let data = anchor.data.unwrap_or_default();
        let malformed = |key: &str, error: &dyn std::fmt::Display| {
            Failure::usage(format!("the anchor's {key} can't be read: {error}; submit the job again"))
        };
        let need = |key: &str| data.get(key).ok_or_else(|| malformed(key, &"it is missing"));
        let task: Task = serde_json::from_str(need(TASK)?).map_err(|e| malformed(TASK, &e))?;
        task.job.check().map_err(|e| malformed(TASK, &e))?;
        let template = serde_json::from_str(need(WORKER_POD)?).map_err(|e| malformed(WORKER_POD, &e))?;
        let before: u64 = match data.get(INCARNATION) {
            Some(text) => text.parse().map_err(|e| malformed(INCARNATION, &e))?,
            None => 0,
        };
        let ended = data.get(SUMMARY).map(|text| {
            let summary: Option<serde_json::Value> = serde_json::from_str(text).ok();
            summary.as_ref().and_then(|s| s["state"].as_str()).map_or(EXIT_FAILED, code_of_state)
        });
        let record =
            data.get(RECORD).map(|text| kept::read(text).map_err(|e| malformed(RECORD, &e))).transpose()?;
        let incarnation = before.saturating_add(1);
        let meta = anchor.metadata;
        let born = meta.creation_timestamp.as_ref().map(|t| SystemTime::from(t.0));
        // The servers' clocks may be ahead of this one's.
        let age = born.and_then(|born| born.elapsed().ok()).unwrap_or_default();
        Ok(Self { task, template, meta, incarnation, record, age, ended })
    }
}

/// The exit code that an ended job's state means.
pub(super) fn code_of_state(state: &str) -> u8 {
    match state {
        "completed" => EXIT_OK,
        "refused" => EXIT_USAGE,
        // The user stopped it: for the cluster this job is complete.
        "stopped" => EXIT_OK,
        _ => EXIT_FAILED,
    }
}

fn code_of(outcome: Outcome) -> u8 {
    match outcome {
        Outcome::Completed | Outcome::Stopped => EXIT_OK,
        Outcome::Failed => EXIT_FAILED,
        Outcome::Refused => EXIT_USAGE,
    }
}

const END_TIMEOUT: Duration = Duration::from_secs(60);
const HAND_OVER_TIMEOUT: Duration = Duration::from_secs(3);
const INTERRUPTS_MAX: usize = 4;
const MEMBERSHIPS_MAX: usize = 200;

#[cfg(test)]
mod rest;
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wish_is_told_once() {
        let none = Wishes::default();
        let four = Wishes { num_workers: Some(4), ..none };
        let stop = Wishes { stop: true, ..four };
        assert_eq!(changes(none, four), [Interrupt::Scale(4)]);
        assert_eq!(changes(four, four), []);
        assert_eq!(changes(four, stop), [Interrupt::Stop]);
        assert_eq!(changes(none, stop), [Interrupt::Scale(4), Interrupt::Stop]);
        assert_eq!(changes(stop, none), []);
        let asked = Wishes { checkpoint: Some(7), ..four };
        assert_eq!(changes(four, asked), [Interrupt::Checkpoint]);
        assert_eq!(changes(asked, asked), []);
    }
}
