//! What this process uses of its machine, for its master.

use std::fs;
use std::time::{Duration, Instant};

use elasticdl_proto::Usage;

/// State of the reports.
#[derive(Debug, Default)]
pub(crate) struct UsageReporter {
    /// Time of the last look, and CPU time until then.
    last: Option<(Instant, Duration)>,
}

impl UsageReporter {
    /// The report that is due now. The first look only begins the measurement.
    pub(crate) fn poll(&mut self) -> Option<Usage> {
        let now = Instant::now();
        if self.last.is_some_and(|(at, _)| now - at < REPORT_INTERVAL) {
            return None;
        }
        let cpu = cpu_time(&fs::read_to_string("/proc/self/stat").ok()?)?;
        let memory_bytes = resident(&fs::read_to_string("/proc/self/status").ok()?)?;
        let (at, before) = self.last.replace((now, cpu))?;
        let cores = cpu.saturating_sub(before).as_secs_f64() / (now - at).as_secs_f64();
        Some(Usage { cpu_millicores: (cores * 1e3) as u32, memory_bytes })
    }
}

/// `stat`: content of `/proc/PID/stat`. The name in it may contain anything.
fn cpu_time(stat: &str) -> Option<Duration> {
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<u64>().ok();
    Some(TICK * u32::try_from(ticks()? + ticks()?).ok()?)
}

/// `status`: content of `/proc/PID/status`.
fn resident(status: &str) -> Option<u64> {
    let kib = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(kib.trim().strip_suffix(" kB")?.parse::<u64>().ok()? << 10)
}

/// Unit of CPU time in `/proc`, on all platforms of this crate.
const TICK: Duration = Duration::from_millis(10);
const REPORT_INTERVAL: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_files_are_understood() {
        let stat = "7 (a) b) R 1 7 7 0 -1 4194304 9 0 0 0 150 25 0 0 20 0 9 0 1 2 3";
        assert_eq!(cpu_time(stat), Some(Duration::from_millis(1750)));
        assert_eq!(resident("Name:\ta\nVmRSS:\t    2048 kB\n"), Some(2 << 20));
        assert_eq!((cpu_time("7"), resident("Name:\ta\n")), (None, None));
    }

    #[test]
    fn a_process_that_computes_uses_a_part_of_a_core() {
        let mut reporter = UsageReporter::default();
        assert_eq!(reporter.poll(), None);
        assert_eq!(reporter.poll(), None, "it is not due");
        // As if no CPU time had been used ten seconds ago.
        let began = Instant::now().checked_sub(Duration::from_secs(10)).unwrap();
        let used = Duration::from_millis(20);
        let until = Instant::now() + Duration::from_secs(60);
        while cpu_time(&fs::read_to_string("/proc/self/stat").unwrap()).unwrap() < used {
            assert!(Instant::now() < until);
        }
        reporter.last = Some((began, Duration::ZERO));
        let Usage { cpu_millicores, memory_bytes } = reporter.poll().unwrap();
        assert!(cpu_millicores > 0 && memory_bytes > 1 << 20, "{cpu_millicores} {memory_bytes}");
    }
}
