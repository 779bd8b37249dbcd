//! Workers as pods.
//!
//! ```text
//!  event loop ──start, kill──► controller ──events──► tracker (pure)
//!             ◄───reports─────            ◄─actions──
//!                                   │ ▲
//!                    create, delete ▼ │ watch
//!                                API server
//! ```
//!
//! One task, the controller, owns the `tracker`, which decides, and performs
//! its actions. API calls run concurrently with it, each until it has a final answer. So thirty
//! workers that are lost at once are replaced in parallel, and an API server that is unreachable
//! for a while costs time only.
//!
//! **Invariant:** this file decides nothing about a pod.

mod calls;
mod factory;
mod groups;
mod nodes;
mod tracker;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use elasticdl_proto::WorkerStatus;
use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Api;
use kube::api::ListParams;
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{info, warn};

use self::calls::{CreateContext, PodClient};
pub(crate) use self::factory::PodFactory;
use self::groups::PodGroups;
use self::nodes::Nodes;
use self::tracker::{PodAction, PodEvent, PodRef, PodTracker};
use super::client::{Cluster, ClusterError};
use super::events::{self, EventRecorder};
use super::leader_lease::LeaseGuard;
use super::logs::first_of_pod;
use super::objects;
use super::priority_tiers::Weight;
use super::retry::retry;
use super::watch::{Change, Selection, Watch};
use crate::backend_event::BackendEvent;
use crate::job::LaunchId;

/// The worker pods of a job.
#[derive(Debug)]
pub(crate) struct Pods {
    commands: mpsc::UnboundedSender<PodEvent>,
    backend_events: mpsc::UnboundedReceiver<(LaunchId, BackendEvent)>,
    task: JoinHandle<()>,
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
        let (result_sender, results) = mpsc::unbounded_channel();
        let api: Api<Pod> = cluster.api();
        let owner = factory.owner().into();
        let labels = Some(objects::worker_selector(factory.owner()));
        let started = Instant::now();
        let groups = factory.gang.clone();
        let groups = groups.map(|options| PodGroups::new(cluster, options, factory.anchor.clone()));
        let watch = Watch::start(api.clone(), Selection { labels, fields: None });
        let controller = PodController {
            tracker: PodTracker::new(factory),
            started,
            owner,
            client: PodClient::new(api, groups, guard),
            event_api: cluster.api(),
            nodes: Nodes::new(cluster),
            recorder,
            creations: BTreeMap::new(),
            has_run: Arc::default(),
            calls: JoinSet::new(),
            result_sender,
            results,
            event_sender,
        };
        let task = tokio::spawn(controller.run(received_commands, watch));
        Self { commands, backend_events, task }
    }

    pub(crate) fn start(&self, launch: LaunchId, slot: u32) {
        self.send(PodEvent::Start(launch, slot));
    }

    /// Makes the first `min_workers` of the next launches' slots those of the core.
    pub(crate) fn set_core(&self, min_workers: u32) {
        self.send(PodEvent::Core(min_workers));
    }

    /// Changes the job's weight, by which the next pods get their classes.
    pub(crate) fn set_weight(&self, weight: Weight) {
        self.send(PodEvent::Weight(weight));
    }

    /// Makes the pods of the next launches prefer other nodes than this one.
    pub(crate) fn avoid(&self, node: String) {
        self.send(PodEvent::Avoid(node));
    }

    /// Adopts a launch of an earlier master. Its end is reported as that of any other launch.
    pub(crate) fn adopt(&self, launch: LaunchId, pod: Option<Pod>) {
        if let Some(pod) = &pod {
            info!(launch = launch.0, pod = PodRef::of(pod).name, "worker pod adopted");
        }
        self.send(PodEvent::Adopt(launch, pod.map(Box::new)));
    }

    /// Deletes a pod that belongs to no launch.
    pub(crate) fn remove(&self, pod: Pod) {
        info!(pod = PodRef::of(&pod).name, "a pod of no launch is deleted");
        self.send(PodEvent::Remove(Box::new(pod)));
    }

    /// Notes that a worker of the job ran under an earlier master: failures to start are then not
    /// caused by the user's configuration.
    pub(crate) fn has_trained(&self) {
        self.send(PodEvent::HasTrained);
    }

    pub(crate) fn kill(&self, launch: LaunchId) {
        self.send(PodEvent::Kill(launch));
    }

    pub(crate) async fn next(&mut self) -> (LaunchId, BackendEvent) {
        match self.backend_events.recv().await {
            Some(event) => event,
            None => std::future::pending().await,
        }
    }

    /// Deletes the pods that have not ended.
    pub(crate) async fn end(mut self) {
        self.send(PodEvent::End);
        if timeout(END_TIMEOUT, &mut self.task).await.is_err() {
            warn!("some workers' pods could not be deleted in time; they go with the job");
        }
    }

    fn send(&self, command: PodEvent) {
        // The task ends only when `self` is dropped, or after `End`.
        let _ = self.commands.send(command);
    }
}

