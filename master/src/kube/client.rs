//! The way to the API server, and what its refusals mean for the user.

use std::time::Duration;

use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};

/// A namespace of a cluster.
#[derive(Clone)]
pub struct Cluster {
    client: Client,
    /// The namespace.
    pub namespace: String,
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cluster").field("namespace", &self.namespace).finish_non_exhaustive()
    }
}

/// Which cluster, by the user's own words.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterChoice {
    /// A context of the kubeconfig; its current one for `None`.
    pub context: Option<String>,
    /// The context's for `None`.
    pub namespace: Option<String>,
}

impl Cluster {
    /// Reads the configuration as kubectl does: `$KUBECONFIG`, `~/.kube/config`, and in a pod its
    /// service account.
    ///
    /// # Errors
    /// There is none, or it does not fit.
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

    /// Whether there is a configuration at all; no server is asked.
    #[must_use]
    pub fn is_configured() -> bool {
        Kubeconfig::read().is_ok() || Config::incluster().is_ok()
    }

    fn from_config(mut config: Config, namespace: Option<&str>) -> Result<Self, ClusterError> {
        config.connect_timeout = Some(CONNECT_TIMEOUT);
        let namespace = namespace.unwrap_or(&config.default_namespace).to_owned();
        let client = Client::try_from(config).map_err(|e| ClusterError::NoConfig(e.to_string()))?;
        Ok(Self { client, namespace })
    }

    /// A client that speaks with something else than a server that a configuration names.
    #[must_use]
    pub fn with_client(client: Client, namespace: &str) -> Self {
        Self { client, namespace: namespace.into() }
    }

    /// Objects of a kind in the namespace.
    pub(super) fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope>,
        K::DynamicType: Default,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Changes an object by a list of operations (RFC 6902), all of them or none: a `test` among
    /// them that fails is answered with 422, as is a change that makes the object invalid.
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

    /// Puts the server's refusal of what was being done into the user's words.
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
    /// A job, or what would be part of one, is there already. Look at it or delete it.
    #[error("{0}")]
    Exists(String),
    /// A right is missing. Ask who administers the cluster.
    #[error(
        "can't {doing}: {message}; the rights that elasticdl needs are in manifests/rbac.yaml: \
         sed 's/namespace: elasticdl/namespace: {namespace}/' manifests/rbac.yaml | kubectl apply -f -"
    )]
    Forbidden {
        /// What was being done.
        doing: String,
        /// The server's words, which name the missing right.
        message: String,
        /// Where it is missing.
        namespace: String,
    },
    /// No job of this name.
    #[error(
        "there is no job {job} in the namespace {namespace}; `elasticdl list` shows those that are there"
    )]
    NoSuchJob {
        /// The name.
        job: String,
        /// Where it was looked for.
        namespace: String,
    },
    /// No configuration. Write one, or name it.
    #[error(
        "no cluster is configured ({0}); set KUBECONFIG or write ~/.kube/config, as for kubectl, \
         or add --local to use processes of this machine"
    )]
    NoConfig(String),
    /// The server understood, and refused.
    #[error("can't {doing}: the API server answered: {message}")]
    Refused {
        /// What was being done.
        doing: String,
        /// The server's words.
        message: String,
    },
    /// The server does not know who asks.
    #[error(
        "the API server does not know you: {message}; are the credentials of the kubeconfig still good?"
    )]
    Unknown {
        /// The server's words.
        message: String,
    },
    /// No answer. Try again.
    #[error("can't {doing}: no answer from the API server: {message}")]
    Unreachable {
        /// What was being done.
        doing: String,
        /// The error of the connection.
        message: String,
    },
}

/// A quota that is used up is no missing right, though its answer has the same code.
pub(super) fn is_quota(message: &str) -> bool {
    message.contains("exceeded quota") || message.contains("failed quota")
}

/// Whether it is this answer of the server's.
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

/// The media type of a list of operations.
const JSON_PATCH: &str = "application/json-patch+json";
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
