//! When a job began. Its age does not depend on the system's clock, which may be set.

use std::fs;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::notes::boot_id;

/// Start time of a job on this machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartTime {
    /// By the system's clock, for the user.
    #[serde(rename = "began")]
    pub at: SystemTime,
    /// The machine's boot, and its uptime; `None` where the system does not tell them.
    pub(super) uptime: Option<(String, Duration)>,
}

impl StartTime {
    /// A job begins now.
    #[must_use]
    pub fn now() -> Self {
        Self { at: SystemTime::now(), uptime: uptime() }
    }

    /// Age of the job: by the machine's uptime, or after a reboot by the system's clock.
    #[must_use]
    pub fn age(&self) -> Duration {
        match self.uptime.as_ref().zip(uptime()) {
            Some(((boot, began), (same, now))) if *boot == same => now.saturating_sub(*began),
            // A clock that was set back only makes the age too small.
            _ => SystemTime::now().duration_since(self.at).unwrap_or_default(),
        }
    }
}

fn uptime() -> Option<(String, Duration)> {
    let boot = Some(boot_id()).filter(|boot| !boot.is_empty())?;
    let text = fs::read_to_string("/proc/uptime").ok()?;
    let seconds: f64 = text.split(' ').next()?.parse().ok()?;
    Some((boot, Duration::try_from_secs_f64(seconds).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_was_set_changes_the_age_only_after_a_reboot() {
        let hour = Duration::from_secs(3600);
        let began = StartTime { at: SystemTime::now() - hour, ..StartTime::now() };
        assert!(began.age() < hour / 2, "{began:?}");
        let text = serde_json::to_string(&began).unwrap();
        assert_eq!(serde_json::from_str::<StartTime>(&text).unwrap(), began);
        for uptime in [Some(("another boot".into(), hour)), None] {
            let began = StartTime { at: began.at, uptime };
            assert!(began.age() >= hour, "{began:?}");
        }
    }
}
