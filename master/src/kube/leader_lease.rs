//! The leader Lease: decides which of two masters of a job acts.
//!
//! ```text
//!  master ──acquire──► Lease <job> ◄──polls every 5 s── the next master
//!     │  ▲               ▲   │
//!     │  └──lost─────────┼───┘ 409: another client wrote
//!     └──guard──► what acts on the cluster, while the guard is valid
//! ```
//!
//! Two masters of a job can run at once: the Job's controller creates a new one when the old one's
//! node does not answer, and the old one may come back. Therefore a master acts on the cluster only
//! while it holds the Lease. While the API server is unreachable the Lease can't be renewed:
//! workers keep training, and the master neither creates nor deletes pods until the server has
//! answered.
//!
//! **Invariant:** nothing is sent under an expired guard.

mod election;

use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease as Object, LeaseSpec};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::PostParams;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};
use tracing::{info, warn};

use self::election::{Candidate, CandidateAction, HOLD, LeaderAction, Leadership, LeaseSnapshot};
use super::client::{Cluster, ClusterError, is_code};
use super::objects;
use super::verdict::has_terminated;
use super::watch::backoff;

/// Identity of a master: its pod, by name and uid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Name of the pod.
    pub pod: String,
    /// Uid of the pod.
    pub uid: String,
}

impl std::fmt::Display for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.pod, self.uid)
    }
}

impl std::str::FromStr for Holder {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('/') {
            Some((pod, uid)) if !pod.is_empty() && !uid.is_empty() && !uid.contains('/') => {
                Ok(Self { pod: pod.into(), uid: uid.into() })
            }
            _ => Err("it must be POD/UID".into()),
        }
    }
}

/// A job's leader Lease, held and renewed until it is released.
#[derive(Debug)]
pub(crate) struct LeaderLease {
    state: watch::Receiver<LeaseState>,
    transitions: u64,
    release: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

/// Tells whether this master may act on the cluster now.
#[derive(Clone, Debug)]
pub(crate) struct LeaseGuard {
    state: watch::Receiver<LeaseState>,
}

/// Why a master has to end although its job goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LeaseLoss {
    /// The master with this identity holds the Lease.
    Fenced(String),
    /// The server has not accepted this pod's token for [`UNAUTHORIZED_MAX`]. The server's message.
    Unauthorized(String),
}

#[derive(Clone, Debug)]
enum LeaseState {
    /// Another master, with this identity, holds or has held the Lease.
    Fenced(String),
    /// The Lease is valid until this time, unless it is renewed.
    Held(Instant),
    /// The server does not accept this pod's token, and says this.
    Unauthorized(String),
}

impl LeaderLease {
    /// Waits until this master holds the Lease of the job with this anchor. Must be called within a
    /// runtime.
    ///
    /// # Errors
    /// The server refuses.
    pub(crate) async fn acquire(
        cluster: &Cluster,
        anchor: &ObjectMeta,
        identity: &Holder,
    ) -> Result<Self, ClusterError> {
        let client = LeaseClient {
            leases: cluster.api(),
            pods: cluster.api(),
            meta: objects::owned(anchor, anchor.name.as_deref().unwrap_or_default(), "lease"),
            start: Instant::now(),
        };
        let leadership = client.acquire(cluster, identity).await?;
        let (publish_state, state) =
            watch::channel(LeaseState::Held(client.start + leadership.until()));
        let transitions = u64::try_from(leadership.transitions).unwrap_or_default();
        let (release, released) = oneshot::channel();
        let task = tokio::spawn(client.keep_renewing(leadership, publish_state, released));
        Ok(Self { state, transitions, release, task })
    }

    /// Returns a guard of the Lease.
    pub(crate) fn guard(&self) -> LeaseGuard {
        LeaseGuard { state: self.state.clone() }
    }

    /// How often the Lease has changed hands.
    pub(crate) fn transitions(&self) -> u64 {
        self.transitions
    }