/// Lists the worker pods that earlier masters of the job have created.
pub(crate) async fn list(cluster: &Cluster, anchor_uid: &str) -> Result<Vec<Pod>, ClusterError> {
    let api: Api<Pod> = cluster.api();
    let params = ListParams::default().labels(&objects::worker_selector(anchor_uid));
    let doing = "list the job's workers";
    let read = async || api.list(&params).await.map_err(|error| cluster.explain(doing, error));
    Ok(retry(doing, read).await?.items)
}

/// Adds the pods and their nodes to the workers of the job with this anchor. Without the permission
/// to list pods, the nodes stay unknown.
pub async fn locate(
    cluster: &Cluster,
    anchor: &ObjectMeta,
    workers_per_pod: u32,
    workers: &mut [WorkerStatus],
) {
    let uid = anchor.uid.as_deref().unwrap_or_default();
    let listed = list(cluster, uid).await.unwrap_or_default();
    for worker in workers {
        let launch = first_of_pod(LaunchId(worker.worker.0), workers_per_pod);
        let pod = listed
            .iter()
            .find(|pod| objects::launch_and_slot(pod).is_some_and(|(l, _)| l == launch));
        let job = anchor.name.as_deref().unwrap_or_default();
        worker.pod = Some(objects::worker_name(job, launch));
        worker.node = pod.and_then(|pod| pod.spec.as_ref()?.node_name.clone());
    }
}

impl Drop for Pods {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The controller task: performs what the tracker orders.
struct PodController {
    tracker: PodTracker,
    /// The tracker's time zero.
    started: Instant,
    /// Uid of the pods' owner.
    owner: Arc<str>,
    client: PodClient,
    event_api: Api<Event>,
    nodes: Nodes,
    recorder: EventRecorder,
    /// Flags that stop creations which are under way.
    creations: BTreeMap<LaunchId, Arc<AtomicBool>>,
    /// Whether a rejected creation is tried again.
    has_run: Arc<AtomicBool>,
    calls: JoinSet<()>,
    result_sender: mpsc::UnboundedSender<PodEvent>,
    /// Results of calls, in the order in which they came.
    results: mpsc::UnboundedReceiver<PodEvent>,
    event_sender: mpsc::UnboundedSender<(LaunchId, BackendEvent)>,
}

impl PodController {
    async fn run(mut self, mut commands: mpsc::UnboundedReceiver<PodEvent>, mut watch: Watch<Pod>) {
        let mut ticks = tokio::time::interval(TICK);
        loop {
            let due = self.tracker.poll_timeout().map(|at| self.started + at);
            let event = tokio::select! {
                command = commands.recv() => match command {
                    Some(command) => command,
                    None => return,
                },
                change = watch.next() => match self.event_of(change) {
                    Some(event) => event,
                    None => continue,
                },
                Some(result) = self.results.recv() => result,
                Some(ended) = self.calls.join_next() => {
                    ended.expect("a call neither panics nor is aborted");
                    continue;
                }
                _ = ticks.tick() => PodEvent::Tick,
                () = sleep_until(due.unwrap_or(self.started)), if due.is_some() => PodEvent::Tick,
            };
            let is_over = matches!(event, PodEvent::End);
            self.handle(event);
            if is_over {
                break;
            }
        }
        // A pod whose creation is confirmed now is deleted.
        loop {
            while let Ok(result) = self.results.try_recv() {
                self.handle(result);
            }
            if self.calls.join_next().await.is_none() {
                return;
            }
        }
    }

