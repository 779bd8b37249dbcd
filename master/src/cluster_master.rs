//! The master of a job in a cluster, in its pod: from its start to the end of the job, or until
//! another master leads.
//!
//! ```text
//!  ClusterMaster ──► waits for the leader Lease ──► Leader ──► event_loop::Master
//!                    http: metrics, probes             └── publish, news: what users see
//! ```

mod damage;
mod desired;
mod http;
mod leader;
mod news;
mod publish;
mod submitted;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::time::Duration;

use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Notify, oneshot, watch};
use tracing::{info, warn};

use self::http::HttpServer;
use self::leader::Leader;
use crate::exit::{EXIT_FENCED, EXIT_TERMINATED, EXIT_UNAUTHORIZED, Failure, cannot};
use crate::kube::anchor::Anchor;
use crate::kube::client::{Cluster, ClusterChoice};
use crate::kube::leader_lease::{Holder, LeaderLease, LeaseLoss};
use crate::kube::objects;
use crate::kube::persisted_job::PersistedWatch;
use crate::kube::succession::{self, NextMaster};
use crate::progress::Progress;

/// The master of a job in its pod.
#[derive(Debug)]
pub struct ClusterMaster {
    /// Name of the job; its anchor has the specification.
    pub job_name: String,
    /// Pod of this master.
    pub pod: Holder,
    /// File with the job's token.
    pub token_file: PathBuf,
    /// TLS certificate of the master, PEM.
    pub tls_cert: PathBuf,
    /// Private key of the certificate, PEM.
    pub tls_key: PathBuf,
}

impl ClusterMaster {
    /// Name of the Job that runs the master.
    fn master_name(&self) -> String {
        objects::master_name(&self.job_name)
    }

    /// Runs the master to the end of the job, and shows the job in `progress`. Returns the exit
    /// code.
    ///
    /// # Errors
    /// The job can't be led; another master may be able to.
    pub async fn run(&self, progress: Progress) -> Result<u8, Failure> {
        // The kernel delivers no unhandled signal to the first process of a container.
        let mut terminate = signal(SignalKind::terminate()).map_err(cannot("handle signals"))?;
        let cluster = Cluster::connect(&ClusterChoice::default()).await?;
        let anchor = Anchor::new(&cluster, &self.job_name);
        let ConfigMap { metadata: meta, data, .. } = anchor.read().await?;
        // A master that waits for the Lease answers liveness probes too.
        let (publish, published) = watch::channel(None);
        let progress = progress.publishing(publish);
        let shown = published.clone();
        let http = HttpServer::serve(&data.unwrap_or_default(), published).await?;
        let mut lease = tokio::select! {
            lease = LeaderLease::acquire(&cluster, &meta, &self.pod) => lease?,
            _ = terminate.recv() => return Ok(EXIT_TERMINATED),
        };
        let (send_persisted, persisted) = oneshot::channel();
        let give_up = Notify::new();
        let leader = Leader {
            args: self,
            cluster: &cluster,
            anchor: &anchor,
            http: &http,
            give_up: &give_up,
        };
        let leading = leader.run(lease.guard(), lease.transitions(), progress, send_persisted);
        tokio::pin!(leading);
        let standby = succession::keep_standby(&cluster, &meta, &self.pod, lease.guard(), shown);
        let code = tokio::select! {
            code = &mut leading => code,
            never = standby => match never {},
            // The workers belong to the next master: none is deleted.
            loss = lease.lost() => return Ok(match loss {
                LeaseLoss::Fenced(holder) => {
                    warn!(holder, "another master holds the job's lease; this one ends");
                    EXIT_FENCED
                }
                LeaseLoss::Unauthorized(why) => {
                    warn!(
                        why,
                        "the API server does not accept this pod's token any more (was the service \
                         account made again?): this master ends, and the Job starts one with a new \
                         token"
                    );
                    EXIT_UNAUTHORIZED
                }
            }),
            _ = terminate.recv() => {
                // The pod is deleted. Workers continue and reconnect to the job's next master.
                info!("SIGTERM: handing the job over to its next master");
                tokio::select! {
                    code = &mut leading => code,
                    () = hand_over(&cluster, &meta, &self.pod, persisted, &give_up) => {
                        Ok(EXIT_TERMINATED)
                    }
                }
            }
        };
        lease.release().await;
        code
    }
}

/// Waits until the job is persisted and the next master's pod is created, within a time limit. If
/// there will be no next master, ends the job and completes after that.
async fn hand_over(
    cluster: &Cluster,
    meta: &ObjectMeta,
    pod: &Holder,
    persisted: oneshot::Receiver<PersistedWatch>,
    give_up: &Notify,
) {
    let persist = async {
        if let Ok(mut persisted) = persisted.await {
            persisted.flush(HAND_OVER_TIMEOUT).await;
        }
    };
    let next =
        tokio::time::timeout(HAND_OVER_TIMEOUT, succession::ensure_successor(cluster, meta, pod));
    match tokio::join!(persist, next).1 {
        Ok(Ok(NextMaster::Expected)) => {}
        Ok(Ok(NextMaster::Unwanted(why))) => {
            warn!(why, "there will be no other master: the job ends");
            give_up.notify_one();
            tokio::time::sleep(GIVE_UP_TIMEOUT).await;
        }
        Ok(Err(error)) => warn!(%error, "the Job controller has to create the next master"),
        Err(_) => warn!(
            "the API server does not answer: the Job controller has to create the next master"
        ),
    }
}

/// With [`HAND_OVER_TIMEOUT`] less than the grace period of the master's pod.
const GIVE_UP_TIMEOUT: Duration = Duration::from_secs(6);
const HAND_OVER_TIMEOUT: Duration = Duration::from_secs(3);
