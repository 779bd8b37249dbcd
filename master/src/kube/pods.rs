//! Workers as pods.
//!
//! ```text
//!  master's task ──start, kill──► this task ──create, delete──► API server
//!                ◄──happenings───           ◄──────watch───────
//! ```
//!
//! One task owns what is known of the launches. Calls run beside it, each until it is answered for good, so that thirty
//! workers that are lost at once are replaced in parallel, and a server that is away for a while costs nothing but time.
//!
//! **Invariants:** a launch ends once, by the verdict on its own pod, known by uid; what another pod of that name does is
//! not looked at. A pod that is being deleted is gone.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Api;
use kube::api::{DeleteParams, ListParams, PostParams, Preconditions};
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, timeout};
use tracing::{info, warn};

use super::client::{Cluster, ClusterError, is_code, is_quota};
use super::objects::{self, LAUNCH_LABEL};
use super::verdict::{Cause, End, Verdict, judge, vanished};
use super::watch::{Change, Selection, Watch, pause};
use crate::job::{Exit, LaunchId, Wait};
use crate::launches::Happening;

/// What workers' pods are made from.
#[derive(Clone, Debug)]
pub(crate) struct Mould {
    /// What they have in common.
    pub(crate) template: Pod,
    /// Their owner.
    pub(crate) anchor: ObjectMeta,
    /// Which master of the job this is, from 1.
    pub(crate) incarnation: u64,
    /// Where they find it, `host:port`.
    pub(crate) master: String,
}

/// The workers' pods of a job.
#[derive(Debug)]
pub(crate) struct Pods {
    orders: mpsc::UnboundedSender<Order>,
    happenings: mpsc::UnboundedReceiver<(LaunchId, Happening)>,
    task: JoinHandle<()>,
}

#[derive(Clone, Copy, Debug)]
enum Order {
    End,
    Kill(LaunchId),
    Start(LaunchId, u32),
}

impl Pods {
    /// Watches the job's pods from now on. Must be called within a runtime.
    pub(crate) fn new(cluster: &Cluster, mould: Mould) -> Self {
        let (orders, ordered) = mpsc::unbounded_channel();
        let (happen, happenings) = mpsc::unbounded_channel();
        let api: Api<Pod> = cluster.api();
        let uid = mould.anchor.uid.clone().unwrap_or_default();
        let labels = Some(objects::worker_selector(&uid));
        let watch = Watch::start(api.clone(), Selection { labels, fields: None });
        let foreman = Foreman {
            api,
            mould,
            launches: BTreeMap::new(),
            remains: VecDeque::new(),
            calls: JoinSet::new(),
            happen,
        };
        Self { orders, happenings, task: tokio::spawn(foreman.run(ordered, watch)) }
    }