    /// Waits until this master can't hold the Lease any more. Cancel-safe.
    pub(crate) async fn lost(&mut self) -> LeaseLoss {
        let state = self.state.wait_for(|state| !matches!(state, LeaseState::Held(_))).await;
        match state.as_deref() {
            Ok(LeaseState::Fenced(holder)) => LeaseLoss::Fenced(holder.clone()),
            Ok(LeaseState::Unauthorized(why)) => LeaseLoss::Unauthorized(why.clone()),
            // Only a panic ends the task while `self` exists.
            _ => std::future::pending().await,
        }
    }

    /// Releases the Lease, so that the next master can take it at once. Guards expire first.
    pub(crate) async fn release(mut self) {
        // The task ends only on this message, or after it was fenced.
        let (unused, _) = oneshot::channel();
        let _ = std::mem::replace(&mut self.release, unused).send(());
        if timeout(CALL_TIMEOUT, &mut self.task).await.is_err() {
            warn!("the Lease could not be released; the next master waits until it expires");
        }
    }
}

impl Drop for LeaderLease {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl LeaseGuard {
    /// Returns a guard that is always valid.
    #[cfg(test)]
    pub(crate) fn unlimited() -> Self {
        Self::for_test().0
    }

    /// Returns a guard, and a function that sets for how long from now the guard is valid.
    #[cfg(test)]
    pub(crate) fn for_test() -> (Self, impl Fn(Duration)) {
        let years = Duration::from_secs(100 * 365 * 24 * 3600);
        let (sender, state) = watch::channel(LeaseState::Held(Instant::now() + years));
        let hold = move |time| drop(sender.send_replace(LeaseState::Held(Instant::now() + time)));
        (Self { state }, hold)
    }

    /// Runs `call` once this master may act. `None`: the guard expired before `call` was done.
    pub(crate) async fn during<T>(&mut self, call: impl Future<Output = T>) -> Option<T> {
        while !self.is_valid() {
            self.changed().await;
        }
        tokio::select! {
            biased;
            done = call => Some(done),
            () = self.expired() => None,
        }
    }

    /// Returns whether this master may act now.
    pub(crate) fn is_valid(&self) -> bool {
        matches!(&*self.state.borrow(), LeaseState::Held(until) if *until > Instant::now())
    }

    /// Waits for a renewal that the server confirms after this call. Cancel-safe.
    pub(crate) async fn renewed(&mut self) {
        let until = |state: &LeaseState| match state {
            LeaseState::Held(until) => Some(*until),
            LeaseState::Fenced(_) | LeaseState::Unauthorized(_) => None,
        };
        let known = until(&self.state.borrow_and_update());
        loop {
            self.changed().await;
            let now = until(&self.state.borrow_and_update());
            if now > known && self.is_valid() {
                return;
            }
        }
    }

    /// Waits until this master may no longer act, for now or permanently. Cancel-safe.
    pub(crate) async fn expired(&mut self) {
        loop {
            let until = match &*self.state.borrow_and_update() {
                LeaseState::Held(until) if *until > Instant::now() => *until,
                _ => return,
            };
            tokio::select! {
                () = tokio::time::sleep_until(until) => {}
                () = self.changed() => {}
            }
        }
    }

