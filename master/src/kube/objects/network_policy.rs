//! Network policies of a job: who may open connections to its pods, and where these may connect.
//!
//! | from | to | ports |
//! |---|---|---|
//! | workers of the job | workers of the job | all: links of the ring have ports that the system chooses |
//! | workers of the job | master | that of the control streams |
//! | who is to read metrics | master | that of the metrics |
//!
//! All other connections to the job's pods are refused. Connections that the pods open are limited
//! only on request, since workers read data sets from anywhere. Policies bind pods where the
//! cluster's network enforces them.

use std::collections::BTreeMap;

use k8s_openapi::api::networking::v1::{
    IPBlock, NetworkPolicy, NetworkPolicyEgressRule, NetworkPolicyIngressRule, NetworkPolicyPeer,
    NetworkPolicyPort, NetworkPolicySpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::metadata::metadata;
use super::names::{JOB_LABEL, PORT, ROLE_LABEL, master_name};
use super::parts::tracking_environment;
use super::request::Request;
use crate::kube::options::{Destination, MetricsSource};

/// Builds the policies of the master and of the workers.
pub(super) fn policies(request: &Request) -> Vec<NetworkPolicy> {
    if !request.pods.network_policy {
        return Vec::new();
    }
    let job = &request.task.job.name;
    let policy = |name: &str, role: &str, ingress, egress: Option<_>| NetworkPolicy {
        metadata: metadata(request, name, role),
        spec: Some(NetworkPolicySpec {
            pod_selector: Some(pods_of(job, role)),
            policy_types: Some(
                [Some("Ingress"), egress.is_some().then_some("Egress")]
                    .into_iter()
                    .flatten()
                    .map(Into::into)
                    .collect(),
            ),
            ingress: Some(ingress),
            egress,
        }),
    };
    let destinations = request.pods.egress_to.as_deref();
    vec![
        policy(
            &master_name(job),
            "master",
            to_master(request),
            destinations.map(|destinations| {
                let sends = !tracking_environment(&request.pods).is_empty();
                let destinations = if sends { destinations } else { &[] };
                from_master(&request.pods.api_server_ports, destinations)
            }),
        ),
        policy(
            &format!("{job}-worker"),
            "worker",
            vec![NetworkPolicyIngressRule { from: Some(vec![workers(job)]), ports: None }],
            destinations.map(|destinations| from_workers(job, destinations)),
        ),
    ]
}

fn to_master(request: &Request) -> Vec<NetworkPolicyIngressRule> {
    let control = NetworkPolicyIngressRule {
        from: Some(vec![workers(&request.task.job.name)]),
        ports: Some(vec![port("TCP", PORT)]),
    };
    let ports = Some(vec![port("TCP", request.task.metrics_port.into())]);
    let sources = &request.pods.metrics_from;
    let peers: Option<Vec<_>> = sources.iter().map(peer_of).collect();
    let metrics = match peers {
        // A rule without peers allows all.
        None => Some(NetworkPolicyIngressRule { from: None, ports }),
        Some(peers) if peers.is_empty() => None,
        peers => Some(NetworkPolicyIngressRule { from: peers, ports }),
    };
    [Some(control), metrics].into_iter().flatten().collect()
}

/// `None`: all peers.
fn peer_of(source: &MetricsSource) -> Option<NetworkPolicyPeer> {
    match source {
        MetricsSource::Any => None,
        MetricsSource::Cidr(cidr) => Some(addresses(cidr)),
        MetricsSource::Namespace(name) => {
            // The API server sets this label on each namespace (Kubernetes 1.21).
            let labels = [("kubernetes.io/metadata.name".to_owned(), name.clone())];
            let namespace = selector(labels.into());
            Some(NetworkPolicyPeer {
                namespace_selector: Some(namespace),
                ..NetworkPolicyPeer::default()
            })
        }
    }
}

/// The master needs the API server and name resolution. The addresses of API servers change, and no
/// label selects them. A tracking server or a collector of traces is at one of the `destinations`.
fn from_master(
    api_server_ports: &[u16],
    destinations: &[Destination],
) -> Vec<NetworkPolicyEgressRule> {
    let ports = api_server_ports.iter().map(|&number| port("TCP", number.into())).collect();
    let api_server = NetworkPolicyEgressRule { to: None, ports: Some(ports) };
    [names(), api_server].into_iter().chain(destinations.iter().map(to_destination)).collect()
}

fn from_workers(job: &str, destinations: &[Destination]) -> Vec<NetworkPolicyEgressRule> {
    let within = NetworkPolicyEgressRule { to: Some(vec![workers(job)]), ports: None };
    let master = NetworkPolicyEgressRule {
        to: Some(vec![peer(pods_of(job, "master"))]),
        ports: Some(vec![port("TCP", PORT)]),
    };
    let others = destinations.iter().map(to_destination);
    [names(), within, master].into_iter().chain(others).collect()
}

fn to_destination(Destination { cidr, port: number }: &Destination) -> NetworkPolicyEgressRule {
    NetworkPolicyEgressRule {
        to: Some(vec![addresses(cidr)]),
        ports: number.map(|number| vec![port("TCP", number.into())]),
    }
}

/// Name resolution, wherever the cluster's servers are.
fn names() -> NetworkPolicyEgressRule {
    NetworkPolicyEgressRule { to: None, ports: Some(vec![port("UDP", 53), port("TCP", 53)]) }
}

fn workers(job: &str) -> NetworkPolicyPeer {
    peer(pods_of(job, "worker"))
}

fn peer(pods: LabelSelector) -> NetworkPolicyPeer {
    NetworkPolicyPeer { pod_selector: Some(pods), ..NetworkPolicyPeer::default() }
}

fn addresses(cidr: &str) -> NetworkPolicyPeer {
    let block = IPBlock { cidr: cidr.into(), except: None };
    NetworkPolicyPeer { ip_block: Some(block), ..NetworkPolicyPeer::default() }
}

fn pods_of(job: &str, role: &str) -> LabelSelector {
    let labels = [(JOB_LABEL, job), (ROLE_LABEL, role)];
    selector(labels.map(|(key, value)| (key.into(), value.into())).into())
}

fn selector(labels: BTreeMap<String, String>) -> LabelSelector {
    LabelSelector { match_labels: Some(labels), match_expressions: None }
}

fn port(protocol: &str, number: i32) -> NetworkPolicyPort {
    NetworkPolicyPort {
        port: Some(IntOrString::Int(number)),
        protocol: Some(protocol.into()),
        end_port: None,
    }
}