    pub(crate) fn start(&self, launch: LaunchId, index: u32) {
        // The task ends only with this.
        let _ = self.orders.send(Order::Start(launch, index));
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

/// Deletes all workers' pods of a job: those that a master before this one has left.
pub(crate) async fn sweep(cluster: &Cluster, anchor_uid: &str) -> Result<(), ClusterError> {
    let api: Api<Pod> = cluster.api();
    let doing = "remove the workers of the job's last master";
    let params = ListParams::default().labels(&objects::worker_selector(anchor_uid));
    let left = api.list(&params).await.map_err(|error| cluster.explain(doing, error))?;
    for pod in left.items.iter().filter(|pod| !matches!(judge(pod), Verdict::Ended(_))) {
        info!(pod = name_of(pod), "a worker of the job's last master is deleted");
        match api.delete(&name_of(pod), &DeleteParams::default().grace_period(KILL_GRACE_S)).await {
            Err(error) if !is_code(&error, 404) => return Err(cluster.explain(doing, error)),
            _ => {}
        }
    }
    Ok(())
}

impl Drop for Pods {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The task.
struct Foreman {
    api: Api<Pod>,
    mould: Mould,
    /// Those that have not ended.
    launches: BTreeMap<LaunchId, Launched>,
    /// Pods that have ended, oldest first: kept for their logs, but not all of them.
    remains: VecDeque<(String, String)>,
    calls: JoinSet<Answer>,
    happen: mpsc::UnboundedSender<(LaunchId, Happening)>,
}

/// A launch that has not ended.
#[derive(Debug, Default)]
struct Launched {
    /// Its pod, once it is made: uid, and when that was known.
    pod: Option<(String, Option<Instant>)>,
    /// Since when it can't start, and why.
    stuck: Option<(Instant, String)>,
    /// What was said of it last.
    said: Option<Happening>,
    /// Its creation is not to be tried again.
    unwanted: Arc<AtomicBool>,
}

/// What a call came to.
#[derive(Debug)]
enum Answer {
    Created(LaunchId, Result<Box<Pod>, String>),
    Deleted,
}

impl Foreman {
    async fn run(mut self, mut orders: mpsc::UnboundedReceiver<Order>, mut watch: Watch<Pod>) {
        let mut ticks = tokio::time::interval(TICK);
        loop {
            tokio::select! {
                order = orders.recv() => match order {
                    Some(Order::Start(launch, _index)) => self.create(launch),
                    Some(Order::Kill(launch)) => self.kill(launch, "it is not wanted any more"),
                    Some(Order::End) => break,
                    None => return,
                },
                change = watch.next() => self.on_change(change),
                Some(answer) = self.calls.join_next() => {
                    if let Answer::Created(launch, made) = answer.expect("a call neither panics nor is aborted") {
                        self.on_created(launch, made);
                    }
                }
                _ = ticks.tick() => self.give_up_stuck(),
            }
        }
        let left: Vec<_> = self.launches.keys().copied().collect();
        for launch in left {
            self.kill(launch, "the job is over");
        }
        while let Some(answer) = self.calls.join_next().await {
            if let Ok(Answer::Created(_, Ok(pod))) = answer {
                self.delete(name_of(&pod), pod.metadata.uid.unwrap_or_default());
            }
        }
    }

    fn create(&mut self, launch: LaunchId) {
        let Mould { template, anchor, incarnation, master } = &self.mould;
        let pod = objects::worker_pod(template, launch, *incarnation, anchor, master);
        let launched = Launched::default();
        let unwanted = Arc::clone(&launched.unwanted);
        let owner = anchor.uid.clone().unwrap_or_default();
        self.launches.insert(launch, launched);
        self.say(launch, Happening::Waits(Wait::Answer(None)));
        let (api, happen) = (self.api.clone(), self.happen.clone());
        self.calls.spawn(async move {
            let mut failures = 0;
            let made = loop {
                if unwanted.load(Ordering::Relaxed) {
                    break Err("it is not wanted any more".into());
                }
                let error = match api.create(&PostParams::default(), &pod).await {
                    Ok(made) => break Ok(Box::new(made)),
                    Err(error) if is_code(&error, 409) => match made_before(&api, &pod, &owner).await {
                        Some(outcome) => break outcome,
                        None => error,
                    },
                    Err(error) => error,
                };
                match is_final(&error) {
                    Finality::Final(why) => break Err(why),
                    Finality::Later(why) => {
                        if failures == 0 || why.is_quota {
                            let wait = match why.is_quota {
                                true => Wait::Room(why.text),
                                false => Wait::Answer(Some(why.text)),
                            };
                            let _ = happen.send((launch, Happening::Waits(wait)));
                        }
                        let pause =
                            pause(failures).max(if why.is_quota { QUOTA_PAUSE } else { Duration::ZERO });
                        failures += 1;
                        tokio::time::sleep(pause).await;
                    }
                }
            };
            Answer::Created(launch, made)
        });
    }

    fn on_created(&mut self, launch: LaunchId, made: Result<Box<Pod>, String>) {
        match (made, self.launches.get_mut(&launch)) {
            (Ok(pod), Some(launched)) => {
                info!(launch = launch.0, pod = name_of(&pod), "worker pod created");
                // The watch may have shown it already.
                let uid = pod.metadata.uid.unwrap_or_default();
                launched.pod.get_or_insert((uid, None)).1 = Some(Instant::now());
            }
            (Err(why), Some(_)) => self.ended(launch, Exit::NotStarted(why)),
            // It was killed meanwhile.
            (Ok(pod), None) => self.delete(name_of(&pod), pod.metadata.uid.unwrap_or_default()),
            (Err(_), None) => {}
        }
    }

    fn on_change(&mut self, change: Change<Pod>) {
        match change {
            Change::Forbidden(message) => warn!(message, "the workers' pods can't be watched"),
            Change::Gone(pod) => {
                if let Some(launch) = self.launch_of(&pod) {
                    // Its last form may say more than that it is gone.
                    let end = match judge(&pod) {
                        Verdict::Ended(end) => end,
                        _ => vanished(),
                    };
                    self.ended(launch, exit_of(end));
                }
            }
            Change::Listed(asked, uids) => {
                let is_gone = |launched: &Launched| match &launched.pod {
                    Some((uid, Some(known))) => *known < asked && !uids.contains(uid),
                    _ => false,
                };
                let gone: Vec<_> =
                    self.launches.iter().filter(|(_, l)| is_gone(l)).map(|(&launch, _)| launch).collect();
                for launch in gone {
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
                launched.stuck.get_or_insert_with(|| (Instant::now(), String::new())).1.clone_from(why);
            }
            _ => launched.stuck = None,
        }
        match verdict {
            Verdict::Asked => self.say(launch, Happening::Waits(Wait::Answer(None))),
            Verdict::CannotStart(why) => self.say(launch, Happening::Waits(Wait::Start(Some(why)))),
            Verdict::WaitsForRoom(why) => self.say(launch, Happening::Waits(Wait::Room(why))),
            Verdict::Starts => self.say(launch, Happening::Waits(Wait::Start(None))),
            Verdict::Runs => self.say(launch, Happening::Runs),
            Verdict::Ended(end) => {
                let is_deleted = pod.metadata.deletion_timestamp.is_some();
                self.ended(launch, exit_of(end));
                if !is_deleted {
                    self.keep(pod);
                }
            }
        }
    }

    /// The launch whose own pod this is, if it has not ended.
    fn launch_of(&mut self, pod: &Pod) -> Option<LaunchId> {
        let label = pod.metadata.labels.as_ref()?.get(LAUNCH_LABEL)?;
        let launch = LaunchId(label.parse().ok()?);
        let is_named_so = pod.metadata.name == self.name_of_launch(launch);
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

    fn name_of_launch(&self, launch: LaunchId) -> Option<String> {
        let Mould { template, anchor, incarnation, master } = &self.mould;
        objects::worker_pod(template, launch, *incarnation, anchor, master).metadata.name
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

    fn kill(&mut self, launch: LaunchId, why: &str) {
        let pod = self.launches.get(&launch).and_then(|launched| launched.pod.clone());
        if let (Some((uid, _)), Some(name)) = (pod, self.name_of_launch(launch)) {
            self.delete(name, uid);
        }
        self.ended(launch, Exit::Taken(why.into()));
    }

    /// Deletes those that have been unable to start for too long: another may do better, on another node.
    fn give_up_stuck(&mut self) {
        let is_stuck =
            |l: &Launched| l.stuck.as_ref().filter(|(since, _)| since.elapsed() >= STUCK_MAX).cloned();
        let stuck: Vec<_> = self.launches.iter().filter_map(|(&id, l)| Some((id, is_stuck(l)?.1))).collect();
        for (launch, why) in stuck {
            let pod = self.launches.get(&launch).and_then(|launched| launched.pod.clone());
            if let (Some((uid, _)), Some(name)) = (pod, self.name_of_launch(launch)) {
                self.delete(name, uid);
            }
            self.ended(launch, Exit::NotStarted(why));
        }
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

    /// Deletes this very pod, however long the server takes to hear of it.
    fn delete(&mut self, name: String, uid: String) {
        let api = self.api.clone();
        self.calls.spawn(async move {
            let params = DeleteParams {
                grace_period_seconds: Some(KILL_GRACE_S),
                preconditions: Some(Preconditions { uid: Some(uid), resource_version: None }),
                ..DeleteParams::default()
            };
            let mut failures = 0;
            while let Err(error) = api.delete(&name, &params).await {
                // Gone, or another's by now; or refused for good.
                if matches!(&error, kube::Error::Api(status) if (400..500).contains(&status.code) && status.code != 429) {
                    if !is_code(&error, 404) && !is_code(&error, 409) {
                        warn!(name, %error, "a worker's pod can't be deleted");
                    }
                    break;
                }
                tokio::time::sleep(pause(failures)).await;
                failures += 1;
            }
            Answer::Deleted
        });
    }
}

/// The name is taken: by this very launch, if an answer of the server's was lost. `None`: look again.
async fn made_before(api: &Api<Pod>, wanted: &Pod, owner: &str) -> Option<Result<Box<Pod>, String>> {
    let name = name_of(wanted);
    let there = api.get_opt(&name).await.ok()??;
    let owners = there.metadata.owner_references.iter().flatten();
    let launch = |pod: &Pod| pod.metadata.labels.as_ref().and_then(|l| l.get(LAUNCH_LABEL)).cloned();
    let is_ours = owners.map(|o| o.uid.as_str()).any(|uid| uid == owner) && launch(&there) == launch(wanted);
    Some(if is_ours {
        Ok(Box::new(there))
    } else {
        Err(format!("a pod {name} is there already, and not this job's"))
    })
}

/// Whether to try again.
enum Finality {
    Final(String),
    Later(Why),
}

struct Why {
    text: String,
    is_quota: bool,
}

fn is_final(error: &kube::Error) -> Finality {
    match error {
        kube::Error::Api(status) if status.code == 403 && is_quota(&status.message) => {
            Finality::Later(Why { text: status.message.clone(), is_quota: true })
        }
        kube::Error::Api(status)
            if (400..500).contains(&status.code) && ![408, 409, 429].contains(&status.code) =>
        {
            Finality::Final(status.message.clone())
        }
        error => Finality::Later(Why {
            text: format!("the API server can't be reached: {error}"),
            is_quota: false,
        }),
    }
}

fn exit_of(end: End) -> Exit {
    match end.cause {
        Cause::Exited(code) => Exit::Code(code),
        Cause::Signalled(signal) => Exit::Signal(signal),
        Cause::OverLimit => {
            Exit::OverLimit(format!("{}; --worker-resources sets what a worker may use", end.detail))
        }
        Cause::Deleted | Cause::Lost | Cause::Refused | Cause::Taken => Exit::Taken(end.detail),
    }
}

fn name_of(pod: &Pod) -> String {
    pod.metadata.name.clone().unwrap_or_default()
}

const END_TIMEOUT: Duration = Duration::from_secs(5);
/// The shortest that a kubelet obeys.
const KILL_GRACE_S: u32 = 1;
/// How often a pod that no quota leaves room for is tried again.
const QUOTA_PAUSE: Duration = Duration::from_secs(5);
/// Pods that have ended and are kept.
const REMAINS_MAX: usize = 16;
/// How long a pod may be unable to start.
const STUCK_MAX: Duration = Duration::from_secs(20);
const TICK: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests;
