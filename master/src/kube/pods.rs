//! Workers as pods.
//!
//! ```text
//!  event loop ──start, kill──► pod controller ──create, delete──► API server
//!             ◄───events──────                ◄──────watch───────
//! ```
//!
//! One task, the pod controller, owns the state of the launches. API calls run concurrently with
//! it, each until it has a final answer. So thirty workers that are lost at once are replaced in
//! parallel, and an API server that is unreachable for a while costs time only.
//!
//! **Invariants:** a launch ends once, by the verdict on its own pod, identified by uid; another
//! pod of the same name is ignored. A pod that is being deleted has ended when its program has
//! ended, or when its node has exceeded the time for that.

mod calls;
mod timeouts;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Api;
use kube::api::ListParams;
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, timeout};
use tracing::{info, warn};

use self::calls::{CreateContext, CreateOutcome, PodClient};
use super::client::{Cluster, ClusterError};
use super::events::{self, EventRecorder};
use super::leader_lease::LeaseGuard;
use super::objects::{self, LAUNCH_LABEL};
use super::priority_tiers::PriorityTiers;
use super::verdict::{Cause, End, Termination, Verdict, classify, has_running_sidecar, vanished};
use super::watch::{Change, Selection, Watch};
use crate::job::{Exit, LaunchId, Wait};
use crate::worker_backend::BackendEvent;

/// Everything that a worker pod is made from, except its launch and slot.
#[derive(Clone, Debug)]
pub(crate) struct PodFactory {
    /// Template that all worker pods share.
    pub(crate) template: Pod,
    /// Metadata of their owner.
    pub(crate) anchor: ObjectMeta,
    /// Address of the master, `host:port`.
    pub(crate) master: String,
    /// Minimum number of workers: the job's core.
    pub(crate) min_workers: u32,
    /// Priority classes by slot. `None`: all pods have the template's class.
    pub(crate) priority_tiers: Option<PriorityTiers>,
}

/// The worker pods of a job.
#[derive(Debug)]
pub(crate) struct Pods {
    commands: mpsc::UnboundedSender<PodCommand>,
    backend_events: mpsc::UnboundedReceiver<(LaunchId, BackendEvent)>,
    task: JoinHandle<()>,
}

#[derive(Clone, Debug)]
enum PodCommand {
    /// A launch of an earlier master and its pod, if the pod exists.
    Adopt(LaunchId, Option<Box<Pod>>),
    End,
    HasTrained,
    Kill(LaunchId),
    Remove(Box<Pod>),
    Start(LaunchId, u32),
}

impl Pods {
    /// Starts to watch the job's pods. Pods are created and deleted while the guard is valid. Must
    /// be called within a runtime.
    pub(crate) fn new(
        cluster: &Cluster,
        factory: PodFactory,
        guard: LeaseGuard,
        recorder: EventRecorder,
    ) -> Self {
        let (commands, received_commands) = mpsc::unbounded_channel();
        let (event_sender, backend_events) = mpsc::unbounded_channel();
        let api: Api<Pod> = cluster.api();
        let uid = factory.anchor.uid.clone().unwrap_or_default();
        let labels = Some(objects::worker_selector(&uid));
        let watch = Watch::start(api.clone(), Selection { labels, fields: None });
        let controller = PodController {
            client: PodClient::new(api, guard),
            event_api: cluster.api(),
            recorder,
            factory,
            launches: BTreeMap::new(),
            retained_pods: VecDeque::new(),
            unexplained: Vec::new(),
            calls: JoinSet::new(),
            event_sender,
            has_run: Arc::default(),
            stuck: 0,
        };
        Self {
            commands,
            backend_events,
            task: tokio::spawn(controller.run(received_commands, watch)),
        }
    }

    pub(crate) fn start(&self, launch: LaunchId, slot: u32) {
        // The task ends only when `self` is dropped.
        let _ = self.commands.send(PodCommand::Start(launch, slot));
    }

    /// Adopts a launch of an earlier master. Its end is reported as that of any other launch.
    pub(crate) fn adopt(&self, launch: LaunchId, pod: Option<Pod>) {
        let _ = self.commands.send(PodCommand::Adopt(launch, pod.map(Box::new)));
    }

    /// Deletes a pod that belongs to no launch.
    pub(crate) fn remove(&self, pod: Pod) {
        let _ = self.commands.send(PodCommand::Remove(Box::new(pod)));
    }

