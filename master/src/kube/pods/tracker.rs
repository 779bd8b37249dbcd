//! What becomes of a job's worker pods. Pure: commands, changes of pods, results of calls and the
//! time in; actions out.
//!
//! ```text
//!   Start, Adopt ──▶ creating ──▶ waiting ──▶ running ──┬──▶ terminating ──▶ ended
//!                       │            │                  └──▶ ending ───────▶ ended
//!                       └── rejected └── stuck ──▶ ended
//! ```
//!
//! * *Stuck* is a pod that can't start. It ends when it has been stuck for too long.
//! * *Terminating* is a pod whose deletion is requested while its program runs. It ends with its
//!   program, or when its node has exceeded the time for that.
//! * *Ending* is a pod whose program has ended, while the cluster may still report why. It ends
//!   with that report, or shortly after.
//!
//! **Invariant:** a launch ends once, by the verdict on its own pod, identified by uid; another pod
//! of the same name is ignored.
//!
//! **Invariant:** no pod outlives its launch unless it has ended: a pod whose creation is confirmed
//! later is deleted. The last 16 ended pods are retained.

mod gangs;
mod pod_ref;
mod silent_nodes;
mod timeouts;
mod warnings;

#[cfg(test)]
pub(super) use self::timeouts::STUCK_MAX;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;

use self::gangs::{Gangs, Placement};
pub(super) use self::pod_ref::PodRef;
use super::calls::CreateOutcome;
use super::factory::PodFactory;
use crate::backend_event::BackendEvent;
use crate::job::{EXIT_MASTER_LOST, Exit, LaunchId, ReclaimCause, Wait};
use crate::kube::events::{self, PodWarning};
use crate::kube::objects::{self, LAUNCH_LABEL};
use crate::kube::priority_tiers::Weight;
use crate::kube::verdict::{
    Cause, End, Termination, Verdict, classify, exit_of, has_running_sidecar, output_tail,
    reclaim_cause, vanished,
};

/// The launches of a job, and the state of their pods.
#[derive(Debug)]
pub(super) struct PodTracker {
    factory: PodFactory,
    gangs: Gangs,
    /// Launches that have not ended.
    launches: BTreeMap<LaunchId, ActiveLaunch>,
    /// Ended pods that are retained for their logs; oldest first, at most [`RETAINED_PODS_MAX`].
    retained_pods: VecDeque<PodRef>,
    /// Deleted pods for whose deletion no reason is known yet.
    unexplained: Vec<UnexplainedDeletion>,
    /// Whether a worker of the job has run. Then image, configuration and permissions are valid, so
    /// a pod that can't start is a problem of the cluster, and is retried.
    has_run: bool,
    /// Number of consecutive pods that were unable to start.
    stuck: u32,
    /// Nodes that new pods avoid, and until when.
    avoided_nodes: BTreeMap<String, Duration>,
    /// When the cluster's warnings may be asked for again.
    warnings_due: Duration,
    now: Duration,
    actions: VecDeque<PodAction>,
}

/// What the tracker takes in.
#[derive(Clone, Debug)]
pub(super) enum PodEvent {
    /// A launch of an earlier master and its pod, if the pod exists.
    Adopt(LaunchId, Option<Box<Pod>>),
    /// A worker has failed on this node.
    Avoid(String),
    /// A pod is new, or has changed.
    Applied(Box<Pod>),
    /// From now on the first slots, of this number, are those of the core.
    Core(u32),
    Created(LaunchId, CreateOutcome),
    /// The creation of a launch's pod waits, and is tried again.
    CreationWaits(LaunchId, Wait),
    /// A pod was deleted; its last known content.
    Deleted(Box<Pod>),
    /// The job is over.
    End,
    /// Answer to [`PodAction::Investigate`]: the scheduler's messages about preempted pods, by uid.
    Explained(Vec<UnexplainedDeletion>, BTreeMap<String, String>),
    /// A worker of the job ran under an earlier master.
    HasTrained,
    Kill(LaunchId),
    /// A list, requested at this time, has returned exactly these uids.
    Listed(Duration, BTreeSet<String>),
    /// A pod that belongs to no launch.
    Remove(Box<Pod>),
    Start(LaunchId, u32),
    /// Answer to [`PodAction::ReadWarnings`].
    Warned(Vec<String>, BTreeMap<String, PodWarning>),
    /// Time has passed: comes every second, and at [`PodTracker::poll_timeout`].
    Tick,
    /// From now on the job has this weight.
    Weight(Weight),
}

