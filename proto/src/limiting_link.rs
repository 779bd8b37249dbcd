//! The link whose network limits the steps of a job.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ids::WorkerId;

/// The link that the network limits most of the time, unlike others, while the steps wait for it.
/// The names of its fields are a public format.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LimitingLink {
    /// The worker that sends. If the network limits several links, they are those of one host, and
    /// this is one of them.
    pub from: WorkerId,
    /// Host of that worker; `None` if it is not known.
    pub from_host: Option<String>,
    /// The worker that receives.
    pub to: WorkerId,
    /// Host of that worker; `None` if it is not known.
    pub to_host: Option<String>,
    /// The host whose links the network limits, if it limits several and all of them begin or end
    /// there.
    pub host: Option<String>,
    /// Part of the last seconds in which the network limited the link: 0 to 1.
    pub limited: f64,
    /// Bytes per second that the network delivered meanwhile.
    pub bytes_per_s: f64,
}

impl LimitingLink {
    /// That the network limits the link no longer, as text. `limited`: part of the last seconds in
    /// which it did, 0 to 1; `None` if it is not known.
    #[must_use]
    pub fn ended(&self, limited: Option<f64>) -> String {
        let (megabytes, before) = (self.bytes_per_s / 1e6, 100.0 * self.limited);
        let now = limited.map(|part| format!(", now for {:.0} %", 100.0 * part));
        format!(
            "{self:#} no longer: the network delivered {megabytes:.1} MB/s and was the limit for \
             {before:.0} % of the time{}",
            now.unwrap_or_default()
        )
    }
}

/// What it limits; the alternate form leaves its speed out.
impl fmt::Display for LimitingLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let on = |host: &Option<String>| host.iter().map(|host| format!(" on {host}")).collect();
        let [from_host, to_host]: [String; 2] = [on(&self.from_host), on(&self.to_host)];
        if let Some(host) = &self.host {
            write!(f, "the links of host {host} limit the steps")?;
        } else {
            let Self { from, to, .. } = self;
            write!(f, "the link from worker {from}{from_host} to worker {to}{to_host} limits ")?;
            write!(f, "the steps")?;
        }
        if f.alternate() {
            return Ok(());
        }
        write!(f, ": the network delivers {:.1} MB/s", self.bytes_per_s / 1e6)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_is_named_by_its_ends_and_several_links_by_their_host() {
        let mut link = LimitingLink {
            from: WorkerId(3),
            from_host: Some("b".into()),
            to: WorkerId(4),
            to_host: None,
            host: None,
            limited: 0.75,
            bytes_per_s: 12_340_000.0,
        };
        let expected = "the link from worker 3 on b to worker 4 limits the steps: the network \
                        delivers 12.3 MB/s";
        assert_eq!(link.to_string(), expected);
        let expected = "the link from worker 3 on b to worker 4 limits the steps no longer: the \
                        network delivered 12.3 MB/s and was the limit for 75 % of the time, now \
                        for 3 %";
        assert_eq!(link.ended(Some(0.031)), expected);
        link.host = Some("b".into());
        let expected = "the links of host b limit the steps: the network delivers 12.3 MB/s";
        assert_eq!(link.to_string(), expected);
    }
}
