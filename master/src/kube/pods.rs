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
mod patience;

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

use self::calls::{Counter, Known, Made};
use super::client::{Cluster, ClusterError};
use super::events::{self, Recorder};
use super::ladder::Ladder;
use super::lease::Warrant;
use super::objects::{self, LAUNCH_LABEL};
use super::verdict::{Cause, End, Leave, Verdict, is_outlived, judge, vanished};
use super::watch::{Change, Selection, Watch};
use crate::job::{Exit, LaunchId, Wait};
use crate::launches::Happening;

/// What workers' pods are made from.
#[derive(Clone, Debug)]
pub(crate) struct Mould {
    /// What they have in common.
    pub(crate) template: Pod,
    /// Their owner.
    pub(crate) anchor: ObjectMeta,
    /// Where they find it, `host:port`.
    pub(crate) master: String,
    /// The least number of workers: the job's core.
    pub(crate) min_workers: u32,
    /// Their priority classes by place, unless all have the template's.
    pub(crate) ladder: Option<Ladder>,
}

/// The workers' pods of a job.
#[derive(Debug)]
pub(crate) struct Pods {
    orders: mpsc::UnboundedSender<Order>,
    happenings: mpsc::UnboundedReceiver<(LaunchId, Happening)>,
    task: JoinHandle<()>,
}

#[derive(Clone, Debug)]
enum Order {
    /// A launch of a master before this one, and its pod, if that is there.
    Adopt(LaunchId, Option<Box<Pod>>),
    End,
    HasTrained,
    Kill(LaunchId),
    Remove(Box<Pod>),
    Start(LaunchId, u32),
}

impl Pods {
    /// Watches the job's pods from now on; makes and deletes them while the warrant holds. Must be
    /// called within a runtime.
    pub(crate) fn new(
        cluster: &Cluster,
        mould: Mould,
        warrant: Warrant,
        recorder: Recorder,
    ) -> Self {
        let (orders, ordered) = mpsc::unbounded_channel();
        let (happen, happenings) = mpsc::unbounded_channel();
        let api: Api<Pod> = cluster.api();
        let uid = mould.anchor.uid.clone().unwrap_or_default();
        let labels = Some(objects::worker_selector(&uid));
        let watch = Watch::start(api.clone(), Selection { labels, fields: None });
        let foreman = Foreman {
            counter: Counter::new(api, warrant),
            events: cluster.api(),
            recorder,
            mould,
            launches: BTreeMap::new(),
            remains: VecDeque::new(),
            unexplained: Vec::new(),
            calls: JoinSet::new(),
            happen,
            has_run: Arc::default(),
            stuck: 0,
        };
        Self { orders, happenings, task: tokio::spawn(foreman.run(ordered, watch)) }
    }

    pub(crate) fn start(&self, launch: LaunchId, index: u32) {
        // The task ends only with this.
        let _ = self.orders.send(Order::Start(launch, index));
    }

    /// Takes over one that another master has started; what is known of its end is told as of any
    /// other's.
    pub(crate) fn adopt(&self, launch: LaunchId, pod: Option<Pod>) {
        let _ = self.orders.send(Order::Adopt(launch, pod.map(Box::new)));
    }

    /// Deletes a pod that is no launch's any more.
    pub(crate) fn remove(&self, pod: Pod) {
        let _ = self.orders.send(Order::Remove(Box::new(pod)));
    }

    /// A worker of the job has run before this master: what keeps others from starting is not the
    /// user's doing.
    pub(crate) fn has_trained(&self) {
        let _ = self.orders.send(Order::HasTrained);
    }

    pub(crate) fn kill(&self, launch: LaunchId) {
        let _ = self.orders.send(Order::Kill(launch));
    }

    pub(crate) async fn next(&mut self) -> (LaunchId, Happening) {
        match self.happenings.recv().await {
            Some(happening) => happening,
            None => std::future::pending().await,
        }
    }

