//! Watches objects of the cluster, as a stream of changes.
//!
//! The watcher lists the objects, then watches from the list's resource version on, with bookmarks.
//! When the server no longer has that version (410), it lists again and reports the differences, by
//! uid. It retries any other failure with exponential back-off, and so does it open a watch again
//! that ended soon and brought nothing: a proxy that ends or refuses watches must not turn each job
//! into a flood of requests. A watch without events or bookmarks for long is considered dead, and a
//! periodic list finds whatever was missed.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::time::Duration;

use kube::Api;
use kube::api::{ListParams, ObjectList, WatchEvent, WatchParams};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};
use tokio_stream::StreamExt as _;
use tracing::{debug, warn};

use super::client::is_code;

/// A change of the selected objects.
#[derive(Clone, Debug, PartialEq)]
pub enum Change<K> {
    /// The object is new, or has changed.
    Applied(K),
    /// The object was deleted; its last known content.
    Deleted(K),
    /// The server denies access; the request is retried all the same.
    Forbidden(String),
    /// A list, requested at this time, has returned exactly these uids.
    Listed(Instant, BTreeSet<String>),
}

/// Field selector and label selector of the objects.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// Field selector.
    pub fields: Option<String>,
    /// Label selector.
    pub labels: Option<String>,
}

/// A running watch; it ends when it is dropped.
#[derive(Debug)]
pub struct Watch<K> {
    changes: mpsc::Receiver<Change<K>>,
    task: JoinHandle<()>,
}

impl<K> Watch<K>
where
    K: kube::Resource + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
{
    /// Starts to watch. Must be called within a runtime.
    #[must_use]
    pub fn start(api: Api<K>, selection: Selection) -> Self {
        let (sender, changes) = mpsc::channel(CHANGES_MAX);
        let mut watcher = Watcher {
            api,
            selection,
            cache: ObjectCache::default(),
            sender,
            failures: 0,
            due: None,
        };
        // The task ends when the receiver is dropped.
        let task = tokio::spawn(async move { while watcher.round().await.is_ok() {} });
        Self { changes, task }
    }

    /// Returns the next change. Cancel-safe.
    pub async fn next(&mut self) -> Change<K> {
        match self.changes.recv().await {
            Some(change) => change,
            // Only a panic ends the task while `self` exists.
            None => std::future::pending().await,
        }
    }
}

