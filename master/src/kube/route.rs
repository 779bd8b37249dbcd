//! Whether the Service of a job leads to its master.

use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::Api;
use kube::api::ListParams;

use super::client::Cluster;
use super::objects;

/// Why workers may not reach the master of `job`, which runs. `None`: its Service has an endpoint,
/// or the user may not read that.
pub async fn obstacle(cluster: &Cluster, job: &str) -> Option<String> {
    let slices: Api<EndpointSlice> = cluster.api();
    let service = objects::master_name(job);
    let of_service = format!("kubernetes.io/service-name={service}");
    let slices = slices.list(&ListParams::default().labels(&of_service)).await.ok()?.items;
    let endpoints = slices.iter().flat_map(|slice| &slice.endpoints);
    let is_ready = |ready: Option<bool>| ready != Some(false);
    let mut ready = endpoints.map(|e| e.conditions.as_ref().and_then(|c| c.ready)).map(is_ready);
    (!ready.any(|ready| ready)).then(|| {
        format!(
            "the Service {service} has no endpoint for this master (is kube-controller-manager up \
             to date?); the workers learn its address from the ConfigMap {} within two minutes",
            objects::address_name(job)
        )
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::testing::FakeServer;
    use super::*;

    #[tokio::test]
    async fn a_service_without_a_ready_endpoint_is_named() {
        let (fake, cluster) = FakeServer::start();
        let slice = |endpoints: serde_json::Value| {
            let metadata = json!({"name": "j-master-x"});
            let slice =
                json!({"metadata": metadata, "addressType": "IPv4", "endpoints": endpoints});
            fake.put("endpointslices", "j-master-x", slice);
        };
        let said = obstacle(&cluster, "j").await.unwrap();
        assert!(said.contains("Service j-master") && said.contains("j-master-address"), "{said}");
        slice(json!([{"addresses": ["10.0.0.1"], "conditions": {"ready": false}}]));
        assert!(obstacle(&cluster, "j").await.is_some());
        slice(json!([{"addresses": ["10.0.0.1"], "conditions": {"ready": true}}]));
        assert_eq!(obstacle(&cluster, "j").await, None);
    }
}