/// What the tracker orders.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum PodAction {
    /// Stop trying to create the launch's pod.
    CancelCreation(LaunchId),
    Create(LaunchId, Box<Pod>),
    Delete(PodRef),
    /// Delete the PodGroup of a gang that is over.
    DeleteGroup(String),
    /// Read the scheduler's Events about these pods, in one call.
    Investigate(Vec<UnexplainedDeletion>),
    /// Read the warnings about the pods with these uids.
    ReadWarnings(Vec<String>),
    /// Find out where the node of a launch is.
    Locate(LaunchId, String),
    /// From now on a creation that the server rejects is tried again.
    NoteRun,
    /// Record an Event with this reason and message.
    RecordEvent(&'static str, String),
    Report(LaunchId, BackendEvent),
}

/// A deletion whose reason may become known later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct UnexplainedDeletion {
    launch: LaunchId,
    pod: PodRef,
    seen: Duration,
}

/// A launch that has not ended.
#[derive(Debug, Default)]
struct ActiveLaunch {
    /// Slot among the job's workers.
    slot: u32,
    /// Priority class that the tiers assign.
    class: Option<String>,
    /// Whether a call that creates its pod is under way.
    is_creating: bool,
    /// Uid of its pod once it exists, and when the creation was confirmed.
    pod: Option<(String, Option<Duration>)>,
    /// Since when it can't start, and why.
    stuck: Option<(Duration, String)>,
    /// Since when its container has ended while the cluster may report why, and its end so far.
    ending: Option<(Duration, Box<Pod>, End)>,
    /// Since when it is being deleted while its program runs.
    terminating: Option<(Duration, Termination)>,
    /// The scheduler's message about its preemption, if there is one.
    preempted: Option<String>,
    /// The last reported event.
    reported: Option<BackendEvent>,
    /// When it is killed, unless it has ended by then.
    kill_at: Option<Duration>,
    /// Its node, once it has one. Its place is asked for at the first run.
    node: Option<String>,
    is_located: bool,
    /// Since when its node has not acknowledged it.
    unanswered_since: Option<Duration>,
    /// Since when it has a node and does not run, and the cluster's last warning about that.
    starting_since: Option<Duration>,
    warning: Option<PodWarning>,
}

impl PodTracker {
    pub(super) fn new(factory: PodFactory) -> Self {
        let job = factory.anchor.name.as_deref().unwrap_or_default();
        Self {
            gangs: Gangs::new(factory.gang.clone(), job, factory.min_workers),
            factory,
            launches: BTreeMap::new(),
            retained_pods: VecDeque::new(),
            unexplained: Vec::new(),
            has_run: false,
            stuck: 0,
            avoided_nodes: BTreeMap::new(),
            warnings_due: Duration::ZERO,
            now: Duration::ZERO,
            actions: VecDeque::new(),
        }
    }

