//! Events of workers, recorded for the master's Job: `kubectl describe job` shows them.
//!
//! There is one object per reason, in which repetitions are counted; its message is the last one.
//! Recording must not slow down training: it is rate limited, and Events that the server does not
//! accept are dropped.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};
use tracing::debug;

use super::client::{Cluster, is_code};
use super::verdict::Cause;

/// Records Events, one after the other, in a task of its own.
#[derive(Clone, Debug)]
pub(crate) struct EventRecorder {
    sender: Option<mpsc::Sender<EventReport>>,
}

/// An Event to be recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EventReport {
    /// Reason in camel case.
    pub(crate) reason: &'static str,
    pub(crate) message: String,
}

impl EventRecorder {
    /// Records Events for the Job that owns the anchor. Must be called within a runtime.
    pub(crate) fn start(cluster: &Cluster, anchor: &ObjectMeta) -> Self {
        let Some(about) = job_of(cluster, anchor) else { return Self { sender: None } };
        let (sender, reports) = mpsc::channel(REPORTS_MAX);
        // The task ends when the last sender is dropped.
        tokio::spawn(write(cluster.api(), about, reports));
        Self { sender: Some(sender) }
    }

    /// Returns a recorder that drops all Events.
    #[cfg(test)]
    pub(crate) fn disabled() -> Self {
        Self { sender: None }
    }

    /// Queues an Event. It is dropped if the queue is full.
    pub(crate) fn record(&self, reason: &'static str, message: String) {
        if let Some(sender) = &self.sender
            && sender.try_send(EventReport { reason, message }).is_err()
        {
            debug!(reason, "an Event is dropped: too many at once");
        }
    }
}

/// The Job that owns the anchor. Without it there is no object to which Events could belong.
pub(super) fn job_of(cluster: &Cluster, anchor: &ObjectMeta) -> Option<ObjectReference> {
    let owner = anchor.owner_references.iter().flatten().find(|owner| owner.kind == "Job")?;
    Some(ObjectReference {
        api_version: Some(owner.api_version.clone()),
        kind: Some(owner.kind.clone()),
        name: Some(owner.name.clone()),
        namespace: Some(cluster.namespace.clone()),
        uid: Some(owner.uid.clone()),
        ..ObjectReference::default()
    })
}

/// An Event that has happened once. Its name is to be chosen.
pub(super) fn event(about: &ObjectReference, reason: &str, message: String, at: Time) -> Event {
    let is_normal = NORMAL_REASONS.contains(&reason) || reason.ends_with(REQUESTED);
    Event {
        metadata: ObjectMeta { namespace: about.namespace.clone(), ..ObjectMeta::default() },
        involved_object: about.clone(),
        reason: Some(reason.into()),
        message: Some(message),
        type_: Some(if is_normal { "Normal" } else { "Warning" }.into()),
        count: Some(1),
        first_timestamp: Some(at.clone()),
        last_timestamp: Some(at),
        source: Some(EventSource { component: Some("elasticdl".into()), host: None }),
        ..Event::default()
    }
}

/// Returns the reason for a worker's end; `None` if the end was regular.
pub(crate) fn reason_of(cause: Cause) -> Option<&'static str> {
    match cause {
        Cause::Exited(0) => None,
        Cause::Deleted => Some("WorkerDeleted"),
        Cause::Drained => Some("WorkerDrained"),
        Cause::Evicted => Some("WorkerEvicted"),
        Cause::Exited(_) | Cause::NotExecuted | Cause::Signalled(_) => Some("WorkerFailed"),
        Cause::Lost => Some("NodeLost"),
        Cause::OutOfMemory => Some("WorkerOOMKilled"),
        Cause::OverLimit => Some("WorkerOverLimit"),
        Cause::Preempted => Some(PREEMPTED_WORKER),
        Cause::Refused => Some("WorkerRefused"),
        Cause::Reclaimed => Some("WorkerTaken"),
    }
}

/// Returns the reason for a failure to start, from the kubelet's message.
pub(crate) fn reason_of_start_failure(why: &str) -> &'static str {
    let image =
        ["ErrImage", "Image", "InvalidImageName"].iter().any(|start| why.starts_with(start));
    if image { "ImagePullFailed" } else { "ConfigError" }
}

/// Reads the scheduler's messages about preempted pods, by uid. Servers before 1.26 report a
/// preemption nowhere else.
pub(crate) async fn preemptors(api: &Api<Event>) -> BTreeMap<String, String> {
    let params =
        ListParams::default().fields("reason=Preempted,involvedObject.kind=Pod").limit(LIST_MAX);
    let Ok(Ok(list)) = timeout(CALL_TIMEOUT, api.list(&params)).await else {
        return BTreeMap::new();
    };
    let uid_and_message = |event: Event| Some((event.involved_object.uid?, event.message?));
    list.items.into_iter().filter_map(uid_and_message).collect()
}

/// The cluster's warning about a pod that does not start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PodWarning {
    /// Reason in camel case, such as `FailedMount`.
    pub(crate) reason: String,
    pub(crate) message: String,
}