    async fn changed(&mut self) {
        if self.state.changed().await.is_err() {
            std::future::pending().await
        }
    }
}

/// Reads and writes the Lease.
struct LeaseClient {
    leases: Api<Object>,
    pods: Api<Pod>,
    meta: ObjectMeta,
    start: Instant,
}

/// Result of a write.
enum WriteOutcome {
    Accepted(LeaseSnapshot),
    Conflict,
    Failed(kube::Error),
    TimedOut,
}

/// Outcome of an attempt to renew the Lease.
enum Renewal {
    /// The master with this identity holds it.
    Fenced(String),
    Renewed,
    /// It may be possible later.
    Unanswered,
}

impl LeaseClient {
    async fn acquire(
        &self,
        cluster: &Cluster,
        identity: &Holder,
    ) -> Result<Leadership, ClusterError> {
        let mut candidate = Candidate::new(identity.to_string());
        let mut failures = 0;
        let mut logged = None;
        loop {
            let found = match timeout(CALL_TIMEOUT, self.leases.get_opt(self.name())).await {
                Ok(Ok(found)) => found,
                Ok(Err(error)) => {
                    refused(cluster, error)?;
                    self.wait(&mut failures).await;
                    continue;
                }
                Err(_) => continue,
            };
            let snapshot = found.map(read);
            let holder = snapshot.as_ref().and_then(|snapshot| snapshot.holder.clone());
            let holder_has_ended = match &holder {
                Some(holder) => self.holder_has_ended(holder).await,
                None => false,
            };
            let sent = self.start.elapsed();
            let written = match candidate.decide(sent, snapshot.as_ref(), holder_has_ended) {
                CandidateAction::Create => self.write(&identity.to_string(), 0, None).await,
                CandidateAction::Take => {
                    let LeaseSnapshot { transitions, version, .. } =
                        snapshot.expect("it was just decided on");
                    self.write(&identity.to_string(), transitions.saturating_add(1), Some(version))
                        .await
                }
                CandidateAction::Wait(pause) => {
                    if logged != holder {
                        info!(holder, "another master holds the job's Lease; this one waits");
                        logged = holder;
                    }
                    tokio::time::sleep(pause).await;
                    continue;
                }
            };
            match written {
                WriteOutcome::Accepted(snapshot) => {
                    info!(transitions = snapshot.transitions, "the job's Lease is held");
                    return Ok(Leadership::new(identity.to_string(), snapshot, sent));
                }
                WriteOutcome::Conflict => {}
                WriteOutcome::Failed(error) => {
                    refused(cluster, error)?;
                    self.wait(&mut failures).await;
                }
                WriteOutcome::TimedOut => {}
            }
        }
    }

    /// Renews the Lease until it is to be released, or is lost.
    async fn keep_renewing(
        self,
        mut leadership: Leadership,
        publish_state: watch::Sender<LeaseState>,
        mut released: oneshot::Receiver<()>,
    ) {
        let mut unauthorized_since = None;
        loop {
            tokio::select! {
                biased;
                _ = &mut released => break,
                () = tokio::time::sleep_until(self.start + leadership.due()) => {}
            }
            // A release does not cancel a renewal: the version that the server has accepted must
            // be known.
            match self.renew(&mut leadership).await {
                Ok(Renewal::Fenced(holder)) => {
                    publish_state.send_replace(LeaseState::Fenced(holder));
                    return;
                }
                Ok(Renewal::Renewed) => unauthorized_since = None,
                Ok(Renewal::Unanswered) => {}
                Err(why) => {
                    let since = *unauthorized_since.get_or_insert_with(Instant::now);
                    if since.elapsed() >= UNAUTHORIZED_MAX {
                        publish_state.send_replace(LeaseState::Unauthorized(why));
                        return;
                    }
                }
            }
            publish_state.send_replace(LeaseState::Held(self.start + leadership.until()));
        }
        publish_state.send_replace(LeaseState::Held(Instant::now()));
        self.write("", leadership.transitions, Some(leadership.version)).await;
    }

    /// Tries to renew the Lease. `Err`: the server does not accept this pod's token; its message.
    async fn renew(&self, leadership: &mut Leadership) -> Result<Renewal, String> {
        let mut unauthorized = None;
        let mut version = Some(leadership.version.clone());
        // A second attempt if only the version was wrong.
        for _ in 0..2 {
            let sent = self.start.elapsed();
            match self.write(&leadership.identity, leadership.transitions, version).await {
                WriteOutcome::Accepted(snapshot) => {
                    leadership.on_renewed(sent, snapshot.version);
                    return Ok(Renewal::Renewed);
                }
                WriteOutcome::Conflict => {}
                WriteOutcome::Failed(error) => {
                    warn!(%error, "the job's Lease can't be renewed");
                    if is_code(&error, 401) {
                        unauthorized = Some(error.to_string());
                    }
                    break;
                }
                WriteOutcome::TimedOut => {
                    warn!("the job's Lease can't be renewed: no answer");
                    break;
                }
            }
            let Ok(Ok(found)) = timeout(CALL_TIMEOUT, self.leases.get_opt(self.name())).await
            else {
                break;
            };
            version = match leadership.on_changed(found.map(read)) {
                LeaderAction::Create => None,
                LeaderAction::Fenced(holder) => return Ok(Renewal::Fenced(holder)),
                LeaderAction::Renew => Some(leadership.version.clone()),
            };
        }
        leadership.on_failed(self.start.elapsed());
        unauthorized.map_or(Ok(Renewal::Unanswered), Err)
    }

