//! The check of hosts: the first worker on each measures it, beside what it does to join.
//!
//! A host whose memory is far slower than that of most others, or that lacks the GPUs that all
//! others have, counts as one with a fault. Hosts are compared with each other alone, as no speed
//! is wrong by itself, so a job on two hosts judges none.

use std::collections::BTreeMap;

use elasticdl_proto::{HostReport, WorkerId};

/// The hosts that were checked since this master started, by name.
#[derive(Debug, Default)]
pub(crate) struct HostChecks(BTreeMap<String, Check>);

#[derive(Debug)]
enum Check {
    /// This worker measures.
    Asked(WorkerId),
    Measured {
        report: HostReport,
        is_judged: bool,
    },
}

impl HostChecks {
    /// Whether this worker is to check its host; an empty name is not known. `is_connected`: of the
    /// worker that was asked before.
    pub(crate) fn ask(
        &mut self,
        host: &str,
        worker: WorkerId,
        is_connected: impl Fn(WorkerId) -> bool,
    ) -> bool {
        let is_known = match self.0.get(host) {
            Some(Check::Measured { .. }) => true,
            Some(Check::Asked(other)) => is_connected(*other),
            None => self.0.len() >= HOSTS_MAX,
        };
        let asks = !host.is_empty() && !is_known;
        if asks {
            self.0.insert(host.to_owned(), Check::Asked(worker));
        }
        asks
    }

    /// Notes what a worker has measured. Returns whether it is news.
    pub(crate) fn note(&mut self, host: &str, report: HostReport) -> bool {
        let asked = self.0.get_mut(host).filter(|check| matches!(check, Check::Asked(_)));
        asked.map(|check| *check = Check::Measured { report, is_judged: false }).is_some()
    }

    /// The hosts that are known to have a fault since the last call, and what it is.
    pub(crate) fn take_faults(&mut self) -> Vec<(String, String)> {
        let faults = self.measured();
        let faults = faults.filter_map(|(host, of)| Some((host.clone(), self.fault(host, of)?)));
        let mut faults: Vec<(String, String)> = faults.collect();
        faults.retain(|(host, _)| match self.0.get_mut(host) {
            Some(Check::Measured { is_judged, .. }) => !std::mem::replace(is_judged, true),
            _ => false,
        });
        faults
    }

    /// The measurements of hosts, by name.
    pub(crate) fn measured(&self) -> impl Iterator<Item = (&String, &HostReport)> {
        self.0.iter().filter_map(|(host, check)| match check {
            Check::Measured { report, .. } => Some((host, report)),
            Check::Asked(_) => None,
        })
    }

    /// What is wrong with a host, beside the others.
    fn fault(&self, host: &str, report: &HostReport) -> Option<String> {
        let others = self.measured().filter(|(other, _)| *other != host);
        let mut others: Vec<&HostReport> = others.map(|(_, other)| other).collect();
        if others.len() < OTHERS_MIN {
            return None;
        }
        others.sort_by_key(|other| other.copied_per_s);
        let (speed, median) = (report.copied_per_s, others[others.len() / 2].copied_per_s);
        if speed.saturating_mul(SLOWER) < median {
            let [own, usual] = [speed, median].map(|speed| speed as f64 / 1e9);
            return Some(format!(
                "it copies {own:.1} GB/s in memory, and most others {usual:.1} GB/s"
            ));
        }
        let lacks_gpus = report.gpus == 0 && others.iter().all(|other| other.gpus > 0);
        lacks_gpus.then(|| "it has no GPU, and all others have".into())
    }
}

/// A host that is slower by more is faulty.
const SLOWER: u64 = 4;
/// The fewest others that a host is compared with.
const OTHERS_MIN: usize = 2;
const HOSTS_MAX: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    fn report(megabytes: u64, gpus: u32) -> HostReport {
        HostReport { copied_per_s: megabytes * 1_000_000, gpus, disks: Vec::new() }
    }

    /// The hosts with faults, of hosts that are numbered from 0.
    fn faulty(reports: &[HostReport]) -> Vec<usize> {
        let check =
            |report: &HostReport| Check::Measured { report: report.clone(), is_judged: false };
        let named = reports.iter().enumerate().map(|(i, report)| (i.to_string(), check(report)));
        let checks = HostChecks(named.collect());
        let is_faulty = |i: &usize| checks.fault(&i.to_string(), &reports[*i]).is_some();
        (0..reports.len()).filter(is_faulty).collect()
    }

    #[test]
    fn a_host_is_judged_by_most_of_the_others_and_by_no_speed_of_its_own() {
        let of = |speeds: &[u64]| faulty(&speeds.iter().map(|&s| report(s, 0)).collect::<Vec<_>>());
        assert_eq!(of(&[9000, 1]), [0; 0], "two hosts");
        assert_eq!(of(&[9000, 2249, 9000]), [1]);
        assert_eq!(of(&[9000, 2250, 9000]), [0; 0]);
        assert_eq!(of(&[1, 2, 1]), [0; 0], "all are slow");
        assert_eq!(of(&[9000, 1000, 1000, 1000]), [0; 0], "most are slow");
        assert_eq!(of(&[0, 9000, 9000]), [0]);
    }

    #[test]
    fn a_host_without_gpus_is_faulty_if_all_others_have_some() {
        let of = |gpus: &[u32]| faulty(&gpus.iter().map(|&g| report(9, g)).collect::<Vec<_>>());
        assert_eq!(of(&[8, 0, 8]), [1]);
        assert_eq!(of(&[8, 0, 0]), [0; 0]);
        assert_eq!(of(&[0, 8]), [0; 0]);
    }
}
