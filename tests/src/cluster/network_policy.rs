//! Evaluates network policies as a cluster's network does, for networks that don't enforce them.

use std::net::IpAddr;

use serde_json::Value;

/// One end of a connection.
#[derive(Clone, Copy, Debug)]
pub struct Peer<'a> {
    /// Labels of a pod, or null for another peer.
    pub labels: &'a Value,
    /// Labels of the pod's namespace; null if the policies are in the same namespace.
    pub namespace: &'a Value,
    /// Address of the peer.
    pub address: IpAddr,
}

/// Returns whether the policies of a namespace allow a TCP connection between two peers.
pub fn allows(policies: &[Value], from: Peer<'_>, to: Peer<'_>, port: u16) -> bool {
    let is_allowed = |subject: Peer<'_>, other: Peer<'_>, direction: [&str; 3]| {
        let [kind, rules, peers] = direction;
        let binds = |policy: &&Value| {
            let kinds = policy["spec"]["policyTypes"].as_array();
            subject.labels.is_object()
                && subject.namespace.is_null()
                && kinds.is_some_and(|kinds| kinds.iter().any(|k| k == kind))
                && selects(&policy["spec"]["podSelector"], subject.labels)
        };
        let mut bound = policies.iter().filter(binds).peekable();
        bound.peek().is_none()
            || bound.any(|policy| {
                let rules = policy["spec"][rules].as_array().into_iter().flatten();
                rules
                    .into_iter()
                    .any(|rule| has_port(&rule["ports"], port) && has_peer(&rule[peers], other))
            })
    };
    is_allowed(to, from, ["Ingress", "ingress", "from"])
        && is_allowed(from, to, ["Egress", "egress", "to"])
}

/// No ports are all ports.
fn has_port(ports: &Value, wanted: u16) -> bool {
    let is_it = |port: &Value| port["protocol"] != "UDP" && port["port"] == wanted;
    ports.as_array().is_none_or(|ports| ports.iter().any(is_it))
}

/// No peers are all peers.
fn has_peer(peers: &Value, other: Peer<'_>) -> bool {
    peers.as_array().is_none_or(|peers| peers.iter().any(|peer| is_peer(peer, other)))
}

fn is_peer(peer: &Value, other: Peer<'_>) -> bool {
    if let Some(cidr) = peer["ipBlock"]["cidr"].as_str() {
        return contains(cidr, other.address);
    }
    let is_namespace = match &peer["namespaceSelector"] {
        Value::Null => other.namespace.is_null(),
        selector => other.namespace.is_object() && selects(selector, other.namespace),
    };
    let is_pod = peer["podSelector"].is_null() || selects(&peer["podSelector"], other.labels);
    other.labels.is_object() && is_namespace && is_pod
}

fn selects(selector: &Value, labels: &Value) -> bool {
    let wanted = selector["matchLabels"].as_object().into_iter().flatten();
    wanted.into_iter().all(|(key, value)| labels[key] == *value)
}

fn contains(cidr: &str, address: IpAddr) -> bool {
    let (network, length) = cidr.split_once('/').expect("CIDR has a length");
    let length: u32 = length.parse().expect("CIDR has a length");
    let bits = |address: IpAddr| match address {
        IpAddr::V4(v4) => u128::from(v4.to_bits()) << 96,
        IpAddr::V6(v6) => v6.to_bits(),
    };
    let network: IpAddr = network.parse().expect("CIDR begins with an address");
    let differ = bits(network) ^ bits(address);
    network.is_ipv4() == address.is_ipv4() && (length == 0 || differ >> (128 - length) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_compared_by_their_first_bits() {
        for (cidr, address, is_inside) in [
            ("10.0.0.0/8", "10.255.1.2", true),
            ("10.0.0.0/8", "11.0.0.0", false),
            ("0.0.0.0/0", "192.0.2.1", true),
            ("0.0.0.0/0", "::1", false),
            ("fd00::/8", "fdff::1", true),
            ("192.0.2.7/32", "192.0.2.6", false),
        ] {
            assert_eq!(contains(cidr, address.parse().unwrap()), is_inside, "{cidr} {address}");
        }
    }
}