    /// Takes an event in. `now` never decreases.
    pub(super) fn handle(&mut self, now: Duration, event: PodEvent) {
        self.now = now;
        match event {
            PodEvent::Adopt(launch, pod) => self.on_adopt(launch, pod.as_deref()),
            PodEvent::Avoid(node) => self.avoid(node),
            PodEvent::Applied(pod) => {
                self.on_applied(&pod);
                self.observe_gang_pod(&pod, false);
            }
            PodEvent::Core(min_workers) => self.factory.min_workers = min_workers,
            PodEvent::Created(launch, outcome) => self.on_created(launch, outcome),
            PodEvent::CreationWaits(launch, wait) => self.on_creation_waits(launch, wait),
            PodEvent::Deleted(pod) => {
                self.on_deleted(&pod);
                self.observe_gang_pod(&pod, true);
            }
            PodEvent::End => {
                let left: Vec<_> = self.launches.keys().copied().collect();
                left.into_iter().for_each(|launch| self.kill(launch, "the job is over"));
            }
            PodEvent::Explained(due, preemptors) => self.on_explained(due, &preemptors),
            PodEvent::HasTrained => self.note_run(),
            PodEvent::Kill(launch) => self.kill_soon(launch),
            PodEvent::Listed(requested_at, uids) => {
                self.on_listed(requested_at, &uids);
                self.observe_gang_list(&uids);
            }
            PodEvent::Remove(pod) => self.delete(PodRef::of(&pod)),
            PodEvent::Start(launch, slot) => {
                self.launches.insert(launch, ActiveLaunch { slot, ..ActiveLaunch::default() });
                self.report(launch, BackendEvent::Waiting(Wait::Scheduling(None)));
                self.create(launch);
            }
            PodEvent::Tick => self.on_tick(),
            PodEvent::Warned(asked, mut warnings) => self.on_warned(&asked, &mut warnings),
            PodEvent::Weight(weight) => {
                self.factory.priority_tiers.iter_mut().for_each(|tiers| tiers.weight = weight);
            }
        }
    }

    /// Returns the next action to perform.
    pub(super) fn poll_action(&mut self) -> Option<PodAction> {
        self.actions.pop_front()
    }

    // ---- creation ----

    fn on_adopt(&mut self, launch: LaunchId, pod: Option<&Pod>) {
        let mut adopted = ActiveLaunch::default();
        let Some(pod) = pod else {
            self.launches.insert(launch, adopted);
            return self.ended(launch, exit_of(vanished()));
        };
        adopted.slot = objects::launch_and_slot(pod).map_or(0, |(_, slot)| slot);
        adopted.class = pod.spec.as_ref().and_then(|spec| spec.priority_class_name.clone());
        adopted.pod = pod.metadata.uid.clone().map(|uid| (uid, Some(self.now)));
        let class = adopted.class.clone();
        self.gangs.adopt(launch, pod);
        self.launches.insert(launch, adopted);
        self.act(PodAction::Report(launch, BackendEvent::Created(class)));
        self.on_applied(pod);
    }

    fn create(&mut self, launch: LaunchId) {
        let Some(launched) = self.launches.get_mut(&launch) else { return };
        let slot = launched.slot;
        let gang = match self.gangs.place(launch, slot) {
            Placement::Alone => None,
            Placement::In(gang) => Some(gang),
            Placement::Later => {
                let wait = Wait::Queue(BEHIND_PREDECESSOR.into());
                return self.report(launch, BackendEvent::Waiting(wait));
            }
        };
        launched.is_creating = true;
        launched.class = self.factory.class(slot);
        let mut pod = self.factory.pod(launch, slot, gang.as_deref());
        self.prefer_other_nodes(&mut pod);
        self.act(PodAction::Create(launch, Box::new(pod)));
    }

    fn on_creation_waits(&mut self, launch: LaunchId, wait: Wait) {
        if !self.launches.get(&launch).is_some_and(|launched| launched.is_creating) {
            return;
        }
        if let Wait::Capacity(why) = &wait {
            self.act(PodAction::RecordEvent("QuotaExceeded", why.clone()));
        }
        self.act(PodAction::Report(launch, BackendEvent::Waiting(wait)));
    }

    fn on_created(&mut self, launch: LaunchId, outcome: CreateOutcome) {
        let Some(launched) = self.launches.get_mut(&launch) else {
            // The launch was killed in the meantime.
            if let CreateOutcome::Created(pod) = outcome {
                self.delete(PodRef::of(&pod));
            }
            return;
        };
        launched.is_creating = false;
        match outcome {
            CreateOutcome::Cancelled => {}
            CreateOutcome::Created(pod) => {
                // The watch may have reported the pod already.
                let uid = pod.metadata.uid.unwrap_or_default();
                launched.pod.get_or_insert_with(|| (uid.clone(), None)).1 = Some(self.now);
                self.note_gang_pod(launch, &uid);
                let class = pod.spec.and_then(|spec| spec.priority_class_name);
                self.act(PodAction::Report(launch, BackendEvent::Created(class)));
            }
            CreateOutcome::MissingClass(class) => self.on_missing_class(launch, &class),
            CreateOutcome::Rejected(why) => self.ended(launch, Exit::NotStarted(why)),
        }
    }

