//! The master of a job while it holds the leader Lease.

use std::cell::RefCell;
use std::net::SocketAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use k8s_openapi::api::core::v1::Pod;
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::{info, warn};

use super::desired::KnownRequests;
use super::http::{HttpServer, listen};
use super::news::News;
use super::publish::{not_written, publish, write_end};
use super::submitted::Submitted;
use super::{ClusterMaster, damage};
use crate::dashboard::{History, JobOptions};
use crate::event_loop::{Master, MasterParts, MasterTerm, UserCommand, restore_with_pods};
use crate::exit::{
    EXIT_DAMAGED, EXIT_FAILED, EXIT_TERMINATED, EXIT_USAGE, Failure, cannot, code_of_summary,
};
use crate::exporters::Exporters;
use crate::job::{Job, PersistedJob, Snapshot};
use crate::job_store::JobStore;
use crate::kube::anchor::{Anchor, AnchorEvent, AnchorWriter, Data, MASTER, RECORD};
use crate::kube::client::{Cluster, ClusterError};
use crate::kube::events::EventRecorder;
use crate::kube::leader_lease::LeaseGuard;
use crate::kube::master_service::MasterService;
use crate::kube::objects::{POD_IP, PORT};
use crate::kube::persisted_job::{PersistedJobWriter, PersistedWatch};
use crate::kube::pods::{self, PodFactory, Pods};
use crate::kube::requests::UserRequest;
use crate::kube::state_labels::StateLabels;
use crate::kube::{inspection, master_address, succession};
use crate::listener::{Identity, ServerConfig};
use crate::mlflow;
use crate::progress::Progress;
use crate::token::Token;
use crate::worker_backend::WorkerBackend;

/// Parts that a master needs while it holds the Lease.
pub(super) struct Leader<'a> {
    pub(super) args: &'a ClusterMaster,
    pub(super) cluster: &'a Cluster,
    pub(super) anchor: &'a Anchor,
    pub(super) http: &'a HttpServer,
    /// Notified when the job must end at once.
    pub(super) give_up: &'a Notify,
}

