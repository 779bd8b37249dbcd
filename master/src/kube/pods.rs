//! Workers as pods.
//!
//! ```text
//!  master's task ──start, kill──► this task ──create, delete──► API server
//!                ◄──happenings───           ◄──────watch───────
//! ```
//!
//! One task owns what is known of the launches. Calls run beside it, each until it is answered for
//! good, so that thirty workers that are lost at once are replaced in parallel, and a server that
//! is away for a while costs nothing but time.
//!
//! **Invariants:** a launch ends once, by the verdict on its own pod, known by uid; what another
//! pod of that name does is not looked at. A pod that is being deleted has ended when its program
//! has, or when its node has had the time for that.

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
use crate::launches::Happening;

/// What workers' pods are made from.
#[derive(Clone, Debug)]
pub(crate) struct PodFactory {
    /// What they have in common.
    pub(crate) template: Pod,
    /// Their owner.
    pub(crate) anchor: ObjectMeta,
    /// Where they find it, `host:port`.
    pub(crate) master: String,
    /// The least number of workers: the job's core.
    pub(crate) min_workers: u32,
    /// Their priority classes by place, unless all have the template's.
    pub(crate) priority_tiers: Option<PriorityTiers>,
}

/// The workers' pods of a job.
#[derive(Debug)]
pub(crate) struct Pods {
    commands: mpsc::UnboundedSender<PodCommand>,
    happenings: mpsc::UnboundedReceiver<(LaunchId, Happening)>,
    task: JoinHandle<()>,
}

#[derive(Clone, Debug)]
enum PodCommand {
    /// A launch of a master before this one, and its pod, if that is there.
    Adopt(LaunchId, Option<Box<Pod>>),
    End,
    HasTrained,
    Kill(LaunchId),
    Remove(Box<Pod>),
    Start(LaunchId, u32),
}

impl Pods {
    /// Watches the job's pods from now on; makes and deletes them while the guard holds. Must be
    /// called within a runtime.
    pub(crate) fn new(
        cluster: &Cluster,
        factory: PodFactory,
        guard: LeaseGuard,
        recorder: EventRecorder,
    ) -> Self {
        let (commands, received_commands) = mpsc::unbounded_channel();
        let (happen, happenings) = mpsc::unbounded_channel();
        let api: Api<Pod> = cluster.api();
        let uid = factory.anchor.uid.clone().unwrap_or_default();
        let labels = Some(objects::worker_selector(&uid));
        let watch = Watch::start(api.clone(), Selection { labels, fields: None });
        let controller = PodController {
            client: PodClient::new(api, guard),
            events: cluster.api(),
            recorder,
            factory,
            launches: BTreeMap::new(),
            retained_pods: VecDeque::new(),
            unexplained: Vec::new(),
            calls: JoinSet::new(),
            happen,
            has_run: Arc::default(),
            stuck: 0,
        };
        Self { commands, happenings, task: tokio::spawn(controller.run(received_commands, watch)) }
    }

    pub(crate) fn start(&self, launch: LaunchId, index: u32) {
        // The task ends only with this.
        let _ = self.commands.send(PodCommand::Start(launch, index));
    }

    /// Takes over one that another master has started; what is known of its end is told as of any
    /// other's.
    pub(crate) fn adopt(&self, launch: LaunchId, pod: Option<Pod>) {
        let _ = self.commands.send(PodCommand::Adopt(launch, pod.map(Box::new)));
    }

    /// Deletes a pod that is no launch's any more.
    pub(crate) fn remove(&self, pod: Pod) {
        let _ = self.commands.send(PodCommand::Remove(Box::new(pod)));
    }

    /// A worker of the job has run before this master: what keeps others from starting is not the
    /// user's doing.
    pub(crate) fn has_trained(&self) {
        let _ = self.commands.send(PodCommand::HasTrained);
    }

    pub(crate) fn kill(&self, launch: LaunchId) {
        let _ = self.commands.send(PodCommand::Kill(launch));
    }