    /// Handles a priority class that the cluster does not have: reduces the tiers, once for all
    /// launches, and creates the pod again.
    fn on_missing_class(&mut self, launch: LaunchId, class: &str) {
        let assigned = self.launches.get(&launch).and_then(|launched| launched.class.as_deref());
        if assigned != Some(class) {
            // The class is the user's own choice, or was set by an admission webhook.
            let why = format!("there is no PriorityClass {class}: create it, or name another");
            return self.ended(launch, Exit::NotStarted(why));
        }
        // Another launch may have reduced the tiers already.
        if let Some(instead) = self.factory.remove_class(class) {
            let message = format!(
                "there is no PriorityClass {class}, so {instead}; apply \
                 manifests/priorityclasses.yaml for the next jobs, or see --priority-tiers"
            );
            self.act(PodAction::RecordEvent("PriorityClassMissing", message.clone()));
            let note = format!("not accepted, and is created again: {message}");
            self.act(PodAction::Report(launch, BackendEvent::Noted(note)));
        }
        self.create(launch);
    }

    // ---- changes of pods ----

    fn on_deleted(&mut self, pod: &Pod) {
        let Some(launch) = self.launch_of(pod) else { return };
        // The last version of the object may contain the reason.
        let end = match classify(pod) {
            Verdict::Ended(end) | Verdict::Terminating(Termination { end, .. }) => end,
            _ => vanished(),
        };
        self.on_end(launch, pod, end);
    }

    /// Ends the launches whose pods are missing from a list that was requested after their
    /// creation was confirmed.
    fn on_listed(&mut self, requested_at: Duration, uids: &BTreeSet<String>) {
        let is_deleted = |launched: &ActiveLaunch| match &launched.pod {
            Some((uid, Some(known))) => *known < requested_at && !uids.contains(uid),
            _ => false,
        };
        let deleted: Vec<_> =
            self.launches.iter().filter(|(_, l)| is_deleted(l)).map(|(&id, _)| id).collect();
        for launch in deleted {
            self.record_event(Cause::Deleted, &self.factory.name(launch), &vanished().detail);
            self.ended(launch, exit_of(vanished()));
        }
    }

    fn on_applied(&mut self, pod: &Pod) {
        let Some(launch) = self.launch_of(pod) else { return };
        let launched = self.launches.get_mut(&launch).expect("the launch was just found");
        let mut verdict = classify(pod);
        match &mut verdict {
            Verdict::CannotStart(why) => {
                let since = match launched.stuck.take() {
                    None => self.now,
                    Some((since, error)) => {
                        // A kubelet reports its error and its back-off in turns.
                        if error.starts_with(PULL_FAILED) && why.starts_with(PULL_WAITS) {
                            *why = error;
                        }
                        since
                    }
                };
                launched.stuck = Some((since, why.clone()));
            }
            _ => launched.stuck = None,
        }
        if verdict != Verdict::Starting {
            launched.unanswered_since = None;
            launched.starting_since = None;
            launched.warning = None;
        }
        match verdict {
            Verdict::Created => self.report(launch, BackendEvent::Waiting(Wait::Scheduling(None))),
            Verdict::CannotStart(why) => {
                self.report(launch, BackendEvent::Waiting(Wait::Start(Some(why))))
            }
            Verdict::Queued(why) => {
                self.on_held(launch, pod, "Queued", BackendEvent::Waiting(Wait::Queue(why)));
            }
            Verdict::Unschedulable(why) => {
                let event = BackendEvent::Waiting(Wait::Capacity(why));
                self.on_held(launch, pod, "Unschedulable", event);
            }
            Verdict::Starting => self.on_starting(launch, pod),
            Verdict::Terminating(termination) => self.on_terminating(launch, pod, termination),
            Verdict::Running => {
                self.note_run();
                self.locate(launch, pod);
                self.stuck = 0;
                self.report(launch, BackendEvent::Running);
            }
            Verdict::Ended(end) if self.awaits_explanation(launch, pod, &end) => {}
            Verdict::Ended(end) => {
                self.on_end(launch, pod, end);
                if has_running_sidecar(pod) {
                    // Sidecars don't end by themselves.
                    self.delete(PodRef::of(pod));
                } else if pod.metadata.deletion_timestamp.is_none() {
                    self.retain(PodRef::of(pod));
                }
            }
        }
    }

