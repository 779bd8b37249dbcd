//! Client of the API server, and user-readable errors for its refusals.

use std::time::Duration;

use k8s_openapi::api::core::v1::Namespace;
use k8s_openapi::jiff::Timestamp;
use k8s_openapi::jiff::fmt::rfc2822;
use kube::client::Body;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};

use super::retry::retry;

/// A namespace of a cluster, and the client with which it is accessed.
#[derive(Clone)]
pub struct Cluster {
    client: Client,
    /// Name of the namespace.
    pub namespace: String,
    /// Port of the API server, as the configuration has it.
    port: Option<u16>,
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cluster").field("namespace", &self.namespace).finish_non_exhaustive()
    }
}

/// The user's choice of a cluster and a namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterChoice {
    /// Context of the kubeconfig. `None`: its current context.
    pub context: Option<String>,
    /// Namespace. `None`: the context's default.
    pub namespace: Option<String>,
}

impl Cluster {
    /// Reads the configuration as kubectl does: `$KUBECONFIG`, `~/.kube/config`, or in a pod its
    /// service account.
    ///
    /// # Errors
    /// There is no configuration, or it is invalid.
    pub async fn connect(choice: &ClusterChoice) -> Result<Self, ClusterError> {
        let config = match &choice.context {
            None => Config::infer().await.map_err(|e| ClusterError::NoConfig(e.to_string()))?,
            Some(context) => {
                let options = KubeConfigOptions {
                    context: Some(context.clone()),
                    ..KubeConfigOptions::default()
                };
                Config::from_kubeconfig(&options)
                    .await
                    .map_err(|e| ClusterError::NoConfig(e.to_string()))?
            }
        };
        Self::from_config(config, choice.namespace.as_deref())
    }

    /// Returns whether there is a configuration at all. Sends nothing.
    #[must_use]
    pub fn is_configured() -> bool {
        Kubeconfig::read().is_ok() || Config::incluster().is_ok()
    }

    fn from_config(mut config: Config, namespace: Option<&str>) -> Result<Self, ClusterError> {
        config.connect_timeout = Some(CONNECT_TIMEOUT);
        let namespace = namespace.unwrap_or(&config.default_namespace).to_owned();
        let port = config.cluster_url.port_u16();
        let client = Client::try_from(config).map_err(|e| ClusterError::NoConfig(e.to_string()))?;
        Ok(Self { client, namespace, port })
    }

    /// A cluster with the client of a fake server.
    #[cfg(test)]
    pub(crate) fn with_client(client: Client, namespace: &str) -> Self {
        Self { client, namespace: namespace.into(), port: None }
    }

    /// Ports at which pods may find the API server: the usual ones, and that of the configuration.
    #[must_use]
    pub fn api_server_ports(&self) -> Vec<u16> {
        let other = self.port.filter(|port| !API_SERVER_PORTS.contains(port));
        API_SERVER_PORTS.into_iter().chain(other).collect()
    }

    /// Returns the API of a kind of objects in the namespace.
    pub(super) fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope>,
        K::DynamicType: Default,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Returns whether the cluster assigns the user ids of pods by namespace, as OpenShift does.
    pub async fn assigns_user_ids(&self) -> bool {
        let namespaces: Api<Namespace> = self.api_of_all();
        // Without the permission to read the namespace it is unknown.
        let found = namespaces.get_metadata_opt(&self.namespace).await.ok().flatten();
        let annotations = found.and_then(|namespace| namespace.metadata.annotations);
        annotations.is_some_and(|annotations| annotations.contains_key(USER_IDS))
    }

    /// Returns the API of a kind of objects that belong to no namespace.
    pub(super) fn api_of_all<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = k8s_openapi::ClusterResourceScope>,
        K::DynamicType: Default,
    {
        Api::all(self.client.clone())
    }

    /// Applies a JSON patch (RFC 6902) atomically. A failed `test` operation is answered with 422,
    /// as is a patch that makes the object invalid.
    pub(super) async fn patch_json<K>(
        &self,
        api: &Api<K>,
        name: &str,
        operations: &serde_json::Value,
    ) -> Result<K, kube::Error>
    where
        K: Clone + kube::Resource + serde::de::DeserializeOwned,
    {
        let request = http::Request::patch(format!("{}/{name}", api.resource_url()))
            .header(http::header::CONTENT_TYPE, JSON_PATCH)
            .body(operations.to_string().into_bytes())
            .map_err(kube::Error::HttpError)?;
        self.client.request(request).await
    }

    /// Creates an object of any kind.
    pub(super) async fn post(
        &self,
        path: &str,
        object: &serde_json::Value,
    ) -> Result<serde_json::Value, kube::Error> {
        let request = http::Request::post(path)
            .header(http::header::CONTENT_TYPE, "application/json")
            .body(object.to_string().into_bytes())
            .map_err(kube::Error::HttpError)?;
        self.client.request(request).await
    }

    /// Deletes an object of any kind.
    pub(super) async fn delete(&self, path: &str) -> Result<serde_json::Value, kube::Error> {
        let request =
            http::Request::delete(path).body(Vec::new()).map_err(kube::Error::HttpError)?;
        self.client.request(request).await
    }

    /// Reads an object of any kind, or what an API offers.
    pub(super) async fn get(&self, path: &str) -> Result<serde_json::Value, kube::Error> {
        let request = http::Request::get(path).body(Vec::new()).map_err(kube::Error::HttpError)?;
        self.client.request(request).await
    }

