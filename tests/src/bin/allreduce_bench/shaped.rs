//! Simulated hosts with links of limited bandwidth: network namespaces on a bridge, each shaped by
//! `tc`. Needs root and iproute2.

use std::process::{Command, Stdio};

use crate::Fallible;

/// One namespace per rank. Dropping it removes them.
pub(crate) struct ShapedHosts {
    name: String,
    hosts: usize,
}

impl ShapedHosts {
    /// `rate`: of what a host sends, as `tc` reads it: `1gbit`.
    pub(crate) fn new(hosts: usize, rate: &str) -> Fallible<Self> {
        let shaped = Self { name: format!("edlb-{}", std::process::id()), hosts };
        let bridge = shaped.namespace("bridge");
        ip(&format!("netns add {bridge}"))?;
        ip(&format!("-n {bridge} link add br0 type bridge"))?;
        ip(&format!("-n {bridge} link set br0 up"))?;
        for host in 0..hosts {
            let namespace = shaped.namespace(&host.to_string());
            ip(&format!("netns add {namespace}"))?;
            ip(&format!(
                "-n {bridge} link add v{host} type veth peer name eth0 netns {namespace}"
            ))?;
            ip(&format!("-n {bridge} link set v{host} master br0"))?;
            ip(&format!("-n {bridge} link set v{host} up"))?;
            ip(&format!("-n {namespace} addr add {}/16 dev eth0", Self::address(host)))?;
            ip(&format!("-n {namespace} link set lo up"))?;
            ip(&format!("-n {namespace} link set eth0 up"))?;
            let queue = "root tbf burst 256k latency 20ms rate";
            run("tc", &format!("-n {namespace} qdisc add dev eth0 {queue} {rate}"))?;
        }
        Ok(shaped)
    }

    /// Address of a host.
    pub(crate) fn address(host: usize) -> String {
        format!("10.78.{}.{}", host / 200, host % 200 + 1)
    }

    /// Command that runs `program` on a host.
    pub(crate) fn command(&self, host: usize, program: &std::path::Path) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.namespace(&host.to_string())]).arg(program);
        command
    }

    fn namespace(&self, part: &str) -> String {
        format!("{}-{part}", self.name)
    }
}

impl Drop for ShapedHosts {
    fn drop(&mut self) {
        for part in (0..self.hosts).map(|host| host.to_string()).chain(["bridge".to_owned()]) {
            // A namespace that was never made can't be removed.
            let _ = ip(&format!("netns del {}", self.namespace(&part)));
        }
    }
}

fn ip(words: &str) -> Fallible<()> {
    run("ip", words)
}

fn run(program: &str, words: &str) -> Fallible<()> {
    let output = Command::new(program).args(words.split(' ')).stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let why = String::from_utf8_lossy(&output.stderr);
    Err(format!("{program} {words}: {}; --rate needs root, ip and tc", why.trim()).into())
}