    /// Writes the Lease. `version`: only if it is still this version; `None`: only if there is none
    /// yet.
    async fn write(&self, holder: &str, transitions: i32, version: Option<String>) -> WriteOutcome {
        let now = Some(MicroTime(Timestamp::now()));
        let object = Object {
            metadata: ObjectMeta { resource_version: version.clone(), ..self.meta.clone() },
            spec: Some(LeaseSpec {
                holder_identity: Some(holder.into()),
                lease_duration_seconds: Some(HOLD.as_secs() as i32),
                lease_transitions: Some(transitions),
                renew_time: now,
                ..LeaseSpec::default()
            }),
        };
        let params = PostParams::default();
        let call = async {
            match version {
                Some(_) => self.leases.replace(self.name(), &params, &object).await,
                None => self.leases.create(&params, &object).await,
            }
        };
        match timeout(CALL_TIMEOUT, call).await {
            Ok(Ok(written)) => WriteOutcome::Accepted(read(written)),
            Ok(Err(error)) if is_code(&error, 409) || is_code(&error, 404) => {
                WriteOutcome::Conflict
            }
            Ok(Err(error)) => WriteOutcome::Failed(error),
            Err(_) => WriteOutcome::TimedOut,
        }
    }

    /// Returns whether the holder's processes have certainly ended. A pod whose object was removed
    /// may still run on a node that does not answer.
    async fn holder_has_ended(&self, holder: &str) -> bool {
        let Ok(Holder { pod, uid }) = holder.parse() else { return false };
        let Ok(Ok(Some(pod))) = timeout(CALL_TIMEOUT, self.pods.get_opt(&pod)).await else {
            return false;
        };
        pod.metadata.uid == Some(uid) && has_terminated(&pod)
    }

    async fn wait(&self, failures: &mut u32) {
        tokio::time::sleep(backoff(*failures)).await;
        *failures += 1;
    }

    fn name(&self) -> &str {
        self.meta.name.as_deref().unwrap_or_default()
    }
}

/// Returns the error if a retry can't help.
fn refused(cluster: &Cluster, error: kube::Error) -> Result<(), ClusterError> {
    match &error {
        kube::Error::Api(status)
            if (400..500).contains(&status.code) && ![408, 429].contains(&status.code) =>
        {
            Err(cluster.explain("acquire the job's Lease", error))
        }
        _ => {
            warn!(%error, "the job's Lease can't be acquired yet");
            Ok(())
        }
    }
}

fn read(object: Object) -> LeaseSnapshot {
    let spec = object.spec.unwrap_or_default();
    let seconds = spec.lease_duration_seconds.and_then(|s| u64::try_from(s).ok());
    let duration = seconds.map_or(HOLD, Duration::from_secs).clamp(HOLD, HOLD * 4);
    LeaseSnapshot {
        holder: spec.holder_identity.filter(|holder| !holder.is_empty()),
        duration,
        transitions: spec.lease_transitions.unwrap_or_default(),
        version: object.metadata.resource_version.unwrap_or_default(),
    }
}

/// Time for which the server may refuse this pod's token. A pod gets a valid one only at its start,
/// or after most of an hour; what may pass sooner is a rotation of the server's keys.
const UNAUTHORIZED_MAX: Duration = Duration::from_secs(60);
/// Timeout of a call; short compared with the validity of a Lease.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests;