/// Reads the newest warnings about the pods with these uids, of those that have any. `None`: the
/// server did not answer.
pub(crate) async fn warnings(
    api: &Api<Event>,
    uids: &[String],
) -> Option<BTreeMap<String, PodWarning>> {
    let mut found = BTreeMap::new();
    for uid in uids {
        let fields = format!("type=Warning,involvedObject.uid={uid}");
        let params = ListParams::default().fields(&fields).limit(LIST_MAX);
        let Ok(Ok(list)) = timeout(CALL_TIMEOUT, api.list(&params)).await else { return None };
        let time = |event: &Event| {
            let last = event.series.as_ref().and_then(|series| series.last_observed_time.as_ref());
            let last = last.or(event.event_time.as_ref()).map(|time| time.0);
            last.max(event.last_timestamp.as_ref().map(|time| time.0))
        };
        let newest = list.items.into_iter().max_by_key(time).filter(|event| {
            time(event).is_none_or(|at| {
                Timestamp::now().as_second().saturating_sub(at.as_second()) < WARNING_AGE_MAX_S
            })
        });
        if let Some(Event { reason: Some(reason), message: Some(message), .. }) = newest {
            found.insert(uid.clone(), PodWarning { reason, message });
        }
    }
    Some(found)
}

async fn write(api: Api<Event>, about: ObjectReference, mut reports: mpsc::Receiver<EventReport>) {
    let mut pending = PendingEvents::default();
    let mut bucket = TokenBucket::new(Instant::now());
    loop {
        let due = pending.is_due().then(|| bucket.due());
        tokio::select! {
            biased;
            report = reports.recv() => match report {
                Some(report) => pending.add(report),
                None => return,
            },
            () = tokio::time::sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                bucket.spend(Instant::now());
                let Some((reason, entry)) = pending.next() else { continue };
                match timeout(CALL_TIMEOUT, put(&api, &about, reason, entry)).await {
                    Ok(Ok(name)) => entry.name = Some(name),
                    Ok(Err(error)) => debug!(%error, reason, "an Event is dropped"),
                    Err(_) => debug!(reason, "an Event is dropped: no answer"),
                }
            }
        }
    }
}

/// Updates the count of the existing Event, or creates one. Returns its name.
async fn put(
    api: &Api<Event>,
    about: &ObjectReference,
    reason: &str,
    entry: &Entry,
) -> Result<String, kube::Error> {
    let now = Time(Timestamp::now());
    if let Some(name) = &entry.name {
        let patch = json!({"count": entry.count, "lastTimestamp": now, "message": entry.message});
        match api.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await {
            Ok(_) => return Ok(name.clone()),
            // Servers keep Events for an hour.
            Err(error) if is_code(&error, 404) => {}
            Err(error) => return Err(error),
        }
    }
    let mut event = event(about, reason, entry.message.clone(), now);
    event.metadata.generate_name = Some(format!("{}.", about.name.as_deref().unwrap_or_default()));
    event.count = Some(entry.count);
    let made = api.create(&PostParams::default(), &event).await?;
    Ok(made.metadata.name.unwrap_or_default())
}

/// Events that are to be written, by reason.
#[derive(Debug, Default)]
struct PendingEvents {
    entries: BTreeMap<&'static str, Entry>,
    /// Reasons with unwritten occurrences, the oldest first.
    due: Vec<&'static str>,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Entry {
    /// Name of its object, once it is created.
    name: Option<String>,
    count: i32,
    message: String,
}

impl PendingEvents {
    fn add(&mut self, report: EventReport) {
        let EventReport { reason, message } = report;
        let entry = self.entries.entry(reason).or_default();
        entry.count = entry.count.saturating_add(1);
        entry.message = message.chars().take(MESSAGE_MAX).collect();
        if !self.due.contains(&reason) {
            self.due.push(reason);
        }
    }

    fn is_due(&self) -> bool {
        !self.due.is_empty()
    }

    fn next(&mut self) -> Option<(&'static str, &mut Entry)> {
        let reason = (!self.due.is_empty()).then(|| self.due.remove(0))?;
        Some((reason, self.entries.get_mut(reason)?))
    }
}

/// Rate limit: a burst of [`BURST`], then one per [`REFILL`].
#[derive(Debug)]
struct TokenBucket {
    /// Time at which the bucket is full again.
    full: Instant,
}

impl TokenBucket {
    fn new(now: Instant) -> Self {
        Self { full: now }
    }

    /// Returns when the next Event may be written.
    fn due(&self) -> Instant {
        self.full.checked_sub(REFILL * (BURST - 1)).unwrap_or(self.full)
    }

    fn spend(&mut self, now: Instant) {
        self.full = self.full.max(now) + REFILL;
    }
}

/// Reason of a preemption: a pod of higher priority needed the worker's capacity.
pub(crate) const PREEMPTED_WORKER: &str = "WorkerPreempted";

