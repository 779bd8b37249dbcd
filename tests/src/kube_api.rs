//! An API server on loopback that stores objects, for commands that a test starts as processes.
//!
//! It lists, reads and creates objects of one namespace, and merges patches into them. Its watches
//! are silent, as those of a server whose events come late: only a new list shows a change.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};

use crate::s3::{self, Reply, Request};

/// A running server.
#[derive(Clone, Debug)]
pub struct KubeApi {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    /// By plural and name.
    objects: BTreeMap<(String, String), Value>,
    /// Plural and name of the objects of watches.
    watched: BTreeSet<(String, String)>,
}

impl KubeApi {
    /// Starts a server without objects.
    pub fn start() -> Self {
        let make = |address| Self { address, state: Arc::default() };
        s3::start(make, |server, stream| drop(server.serve(stream)))
    }

    /// The content of a kubeconfig whose context has this namespace.
    pub fn kubeconfig(&self, namespace: &str) -> String {
        let server = format!("http://{}", self.address);
        let context = json!({"cluster": "c", "user": "u", "namespace": namespace});
        json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "x",
            "clusters": [{"name": "c", "cluster": {"server": server}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "x", "context": context}],
        })
        .to_string()
    }

    /// Stores an object, such as one of `jobs`.
    pub fn put(&self, plural: &str, mut object: Value) {
        let name = object["metadata"]["name"].as_str().expect("it has a name").to_owned();
        object["metadata"]["resourceVersion"] = "1".into();
        self.state().objects.insert((plural.into(), name), object);
    }

    /// An object that is stored.
    pub fn get(&self, plural: &str, name: &str) -> Value {
        self.state().objects[&(plural.into(), name.into())].clone()
    }

    /// Whether the object of this name has been watched since the last call that returned true.
    pub fn was_watched(&self, plural: &str, name: &str) -> bool {
        self.state().watched.remove(&(plural.into(), name.into()))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self, mut stream: TcpStream) -> std::io::Result<()> {
        let mut reader = BufReader::new(stream.try_clone()?);
        while let Some(request) = Request::read(&mut reader)? {
            let parts: Vec<&str> = request.name.split('/').collect();
            let at = parts.iter().position(|part| *part == "namespaces");
            let parts = at.and_then(|at| parts.get(at + 2..)).unwrap_or_default();
            if request.query.contains_key("watch") {
                let key = (parts.join("/"), selected(&request).to_owned());
                self.state().watched.insert(key);
                stream.write_all(b"HTTP/1.1 200 x\r\ntransfer-encoding: chunked\r\n\r\n")?;
                // Until the client ends it.
                return reader.read_to_end(&mut Vec::new()).map(drop);
            }
            self.state().answer(&request, parts).write(&stream, false)?;
        }
        Ok(())
    }
}

impl State {
    fn answer(&mut self, request: &Request, parts: &[&str]) -> Reply {
        let key = |plural: &str, name: &str| (plural.to_owned(), name.to_owned());
        let found = match (request.method.as_str(), parts) {
            ("GET", [plural]) => {
                let asked = selected(request);
                let is_asked = |(of, name): &(String, String)| {
                    of == plural && (asked.is_empty() || asked == name)
                };
                let items = self.objects.iter().filter(|(key, _)| is_asked(key));
                let items: Vec<&Value> = items.map(|(_, object)| object).collect();
                Some(json!({"metadata": {"resourceVersion": "1"}, "items": items}))
            }
            ("GET", [plural, name]) => self.objects.get(&key(plural, name)).cloned(),
            ("PATCH", [plural, name, ..]) => {
                self.objects.get_mut(&key(plural, name)).map(|object| {
                    merge(object, &serde_json::from_slice(&request.body).unwrap_or_default());
                    object.clone()
                })
            }
            ("POST", [_]) => serde_json::from_slice(&request.body).ok(),
            _ => None,
        };
        let missing = json!({
            "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404,
            "reason": "NotFound", "message": "not found",
        });
        let code = if found.is_some() { 200 } else { 404 };
        Reply::new(code, found.unwrap_or(missing).to_string())
    }
}

/// The name that a field selector asks for; empty without one.
fn selected(request: &Request) -> &str {
    let selector = request.query.get("fieldSelector").map(String::as_str).unwrap_or_default();
    selector.strip_prefix("metadata.name=").unwrap_or_default()
}

/// Applies a JSON merge patch (RFC 7396). A patch of operations changes nothing.
fn merge(object: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else { return };
    for (key, value) in patch {
        match value {
            Value::Object(_) if object[key].is_object() => merge(&mut object[key], value),
            _ => object[key] = value.clone(),
        }
    }
}
