//! Who requested a change of a job: recorded as an Event about the master's Job.
//!
//! A command asks the API server for the name of its user and writes it next to the request into
//! the anchor. The command records the Event if its user may create Events; the master does for
//! each request that reaches it. Both use the same name for the object, so there is one.
//!
//! The Event says what the command reported. The proof is the audit log of the API server.

use std::time::{Duration, SystemTime};

use k8s_openapi::ByteString;
use k8s_openapi::api::authentication::v1::SelfSubjectReview;
use k8s_openapi::api::certificates::v1::{
    CertificateSigningRequest, CertificateSigningRequestSpec,
};
use k8s_openapi::api::core::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::PostParams;
use rcgen::{CertificateParams, KeyPair};
use serde::{Deserialize, Serialize};
use tokio::time::timeout;
use tracing::debug;

use super::anchor::{
    Anchor, CHECKPOINT, Data, DesiredState, INSPECT, MAX_WORKERS, MIN_WORKERS, NUM_WORKERS, STOP,
    STOP_AT_ONCE, SUSPEND, WEIGHT,
};
use super::client::{Cluster, ClusterError, is_code};
use super::events;
use crate::job::Scaling;

/// Writes a request into the anchor of a job, at once in all its keys, with the name of its user.
///
/// # Errors
/// There is no such job, or [`ClusterError`].
pub async fn request(
    cluster: &Cluster,
    anchor: &Anchor,
    mut data: Data,
) -> Result<(), ClusterError> {
    let by = UserRequest::new(cluster, &data).await;
    data.insert(REQUESTED_BY.into(), by.to_json());
    anchor.write(&data).await?;
    // Without the permission to create Events, the master records it.
    if let Ok(anchor) = anchor.read().await {
        by.record(cluster, &anchor.metadata).await;
    }
    Ok(())
}

/// A request of a user, as the anchor holds it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserRequest {
    /// The user's name, as the API server knows it.
    pub user: String,
    /// Key of the anchor that was set.
    pub key: String,
    /// Its value.
    pub value: String,
    /// Other keys that were set with it, and their values.
    #[serde(default, skip_serializing_if = "Data::is_empty")]
    pub with: Data,
    /// Time of the request, in ms since 1970.
    pub at_ms: u64,
}

impl UserRequest {
    /// A request of the user of this command, made now, that sets these keys.
    pub async fn new(cluster: &Cluster, keys: &Data) -> Self {
        let mut with = keys.clone();
        let (key, value) = with.pop_last().unwrap_or_default();
        let user = user_name(cluster).await.unwrap_or_else(|| "unknown".into());
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let at_ms = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
        Self { user, key, value, with, at_ms }
    }

    /// The newest request in an anchor. `None` if the value was changed since without a name.
    #[must_use]
    pub fn in_anchor(data: &Data) -> Option<Self> {
        let request: Self = serde_json::from_str(data.get(REQUESTED_BY)?).ok()?;
        let is_set = |(key, value): (&String, &String)| data.get(key) == Some(value);
        let is_current = request.keys().all(is_set);
        (is_current || request.key == DELETE).then_some(request)
    }

    /// What it changes of the number of workers, and of its limits.
    pub(crate) fn scaling(&self) -> Scaling {
        let keys = self.keys().map(|(key, value)| (key.clone(), value.clone())).collect();
        DesiredState::read(&keys).scaling
    }

    fn keys(&self) -> impl Iterator<Item = (&String, &String)> {
        std::iter::once((&self.key, &self.value)).chain(&self.with)
    }