    /// Notes that a worker of the job ran under an earlier master: failures to start are then not
    /// caused by the user's configuration.
    pub(crate) fn has_trained(&self) {
        let _ = self.commands.send(PodCommand::HasTrained);
    }

    pub(crate) fn kill(&self, launch: LaunchId) {
        let _ = self.commands.send(PodCommand::Kill(launch));
    }

    pub(crate) async fn next(&mut self) -> (LaunchId, BackendEvent) {
        match self.backend_events.recv().await {
            Some(event) => event,
            None => std::future::pending().await,
        }
    }

    /// Deletes the pods that have not ended.
    pub(crate) async fn end(mut self) {
        let _ = self.commands.send(PodCommand::End);
        if timeout(END_TIMEOUT, &mut self.task).await.is_err() {
            warn!("some workers' pods could not be deleted in time; they go with the job");
        }
    }
}

/// Lists the worker pods that earlier masters of the job have created.
pub(crate) async fn list(cluster: &Cluster, anchor_uid: &str) -> Result<Vec<Pod>, ClusterError> {
    let api: Api<Pod> = cluster.api();
    let params = ListParams::default().labels(&objects::worker_selector(anchor_uid));
    let listed = api.list(&params).await;
    Ok(listed.map_err(|error| cluster.explain("list the job's workers", error))?.items)
}

impl Drop for Pods {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// State of the controller task.
struct PodController {
    client: PodClient,
    event_api: Api<Event>,
    recorder: EventRecorder,
    factory: PodFactory,
    /// Launches that have not ended.
    launches: BTreeMap<LaunchId, ActiveLaunch>,
    /// Ended pods that are retained for their logs, by name and uid; oldest first, at most
    /// [`RETAINED_PODS_MAX`].
    retained_pods: VecDeque<(String, String)>,
    /// Deleted pods for whose deletion no reason is known yet.
    unexplained: Vec<UnexplainedDeletion>,
    calls: JoinSet<CallResult>,
    event_sender: mpsc::UnboundedSender<(LaunchId, BackendEvent)>,
    /// Whether a worker of the job has run. Then image, configuration and permissions are valid, so
    /// a pod that can't start is a problem of the cluster, and is retried.
    has_run: Arc<AtomicBool>,
    /// Number of consecutive pods that were unable to start.
    stuck: u32,
}

/// A launch that has not ended.
#[derive(Debug, Default)]
struct ActiveLaunch {
    /// Slot among the job's workers.
    slot: u32,
    /// Priority class that the tiers assign.
    class: Option<String>,
    /// Uid of its pod once it exists, and when the creation was confirmed.
    pod: Option<(String, Option<Instant>)>,
    /// Since when it can't start, and why.
    stuck: Option<(Instant, String)>,
    /// Since when it is being deleted while its program runs.
    terminating: Option<(Instant, Termination)>,
    /// The scheduler's message about its preemption, if there is one.
    preempted: Option<String>,
    /// The last reported event.
    reported: Option<BackendEvent>,
    /// Set when the creation must not be retried.
    cancelled: Arc<AtomicBool>,
}

/// A deletion whose reason may become known later.
#[derive(Debug)]
struct UnexplainedDeletion {
    launch: LaunchId,
    name: String,
    uid: String,
    seen: Instant,
}

/// Result of a call.
#[derive(Debug)]
enum CallResult {
    Created(LaunchId, CreateOutcome),
    Deleted,
    /// The scheduler's messages about preempted pods, by uid.
    Explained(Vec<UnexplainedDeletion>, BTreeMap<String, String>),
    /// The launch has had its time to end by itself and is to be killed.
    KillDue(LaunchId),
}

impl PodController {
    async fn run(
        mut self,
        mut commands: mpsc::UnboundedReceiver<PodCommand>,
        mut watch: Watch<Pod>,
    ) {
        let mut ticks = tokio::time::interval(TICK);
        loop {
            tokio::select! {
                command = commands.recv() => match command {
                    Some(PodCommand::Start(launch, slot)) => {
                        let active = ActiveLaunch { slot, ..ActiveLaunch::default() };
                        self.launches.insert(launch, active);
                        self.report(launch, BackendEvent::Waiting(Wait::Scheduling(None)));
                        self.create(launch);
                    }
                    Some(PodCommand::Adopt(launch, pod)) => self.adopt(launch, pod.as_deref()),
                    Some(PodCommand::HasTrained) => self.has_run.store(true, Ordering::Relaxed),
                    Some(PodCommand::Kill(launch)) => self.kill_soon(launch),
                    Some(PodCommand::Remove(pod)) => {
                        info!(pod = name_of(&pod), "a pod of no launch is deleted");
                        self.delete(name_of(&pod), pod.metadata.uid.unwrap_or_default());
                    }
                    Some(PodCommand::End) => break,
                    None => return,
                },
                change = watch.next() => self.on_change(change),
                Some(answer) = self.calls.join_next() => {
                    match answer.expect("a call neither panics nor is aborted") {
                        CallResult::Created(launch, outcome) => self.on_created(launch, outcome),
                        CallResult::Deleted => {}
                        CallResult::KillDue(launch) => {
                            self.kill(launch, "it is not wanted any more");
                        }
                        CallResult::Explained(due, preemptors) => {
                            self.on_explained(due, &preemptors);
                        }
                    }
                }
                _ = ticks.tick() => {
                    self.evict_stuck();
                    self.evict_unresponsive();
                    self.investigate_deletions();
                }
            }
        }
        let left: Vec<_> = self.launches.keys().copied().collect();
        for launch in left {
            self.kill(launch, "the job is over");
        }
        while let Some(answer) = self.calls.join_next().await {
            if let Ok(CallResult::Created(_, CreateOutcome::Created(pod))) = answer {
                self.delete(name_of(&pod), pod.metadata.uid.unwrap_or_default());
            }
        }
    }