    /// The tracker's event for a change that the watch reports.
    fn event_of(&self, change: Change<Pod>) -> Option<PodEvent> {
        Some(match change {
            Change::Applied(pod) => PodEvent::Applied(Box::new(pod)),
            Change::Deleted(pod) => PodEvent::Deleted(Box::new(pod)),
            Change::Forbidden(message) => {
                warn!(reason = message, "the workers' pods can't be watched");
                return None;
            }
            Change::Listed(requested_at, uids) => {
                PodEvent::Listed(requested_at.saturating_duration_since(self.started), uids)
            }
        })
    }

    fn handle(&mut self, event: PodEvent) {
        if let PodEvent::Created(launch, _) = &event {
            self.creations.remove(launch);
        }
        self.tracker.handle(self.started.elapsed(), event);
        while let Some(action) = self.tracker.poll_action() {
            self.perform(action);
        }
    }

    fn perform(&mut self, action: PodAction) {
        match action {
            PodAction::CancelCreation(launch) => {
                if let Some(cancelled) = self.creations.remove(&launch) {
                    cancelled.store(true, Ordering::Relaxed);
                }
            }
            PodAction::Create(launch, pod) => self.create(launch, pod),
            PodAction::Delete(PodRef { name, uid }) => {
                let client = self.client.clone();
                self.calls.spawn(async move { client.delete(&name, uid, KILL_GRACE_S).await });
            }
            PodAction::DeleteGroup(gang) => {
                let client = self.client.clone();
                self.calls.spawn(async move { client.delete_group(&gang).await });
            }
            PodAction::Investigate(due) => {
                let (events, results) = (self.event_api.clone(), self.result_sender.clone());
                self.calls.spawn(async move {
                    let preemptors = events::preemptors(&events).await;
                    let _ = results.send(PodEvent::Explained(due, preemptors));
                });
            }
            PodAction::Locate(launch, node) => {
                let (nodes, events) = (self.nodes.clone(), self.event_sender.clone());
                self.calls.spawn(async move {
                    if let Some(location) = nodes.locate(&node).await {
                        // An error means that the job is over.
                        let _ = events.send((launch, BackendEvent::Located(location)));
                    }
                });
            }
            PodAction::NoteRun => self.has_run.store(true, Ordering::Relaxed),
            PodAction::RecordEvent(reason, message) => self.recorder.record(reason, message),
            PodAction::ReadWarnings(uids) => {
                let (events, results) = (self.event_api.clone(), self.result_sender.clone());
                self.calls.spawn(async move {
                    if let Some(warnings) = events::warnings(&events, &uids).await {
                        let _ = results.send(PodEvent::Warned(uids, warnings));
                    }
                });
            }
            PodAction::Report(launch, event) => {
                match &event {
                    BackendEvent::Created(class) => {
                        info!(launch = launch.0, class, "worker pod created")
                    }
                    BackendEvent::Ended(exit) => {
                        info!(launch = launch.0, ?exit, "worker pod ended")
                    }
                    BackendEvent::Explained(reason) => {
                        info!(launch = launch.0, reason, "a deleted worker pod was preempted")
                    }
                    _ => {}
                }
                // An error means that the job is over.
                let _ = self.event_sender.send((launch, event));
            }
        }
    }

    fn create(&mut self, launch: LaunchId, pod: Box<Pod>) {
        let cancelled = Arc::new(AtomicBool::new(false));
        self.creations.insert(launch, Arc::clone(&cancelled));
        let (owner, has_run) = (Arc::clone(&self.owner), Arc::clone(&self.has_run));
        let (client, results) = (self.client.clone(), self.result_sender.clone());
        self.calls.spawn(async move {
            let report_wait = |wait| {
                let _ = results.send(PodEvent::CreationWaits(launch, wait));
            };
            let context = CreateContext { owner: &owner, cancelled: &cancelled, has_run: &has_run };
            let outcome = client.create(&pod, context, report_wait).await;
            let _ = results.send(PodEvent::Created(launch, outcome));
        });
    }
}

const END_TIMEOUT: Duration = Duration::from_secs(5);
/// The shortest grace period that a kubelet honours.
const KILL_GRACE_S: u32 = 1;
const TICK: Duration = Duration::from_secs(1);

#[cfg(test)]
mod gang_scenarios;
#[cfg(test)]
mod scenarios;
#[cfg(test)]
mod tests;