    /// Content of the anchor's key.
    ///
    /// # Panics
    /// Never: its fields have JSON forms.
    #[must_use]
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("a request is valid JSON")
    }

    /// Records the request as an Event about the Job that owns `anchor`. Returns whether the Event
    /// exists.
    pub async fn record(&self, cluster: &Cluster, anchor: &ObjectMeta) -> bool {
        let Some(about) = events::job_of(cluster, anchor) else { return false };
        let (reason, message) = self.describe();
        let at = i64::try_from(self.at_ms).ok().and_then(|ms| Timestamp::from_millisecond(ms).ok());
        let at = Time(at.unwrap_or_else(Timestamp::now));
        let mut event = events::event(&about, reason, message, at);
        let job = about.name.as_deref().unwrap_or_default();
        event.metadata.name = Some(format!("{job}.{:x}", self.at_ms));
        let api: Api<Event> = cluster.api();
        match timeout(CALL_TIMEOUT, api.create(&PostParams::default(), &event)).await {
            Ok(Ok(_)) => true,
            Ok(Err(error)) if is_code(&error, 409) => true,
            Ok(Err(error)) => {
                debug!(%error, "the request is not recorded as an Event");
                false
            }
            Err(_) => false,
        }
    }

    /// Reason and message of the Event.
    fn describe(&self) -> (&'static str, String) {
        let Self { user, key, value, .. } = self;
        // Events are limited to 1 KiB of text, and anybody who may write the anchor chooses these.
        let user: String = user.chars().take(USER_LEN_MAX).collect();
        let clip = |value: &str| value.chars().take(VALUE_LEN_MAX).collect::<String>();
        match key.as_str() {
            NUM_WORKERS | MIN_WORKERS | MAX_WORKERS | WEIGHT => {
                let values = self.keys().filter_map(|(key, value)| match key.as_str() {
                    NUM_WORKERS => Some(format!("{} workers", clip(value))),
                    MIN_WORKERS | MAX_WORKERS | WEIGHT => Some(format!("{key} {}", clip(value))),
                    _ => None,
                });
                let values: Vec<String> = values.collect();
                ("ScaleRequested", format!("{user} requests {}", values.join(", ")))
            }
            STOP if value == STOP_AT_ONCE => {
                ("StopRequested", format!("{user} requests that the job stops at once"))
            }
            STOP => ("StopRequested", format!("{user} requests that the job stops")),
            SUSPEND if value == "false" => {
                ("ResumeRequested", format!("{user} requests that the job resumes"))
            }
            SUSPEND => ("SuspendRequested", format!("{user} requests that the job is suspended")),
            CHECKPOINT => ("CheckpointRequested", format!("{user} requests a checkpoint")),
            INSPECT => ("DebugRequested", format!("{user} asks what the workers do")),
            _ => ("DeletionRequested", format!("{user} deletes the job")),
        }
    }
}

/// Name of this command's user, as the API server knows it.
async fn user_name(cluster: &Cluster) -> Option<String> {
    let reviews: Api<SelfSubjectReview> = cluster.api_of_all();
    let review = SelfSubjectReview::default();
    match timeout(CALL_TIMEOUT, reviews.create(&PostParams::default(), &review)).await.ok()? {
        Ok(review) => review.status?.user_info?.username,
        // Servers before 1.28 have no such API.
        Err(_) => user_name_by_certificate_request(cluster).await,
    }
}

/// Older servers write the name of the requesting user into a request for a certificate, or into
/// the message that refuses one. It is a dry run: nothing is stored.
async fn user_name_by_certificate_request(cluster: &Cluster) -> Option<String> {
    let request = CertificateParams::default().serialize_request(&KeyPair::generate().ok()?);
    let request = request.ok()?.pem().ok()?;
    let object = CertificateSigningRequest {
        metadata: ObjectMeta {
            generate_name: Some("elasticdl-who-am-i-".into()),
            ..ObjectMeta::default()
        },
        spec: CertificateSigningRequestSpec {
            request: ByteString(request.into_bytes()),
            signer_name: "kubernetes.io/kube-apiserver-client".into(),
            usages: Some(vec!["client auth".into()]),
            ..CertificateSigningRequestSpec::default()
        },
        status: None,
    };
    let requests: Api<CertificateSigningRequest> = cluster.api_of_all();
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    match timeout(CALL_TIMEOUT, requests.create(&dry_run, &object)).await.ok()? {
        Ok(answer) => answer.spec.username,
        Err(kube::Error::Api(status)) => user_in_refusal(&status.message).map(Into::into),
        Err(_) => None,
    }
}

/// Name in a message such as `… is forbidden: User "jane" cannot create resource …`.
fn user_in_refusal(message: &str) -> Option<&str> {
    let (user, rest) = message.split_once("User \"")?.1.split_once('"')?;
    rest.starts_with(" cannot ").then_some(user)
}