impl Leader<'_> {
    /// Leads the job and returns the exit code. If the job has failed, this also fails the Job.
    pub(super) async fn run(
        &self,
        lease_guard: LeaseGuard,
        transitions: u64,
        progress: Progress,
        send_persisted: oneshot::Sender<PersistedWatch>,
    ) -> Result<u8, Failure> {
        // The Lease is held, so the last write of the previous master is visible.
        let (anchor, now) = (self.anchor.read().await?, self.cluster.now().await);
        let submitted = Submitted::read(anchor, transitions, now);
        let (code, led) = match submitted {
            Ok(Submitted { ended: Some(code), .. }) => {
                info!("the job has ended before; this master has nothing to do");
                (Ok(code), false)
            }
            Ok(submitted) => {
                (self.lead(submitted, lease_guard, progress, send_persisted).await, true)
            }
            Err(failure) => (Err(failure), true),
        };
        // An invalid specification stays invalid: it must not be retried either.
        let has_failed = match &code {
            Ok(code) => [EXIT_FAILED, EXIT_USAGE].contains(code),
            Err(failure) => failure.code == EXIT_USAGE,
        };
        if has_failed {
            succession::stop_replacements(self.cluster, &self.args.master_name(), led).await;
        }
        if let Err(Failure { code: EXIT_DAMAGED, text }) = &code {
            damage::count(self.cluster, self.anchor, &self.args.job_name, text).await;
        }
        code
    }

    /// Sets up the master and runs it.
    async fn lead(
        &self,
        mut submitted: Submitted,
        lease_guard: LeaseGuard,
        progress: Progress,
        send_persisted: oneshot::Sender<PersistedWatch>,
    ) -> Result<u8, Failure> {
        let (args, http, incarnation) = (self.args, self.http, submitted.incarnation);
        let (token, identity) = self.credentials()?;
        let stored = submitted.load_file_list(self.anchor, &args.job_name).await?;
        let writer = self.begin(&submitted).await?;
        let recorder = EventRecorder::start(self.cluster, &submitted.meta);
        let service =
            MasterService::new(self.cluster, &submitted.meta, &submitted.task, recorder.clone());
        let address = service.address().await.map_err(|error| match error {
            ClusterError::Refused { .. } => Failure::damaged(error.to_string()),
            error => error.into(),
        })?;
        let listener =
            listen(PORT as u16).await.map_err(cannot(&format!("listen on port {PORT}")))?;
        let mut tasks = self.write_address(&submitted, &lease_guard);
        tasks.spawn(service.keep(lease_guard.clone()));
        let left = self.remaining_pods(&submitted).await?;
        damage::forget(submitted.anchor.data.as_ref(), &writer).await;
        let Submitted { task, template, table_server, meta, record, age, mut history, .. } =
            submitted;
        let args_of_program = args_of(&template);
        let options = mlflow::parameters(&task.job, args_of_program.iter().map(String::as_str));
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let began = now.saturating_sub(age);
        history.of_job(JobOptions { began, options: options.clone() });
        let (exporters, tracked) = Exporters::start(
            &args.job_name,
            task.tensorboard_dir.as_deref(),
            options,
            |name| std::env::var(name).ok(),
            &http.published,
        )?;
        let pod_factory = PodFactory {
            template,
            table_servers: table_server.map(|pod| (task.job.server_slots().start, pod)),
            anchor: meta,
            master: address,
            min_workers: record.as_ref().map_or(&task.job, PersistedJob::spec).min_workers,
            priority_tiers: task.priority_tiers,
            gang: task.gang,
        };
        let pods = Pods::new(self.cluster, pod_factory, lease_guard.clone(), recorder.clone());
        if record.as_ref().is_some_and(|record| record.step() > 0) {
            pods.has_trained();
        }
        let record_writer =
            PersistedJobWriter::new(writer.clone(), lease_guard.clone(), recorder.clone(), stored);
        let _ = http.lead.set(lease_guard.clone());
        let term = MasterTerm { incarnation, lease_guard };
        // The receiver may have been dropped.
        let _ = send_persisted.send(record_writer.watch());
        let config = ServerConfig { listener, token, identity: Some(identity) };
        let job = match record {
            None => Ok((Job::new(task.job), Duration::ZERO)),
            Some(record) => restore_with_pods(record, age, left, &pods).map(|job| (job, age)),
        };
        let master = job.and_then(|(job, age)| {
            Master::assemble(MasterParts {
                job,
                age,
                server_config: config,
                backend: WorkerBackend::Pods(pods),
                job_store: JobStore::Anchor(record_writer),
                term: Some(term),
                progress,
                tracked: Some(tracked),
            })
        });
        let master = master.map_err(cannot("start the master"))?;
        info!(job = args.job_name, incarnation, "master listens");
        tasks.spawn(tell(http.published.clone(), recorder.clone(), incarnation > 1));
        let mut labels = StateLabels::of_job(self.cluster, &args.job_name).await;
        let code = tokio::select! {
            code = self.conduct(master, &writer, &recorder, age, history) => code,
            never = labels.keep(http.published.clone()) => match never {},
        };
        let last = http.published.borrow().clone();
        if let Some(Snapshot { status, .. }) = last {
            labels.write(&status).await;
        }
        // What is missing at the tracking server is in this master's log.
        let _ = exporters.finish(None).await;
        code
    }

    /// Writes the address of this pod for the workers, in a task that ends with the returned set.
    fn write_address(&self, submitted: &Submitted, guard: &LeaseGuard) -> JoinSet<()> {
        let mut tasks = JoinSet::new();
        if let Some(address) = own_address(|name| std::env::var(name).ok()) {
            let (cluster, meta) = (self.cluster.clone(), submitted.meta.clone());
            let guard = guard.clone();
            tasks
                .spawn(async move { master_address::write(&cluster, &meta, address, guard).await });
        }
        tasks
    }

    /// Reads the token and the TLS identity from their files.
    fn credentials(&self) -> Result<(Token, Identity), Failure> {
        let args = self.args;
        let path = args.token_file.display();
        let token = std::fs::read_to_string(&args.token_file)
            .map_err(cannot(&format!("read the token {path}")))?;
        let token = Token::from_hex(&token)
            .ok_or_else(|| Failure::failed(format!("{path} holds no token")))?;
        let identity = Identity::read(&args.tls_cert, &args.tls_key)
            .map_err(|e| Failure::failed(e.to_string()))?;
        Ok((token, identity))
    }

    /// Begins this master's incarnation, after which no former master can write to the anchor.
    async fn begin(&self, submitted: &Submitted) -> Result<AnchorWriter, Failure> {
        let writer = AnchorWriter::begin(self.anchor, &submitted.anchor, submitted.incarnation);
        let writer = writer.await.map_err(not_written)?;
        let name = Data::from([(MASTER.into(), self.args.pod.pod.clone())]);
        writer.write(&name).await.map_err(not_written)?;
        succession::raise_backoff_limit(self.cluster, &self.args.master_name()).await;
        Ok(writer)
    }

    /// The worker pods of former masters.
    async fn remaining_pods(&self, submitted: &Submitted) -> Result<Vec<Pod>, Failure> {
        // A master creates no pod before it has persisted the job, so the first master finds none.
        if submitted.incarnation < 2 {
            return Ok(Vec::new());
        }
        let uid = submitted.meta.uid.as_deref().unwrap_or_default();
        let left = pods::list(self.cluster, uid).await?;
        if submitted.record.is_none() && !left.is_empty() {
            return Err(Failure::damaged(format!(
                "the anchor's {RECORD} is missing, but the job has {} pods, so it is not a new job \
                 and its progress is unknown; delete it and submit it again (with --resume-from, \
                 if it has written checkpoints)",
                left.len()
            )));
        }
        Ok(left)
    }

    /// Records a user's request as an Event, concurrently.
    fn record(&self, by: UserRequest) {
        let (cluster, anchor) = (self.cluster.clone(), self.anchor.clone());
        tokio::spawn(async move {
            match anchor.read().await {
                Ok(read) if by.record(&cluster, &read.metadata).await => {}
                _ => warn!(user = by.user, "a user's request is not recorded as an Event"),
            }
        });
    }

    /// Runs `master`: publishes its status to the anchor, and passes the requests of the anchor to
    /// it.
    async fn conduct(
        &self,
        master: Master,
        writer: &AnchorWriter,
        recorder: &EventRecorder,
        age: Duration,
        history: History,
    ) -> Result<u8, Failure> {
        let mut published = self.http.published.clone();
        let start = Instant::now();
        let (commands, received) = mpsc::channel(COMMANDS_MAX);
        // Other causes may have changed since what a former master has carried out.
        let mut requests = KnownRequests::new(master.requested());
        let inspector = master.inspector();
        let mut followed = self.anchor.watch();
        let (times, history) = (RefCell::default(), RefCell::new(history));
        let publishing = publish(writer, published.clone(), age, &times, &history);
        tokio::pin!(publishing);
        let run = master.run(received);
        tokio::pin!(run);
        let ended = loop {
            tokio::select! {
                ended = &mut run => break ended,
                () = &mut publishing => {}
                () = self.give_up.notified() => {
                    let _ = commands.send(UserCommand::Kill).await;
                }
                event = followed.next() => match event {
                    AnchorEvent::Forbidden(message) => {
                        warn!(
                            message,
                            "the anchor can't be watched: scale, suspend and stop have no effect"
                        );
                    }
                    AnchorEvent::Deleted => {
                        info!("the job has been deleted");
                        succession::fail_without_anchor(self.cluster, &self.args.job_name).await;
                        return Ok(EXIT_TERMINATED);
                    }
                    AnchorEvent::Data(data) => {
                        let new = requests.on_data(&data);
                        if let Some(by) = new.by {
                            info!(user = by.user, request = by.key, "a user requests a change");
                            self.record(by);
                        }
                        if let Some(text) = new.ignored {
                            warn!("{text}");
                            recorder.record("RequestIgnored", text);
                        }
                        if let Some(number) = new.inspect {
                            inspection::answer(inspector.clone(), writer.clone(), number);
                        }
                        for command in new.commands {
                            // The master takes them faster than users send them.
                            let _ = commands.send(command).await;
                        }
                    }
                },
            }
        };
        drop(followed);
        let mut history = history.take();
        let last = published.borrow_and_update().clone();
        last.iter().for_each(|last| history.observe(last));
        let status = last.map(|snapshot| snapshot.status);
        let mut times = times.take();
        times
            .note(age + start.elapsed(), status.as_ref().map_or(0, |status| status.events_emitted));
        write_end(writer, &ended, status, &times, &history).await?;
        Ok(code_of_summary(&ended.summary))
    }
}

/// The program of the workers with its arguments.
fn args_of(template: &Pod) -> Vec<String> {
    let container = template.spec.as_ref().and_then(|spec| spec.containers.first());
    let parts = container.map(|container| [container.command.clone(), container.args.clone()]);
    parts.into_iter().flatten().flatten().flatten().collect()
}

/// Records Events of what is new in the published statuses.
async fn tell(
    mut published: watch::Receiver<Option<Snapshot>>,
    recorder: EventRecorder,
    is_resumed: bool,
) {
    // What a former master has told is not told again.
    let mut news = None;
    loop {
        if let Some(known) = &*published.borrow_and_update() {
            let news = news.get_or_insert_with(|| match is_resumed {
                true => News::known(known),
                false => News::default(),
            });
            news.record(known, &recorder);
        }
        if published.changed().await.is_err() {
            return;
        }
    }
}

/// Address of this pod, if it was created with the variable.
fn own_address(variable: impl Fn(&str) -> Option<String>) -> Option<SocketAddr> {
    Some(SocketAddr::new(variable(POD_IP)?.parse().ok()?, PORT as u16))
}

const COMMANDS_MAX: usize = 4;