    fn adopt(&mut self, launch: LaunchId, pod: Option<&Pod>) {
        self.launches.insert(launch, ActiveLaunch::default());
        let Some(pod) = pod else { return self.ended(launch, exit_of(vanished())) };
        let class = pod.spec.as_ref().and_then(|spec| spec.priority_class_name.clone());
        if let (Some(launched), Some(uid)) = (self.launches.get_mut(&launch), &pod.metadata.uid) {
            launched.slot = objects::launch_and_slot(pod).map_or(0, |(_, slot)| slot);
            launched.class.clone_from(&class);
            launched.pod = Some((uid.clone(), Some(Instant::now())));
        }
        info!(launch = launch.0, pod = name_of(pod), "worker pod adopted");
        let _ = self.event_sender.send((launch, BackendEvent::Created(class)));
        self.on_seen(pod);
    }

    fn create(&mut self, launch: LaunchId) {
        let Some(launched) = self.launches.get_mut(&launch) else { return };
        let PodFactory { template, anchor, master, min_workers, priority_tiers } = &self.factory;
        let mut pod = objects::worker_pod(template, launch, launched.slot, anchor, master);
        launched.class = priority_tiers
            .as_ref()
            .map(|priority_tiers| priority_tiers.class(launched.slot, *min_workers).into());
        if launched.class.is_some() {
            pod.spec.get_or_insert_default().priority_class_name.clone_from(&launched.class);
        }
        let cancelled = Arc::clone(&launched.cancelled);
        let (owner, has_run) = (anchor.uid.clone().unwrap_or_default(), Arc::clone(&self.has_run));
        let (client, event_sender, recorder) =
            (self.client.clone(), self.event_sender.clone(), self.recorder.clone());
        self.calls.spawn(async move {
            let report_wait = |wait: Wait| {
                if let Wait::Capacity(why) = &wait {
                    recorder.record("QuotaExceeded", why.clone());
                }
                let _ = event_sender.send((launch, BackendEvent::Waiting(wait)));
            };
            let context = CreateContext { owner: &owner, cancelled: &cancelled, has_run: &has_run };
            CallResult::Created(launch, client.create(&pod, context, report_wait).await)
        });
    }

    fn on_created(&mut self, launch: LaunchId, outcome: CreateOutcome) {
        match (outcome, self.launches.get_mut(&launch)) {
            (CreateOutcome::Created(pod), Some(launched)) => {
                info!(launch = launch.0, pod = name_of(&pod), "worker pod created");
                // The watch may have reported the pod already.
                let uid = pod.metadata.uid.unwrap_or_default();
                launched.pod.get_or_insert((uid, None)).1 = Some(Instant::now());
                let class = pod.spec.and_then(|spec| spec.priority_class_name);
                let _ = self.event_sender.send((launch, BackendEvent::Created(class)));
            }
            (CreateOutcome::MissingClass(class), Some(_)) => self.on_missing_class(launch, &class),
            (CreateOutcome::Rejected(why), Some(_)) => self.ended(launch, Exit::NotStarted(why)),
            // The launch was killed in the meantime.
            (CreateOutcome::Created(pod), None) => {
                self.delete(name_of(&pod), pod.metadata.uid.unwrap_or_default())
            }
            (
                CreateOutcome::MissingClass(_)
                | CreateOutcome::Cancelled
                | CreateOutcome::Rejected(_),
                _,
            ) => {}
        }
    }