    /// Returns the time by the server's clock, which objects are stamped with: the clock of this
    /// host may differ from it, or be set. Without an answer, the time by this host's clock.
    pub(crate) async fn now(&self) -> Timestamp {
        let doing = "read the API server's clock";
        let date = retry(doing, || async {
            let request = http::Request::get("/version").body(Body::empty());
            let request = request.map_err(kube::Error::HttpError);
            let answer = async { self.client.send(request?).await }.await;
            // A refusal has a date, too.
            let answer = answer.map_err(|error| self.explain(doing, error))?;
            let date = answer.headers().get(http::header::DATE);
            Ok(date.and_then(|date| rfc2822::parse(date.to_str().ok()?).ok()))
        });
        date.await.ok().flatten().map_or_else(Timestamp::now, |date| date.timestamp())
    }

    /// Turns an error of the server into one for the user. `doing`: the operation that failed.
    pub(super) fn explain(&self, doing: &str, error: kube::Error) -> ClusterError {
        match error {
            kube::Error::Api(status) if status.code == 401 => {
                ClusterError::Unknown { message: status.message }
            }
            kube::Error::Api(status) if status.code == 403 && !is_quota(&status.message) => {
                ClusterError::Forbidden {
                    doing: doing.into(),
                    message: status.message,
                    namespace: self.namespace.clone(),
                }
            }
            kube::Error::Api(status) if PASSING.contains(&status.code) => {
                let message = format!("{} (HTTP status {})", status.message, status.code);
                ClusterError::Unreachable { doing: doing.into(), message }
            }
            kube::Error::Api(status) => {
                ClusterError::Refused { doing: doing.into(), message: status.message }
            }
            error => ClusterError::Unreachable { doing: doing.into(), message: innermost(&error) },
        }
    }
}

/// Why a cluster did not do what was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ClusterError {
    /// A job, or an object that would be part of it, exists already. Inspect it or delete it.
    #[error("{0}")]
    Exists(String),
    /// A permission is missing. Ask the administrator of the cluster.
    #[error(
        "can't {doing}: {message}; users need the cluster role `edit` in the namespace \
         (`elasticdl doctor` says what they lack), and masters the role in manifests/rbac.yaml: \
         sed 's/namespace: elasticdl/namespace: {namespace}/' manifests/rbac.yaml \
         | kubectl apply -f -"
    )]
    Forbidden {
        /// Operation that failed.
        doing: String,
        /// The server's message, which names the missing permission.
        message: String,
        /// Namespace in which it is missing.
        namespace: String,
    },
    /// An object that an option names does not exist. Create it, or correct the option.
    #[error("{option}: there is no {kind} {name} in the namespace {namespace}")]
    Missing {
        /// Option that names the object.
        option: &'static str,
        /// Kind of the object.
        kind: &'static str,
        /// Name of the object.
        name: String,
        /// Namespace that was searched.
        namespace: String,
    },
    /// There is no log of this master or worker.
    #[error("{0}")]
    NoLog(String),
    /// There is no job of this name.
    #[error(
        "there is no job {job} in the namespace {namespace}; \
         `elasticdl list --namespace {namespace}` shows the existing ones"
    )]
    NoSuchJob {
        /// Name of the job.
        job: String,
        /// Namespace that was searched.
        namespace: String,
    },
    /// There is no configuration. Create one, or name it.
    #[error(
        "no cluster is configured ({0}); set KUBECONFIG or write ~/.kube/config, as for kubectl, \
         or add --local to use processes of this machine"
    )]
    NoConfig(String),
    /// The server understood the request and refused it.
    #[error("can't {doing}: the API server answered: {message}")]
    Refused {
        /// Operation that failed.
        doing: String,
        /// The server's message.
        message: String,
    },
    /// The server does not accept the credentials.
    #[error(
        "the API server does not accept your credentials: {message}; are those of the kubeconfig \
         still valid?"
    )]
    Unknown {
        /// The server's message.
        message: String,
    },
    /// There is no answer, or one that says that the server, or what is behind it, can't answer for
    /// now. Try again.
    #[error("can't {doing}: the API server can't answer: {message}")]
    Unreachable {
        /// Operation that failed.
        doing: String,
        /// Error of the connection.
        message: String,
    },
}

/// Returns whether a 403 means an exceeded quota rather than a missing permission: both have the
/// same code.
pub(super) fn is_quota(message: &str) -> bool {
    message.contains("exceeded quota") || message.contains("failed quota")
}

/// Returns the server's message about a pod, with the option that helps, if there is one.
pub(super) fn with_hint(message: &str) -> String {
    if message.contains("must specify limits.") {
        format!("{message}; --worker-resources and --master-resources take limits.cpu=N")
    } else if message.contains("security context constraint") {
        format!(
            "{message}; `securityContext: {{runAsUser: null, runAsGroup: null, fsGroup: null}}` in \
             --worker-pod-template and --master-pod-template leaves the ids to the cluster"
        )
    } else {
        message.to_owned()
    }
}

/// Returns whether the error is an answer of the server with this status code.
pub(super) fn is_code(error: &kube::Error, code: u16) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == code)
}

fn innermost(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

/// Status codes by which a server, or a proxy before it, says that it can't answer for now.
const PASSING: [u16; 6] = [408, 429, 500, 502, 503, 504];
/// Media type of a JSON patch.
const JSON_PATCH: &str = "application/json-patch+json";
/// Ports of API servers: that of the Service, and the default of the program.
pub const API_SERVER_PORTS: [u16; 2] = [443, 6443];
/// Annotation of namespaces in which the cluster assigns user ids.
const USER_IDS: &str = "openshift.io/sa.scc.uid-range";
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