    /// Asks once where the node of a launch is.
    fn locate(&mut self, launch: LaunchId, pod: &Pod) {
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
        if let (Some(node), Some(launched)) = (node, self.launches.get_mut(&launch))
            && !std::mem::replace(&mut launched.is_located, true)
        {
            launched.node = Some(node.clone());
            self.act(PodAction::Locate(launch, node));
        }
    }

    /// Handles a pod that is not scheduled, for a reason that `event` gives.
    fn on_held(&mut self, launch: LaunchId, pod: &Pod, reason: &'static str, event: BackendEvent) {
        let is_known =
            self.launches.get(&launch).is_none_or(|l| l.reported.as_ref() == Some(&event));
        if let BackendEvent::Waiting(Wait::Capacity(why) | Wait::Queue(why)) = &event
            && !is_known
        {
            let message = format!("worker pod {}: {why}", PodRef::of(pod).name);
            self.act(PodAction::RecordEvent(reason, message));
        }
        self.report(launch, event);
    }

    fn on_terminating(&mut self, launch: LaunchId, pod: &Pod, termination: Termination) {
        let End { cause, detail } = termination.end.clone();
        let is_unexplained = cause == Cause::Deleted;
        let Some(launched) = self.launches.get_mut(&launch) else { return };
        let since = launched.terminating.as_ref().map(|(since, _)| *since);
        launched.terminating = Some((since.unwrap_or(self.now), termination));
        if since.is_none() && is_unexplained {
            self.note_unexplained(launch, pod);
        }
        self.report(launch, BackendEvent::Terminating(reclaim_cause(cause), detail));
    }

    /// Handles the end of a launch as its pod reports it.
    fn on_end(&mut self, launch: LaunchId, pod: &Pod, mut end: End) {
        let launched = self.launches.get_mut(&launch);
        let is_unwanted = launched.as_ref().is_some_and(|l| l.kill_at.is_some());
        let (was_terminating, preempted) =
            launched.map_or((false, None), |l| (l.terminating.is_some(), l.preempted.take()));
        match preempted {
            // The Event has been recorded already.
            Some(message) => end = End { cause: Cause::Preempted, detail: message },
            None if end.cause == Cause::Deleted && was_terminating => {}
            None if end.cause == Cause::Deleted => self.note_unexplained(launch, pod),
            None if is_unwanted && end.cause == Cause::Exited(EXIT_MASTER_LOST) => {}
            None => self.record_event(end.cause, &PodRef::of(pod).name, &end.brief()),
        }
        let exit = match exit_of(end) {
            // The same program has run in another pod.
            Exit::NotStarted(why) if self.has_run => Exit::reclaimed(ReclaimCause::NotStarted, why),
            exit => exit,
        };
        if let (Exit::Code(_) | Exit::Signal(_), Some(lines)) = (&exit, output_tail(pod)) {
            self.act(PodAction::Report(launch, BackendEvent::OutputTail(lines)));
        }
        self.ended(launch, exit);
    }

    /// Returns the launch to which this pod belongs, if it has not ended.
    fn launch_of(&mut self, pod: &Pod) -> Option<LaunchId> {
        let label = pod.metadata.labels.as_ref()?.get(LAUNCH_LABEL)?;
        let launch = LaunchId(label.parse().ok()?);
        let has_its_name = PodRef::of(pod).name == self.factory.name(launch);
        let launched = self.launches.get_mut(&launch)?;
        let uid = pod.metadata.uid.clone()?;
        match &launched.pod {
            Some((known, _)) => (*known == uid).then_some(launch),
            // The watch was faster than the answer to the creation. Names are unique, so the name
            // identifies the pod.
            None if has_its_name => {
                launched.pod = Some((uid.clone(), None));
                self.note_gang_pod(launch, &uid);
                Some(launch)
            }
            None => None,
        }
    }