    /// Handles a priority class that the cluster does not have: reduces the tiers, once for all
    /// launches, and creates the pod again.
    fn on_missing_class(&mut self, launch: LaunchId, class: &str) {
        let no_class = format!("there is no priority class {class}");
        let assigned = self.launches.get(&launch).and_then(|launched| launched.class.as_deref());
        if assigned != Some(class) {
            // The class is the user's own choice, or was set by an admission webhook.
            return self.ended(launch, Exit::NotStarted(no_class));
        }
        // Another launch may have reduced the tiers already.
        let has = |priority_tiers: &&PriorityTiers| {
            priority_tiers.core == class || priority_tiers.tiers.iter().any(|tier| tier == class)
        };
        if let Some(priority_tiers) = self.factory.priority_tiers.as_ref().filter(has) {
            let shorter = priority_tiers.without(class);
            let instead = match &shorter {
                Some(PriorityTiers { core, tiers }) => {
                    format!("workers have {core} or {}", tiers.join(", "))
                }
                None => "workers have no class by slot".into(),
            };
            let message = format!(
                "{no_class} in this cluster (see manifests/priorityclasses.yaml): {instead}"
            );
            warn!("{message}");
            let _ = self
                .event_sender
                .send((launch, BackendEvent::Waiting(Wait::Scheduling(Some(message)))));
            self.factory.priority_tiers = shorter;
        }
        self.create(launch);
    }

    fn on_change(&mut self, change: Change<Pod>) {
        match change {
            Change::Forbidden(message) => {
                warn!(reason = message, "the workers' pods can't be watched")
            }
            Change::Deleted(pod) => {
                if let Some(launch) = self.launch_of(&pod) {
                    // The last version of the object may contain the reason.
                    let end = match classify(&pod) {
                        Verdict::Ended(end) | Verdict::Terminating(Termination { end, .. }) => end,
                        _ => vanished(),
                    };
                    self.on_end(launch, &pod, end);
                }
            }
            Change::Listed(requested_at, uids) => {
                let is_deleted = |launched: &ActiveLaunch| match &launched.pod {
                    Some((uid, Some(known))) => *known < requested_at && !uids.contains(uid),
                    _ => false,
                };
                let deleted: Vec<_> = self
                    .launches
                    .iter()
                    .filter(|(_, l)| is_deleted(l))
                    .map(|(&launch, _)| launch)
                    .collect();
                for launch in deleted {
                    let name = self.name_of_launch(launch);
                    self.record_event(Cause::Deleted, &name, &vanished().detail);
                    self.ended(launch, exit_of(vanished()));
                }
            }
            Change::Applied(pod) => self.on_seen(&pod),
        }
    }

    fn on_seen(&mut self, pod: &Pod) {
        let Some(launch) = self.launch_of(pod) else { return };
        let launched = self.launches.get_mut(&launch).expect("the launch was just found");
        let verdict = classify(pod);
        match &verdict {
            Verdict::CannotStart(why) => {
                launched
                    .stuck
                    .get_or_insert_with(|| (Instant::now(), String::new()))
                    .1
                    .clone_from(why);
            }
            _ => launched.stuck = None,
        }
        match verdict {
            Verdict::Created => self.report(launch, BackendEvent::Waiting(Wait::Scheduling(None))),
            Verdict::CannotStart(why) => {
                self.report(launch, BackendEvent::Waiting(Wait::Start(Some(why))))
            }
            Verdict::Unschedulable(why) => self.on_unschedulable(launch, pod, why),
            Verdict::Starting => self.report(launch, BackendEvent::Waiting(Wait::Start(None))),
            Verdict::Terminating(termination) => self.on_terminating(launch, pod, termination),
            Verdict::Running => {
                self.has_run.store(true, Ordering::Relaxed);
                self.stuck = 0;
                self.report(launch, BackendEvent::Running);
            }
            Verdict::Ended(end) => {
                self.on_end(launch, pod, end);
                if has_running_sidecar(pod) {
                    // Sidecars don't end by themselves.
                    self.delete(name_of(pod), pod.metadata.uid.clone().unwrap_or_default());
                } else if pod.metadata.deletion_timestamp.is_none() {
                    self.retain(pod);
                }
            }
        }
    }