    /// Deletes the pods that have not ended.
    pub(crate) async fn end(mut self) {
        let _ = self.orders.send(Order::End);
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
struct Foreman {
    counter: Counter,
    events: Api<Event>,
    recorder: Recorder,
    mould: Mould,
    /// Those that have not ended.
    launches: BTreeMap<LaunchId, Launched>,
    /// Pods that have ended, oldest first: kept for their logs, but not all of them.
    remains: VecDeque<(String, String)>,
    /// Pods that were deleted, and nobody has said why yet.
    unexplained: Vec<Unexplained>,
    calls: JoinSet<Answer>,
    happen: mpsc::UnboundedSender<(LaunchId, Happening)>,
    /// A worker of the job has run: image, configuration and rights are good, so what keeps a pod
    /// from starting is the cluster's trouble, and is waited for.
    has_run: Arc<AtomicBool>,
    /// Pods in a row that were unable to start.
    stuck: u32,
}

/// A launch that has not ended.
#[derive(Debug, Default)]
struct Launched {
    /// Its place among the job's workers.
    index: u32,
    /// The class that the ladder gave it.
    class: Option<String>,
    /// Its pod, once it is made: uid, and when that was known.
    pod: Option<(String, Option<Instant>)>,
    /// Since when it can't start, and why.
    stuck: Option<(Instant, String)>,
    /// Since when it is being deleted while its program runs.
    leaving: Option<(Instant, Leave)>,
    /// By whom it was preempted, if the scheduler has said so.
    preempted: Option<String>,
    /// What was said of it last.
    said: Option<Happening>,
    /// Its creation is not to be tried again.
    unwanted: Arc<AtomicBool>,
}

/// A deletion whose reason may yet be told.
#[derive(Debug)]
struct Unexplained {
    launch: LaunchId,
    name: String,
    uid: String,
    seen: Instant,
}

/// What a call came to.
#[derive(Debug)]
enum Answer {
    Created(LaunchId, Made),
    Deleted,
    /// It has had the time to end by itself.
    Doomed(LaunchId),
    /// What the scheduler has said about preempted pods, by uid.
    Explained(Vec<Unexplained>, BTreeMap<String, String>),
}

impl Foreman {
    async fn run(mut self, mut orders: mpsc::UnboundedReceiver<Order>, mut watch: Watch<Pod>) {
        let mut ticks = tokio::time::interval(TICK);
        loop {
            tokio::select! {
                order = orders.recv() => match order {
                    Some(Order::Start(launch, index)) => {
                        self.launches.insert(launch, Launched { index, ..Launched::default() });
                        self.say(launch, Happening::Waits(Wait::Answer(None)));
                        self.create(launch);
                    }
                    Some(Order::Adopt(launch, pod)) => self.adopt(launch, pod.as_deref()),
                    Some(Order::HasTrained) => self.has_run.store(true, Ordering::Relaxed),
                    Some(Order::Kill(launch)) => self.kill_soon(launch),
                    Some(Order::Remove(pod)) => {
                        info!(pod = name_of(&pod), "a pod of no launch is deleted");
                        self.delete(name_of(&pod), pod.metadata.uid.unwrap_or_default());
                    }
                    Some(Order::End) => break,
                    None => return,
                },
                change = watch.next() => self.on_change(change),
                Some(answer) = self.calls.join_next() => {
                    match answer.expect("a call neither panics nor is aborted") {
                        Answer::Created(launch, made) => self.on_created(launch, made),
                        Answer::Deleted => {}
                        Answer::Doomed(launch) => self.kill(launch, "it is not wanted any more"),
                        Answer::Explained(asked, preemptors) => self.on_explained(asked, &preemptors),
                    }
                }
                _ = ticks.tick() => {
                    self.give_up_stuck();
                    self.give_up_leaving();
                    self.ask_why();
                }
            }
        }
        let left: Vec<_> = self.launches.keys().copied().collect();
        for launch in left {
            self.kill(launch, "the job is over");
        }
        while let Some(answer) = self.calls.join_next().await {
            if let Ok(Answer::Created(_, Made::Pod(pod))) = answer {
                self.delete(name_of(&pod), pod.metadata.uid.unwrap_or_default());
            }
        }
    }

    fn adopt(&mut self, launch: LaunchId, pod: Option<&Pod>) {
        self.launches.insert(launch, Launched::default());
        let Some(pod) = pod else { return self.ended(launch, exit_of(vanished())) };
        let class = pod.spec.as_ref().and_then(|spec| spec.priority_class_name.clone());
        if let (Some(launched), Some(uid)) = (self.launches.get_mut(&launch), &pod.metadata.uid) {
            launched.index = objects::launch_and_index(pod).map_or(0, |(_, index)| index);
            launched.class.clone_from(&class);
            launched.pod = Some((uid.clone(), Some(Instant::now())));
        }
        info!(launch = launch.0, pod = name_of(pod), "worker pod taken over");
        let _ = self.happen.send((launch, Happening::Made(class)));
        self.on_seen(pod);
    }

    fn create(&mut self, launch: LaunchId) {
        let Some(launched) = self.launches.get_mut(&launch) else { return };
        let Mould { template, anchor, master, min_workers, ladder } = &self.mould;
        let mut pod = objects::worker_pod(template, launch, launched.index, anchor, master);
        launched.class =
            ladder.as_ref().map(|ladder| ladder.class(launched.index, *min_workers).into());
        if launched.class.is_some() {
            pod.spec.get_or_insert_default().priority_class_name.clone_from(&launched.class);
        }
        let unwanted = Arc::clone(&launched.unwanted);
        let (owner, has_run) = (anchor.uid.clone().unwrap_or_default(), Arc::clone(&self.has_run));
        let (counter, happen, recorder) =
            (self.counter.clone(), self.happen.clone(), self.recorder.clone());
        self.calls.spawn(async move {
            let tell = |wait: Wait| {
                if let Wait::Room(why) = &wait {
                    recorder.record("QuotaExceeded", why.clone());
                }
                let _ = happen.send((launch, Happening::Waits(wait)));
            };
            let known = Known { owner: &owner, unwanted: &unwanted, has_run: &has_run };
            Answer::Created(launch, counter.create(&pod, known, tell).await)
        });
    }

    fn on_created(&mut self, launch: LaunchId, made: Made) {
        match (made, self.launches.get_mut(&launch)) {
            (Made::Pod(pod), Some(launched)) => {
                info!(launch = launch.0, pod = name_of(&pod), "worker pod created");
                // The watch may have shown it already.
                let uid = pod.metadata.uid.unwrap_or_default();
                launched.pod.get_or_insert((uid, None)).1 = Some(Instant::now());
                let class = pod.spec.and_then(|spec| spec.priority_class_name);
                let _ = self.happen.send((launch, Happening::Made(class)));
            }
            (Made::Classless(class), Some(_)) => self.without_class(launch, &class),
            (Made::Refused(why), Some(_)) => self.ended(launch, Exit::NotStarted(why)),
            // It was killed meanwhile.
            (Made::Pod(pod), None) => {
                self.delete(name_of(&pod), pod.metadata.uid.unwrap_or_default())
            }
            (Made::Classless(_) | Made::Nothing | Made::Refused(_), _) => {}
        }
    }

    /// The cluster has no such class. The ladder is shortened, once for all launches, and this one
    /// asked for again.
    fn without_class(&mut self, launch: LaunchId, class: &str) {
        let no_class = format!("there is no priority class {class}");
        let asked = self.launches.get(&launch).and_then(|launched| launched.class.as_deref());
        if asked != Some(class) {
            // The user's own word, or somebody else's who changes pods on their way.
            return self.ended(launch, Exit::NotStarted(no_class));
        }
        // Another launch may have shortened it meanwhile.
        let has = |ladder: &&Ladder| {
            ladder.core == class || ladder.rungs.iter().any(|rung| rung == class)
        };
        if let Some(ladder) = self.mould.ladder.as_ref().filter(has) {
            let shorter = ladder.without(class);
            let instead = match &shorter {
                Some(Ladder { core, rungs }) => {
                    format!("workers have {core} or {}", rungs.join(", "))
                }
                None => "workers have no class by place".into(),
            };
            let words = format!(
                "{no_class} in this cluster (see manifests/priorityclasses.yaml): {instead}"
            );
            warn!("{words}");
            let _ = self.happen.send((launch, Happening::Waits(Wait::Answer(Some(words)))));
            self.mould.ladder = shorter;
        }
        self.create(launch);
    }

    fn on_change(&mut self, change: Change<Pod>) {
        match change {
            Change::Forbidden(message) => warn!(message, "the workers' pods can't be watched"),
            Change::Gone(pod) => {
                if let Some(launch) = self.launch_of(&pod) {
                    // Its last form may say more than that it is gone.
                    let end = match judge(&pod) {
                        Verdict::Ended(end) | Verdict::Leaves(Leave { end, .. }) => end,
                        _ => vanished(),
                    };
                    self.on_end(launch, &pod, end);
                }
            }
            Change::Listed(asked, uids) => {
                let is_gone = |launched: &Launched| match &launched.pod {
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
            Change::Seen(pod) => self.on_seen(&pod),
        }
    }

    fn on_seen(&mut self, pod: &Pod) {
        let Some(launch) = self.launch_of(pod) else { return };
        let launched = self.launches.get_mut(&launch).expect("the launch was just found");
        let verdict = judge(pod);
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
            Verdict::Asked => self.say(launch, Happening::Waits(Wait::Answer(None))),
            Verdict::CannotStart(why) => self.say(launch, Happening::Waits(Wait::Start(Some(why)))),
            Verdict::WaitsForRoom(why) => self.on_no_room(launch, pod, why),
            Verdict::Starts => self.say(launch, Happening::Waits(Wait::Start(None))),
            Verdict::Leaves(leave) => self.on_leaves(launch, pod, leave),
            Verdict::Runs => {
                self.has_run.store(true, Ordering::Relaxed);
                self.stuck = 0;
                self.say(launch, Happening::Runs);
            }
            Verdict::Ended(end) => {
                self.on_end(launch, pod, end);
                if is_outlived(pod) {
                    // Companions of the worker that don't end by themselves.
                    self.delete(name_of(pod), pod.metadata.uid.clone().unwrap_or_default());
                } else if pod.metadata.deletion_timestamp.is_none() {
                    self.keep(pod);
                }
            }
        }
    }

    fn on_no_room(&mut self, launch: LaunchId, pod: &Pod, why: String) {
        let waits = Happening::Waits(Wait::Room(why.clone()));
        let is_known = self.launches.get(&launch).is_none_or(|l| l.said.as_ref() == Some(&waits));
        if !is_known {
            self.recorder.record("Unschedulable", format!("worker pod {}: {why}", name_of(pod)));
        }
        self.say(launch, waits);
    }

    fn on_leaves(&mut self, launch: LaunchId, pod: &Pod, leave: Leave) {
        let words = leave.end.detail.clone();
        let is_unexplained = leave.end.cause == Cause::Deleted;
        let Some(launched) = self.launches.get_mut(&launch) else { return };
        let since = launched.leaving.as_ref().map(|(since, _)| *since);
        launched.leaving = Some((since.unwrap_or_else(Instant::now), leave));
        if since.is_none() && is_unexplained {
            self.wonder(launch, pod);
        }
        self.say(launch, Happening::Leaves(words));
    }

    /// A launch has ended as its pod says.
    fn on_end(&mut self, launch: LaunchId, pod: &Pod, mut end: End) {
        let launched = self.launches.get_mut(&launch);
        let (was_leaving, preempted) =
            launched.map_or((false, None), |l| (l.leaving.is_some(), l.preempted.take()));
        match preempted {
            // It has been told of already.
            Some(words) => end = End { cause: Cause::Preempted, detail: words },
            None if end.cause == Cause::Deleted => {
                if !was_leaving {
                    self.wonder(launch, pod);
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

    /// Why was it deleted? The scheduler of a server before 1.26 says so in an Event, after the
    /// deletion.
    fn wonder(&mut self, launch: LaunchId, pod: &Pod) {
        let uid = pod.metadata.uid.clone().unwrap_or_default();
        self.unexplained.push(Unexplained {
            launch,
            name: name_of(pod),
            uid,
            seen: Instant::now(),
        });
    }

    /// Asks once, for all whose time has come.
    fn ask_why(&mut self) {
        let (asked, later) = std::mem::take(&mut self.unexplained)
            .into_iter()
            .partition::<Vec<_>, _>(|pod| pod.seen.elapsed() >= EVENT_DELAY);
        self.unexplained = later;
        if !asked.is_empty() {
            let events = self.events.clone();
            self.calls.spawn(async move {
                let preemptors = events::preemptors(&events).await;
                Answer::Explained(asked, preemptors)
            });
        }
    }

    fn on_explained(&mut self, asked: Vec<Unexplained>, preemptors: &BTreeMap<String, String>) {
        for Unexplained { launch, name, uid, .. } in asked {
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
        objects::worker_name(self.mould.anchor.name.as_deref().unwrap_or_default(), launch)
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
            launched.unwanted.store(true, Ordering::Relaxed);
            info!(launch = launch.0, ?exit, "worker pod ended");
            let _ = self.happen.send((launch, Happening::Ended(exit)));
        }
    }

    /// Ends one that need not end by itself. Where it has a node, a moment is waited: most are
    /// killed because they have ended, which the cluster tells a little later, as it tells late
    /// that they run, and how they did is worth to be known.
    fn kill_soon(&mut self, launch: LaunchId) {
        let waits = |l: &Launched| {
            matches!(l.said, Some(Happening::Waits(Wait::Answer(_) | Wait::Room(_))))
        };
        let has_node = |l: &Launched| l.pod.is_some() && !waits(l);
        if !self.launches.get(&launch).is_some_and(has_node) {
            return self.kill(launch, "it is not wanted any more");
        }
        self.calls.spawn(async move {
            tokio::time::sleep(END_WAIT).await;
            Answer::Doomed(launch)
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
        self.remains.push_back((name_of(pod), pod.metadata.uid.clone().unwrap_or_default()));
        if self.remains.len() > REMAINS_MAX
            && let Some((name, uid)) = self.remains.pop_front()
        {
            self.delete(name, uid);
        }
    }

    fn delete(&mut self, name: String, uid: String) {
        let counter = self.counter.clone();
        self.calls.spawn(async move {
            counter.delete(&name, uid, KILL_GRACE_S).await;
            Answer::Deleted
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
const REMAINS_MAX: usize = 16;
const TICK: Duration = Duration::from_secs(1);

#[cfg(test)]
mod scenarios;
#[cfg(test)]
mod tests;
