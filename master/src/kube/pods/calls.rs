//! API calls that create and delete pods, each retried until it has a final answer.
//!
//! **Invariants:** nothing is sent without the leader Lease. When the server is slow, deletions
//! precede creations: they free capacity.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::{DeleteParams, PostParams, Preconditions};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;
use tracing::warn;

use super::groups::PodGroups;
use crate::job::Wait;
use crate::kube::client::{is_code, is_quota, with_hint};
use crate::kube::gang::gang_of;
use crate::kube::leader_lease::LeaseGuard;
use crate::kube::objects::LAUNCH_LABEL;
use crate::kube::priority_tiers;
use crate::kube::watch::backoff;

/// Sends the calls.
#[derive(Clone, Debug)]
pub(super) struct PodClient {
    pub(super) api: Api<Pod>,
    /// PodGroups, if pods are placed together.
    groups: Option<PodGroups>,
    gate: Arc<CallGate>,
    guard: LeaseGuard,
}

/// What a creation depends on.
#[derive(Clone, Copy, Debug)]
pub(super) struct CreateContext<'a> {
    /// Uid of the pod's owner.
    pub(super) owner: &'a str,
    /// Set when the pod is no longer wanted.
    pub(super) cancelled: &'a AtomicBool,
    /// Whether a worker of the job has run: a pod like this one was accepted before, so a rejection
    /// is temporary.
    pub(super) has_run: &'a AtomicBool,
}

/// Result of a creation.
#[derive(Clone, Debug)]
pub(super) enum CreateOutcome {
    /// The launch was killed before the pod was created.
    Cancelled,
    Created(Box<Pod>),
    /// The cluster has no priority class of this name.
    MissingClass(String),
    /// The server will never accept the pod.
    Rejected(String),
}

impl PodClient {
    pub(super) fn new(api: Api<Pod>, groups: Option<PodGroups>, guard: LeaseGuard) -> Self {
        Self { api, groups, gate: Arc::new(CallGate::new()), guard }
    }

    /// Creates a pod. `report_wait` is called with what the creation waits for.
    pub(super) async fn create(
        mut self,
        pod: &Pod,
        context: CreateContext<'_>,
        report_wait: impl Fn(Wait),
    ) -> CreateOutcome {
        let CreateContext { owner, cancelled, has_run } = context;
        let mut failures = 0;
        loop {
            let gate = Arc::clone(&self.gate);
            let permit = gate.for_creation().await;
            if cancelled.load(Ordering::Relaxed) {
                return CreateOutcome::Cancelled;
            }
            let attempt = try_create(&self.api, self.groups.as_ref(), pod, owner);
            let Some(outcome) = self.guard.during(attempt).await else { continue };
            let why = match outcome {
                Ok(CreateOutcome::Rejected(text)) if has_run.load(Ordering::Relaxed) => {
                    Retry { text, is_quota: false }
                }
                Ok(outcome) => return outcome,
                Err(why) => why,
            };
            drop(permit);
            if failures == 0 || why.is_quota {
                report_wait(if why.is_quota {
                    Wait::Capacity(why.text)
                } else {
                    Wait::Scheduling(Some(why.text))
                });
            }
            let least = if why.is_quota { QUOTA_PAUSE } else { Duration::ZERO };
            tokio::time::sleep(backoff(failures).max(least)).await;
            failures += 1;
        }
    }

    /// Deletes the PodGroup of a gang that is over.
    pub(super) async fn delete_group(mut self, gang: &str) {
        let Some(groups) = self.groups.clone() else { return };
        let mut failures = 0;
        loop {
            match self.guard.during(timeout(CALL_TIMEOUT, groups.delete(gang))).await {
                None => continue,
                Some(Ok(Ok(()))) => return,
                Some(Ok(Err(error))) if is_final(&error) => {
                    return warn!(gang, %error, "a PodGroup can't be deleted");
                }
                Some(_) => {}
            }
            tokio::time::sleep(backoff(failures)).await;
            failures += 1;
        }
    }