    fn on_unschedulable(&mut self, launch: LaunchId, pod: &Pod, why: String) {
        let event = BackendEvent::Waiting(Wait::Capacity(why.clone()));
        let is_known =
            self.launches.get(&launch).is_none_or(|l| l.reported.as_ref() == Some(&event));
        if !is_known {
            self.recorder.record("Unschedulable", format!("worker pod {}: {why}", name_of(pod)));
        }
        self.report(launch, event);
    }

    fn on_terminating(&mut self, launch: LaunchId, pod: &Pod, termination: Termination) {
        let message = termination.end.detail.clone();
        let is_unexplained = termination.end.cause == Cause::Deleted;
        let Some(launched) = self.launches.get_mut(&launch) else { return };
        let since = launched.terminating.as_ref().map(|(since, _)| *since);
        launched.terminating = Some((since.unwrap_or_else(Instant::now), termination));
        if since.is_none() && is_unexplained {
            self.note_unexplained(launch, pod);
        }
        self.report(launch, BackendEvent::Terminating(message));
    }

    /// Handles the end of a launch as its pod reports it.
    fn on_end(&mut self, launch: LaunchId, pod: &Pod, mut end: End) {
        let launched = self.launches.get_mut(&launch);
        let (was_terminating, preempted) =
            launched.map_or((false, None), |l| (l.terminating.is_some(), l.preempted.take()));
        match preempted {
            // The Event has been recorded already.
            Some(message) => end = End { cause: Cause::Preempted, detail: message },
            None if end.cause == Cause::Deleted => {
                if !was_terminating {
                    self.note_unexplained(launch, pod);
                }
            }
            None => self.record_event(end.cause, &name_of(pod), &end.detail),
        }
        self.ended(launch, exit_of(end));
    }

    fn record_event(&self, cause: Cause, name: &str, detail: &str) {
        if let Some(reason) = events::reason_of(cause) {
            self.recorder.record(reason, format!("worker pod {name}: {detail}"));
        }
    }

    /// Notes a deletion without a known reason. The scheduler of a server before 1.26 reports a
    /// preemption in an Event only, after the deletion.
    fn note_unexplained(&mut self, launch: LaunchId, pod: &Pod) {
        let uid = pod.metadata.uid.clone().unwrap_or_default();
        self.unexplained.push(UnexplainedDeletion {
            launch,
            name: name_of(pod),
            uid,
            seen: Instant::now(),
        });
    }

    /// Reads the scheduler's Events, in one call for all deletions that are due.
    fn investigate_deletions(&mut self) {
        let (due, later) = std::mem::take(&mut self.unexplained)
            .into_iter()
            .partition::<Vec<_>, _>(|pod| pod.seen.elapsed() >= EVENT_DELAY);
        self.unexplained = later;
        if !due.is_empty() {
            let events = self.event_api.clone();
            self.calls.spawn(async move {
                let preemptors = events::preemptors(&events).await;
                CallResult::Explained(due, preemptors)
            });
        }
    }

    fn on_explained(
        &mut self,
        due: Vec<UnexplainedDeletion>,
        preemptors: &BTreeMap<String, String>,
    ) {
        for UnexplainedDeletion { launch, name, uid, .. } in due {
            match preemptors.get(&uid) {
                Some(message) => {
                    let message = message
                        .strip_prefix("Preempted ")
                        .map_or_else(|| message.clone(), |w| format!("preempted {w}"));
                    info!(
                        launch = launch.0,
                        pod = name,
                        reason = message,
                        "a deleted worker pod was preempted"
                    );
                    self.record_event(Cause::Preempted, &name, &message);
                    let _ =
                        self.event_sender.send((launch, BackendEvent::Explained(message.clone())));
                    if let Some(launched) = self.launches.get_mut(&launch) {
                        launched.preempted = Some(message);
                    }
                }
                None => self.record_event(Cause::Deleted, &name, "it was deleted"),
            }
        }
    }

