//! An API server that keeps pods, and can be made to do what a real one does only now and then.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};

use http::{Method, Request, Response, StatusCode};
use kube::client::Body;
use serde_json::{Value, json};
use tokio::sync::Notify;

use super::client::Cluster;

/// The server.
#[derive(Default)]
pub(super) struct Fake {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Default)]
pub(super) struct State {
    version: u64,
    pods: BTreeMap<String, Value>,
    /// What watches are told, by version.
    events: Vec<(u64, Value)>,
    /// Versions before this one are forgotten.
    pub(super) floor: u64,
    /// Answers to the next creations: code and message.
    pub(super) refusals: VecDeque<(u16, &'static str)>,
    /// How many of the next creations succeed without the client being told.
    pub(super) lost: u32,
    /// Watches are refused.
    pub(super) deaf: bool,
    pub(super) created: u32,
    pub(super) deleted: Vec<String>,
    pub(super) lists: u32,
    /// How often a single pod was asked for.
    pub(super) looked_at: u32,
}

impl Fake {
    pub(super) fn start() -> (Arc<Self>, Cluster) {
        let fake = Arc::new(Self::default());
        let server = Arc::clone(&fake);
        let service = tower::service_fn(move |request| {
            let server = Arc::clone(&server);
            async move { Ok::<_, std::convert::Infallible>(server.answer(request).await) }
        });
        let cluster = Cluster::with_client(kube::Client::new(service, "ns"), "ns");
        (fake, cluster)
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Gives a pod this status; watches hear of it.
    pub(super) fn set_status(&self, name: &str, status: Value) {
        let mut state = self.state();
        let mut pod = state.pods[name].clone();
        pod["status"] = status;
        state.put(name, pod, "MODIFIED");
        self.changed.notify_waiters();
    }

    /// Removes a pod; watches hear of it.
    pub(super) fn remove(&self, name: &str) {
        self.state().remove(name);
        self.changed.notify_waiters();
    }

    /// Ends all watches, and forgets what they could have gone on from.
    pub(super) fn forget(&self) {
        let mut state = self.state();
        state.version += 1;
        state.floor = state.version;
        state.events.clear();
        self.changed.notify_waiters();
    }

    async fn answer(&self, request: Request<Body>) -> Response<Body> {
        let (parts, body) = request.into_parts();
        let name =
            parts.uri.path().strip_prefix("/api/v1/namespaces/ns/pods").unwrap().trim_start_matches('/');
        let query = parts.uri.query().unwrap_or_default();
        let body: Value = serde_json::from_slice(&body.collect_bytes().await.unwrap()).unwrap_or_default();
        match parts.method {
            Method::GET if query.contains("watch=true") => self.watch(query).await,
            Method::GET if name.is_empty() => {
                let mut state = self.state();
                state.lists += 1;
                let metadata = json!({"resourceVersion": state.version.to_string()});
                let items: Vec<_> = state.pods.values().cloned().collect();
                ok(&json!({"apiVersion": "v1", "kind": "PodList", "metadata": metadata, "items": items}))
            }
            Method::GET => {
                let mut state = self.state();
                state.looked_at += 1;
                state.pods.get(name).map_or_else(|| failure(404, "not found"), ok)
            }
            Method::POST => self.create(body),
            Method::DELETE => {
                let mut state = self.state();
                let uid = state.pods.get(name).map(|pod| pod["metadata"]["uid"].clone());
                match uid {
                    None => failure(404, "not found"),
                    Some(uid) if uid != body["preconditions"]["uid"] => failure(409, "another uid"),
                    Some(_) => {
                        state.deleted.push(name.into());
                        state.remove(name);
                        self.changed.notify_waiters();
                        ok(&json!({"apiVersion": "v1", "kind": "Status", "status": "Success"}))
                    }
                }
            }
            other => panic!("{other}"),
        }
    }

    fn create(&self, mut pod: Value) -> Response<Body> {
        let mut state = self.state();
        if let Some((code, message)) = state.refusals.pop_front() {
            return failure(code, message);
        }
        let name = pod["metadata"]["name"].as_str().unwrap().to_owned();
        if state.pods.contains_key(&name) {
            return failure(409, "already exists");
        }
        state.created += 1;
        pod["metadata"]["uid"] = format!("uid-{}", state.created).into();
        pod["status"] = json!({"phase": "Pending"});
        state.put(&name, pod, "ADDED");
        self.changed.notify_waiters();
        if state.lost > 0 {
            state.lost -= 1;
            return failure(500, "the answer was lost");
        }
        ok(&state.pods[&name])
    }

    /// Answers when there is something to tell; the client comes back for more.
    async fn watch(&self, query: &str) -> Response<Body> {
        let from = query.split('&').find_map(|pair| pair.strip_prefix("resourceVersion=")).unwrap();
        let from: u64 = from.parse().unwrap();
        loop {
            let changed = self.changed.notified();
            {
                let state = self.state();
                if state.deaf {
                    return failure(500, "no watches now");
                }
                if from < state.floor {
                    // As servers do: well, and then not.
                    let status = status(410, "too old resource version");
                    return lines([&json!({"type": "ERROR", "object": status})]);
                }
                let news: Vec<_> = state.events.iter().filter(|(at, _)| *at > from).map(|(_, e)| e).collect();
                if !news.is_empty() {
                    return lines(news);
                }
            }
            changed.await;
        }
    }
}

impl State {
    fn put(&mut self, name: &str, mut pod: Value, kind: &str) {
        self.version += 1;
        pod["metadata"]["resourceVersion"] = self.version.to_string().into();
        self.events.push((self.version, json!({"type": kind, "object": pod})));
        self.pods.insert(name.into(), pod);
    }

    fn remove(&mut self, name: &str) {
        let mut pod = self.pods.remove(name).unwrap();
        self.version += 1;
        pod["metadata"]["resourceVersion"] = self.version.to_string().into();
        self.events.push((self.version, json!({"type": "DELETED", "object": pod})));
    }

    pub(super) fn names(&self) -> Vec<&str> {
        self.pods.keys().map(String::as_str).collect()
    }
}

fn ok(value: &Value) -> Response<Body> {
    Response::new(Body::from(serde_json::to_vec(value).unwrap()))
}

fn lines<'a>(values: impl IntoIterator<Item = &'a Value>) -> Response<Body> {
    let text: String = values.into_iter().map(|value| format!("{value}\n")).collect();
    Response::new(Body::from(text.into_bytes()))
}

fn failure(code: u16, message: &str) -> Response<Body> {
    let mut response = ok(&status(code, message));
    *response.status_mut() = StatusCode::from_u16(code).unwrap();
    response
}

fn status(code: u16, message: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Status", "status": "Failure", "code": code, "message": message, "reason": "R"
    })
}