impl<K> Drop for Watch<K> {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Watcher<K> {
    api: Api<K>,
    selection: Selection,
    cache: ObjectCache<K>,
    sender: mpsc::Sender<Change<K>>,
    /// Number of consecutive failures.
    failures: u32,
    /// When the next list may be requested.
    due: Option<Instant>,
}

/// The receiver was dropped: the task ends.
struct ReceiverDropped;

impl<K> Watcher<K>
where
    K: kube::Resource + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
{
    /// Lists, then watches until the next list is due.
    async fn round(&mut self) -> Result<(), ReceiverDropped> {
        if let Some(due) = self.due {
            tokio::time::sleep_until(due).await;
        }
        let requested_at = Instant::now();
        self.due = Some(requested_at + REQUEST_INTERVAL);
        let params = ListParams {
            field_selector: self.selection.fields.clone(),
            label_selector: self.selection.labels.clone(),
            ..ListParams::default()
        };
        let listed = timeout(LIST_TIMEOUT, self.api.list(&params)).await;
        let list = match listed {
            Ok(Ok(list)) => list,
            Ok(Err(error)) => return self.failed(&error).await,
            Err(_) => return self.wait("the list took too long").await,
        };
        for change in self.cache.replace(list) {
            self.send(change).await?;
        }
        self.send(Change::Listed(requested_at, self.cache.uids())).await?;
        while requested_at.elapsed() < RELIST && self.watch().await? {}
        Ok(())
    }

    /// Runs one watch to its end. Returns whether another watch can continue from there.
    async fn watch(&mut self) -> Result<bool, ReceiverDropped> {
        let params = WatchParams {
            field_selector: self.selection.fields.clone(),
            label_selector: self.selection.labels.clone(),
            timeout: Some(WATCH_S),
            bookmarks: true,
            ..WatchParams::default()
        };
        let opened = timeout(LIST_TIMEOUT, self.api.watch(&params, &self.cache.version)).await;
        let mut stream = match opened {
            Ok(Ok(stream)) => Box::pin(stream),
            Ok(Err(error)) if is_code(&error, 410) => {
                return self.wait("the version has expired").await.map(|()| false);
            }
            Ok(Err(error)) => return self.failed(&error).await.map(|()| true),
            Err(_) => return self.wait("the watch took too long to open").await.map(|()| true),
        };
        let opened_at = Instant::now();
        let mut last_event = None;
        let may_continue = loop {
            match timeout(IDLE, stream.next()).await {
                Ok(Some(Ok(event))) => match self.cache.apply(event) {
                    EventOutcome::Change(change) => {
                        (self.failures, last_event) = (0, Some(Instant::now()));
                        self.send(change).await?;
                    }
                    EventOutcome::Ignored => {
                        (self.failures, last_event) = (0, Some(Instant::now()));
                    }
                    EventOutcome::Expired => break false,
                    EventOutcome::Error(error) => {
                        self.wait(&error).await?;
                        return Ok(false);
                    }
                },
                // Servers end watches from time to time. A watch that did not receive even a
                // bookmark for long started from a version that the server does not have: the
                // server's data is older than what this client has seen.
                Ok(None) => break last_event.unwrap_or(opened_at).elapsed() < SILENCE_MAX,
                Ok(Some(Err(error))) => {
                    debug!(%error, "a watch broke");
                    return self.wait("a watch broke").await.map(|()| true);
                }
                Err(_) => break false,
            }
        };
        if opened_at.elapsed() >= WATCH_MIN {
            self.failures = 0;
        } else if last_event.is_none() {
            self.wait("a watch ended at once and brought nothing").await?;
        } else {
            tokio::time::sleep_until(opened_at + REQUEST_INTERVAL).await;
        }
        Ok(may_continue)
    }

    async fn failed(&mut self, error: &kube::Error) -> Result<(), ReceiverDropped> {
        if let kube::Error::Api(status) = error
            && status.code == 403
        {
            self.send(Change::Forbidden(status.message.clone())).await?;
        }
        self.wait(&error.to_string()).await
    }

    async fn wait(&mut self, why: &str) -> Result<(), ReceiverDropped> {
        let pause = backoff(self.failures);
        self.failures += 1;
        warn!(why, pause_ms = pause.as_millis() as u64, "the API server can't be watched");
        tokio::select! {
            () = tokio::time::sleep(pause) => Ok(()),
            () = self.sender.closed() => Err(ReceiverDropped),
        }
    }

    async fn send(&self, change: Change<K>) -> Result<(), ReceiverDropped> {
        self.sender.send(change).await.map_err(|_| ReceiverDropped)
    }
}

/// The objects as last reported.
struct ObjectCache<K> {
    objects: BTreeMap<String, K>,
    version: String,
}

impl<K> Default for ObjectCache<K> {
    fn default() -> Self {
        Self { objects: BTreeMap::new(), version: String::new() }
    }
}

/// Effect of a watch event.
#[derive(Debug, PartialEq)]
enum EventOutcome<K> {
    Change(Change<K>),
    /// The watch has ended for another reason.
    Error(String),
    /// The server no longer has the version from which the watch started.
    Expired,
    Ignored,
}

impl<K: kube::Resource + Clone> ObjectCache<K> {
    /// Replaces the cache by a list, and returns the differences.
    fn replace(&mut self, list: ObjectList<K>) -> Vec<Change<K>> {
        self.version = list.metadata.resource_version.unwrap_or_default();
        let before = std::mem::take(&mut self.objects);
        let mut changes = Vec::new();
        for object in list.items {
            let Some(uid) = object.meta().uid.clone() else { continue };
            let version = &object.meta().resource_version;
            if before.get(&uid).is_none_or(|known| &known.meta().resource_version != version) {
                changes.push(Change::Applied(object.clone()));
            }
            self.objects.insert(uid, object);
        }
        let deleted = before.into_iter().filter(|(uid, _)| !self.objects.contains_key(uid));
        let mut all: Vec<_> = deleted.map(|(_, object)| Change::Deleted(object)).collect();
        all.append(&mut changes);
        all
    }