    /// Returns the launch to which this pod belongs, if it has not ended.
    fn launch_of(&mut self, pod: &Pod) -> Option<LaunchId> {
        let label = pod.metadata.labels.as_ref()?.get(LAUNCH_LABEL)?;
        let launch = LaunchId(label.parse().ok()?);
        let has_its_name = name_of(pod) == self.name_of_launch(launch);
        let launched = self.launches.get_mut(&launch)?;
        let uid = pod.metadata.uid.clone()?;
        match &launched.pod {
            Some((known, _)) => (*known == uid).then_some(launch),
            // The watch was faster than the answer to the creation. Names are unique, so the name
            // identifies the pod.
            None => has_its_name.then(|| {
                launched.pod = Some((uid, None));
                launch
            }),
        }
    }

    fn name_of_launch(&self, launch: LaunchId) -> String {
        objects::worker_name(self.factory.anchor.name.as_deref().unwrap_or_default(), launch)
    }

    /// Reports an event of a launch, unless it is equal to the last one.
    fn report(&mut self, launch: LaunchId, event: BackendEvent) {
        let Some(launched) = self.launches.get_mut(&launch) else { return };
        if launched.reported.as_ref() != Some(&event) {
            launched.reported = Some(event.clone());
            let _ = self.event_sender.send((launch, event));
        }
    }

    fn ended(&mut self, launch: LaunchId, exit: Exit) {
        if let Some(launched) = self.launches.remove(&launch) {
            launched.cancelled.store(true, Ordering::Relaxed);
            info!(launch = launch.0, ?exit, "worker pod ended");
            let _ = self.event_sender.send((launch, BackendEvent::Ended(exit)));
        }
    }

    /// Kills a launch that need not end by itself. If its pod has a node, the controller waits a
    /// moment: most pods are killed because their program has ended, which the cluster reports a
    /// little later (as it reports late that they run), and their exit is worth knowing.
    fn kill_soon(&mut self, launch: LaunchId) {
        let is_waiting = |l: &ActiveLaunch| {
            matches!(
                l.reported,
                Some(BackendEvent::Waiting(Wait::Scheduling(_) | Wait::Capacity(_)))
            )
        };
        let has_node = |l: &ActiveLaunch| l.pod.is_some() && !is_waiting(l);
        if !self.launches.get(&launch).is_some_and(has_node) {
            return self.kill(launch, "it is not wanted any more");
        }
        self.calls.spawn(async move {
            tokio::time::sleep(END_WAIT).await;
            CallResult::KillDue(launch)
        });
    }

    fn kill(&mut self, launch: LaunchId, why: &str) {
        let pod = self.launches.get(&launch).and_then(|launched| launched.pod.clone());
        if let Some((uid, _)) = pod {
            let name = self.name_of_launch(launch);
            self.delete(name, uid);
        }
        self.ended(launch, Exit::Reclaimed(why.into()));
    }

    /// Retains an ended pod for its logs, and deletes the oldest retained one if there are too
    /// many.
    fn retain(&mut self, pod: &Pod) {
        self.retained_pods.push_back((name_of(pod), pod.metadata.uid.clone().unwrap_or_default()));
        if self.retained_pods.len() > RETAINED_PODS_MAX
            && let Some((name, uid)) = self.retained_pods.pop_front()
        {
            self.delete(name, uid);
        }
    }

    fn delete(&mut self, name: String, uid: String) {
        let client = self.client.clone();
        self.calls.spawn(async move {
            client.delete(&name, uid, KILL_GRACE_S).await;
            CallResult::Deleted
        });
    }
}

/// The end of a worker's process by the end of its pod.
pub(super) fn exit_of(end: End) -> Exit {
    match end.cause {
        Cause::Exited(code) => Exit::Code(code),
        Cause::Signalled(signal) => Exit::Signal(signal),
        Cause::OutOfMemory | Cause::OverLimit => Exit::OverLimit(format!(
            "{}; --worker-resources sets what a worker may use",
            end.detail
        )),
        _ => Exit::Reclaimed(end.detail),
    }
}

fn name_of(pod: &Pod) -> String {
    pod.metadata.name.clone().unwrap_or_default()
}

const END_TIMEOUT: Duration = Duration::from_secs(5);
/// Delay before a kill: kubelets check once a second for ended containers.
const END_WAIT: Duration = Duration::from_secs(2);
/// Time that the scheduler may take after a deletion to report it as a preemption.
const EVENT_DELAY: Duration = Duration::from_secs(2);
/// The shortest grace period that a kubelet honours.
const KILL_GRACE_S: u32 = 1;
/// Number of ended pods that are retained.
const RETAINED_PODS_MAX: usize = 16;
const TICK: Duration = Duration::from_secs(1);

#[cfg(test)]
mod scenarios;
#[cfg(test)]
mod tests;