    /// Deletes the pod with this uid, and retries until the server answers.
    pub(super) async fn delete(mut self, name: &str, uid: String, grace_s: u32) {
        let params = DeleteParams {
            grace_period_seconds: Some(grace_s),
            preconditions: Some(Preconditions { uid: Some(uid), resource_version: None }),
            ..DeleteParams::default()
        };
        let mut failures = 0;
        loop {
            let gate = Arc::clone(&self.gate);
            let permit = gate.for_deletion().await;
            let call = timeout(CALL_TIMEOUT, self.api.delete(name, &params));
            match self.guard.during(call).await {
                None => continue,
                Some(Ok(Ok(_))) => return,
                // Deleted already, or another pod has the name; or a final refusal.
                Some(Ok(Err(error))) if is_final(&error) || is_code(&error, 409) => {
                    if !is_code(&error, 404) && !is_code(&error, 409) {
                        warn!(name, %error, "a worker's pod can't be deleted");
                    }
                    return;
                }
                Some(_) => {}
            }
            drop(permit);
            tokio::time::sleep(backoff(failures)).await;
            failures += 1;
        }
    }
}

/// A temporary failure.
struct Retry {
    text: String,
    is_quota: bool,
}

async fn try_create(
    api: &Api<Pod>,
    groups: Option<&PodGroups>,
    pod: &Pod,
    owner: &str,
) -> Result<CreateOutcome, Retry> {
    let later = |text: String| Err(Retry { text, is_quota: false });
    let create = async {
        let Some(groups) = groups else { return api.create(&PostParams::default(), pod).await };
        if let Some(gang) = gang_of(pod) {
            groups.ensure(gang).await?;
        }
        groups.create_pod(api, pod).await
    };
    let error = match timeout(CALL_TIMEOUT, create).await {
        Ok(Ok(created)) => return Ok(CreateOutcome::Created(Box::new(created))),
        Ok(Err(error)) => error,
        Err(_) => return later("the API server does not answer".into()),
    };
    if is_code(&error, 409)
        && let Ok(Some(found)) = timeout(CALL_TIMEOUT, find_existing(api, pod, owner)).await
    {
        return Ok(found);
    }
    match &error {
        kube::Error::Api(status) if status.code == 403 && is_quota(&status.message) => {
            Err(Retry { text: with_hint(&status.message), is_quota: true })
        }
        kube::Error::Api(status) if is_final(&error) => {
            Ok(match priority_tiers::missing_class(&status.message) {
                Some(class) => CreateOutcome::MissingClass(class.into()),
                None => CreateOutcome::Rejected(with_hint(&status.message)),
            })
        }
        error => later(format!("the API server can't be reached: {error}")),
    }
}

/// Handles a name that exists: the pod is this launch's own if an earlier answer was lost. `None`:
/// unknown, retry.
async fn find_existing(api: &Api<Pod>, wanted: &Pod, owner: &str) -> Option<CreateOutcome> {
    let name = wanted.metadata.name.clone()?;
    let there = api.get_opt(&name).await.ok()??;
    let owners = there.metadata.owner_references.iter().flatten();
    let launch =
        |pod: &Pod| pod.metadata.labels.as_ref().and_then(|l| l.get(LAUNCH_LABEL)).cloned();
    let is_ours =
        owners.map(|o| o.uid.as_str()).any(|uid| uid == owner) && launch(&there) == launch(wanted);
    Some(if is_ours {
        CreateOutcome::Created(Box::new(there))
    } else {
        CreateOutcome::Rejected(format!("a pod {name} exists already, and is not this job's"))
    })
}

/// Returns whether a retry can't help.
fn is_final(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status)
        if (400..500).contains(&status.code) && ![408, 409, 429].contains(&status.code))
}

/// Limits the number of concurrent calls; deletions precede creations.
#[derive(Debug)]
struct CallGate {
    permits: Semaphore,
    /// Number of deletions that wait for a permit.
    deletions: AtomicUsize,
}

impl CallGate {
    fn new() -> Self {
        Self { permits: Semaphore::new(CALLS_MAX), deletions: AtomicUsize::new(0) }
    }

    async fn for_deletion(&self) -> SemaphorePermit<'_> {
        let _waits = WaitingCount::new(&self.deletions);
        self.permits.acquire().await.expect("the gate is never closed")
    }

    async fn for_creation(&self) -> SemaphorePermit<'_> {
        loop {
            let permit = self.permits.acquire().await.expect("the gate is never closed");
            if self.deletions.load(Ordering::Relaxed) == 0 {
                return permit;
            }
            // The permit is released: a deletion takes it, or another creation that releases it
            // likewise.
        }
    }
}

/// Increments a counter for as long as it exists.
struct WaitingCount<'a>(&'a AtomicUsize);

impl<'a> WaitingCount<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for WaitingCount<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// About as many as workers are lost at once.
const CALLS_MAX: usize = 32;
pub(super) const CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// Minimum delay between two attempts of a pod that exceeds a quota.
const QUOTA_PAUSE: Duration = Duration::from_secs(5);