    fn apply(&mut self, event: WatchEvent<K>) -> EventOutcome<K> {
        let object = match event {
            WatchEvent::Bookmark(bookmark) => {
                self.version = bookmark.metadata.resource_version;
                return EventOutcome::Ignored;
            }
            WatchEvent::Error(status) if status.code == 410 => return EventOutcome::Expired,
            WatchEvent::Error(status) => return EventOutcome::Error(status.message),
            WatchEvent::Deleted(object) => {
                self.advance(&object);
                let known = object.meta().uid.as_ref().and_then(|uid| self.objects.remove(uid));
                return known.map_or(EventOutcome::Ignored, |_| {
                    EventOutcome::Change(Change::Deleted(object))
                });
            }
            WatchEvent::Added(object) | WatchEvent::Modified(object) => object,
        };
        let Some(uid) = object.meta().uid.clone() else { return EventOutcome::Ignored };
        if self.objects.get(&uid).is_some_and(|known| !is_newer(&object, known)) {
            return EventOutcome::Ignored;
        }
        self.advance(&object);
        self.objects.insert(uid, object.clone());
        EventOutcome::Change(Change::Applied(object))
    }

    fn advance(&mut self, object: &K) {
        if let Some(version) = &object.meta().resource_version {
            self.version.clone_from(version);
        }
    }

    fn uids(&self) -> BTreeSet<String> {
        self.objects.keys().cloned().collect()
    }
}

/// Returns whether `object` is newer than `known`. Resource versions are increasing numbers, from
/// Kubernetes 1.35 on by specification and before that in practice. Other versions are only
/// compared for equality.
fn is_newer<K: kube::Resource>(object: &K, known: &K) -> bool {
    let text = |object: &K| object.meta().resource_version.clone().unwrap_or_default();
    let (new, old) = (text(object), text(known));
    match (new.parse::<u64>(), old.parse::<u64>()) {
        (Ok(new), Ok(old)) => new > old,
        _ => new != old,
    }
}

/// Returns the delay after this number of consecutive failures: exponential, with jitter, so that
/// clients that failed together don't retry together.
pub(super) fn backoff(failures: u32) -> Duration {
    let most = PAUSE_FIRST.saturating_mul(1 << failures.min(16)).min(PAUSE_MAX);
    let mut random = [0; 2];
    // Without random bytes: the longest delay.
    let share = getrandom::fill(&mut random)
        .map_or(1.0, |()| f64::from(u16::from_le_bytes(random)) / 65536.0);
    most.mul_f64(0.5 + share / 2.0)
}

const CHANGES_MAX: usize = 256;
/// Servers send a bookmark about once a minute.
const IDLE: Duration = Duration::from_secs(300);
const LIST_TIMEOUT: Duration = Duration::from_secs(30);
const PAUSE_FIRST: Duration = Duration::from_millis(250);
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// Minimum time between two lists, and between two watches that end at once.
const REQUEST_INTERVAL: Duration = Duration::from_secs(1);
const RELIST: Duration = Duration::from_secs(300);
/// Time within which a watch receives at least a bookmark.
const SILENCE_MAX: Duration = Duration::from_secs(120);
/// Time after which the end of a watch that brought nothing is no failure.
const WATCH_MIN: Duration = Duration::from_secs(30);
/// Duration of a watch that is requested of the server.
const WATCH_S: u32 = 240;

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Pod;
    use serde_json::json;

    use super::super::testing::{EndedWatches, FakeServer};
    use super::*;

    fn pod(uid: &str, version: &str) -> Pod {
        let metadata = json!({"name": uid, "uid": uid, "resourceVersion": version});
        serde_json::from_value(json!({"metadata": metadata})).unwrap()
    }

    fn list(version: &str, items: Vec<Pod>) -> ObjectList<Pod> {
        let items = serde_json::to_value(items).unwrap();
        let list = json!({
            "apiVersion": "v1", "kind": "PodList",
            "metadata": {"resourceVersion": version}, "items": items
        });
        serde_json::from_value(list).unwrap()
    }