    pub(crate) async fn next(&mut self) -> (LaunchId, Happening) {
        match self.happenings.recv().await {
            Some(happening) => happening,
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

/// The workers' pods of a job that a master before this one has made.
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

/// The task.
struct PodController {
    client: PodClient,
    events: Api<Event>,
    recorder: EventRecorder,
    factory: PodFactory,
    /// Those that have not ended.
    launches: BTreeMap<LaunchId, ActiveLaunch>,
    /// Pods that have ended, oldest first: kept for their logs, but not all of them.
    retained_pods: VecDeque<(String, String)>,
    /// Pods that were deleted, and nobody has said why yet.
    unexplained: Vec<UnexplainedDeletion>,
    calls: JoinSet<CallResult>,
    happen: mpsc::UnboundedSender<(LaunchId, Happening)>,
    /// A worker of the job has run: image, configuration and rights are good, so what keeps a pod
    /// from starting is the cluster's trouble, and is waited for.
    has_run: Arc<AtomicBool>,
    /// Pods in a row that were unable to start.
    stuck: u32,
}

/// A launch that has not ended.
#[derive(Debug, Default)]
struct ActiveLaunch {
    /// Its place among the job's workers.
    index: u32,
    /// The class that the priority_tiers gave it.
    class: Option<String>,
    /// Its pod, once it is made: uid, and when that was known.
    pod: Option<(String, Option<Instant>)>,
    /// Since when it can't start, and why.
    stuck: Option<(Instant, String)>,
    /// Since when it is being deleted while its program runs.
    terminating: Option<(Instant, Termination)>,
    /// By whom it was preempted, if the scheduler has said so.
    preempted: Option<String>,
    /// What was said of it last.
    said: Option<Happening>,
    /// Its creation is not to be tried again.
    cancelled: Arc<AtomicBool>,
}

/// A deletion whose reason may yet be told.
#[derive(Debug)]
struct UnexplainedDeletion {
    launch: LaunchId,
    name: String,
    uid: String,
    seen: Instant,
}

/// What a call came to.
#[derive(Debug)]
enum CallResult {
    Created(LaunchId, CreateOutcome),
    Deleted,
    /// It has had the time to end by itself.
    KillDue(LaunchId),
    /// What the scheduler has said about preempted pods, by uid.
    Explained(Vec<UnexplainedDeletion>, BTreeMap<String, String>),
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
                order = commands.recv() => match order {
                    Some(PodCommand::Start(launch, index)) => {
                        self.launches.insert(launch, ActiveLaunch { index, ..ActiveLaunch::default() });
                        self.say(launch, Happening::Waits(Wait::Answer(None)));
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
                        CallResult::Created(launch, made) => self.on_created(launch, made),
                        CallResult::Deleted => {}
                        CallResult::KillDue(launch) => self.kill(launch, "it is not wanted any more"),
                        CallResult::Explained(asked, preemptors) => self.on_explained(asked, &preemptors),
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
            launched.index = objects::launch_and_slot(pod).map_or(0, |(_, index)| index);
            launched.class.clone_from(&class);
            launched.pod = Some((uid.clone(), Some(Instant::now())));
        }
        info!(launch = launch.0, pod = name_of(pod), "worker pod taken over");
        let _ = self.happen.send((launch, Happening::Made(class)));
        self.on_seen(pod);
    }

    fn create(&mut self, launch: LaunchId) {
        let Some(launched) = self.launches.get_mut(&launch) else { return };
        let PodFactory { template, anchor, master, min_workers, priority_tiers } = &self.factory;
        let mut pod = objects::worker_pod(template, launch, launched.index, anchor, master);
        launched.class = priority_tiers
            .as_ref()
            .map(|priority_tiers| priority_tiers.class(launched.index, *min_workers).into());
        if launched.class.is_some() {
            pod.spec.get_or_insert_default().priority_class_name.clone_from(&launched.class);
        }
        let cancelled = Arc::clone(&launched.cancelled);
        let (owner, has_run) = (anchor.uid.clone().unwrap_or_default(), Arc::clone(&self.has_run));
        let (client, happen, recorder) =
            (self.client.clone(), self.happen.clone(), self.recorder.clone());
        self.calls.spawn(async move {
            let tell = |wait: Wait| {
                if let Wait::Room(why) = &wait {
                    recorder.record("QuotaExceeded", why.clone());
                }
                let _ = happen.send((launch, Happening::Waits(wait)));
            };
            let known = CreateContext { owner: &owner, cancelled: &cancelled, has_run: &has_run };
            CallResult::Created(launch, client.create(&pod, known, tell).await)
        });
    }

    fn on_created(&mut self, launch: LaunchId, made: CreateOutcome) {
        match (made, self.launches.get_mut(&launch)) {
            (CreateOutcome::Created(pod), Some(launched)) => {
                info!(launch = launch.0, pod = name_of(&pod), "worker pod created");
                // The watch may have shown it already.
                let uid = pod.metadata.uid.unwrap_or_default();
                launched.pod.get_or_insert((uid, None)).1 = Some(Instant::now());
                let class = pod.spec.and_then(|spec| spec.priority_class_name);
                let _ = self.happen.send((launch, Happening::Made(class)));
            }
            (CreateOutcome::MissingClass(class), Some(_)) => self.on_missing_class(launch, &class),
            (CreateOutcome::Rejected(why), Some(_)) => self.ended(launch, Exit::NotStarted(why)),
            // It was killed meanwhile.
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

    /// The cluster has no such class. The priority_tiers is shortened, once for all launches, and this one
    /// asked for again.
    fn on_missing_class(&mut self, launch: LaunchId, class: &str) {
        let no_class = format!("there is no priority class {class}");
        let asked = self.launches.get(&launch).and_then(|launched| launched.class.as_deref());
        if asked != Some(class) {
            // The user's own word, or somebody else's who changes pods on their way.
            return self.ended(launch, Exit::NotStarted(no_class));
        }
        // Another launch may have shortened it meanwhile.
        let has = |priority_tiers: &&PriorityTiers| {
            priority_tiers.core == class || priority_tiers.tiers.iter().any(|tier| tier == class)
        };
        if let Some(priority_tiers) = self.factory.priority_tiers.as_ref().filter(has) {
            let shorter = priority_tiers.without(class);
            let instead = match &shorter {
                Some(PriorityTiers { core, tiers }) => {
                    format!("workers have {core} or {}", tiers.join(", "))
                }
                None => "workers have no class by place".into(),
            };
            let words = format!(
                "{no_class} in this cluster (see manifests/priorityclasses.yaml): {instead}"
            );
            warn!("{words}");
            let _ = self.happen.send((launch, Happening::Waits(Wait::Answer(Some(words)))));
            self.factory.priority_tiers = shorter;
        }
        self.create(launch);
    }

    fn on_change(&mut self, change: Change<Pod>) {
        match change {
            Change::Forbidden(message) => warn!(message, "the workers' pods can't be watched"),
            Change::Deleted(pod) => {
                if let Some(launch) = self.launch_of(&pod) {
                    // Its last form may say more than that it is gone.
                    let end = match classify(&pod) {
                        Verdict::Ended(end) | Verdict::Terminating(Termination { end, .. }) => end,
                        _ => vanished(),
                    };
                    self.on_end(launch, &pod, end);
                }
            }
            Change::Listed(asked, uids) => {
                let is_gone = |launched: &ActiveLaunch| match &launched.pod {
                    Some((uid, Some(known))) => *known < asked && !uids.contains(uid),
                    _ => false,
                };
                let gone: Vec<_> = self
                    .launches
                    .iter()
                    .filter(|(_, l)| is_gone(l))
                    .map(|(&launch, _)| launch)
                    .collect();
                for launch in gone {
                    let name = self.name_of_launch(launch);
                    self.report(Cause::Deleted, &name, &vanished().detail);
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
            Verdict::Created => self.say(launch, Happening::Waits(Wait::Answer(None))),
            Verdict::CannotStart(why) => self.say(launch, Happening::Waits(Wait::Start(Some(why)))),
            Verdict::Unschedulable(why) => self.on_unschedulable(launch, pod, why),
            Verdict::Starting => self.say(launch, Happening::Waits(Wait::Start(None))),
            Verdict::Terminating(leave) => self.on_terminating(launch, pod, leave),
            Verdict::Running => {
                self.has_run.store(true, Ordering::Relaxed);
                self.stuck = 0;
                self.say(launch, Happening::Runs);
            }
            Verdict::Ended(end) => {
                self.on_end(launch, pod, end);
                if has_running_sidecar(pod) {
                    // Companions of the worker that don't end by themselves.
                    self.delete(name_of(pod), pod.metadata.uid.clone().unwrap_or_default());
                } else if pod.metadata.deletion_timestamp.is_none() {
                    self.keep(pod);
                }
            }
        }
    }

    fn on_unschedulable(&mut self, launch: LaunchId, pod: &Pod, why: String) {
        let waits = Happening::Waits(Wait::Room(why.clone()));
        let is_known = self.launches.get(&launch).is_none_or(|l| l.said.as_ref() == Some(&waits));
        if !is_known {
            self.recorder.record("Unschedulable", format!("worker pod {}: {why}", name_of(pod)));
        }
        self.say(launch, waits);
    }

    fn on_terminating(&mut self, launch: LaunchId, pod: &Pod, leave: Termination) {
        let words = leave.end.detail.clone();
        let is_unexplained = leave.end.cause == Cause::Deleted;
        let Some(launched) = self.launches.get_mut(&launch) else { return };
        let since = launched.terminating.as_ref().map(|(since, _)| *since);
        launched.terminating = Some((since.unwrap_or_else(Instant::now), leave));
        if since.is_none() && is_unexplained {
            self.note_unexplained(launch, pod);
        }
        self.say(launch, Happening::Leaves(words));
    }

    /// A launch has ended as its pod says.
    fn on_end(&mut self, launch: LaunchId, pod: &Pod, mut end: End) {
        let launched = self.launches.get_mut(&launch);
        let (was_terminating, preempted) =
            launched.map_or((false, None), |l| (l.terminating.is_some(), l.preempted.take()));
        match preempted {
            // It has been told of already.
            Some(words) => end = End { cause: Cause::Preempted, detail: words },
            None if end.cause == Cause::Deleted => {
                if !was_terminating {
                    self.note_unexplained(launch, pod);
                }
            }
            None => self.report(end.cause, &name_of(pod), &end.detail),
        }
        self.ended(launch, exit_of(end));
    }

    fn report(&self, cause: Cause, name: &str, detail: &str) {
        if let Some(reason) = events::reason_of(cause) {
            self.recorder.record(reason, format!("worker pod {name}: {detail}"));
        }
    }

    /// Retry was it deleted? The scheduler of a server before 1.26 says so in an Event, after the
    /// deletion.
    fn note_unexplained(&mut self, launch: LaunchId, pod: &Pod) {
        let uid = pod.metadata.uid.clone().unwrap_or_default();
        self.unexplained.push(UnexplainedDeletion {
            launch,
            name: name_of(pod),
            uid,
            seen: Instant::now(),
        });
    }

    /// Asks once, for all whose time has come.
    fn investigate_deletions(&mut self) {
        let (asked, later) = std::mem::take(&mut self.unexplained)
            .into_iter()
            .partition::<Vec<_>, _>(|pod| pod.seen.elapsed() >= EVENT_DELAY);
        self.unexplained = later;
        if !asked.is_empty() {
            let events = self.events.clone();
            self.calls.spawn(async move {
                let preemptors = events::preemptors(&events).await;
                CallResult::Explained(asked, preemptors)
            });
        }
    }

    fn on_explained(
        &mut self,
        asked: Vec<UnexplainedDeletion>,
        preemptors: &BTreeMap<String, String>,
    ) {
        for UnexplainedDeletion { launch, name, uid, .. } in asked {
            match preemptors.get(&uid) {
                Some(words) => {
                    let words = words
                        .strip_prefix("Preempted ")
                        .map_or_else(|| words.clone(), |w| format!("preempted {w}"));
                    info!(
                        launch = launch.0,
                        pod = name,
                        words,
                        "a deleted worker pod was preempted"
                    );
                    self.report(Cause::Preempted, &name, &words);
                    let _ = self.happen.send((launch, Happening::Explained(words.clone())));
                    if let Some(launched) = self.launches.get_mut(&launch) {
                        launched.preempted = Some(words);
                    }
                }
                None => self.report(Cause::Deleted, &name, "it was deleted"),
            }
        }
    }

    /// The launch whose own pod this is, if it has not ended.
    fn launch_of(&mut self, pod: &Pod) -> Option<LaunchId> {
        let label = pod.metadata.labels.as_ref()?.get(LAUNCH_LABEL)?;
        let launch = LaunchId(label.parse().ok()?);
        let is_named_so = name_of(pod) == self.name_of_launch(launch);
        let launched = self.launches.get_mut(&launch)?;
        let uid = pod.metadata.uid.clone()?;
        match &launched.pod {
            Some((known, _)) => (*known == uid).then_some(launch),
            // The watch was faster than the answer. Names are used once, so the name tells.
            None => is_named_so.then(|| {
                launched.pod = Some((uid, None));
                launch
            }),
        }
    }

    fn name_of_launch(&self, launch: LaunchId) -> String {
        objects::worker_name(self.factory.anchor.name.as_deref().unwrap_or_default(), launch)
    }

    /// Says it, unless that is what was said last.
    fn say(&mut self, launch: LaunchId, happening: Happening) {
        let Some(launched) = self.launches.get_mut(&launch) else { return };
        if launched.said.as_ref() != Some(&happening) {
            launched.said = Some(happening.clone());
            let _ = self.happen.send((launch, happening));
        }
    }

    fn ended(&mut self, launch: LaunchId, exit: Exit) {
        if let Some(launched) = self.launches.remove(&launch) {
            launched.cancelled.store(true, Ordering::Relaxed);
            info!(launch = launch.0, ?exit, "worker pod ended");
            let _ = self.happen.send((launch, Happening::Ended(exit)));
        }
    }

    /// Ends one that need not end by itself. Where it has a node, a moment is waited: most are
    /// killed because they have ended, which the cluster tells a little later, as it tells late
    /// that they run, and how they did is worth to be known.
    fn kill_soon(&mut self, launch: LaunchId) {
        let waits = |l: &ActiveLaunch| {
            matches!(l.said, Some(Happening::Waits(Wait::Answer(_) | Wait::Room(_))))
        };
        let has_node = |l: &ActiveLaunch| l.pod.is_some() && !waits(l);
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
        self.ended(launch, Exit::Taken(why.into()));
    }

    /// Keeps an ended pod for its logs, and sweeps up one that has been kept for longest.
    fn keep(&mut self, pod: &Pod) {
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

fn exit_of(end: End) -> Exit {
    match end.cause {
        Cause::Exited(code) => Exit::Code(code),
        Cause::Signalled(signal) => Exit::Signal(signal),
        Cause::OutOfMemory | Cause::OverLimit => Exit::OverLimit(format!(
            "{}; --worker-resources sets what a worker may use",
            end.detail
        )),
        _ => Exit::Taken(end.detail),
    }
}

fn name_of(pod: &Pod) -> String {
    pod.metadata.name.clone().unwrap_or_default()
}

const END_TIMEOUT: Duration = Duration::from_secs(5);
/// Kubelets look once a second at what has ended.
const END_WAIT: Duration = Duration::from_secs(2);
/// How long after a deletion the scheduler may take to say that it was its own.
const EVENT_DELAY: Duration = Duration::from_secs(2);
/// The shortest that a kubelet obeys.
const KILL_GRACE_S: u32 = 1;
/// Pods that have ended and are kept.
const RETAINED_PODS_MAX: usize = 16;
const TICK: Duration = Duration::from_secs(1);

#[cfg(test)]
mod scenarios;
#[cfg(test)]
mod tests;
