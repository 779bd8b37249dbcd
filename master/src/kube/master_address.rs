//! The address of the leading master's pod, in a ConfigMap that the workers of the job mount.
//!
//! Workers dial the job's Service. Its route to a new master depends on the cluster's endpoint
//! controller and on the proxy of each node, which can be down, or out of date for long after an
//! outage of the API server. So each master also writes where its pod is, and a worker that finds
//! no master dials this address in every second attempt. The kubelets bring a change to the
//! workers within one to two minutes, which is less than `--master-timeout`. Workers authenticate
//! the master by its certificate, whatever address they dial.

use std::net::SocketAddr;
use std::time::Duration;

use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::json;
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

use super::client::{Cluster, is_code};
use super::leader_lease::LeaseGuard;
use super::objects::{self, ADDRESS};
use super::watch::backoff;

/// Writes the address of the master of the job with this anchor, with retries, while the guard is
/// valid.
pub(crate) async fn write(
    cluster: &Cluster,
    anchor: &ObjectMeta,
    address: SocketAddr,
    mut guard: LeaseGuard,
) {
    let mut failures = 0;
    loop {
        let call = timeout(CALL_TIMEOUT, try_write(cluster, anchor, address));
        let why = match guard.during(call).await {
            Some(Ok(Ok(()))) => {
                info!(%address, "the workers' ConfigMap has the address of this master");
                return;
            }
            Some(Ok(Err(error))) => error.to_string(),
            Some(Err(_)) => "it took too long".into(),
            None => "the Lease has expired".into(),
        };
        if failures == 0 {
            warn!(why, "the address of this master is not written: workers depend on the Service");
        }
        sleep(backoff(failures)).await;
        failures += 1;
    }
}

async fn try_write(
    cluster: &Cluster,
    anchor: &ObjectMeta,
    address: SocketAddr,
) -> Result<(), kube::Error> {
    let config_maps: Api<ConfigMap> = cluster.api();
    let name = objects::address_name(anchor.name.as_deref().unwrap_or_default());
    let data = [(ADDRESS.to_owned(), address.to_string())];
    let patch = Patch::Merge(json!({"data": {ADDRESS: address.to_string()}}));
    match config_maps.patch(&name, &PatchParams::default(), &patch).await {
        Err(error) if is_code(&error, 404) => {}
        done => return done.map(drop),
    }
    let object = ConfigMap {
        metadata: objects::owned(anchor, &name, "address"),
        data: Some(data.into()),
        ..ConfigMap::default()
    };
    config_maps.create(&PostParams::default(), &object).await.map(drop)
}

const CALL_TIMEOUT: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::super::testing::FakeServer;
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn each_master_writes_where_it_is_through_failures_of_the_server() {
        let (fake, cluster) = FakeServer::start();
        let anchor = serde_json::from_value(json!({"name": "j", "uid": "a"})).unwrap();
        for (ip, failing) in [("10.0.0.1", "POST configmaps"), ("10.0.0.2", "PATCH configmaps")] {
            fake.state().throttles.extend([(failing, 500, 0); 2]);
            let address = SocketAddr::new(ip.parse().unwrap(), 7070);
            write(&cluster, &anchor, address, LeaseGuard::unlimited()).await;
            let object = fake.state().object("configmaps", "j-master-address").unwrap();
            assert_eq!(object["data"], json!({"address": format!("{ip}:7070")}));
            assert_eq!(object["metadata"]["ownerReferences"][0]["uid"], "a");
        }
    }
}