    // ---- ends ----

    fn ended(&mut self, launch: LaunchId, exit: Exit) {
        let pod = self.pod_of(launch);
        if let Some(launched) = self.launches.remove(&launch) {
            self.leave_gang(launch, pod);
            if launched.is_creating {
                self.act(PodAction::CancelCreation(launch));
            }
            self.act(PodAction::Report(launch, BackendEvent::Ended(exit)));
        }
    }

    /// Kills a launch that need not end by itself. If its pod has a node, the tracker waits a
    /// moment: most pods are killed because their program has ended, which the cluster reports a
    /// little later (as it reports late that they run), and their exit is worth knowing.
    fn kill_soon(&mut self, launch: LaunchId) {
        if self.launches.get(&launch).is_some_and(|l| l.reported == Some(BackendEvent::Running)) {
            self.avoid_node_of(launch);
        }
        let is_waiting = |l: &ActiveLaunch| {
            matches!(
                l.reported,
                Some(BackendEvent::Waiting(
                    Wait::Scheduling(_) | Wait::Capacity(_) | Wait::Queue(_)
                ))
            )
        };
        match self.launches.get_mut(&launch).filter(|l| l.pod.is_some() && !is_waiting(l)) {
            Some(launched) => {
                launched.kill_at.get_or_insert(self.now + END_WAIT);
            }
            None => self.kill(launch, NOT_WANTED),
        }
    }

    fn kill(&mut self, launch: LaunchId, why: &str) {
        if let Some(pod) = self.pod_of(launch) {
            self.delete(pod);
        }
        self.ended(launch, Exit::reclaimed(ReclaimCause::Unwanted, why));
    }

    /// Retains an ended pod for its logs, and deletes the oldest retained one if there are too
    /// many.
    fn retain(&mut self, pod: PodRef) {
        self.retained_pods.push_back(pod);
        if self.retained_pods.len() > RETAINED_PODS_MAX
            && let Some(oldest) = self.retained_pods.pop_front()
        {
            self.delete(oldest);
        }
    }

    // ---- actions ----

    fn act(&mut self, action: PodAction) {
        self.actions.push_back(action);
    }

    fn delete(&mut self, pod: PodRef) {
        self.act(PodAction::Delete(pod));
    }

    /// Reports an event of a launch, unless it is equal to the last one.
    fn report(&mut self, launch: LaunchId, event: BackendEvent) {
        let Some(launched) = self.launches.get_mut(&launch) else { return };
        if launched.reported.as_ref() != Some(&event) {
            launched.reported = Some(event.clone());
            self.act(PodAction::Report(launch, event));
        }
    }

    fn record_event(&mut self, cause: Cause, name: &str, detail: &str) {
        if let Some(reason) = events::reason_of(cause) {
            self.act(PodAction::RecordEvent(reason, format!("worker pod {name}: {detail}")));
        }
    }

    fn note_run(&mut self) {
        if !std::mem::replace(&mut self.has_run, true) {
            self.act(PodAction::NoteRun);
        }
    }

    /// The pod of a launch, if it exists.
    fn pod_of(&self, launch: LaunchId) -> Option<PodRef> {
        let (uid, _) = self.launches.get(&launch)?.pod.as_ref()?;
        Some(PodRef { name: self.factory.name(launch), uid: uid.clone() })
    }
}

/// What a replacement in a gang of fixed size waits for.
const BEHIND_PREDECESSOR: &str = "the pod that it replaces still counts for its queue";
const NOT_WANTED: &str = "it is not wanted any more";
/// How a kubelet describes an image that it could not pull, and its wait for the next attempt.
const PULL_FAILED: &str = "ErrImagePull";
const PULL_WAITS: &str = "ImagePullBackOff: Back-off";
/// Delay before a kill: kubelets check once a second for ended containers.
pub(super) const END_WAIT: Duration = Duration::from_secs(2);
/// Number of ended pods that are retained.
const RETAINED_PODS_MAX: usize = 16;

#[cfg(test)]
mod tests;
