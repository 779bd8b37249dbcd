//! Options of a job's network policies.

use std::net::IpAddr;

/// Peers that may read the master's metrics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetricsSource {
    /// All that can reach the cluster's network.
    Any,
    /// These addresses, in CIDR notation.
    Cidr(String),
    /// All pods of this namespace.
    Namespace(String),
}

/// Addresses outside the job to which its workers may open connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Destination {
    /// Addresses, in CIDR notation.
    pub cidr: String,
    /// TCP port. `None`: all ports.
    pub port: Option<u16>,
}

/// Parses `any`, a namespace, or addresses in CIDR notation.
///
/// # Errors
/// A message that names the error, with an example of a valid value.
pub fn parse_metrics_source(text: &str) -> Result<MetricsSource, String> {
    match text {
        "any" => Ok(MetricsSource::Any),
        text if text.contains(['/', ':']) => parse_cidr(text).map(MetricsSource::Cidr),
        text => {
            crate::kube::names::parse_namespace(text).map(MetricsSource::Namespace).map_err(|e| {
                format!("{e}; for example `monitoring` (a namespace), `10.0.0.0/8` or `any`")
            })
        }
    }
}

/// Parses `none`, or destinations separated by commas: `10.0.0.0/8:443` or `[fd00::/8]:443`, with
/// or without a port.
///
/// # Errors
/// A message that names the error, with an example of a valid value.
pub fn parse_destinations(text: &str) -> Result<Vec<Destination>, String> {
    if text == "none" {
        return Ok(Vec::new());
    }
    text.split(',').map(|part| parse_destination(part.trim())).collect()
}

fn parse_destination(text: &str) -> Result<Destination, String> {
    let (cidr, port) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((cidr, "")) => (cidr, None),
        Some((cidr, rest)) => (cidr, Some(rest.strip_prefix(':').unwrap_or(rest))),
        // An IPv6 address without brackets has no port.
        None if text.matches(':').count() > 1 => (text, None),
        None => match text.split_once(':') {
            Some((cidr, port)) => (cidr, Some(port)),
            None => (text, None),
        },
    };
    let port = match port.map(str::parse) {
        None => None,
        Some(Ok(port)) if port > 0 => Some(port),
        Some(_) => return Err(format!("`{text}`: the port must be a number from 1 to 65535")),
    };
    Ok(Destination { cidr: parse_cidr(cidr)?, port })
}

fn parse_cidr(text: &str) -> Result<String, String> {
    let example = "for example `10.0.0.0/8`, `192.0.2.7/32` or `fd00::/8`";
    let wrong = || format!("`{text}` must be addresses in CIDR notation, {example}");
    let (address, length) = text.split_once('/').ok_or_else(wrong)?;
    let address: IpAddr = address.parse().map_err(|_| wrong())?;
    let longest = if address.is_ipv4() { 32 } else { 128 };
    match length.parse::<u8>() {
        Ok(length) if length <= longest => Ok(format!("{address}/{length}")),
        _ => Err(wrong()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_read_by_all_by_a_namespace_or_by_addresses() {
        let cidr = |text: &str| Ok(MetricsSource::Cidr(text.into()));
        assert_eq!(parse_metrics_source("any"), Ok(MetricsSource::Any));
        assert_eq!(
            parse_metrics_source("monitoring"),
            Ok(MetricsSource::Namespace("monitoring".into()))
        );
        assert_eq!(parse_metrics_source("10.0.0.0/8"), cidr("10.0.0.0/8"));
        assert_eq!(parse_metrics_source("FD00::/8"), cidr("fd00::/8"));
        for bad in ["", "Monitoring", "10.0.0.0/33", "10.0.0/8", "fd00::/129", "fd00::", "a/8"] {
            assert!(parse_metrics_source(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn destinations_are_addresses_with_or_without_a_port() {
        let to = |cidr: &str, port| Destination { cidr: cidr.into(), port };
        let parsed =
            parse_destinations("10.0.0.0/8:443, 192.0.2.7/32,[fd00::/8]:443,fe80::/10,[::/0]");
        let expected = [
            to("10.0.0.0/8", Some(443)),
            to("192.0.2.7/32", None),
            to("fd00::/8", Some(443)),
            to("fe80::/10", None),
            to("::/0", None),
        ];
        assert_eq!(parsed.unwrap(), expected);
        assert_eq!(parse_destinations("none"), Ok(Vec::new()));
        for bad in ["", "10.0.0.0/8:0", "10.0.0.0/8:x", "10.0.0.1", "[fd00::/8]443x", "a.b/8", ","]
        {
            assert!(parse_destinations(bad).is_err(), "{bad}");
        }
    }
}