/// Key of the anchor for the newest request and its user.
pub const REQUESTED_BY: &str = "requested-by";
/// Stands for the key of a request to delete the job, which has none.
pub const DELETE: &str = "delete";

const CALL_TIMEOUT: Duration = Duration::from_secs(5);
const USER_LEN_MAX: usize = 200;
const VALUE_LEN_MAX: usize = 20;

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::testing::FakeServer;
    use super::*;

    fn request(key: &str, value: &str) -> UserRequest {
        let (user, key, value) = ("jane".into(), key.into(), value.into());
        UserRequest { user, key, value, with: Data::new(), at_ms: 0x5a }
    }

    #[test]
    fn a_request_belongs_to_the_user_who_set_the_present_value() {
        let data = |key: &str, value: &str, by: &UserRequest| {
            Data::from([(key.into(), value.into()), (REQUESTED_BY.into(), by.to_json())])
        };
        let four = request(NUM_WORKERS, "4");
        assert_eq!(UserRequest::in_anchor(&data(NUM_WORKERS, "4", &four)), Some(four.clone()));
        // Another client has set it since, without a name.
        assert_eq!(UserRequest::in_anchor(&data(NUM_WORKERS, "5", &four)), None);
        // Another client has changed one of two values since.
        let both = UserRequest { with: data(MAX_WORKERS, "9", &four), ..four.clone() };
        let mut present = both.with.clone();
        present.extend(data(NUM_WORKERS, "4", &both));
        assert_eq!(UserRequest::in_anchor(&present), None);
        let delete = request(DELETE, "");
        assert_eq!(UserRequest::in_anchor(&data("other", "", &delete)), Some(delete));
        assert_eq!(UserRequest::in_anchor(&Data::from([(REQUESTED_BY.into(), "x".into())])), None);
    }

    #[test]
    fn the_user_is_read_from_a_refusal() {
        let message = "certificatesigningrequests.certificates.k8s.io is forbidden: User \"a:b\" \
                       cannot create resource \"certificatesigningrequests\"";
        assert_eq!(user_in_refusal(message), Some("a:b"));
        for other in ["User \"a\" is unknown", "forbidden", "User \"a"] {
            assert_eq!(user_in_refusal(other), None, "{other}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_is_one_event_of_the_job_by_command_and_master() {
        let (fake, cluster) = FakeServer::start();
        let anchor = json!({"name": "j", "uid": "a", "ownerReferences": [
            {"apiVersion": "batch/v1", "kind": "Job", "name": "j-master", "uid": "job"}
        ]});
        let anchor = serde_json::from_value(anchor).unwrap();
        for by in [request(NUM_WORKERS, "4"), request(NUM_WORKERS, "4")] {
            assert!(by.record(&cluster, &anchor).await);
        }
        let stop = UserRequest { at_ms: 0x5b, ..request(STOP, "true") };
        assert!(stop.record(&cluster, &anchor).await);
        let weight = UserRequest { at_ms: 0x5e, ..request(WEIGHT, "2") };
        assert!(weight.record(&cluster, &anchor).await);
        for (at_ms, value) in [(0x5c, "true"), (0x5d, "false")] {
            let suspend = UserRequest { at_ms, ..request(SUSPEND, value) };
            assert!(suspend.record(&cluster, &anchor).await);
        }
        let events = fake.state().all("events");
        let texts: Vec<_> = events
            .iter()
            .map(|event| (event["reason"].as_str().unwrap(), event["message"].as_str().unwrap()))
            .collect();
        let expected = [
            ("ScaleRequested", "jane requests 4 workers"),
            ("StopRequested", "jane requests that the job stops"),
            ("SuspendRequested", "jane requests that the job is suspended"),
            ("ResumeRequested", "jane requests that the job resumes"),
            ("ScaleRequested", "jane requests weight 2"),
        ];
        assert_eq!(texts, expected);
        assert_eq!(
            (&events[0]["involvedObject"]["uid"], &events[0]["type"]),
            (&json!("job"), &json!("Normal"))
        );
        fake.state().unreachable = true;
        assert!(!stop.record(&cluster, &anchor).await);
    }
}