const BURST: u32 = 10;
/// Kubelets repeat an attempt, and its warning, within two minutes.
const WARNING_AGE_MAX_S: i64 = 300;
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
const LIST_MAX: u32 = 500;
/// Limit of the server, in characters.
pub(super) const MESSAGE_MAX: usize = 1000;
const REFILL: Duration = Duration::from_secs(15);
const REPORTS_MAX: usize = 256;
/// Reasons of users' requests end with it; they are of type `Normal`.
const REQUESTED: &str = "Requested";
/// Other reasons of type `Normal`: a job uses whatever capacity is free, so these are expected.
const NORMAL_REASONS: [&str; 8] = [
    "JobCompleted",
    "JobStopped",
    "JobSuspended",
    "MembershipChanged",
    "PriorityClassMissing",
    "Queued",
    "QuotaExceeded",
    "Unschedulable",
];

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::testing::FakeServer;
    use super::*;

    fn start() -> (Arc<FakeServer>, EventRecorder) {
        let (fake, cluster) = FakeServer::start();
        let anchor = json!({"name": "j", "uid": "a", "ownerReferences": [
            {"apiVersion": "batch/v1", "kind": "Job", "name": "j-master", "uid": "job"}
        ]});
        let recorder = EventRecorder::start(&cluster, &serde_json::from_value(anchor).unwrap());
        (fake, recorder)
    }

    async fn settle() {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }

    #[tokio::test]
    async fn the_newest_warning_about_a_pod_is_read_unless_it_is_old() {
        let (fake, cluster) = FakeServer::start();
        let put = |name: &str, uid: &str, reason: &str, age_s: i64| {
            let at = Timestamp::from_second(Timestamp::now().as_second() - age_s).unwrap();
            let event = json!({
                "metadata": {"name": name}, "involvedObject": {"uid": uid}, "type": "Warning",
                "reason": reason, "message": "no secret s", "lastTimestamp": at.to_string(),
            });
            fake.put("events", name, event);
        };
        put("1", "pod", "FailedMount", 30);
        put("2", "pod", "FailedScheduling", 90);
        put("3", "other", "FailedMount", 2 * WARNING_AGE_MAX_S);
        let uids = ["pod", "other", "none"].map(str::to_owned);
        let found = warnings(&cluster.api(), &uids).await.unwrap();
        let warning = PodWarning { reason: "FailedMount".into(), message: "no secret s".into() };
        assert_eq!(found, [("pod".to_owned(), warning)].into());
    }

    #[tokio::test(start_paused = true)]
    async fn repeated_events_are_counted_in_one_object_of_the_job() {
        let (fake, recorder) = start();
        for pod in 1..=3 {
            recorder.record("WorkerFailed", format!("j-w-{pod} failed"));
            settle().await;
        }
        recorder.record("Unschedulable", "0/1 nodes are available".into());
        settle().await;
        let events = fake.state().all("events");
        assert_eq!(events.len(), 2, "{events:?}");
        let failed = &events[0];
        assert_eq!(failed["involvedObject"]["uid"], "job");
        assert_eq!(failed["involvedObject"]["kind"], "Job");
        let fields = ["reason", "message", "type", "count"].map(|key| failed[key].clone());
        assert_eq!(
            fields,
            [json!("WorkerFailed"), json!("j-w-3 failed"), json!("Warning"), json!(3)]
        );
        assert_eq!(events[1]["type"], "Normal");
    }

    #[tokio::test(start_paused = true)]
    async fn a_thousand_events_at_once_cost_a_few_calls() {
        let (fake, recorder) = start();
        for pod in 0..1000 {
            recorder.record("WorkerPreempted", format!("j-w-{pod}"));
            tokio::task::yield_now().await;
        }
        for _ in 0..1000 {
            recorder.record("WorkerFailed", "again".into());
            tokio::time::sleep(Duration::from_millis(60)).await;
        }
        let calls = fake.state().calls.len();
        assert!((5..=15).contains(&calls), "{calls} calls in a minute");
    }

    #[tokio::test(start_paused = true)]
    async fn an_event_that_the_server_has_dropped_is_created_again() {
        let (fake, recorder) = start();
        recorder.record("WorkerFailed", "one".into());
        settle().await;
        fake.state().drop_all("events");
        recorder.record("WorkerFailed", "two".into());
        settle().await;
        let events = fake.state().all("events");
        assert_eq!((events.len(), &events[0]["count"]), (1, &json!(2)));
    }

    #[tokio::test(start_paused = true)]
    async fn an_unreachable_server_loses_events_and_blocks_no_caller() {
        let (fake, recorder) = start();
        fake.state().unreachable = true;
        for _ in 0..1000 {
            recorder.record("WorkerFailed", "dropped".into());
        }
        tokio::time::sleep(Duration::from_secs(600)).await;
        fake.state().unreachable = false;
        recorder.record("WorkerFailed", "recorded".into());
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(fake.state().all("events")[0]["message"], "recorded");
    }

    #[test]
    fn a_start_failure_is_caused_by_the_image_or_the_configuration() {
        for why in
            ["ErrImagePull: x", "ImagePullBackOff: x", "InvalidImageName: x", "ImageInspectError"]
        {
            assert_eq!(reason_of_start_failure(why), "ImagePullFailed", "{why}");
        }
        assert_eq!(
            reason_of_start_failure("CreateContainerConfigError: secret \"x\" not found"),
            "ConfigError"
        );
    }
}
