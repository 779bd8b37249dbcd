//! Hosts on one machine: network namespaces around one that routes between them.
//!
//! ```text
//!   host 0 (the master) ──┐          ┌── host 2
//!                        hub: routes ┤
//!   host 1 ───────────────┘          └── host 3 …
//! ```
//!
//! Packets that the hub drops disappear silently: no host is notified, as in a network partition.

use std::os::unix::fs::MetadataExt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::process::{Signal, geteuid};

mod capture;

pub use capture::{Capture, Observed};

/// Hosts that reach each other until they are cut off. Dropping it removes them, and ends the
/// processes on them.
#[derive(Debug)]
pub struct Network {
    /// Prefix of the names of all namespaces.
    name: String,
    hosts: u8,
}

impl Network {
    /// A network of `hosts` hosts, which needs root and iproute2.
    pub fn new(hosts: u8) -> Self {
        let network = Self::unmade(hosts);
        network.make().expect("root makes network namespaces with iproute2");
        network
    }

    /// A network of `hosts` hosts that send at no more than this rate, such as `1gbit`: it needs
    /// the token bucket filter of the kernel, too.
    pub fn with_rate(hosts: u8, rate: &str) -> Result<Self, String> {
        let network = Self::unmade(hosts);
        network.make()?;
        (0..hosts).try_for_each(|host| network.limit(host, rate))?;
        Ok(network)
    }

    /// From now on `host` sends at no more than this rate, of which `with_rate` says more.
    pub fn limit(&self, host: u8, rate: &str) -> Result<(), String> {
        let namespace = self.namespace(&host.to_string());
        let qdisc = format!(
            "-n {namespace} qdisc add dev eth0 root tbf rate {rate} burst 512kb latency 100ms"
        );
        run("tc", &qdisc.split(' ').collect::<Vec<_>>()).map(drop)
    }

    /// Ends a limit.
    pub fn unlimit(&self, host: u8) -> Result<(), String> {
        let namespace = self.namespace(&host.to_string());
        run("tc", &["-n", &namespace, "qdisc", "del", "dev", "eth0", "root"]).map(drop)
    }

    /// Whether this user may make one.
    pub fn is_allowed() -> bool {
        geteuid().is_root()
    }

    /// Prefix of the names of its namespaces.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The prefix of a command that runs on a host.
    pub fn on(&self, host: u8) -> Vec<String> {
        ["ip", "netns", "exec", &self.namespace(&host.to_string())].map(Into::into).to_vec()
    }

    /// A script for `sh -c` that runs its arguments on the host whose number is the launch's.
    /// Signals to the launch don't reach them, as on another machine.
    pub fn on_the_launchs_host(&self) -> String {
        let namespace = self.namespace("$ELASTICDL_LAUNCH");
        format!("setsid ip netns exec {namespace} \"$@\" & wait $!")
    }

    /// As [`on_the_launchs_host`](Self::on_the_launchs_host), on host 1 to `hosts`, in turn.
    pub fn on_host_of_launch(&self, hosts: u8) -> String {
        let namespace = self.namespace(&format!("$((ELASTICDL_LAUNCH % {hosts} + 1))"));
        format!("setsid ip netns exec {namespace} \"$@\" & wait $!")
    }

    /// The host that a process runs on.
    pub fn host_of(&self, pid: u32) -> Option<u8> {
        let inode = |path: String| std::fs::metadata(path).map(|file| file.ino()).ok();
        let here = inode(format!("/proc/{pid}/ns/net"))?;
        (0..self.hosts).find(|host| {
            inode(format!("/run/netns/{}", self.namespace(&host.to_string()))) == Some(here)
        })
    }

    /// The address of a host.
    pub fn address(&self, host: u8) -> String {
        format!("10.77.{host}.2")
    }

    /// Drops all packets from `from` to `to` from now on.
    pub fn cut(&self, from: u8, to: u8) {
        self.rule("add", from, to);
    }

    /// Ends a cut.
    pub fn heal(&self, from: u8, to: u8) {
        self.rule("del", from, to);
    }

    /// Drops all packets from `host` from now on, and all to it unless it is `half_open`.
    pub fn switch_off(&self, host: u8, half_open: bool) {
        let directions = if half_open { &["from"][..] } else { &["to", "from"] };
        for direction in directions {
            let (hub, address) = (self.namespace("hub"), self.address(host));
            let rule = format!("-n {hub} rule add {direction} {address} blackhole");
            ip(&rule).expect("rules can be made where namespaces can");
        }
    }

    fn rule(&self, verb: &str, from: u8, to: u8) {
        let (from, to) = (self.address(from), self.address(to));
        let rule =
            format!("-n {} rule {verb} from {from} to {to} blackhole", self.namespace("hub"));
        ip(&rule).expect("rules can be made where namespaces can");
    }

    fn unmade(hosts: u8) -> Self {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        Self { name: format!("edl-{}-{number}", std::process::id()), hosts }
    }

    fn make(&self) -> Result<(), String> {
        let hub = self.namespace("hub");
        ip(&format!("netns add {hub}"))?;
        // Written from within: the file shows the namespace of the process that opens it.
        run("ip", &["netns", "exec", &hub, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"])?;
        for host in 0..self.hosts {
            let namespace = self.namespace(&host.to_string());
            ip(&format!("netns add {namespace}"))?;
            ip(&format!("-n {hub} link add v{host} type veth peer name eth0 netns {namespace}"))?;
            ip(&format!("-n {hub} addr add 10.77.{host}.1/24 dev v{host}"))?;
            ip(&format!("-n {hub} link set v{host} up"))?;
            ip(&format!("-n {namespace} addr add {}/24 dev eth0", self.address(host)))?;
            ip(&format!("-n {namespace} link set lo up"))?;
            ip(&format!("-n {namespace} link set eth0 up"))?;
            ip(&format!("-n {namespace} route add default via 10.77.{host}.1"))?;
        }
        Ok(())
    }

    fn namespace(&self, part: &str) -> String {
        format!("{}-{part}", self.name)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        let parts = (0..self.hosts).map(|host| host.to_string()).chain(["hub".into()]);
        for namespace in parts.map(|part| self.namespace(&part)) {
            for pid in ip(&format!("netns pids {namespace}")).unwrap_or_default().lines() {
                if let Ok(pid) = pid.parse() {
                    crate::send(pid, Signal::KILL);
                }
            }
            // A namespace that was never made can't be removed.
            let _ = ip(&format!("netns del {namespace}"));
        }
    }
}

fn ip(words: &str) -> Result<String, String> {
    run("ip", &words.split(' ').collect::<Vec<_>>())
}

fn run(program: &str, args: &[&str]) -> Result<String, String> {
    let output = Command::new(program).args(args).stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(format!("{program} {}: {}", args.join(" "), String::from_utf8_lossy(&output.stderr).trim()))
}