    fn event(kind: &str, object: serde_json::Value) -> WatchEvent<Pod> {
        serde_json::from_value(json!({"type": kind, "object": object})).unwrap()
    }

    fn cache() -> ObjectCache<Pod> {
        let mut cache = ObjectCache::default();
        let changes = cache.replace(list("10", vec![pod("a", "1"), pod("b", "2")]));
        assert_eq!(changes, [Change::Applied(pod("a", "1")), Change::Applied(pod("b", "2"))]);
        cache
    }

    #[test]
    fn a_second_list_yields_the_differences_by_uid() {
        let mut cache = cache();
        let changes = cache.replace(list("20", vec![pod("b", "3"), pod("c", "4")]));
        let expected = [
            Change::Deleted(pod("a", "1")),
            Change::Applied(pod("b", "3")),
            Change::Applied(pod("c", "4")),
        ];
        assert_eq!(changes, expected);
        assert_eq!(cache.replace(list("30", vec![pod("b", "3"), pod("c", "4")])), []);
        assert_eq!((cache.version.as_str(), cache.uids().len()), ("30", 2));
    }

    #[test]
    fn repeated_events_are_ignored() {
        let mut cache = cache();
        let same = serde_json::to_value(pod("a", "1")).unwrap();
        assert_eq!(cache.apply(event("ADDED", same)), EventOutcome::Ignored);
        let changed = serde_json::to_value(pod("a", "11")).unwrap();
        assert_eq!(
            cache.apply(event("MODIFIED", changed)),
            EventOutcome::Change(Change::Applied(pod("a", "11")))
        );
        let deleted = serde_json::to_value(pod("a", "12")).unwrap();
        assert_eq!(
            cache.apply(event("DELETED", deleted.clone())),
            EventOutcome::Change(Change::Deleted(pod("a", "12")))
        );
        assert_eq!(cache.apply(event("DELETED", deleted)), EventOutcome::Ignored);
        assert_eq!(cache.version, "12");
    }

    #[test]
    fn a_bookmark_advances_the_version() {
        let mut cache = cache();
        let bookmark = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"resourceVersion": "99", "creationTimestamp": null}
        });
        assert_eq!(cache.apply(event("BOOKMARK", bookmark)), EventOutcome::Ignored);
        assert_eq!(cache.version, "99");
    }

    #[test]
    fn an_expired_version_is_distinguished_from_other_errors() {
        let error = |code: u16| {
            let status = json!({
                "apiVersion": "v1", "kind": "Status", "status": "Failure",
                "message": "too old resource version: 1 (5)", "reason": "Expired", "code": code
            });
            cache().apply(event("ERROR", status))
        };
        assert_eq!(error(410), EventOutcome::Expired);
        assert_eq!(error(500), EventOutcome::Error("too old resource version: 1 (5)".into()));
    }

    #[test]
    fn the_back_off_grows_up_to_a_limit() {
        for (failures, most) in [(0, 250), (1, 500), (4, 4000), (7, 30_000), (60, 30_000)] {
            let pause = backoff(failures);
            let most = Duration::from_millis(most);
            assert!(pause >= most / 2 && pause <= most, "{failures}: {pause:?}");
        }
    }

    /// A proxy before the API server ends each watch at once, or answers that its version has
    /// expired.
    #[tokio::test(start_paused = true)]
    async fn watches_that_end_at_once_are_opened_again_with_a_growing_pause() {
        for (ended, limit) in [(EndedWatches::Empty, 12), (EndedWatches::Expired, 24)] {
            let (fake, cluster) = FakeServer::start();
            fake.state().ends_watches = Some(ended);
            let watch: Watch<Pod> = Watch::start(cluster.api(), Selection::default());
            tokio::time::sleep(Duration::from_secs(25)).await;
            let calls = fake.state().calls.len();
            assert!((6..=limit).contains(&calls), "{ended:?}: {calls} calls");
            // A change is reported once the server can be watched again.
            fake.state().ends_watches = None;
            fake.put("pods", "p", json!({"metadata": {"name": "p", "uid": "p"}}));
            let mut watch = watch;
            while !matches!(watch.next().await, Change::Applied(_)) {}
        }
    }
}
