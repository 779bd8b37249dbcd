//! A fake API server that stores objects, and can be made to fail as real ones do.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body::Frame;
use kube::client::Body;
use kube::client::retry::RetryPolicy;
use serde_json::{Value, json};
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;
use tower::ServiceBuilder;
use tower::retry::RetryLayer;

use super::client::Cluster;

/// The fake server.
#[derive(Default)]
pub(crate) struct FakeServer {
    state: Mutex<State>,
    changed: Notify,
}

/// How watches end at once.
#[derive(Clone, Copy, Debug)]
pub(crate) enum EndedWatches {
    /// Without an event.
    Empty,
    /// With the event that the version has expired.
    Expired,
}

#[derive(Default)]
pub(crate) struct State {
    version: u64,
    /// Objects by resource and name.
    objects: BTreeMap<(String, String), Value>,
    /// Watch events by version and resource.
    events: Vec<(u64, String, Value)>,
    /// Versions below this one have expired.
    floor: u64,
    /// Status code and message for the next creations of pods.
    pub(crate) refusals: VecDeque<(u16, &'static str)>,
    /// Status code and `Retry-After` for the next calls of a kind (`POST pods`, `PUT leases`, …).
    pub(crate) throttles: VecDeque<(&'static str, u16, u64)>,
    /// Number of next creations that succeed although the client gets an error.
    pub(crate) lost: u32,
    /// Whether watches are refused.
    pub(crate) refuses_watches: bool,
    /// How watches end as soon as they are opened, if they do.
    pub(crate) ends_watches: Option<EndedWatches>,
    /// Whether watches are opened, but neither yield events nor end.
    pub(crate) black_hole: bool,
    /// Whether no call is answered.
    pub(crate) unreachable: bool,
    /// Duration of calls, by kind.
    pub(crate) slow: BTreeMap<&'static str, Duration>,
    /// The server's clock, as its answers outside of the namespace tell it.
    pub(crate) date: Option<&'static str>,
    /// Answers to reads of paths outside of the namespace. Other such paths do not exist.
    pub(crate) cluster_paths: BTreeMap<String, Value>,
    pub(crate) created: u32,
    pub(crate) deleted: Vec<String>,
    /// Time and kind of each call.
    pub(crate) calls: Vec<(Instant, String)>,
    /// Number of concurrent calls by kind, and its maximum so far.
    in_flight: BTreeMap<String, usize>,
    pub(crate) in_flight_max: BTreeMap<String, usize>,
}

impl FakeServer {
    /// Starts a server. The client retries throttled calls, as the real one does.
    pub(crate) fn start() -> (Arc<Self>, Cluster) {
        let fake = Arc::new(Self::default());
        let cluster = fake.cluster();
        (fake, cluster)
    }

    /// Returns another client of the server.
    pub(crate) fn cluster(self: &Arc<Self>) -> Cluster {
        let server = Arc::clone(self);
        let service = tower::service_fn(move |request| {
            let server = Arc::clone(&server);
            async move { Ok::<_, tower::BoxError>(server.answer(request).await) }
        });
        let retry = RetryLayer::new(RetryPolicy::server_retry());
        let service = ServiceBuilder::new().layer(retry).service(service);
        Cluster::with_client(kube::Client::new(service, "ns"), "ns")
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Stores an object as another client would. Watches see it.
    pub(crate) fn put(&self, resource: &str, name: &str, object: Value) {
        let mut state = self.state();
        let key = (resource.to_owned(), name.to_owned());
        let kind = if state.objects.contains_key(&key) { "MODIFIED" } else { "ADDED" };
        state.put(key, object, kind);
        self.changed.notify_waiters();
    }

    /// Sets the status of a pod. Watches see it.
    pub(crate) fn set_status(&self, name: &str, status: Value) {
        let mut pod = self.state().pod(name);
        pod["status"] = status;
        self.put("pods", name, pod);
    }

    /// Marks a pod as being deleted. Watches see it.
    pub(crate) fn terminate(&self, name: &str) {
        let mut pod = self.state().pod(name);
        pod["metadata"]["deletionTimestamp"] = "2024-05-01T10:00:00Z".into();
        pod["metadata"]["deletionGracePeriodSeconds"] = 10.into();
        self.put("pods", name, pod);
    }

    /// Removes a ConfigMap. Watches see it.
    pub(crate) fn remove_config_map(&self, name: &str) {
        self.state().remove("configmaps", name);
        self.changed.notify_waiters();
    }

    /// Removes a pod. Watches see it.
    pub(crate) fn remove(&self, name: &str) {
        self.state().remove("pods", name);
        self.changed.notify_waiters();
    }

    /// Ends all watches, and expires the versions from which they could continue.
    pub(crate) fn forget(&self) {
        let mut state = self.state();
        state.version += 1;
        state.floor = state.version;
        state.events.clear();
        self.changed.notify_waiters();
    }

    /// Sends the last `count` events again, in reverse order, as if they were new.
    pub(crate) fn repeat(&self, count: usize) {
        let mut state = self.state();
        let again: Vec<_> = state.events.iter().rev().take(count).cloned().collect();
        for (_, resource, event) in again {
            state.version += 1;
            let version = state.version;
            state.events.push((version, resource, event));
        }
        self.changed.notify_waiters();
    }

    async fn answer(self: Arc<Self>, request: Request<Body>) -> Response<Lines> {
        let (parts, body) = request.into_parts();
        let Some((_, path)) = parts.uri.path().split_once("/namespaces/ns/") else {
            // Of the APIs of the whole cluster, the server has what a test has put there.
            let found = self.state().cluster_paths.get(parts.uri.path()).cloned();
            let found = found.filter(|_| parts.method == Method::GET);
            let mut answer = found.map_or_else(|| failure(404, "not found"), |found| ok(&found));
            if let Some(date) = self.state().date {
                answer.headers_mut().insert("Date", HeaderValue::from_static(date));
            }
            return answer;
        };
        let path = path.to_owned();
        let (resource, name) = path.split_once('/').unwrap_or((&path, ""));
        let (name, of_status) = name.strip_suffix("/status").map_or((name, false), |n| (n, true));
        let query = parts.uri.query().unwrap_or_default();
        let verb = match parts.method {
            Method::GET if query.contains("watch=true") => "WATCH",
            Method::GET if name.is_empty() => "LIST",
            ref method => method.as_str(),
        };
        let kind = format!("{verb} {resource}");
        let (unreachable, slow) = {
            let mut state = self.state();
            state.calls.push((Instant::now(), kind.clone()));
            let in_flight = state.in_flight.entry(kind.clone()).or_default();
            *in_flight += 1;
            let in_flight = *in_flight;
            let in_flight_max = state.in_flight_max.entry(kind.clone()).or_default();
            *in_flight_max = in_flight.max(*in_flight_max);
            (state.unreachable, state.slow.get(kind.as_str()).copied())
        };
        let _in_flight = InFlight(Arc::clone(&self), kind.clone());
        if unreachable {
            std::future::pending::<()>().await;
        }
        if let Some(slow) = slow {
            tokio::time::sleep(slow).await;
        }
        let throttled = {
            let mut state = self.state();
            let is_next = state.throttles.front().is_some_and(|(of, ..)| *of == kind);
            is_next.then(|| state.throttles.pop_front().unwrap())
        };
        if let Some((_, code, after)) = throttled {
            let mut response = failure(code, "too many requests");
            response.headers_mut().insert("Retry-After", after.into());
            return response;
        }
        let is_json_patch =
            parts.headers.get("content-type").is_some_and(|t| t == "application/json-patch+json");
        let body: Value =
            serde_json::from_slice(&body.collect_bytes().await.unwrap()).unwrap_or_default();
        match verb {
            "WATCH" => self.watch(resource, query),
            "LIST" => self.list(resource, query),
            "GET" => self
                .state()
                .object(resource, name)
                .map_or_else(|| failure(404, "not found"), |o| ok(&o)),
            "POST" => self.create(resource, body),
            "PUT" => self.replace(resource, name, body),
            // Of statuses that are applied, all fields have one owner.
            "PATCH" if of_status => self.patch(resource, name, |object| {
                object["status"] = body["status"].clone();
                Ok(())
            }),
            "PATCH" if is_json_patch => self.patch(resource, name, |object| operate(object, &body)),
            "PATCH" => self.patch(resource, name, |object| {
                merge(object, &body);
                Ok(())
            }),
            "DELETE" => self.delete(resource, name, &body),
            other => panic!("{other}"),
        }
    }

    fn list(&self, resource: &str, query: &str) -> Response<Lines> {
        let state = self.state();
        // The only field selector that is supported is the one for Events of an object.
        let about = query
            .split("involvedObject.uid%3D")
            .nth(1)
            .map(|rest| rest.split(['&', '%']).next().unwrap());
        let fits = |object: &Value| about.is_none_or(|uid| object["involvedObject"]["uid"] == uid);
        let items: Vec<_> = state
            .objects
            .iter()
            .filter(|((of, _), o)| of == resource && fits(o))
            .map(|(_, o)| o)
            .collect();
        let metadata = json!({"resourceVersion": state.version.to_string()});
        ok(&json!({"apiVersion": "v1", "kind": "List", "metadata": metadata, "items": items}))
    }

    fn create(&self, resource: &str, mut object: Value) -> Response<Lines> {
        let mut state = self.state();
        if resource == "pods"
            && let Some((code, message)) = state.refusals.pop_front()
        {
            return failure(code, message);
        }
        if let Some(start) = object["metadata"]["generateName"].as_str() {
            object["metadata"]["name"] = format!("{start}{}", state.version).into();
        }
        let name = object["metadata"]["name"].as_str().unwrap().to_owned();
        if let Err(message) = check(resource, &object) {
            return failure(422, &message);
        }
        if state.object(resource, &name).is_some() {
            return failure(409, "already exists");
        }
        if resource == "pods" {
            state.created += 1;
            object["metadata"]["uid"] = format!("uid-{}", state.created).into();
            object["status"] = json!({"phase": "Pending"});
        }
        state.put((resource.into(), name.clone()), object, "ADDED");
        self.changed.notify_waiters();
        if state.lost > 0 {
            state.lost -= 1;
            return failure(500, "the answer was lost");
        }
        ok(&state.object(resource, &name).unwrap())
    }

    fn replace(&self, resource: &str, name: &str, object: Value) -> Response<Lines> {
        let mut state = self.state();
        let Some(known) = state.object(resource, name) else { return failure(404, "not found") };
        if known["metadata"]["resourceVersion"] != object["metadata"]["resourceVersion"] {
            return failure(409, "the object has been modified");
        }
        state.put((resource.into(), name.into()), object, "MODIFIED");
        self.changed.notify_waiters();
        if state.lost > 0 {
            state.lost -= 1;
            return failure(500, "the answer was lost");
        }
        ok(&state.object(resource, name).unwrap())
    }

    fn patch(
        &self,
        resource: &str,
        name: &str,
        change: impl FnOnce(&mut Value) -> Result<(), String>,
    ) -> Response<Lines> {
        let mut state = self.state();
        let Some(mut object) = state.object(resource, name) else {
            return failure(404, "not found");
        };
        let changed = change(&mut object).and_then(|()| check(resource, &object));
        if let Err(message) = changed {
            return failure(422, &message);
        }
        state.put((resource.into(), name.into()), object, "MODIFIED");
        self.changed.notify_waiters();
        ok(&state.object(resource, name).unwrap())
    }

    fn delete(&self, resource: &str, name: &str, options: &Value) -> Response<Lines> {
        let mut state = self.state();
        match state.object(resource, name) {
            None => failure(404, "not found"),
            Some(object) if object["metadata"]["uid"] != options["preconditions"]["uid"] => {
                failure(409, "another uid")
            }
            Some(_) => {
                state.deleted.push(name.into());
                state.remove(resource, name);
                self.changed.notify_waiters();
                ok(&json!({"apiVersion": "v1", "kind": "Status", "status": "Success"}))
            }
        }
    }

    /// Streams events until the client's timeout, with a bookmark once a minute.
    fn watch(self: Arc<Self>, resource: &str, query: &str) -> Response<Lines> {
        let value =
            |key: &str| query.split('&').find_map(|pair| pair.strip_prefix(key)?.strip_prefix('='));
        let mut from: u64 = value("resourceVersion").unwrap().parse().unwrap();
        let limit = Duration::from_secs(value("timeoutSeconds").unwrap().parse().unwrap());
        if self.state().refuses_watches {
            return failure(500, "no watches now");
        }
        let (sender, receiver) = mpsc::unbounded_channel();
        let resource = resource.to_owned();
        tokio::spawn(async move {
            let end = tokio::time::sleep(limit);
            tokio::pin!(end);
            let mut bookmarks = tokio::time::interval_at(Instant::now() + BOOKMARKS, BOOKMARKS);
            let send =
                |event: &Value| sender.send(format!("{event}\n").into_bytes().into()).is_ok();
            loop {
                let changed = self.changed.notified();
                let mut open = true;
                match self.state().ends_watches {
                    Some(EndedWatches::Empty) => return,
                    Some(EndedWatches::Expired) => {
                        send(&json!({"type": "ERROR", "object": status(410, "expired")}));
                        return;
                    }
                    None => {}
                }
                if self.state().black_hole {
                    return sender.closed().await;
                }
                {
                    let state = self.state();
                    if from < state.floor {
                        // As real servers do: status 200, followed by an error event.
                        let error = status(410, "too old resource version");
                        send(&json!({"type": "ERROR", "object": error}));
                        return;
                    }
                    for (at, of, event) in &state.events {
                        if *at > from && *of == resource {
                            open &= send(event);
                        }
                    }
                    from = from.max(state.version);
                }
                tokio::select! {
                    () = changed, if open => {}
                    () = &mut end => return,
                    () = sender.closed() => return,
                    _ = bookmarks.tick() => {
                        if from > self.state().version {
                            // There are no bookmarks of a version in the future.
                            continue;
                        }
                        let version = from.to_string();
                        let metadata =
                            json!({"resourceVersion": version, "creationTimestamp": null});
                        let object = json!({"apiVersion": "v1", "kind": "X", "metadata": metadata});
                        send(&json!({"type": "BOOKMARK", "object": object}));
                    }
                }
            }
        });
        Response::new(Lines(receiver))
    }
}

impl State {
    fn put(&mut self, key: (String, String), mut object: Value, kind: &str) {
        self.version += 1;
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        self.events.push((self.version, key.0.clone(), json!({"type": kind, "object": object})));
        self.objects.insert(key, object);
    }

    pub(crate) fn remove(&mut self, resource: &str, name: &str) {
        let mut object = self.objects.remove(&(resource.into(), name.into())).unwrap();
        self.version += 1;
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
        self.events.push((
            self.version,
            resource.into(),
            json!({"type": "DELETED", "object": object}),
        ));
    }

    pub(crate) fn object(&self, resource: &str, name: &str) -> Option<Value> {
        self.objects.get(&(resource.into(), name.into())).cloned()
    }

    pub(crate) fn all(&self, resource: &str) -> Vec<Value> {
        self.objects
            .iter()
            .filter(|((of, _), _)| of == resource)
            .map(|(_, object)| object.clone())
            .collect()
    }

    pub(crate) fn pod(&self, name: &str) -> Value {
        self.object("pods", name).unwrap()
    }

    /// Names of the pods.
    pub(crate) fn names(&self) -> Vec<&str> {
        self.objects.keys().filter(|(of, _)| of == "pods").map(|(_, name)| name.as_str()).collect()
    }

    pub(crate) fn drop_all(&mut self, resource: &str) {
        self.objects.retain(|(of, _), _| of != resource);
    }

    /// Number of calls of a kind.
    pub(crate) fn count(&self, kind: &str) -> usize {
        self.calls.iter().filter(|(_, call)| call == kind).count()
    }

    /// Removes everything after this version, as a restored backup does.
    pub(crate) fn travel_back(&mut self, versions: u64) {
        self.version -= versions;
        let version = self.version;
        self.events.retain(|(at, ..)| *at <= version);
    }
}

/// A call in progress.
struct InFlight(Arc<FakeServer>, String);

impl Drop for InFlight {
    fn drop(&mut self) {
        *self.0.state().in_flight.get_mut(&self.1).unwrap() -= 1;
    }
}

/// A body that ends when its sender is dropped.
struct Lines(mpsc::UnboundedReceiver<Bytes>);

impl http_body::Body for Lines {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(context).map(|bytes| bytes.map(|bytes| Ok(Frame::data(bytes))))
    }
}

fn merge(object: &mut Value, patch: &Value) {
    match (object, patch) {
        (Value::Object(object), Value::Object(patch)) => {
            for (key, value) in patch {
                merge(object.entry(key.as_str()).or_insert(Value::Null), value);
            }
        }
        (object, patch) => *object = patch.clone(),
    }
}

/// Applies a JSON patch (RFC 6902), as far as this crate uses it.
fn operate(object: &mut Value, operations: &Value) -> Result<(), String> {
    for operation in operations.as_array().unwrap() {
        let (path, value) = (operation["path"].as_str().unwrap(), &operation["value"]);
        match operation["op"].as_str().unwrap() {
            "test" if object.pointer(path) == Some(value) => {}
            "test" => return Err(format!("testing value {path} failed: test failed")),
            "add" => {
                let (parent, key) = path.rsplit_once('/').unwrap();
                let parent = object
                    .pointer_mut(parent)
                    .ok_or_else(|| format!("add operation does not apply: {path}"))?;
                parent[key] = value.clone();
            }
            other => panic!("{other}"),
        }
    }
    Ok(())
}

/// Checks the size of a ConfigMap, and the status of a TrainJob, as the server does.
fn check(resource: &str, object: &Value) -> Result<(), String> {
    if resource == "trainjobs" && object["status"].is_object() {
        return check_trainer_status(&object["status"]["trainerStatus"]);
    }
    let values = |key: &str| {
        object[key].as_object().into_iter().flatten().map(|(_, v)| v.as_str().unwrap().len())
    };
    let bytes = values("data").sum::<usize>() + values("binaryData").sum::<usize>() / 4 * 3;
    if resource == "configmaps" && bytes > 1 << 20 {
        Err("ConfigMap is invalid: []: Too long: must have at most 1048576 bytes".into())
    } else {
        Ok(())
    }
}

/// By the definition of TrainJobs, `trainer.kubeflow.org_trainjobs.yaml`.
fn check_trainer_status(status: &Value) -> Result<(), String> {
    let known = ["estimatedRemainingSeconds", "lastUpdatedTime", "metrics", "progressPercentage"];
    let is_number = |key: &str, most: i64| {
        status[key].is_null() || status[key].as_i64().is_some_and(|n| (0..=most).contains(&n))
    };
    let is_text =
        |text: &Value| text.as_str().is_some_and(|text| (1..=64).contains(&text.chars().count()));
    let metrics = status["metrics"].as_array().cloned().unwrap_or_default();
    let time = status["lastUpdatedTime"].as_str().unwrap_or_default();
    for (fits, what) in [
        (status.as_object().is_some_and(|s| s.keys().all(|k| known.contains(&&**k))), "a field"),
        (time.parse::<k8s_openapi::jiff::Timestamp>().is_ok(), "lastUpdatedTime"),
        (is_number("progressPercentage", 100), "progressPercentage"),
        (is_number("estimatedRemainingSeconds", i64::from(i32::MAX)), "estimatedRemainingSeconds"),
        (metrics.len() <= 256, "the number of metrics"),
        (metrics.iter().all(|m| is_text(&m["name"]) && is_text(&m["value"])), "a metric"),
    ] {
        if !fits {
            return Err(format!("TrainJob is invalid: status.trainerStatus: {what}: {status}"));
        }
    }
    Ok(())
}

fn ok(value: &Value) -> Response<Lines> {
    let (sender, receiver) = mpsc::unbounded_channel();
    sender.send(serde_json::to_vec(value).unwrap().into()).unwrap();
    Response::new(Lines(receiver))
}

fn failure(code: u16, message: &str) -> Response<Lines> {
    let mut response = ok(&status(code, message));
    *response.status_mut() = StatusCode::from_u16(code).unwrap();
    response
}

fn status(code: u16, message: &str) -> Value {
    let reason = if code == 404 { "NotFound" } else { "Another" };
    json!({
        "apiVersion": "v1", "kind": "Status", "status": "Failure",
        "code": code, "message": message, "reason": reason
    })
}

const BOOKMARKS: Duration = Duration::from_secs(60);
