//! `elasticdl master`: runs the master of a job in its pod.

mod damage;
mod http;
mod leader;
mod news;
mod publish;
mod submitted;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Notify, oneshot, watch};
use tracing::{info, warn};

use self::http::HttpServer;
use self::leader::Leader;
use crate::cli::args::parse_job_name;
use crate::cli::process::{
    EXIT_FENCED, EXIT_TERMINATED, EXIT_UNAUTHORIZED, Failure, cannot, new_runtime, raise_open_files,
};
use crate::kube::anchor::Anchor;
use crate::kube::client::{Cluster, ClusterChoice};
use crate::kube::leader_lease::{Holder, LeaderLease, LeaseLoss};
use crate::kube::objects::{CERTIFICATE_FILE, KEY_FILE, TOKEN_FILE};
use crate::kube::persisted_job::PersistedWatch;
use crate::kube::succession::{self, NextMaster};
use crate::log_output::LogOutput;

/// Arguments of `elasticdl master`.
#[derive(Args, Debug)]
pub(crate) struct MasterArgs {
    /// Name of the job; its anchor has the specification.
    #[arg(long, value_name = "NAME", value_parser = parse_job_name)]
    pub(crate) job_name: String,

    /// Pod of this master.
    #[arg(long, value_name = "NAME/UID")]
    pub(crate) pod: Holder,

    /// File with the job's token.
    #[arg(long, value_name = "FILE", default_value = TOKEN_FILE)]
    pub(crate) token_file: PathBuf,

    /// TLS certificate of the master, PEM.
    #[arg(long, value_name = "FILE", default_value = CERTIFICATE_FILE)]
    pub(crate) tls_cert: PathBuf,

    /// Private key of the certificate, PEM.
    #[arg(long, value_name = "FILE", default_value = KEY_FILE)]
    pub(crate) tls_key: PathBuf,
}

/// Runs the master of a job to the end of the job. Returns the exit code.
pub(super) fn master(args: &MasterArgs) -> Result<u8, Failure> {
    // The subscriber would report a failed write by `eprintln!`, which panics if standard error
    // fails.
    let logging = tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(|| LogOutput)
        .log_internal_errors(false)
        .try_init();
    // A test in this process may have set another subscriber.
    drop(logging);
    raise_open_files();
    new_runtime()?.block_on(run(args))
}

async fn run(args: &MasterArgs) -> Result<u8, Failure> {
    // The kernel delivers no unhandled signal to the first process of a container.
    let mut terminate = signal(SignalKind::terminate()).map_err(cannot("handle signals"))?;
    let cluster = Cluster::connect(&ClusterChoice::default()).await?;
    let anchor = Anchor::new(&cluster, &args.job_name);
    let ConfigMap { metadata: meta, data, .. } = anchor.read().await?;
    // A master that waits for the Lease answers liveness probes too.
    let (publish, published) = watch::channel(None);
    let http = HttpServer::serve(&data.unwrap_or_default(), published).await?;
    let mut lease = tokio::select! {
        lease = LeaderLease::acquire(&cluster, &meta, &args.pod) => lease?,
        _ = terminate.recv() => return Ok(EXIT_TERMINATED),
    };
    let (send_persisted, persisted) = oneshot::channel();
    let give_up = Notify::new();
    let leader =
        Leader { args, cluster: &cluster, anchor: &anchor, http: &http, give_up: &give_up };
    let leading = leader.run(lease.guard(), lease.transitions(), publish, send_persisted);
    tokio::pin!(leading);
    let standby = succession::keep_standby(&cluster, &meta, &args.pod, lease.guard());
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
                () = hand_over(&cluster, &meta, &args.pod, persisted, &give_up) => {
                    Ok(EXIT_TERMINATED)
                }
            }
        }
    };
    lease.release().await;
    code
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
