//! Hosts on which workers had faults that are not their program's: they were killed by the system,
//! did not respond, did not join although others had, computed wrong results, or their node was
//! lost or could not start them.
//!
//! New workers are kept off a host with several such faults, where another one has capacity. Faults
//! are forgotten after a time.
//!
//! **Invariant:** a host is never excluded: a job of one node, or all of whose nodes are bad, goes
//! on there.

use std::time::Duration;

use elasticdl_proto::AvoidedHost;
use serde::{Deserialize, Serialize};

use crate::job::text::shortened;
use crate::job::time::Time;

/// The faults of hosts, the host of the newest one last.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct BadHosts(Vec<HostFaults>);

/// The faults of a host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct HostFaults {
    host: String,
    /// When the newest ones were; oldest first.
    at: Vec<Time>,
    /// The newest one.
    what: String,
}

impl BadHosts {
    /// Notes a fault on a host; an empty name is not known. Returns whether the host is avoided
    /// from now on.
    pub(crate) fn note(&mut self, now: Time, host: &str, what: &str) -> bool {
        if host.is_empty() {
            return false;
        }
        let known = self.0.iter().position(|faults| faults.host == host);
        let mut faults = match known {
            Some(index) => self.0.remove(index),
            None => HostFaults { host: host.into(), at: Vec::new(), what: String::new() },
        };
        let was_avoided = faults.is_avoided(now);
        if faults.at.len() == FAULTS {
            faults.at.remove(0);
        }
        faults.at.push(now);
        faults.what = shortened(what);
        let is_avoided = faults.is_avoided(now);
        self.0.push(faults);
        if self.0.len() > HOSTS_MAX {
            self.0.remove(0);
        }
        is_avoided && !was_avoided
    }

    /// The hosts that are avoided, that with the newest fault last.
    pub(crate) fn avoided(&self, now: Time) -> impl Iterator<Item = AvoidedHost> + '_ {
        let is_avoided = move |faults: &&HostFaults| faults.is_avoided(now);
        self.0.iter().filter(is_avoided).map(move |faults| AvoidedHost {
            host: faults.host.clone(),
            why: format!("{FAULTS} faults, the last one: {}", faults.what),
            for_s: Some(faults.until().0.saturating_sub(now.0).as_secs_f64()),
        })
    }
}

impl HostFaults {
    fn is_avoided(&self, now: Time) -> bool {
        self.at.len() == FAULTS && now < self.until()
    }

    /// When the oldest fault that counts is forgotten.
    fn until(&self) -> Time {
        self.at.first().copied().unwrap_or_default() + FORGOTTEN_AFTER
    }
}

/// Faults for which a host is avoided.
const FAULTS: usize = 3;
/// Time after which a fault is forgotten.
pub(crate) const FORGOTTEN_AFTER: Duration = Duration::from_secs(6 * 3600);
/// Hosts whose faults are kept.
const HOSTS_MAX: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    fn at(hours: u64) -> Time {
        Time(Duration::from_secs(3600 * hours))
    }

    fn avoided(hosts: &BadHosts, now: Time) -> Vec<String> {
        hosts.avoided(now).map(|avoided| avoided.host).collect()
    }

    #[test]
    fn a_host_with_three_faults_within_six_hours_is_avoided_until_the_first_one_is_forgotten() {
        let mut hosts = BadHosts::default();
        let noted = [(0, "a"), (1, "b"), (2, "a"), (3, ""), (3, ""), (3, ""), (4, "a"), (5, "b")];
        let news = noted.map(|(hour, host)| hosts.note(at(hour), host, "killed by SIGKILL"));
        assert_eq!(news, [false, false, false, false, false, false, true, false]);
        let listed: Vec<AvoidedHost> = hosts.avoided(at(5)).collect();
        let why = "3 faults, the last one: killed by SIGKILL".into();
        assert_eq!(listed, [AvoidedHost { host: "a".into(), why, for_s: Some(3600.0) }]);
        assert_eq!(avoided(&hosts, at(6)), [""; 0]);
        // Another one within six hours of the second.
        assert!(hosts.note(at(7), "a", "it did not respond"));
        assert_eq!((avoided(&hosts, at(7)), avoided(&hosts, at(8))), (vec!["a".into()], vec![]));
        assert!(!hosts.note(at(7), "b", ""), "its first fault is forgotten");
    }

    #[test]
    fn the_number_of_hosts_is_limited() {
        let mut hosts = BadHosts::default();
        for i in 0..100 {
            for _ in 0..3 {
                hosts.note(at(0), &i.to_string(), "lost");
            }
        }
        assert_eq!(avoided(&hosts, at(1)).len(), HOSTS_MAX);
        assert_eq!(avoided(&hosts, at(1)).last().unwrap(), "99");
    }
}
